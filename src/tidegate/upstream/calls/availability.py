"""Which deployments of a name take calls now: what is known of them, which one takes a call, and what the engine asks before it sends.

`View` is what is known at one moment: who has a slot, whose budgets are spent, and from when on they take calls. It reads deployments,
budgets and slots, and changes none of them. `choose` is a pure function of it, for batch work and interactive calls alike.

`Availability` says whether the deployments of a name take batch work now, how much, and from which moment on if not. A name's fallbacks
count while its own deployments rest, have an open circuit or have spent their budgets, and not while they are merely full: waiting for a
slot is no failure.

Nothing here takes a slot, waits or sends.
"""

import math
from collections.abc import Collection, Iterable

from tidegate.core.budgets.budget import Budget
from tidegate.core.nouns import Call
from tidegate.core.ports import Clock
from tidegate.core.schedule import Reason
from tidegate.upstream.budgets.budget_client import BudgetClient
from tidegate.upstream.budgets.token_estimator import TokenEstimator
from tidegate.upstream.calls.traffic import Traffic
from tidegate.upstream.grouping.waiting_groups import WaitingGroups
from tidegate.upstream.routing.deployment_state import DeploymentState
from tidegate.upstream.routing.deployments import Deployments
from tidegate.upstream.routing.health import BreakerState
from tidegate.upstream.routing.routes import NameRoute, Routes, stick
from tidegate.upstream.routing.slots import ModelSlots, SlotDemand
from tidegate.upstream.tide.tides import READY_MAX

PROBE_ANSWER_MS = 1_000


class View:
    def __init__(
        self,
        routes: Routes,
        slots: ModelSlots,
        demand: SlotDemand,
        budget_client: BudgetClient,
        estimator: TokenEstimator,
        patience_ms: float,
    ) -> None:
        self._routes = routes
        self._model_slots = slots
        self._demand = demand
        self._budgets = budget_client
        self._estimator = estimator
        self._patience_ms = patience_ms

    # Slots.

    def has_model_slots(self, route: NameRoute, call: Call, now_ms: float) -> bool:
        """Whether the call's model has a slot for batch work, and the slots at hand are this process's."""
        slots = self._model_slots
        return (self._demand.is_alone or self._demand.own_until_ms() > now_ms) and (
            not slots.has_caps or slots.room(route.model_of(call.model)) >= 1
        )

    def has_slot_for_user(self, state: DeploymentState, owner: str, now_ms: float) -> bool:
        return state.takes_interactive(owner) and (not state.counts_interactive or self._demand.own_until_ms() > now_ms)

    def takes_item(self, state: DeploymentState, call: Call, now_ms: float) -> bool:
        """Whether a deployment has a slot for this call of batch work, and nothing of its own against it."""
        if state.free_slots(now_ms) < 1:
            return False
        if state.refusals.waiting and state.refusals.waits_until_ms(call.idempotency_key) > now_ms:
            return False
        if call.attempt_count and not self._routes.may_try(state, call, now_ms):
            return False
        if state.tide is not None and not state.tide.can_take(call.idempotency_key, call.body):
            return False
        return not state.tokens_max or state.can_take(self._estimator.tokens(call, state.deployment.estimate))

    def can_take(self, route: NameRoute, state: DeploymentState, call: Call) -> bool:
        """Whether a deployment that takes an item also takes this call, which the item shares with others."""
        if state.tide is not None and not state.tide.can_take(call.idempotency_key, call.body):
            return False
        terms = self._budgets.terms(route.budgets(state) + call.budgets)
        if not state.tokens_max and not terms.counts_tokens:
            return True
        tokens = self._estimator.tokens(call, state.deployment.estimate)
        fits_now = not state.tokens_max or state.tokens_in_flight + tokens <= state.tokens_max
        return fits_now and (not terms.counts_tokens or tokens <= terms.tokens_max)

    def may_try(self, state: DeploymentState, call: Call, now_ms: float) -> bool:
        return self._routes.may_try(state, call, now_ms)

    def are_limits_away(self, now_ms: float) -> bool:
        return self._budgets.unreachable_until_ms > now_ms

    # Moments.

    def budgets_spent_until_ms(self, route: NameRoute, state: DeploymentState) -> float:
        """The moment until which the budgets of a name on a deployment are spent."""
        return self._budgets.spent_until_ms(route.budgets(state))

    def is_budget_of(self, route: NameRoute, state: DeploymentState, budget_id: str) -> bool:
        """Whether this is one of the budgets of a name on a deployment, and not one of its caller."""
        return any(budget.id == budget_id for budget in route.budgets(state))

    def worth_sending_at_ms(self, budgets: tuple[Budget, ...]) -> float:
        """The moment before which nothing is worth sending under these budgets, as far as is known here."""
        return self._budgets.spent_until_ms(budgets) - self._patience_ms

    def opens_at_ms(self, route: NameRoute, state: DeploymentState) -> float:
        """The moment from which the budgets of a name on a deployment let a call in: to be sent, or to wait a moment for it."""
        budgets = route.budgets(state)
        if not budgets:
            return 0.0
        return self._budgets.opens_at_ms(budgets, self._patience_ms)

    def ready_at_ms(self, route: NameRoute, state: DeploymentState) -> float:
        return max(state.ready_at_ms(), state.background_rests_until_ms, self.opens_at_ms(route, state))

    def waits_ms(self, route: NameRoute, state: DeploymentState, now_ms: float) -> float:
        """Until when calls for a name are better off elsewhere than on this deployment."""
        return max(state.rest_ends_ms(now_ms), state.background_rests_until_ms, self.opens_at_ms(route, state))

    def wait_ms(self, route: NameRoute, now_ms: float, call: Call) -> int | None:
        """How long until the first deployment takes this call; None when one does now, or none is left."""
        states = list(chain(route, call.models)) or [(route, state) for state in route.interactive_states]
        moments = (max(self.waits_ms(one, state, now_ms), state.waits_until_ms(call)) for one, state in states)
        wait_ms = math.ceil(min(moments, default=now_ms) - now_ms)
        return wait_ms if wait_ms > 0 else None


def chain(route: NameRoute, models: frozenset[str] = frozenset()) -> Iterable[tuple[NameRoute, DeploymentState]]:
    """Every deployment that batch calls for this name may go to, under which of its names."""
    return ((one, state) for one in route.ways(models) for state in one.states)


def choose(
    view: View,
    route: NameRoute,
    call: Call,
    traffic: Traffic | None,
    tried: Collection[DeploymentState],
    now_ms: float,
) -> DeploymentState | None:
    """The least loaded fit deployment, or the one that the call's prefix sticks to; None when none is fit.

    A deployment whose budget is spent for a moment is the last resort but one: the last is where this call was tried before, or all its
    tries could go to the one deployment that is unhealthy. Of batch work, a probe that is due goes first, or the circuit of a
    deployment beside a healthy one stays open; a user's call goes to one with an open circuit only if that has answered a probe
    meanwhile, or no other is there.
    """
    is_user = traffic is not None and not traffic.flex_wait_s
    if not is_user and not view.has_model_slots(route, call, now_ms):
        return None
    states = route.interactive_states if is_user else route.states
    best = spent = again = shut = None
    sticky: list[DeploymentState] | None = [] if call.prefix_salt and len(states) > 1 else None
    for state in states:
        if tried and state in tried:
            continue
        if is_user:
            assert traffic is not None
            if state.ready_at_ms() > now_ms or not view.has_slot_for_user(state, traffic.owner, now_ms):
                continue
        elif not view.takes_item(state, call, now_ms):
            continue
        if state.budgets or route.own_budgets:
            if not is_user and view.opens_at_ms(route, state) > now_ms:
                continue
            if view.budgets_spent_until_ms(route, state) > now_ms:
                spent = state
                continue
        if call.attempt_count and state.has_failed(call.idempotency_key):
            again = state
            continue
        if state.breaker.is_open:
            if not is_user or state.breaker.has_answered:
                return state
            shut = state
            continue
        if sticky is not None:
            sticky.append(state)
        if best is None or state.load() < best.load():
            best = state
    if sticky:
        return stick(sticky, call.prefix_group) or best
    if again is not None and best is None and spent is None and _is_full_elsewhere(view, route, call, tried, now_ms):
        return None
    return best or spent or again or shut


def shut_beside(route: NameRoute, chosen: DeploymentState, now_ms: float) -> DeploymentState | None:
    """Return a deployment with an open circuit that a user's call passed over and that is due for a probe."""
    for state in route.interactive_states:
        if state.breaker.is_open and state is not chosen and state.ready_at_ms() <= now_ms:
            return state
    return None


def _is_full_elsewhere(
    view: View, route: NameRoute, call: Call, tried: Collection[DeploymentState], now_ms: float
) -> bool:
    """Whether a deployment that has not failed this call is healthy and lacks only room for now: that is worth a wait."""
    return any(
        state.slots.share > 0
        and state not in tried
        and max(view.ready_at_ms(route, state), state.waits_until_ms(call)) <= now_ms
        and not state.has_failed(call.idempotency_key)
        for state in route.states
    )


class Availability:
    """`in_flight_max` is how many calls this process may have out where items share calls."""

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
        self._states = states
        self._model_slots = slots
        self._demand = demand
        self._waiting_groups = waiting_groups
        self._clock = clock
        self._in_flight_max = in_flight_max

    def free(self, route: NameRoute, model: str) -> int:
        """How many more items may go out for this name: as many as calls, or more where several share one."""
        free = self._free_of_one(route, model)
        if not free and route.fallbacks and self.is_away(route):
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
                # Where calls are let in one by one, a few stand ready: not all that there are.
                slots = max(0, slots - state.waiting + READY_MAX)
            free += slots
        if free and self._model_slots.has_caps:
            free = int(min(free, max(0, self._model_slots.room(route.model_of(model)))))
        if not self._demand.is_alone:
            asked = route.model_of(model)
            self._demand.ask(route.states, asked)
            self._demand.note_background(route.states, asked, now_ms)
            if not free:
                self._demand.hurry()
        if free:
            spare = self._states.spare_calls()
            if self._states.is_grouping and self._in_flight_max:
                # Where items share calls, only grouping can count them.
                spare = min(spare, self._in_flight_max - self._states.calls_in_flight())
            free = max(0, min(free, spare))
        return free if route.items_per_call == 1 else self._waiting_groups.room(route, free)

    def is_away(self, route: NameRoute) -> bool:
        """Whether none of its own deployments would take a call now even with a slot free."""
        now_ms = self._clock.monotonic_ms()
        return all(self._view.ready_at_ms(route, state) > now_ms for state in route.states)

    def rests_until_ms(self, route: NameRoute) -> float:
        now_ms = self._clock.monotonic_ms()
        at_ms = min((self._rest_ends_ms(one, state, now_ms) for one, state in chain(route)), default=0.0)
        return at_ms if at_ms > now_ms else 0.0

    def closed(self, route: NameRoute, model: str) -> str:
        """Return why nothing may be sent now; empty while something may, or when no deployment serves this name."""
        now_ms = self._clock.monotonic_ms()
        if not route.states or self.free(route, model):
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
            state.tide is not None and state.slots.free > 0 and state.in_flight >= state.tide.calls for state in states
        ):
            return Reason.TIDE_CLOSED
        return Reason.NO_AVAILABLE_SLOTS

    def spent_until_ms(self, budgets: tuple[Budget, ...]) -> float:
        """The moment before which nothing is worth sending under these budgets, as far as is known here; 0 when it may be sent now."""
        at_ms = self._view.worth_sending_at_ms(budgets)
        return at_ms if at_ms > self._clock.monotonic_ms() else 0.0

    def budgets(self, route: NameRoute) -> list[tuple[Budget, ...]]:
        return [one.budgets(state) for one, state in chain(route)]

    def _rest_ends_ms(self, route: NameRoute, state: DeploymentState, now_ms: float) -> float:
        """A probe that is out may bring its deployment back at any moment: the next one's time would be too long a rest."""
        at_ms = self._view.waits_ms(route, state, now_ms)
        is_probing = state.breaker.is_open and state.breaker.state is BreakerState.PROBING
        return min(at_ms, now_ms + PROBE_ANSWER_MS) if is_probing else at_ms
