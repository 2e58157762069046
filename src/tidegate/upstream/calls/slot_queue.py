"""The queue of calls for which no deployment is fit.

A call waits while only a slot is missing; otherwise it gets an error with the reason. No call waits
here for long, and none for a rest, a probe or a budget: the engine or the caller waits for those.
All calls wait in one line; interactive ones go first, because a deployment keeps the slots that
they wait for. This module sends nothing.
"""

import asyncio
from collections.abc import Sequence

from tidegate.core.errors import PoolExhausted, RetryBudgetSpent, Throttled, Unavailable, Withheld
from tidegate.core.nouns import Call
from tidegate.core.ports import Clock
from tidegate.upstream.calls.admission import Admissions, View, choose, states_for
from tidegate.upstream.calls.closed_route import closed_route_error
from tidegate.upstream.calls.traffic import Traffic, is_users
from tidegate.upstream.routing.deployment_state import DeploymentState
from tidegate.upstream.routing.routes import NameRoute
from tidegate.upstream.routing.slots import SlotDemand
from tidegate.wait_line import WaitLine

RETRY_BUDGET_WAIT_MS = 5_000
FLEX_RETRY_MS = 5_000


class SlotQueue:
    def __init__(
        self,
        view: View,
        demand: SlotDemand,
        line: WaitLine,
        admissions: Admissions,
        clock: Clock,
        pool_timeout_s: float,
    ) -> None:
        self._view = view
        self._demand = demand
        self._line = line
        self._admissions = admissions
        self._clock = clock
        self._pool_timeout_s = pool_timeout_s

    async def wait(self, route: NameRoute, call: Call, traffic: Traffic | None) -> DeploymentState:
        """Wait briefly in line while only a slot is missing.

        Otherwise raise the error with the reason.
        """
        is_user = is_users(traffic)
        timeout_s = (traffic.flex_wait_s if traffic is not None else 0.0) or self._pool_timeout_s
        standing: Sequence[DeploymentState] = ()
        chosen: DeploymentState | None = None
        try:
            async with asyncio.timeout(timeout_s):
                while chosen is None:
                    self._refuse(route, call, traffic)
                    standing = self._stand(route, call, traffic, standing)
                    self._admissions.note_demand(route, call, traffic, self._clock.monotonic_ms())
                    self._demand.hurry(is_urgent=is_user)
                    await self._next_turn()
                    chosen = choose(self._view, route, call, traffic, (), self._clock.monotonic_ms())
                _forget(route, call)
                return chosen
        except TimeoutError:
            pass
        except asyncio.CancelledError:
            # This call will not come again: no deployment keeps room for it.
            _forget(route, call)
            raise
        finally:
            self._admissions.end_wait(standing, call, traffic, chosen)
        if traffic is not None and traffic.flex_wait_s:
            raise Throttled(
                f"no gap for a flex call came within {timeout_s:g} s: send it again later, or without service_tier",
                code="flex_unavailable",
                retry_after_ms=FLEX_RETRY_MS,
            )
        kind, advice = (
            ("place for interactive calls to", "") if is_user else ("slot for", " or lower the calls in flight")
        )
        raise PoolExhausted(
            f"every {kind} model {call.model!r} stayed taken for {timeout_s:g} s: "
            f"raise max_in_flight of its deployments{advice}",
            retry_after_ms=1000,
        )

    def _stand(
        self, route: NameRoute, call: Call, traffic: Traffic | None, before: Sequence[DeploymentState]
    ) -> Sequence[DeploymentState]:
        """Register the call as waiting at the deployments of its route, and return them.

        The route may change before its turn comes.
        """
        states = states_for(route, traffic)
        if states is not before:
            self._admissions.end_wait(before, call, traffic)
            self._admissions.begin_wait(states, call, traffic)
        return states

    async def _next_turn(self) -> None:
        turn = self._line.join()
        try:
            await turn
        finally:
            # All calls get their turns together, so no turn has to be passed on.
            self._line.give_up(turn)

    def _refuse(self, route: NameRoute, call: Call, traffic: Traffic | None) -> None:
        """Raise the error with the reason, unless only a slot is missing."""
        now_ms = self._clock.monotonic_ms()
        if is_users(traffic):
            _refuse_user(route, call, now_ms)
        else:
            self._refuse_background(route, call, states_for(route, traffic), now_ms)

    def _refuse_background(
        self, route: NameRoute, call: Call, states: Sequence[DeploymentState], now_ms: float
    ) -> None:
        if not states:
            raise Unavailable(f"no deployment serves model {call.model!r}: add one under models, or set an upstream")
        ready = [state for state in states if self._view.ready_at_ms(route, state) <= now_ms]
        fit = [state for state in ready if state.waits_until_ms(call) <= now_ms]
        if not fit:
            wait_ms = self._view.wait_ms(route, now_ms, call)
            if ready:
                raise Throttled("this call was refused and waits as long as it was asked to", retry_after_ms=wait_ms)
            if any(state.ready_at_ms() <= now_ms for state in states):
                raise Withheld(
                    f"the budgets of model {call.model!r} are spent for now, or cannot be asked",
                    until_ms=now_ms + (wait_ms or 0),
                    spent=call.model,
                    retry_after_ms=wait_ms,
                    code="limits_unavailable" if self._view.are_limits_away(now_ms) else "budget_spent",
                )
            raise closed_route_error(call.model, states, wait_ms)
        if call.attempt_count and not any(self._view.may_try(state, call, now_ms) for state in fit):
            raise RetryBudgetSpent(
                "this retry waits: its deployment has had as many retries as its retry budget allows",
                retry_after_ms=RETRY_BUDGET_WAIT_MS,
            )


def _refuse_user(route: NameRoute, call: Call, now_ms: float) -> None:
    states = route.interactive_states
    if not states:
        raise Unavailable(f"no deployment serves model {call.model!r} to interactive calls")
    if min(state.ready_at_ms() for state in states) > now_ms:
        raise closed_route_error(call.model, states, min(state.ready_in_ms(now_ms) for state in states))


def _forget(route: NameRoute, call: Call) -> None:
    for state in route.states:
        if state.tide is not None:
            state.tide.forget(call.idempotency_key)
