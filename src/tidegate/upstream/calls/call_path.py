"""The one road of a call to a model server, for batch work and interactive calls alike.

A deployment is chosen, its slot is taken in the same moment, the call is sent there, and its end is learned from. It goes on to another
deployment only when the first can neither have done nor billed it, and then under the other's budgets; never after its first byte came. An
interactive call goes on from a server that is too busy (503, 529), too. An item's call is read whole; an interactive one from its first
byte on, or whole where it is not streamed.
"""

import asyncio
from typing import overload

import structlog

from tidegate.core.errors import (
    Ambiguous,
    ApiProblem,
    HandedBack,
    KeyRejected,
    Overspent,
    Throttled,
    Unavailable,
    Untranslatable,
    UpstreamError,
    Withheld,
)
from tidegate.core.nouns import Answer, Call
from tidegate.core.ports import Clock
from tidegate.upstream.calls.admission import Admissions
from tidegate.upstream.calls.budget_wait import BudgetWait
from tidegate.upstream.calls.choice import choose, shut_beside
from tidegate.upstream.calls.exchange import Exchange
from tidegate.upstream.calls.response import UpstreamResponse
from tidegate.upstream.calls.slot_queue import SlotQueue
from tidegate.upstream.calls.traffic import Traffic, goes_on, is_users
from tidegate.upstream.calls.translation import MESSAGES
from tidegate.upstream.calls.view import View
from tidegate.upstream.http.send_permit import PermitExpired, SendPermit
from tidegate.upstream.http.transport import UpstreamRequest
from tidegate.upstream.routing.deployment_state import DeploymentState
from tidegate.upstream.routing.probe import SideProbes, probe
from tidegate.upstream.routing.routes import NameRoute

log = structlog.get_logger(__name__)


class CallPath:
    def __init__(
        self,
        view: View,
        slot_queue: SlotQueue,
        admissions: Admissions,
        exchange: Exchange,
        clock: Clock,
        patience_ms: float,
    ) -> None:
        self._view = view
        self._slot_queue = slot_queue
        self._budget_wait = BudgetWait(view, slot_queue, clock, patience_ms)
        self._admissions = admissions
        self._exchange = exchange
        self._clock = clock
        self._patience_ms = patience_ms
        self._probes = SideProbes(clock)

    async def close(self) -> None:
        await self._probes.close()

    async def find(self, route: NameRoute, call: Call, traffic: Traffic | None = None) -> DeploymentState:
        """Wait for a deployment that takes this call; its slot is taken only when the call begins."""
        state = choose(self._view, route, call, traffic, (), self._clock.monotonic_ms())
        return state if state is not None else await self._slot_queue.wait(route, call, traffic)

    def can_take(self, route: NameRoute, state: DeploymentState, call: Call) -> bool:
        return self._view.can_take(route, state, call)

    async def send(self, route: NameRoute, call: Call, state: DeploymentState) -> Answer:
        """Send an item's call there, or where else the route leads."""
        return await self.open(route, call, None, state)

    @overload
    async def open(
        self, route: NameRoute, call: Call, traffic: None, state: DeploymentState | None = None
    ) -> Answer: ...

    @overload
    async def open(
        self, route: NameRoute, call: Call, traffic: Traffic, state: DeploymentState | None = None
    ) -> UpstreamResponse: ...

    async def open(
        self, route: NameRoute, call: Call, traffic: Traffic | None, state: DeploymentState | None = None
    ) -> Answer | UpstreamResponse:
        """Return the answer, or its beginning. Raise an UpstreamError of exactly one class, or ApiProblem where no engine takes it."""
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
            if traffic is not None and is_users(traffic) and (shut := shut_beside(route, state, now_ms)) is not None:
                self._probes.ask(shut)
            try:
                return await self._open_at(route, state, call, traffic, now_ms)
            except Withheld as error:
                # Each deployment at most once without a wait: what is wrong with the call itself is wrong with it everywhere.
                put_off.append(state)
                state = await self._budget_wait.next_state(route, put_off, call, traffic, error, give_up_ms)
                now_ms = self._clock.monotonic_ms()
            except (Throttled, Unavailable, KeyRejected, Overspent, Untranslatable, ApiProblem, Ambiguous) as error:
                if isinstance(error, Ambiguous) and not goes_on(error, traffic):
                    raise
                # A call that is too expensive there, or cannot be translated for it, may pass at another deployment.
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
        shaped = None if traffic is None else traffic.shape(state.deployment.engine)
        admission = self._admissions.begin_call(route, state, call, traffic, now_ms)
        failed: UpstreamError
        try:
            if admission.is_probe:
                await probe(state)
            total_s = min(left_s + call.grace_ms / 1000, route.total_s(state, call.endpoint))
            if shaped is not None:
                return await self._exchange.open(route, admission, shaped, total_s)
            if (
                state.is_plain
                and route.is_plain
                and not call.budgets
                and call.endpoint != MESSAGES
                and call.audio is None
            ):
                # A probe or a connection may take a while: nothing begins when the lease or the job's window may be over by then, or
                # when the job was paused or closes.
                dies_ms = min(call.deadline_ms, call.begin_by_ms)
                permit = SendPermit(self._clock, (), "", 0, dies_ms, 0, call.may_begin)
                admission.go_out(0)
                request = UpstreamRequest(
                    state.url(call.endpoint), call.idempotency_key, call.body, call.trace_header, call.attempt_count
                )
                reply = await state.line.post(request, total_s, permit)
                answer = self._exchange.read_reply(admission, call.endpoint, reply)
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


def _is_cancelled_twice() -> bool:
    """Whether someone else wants this task to end too: then it is not ours to go on with."""
    task = asyncio.current_task()
    return task is None or task.uncancel() > 0
