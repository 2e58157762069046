"""perform: one item, one upstream call, one verdict.

This stage records nothing and holds nothing.
"""

import asyncio
import math
import traceback
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import lru_cache, partial
from hashlib import blake2b
from typing import Protocol
from zlib import crc32

import msgspec
import structlog
from msgspec.structs import replace

from tidegate import failpoints, metrics, tracing
from tidegate.core import retry
from tidegate.core.answer_terms import AnswerTerms
from tidegate.core.answers import answer_checks, results
from tidegate.core.answers.answer_text import counted_whole
from tidegate.core.answers.failed_place import with_place
from tidegate.core.audio_file import AudioFile
from tidegate.core.body_rules.caller_fields import FieldFault, FieldRules
from tidegate.core.body_rules.plain_body import read_plain
from tidegate.core.budgets.budget import Budget
from tidegate.core.callback_targets import TARGET_REFUSED, TOO_LARGE
from tidegate.core.errors import Ambiguous, BrokenAnswer, HandedBack, Overspent, Refused, UpstreamError, Withheld
from tidegate.core.hooks import About, Stop
from tidegate.core.ids import item_id
from tidegate.core.nouns import Answer, AnswerTry, Call, Finished, Item, ItemVerdict, LeasedSlice, Usage
from tidegate.core.policy.policy_rules import Denied
from tidegate.core.ports import Clock, Entropy, FileSource, Upstream
from tidegate.core.states import Outcome
from tidegate.core.translate import audio
from tidegate.core.usage.prices import cost
from tidegate.core.wording import in_words
from tidegate.guards.closer_look import look_closely
from tidegate.guards.guard import Guard

log = structlog.get_logger()

OK = 200
BAD_REQUEST = 400
SERVER_ERROR = 500
# Each may be as large as 25 MiB.
FETCHED_FILES_MAX = 16
# A host that a tenant names may take a minute for each file: other tenants' items must not wait for
# that.
FETCHES_PER_OWNER_MAX = 4
FETCH_AGAIN_MS = 250
_NO_COST = (0, 0, 0)


class RunningSlice(Protocol):
    """The slice of an item as its worker holds it: when its calls may begin, and their limits."""

    @property
    def slice(self) -> LeasedSlice: ...

    @property
    def deadline_ms(self) -> float: ...

    @property
    def budgets(self) -> tuple[Budget, ...]: ...

    @property
    def is_interactive(self) -> bool:
        """Return whether its items have waited so long that they are sent as interactive calls."""

    def may_begin(self) -> bool:
        """Return whether its calls may still begin: its job may pause or close while they wait."""

    @property
    def parallel(self) -> tuple[tuple[str, int], ...]:
        """Return how many calls may run at once, by the name that they count under."""

    @property
    def models(self) -> frozenset[str]:
        """Return the models that the key allows. An empty set allows any."""


class CallRules(Protocol):
    """The rules for calls of a slice at this moment."""

    def denial(self, leased: LeasedSlice) -> Denied | None:
        """Return why an item may not be sent now; None when it may."""

    def unknown_wait_ms(self, model: str) -> int:
        """Return how long items of a model wait that is unknown here.

        Another process may know it; 0 if none can.
        """

    def begin_by_ms(self, leased: LeasedSlice) -> float:
        """Return the monotonic moment by which a call must begin, or be judged again."""

    def fields(self, leased: LeasedSlice) -> FieldRules:
        """Return what the author of a request may not ask for."""

    def guard(self, leased: LeasedSlice) -> Guard | None:
        """Return the guard that judges requests and answers; None if there is none."""

    def retry(self, leased: LeasedSlice) -> retry.RetryPolicy:
        """Return the policy for retries of a failed item."""


class Again(msgspec.Struct, frozen=True, gc=False):
    """The verdict that an item has no outcome yet and is tried again after a wait.

    - `count`: how many attempts the item has used up by then.
    - `hand_backs`: how often its call was taken back for an interactive one.
    - `tries`: its answers that did not fit, if there is a new one.
    - `rejected_text`: the text of the newest of these.
    """

    wait_ms: int
    count: int
    reason: str
    hand_backs: int = 0
    tries: tuple[AnswerTry, ...] = ()
    rejected_text: str = ""


class _Paid(msgspec.Struct, frozen=True, gc=False):
    """The usage that an answer reported, the usage it is priced by, and its deployment.

    The two usages differ if the answer did not report all of its tokens.
    """

    usage: Usage = Usage()
    priced: Usage = Usage()
    deployment: str = ""


_NOT_PAID = _Paid()


class _ItemEnd(msgspec.Struct, frozen=True, gc=False):
    """The end of an item.

    `paid` of a failure is what was paid for an answer that was rejected. `body` is what the model
    server sent. `problem` says why it did not fit.
    """

    outcome: Outcome
    line: bytes
    paid: _Paid = _NOT_PAID
    body: bytes = b""
    problem: str | None = None
    is_grouped: bool = False
    is_interactive: bool = False


class _InvalidLine(msgspec.Struct):
    """The record that ingest wrote instead of a line that cannot be run."""

    code: str
    message: str
    line: int
    custom_id: str | None = None
    status: int | None = None
    param: str | None = None
    place: str = ""


_CHAT = "/v1/chat/completions"
_invalid = msgspec.json.Decoder(_InvalidLine)


class Performer:
    def __init__(
        self,
        upstream: Upstream,
        clock: Clock,
        entropy: Entropy,
        rules: CallRules,
        grace_ms: int,
        files: FileSource | None = None,
    ) -> None:
        """Create a performer.

        A call that began before its deadline may take `grace_ms` longer than it. `files` fetches
        the files that requests name.
        """
        self._files = files
        self._fetched_files = asyncio.Semaphore(FETCHED_FILES_MAX)
        self._fetches: Counter[str] = Counter()
        self._upstream = upstream
        self._clock = clock
        self._entropy = entropy
        self._rules = rules
        self._grace_ms = grace_ms

    async def perform(self, state: RunningSlice, item: Item) -> ItemVerdict | Again:
        """Run one item. Cancelling this aborts the call."""
        begun_ms = self._clock.monotonic_ms()
        leased = state.slice
        if leased.answers is None or not leased.model:
            ended = await self._end(leased, state, item, item.body)
        else:
            ended = await self._end_checked(leased.answers, state, item)
        if isinstance(ended, Again):
            return ended
        return self._verdict(leased, item, ended, int(self._clock.monotonic_ms() - begun_ms))

    async def _end_checked(self, terms: AnswerTerms, state: RunningSlice, item: Item) -> _ItemEnd | Again:
        """Make the next try of an item whose answer must fit.

        If it does not fit, try again or fail the item.
        """
        leased, body, tries = state.slice, item.body, item.tries
        try:
            check = answer_checks.check_of(terms, body)
        except answer_checks.InvalidSchema as error:
            fault = FieldFault("invalid_schema", f"Answers cannot be checked: {error}.", "response_format")
            return _refused(item_id(leased.job_id, item.number), item, fault)
        if tries and terms.feedback:
            body = answer_checks.with_feedback(leased.endpoint, body, tries[-1].problem or "", item.rejected_text)
        if (model := _model_of(leased, item)) != leased.model:
            leased, body = replace(leased, model=model), answer_checks.for_model(body, model)
        ended = await self._end(leased, state, item, body)
        if isinstance(ended, Again) or ended.outcome is not Outcome.ANSWERED:
            return ended
        problem = check.problem(ended.body)
        if problem is None:
            return ended
        metrics.schema_invalid_answers.inc()
        tries = (*tries, self._paid_try(model, ended, problem))
        if len(tries) <= terms.tries_max or self._may_escalate(terms, state.slice, len(tries)):
            text = answer_checks.rejected_text(ended.body) if terms.feedback else ""
            return Again(0, item.attempt_count, "schema_invalid", item.hand_backs, tries, text)
        message = f"No answer fitted in {in_words(len(tries), 'try', 'tries')}. The last one: {problem}."
        line = results.error_line(leased.job_id, item.number, item.custom_id, "schema_invalid", message)
        return _ItemEnd(Outcome.FAILED, line, ended.paid, ended.body, problem)

    def _may_escalate(self, terms: AnswerTerms, leased: LeasedSlice, tried: int) -> bool:
        """Return whether to ask the stronger model now: once, if known and allowed by the key."""
        if terms.escalate_to is None or tried != terms.tries_max + 1 or not self._upstream.knows(terms.escalate_to):
            return False
        denied = self._rules.denial(replace(leased, model=terms.escalate_to))
        return denied is None or denied.retryable

    async def _end(self, leased: LeasedSlice, state: RunningSlice, item: Item, body: bytes) -> _ItemEnd | Again:
        """Judge the request, send it, and judge the answer.

        Field rules do not apply to a hook's changes.
        """
        rules = self._rules
        if (unsent := self._never_sent(leased, state, item)) is not None:
            return unsent
        name = item_id(leased.job_id, item.number)
        key = f"{name}-{blake2b(item.body, digest_size=8).hexdigest()}"
        if item.tries:
            # A server that remembers keys must not repeat the answer that did not fit.
            key = f"{key}-{len(item.tries)}"
        is_audio = leased.endpoint in audio.AUDIO_ENDPOINTS
        try:
            # The gateway fetches the file of an audio request, so the rules for servers do not
            # apply to its address.
            checked = audio.read_request(body).fields if is_audio else body
        except audio.AudioFault as wrong:
            return _refused(name, item, FieldFault(wrong.code, str(wrong), wrong.param))
        if read_plain(checked) is None and (fault := await look_closely(checked, rules.fields(leased))) is not None:
            return _refused(name, item, fault)
        guard = rules.guard(leased)
        if guard is not None:
            asked_ms = self._clock.monotonic_ms()
            judged = await guard.before(body, lambda: _about(leased, item))
            self._count_preflight(leased, judged, asked_ms)
            if isinstance(judged, Stop):
                return self._stopped(state, item, judged)
            body = judged
            # A hook may have taken long, and the state of the key may have changed meanwhile.
            if (denied := rules.denial(leased)) is not None:
                return self._stopped(state, item, denied)
        if failpoints.ARMED:
            await failpoints.hit("before_send", item.custom_id)
        metrics.item_counts.allowed[leased.endpoint] += 1
        try:
            call = self._call(leased, state, item, body, key)
            is_interactive = state.is_interactive
            send = self._send_with_file if is_audio else self._upstream.send
            if is_interactive:
                send = partial(self._upstream.send_interactive, owner=_slot_owner(leased))
            traces = tracing.ACTIVE
            answer = await (send(call) if traces is None else traces.call(send, call, leased.traceparent))
        except UpstreamError as error:
            return self._after_failure(error, leased, state, item, guard)
        except Exception as error:
            return self._after_failure(_unforeseen(error, leased.job_id, item.number), leased, state, item, guard)
        if failpoints.ARMED:
            await failpoints.hit("after_answer")
        priced = answer.priced or answer.usage
        if answer.priced is None and not (priced.input_tokens and priced.output_tokens):
            # The recorded tokens are those of the answer. The cost is counted as budgets count it.
            priced = counted_whole(call, priced, answer.body)
        kept: bytes | Stop = answer.body
        if guard is not None:
            kept = await guard.after(answer.body, lambda: _about(leased, item))
        if isinstance(kept, Stop):
            return self._stopped(state, item, kept, _Paid(answer.usage, priced, answer.deployment))
        line = results.response_line(name, item.custom_id, answer.status, kept)
        return _ItemEnd(
            Outcome.ANSWERED,
            line,
            _Paid(answer.usage, priced, answer.deployment),
            body=kept,
            is_grouped=answer.is_grouped,
            is_interactive=is_interactive,
        )

    def _call(self, leased: LeasedSlice, state: RunningSlice, item: Item, body: bytes, key: str) -> Call:
        return Call(
            leased.job_id,
            item.number,
            leased.endpoint,
            leased.model,
            body,
            key,
            state.deadline_ms,
            item.attempt_count,
            self._grace_ms,
            self._rules.begin_by_ms(leased),
            state.budgets,
            share_owner=leased.share_owner,
            prefix_salt=_salt(leased.share_owner),
            prefix_bytes=item.prefix_bytes,
            hand_backs=item.hand_backs,
            parallel=state.parallel,
            models=state.models,
            betas=leased.betas,
            may_begin=state.may_begin,
        )

    async def _send_with_file(self, call: Call) -> Answer:
        """Send a request together with the file that it names.

        Few fetched files are held at once, each until its call ends.
        """
        try:
            request = audio.read_request(call.body)
            if request.holds_file:
                return await self._upstream.send(_with_file(call, request, audio.file_in(request.file_url)))
            async with self._open_file(call.share_owner, request.file_url) as file:
                return await self._upstream.send(_with_file(call, request, file))
        except audio.AudioFault as wrong:
            body = results.refused_body(str(wrong), wrong.code, f"body.{wrong.param}" if wrong.param else "body")
            refused = Refused(str(wrong), status=BAD_REQUEST, body=body, code=wrong.code)
        raise refused

    @asynccontextmanager
    async def _open_file(self, owner: str, url: str) -> AsyncIterator[AudioFile]:
        """Fetch a file and hold it.

        Raise Withheld while this owner has as many fetches as it may.
        """
        if self._fetches[owner] >= FETCHES_PER_OWNER_MAX:
            until_ms = self._clock.monotonic_ms() + FETCH_AGAIN_MS
            message = f"{FETCHES_PER_OWNER_MAX} files of the same owner are being fetched"
            raise Withheld(message, until_ms=until_ms, retry_after_ms=FETCH_AGAIN_MS, code="files_being_fetched")
        async with AsyncExitStack() as kept_until_sent:
            self._fetches[owner] += 1
            try:
                await kept_until_sent.enter_async_context(self._fetched_files)
                file = await self._fetched(owner, url)
            finally:
                self._fetches[owner] -= 1
                if not self._fetches[owner]:
                    del self._fetches[owner]
            yield file

    async def _fetched(self, owner: str, url: str) -> AudioFile:
        """Return the file at an address.

        Raise AudioFault if it can never be read, Ambiguous if it may be later.
        """
        if self._files is None:
            raise audio.AudioFault("invalid_file_url", "Files are not fetched here: send a data: URL.", "file_url")
        found = await self._files.fetch(url, audio.FILE_BYTES_MAX, owner=owner)
        if found.failure == TOO_LARGE:
            raise audio.too_large()
        if found.failure == TARGET_REFUSED:
            message = (
                "The address in file_url may not be read from here: it must be https and lead to a public address."
            )
            raise audio.AudioFault("invalid_file_url", message, "file_url")
        if found.failure or found.status >= SERVER_ERROR or found.status in (408, 429):
            why = found.failure or f"status {found.status}"
            raise Ambiguous(f"the file at file_url could not be read ({why})", code="file_url_unreadable")
        if found.status != OK:
            raise audio.AudioFault(
                "invalid_file_url", f"The file at file_url was refused with status {found.status}.", "file_url"
            )
        return audio.file_from(url, found.media_type, found.data)

    def _never_sent(self, leased: LeasedSlice, state: RunningSlice, item: Item) -> _ItemEnd | Again | None:
        """Return why this item is not sent; None if this process knows no reason."""
        if not leased.model:
            return _invalid_line(leased.job_id, item)
        if item.alone_losses >= retry.ALONE_LOSSES_MAX:
            message = (
                f"{item.alone_losses} workers were lost while each ran only this request, and other requests that were run in the "
                "same way survived, so it was given up."
            )
            return _failed(leased, item, "worker_lost", message)
        if leased.key_id is not None and (denied := self._rules.denial(leased)) is not None:
            return self._stopped(state, item, denied)
        if not self._upstream.knows(leased.model):
            if wait_ms := self._rules.unknown_wait_ms(leased.model):
                return Again(wait_ms, item.attempt_count, Withheld.reason, item.hand_backs)
            message = (
                f"No deployment serves the model {leased.model!r} to batches here. Check its name against GET /v1/models; a model may "
                "be served to interactive calls only."
            )
            return _failed(leased, item, "model_not_found", message)
        return None

    def _stopped(
        self, state: RunningSlice, item: Item, why: Denied | Stop, paid: _Paid = _NOT_PAID
    ) -> _ItemEnd | Again:
        """Return the end of an item that policy stops.

        A stop for good fails the item. Any other only lets it wait, at most until the job's window
        ends.
        """
        if why.retryable:
            metrics.policy_waits.of(metrics.endpoint_of(state.slice.endpoint), why.code).inc()
            left_ms = max(0, math.ceil(state.deadline_ms - self._clock.monotonic_ms()))
            return Again(min(why.wait_ms, left_ms), item.attempt_count, why.code, item.hand_backs)
        metrics.policy_refusals.of(metrics.endpoint_of(state.slice.endpoint), why.code).inc()
        return _failed(state.slice, item, why.code, why.message, paid)

    def _after_failure(
        self, error: UpstreamError, leased: LeasedSlice, state: RunningSlice, item: Item, guard: Guard | None
    ) -> _ItemEnd | Again:
        deadline_ms = math.ceil(state.deadline_ms)
        now_ms = int(self._clock.monotonic_ms())
        policy, chance = self._rules.retry(leased), self._entropy.uniform(0.0, 1.0)
        verdict = retry.decide(error, item.attempt_count, now_ms, deadline_ms, policy, chance)
        hand_backs = item.hand_backs + isinstance(error, HandedBack)
        if isinstance(verdict, retry.RetryAt):
            metrics.retry_delay_seconds.of(error.reason).observe((verdict.at_ms - now_ms) / 1000)
            return Again(verdict.at_ms - now_ms, item.attempt_count + int(verdict.counts), error.reason, hand_backs)
        if verdict.code == "batch_expired":
            return Again(0, item.attempt_count, error.reason, hand_backs)
        if isinstance(error, Overspent):
            metrics.policy_refusals.of(metrics.endpoint_of(leased.endpoint), error.code).inc()
            return _failed(leased, item, error.code, _sentence(error.message))
        if isinstance(error, Refused) or 400 <= error.status <= 599:
            body = results.http_error_body(error.status, error.body, error.message, error.code)
            name = item_id(leased.job_id, item.number)
            return _ItemEnd(Outcome.FAILED, results.response_line(name, item.custom_id, error.status, body))
        line = results.error_line(leased.job_id, item.number, item.custom_id, verdict.code, verdict.message)
        # What is no answer cannot be judged, but it may hold a model's text.
        is_shown = isinstance(error, BrokenAnswer) and (guard is None or not guard.judges_answers)
        return _ItemEnd(Outcome.FAILED, line, body=error.body if is_shown else b"")

    def _count_preflight(self, leased: LeasedSlice, judged: bytes | Stop, asked_ms: float) -> None:
        status = "allowed" if not isinstance(judged, Stop) else "retryable" if judged.retryable else "rejected"
        took_s = (self._clock.monotonic_ms() - asked_ms) / 1000
        metrics.preflight_seconds.of(metrics.endpoint_of(leased.endpoint), status).observe(took_s)

    def _verdict(self, leased: LeasedSlice, item: Item, ended: _ItemEnd, took_ms: int) -> ItemVerdict:
        _count(leased, ended, took_ms / 1000)
        usage, tries, members = ended.paid.usage, item.tries, []
        paid_nano = self._cost(ended)
        if ended.outcome is Outcome.FAILED and ended.body:
            members.append(results.raw_member(ended.body))
        if tries or ended.problem:
            if ended.paid.deployment:
                tries = (*tries, self._paid_try(_model_of(leased, item), ended, ended.problem))
            usage = Usage.total(one.usage for one in tries)
            paid_nano = _sum_costs(tries)
            members.append(results.tries_member(tries))
        if paid_nano is not None:
            members.append(results.cost_members(paid_nano))
        if ended.is_interactive:
            members.append(results.INTERACTIVE_MEMBER)
        line = results.with_members(ended.line, members) if members else ended.line
        finished = Finished(
            item.number, ended.outcome, len(line), leased.first, leased.token, usage, 0, leased.model, leased.item_units,
            ended.paid.deployment, paid_nano or _NO_COST, crc32(line), took_ms, tries, ended.problem is not None,
        )  # fmt: skip
        return ItemVerdict(leased.job_id, item.number, line, finished)

    def _cost(self, ended: _ItemEnd) -> tuple[int, int, int] | None:
        """Return what an answer cost; None if its deployment has no price."""
        price = self._upstream.price_of(ended.paid.deployment) if ended.paid.deployment else None
        if price is None:
            return None
        paid = cost(ended.paid.priced, price, batch=not ended.is_interactive)
        return paid.input_nano, paid.cached_nano, paid.output_nano

    def _paid_try(self, model: str, ended: _ItemEnd, problem: str | None) -> AnswerTry:
        return AnswerTry(model, ended.paid.deployment, ended.paid.usage, self._cost(ended) or _NO_COST, problem)


def _model_of(leased: LeasedSlice, item: Item) -> str:
    """Return the model of an item's next try: the stronger one after all other tries."""
    terms = leased.answers
    if terms is None or terms.escalate_to is None or len(item.tries) <= terms.tries_max:
        return leased.model
    return terms.escalate_to


def _sum_costs(tries: tuple[AnswerTry, ...]) -> tuple[int, int, int] | None:
    """Return what answers cost together; None if none of them has a price."""
    sums = [sum(parts) for parts in zip(*(one.cost_nano for one in tries), strict=True)]
    return (sums[0], sums[1], sums[2]) if any(sums) else None


def _with_file(call: Call, request: audio.AudioRequest, file: AudioFile) -> Call:
    return msgspec.structs.replace(call, body=request.fields, audio=file)


def _count(leased: LeasedSlice, ended: _ItemEnd, took_s: float) -> None:
    mode = "" if leased.endpoint != _CHAT else "sync_microbatch" if ended.is_grouped else "concurrent"
    usage = ended.paid.usage if ended.outcome is Outcome.ANSWERED else None
    noted = metrics.item_counts.ended
    noted.append((leased.model, mode, took_s, usage))
    if len(noted) >= metrics.ENDED_MAX:
        metrics.item_counts.count_ended()


def _failed(leased: LeasedSlice, item: Item, code: str, message: str, paid: _Paid = _NOT_PAID) -> _ItemEnd:
    line = results.error_line(leased.job_id, item.number, item.custom_id, code, message)
    return _ItemEnd(Outcome.FAILED, line, paid)


def _invalid_line(job_id: str, item: Item) -> _ItemEnd:
    """Fail a line that cannot be run, with what ingest found wrong with it."""
    wrong = _invalid.decode(item.body)
    message, custom_id = (
        with_place(wrong.message, wrong.place or f"line {wrong.line}"),
        msgspec.json.encode(wrong.custom_id),
    )
    if wrong.status is None:
        return _ItemEnd(Outcome.FAILED, results.error_line(job_id, item.number, custom_id, wrong.code, message))
    body = results.refused_body(message, wrong.code, wrong.param)
    name = item_id(job_id, item.number)
    return _ItemEnd(Outcome.FAILED, results.response_line(name, custom_id, wrong.status, body))


def _refused(name: str, item: Item, fault: FieldFault) -> _ItemEnd:
    """Refuse a request in the form of a model server's answer."""
    param = f"body.{fault.param}" if fault.param else "body"
    body = results.refused_body(fault.message, fault.code, param)
    return _ItemEnd(Outcome.FAILED, results.response_line(name, item.custom_id, BAD_REQUEST, body))


def _about(leased: LeasedSlice, item: Item) -> About:
    return About(
        leased.endpoint,
        leased.model,
        leased.tenant,
        leased.key_id or "",
        leased.user or "",
        leased.job_id,
        msgspec.json.decode(item.custom_id, type=str),
    )


def _slot_owner(leased: LeasedSlice) -> str:
    """Return the owner of the slots of an interactive call.

    Without keys there is one tenant, so none is needed.
    """
    return leased.tenant_id if leased.key_id is not None else ""


@lru_cache(maxsize=1024)
def _salt(share_owner: str) -> bytes:
    """Return the salt of a share owner's prefixes: only calls of the same owner share a prefix."""
    return blake2b(share_owner.encode(), digest_size=16).digest()


def _unforeseen(error: Exception, job_id: str, number: int) -> UpstreamError:
    """Return an unexpected exception as a try that may have been billed, so the worker goes on.

    Its message may hold a caller's text, so the log gets only its kind and its place.
    """
    place = traceback.extract_tb(error.__traceback__)[-1]
    kind = type(error).__name__
    log.error("item_call_crashed", job=job_id, item=number, kind=kind, place=f"{place.filename}:{place.lineno}")
    return Ambiguous(
        f"The call broke off inside the gateway ({kind}); the operator's log has more.", code="internal_error"
    )


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:] + "."
