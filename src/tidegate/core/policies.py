"""The operator's decisions about tenants, models, slices and jobs, as one object that the stages
and the worker ask.

This one binds nothing: every answer is the most permissive. `worker/policies.py` has the one that
follows the settings.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol

import msgspec

from tidegate.core.body_rules.caller_fields import FieldRules
from tidegate.core.budgets.budget import Budget
from tidegate.core.hooks import PolicyRule
from tidegate.core.input.lines import LineRules
from tidegate.core.nouns import Job, LeasedSlice
from tidegate.core.retry import RetryPolicy
from tidegate.core.schedule import Policy
from tidegate.core.schedule.policy import ModeOverride


class TenantTerms(Protocol):
    """The terms of tenants, as far as every call needs them."""

    @property
    def number(self) -> int:
        """Return a number that differs after each change."""

    @property
    def bind_calls(self) -> bool:
        """Return whether any tenant has a budget, or a bound on calls at once.

        If none has, tenants' terms are not asked for.
        """


class FixedTerms(msgspec.Struct, frozen=True):
    """Terms that never change."""

    bind_calls: bool
    number: int = 0


NO_TERMS = FixedTerms(bind_calls=False)


class Policies:
    """The most permissive policies.

    `model_of` is the model behind each resource, `reached_by` every name that a call to a resource
    may come under, and `fields_of` the rules for callers' fields by name. `rules` are the hooks and
    guardrails, `in_flight_caps` the work units in flight by tenant, and `tenants` what has to be
    known before a call's budgets are asked for.
    """

    model_of: Mapping[str, str] = MappingProxyType({})
    reached_by: Mapping[str, tuple[str, ...]] = MappingProxyType({})
    fields_of: Mapping[str, FieldRules] = MappingProxyType({})
    rules: tuple[PolicyRule, ...] = ()
    in_flight_caps: Mapping[str, int] = MappingProxyType({})
    tenants: TenantTerms = NO_TERMS

    def unknown_wait_ms(self, model: str) -> int:
        """Return how long items of an unknown model wait, because another process may know it; 0
        when none does.
        """
        return 0

    def schedule_policy(self, override: ModeOverride) -> Policy:
        """Return how slices are chosen, given the mode that an operator switched to at run time."""
        return Policy()

    def line_rules(self, job: Job) -> LineRules:
        """Return the rules for a job's input."""
        return LineRules(job.endpoint, invalid_lines=job.invalid_lines, prefix_order=job.prefix_order)

    def weight(self, tenant: str) -> float:
        """Return a tenant's weight in fair shares, by the tenant's name."""
        return 1.0

    def budgets(self, leased: LeasedSlice) -> tuple[Budget, ...]:
        """Return the budgets that bind calls of a slice, without those of its key."""
        return ()

    def parallel(self, leased: LeasedSlice, key_max: int) -> tuple[tuple[str, int], ...]:
        """Return the bounds on calls at once of a slice's tenant, user and key; `key_max` is the
        key's own, 0 for none.
        """
        return ()

    def retry(self, model: str) -> RetryPolicy:
        """Return how failed items of a model are tried again."""
        return RetryPolicy()
