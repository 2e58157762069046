"""The room of names for background work: how many calls their deployments take, and from when on.

A name's fallbacks count while its own deployments rest, have an open circuit or have spent their
budgets. They do not count while those are only full, because a wait for a slot is no failure. This
module takes no slot, and does not wait or send.
"""

from tidegate.core.budgets.budget import Budget
from tidegate.core.ports import Clock
from tidegate.core.schedule import Reason
from tidegate.upstream.calls.admission import View
from tidegate.upstream.grouping.waiting_groups import WaitingGroups
from tidegate.upstream.routing.deployment_state import DeploymentState
from tidegate.upstream.routing.deployments import Deployments
from tidegate.upstream.routing.health import BreakerState
from tidegate.upstream.routing.routes import NameRoute
from tidegate.upstream.routing.slots import ModelSlots, SlotDemand
from tidegate.upstream.tide.tides import READY_MAX

PROBE_ANSWER_MS = 1_000


class Availability:
    """The room of names for background work.

    `in_flight_max` is the most calls of this process in flight if items share calls.
    """

    def __init__(
        self,
        view: View,
        states: Deployments,
        slots: ModelSlots,
        demand: SlotDemand,
        waiting_groups: WaitingGroups,
        clock: Clock,
        in_flight_max: int,
    ) -> None:
        self._view = view
        self._routes = view.routes
        self._states = states
        self._model_slots = slots
        self._demand = demand
        self._waiting_groups = waiting_groups
        self._clock = clock
        self._in_flight_max = in_flight_max

    def knows(self, model: str) -> bool:
        """Return whether background calls for this name lead anywhere."""
        return self._routes.get(model, self._routes.other).takes_background

    def items_per_call(self, model: str | None = None) -> int:
        """Return the most items that may share a call for this name; without a name, for any."""
        routes = self._routes.all() if model is None else (self._routes.get(model, self._routes.other),)
        return max((one.items_per_call for route in routes for one in (route, *route.fallbacks)), default=1)

    def free_slots(self, model: str) -> int:
        """Return how many more items may go out for this name: one or more for each call."""
        route = self._routes.get(model, self._routes.other)
        free = self._free_of_one(route, model)
        if not free and route.fallbacks and self._is_away(route):
            free = next(filter(None, (self._free_of_one(one, model) for one in route.fallbacks)), 0)
        return free

    def _free_of_one(self, route: NameRoute, model: str) -> int:
        now_ms = self._clock.monotonic_ms()
        free = 0
        for state in route.states if self._demand.is_alone or self._demand.own_until_ms() > now_ms else ():
            if (state.budgets or route.own_budgets) and self._view.opens_at_ms(route, state) > now_ms:
                continue
            slots = state.free_slots(now_ms)
            if state.waiting > READY_MAX:
                # If the tide admits fewer calls than there are slots, only a few calls wait ready.
                slots = max(0, slots - state.waiting + READY_MAX)
            free += slots
        if free and self._model_slots.has_caps:
            free = int(min(free, max(0, self._model_slots.room(route.model or model))))
        if not self._demand.is_alone:
            asked = route.model or model
            self._demand.ask(route.states, asked)
            self._demand.note_background(route.states, asked, now_ms)
            if not free:
                self._demand.hurry()
        if free:
            spare = self._states.spare_calls()
            if self._states.is_grouping and self._in_flight_max:
                # If items share calls, the number of items is not that of calls, so calls in flight
                # are counted here.
                spare = min(spare, self._in_flight_max - self._states.calls_in_flight())
            free = max(0, min(free, spare))
        return free if route.items_per_call == 1 else self._waiting_groups.room(route, free)

    def _is_away(self, route: NameRoute) -> bool:
        """Return whether no deployment of the name itself would take a call even with a slot."""
        now_ms = self._clock.monotonic_ms()
        return all(self._view.ready_at_ms(route, state) > now_ms for state in route.states)

    def rests_until_ms(self, model: str) -> float:
        """Return the moment before which no call may be sent for this name.

        Return 0 if one may be sent now.
        """
        now_ms, route = self._clock.monotonic_ms(), self._routes.get(model, self._routes.other)
        ways = (route, *route.fallbacks)
        at_ms = min((self._rest_ends_ms(one, state, now_ms) for one in ways for state in one.states), default=0.0)
        return at_ms if at_ms > now_ms else 0.0

    def closed(self, model: str) -> str:
        """Return why no call may be sent now.

        The text is empty if one may, or if no deployment serves this name.
        """
        now_ms, route = self._clock.monotonic_ms(), self._routes.get(model, self._routes.other)
        if not route.states or self.free_slots(model):
            return ""
        states = [
            state for state in route.states if max(state.ready_at_ms(), state.background_rests_until_ms) <= now_ms
        ]
        if not states:
            if all(state.deployment.is_drained for state in route.states):
                return Reason.DRAINED
            ill = all(state.breaker.is_open or state.background_rests_until_ms > now_ms for state in route.states)
            return Reason.UNHEALTHY if ill else Reason.RESTING
        if all(self._view.opens_at_ms(route, state) > now_ms for state in states):
            return Reason.BUDGET_SPENT
        if all(
            state.tide is not None and state.slots.share > state.slots_in_use and state.in_flight >= state.tide.calls
            for state in states
        ):
            return Reason.TIDE_CLOSED
        return Reason.NO_AVAILABLE_SLOTS

    def spent_until_ms(self, budgets: tuple[Budget, ...]) -> float:
        """Return the known moment before which no call is worth sending under these budgets.

        Return 0 if one is now.
        """
        at_ms = self._view.worth_sending_at_ms(budgets)
        return at_ms if at_ms > self._clock.monotonic_ms() else 0.0

    def budgets(self, model: str) -> list[tuple[Budget, ...]]:
        """Return the budgets that bind calls for this name, for each possible deployment."""
        route = self._routes.get(model, self._routes.other)
        return [one.budgets(state) for one in (route, *route.fallbacks) for state in one.states]

    def _rest_ends_ms(self, route: NameRoute, state: DeploymentState, now_ms: float) -> float:
        """Return the moment at which a deployment's rest ends.

        A probe that is out may end it at any time, so the time of the next probe would be too late.
        """
        at_ms = self._view.waits_ms(route, state, now_ms)
        is_probing = state.breaker.is_open and state.breaker.state is BreakerState.PROBING
        return min(at_ms, now_ms + PROBE_ANSWER_MS) if is_probing else at_ms
