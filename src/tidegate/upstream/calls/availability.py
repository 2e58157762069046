"""Whether the deployments of a name take a call now, how many, and from which moment on if not.

A name's fallbacks count while its own deployments rest, are shut or have spent their budgets, and not while they are merely full: waiting
for a slot is no failure. This module reads deployments, budgets and slots; it chooses no deployment and sends nothing.
"""

import math
from collections.abc import Callable, Iterable

from tidegate.core.budgets.budget import Budget
from tidegate.core.nouns import Call
from tidegate.core.ports import Clock
from tidegate.core.schedule import Reason
from tidegate.upstream.budgets.budget_client import BudgetClient
from tidegate.upstream.grouping.groups import Groups
from tidegate.upstream.routing.breaker import BreakerState
from tidegate.upstream.routing.deployment_state import DeploymentState
from tidegate.upstream.routing.routes import NameRoute
from tidegate.upstream.routing.slots import DeploymentSlots, ModelSlots
from tidegate.upstream.tide.tides import READY_MAX

PROBE_ANSWER_MS = 1_000


class Availability:
    """`shared` is the loop that keeps this process's part of the slots, where there are other processes."""

    def __init__(
        self,
        budget_client: BudgetClient,
        clock: Clock,
        patience_ms: float,
        caps: ModelSlots,
        connections: Callable[[], int],
    ) -> None:
        self._budgets = budget_client
        self._clock = clock
        self._patience_ms = patience_ms
        self._model_slots = caps
        self._connections = connections
        self.shared: DeploymentSlots | None = None
        self.groups: Groups | None = None

    def has_slots(self) -> bool:
        return self.shared is None or self.shared.is_current

    def hurry(self) -> None:
        if self.shared is not None:
            self.shared.hurry()

    def free(self, route: NameRoute, model: str) -> int:
        """How many more items may go out for this name: as many as calls, or more where several share one."""
        free = self._free_of_one(route, model)
        if not free and route.fallbacks and self.is_away(route):
            free = next(filter(None, (self._free_of_one(one, model) for one in route.fallbacks)), 0)
        return free

    def _free_of_one(self, route: NameRoute, model: str) -> int:
        now_ms = self._clock.monotonic_ms()
        free = 0
        for state in route.states if self.has_slots() else ():
            if (state.budgets or route.own_budgets) and self.opens_at_ms(route, state) > now_ms:
                continue
            slots = state.free_slots(now_ms)
            if state.waiting > READY_MAX:
                # Where calls are let in one by one, a few stand ready: not all that there are.
                slots = max(0, slots - state.waiting + READY_MAX)
            free += slots
        if self._model_slots.slots and free:
            free = int(min(free, max(0, self._model_slots.room(route.model_of(model)))))
        if self.shared is not None:
            for state in route.states:
                state.is_asked = True
            if not free:
                self.hurry()
        slots = min(free, self._connections()) if free else 0
        if self.groups is None or route.items_per_call == 1:
            return slots
        return self.groups.room(route, slots)

    def is_away(self, route: NameRoute) -> bool:
        """Whether none of its own deployments would take a call now even with a slot free."""
        now_ms = self._clock.monotonic_ms()
        return all(self.ready_at_ms(route, state) > now_ms for state in route.states)

    def rests_until_ms(self, route: NameRoute) -> float:
        now_ms = self._clock.monotonic_ms()
        at_ms = min((self._rest_ends_ms(one, state, now_ms) for one, state in _chain(route)), default=0.0)
        return at_ms if at_ms > now_ms else 0.0

    def wait_ms(self, route: NameRoute, now_ms: float, call: Call) -> int | None:
        """How long until the first deployment takes this call; None when one does now, or none is left."""
        states = list(_chain(route, call.models)) or [(route, state) for state in route.interactive_states]
        moments = (max(self._waits_ms(one, state, now_ms), state.waits_until_ms(call)) for one, state in states)
        wait_ms = math.ceil(min(moments, default=now_ms) - now_ms)
        return wait_ms if wait_ms > 0 else None

    def closed(self, route: NameRoute, model: str) -> str:
        """Why nothing may be sent now; empty while something may, or when nobody serves this name."""
        now_ms = self._clock.monotonic_ms()
        if not route.states or self.free(route, model):
            return ""
        states = [
            state for state in route.states if max(state.ready_at_ms(), state.background_rests_until_ms) <= now_ms
        ]
        if not states:
            ill = all(state.breaker.is_open or state.background_rests_until_ms > now_ms for state in route.states)
            return Reason.UNHEALTHY if ill else Reason.RESTING
        if all(self.opens_at_ms(route, state) > now_ms for state in states):
            return Reason.BUDGET_SPENT
        if all(state.tide is not None and state.slots > state.in_flight >= state.tide.calls for state in states):
            return Reason.TIDE_CLOSED
        return Reason.NO_AVAILABLE_SLOTS

    def budgets(self, route: NameRoute) -> list[tuple[Budget, ...]]:
        return [one.budgets(state) for one, state in _chain(route)]

    def spent_until_ms(self, budgets: tuple[Budget, ...]) -> float:
        """The moment before which nothing is worth sending under these budgets, as far as is known here; 0 when it may be sent now."""
        at_ms = self._budgets.spent_until_ms(budgets) - self._patience_ms
        return at_ms if at_ms > self._clock.monotonic_ms() else 0.0

    def opens_at_ms(self, route: NameRoute, state: DeploymentState) -> float:
        """The moment from which the budgets of a name on a deployment let a call in: to be sent, or to wait a moment for it."""
        budgets = route.budgets(state)
        if not budgets:
            return 0.0
        return max(self._budgets.spent_until_ms(budgets) - self._patience_ms, self._budgets.unreachable_until_ms)

    def ready_at_ms(self, route: NameRoute, state: DeploymentState) -> float:
        return max(state.ready_at_ms(), state.background_rests_until_ms, self.opens_at_ms(route, state))

    def _waits_ms(self, route: NameRoute, state: DeploymentState, now_ms: float) -> float:
        return max(state.rest_ends_ms(now_ms), state.background_rests_until_ms, self.opens_at_ms(route, state))

    def _rest_ends_ms(self, route: NameRoute, state: DeploymentState, now_ms: float) -> float:
        """A probe that is out may bring its deployment back at any moment: the next one's time would be too long a rest."""
        at_ms = self._waits_ms(route, state, now_ms)
        return min(at_ms, now_ms + PROBE_ANSWER_MS) if state.breaker.state is BreakerState.PROBING else at_ms


def _chain(route: NameRoute, models: frozenset[str] = frozenset()) -> Iterable[tuple[NameRoute, DeploymentState]]:
    """Every deployment that batch calls for this name may go to, under which of its names."""
    return ((one, state) for one in route.ways(models) for state in one.states)
