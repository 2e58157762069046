"""Calls for which no deployment is fit: they stand in line while the only thing missing is a slot, and are told what is missing otherwise.

Nobody waits here for long, nor for a rest, a probe or a budget: the engine does that. Whoever frees something wakes the line. It chooses
no deployment and sends nothing.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass

from tidegate.core.errors import PoolExhausted, RetryBudgetSpent, Throttled, Unavailable, Withheld
from tidegate.core.nouns import Call
from tidegate.core.ports import Clock
from tidegate.upstream.budgets.budget_client import BudgetClient
from tidegate.upstream.calls.closed_route import closed_route_error
from tidegate.upstream.routing.deployment_state import DeploymentState
from tidegate.upstream.routing.routes import NameRoute

RETRY_BUDGET_WAIT_MS = 5_000


@dataclass(frozen=True, slots=True)
class Missing:
    """Says what a call lacks when it is not a slot. `ready_at_ms` is when a deployment takes calls of a route; `wait_ms`, until any does;
    `may_try`, whether a deployment's retry budget allows a call there."""

    budget_client: BudgetClient
    clock: Clock
    ready_at_ms: Callable[[NameRoute, DeploymentState], float]
    wait_ms: Callable[[NameRoute, float, Call], int | None]
    may_try: Callable[[DeploymentState, Call, float], bool]

    def refuse(self, route: NameRoute, call: Call) -> None:
        states = route.states
        if not states:
            raise Unavailable(f"no deployment serves model {call.model!r}: add one under models, or set an upstream")
        now_ms = self.clock.monotonic_ms()
        ready = [state for state in states if self.ready_at_ms(route, state) <= now_ms]
        fit = [state for state in ready if state.waits_until_ms(call) <= now_ms]
        if not fit:
            wait_ms = self.wait_ms(route, now_ms, call)
            if ready:
                raise Throttled("this call was refused and waits as long as it was asked to", retry_after_ms=wait_ms)
            if any(state.ready_at_ms() <= now_ms for state in states):
                is_away = self.budget_client.unreachable_until_ms > now_ms
                raise Withheld(
                    f"the budgets of model {call.model!r} are spent for now, or cannot be asked",
                    until_ms=now_ms + (wait_ms or 0),
                    spent=call.model,
                    retry_after_ms=wait_ms,
                    code="limits_unavailable" if is_away else "budget_spent",
                )
            raise closed_route_error(call.model, states, wait_ms)
        if call.attempt_count and not any(self.may_try(state, call, now_ms) for state in fit):
            raise RetryBudgetSpent(
                "this retry waits: its deployment has had as many retries as its retry budget allows",
                retry_after_ms=RETRY_BUDGET_WAIT_MS,
            )


class SlotQueue:
    def __init__(
        self,
        choose: Callable[[NameRoute, Call, Collection[DeploymentState], float], DeploymentState | None],
        missing: Missing,
        clock: Clock,
        pool_timeout_s: float,
        hurry: Callable[[], None],
    ) -> None:
        self._choose = choose
        self._missing = missing
        self._clock = clock
        self._pool_timeout_s = pool_timeout_s
        self._hurry = hurry
        self._line: deque[asyncio.Future[None]] = deque()

    async def wait(self, route: NameRoute, call: Call, timeout_s: float | None = None) -> DeploymentState:
        """Wait, in line and not for long, while the only thing missing is a slot; otherwise say what is missing."""
        timeout_s = timeout_s or self._pool_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    self._missing.refuse(route, call)
                    self._hurry()
                    await self._stand(route, call)
                    state = self._choose(route, call, (), self._clock.monotonic_ms())
                    if state is not None:
                        _forget(route, call)
                        return state
        except TimeoutError:
            pass
        except asyncio.CancelledError:
            # Nobody will come again with this call: no deployment keeps room for it.
            _forget(route, call)
            raise
        raise PoolExhausted(
            f"every slot for model {call.model!r} stayed taken for {timeout_s:g} s: "
            "raise max_in_flight of its deployments or lower the calls in flight",
            retry_after_ms=1000,
        )

    async def _stand(self, route: NameRoute, call: Call) -> None:
        place = asyncio.get_running_loop().create_future()
        self._line.append(place)
        # Those of this moment: a route may lead elsewhere before the place comes free.
        states = route.states
        for state in states:
            state.waiting += 1
            if state.tide is not None:
                state.tide.stands(call.idempotency_key, call.body)
        try:
            await place
        finally:
            for state in states:
                state.waiting -= 1
                if state.tide is not None:
                    state.tide.leaves(call.idempotency_key)
            if place in self._line:
                self._line.remove(place)

    def wake(self) -> None:
        """All of them, in order: the first may wait for another model than the one whose slot came free."""
        if not self._line:
            return
        line, self._line = self._line, deque()
        for place in line:
            if not place.done():
                place.set_result(None)


def _forget(route: NameRoute, call: Call) -> None:
    for state in route.states:
        if state.tide is not None:
            state.tide.forget(call.idempotency_key)
