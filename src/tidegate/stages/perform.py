"""perform: one item, one upstream call, one verdict. It records nothing and holds nothing."""

import traceback
from collections.abc import Callable
from functools import lru_cache
from hashlib import blake2b

import msgspec
import structlog

from tidegate import failpoints, metrics
from tidegate.core import retry
from tidegate.core.answers import results
from tidegate.core.body_rules.caller_fields import STRICT, FieldFault, FieldRules
from tidegate.core.body_rules.plain_body import read_plain
from tidegate.core.budgets.budget import Budget
from tidegate.core.errors import Ambiguous, BrokenAnswer, HandedBack, Overspent, Refused, UpstreamError
from tidegate.core.hooks import About, Stop
from tidegate.core.ids import item_id
from tidegate.core.nouns import Answer, Call, Item, LeasedSlice, Usage
from tidegate.core.policy.policy_rules import Denied
from tidegate.core.ports import Clock, Entropy, Upstream
from tidegate.guards.closer_look import look_closely
from tidegate.guards.guard import Guard

log = structlog.get_logger()

BAD_REQUEST = 400


class Answered(msgspec.Struct, frozen=True, gc=False):
    line: bytes
    usage: Usage
    deployment: str = ""


class Failed(msgspec.Struct, frozen=True, gc=False):
    """`usage` is what was paid for an answer that policy did not let pass."""

    line: bytes
    reason: str
    usage: Usage = Usage()
    deployment: str = ""


class Again(msgspec.Struct, frozen=True, gc=False):
    """Not now: try again after this wait. `count` is how many attempts the item has used up by then, and `hand_backs` how often its call
    was taken back for an interactive one."""

    wait_ms: int
    count: int
    reason: str
    hand_backs: int = 0


class _InvalidLine(msgspec.Struct):
    """What ingest wrote in the place of a line that cannot be run."""

    code: str
    message: str
    line: int
    custom_id: str | None = None
    status: int | None = None
    param: str | None = None


_invalid = msgspec.json.Decoder(_InvalidLine)


async def perform(
    upstream: Upstream,
    clock: Clock,
    entropy: Entropy,
    policy: retry.RetryPolicy,
    leased: LeasedSlice,
    deadline_ms: float,
    item: Item,
    grace_ms: int,
    begin_by_ms: Callable[[LeasedSlice], float],
    budgets: tuple[Budget, ...] = (),
    denial: Callable[[LeasedSlice], Denied | None] = lambda leased: None,
    guard: Guard | None = None,
    parallel: tuple[tuple[str, int], ...] = (),
    models: frozenset[str] = frozenset(),
    fields: FieldRules = STRICT,
) -> Answered | Failed | Again:
    """Run one item. Cancelling this aborts the call; one that began before the deadline may take the grace longer, and none begins
    when the lease may be over. `denial` says whether its key still allows it, `fields` what its author may not ask for (what a hook adds
    afterwards is the operator's own), and `guard` judges what is sent and what came back."""
    if (unsent := _never_sent(upstream, clock, leased, deadline_ms, item, denial)) is not None:
        return unsent
    job_id, number, body = leased.job_id, item.number, item.body
    name = item_id(job_id, number)
    key = f"{name}-{blake2b(body, digest_size=8).hexdigest()}"
    if read_plain(body) is None and (fault := await look_closely(body, fields)) is not None:
        return _refused(job_id, item, fault)
    if guard is not None:
        said = await guard.before(body, lambda: _about(leased, item))
        if isinstance(said, Stop):
            return _stopped(clock, leased, deadline_ms, item, said)
        body = said
        # A hook may have taken its time, and a key's state is not believed for long.
        if (denied := denial(leased)) is not None:
            return _stopped(clock, leased, deadline_ms, item, denied)
    if failpoints.ARMED:
        await failpoints.hit("before_send", item.custom_id)
    try:
        answer = await upstream.send(
            Call(
                job_id,
                number,
                leased.endpoint,
                leased.model,
                body,
                key,
                deadline_ms,
                item.attempt_count,
                grace_ms,
                begin_by_ms(leased),
                budgets,
                share_owner=leased.share_owner,
                prefix_salt=_salt(leased.share_owner),
                hand_backs=item.hand_backs,
                parallel=parallel,
                models=models,
            )
        )
    except UpstreamError as error:
        return _after_failure(error, clock, entropy, policy, leased, deadline_ms, item)
    except Exception as error:
        return _after_failure(_unforeseen(error, job_id, number), clock, entropy, policy, leased, deadline_ms, item)
    if failpoints.ARMED:
        await failpoints.hit("after_answer")
    kept: bytes | Stop = answer.body
    if guard is not None:
        kept = await guard.after(answer.body, lambda: _about(leased, item))
    if isinstance(kept, Stop):
        return _stopped(clock, leased, deadline_ms, item, kept, answer)
    return Answered(results.response_line(name, item.custom_id, answer.status, kept), answer.usage, answer.deployment)


def _never_sent(
    upstream: Upstream,
    clock: Clock,
    leased: LeasedSlice,
    deadline_ms: float,
    item: Item,
    denial: Callable[[LeasedSlice], Denied | None],
) -> Failed | Again | None:
    """Why this item is not sent, as far as that can be known without asking anyone."""
    job_id, number = leased.job_id, item.number
    if not leased.model:
        wrong = _invalid.decode(item.body)
        message, custom_id = f"{wrong.message} (line {wrong.line})", msgspec.json.encode(wrong.custom_id)
        if wrong.status is None:
            return Failed(results.error_line(job_id, number, custom_id, wrong.code, message), wrong.code)
        body = results.refused_body(message, wrong.code, wrong.param)
        return Failed(results.response_line(item_id(job_id, number), custom_id, wrong.status, body), wrong.code)
    if item.alone_losses >= retry.ALONE_LOSSES_MAX:
        message = (
            f"{item.alone_losses} workers were lost while each ran only this request, and other requests that were run in the same "
            "way survived, so it was given up."
        )
        return Failed(results.error_line(job_id, number, item.custom_id, "worker_lost", message), "worker_lost")
    if (denied := denial(leased)) is not None:
        return _stopped(clock, leased, deadline_ms, item, denied)
    if not upstream.knows(leased.model):
        message = (
            f"No deployment serves the model {leased.model!r} to batches here. Check its name against GET /v1/models; a model may be "
            "served to interactive calls only."
        )
        return Failed(results.error_line(job_id, number, item.custom_id, "model_not_found", message), "model_not_found")
    return None


def _refused(job_id: str, item: Item, fault: FieldFault) -> Failed:
    """The request is one that we refuse in the model server's place, as an answer to this item alone."""
    param = f"body.{fault.param}" if fault.param else "body"
    body = results.refused_body(fault.message, fault.code, param)
    return Failed(results.response_line(item_id(job_id, item.number), item.custom_id, BAD_REQUEST, body), fault.code)


def _stopped(
    clock: Clock, leased: LeasedSlice, deadline_ms: float, item: Item, why: Denied | Stop, paid: Answer | None = None
) -> Failed | Again:
    """Policy lets this item not pass: for good, or for a while that says nothing about the item and ends with the job's window."""
    if why.retryable:
        metrics.policy_waits.of(why.code).inc()
        left_ms = max(0, int(deadline_ms - clock.monotonic_ms()))
        return Again(min(why.wait_ms, left_ms), item.attempt_count, why.code, item.hand_backs)
    metrics.policy_refusals.of(why.code).inc()
    line = results.error_line(leased.job_id, item.number, item.custom_id, why.code, why.message)
    return Failed(line, why.code, paid.usage, paid.deployment) if paid else Failed(line, why.code)


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


@lru_cache(maxsize=1024)
def _salt(share_owner: str) -> bytes:
    """Only calls of one tenant share a prefix."""
    return blake2b(share_owner.encode(), digest_size=16).digest()


def _unforeseen(error: Exception, job_id: str, number: int) -> UpstreamError:
    """A mistake of ours that one item's call brought to light must not stop the worker for all others: it counts as a try that may
    have been billed. What it says may hold a caller's text, so the log gets only its kind and its place."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    kind = type(error).__name__
    log.error("item_call_crashed", job=job_id, item=number, kind=kind, place=f"{place.filename}:{place.lineno}")
    return Ambiguous(
        f"The call broke off inside the gateway ({kind}); the operator's log has more.", code="internal_error"
    )


def _after_failure(
    error: UpstreamError,
    clock: Clock,
    entropy: Entropy,
    policy: retry.RetryPolicy,
    leased: LeasedSlice,
    deadline_ms: float,
    item: Item,
) -> Failed | Again:
    now_ms = int(clock.monotonic_ms())
    verdict = retry.decide(error, item.attempt_count, now_ms, int(deadline_ms), policy, entropy.uniform(0.0, 1.0))
    hand_backs = item.hand_backs + isinstance(error, HandedBack)
    if isinstance(verdict, retry.RetryAt):
        return Again(verdict.at_ms - now_ms, item.attempt_count + int(verdict.counts), error.reason, hand_backs)
    if verdict.code == "batch_expired":
        return Again(max(0, int(deadline_ms) - now_ms), item.attempt_count, error.reason, hand_backs)
    if isinstance(error, Overspent):
        metrics.policy_refusals.of(error.code).inc()
        line = results.error_line(leased.job_id, item.number, item.custom_id, error.code, _sentence(error.message))
    elif isinstance(error, Refused) or error.status >= 400:
        body = results.http_error_body(error.status, error.body, error.message, error.code)
        name = item_id(leased.job_id, item.number)
        line = results.response_line(name, item.custom_id, error.status, body)
    else:
        line = results.error_line(leased.job_id, item.number, item.custom_id, verdict.code, verdict.message)
        if isinstance(error, BrokenAnswer) and error.body:
            line = results.with_raw(line, error.body)
    return Failed(line, error.reason)


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:] + "."
