"""What is known of the deployments of a route at one moment: who has a slot, whose budgets are spent, and from when on they take calls.

It reads deployments, budgets and slots, and changes none of them. It chooses no deployment, waits for nothing and sends nothing.
"""

import math
from collections.abc import Iterable

from tidegate.core.budgets.budget import Budget
from tidegate.core.nouns import Call
from tidegate.upstream.budgets.budget_client import BudgetClient
from tidegate.upstream.budgets.token_estimator import TokenEstimator
from tidegate.upstream.routing.deployment_state import DeploymentState
from tidegate.upstream.routing.routes import NameRoute, Routes
from tidegate.upstream.routing.slots import ModelSlots, SlotDemand


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
        if state.free_slots(now_ms) < 1 or state.refusals.waits_until_ms(call.idempotency_key) > now_ms:
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
