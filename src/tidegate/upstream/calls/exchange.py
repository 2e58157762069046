"""One call at one deployment that is no plain call: it needs a permit, another shape, or a stream.

A permit is taken and the call is sent under it. However the call ends, one table for all traffic
settles its usage. This module neither chooses a deployment nor judges one.

A streamed answer is an `UpstreamResponse`. It is closed once, in any case: at its end, by its
reader, or after a failure. Only then are its slots and its permit given back and its usage settled.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable
from typing import TypeVar

import msgspec
import structlog

from tidegate.core.answers import answer as answers
from tidegate.core.answers.redaction import EventRedactor
from tidegate.core.answers.stream_options import UsageChunkFilter
from tidegate.core.answers.stream_usage import UsageReader
from tidegate.core.deployments import Estimate
from tidegate.core.errors import BrokenAnswer, UpstreamError, Withheld
from tidegate.core.nouns import Answer
from tidegate.core.ports import Clock
from tidegate.upstream.budgets.budget_client import FREE, UNBOUND, BudgetClient
from tidegate.upstream.budgets.call_receipt import CallEnd, CallReceipt, end_of_failed
from tidegate.upstream.budgets.token_estimator import WHOLE_BUDGET, TokenEstimator
from tidegate.upstream.calls.admission import Admission, Admissions, Feedback
from tidegate.upstream.calls.traffic import Traffic
from tidegate.upstream.calls.translation import ItemTranslation, Shaped, as_form, beta_header, is_translated
from tidegate.upstream.http import classify
from tidegate.upstream.http.transport import PermitExpired, SendPermit, Stream, UpstreamRequest
from tidegate.upstream.routing.key_slots import TakenKeySlots
from tidegate.upstream.routing.routes import NameRoute
from tidegate.upstream.routing.usage_asking import UsageAsking, names_the_option

log = structlog.get_logger(__name__)

# A connection that takes longer than a permit lives is kept, so the second permit is nearly always
# enough.
PERMITS_MAX = 4
PERMIT_EXPIRED_MS = 1_000
EVENT_STREAM = "text/event-stream"


class ReaderLeft(Exception):
    """The reader does not want the rest of an answer."""


class UpstreamResponse:
    """The answer to a streamed request while it comes, read and closed by the task that opened it.

    `first` is the part that has come already.
    """

    __slots__ = (
        "_admission",
        "_admissions",
        "_ended",
        "_filter",
        "_first",
        "_key_slots",
        "_receipt",
        "_redactor",
        "_stream",
        "_usage",
        "deployment",
        "headers",
        "status"
    )  # fmt: skip

    def __init__(
        self,
        admissions: Admissions,
        admission: Admission,
        stream: Stream,
        receipt: CallReceipt,
        *,
        first: bytes,
        hides_usage: bool,
    ) -> None:
        self.status = stream.status
        self.headers = stream.headers
        self.deployment = admission.state.deployment
        self._stream = stream
        self._receipt = receipt
        self._first = first
        self._usage = UsageReader()
        self._filter = UsageChunkFilter() if hides_usage else None
        self._redactor = EventRedactor(admission.state.key_redactor)
        self._admissions = admissions
        # None once the call has ended.
        self._admission: Admission | None = admission
        self._key_slots: TakenKeySlots | None = None
        self._ended: Callable[[BaseException | None], None] | None = None

    def keep(self, slots: TakenKeySlots) -> None:
        """Hold these slots until the call has ended."""
        self._key_slots = slots

    def when_ended(self, report: Callable[[BaseException | None], None]) -> None:
        """Call `report` once at the stream's end: with None, or ReaderLeft if its reader left."""
        self._ended = report

    @property
    def bytes_max(self) -> int:
        """Return the most bytes of an answer that may be kept in memory at once."""
        return self._stream.bytes_max

    async def read(self) -> bytes:
        """Return the upstream's next lines without our key and account; empty at the end.

        Raise one UpstreamError if the stream breaks off.
        """
        while chunk := await self._read():
            if self._filter is not None:
                chunk = self._filter.feed(chunk)
            if shown := self._redactor.feed(chunk):
                return shown
        if self._filter is not None and (rest := self._redactor.feed(self._filter.end_stream())):
            return rest
        return self._redactor.end_stream()

    async def _read(self) -> bytes:
        if self._first:
            chunk, self._first = self._first, b""
        else:
            try:
                chunk = await self._stream.read()
            except UpstreamError as error:
                broken: UpstreamError | None = error
            else:
                broken = None
            if broken is not None:
                raise self._finish(broken, came_whole=False) or broken
        if chunk:
            self._usage.feed(chunk)
        else:
            self._finish(None, came_whole=True)
        return chunk

    def pause_timeout(self) -> None:
        """Stop the read time-out during a wait for the client."""
        self._stream.pause_timeout()

    def resume_timeout(self) -> None:
        self._stream.resume_timeout()

    def was_cut(self) -> bool:
        """Return whether this call was given up because the client did not read for too long.

        Ask once, after a cancellation.
        """
        return self._stream.was_cut()

    def close(self) -> None:
        """Close the connection at once, without the rest; this is no failure of the deployment."""
        self._finish(None, came_whole=False)

    def _finish(self, error: UpstreamError | None, *, came_whole: bool) -> UpstreamError | None:
        admission, self._admission = self._admission, None
        if admission is None:
            return None
        self._stream.close()
        if self._first:
            # The first part arrived, though the reader did not take it.
            self._usage.feed(self._first)
        self._usage.end_stream()
        self._receipt.settle_answer(self._usage.usage, self._usage.uncounted_bytes)
        if self._key_slots is not None:
            self._key_slots.release_key_slots()
        if self._ended is not None:
            self._ended(error if error is not None or came_whole else ReaderLeft())
        return self._admissions.end_call(admission, error, answer_tokens=0 if came_whole else None)


T = TypeVar("T")
# Sends a call once, under a permit.
Go = Callable[[Admission, Shaped, float, SendPermit, CallReceipt], Awaitable[T]]


class Exchange:
    def __init__(
        self,
        budget_client: BudgetClient,
        estimator: TokenEstimator,
        admissions: Admissions,
        feedback: Feedback,
        clock: Clock,
        patience_ms: float,
    ) -> None:
        self._budgets = budget_client
        self._estimator = estimator
        self._admissions = admissions
        self._feedback = feedback
        self._clock = clock
        self._patience_ms = patience_ms
        self._usage = UsageAsking()

    async def send_item(self, route: NameRoute, admission: Admission, total_s: float) -> Answer:
        """Send an item's call that is not plain, and read its whole answer."""
        call, state = admission.call, admission.state
        engine = state.deployment.engine
        if not is_translated(call.endpoint, engine):
            body = state.priority_hints.body(route.body(state, call.body))
            shaped = Shaped(call.endpoint, body, beta_header(call.betas, engine))
            if call.audio is not None:
                shaped = as_form(shaped, call.audio, state.deployment, call.idempotency_key)
            return await self._under_permit(route, admission, shaped, total_s, self._send_once)
        translation = ItemTranslation(call.endpoint, call.body, engine, self._clock.now_ms() // 1000)
        translated = translation.shaped
        shaped = translated._replace(body=state.priority_hints.body(route.body(state, translated.body)))
        try:
            found = await self._under_permit(route, admission, shaped, total_s, self._send_once)
        except UpstreamError as error:
            translation.failed(error)
            raise
        return msgspec.structs.replace(found, body=translation.answer(found.body))

    async def open(
        self, route: NameRoute, admission: Admission, shaped: Shaped, total_s: float
    ) -> Answer | UpstreamResponse:
        """Send an interactive call, and ask for a stream's usage unless the server refuses that."""
        state, traffic = admission.state, admission.traffic
        assert traffic is not None
        body = route.body(state, shaped.body)
        if body is not shaped.body:
            shaped = shaped._replace(body=body)
        asking = None
        if traffic.is_stream:
            asking = self._usage.request(
                state, shaped.endpoint, shaped.body, is_translated=shaped.endpoint != admission.call.endpoint
            )
        if asking is None:
            return await self._under_permit(route, admission, shaped, total_s, self._open_once)
        if self._usage.takes(state) is not False:
            wanted = shaped._replace(body=asking.body, hides_usage=asking.is_extra)
            try:
                response = await self._under_permit(route, admission, wanted, total_s, self._open_once)
            except UpstreamError as error:
                if not self._usage.may_be_refused_for(state, error):
                    raise
            else:
                self._usage.learn(state, takes=True)
                return response
        plain = asking.plain()
        if plain is not None:
            shaped = shaped._replace(body=plain)
        response = await self._under_permit(route, admission, shaped, total_s, self._open_once)
        if self._usage.takes(state) is not False:
            self._usage.learn(state, takes=False)
            log.info("stream_usage_refused", deployment=state.deployment.name)
        return response

    # Under a permit.

    async def _under_permit(
        self, route: NameRoute, admission: Admission, shaped: Shaped, total_s: float, go: Go[T]
    ) -> T:
        """Take a permit, send the call under it and settle it.

        If a permit expires before a byte was written, take the next one.
        """
        call, state, traffic = admission.call, admission.state, admission.traffic
        deployment, is_item = state.deployment, traffic is None
        budgets = route.budgets(state) + call.budgets
        terms = self._budgets.terms(budgets) if budgets else UNBOUND
        is_weighed = bool(is_item and state.tokens_max)
        tokens = self._estimator.tokens(call, deployment.estimate) if terms.counts_tokens or is_weighed else 0
        is_bound = deployment.estimate is Estimate.BOUND and tokens != WHOLE_BUDGET
        nano = self._estimator.nano(call, deployment, batch=is_item) if terms.counts_money else FREE
        # A user does not wait until a budget renews.
        give_up_ms = call.deadline_ms if is_item else self._clock.monotonic_ms() + self._patience_ms
        weighed = tokens if is_item else 0
        if weighed:
            state.add_tokens(weighed)
        try:
            for _ in range(PERMITS_MAX):
                if terms.budgets:
                    permit = await self._budgets.reserve_permit(
                        terms, tokens, is_bound=is_bound, cost=nano, give_up_ms=give_up_ms
                    )
                else:
                    permit = SendPermit(self._clock, (), "", 0, math.inf)
                on_usage = None if traffic is None else traffic.on_usage
                receipt = CallReceipt(
                    self._budgets, self._estimator, call, permit, deployment, is_batch=is_item, on_usage=on_usage
                )
                try:
                    self._look_again(admission, permit, tokens)
                    admission.go_out(tokens)
                    return await go(admission, shaped, total_s, permit, receipt)
                except PermitExpired:
                    # The request was not written, and the slow connection is there now.
                    receipt.settle_failed(CallEnd.NOT_SENT)
                except BaseException as wrong:
                    _settle_failed(receipt, admission, permit, wrong)
                    raise
        finally:
            if weighed:
                state.add_tokens(-weighed)
        until_ms = self._clock.monotonic_ms() + PERMIT_EXPIRED_MS
        raise Withheld(
            "every permit to send ran out before a connection was there", until_ms=until_ms, code="permit_expired"
        )

    def _look_again(self, admission: Admission, permit: SendPermit, tokens: int) -> None:
        """Refuse to begin a call that may no longer begin after its wait for a permit.

        The lease or the job's window may be over, the slot may belong to another process, the job
        may be paused or closing, and the deployment may have asked for a rest or reported that too
        little is left.
        """
        call, state = admission.call, admission.state
        now_ms = self._clock.monotonic_ms()
        if state.quota is not None and (opens_at_ms := state.quota.opens_at_ms(tokens)) > now_ms:
            raise Withheld("the deployment reported its limits used up", until_ms=opens_at_ms, code="upstream_rests")
        if state.rests_until_ms > now_ms:
            until_ms = min(state.rests_until_ms, state.rest_ends_ms(now_ms))
            raise Withheld("the deployment asked for a rest, or is drained", until_ms=until_ms, code="upstream_rests")
        if now_ms >= admission.begin_by_ms or not (call.may_begin is None or call.may_begin()):
            raise Withheld("the lease may be over before the call was sent", until_ms=now_ms, code="lease_over")
        if now_ms >= call.deadline_ms:
            raise Withheld("the call's deadline passed before it was sent", until_ms=now_ms, code="deadline_passed")
        permit.expire_by(min(admission.begin_by_ms, call.deadline_ms), call.may_begin)

    async def _send_once(
        self, admission: Admission, shaped: Shaped, total_s: float, permit: SendPermit, receipt: CallReceipt
    ) -> Answer:
        call, state = admission.call, admission.state
        hints = state.priority_hints
        hint_headers = b"" if hints.is_silent else hints.headers(call, call.deadline_ms - self._clock.monotonic_ms())
        headers = shaped.headers + hint_headers + call.trace_header
        request = UpstreamRequest(
            state.url(shaped.endpoint), call.idempotency_key, shaped.body, headers, call.attempt_count
        )
        reply = await state.client.post(request, total_s, permit)
        answer = self._feedback.read_reply(admission, shaped.endpoint, reply)
        used = receipt.settle_whole(answer.usage, answer.body)
        return answer if used is answer.usage else msgspec.structs.replace(answer, priced=used)

    async def _open_once(
        self, admission: Admission, shaped: Shaped, total_s: float, permit: SendPermit, receipt: CallReceipt
    ) -> Answer | UpstreamResponse:
        call, state, traffic = admission.call, admission.state, admission.traffic
        client = state.streaming_client
        assert client is not None
        assert traffic is not None
        headers = shaped.headers + call.trace_header
        request = UpstreamRequest(state.url(shaped.endpoint), call.idempotency_key, shaped.body, headers)
        stream = await client.open(request, total_s, permit, interactive=not traffic.flex_wait_s)
        try:
            return await self._read_answer(admission, traffic, shaped, stream, receipt)
        except BaseException:
            stream.close()
            raise

    async def _read_answer(
        self, admission: Admission, traffic: Traffic, shaped: Shaped, stream: Stream, receipt: CallReceipt
    ) -> Answer | UpstreamResponse:
        """Return a stream from its first byte on, or a whole answer if it is not streamed."""
        headers = stream.headers
        self._feedback.note_limits(admission, headers)
        is_good = 200 <= stream.status <= 299
        if is_good and traffic.is_stream and headers.get("Content-Type", "").startswith(EVENT_STREAM):
            first = await stream.read()
            if not first:
                raise BrokenAnswer("the upstream's stream ended before it began", status=stream.status)
            self._admissions.first_token(admission)
            return UpstreamResponse(
                self._admissions, admission, stream, receipt, first=first, hides_usage=shaped.hides_usage
            )
        self._admissions.expect_first_token(admission)
        body = await stream.read_whole()
        if not is_good:
            raise classify.refusal(stream.status, headers, body, self._clock.now_ms())
        failed = None
        try:
            _, usage = answers.read(shaped.endpoint, body)
        except answers.NotAnAnswer as wrong:
            failed = classify.no_answer(wrong, stream.status, b"")
        if failed is not None:
            raise failed
        used = receipt.settle_whole(usage, body)
        self._admissions.end_call(admission, answer_tokens=usage.output_tokens)
        return Answer(stream.status, body, used, admission.state.deployment.name, priced=used)


def _settle_failed(receipt: CallReceipt, admission: Admission, permit: SendPermit, wrong: BaseException) -> None:
    end = CallEnd.REFUSED if permit.begun and names_the_option(wrong) else end_of_failed(permit, wrong)
    flight = admission.flight
    if end is not CallEnd.PERHAPS_DONE:
        receipt.settle_failed(end)
    elif flight is not None and flight.handed_back:
        receipt.settle_taken_back()
    elif admission.traffic is not None and isinstance(wrong, asyncio.CancelledError):
        receipt.settle_left(is_stream=admission.traffic.is_stream)
    else:
        receipt.settle_failed(end)
