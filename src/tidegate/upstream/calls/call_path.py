"""The one road of a call to a model server, for background and interactive calls alike.

`NamedCalls` takes a call for a name: within its key's limit of calls at once, along the name's own
deployments and then its fallbacks.

- A call goes on to the next route only if those before can neither have done nor billed it, or were
  too busy while a user waits.
- An item goes alone or in a group, by its route.
- A call that a lost worker left in a queue is waited for there, and sent to no other deployment.

`CallPath` takes a call along one route: it chooses a deployment, takes its slot in the same moment,
sends the call there, and learns from its end.

- It goes on to another deployment only if the first can neither have done nor billed the call, and
  then under the other's budgets; never after its first byte came. An interactive call goes on from
  a server that is too busy (503, 529), too.
- A stream is read from its first byte on, every other answer whole.
- A plain call, bound by no budget and in its engine's own shape, is sent here, for items and users
  alike. `Exchange` sends the others.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any, overload

import msgspec
import structlog

from tidegate import tracing
from tidegate.core.answers import answer as answers
from tidegate.core.answers.answer_text import counted_whole
from tidegate.core.deployments import EngineKind
from tidegate.core.errors import (
    Ambiguous,
    ApiProblem,
    HandedBack,
    KeyRejected,
    Overspent,
    PoolExhausted,
    Throttled,
    Unavailable,
    Unbounded,
    Untranslatable,
    UpstreamError,
    Withheld,
)
from tidegate.core.nouns import Answer, Call
from tidegate.core.ports import Clock
from tidegate.upstream.calls.admission import Admission, Admissions, Feedback, View, choose, open_circuit_beside
from tidegate.upstream.calls.budget_wait import BudgetWait
from tidegate.upstream.calls.exchange import Exchange, UpstreamResponse
from tidegate.upstream.calls.slot_queue import SlotQueue
from tidegate.upstream.calls.traced_open import open_traced
from tidegate.upstream.calls.traffic import Traffic, goes_on, is_users
from tidegate.upstream.calls.translation import MESSAGES, ItemTranslation, Shaped
from tidegate.upstream.grouping.groups import Groups
from tidegate.upstream.http.transport import HttpReply, PermitExpired, SendPermit, UpstreamRequest
from tidegate.upstream.routing.deployment_state import DeploymentState
from tidegate.upstream.routing.key_slots import KeySlots
from tidegate.upstream.routing.probe import SideProbes, probe
from tidegate.upstream.routing.routes import NameRoute

log = structlog.get_logger(__name__)

# After these errors a call may succeed at another deployment, also when it is too expensive for the
# first, or cannot be bounded or translated for it.
_ELSEWHERE = (Throttled, Unavailable, KeyRejected, Overspent, Unbounded, Untranslatable, ApiProblem)


class CallPath:
    def __init__(
        self,
        view: View,
        slot_queue: SlotQueue,
        admissions: Admissions,
        feedback: Feedback,
        exchange: Exchange,
        clock: Clock,
        patience_ms: float,
    ) -> None:
        self._view = view
        self._slot_queue = slot_queue
        self._budget_wait = BudgetWait(view, slot_queue, clock, patience_ms)
        self._admissions = admissions
        self._feedback = feedback
        self._exchange = exchange
        self._clock = clock
        self._patience_ms = patience_ms
        self._probes = SideProbes(clock)

    async def close(self) -> None:
        await self._probes.close()

    async def find(self, route: NameRoute, call: Call, traffic: Traffic | None = None) -> DeploymentState:
        """Wait for a deployment that takes this call.

        Its slot is taken only when the call begins.
        """
        state = choose(self._view, route, call, traffic, (), self._clock.monotonic_ms())
        return state if state is not None else await self._slot_queue.wait(route, call, traffic)

    def can_take(self, route: NameRoute, state: DeploymentState, call: Call) -> bool:
        return self._view.can_take(route, state, call)

    async def send(self, route: NameRoute, call: Call, state: DeploymentState) -> Answer:
        """Send an item's call to this deployment, or to another one of the route."""
        return await self.open(route, call, None, state)

    @overload
    async def open(
        self, route: NameRoute, call: Call, traffic: None, state: DeploymentState | None = None
    ) -> Answer: ...

    @overload
    async def open(
        self, route: NameRoute, call: Call, traffic: Traffic, state: DeploymentState | None = None
    ) -> Answer | UpstreamResponse: ...

    async def open(
        self, route: NameRoute, call: Call, traffic: Traffic | None, state: DeploymentState | None = None
    ) -> Answer | UpstreamResponse:
        """Return the answer, or a stream's beginning.

        Raise an UpstreamError of exactly one class, or ApiProblem where no engine takes the call.
        """
        now_ms = self._clock.monotonic_ms()
        if state is None:
            state = choose(self._view, route, call, traffic, (), now_ms)
            if state is None:
                state = await self._slot_queue.wait(route, call, traffic)
                now_ms = self._clock.monotonic_ms()
        give_up_ms = now_ms + self._patience_ms
        tried: list[DeploymentState] = []
        put_off: list[DeploymentState] = []
        while True:
            if traffic is not None and len(route.interactive_states) > 1 and is_users(traffic):
                probe_due = open_circuit_beside(route, state, now_ms)
                if probe_due is not None:
                    self._probes.ask(probe_due)
            try:
                return await self._open_at(route, state, call, traffic, now_ms)
            except Withheld as error:
                # Each deployment puts a call off at most once without a wait, because a fault of
                # the call itself is one everywhere.
                put_off.append(state)
                state = await self._budget_wait.next_state(route, put_off, call, traffic, error, give_up_ms)
                now_ms = self._clock.monotonic_ms()
            except (*_ELSEWHERE, Ambiguous) as error:
                if isinstance(error, Ambiguous) and not goes_on(error, traffic):
                    raise
                tried.append(state)
                now_ms = self._clock.monotonic_ms()
                other = choose(self._view, route, call, traffic, tried, now_ms)
                if other is None:
                    raise
                log.info(
                    "upstream_failover",
                    deployment=state.deployment.name,
                    to=other.deployment.name,
                    why=error.code,
                    model=call.model,
                )
                state = other

    async def send_to(self, route: NameRoute, call: Call, state: DeploymentState) -> Answer:
        """Send an item's call to this deployment and no other."""
        answer = await self._open_at(route, state, call, None, self._clock.monotonic_ms())
        assert isinstance(answer, Answer)
        return answer

    # At one deployment.

    async def _open_at(
        self, route: NameRoute, state: DeploymentState, call: Call, traffic: Traffic | None, now_ms: float
    ) -> Answer | UpstreamResponse:
        left_s = (call.deadline_ms - now_ms) / 1000
        if left_s <= 0:
            raise Unavailable("the call's deadline passed before it was sent", code="deadline_passed")
        if now_ms >= call.begin_by_ms:
            raise Unavailable("the lease may be over before the call was sent", code="lease_over")
        is_plain = (
            state.is_plain
            and route.is_plain
            and not call.budgets
            and call.endpoint != MESSAGES
            and call.audio is None
            and (traffic is None or (not (traffic.is_stream or state.breaker.is_open) and route.has_one_shape))
        )
        shaped = None if traffic is None or is_plain else traffic.shape(state.deployment.engine)
        admission = self._admissions.begin_call(route, state, call, traffic, now_ms)
        failed: UpstreamError
        try:
            if admission.is_probe:
                await probe(state)
            total_s = route.total_timeout_s
            if total_s is None:
                total_s = state.total_s(call.endpoint)
            total_s = min(left_s + call.grace_ms / 1000, total_s)
            if shaped is not None:
                return await self._exchange.open(route, admission, shaped, total_s)
            if is_plain:
                answer = await self._send_plain(admission, total_s)
            else:
                answer = await self._exchange.send_item(route, admission, total_s)
        except UpstreamError as error:
            failed = self._admissions.end_call(admission, error) or error
        except PermitExpired:
            late = Withheld("the lease or the window may be over before the call was sent", code="lease_over")
            late.until_ms = self._clock.monotonic_ms()
            failed = self._admissions.end_call(admission, late) or late
        except asyncio.CancelledError:
            if admission.flight is None or not admission.flight.handed_back or _is_cancelled_twice():
                self._admissions.end_call(admission)
                raise
            state.budget.undo(admission.attempt)
            self._admissions.end_call(admission)
            failed = HandedBack("an interactive call needed the engine, and this one had no first token yet")
        except BaseException:
            self._admissions.end_call(admission)
            raise
        else:
            self._admissions.end_call(admission, answer_tokens=answer.usage.output_tokens)
            return answer
        raise failed

    async def _send_plain(self, admission: Admission, total_s: float) -> Answer:
        """Send the unchanged call of an item or a user: without budgets, in its engine's shape."""
        state, call, traffic = admission.state, admission.call, admission.traffic
        # A probe or a connection may take a while. By then the lease or the job's window may be
        # over, the slot may belong to another process, or the job may be paused or closing: the
        # permit expires in each of these cases.
        dies_ms = min(call.deadline_ms, admission.begin_by_ms)
        permit = SendPermit(self._clock, (), "", 0, dies_ms, 0, call.may_begin)
        admission.go_out(0)
        request = UpstreamRequest(
            state.url(call.endpoint), call.idempotency_key, call.body, call.trace_header, call.attempt_count
        )
        if traffic is None:
            reply = await state.client.post(request, total_s, permit)
            return self._feedback.read_reply(admission, call.endpoint, reply)
        assert state.streaming_client is not None
        stream = await state.streaming_client.open(request, total_s, permit, interactive=not traffic.flex_wait_s)
        try:
            reply = HttpReply(stream.status, stream.headers, await stream.read_whole())
        except BaseException:
            stream.close()
            raise
        answer = self._feedback.read_reply(admission, call.endpoint, reply)
        if answer.body is not reply.body:
            # A user's answer is passed on byte for byte.
            answer = msgspec.structs.replace(answer, body=reply.body)
        used = answer.usage
        if not (used.input_tokens and used.output_tokens):
            used = counted_whole(call, used, reply.body)
        if traffic.on_usage is not None:
            traffic.on_usage(state.deployment, used)
        return answer


def _is_cancelled_twice() -> bool:
    """Return whether another part of the program wants this task to end too."""
    task = asyncio.current_task()
    return task is None or task.uncancel() > 0


class NamedCalls:
    def __init__(self, path: CallPath, groups: Groups, key_slots: KeySlots, view: View, clock: Clock) -> None:
        self._path = path
        self._groups = groups
        self._key_slots = key_slots
        self._view = view
        self._routes = view.routes
        self._clock = clock

    def send(self, call: Call) -> Coroutine[Any, Any, Answer]:
        """Send an item's request, alone or with others of its job."""
        route = self._routes.get(call.model, self._routes.other)
        if call.parallel:
            return self._send_within(route, call)
        if not route.is_direct:
            return self._send(route, call)
        return self._path.open(route, call, None) if route.items_per_call == 1 else self._groups.send(route, call)

    def takes_interactive(self, model: str) -> bool:
        """Return whether interactive calls for this name lead anywhere."""
        return self._routes.get(model, self._routes.other).takes_interactive

    def takes_flex(self, model: str) -> bool:
        """Return whether flex calls for this name lead anywhere."""
        return self._routes.get(model, self._routes.other).takes_flex

    def open(self, call: Call, traffic: Traffic) -> Coroutine[Any, Any, Answer | UpstreamResponse]:
        """Begin an interactive call; return its answer, or a stream from its first byte on."""
        traces = tracing.ACTIVE
        return self._open(call, traffic) if traces is None else open_traced(traces, self._open, call, traffic)

    def _open(self, call: Call, traffic: Traffic) -> Coroutine[Any, Any, Answer | UpstreamResponse]:
        route = self._routes.get(call.model, self._routes.other)
        if call.parallel:
            return self._open_within(route, call, traffic)
        return self._along(route, call, traffic) if route.fallbacks else self._path.open(route, call, traffic)

    async def send_interactive(self, call: Call, owner: str) -> Answer:
        """Send an item's request in front of background work, and read its whole answer.

        `owner` is the share owner of its slots.
        """
        now_s = self._clock.now_ms() // 1000
        translation: ItemTranslation | None = None

        def shape(engine: EngineKind) -> Shaped:
            nonlocal translation
            translation = ItemTranslation(call.endpoint, call.body, engine, now_s)
            return translation.shaped

        try:
            response = await self._open(call, Traffic(shape, is_stream=False, owner=owner, is_item=True))
        except UpstreamError as error:
            if translation is not None:
                translation.failed(error)
            raise
        assert isinstance(response, Answer), "an answer that is not streamed is read whole"
        endpoint = call.endpoint if translation is None else translation.shaped.endpoint
        line, usage = answers.read(endpoint, response.body)
        if translation is not None:
            line = translation.answer(line)
        return Answer(response.status, line, usage, response.deployment, priced=response.priced)

    async def _open_within(self, route: NameRoute, call: Call, traffic: Traffic) -> Answer | UpstreamResponse:
        while True:
            taken = await self._key_slots.take_slots(call.parallel)
            try:
                # The call's own moment (for an item that of its lease) still binds.
                bound = msgspec.structs.replace(call, begin_by_ms=min(call.begin_by_ms, taken.until_ms))
                response = await self._along(route, bound, traffic)
            except BaseException as error:
                taken.release_key_slots()
                now_ms = self._clock.monotonic_ms()
                is_lost = isinstance(error, UpstreamError) and error.code == "lease_over"
                if not is_lost or not taken.until_ms <= now_ms < call.begin_by_ms:
                    raise
            else:
                if isinstance(response, Answer):
                    taken.release_key_slots()
                else:
                    response.keep(taken)
                return response

    async def _send_within(self, route: NameRoute, call: Call) -> Answer:
        taken = await self._key_slots.take_slots(call.parallel)
        try:
            return await self._send(route, call)
        finally:
            taken.release_key_slots()

    async def _send(self, route: NameRoute, call: Call) -> Answer:
        for one in (route, *route.fallbacks):
            if one.queued_states and (len(one.states) > 1 or route.fallbacks):
                state = await _out_at(one, call)
                if state is not None:
                    return await self._path.send_to(one, call, state)
        return await self._along(route, call, None)

    def _send_by(self, route: NameRoute, call: Call) -> Coroutine[Any, Any, Answer]:
        return self._groups.send(route, call) if route.items_per_call > 1 else self._path.open(route, call, None)

    @overload
    async def _along(self, route: NameRoute, call: Call, traffic: None) -> Answer: ...

    @overload
    async def _along(self, route: NameRoute, call: Call, traffic: Traffic) -> Answer | UpstreamResponse: ...

    async def _along(self, route: NameRoute, call: Call, traffic: Traffic | None) -> Answer | UpstreamResponse:
        """Send along the name's own deployments, then along the fallbacks that its key allows.

        A retry goes first to routes that did not fail this call, or all its tries could go to the
        one unhealthy deployment.
        """
        failed: UpstreamError | None = None
        ways = route.ways(call.models)
        if call.attempt_count:
            ways = tuple(sorted(ways, key=lambda one: one.has_failed(call)))
        for one, after in zip(ways, (*ways[1:], None), strict=True):
            try:
                if traffic is None:
                    return await self._send_by(one, call)
                return await self._path.open(one, call, traffic)
            except (Throttled, Unavailable, KeyRejected, PoolExhausted, Ambiguous) as error:
                if isinstance(error, Ambiguous) and not goes_on(error, traffic):
                    raise
                if not route.fallbacks or error.code in ("deadline_passed", "lease_over"):
                    raise
                if after is not None:
                    log.info(
                        "upstream_failover",
                        deployment=_names(one),
                        to=_names(after),
                        why=error.code,
                        model=call.model,
                    )
                failed = failed or error
        assert failed is not None
        if failed.retry_after_ms is None:
            # When it failed, the routes after it still took calls, so no wait was set.
            failed.put_off(self._view.wait_ms(route, self._clock.monotonic_ms(), call))
        raise failed


def _names(route: NameRoute) -> str:
    return ", ".join(state.deployment.name for state in (route.states or route.interactive_states))


async def _out_at(route: NameRoute, call: Call) -> DeploymentState | None:
    """Return the deployment in whose queue a lost worker left this same call."""
    for state in route.queued_states:
        client = state.queue_client
        if client is not None and await client.is_out(call.idempotency_key, call.attempt_count):
            return state
    return None
