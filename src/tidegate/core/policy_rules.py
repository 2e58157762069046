"""Whether an item may be sent, from what is known of its key right now: one pure decision of a few microseconds.

Terminal: the key is deleted, revoked or expired, the model or resource is not allowed, a hard budget is spent. Retryable: all parallel
slots are taken, a rate is used up, what is in flight has the rest of a budget set aside, or nobody knows how the key stands. Waiting
says nothing about an item, so a retryable denial never uses up its attempts. Who loads the state, and how old it may be, is the
caller's affair; guardrails and hooks come after this, because they cost more.
"""

from collections.abc import Mapping, Sequence
from enum import StrEnum

import msgspec

from tidegate.core.budgets import Limit
from tidegate.core.prices import units_text


class Code(StrEnum):
    """Why not, as the item's error line and the metrics say it."""

    KEY_DELETED = "key_deleted"
    KEY_REVOKED = "key_revoked"
    KEY_EXPIRED = "key_expired"
    MODEL_NOT_ALLOWED = "model_not_allowed"
    RESOURCE_NOT_ALLOWED = "resource_not_allowed"
    BUDGET_EXCEEDED = "budget_exceeded"
    BUDGET_RESERVED = "budget_reserved"
    PARALLEL_EXCEEDED = "max_parallel_requests_exceeded"
    RATE_EXCEEDED = "rate_limit_exceeded"
    KEY_UNKNOWN = "key_state_unknown"


RETRYABLE = frozenset({Code.BUDGET_RESERVED, Code.PARALLEL_EXCEEDED, Code.RATE_EXCEEDED, Code.KEY_UNKNOWN})
# What a front door answers an interactive call with; a batch item has only the code and the message.
STATUSES = {
    Code.KEY_DELETED: 401,
    Code.KEY_REVOKED: 401,
    Code.KEY_EXPIRED: 401,
    Code.MODEL_NOT_ALLOWED: 403,
    Code.RESOURCE_NOT_ALLOWED: 403,
    Code.BUDGET_EXCEEDED: 402,
    Code.BUDGET_RESERVED: 429,
    Code.PARALLEL_EXCEEDED: 429,
    Code.RATE_EXCEEDED: 429,
    Code.KEY_UNKNOWN: 503,
}


class Payer(StrEnum):
    """Whose money a budget bounds."""

    KEY = "key"
    USER = "user"
    TEAM = "team"
    ORGANIZATION = "organization"


class SpendBudget(msgspec.Struct, frozen=True, gc=False):
    """A hard budget: what was spent, and what calls in flight may yet cost, in nano-units."""

    payer: Payer
    limit_nano: int
    spent_nano: int = 0
    reserved_nano: int = 0


class KeyState(msgspec.Struct, frozen=True, gc=False):
    """What is known of a key now. No models, or no resources, named: any. `parallel_max` 0: as many as there are slots."""

    key_id: str
    models: frozenset[str] = frozenset()
    resources: frozenset[str] = frozenset()
    expires_at_ms: int | None = None
    revoked: bool = False
    deleted: bool = False
    limits: tuple[Limit, ...] = ()
    budgets: tuple[SpendBudget, ...] = ()
    parallel_max: int = 0
    parallel_in_use: int = 0


class Denied(msgspec.Struct, frozen=True, gc=False):
    """Not sent. `wait_ms` is how long it takes at least until asking again can help; 0 when nobody knows."""

    code: Code
    message: str
    param: str | None = None
    wait_ms: int = 0

    @property
    def retryable(self) -> bool:
        return self.code in RETRYABLE

    @property
    def status(self) -> int:
        return STATUSES[self.code]


_DELETED = Denied(Code.KEY_DELETED, "The key that asked for this was deleted: create the batch again with another key.")
_REVOKED = Denied(Code.KEY_REVOKED, "The key that asked for this was revoked: create the batch again with another key.")
_EXPIRED = Denied(Code.KEY_EXPIRED, "The key that asked for this has expired: create the batch again with another key.")
_PARALLEL = Denied(
    Code.PARALLEL_EXCEEDED,
    "All of this key's parallel calls are in use: wait for one to end, or have max_parallel raised.",
)
UNKNOWN = Denied(
    Code.KEY_UNKNOWN,
    "Nobody can say how the key that asked for this stands now: it is tried again when the store answers.",
    wait_ms=500,
)


def judge(key: KeyState, model: str, resource: str, now_ms: int, bound_nano: int = 0) -> Denied | None:
    """None when a call to `model` by `resource` may be sent; `bound_nano` is the most that it can cost."""
    if key.deleted:
        return _DELETED
    if key.revoked:
        return _REVOKED
    if key.expires_at_ms is not None and now_ms >= key.expires_at_ms:
        return _EXPIRED
    if key.models and model not in key.models:
        return Denied(
            Code.MODEL_NOT_ALLOWED,
            f"This key does not allow the model {model!r}: name one that it allows, or use another key.",
            "model",
        )
    if key.resources and resource not in key.resources:
        return Denied(
            Code.RESOURCE_NOT_ALLOWED,
            f"This key does not allow the resource {resource!r}: name one that it allows, or use another key.",
            "model",
        )
    waits: Denied | None = None
    for budget in key.budgets:
        if budget.spent_nano + budget.reserved_nano + bound_nano > budget.limit_nano or (
            budget.spent_nano >= budget.limit_nano
        ):
            denied = _over(budget, bound_nano)
            if denied.code is Code.BUDGET_EXCEEDED:
                return denied
            waits = denied
    if waits is not None:
        return waits
    if key.parallel_max and key.parallel_in_use >= key.parallel_max:
        return _PARALLEL
    return None


def _over(budget: SpendBudget, bound_nano: int) -> Denied:
    limit = units_text(budget.limit_nano)
    if budget.spent_nano >= budget.limit_nano:
        return Denied(
            Code.BUDGET_EXCEEDED,
            f"The budget of this {budget.payer} ({limit}) is spent: have it raised, or wait for it.",
        )
    if budget.spent_nano + bound_nano > budget.limit_nano:
        left = units_text(budget.limit_nano - budget.spent_nano)
        return Denied(
            Code.BUDGET_EXCEEDED,
            f"This may cost up to {units_text(bound_nano)}, and the budget of this {budget.payer} ({limit}) has {left} left: "
            "lower max_tokens, or have the budget raised.",
        )
    return Denied(
        Code.BUDGET_RESERVED,
        f"The rest of the budget of this {budget.payer} ({limit}) is set aside for calls in flight: it is tried again when they end.",
    )


def allows(models: frozenset[str], resources: frozenset[str], name: str, model_of: Mapping[str, str]) -> bool:
    """Whether these two allowlists let a request name this as its model; the same as being among `names_allowed`."""
    return (not models or model_of.get(name, name) in models) and (not resources or name in resources)


def names_allowed(
    models: frozenset[str], resources: frozenset[str], model_of: Mapping[str, str]
) -> frozenset[str] | None:
    """What a request may name as its model under these two allowlists; None: anything. `model_of` is the model behind each resource."""
    if not models:
        return resources or None
    named = models.union(name for name, model in model_of.items() if model in models)
    named = frozenset(name for name in named if model_of.get(name, name) in models)
    return named & resources if resources else named


def throttled(wait_ms: int) -> Denied:
    """A rate that is used up, as the shared limits said it."""
    return Denied(
        Code.RATE_EXCEEDED,
        f"A rate limit of this key is used up for another {max(0, wait_ms)} ms: it is tried again then.",
        wait_ms=max(0, wait_ms),
    )


def affordable(budgets: Sequence[SpendBudget], bounds_nano: Sequence[int]) -> int:
    """How many of these calls, from the first on, may be in flight at once without passing any hard budget."""
    if not budgets:
        return len(bounds_nano)
    left = min(budget.limit_nano - budget.spent_nano - budget.reserved_nano for budget in budgets)
    if left <= 0:
        return 0
    for count, bound in enumerate(bounds_nano):
        left -= bound
        if left < 0:
            return count
    return len(bounds_nano)
