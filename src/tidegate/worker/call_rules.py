"""What binds calls of a leased slice at this moment: the lease, the state of its key, and the operator's policies."""

from tidegate.core.body_rules.caller_fields import FieldRules, rules_for
from tidegate.core.budgets.budget import LimitBound, with_limits
from tidegate.core.nouns import LeasedSlice
from tidegate.core.policies import Policies
from tidegate.core.policy.policy_rules import Denied
from tidegate.core.retry import RetryPolicy
from tidegate.core.usage.prices import Price
from tidegate.guards.guard import Guard, Guards
from tidegate.worker.key_states import KeyStates
from tidegate.worker.leased_work import LeasedSliceState, LeasedWork


class LeasedCallRules:
    def __init__(self, leased_work: LeasedWork, keys: KeyStates, policies: Policies, guards: Guards) -> None:
        self._leased_work = leased_work
        self._keys = keys
        self._policies = policies
        self._guards = guards

    def bind(self, state: LeasedSliceState) -> None:
        """Bind calls of this slice to the budgets of its owner, and to the limits that its key has now."""
        limits = self._keys.limits(state.slice)
        if limits != state.key_limits:
            budgets = self._policies.budgets(state.slice)
            state.bind(limits, with_limits(budgets, LimitBound.KEY, state.slice.key_id or "", limits))

    def denial(self, leased: LeasedSlice) -> Denied | None:
        return self._keys.denial(leased)

    def begin_by_ms(self, leased: LeasedSlice) -> float:
        return min(self._leased_work.lease_until_ms, self._keys.believed_until_ms(leased))

    def fields(self, leased: LeasedSlice) -> FieldRules:
        return rules_for(self._policies.fields_of, leased.model)

    def guard(self, leased: LeasedSlice) -> Guard | None:
        return self._guards.of(leased.tenant, leased.key_id, leased.model)

    def parallel(self, leased: LeasedSlice) -> tuple[tuple[str, int], ...]:
        return self._policies.parallel(leased, self._keys.parallel_max(leased))

    def models(self, leased: LeasedSlice) -> frozenset[str]:
        return self._keys.models(leased)

    def retry(self, leased: LeasedSlice) -> RetryPolicy:
        return self._policies.retry(leased.model)

    def price(self, deployment: str) -> Price | None:
        return self._policies.price(deployment)
