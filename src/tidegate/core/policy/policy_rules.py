"""Decide whether an item may be sent, from the current state of its key: one pure decision of a few
microseconds.

Terminal: the key is deleted, revoked or expired, the model or resource is not allowed, a hard
budget is spent. Retryable: all parallel slots are taken, a rate is used up, calls in flight have
the rest of a budget set aside, or the key's state is unknown. A wait says nothing about an item, so
a retryable denial never uses up its attempts. The budget client judges budgets and slots, where a
call is sent. Guardrails and hooks come after this, because they cost more. The caller loads the
state and decides how old it may be.
"""

from collections.abc import Mapping
from enum import StrEnum

import msgspec

from tidegate.core.budgets.budget import Limit


class DenialCode(StrEnum):
    """The reasons of a denial, for the item's error line and the metrics."""

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


RETRYABLE = frozenset(
    {DenialCode.BUDGET_RESERVED, DenialCode.PARALLEL_EXCEEDED, DenialCode.RATE_EXCEEDED, DenialCode.KEY_UNKNOWN}
)


class KeyState(msgspec.Struct, frozen=True, gc=False):
    """The known state of a key.

    No models, or no resources, mean any. `parallel_max` 0: as many calls as there are slots.
    """

    key_id: str
    models: frozenset[str] = frozenset()
    resources: frozenset[str] = frozenset()
    expires_at_ms: int | None = None
    revoked: bool = False
    deleted: bool = False
    limits: tuple[Limit, ...] = ()
    parallel_max: int = 0


class Denied(msgspec.Struct, frozen=True, gc=False):
    """A call that may not be sent.

    `wait_ms` is the least time until asking again can help; 0 when that is unknown.
    """

    code: DenialCode
    message: str
    param: str | None = None
    wait_ms: int = 0

    @property
    def retryable(self) -> bool:
        return self.code in RETRYABLE


_DELETED = Denied(
    DenialCode.KEY_DELETED, "The key that asked for this was deleted: create the batch again with another key."
)
_REVOKED = Denied(
    DenialCode.KEY_REVOKED, "The key that asked for this was revoked: create the batch again with another key."
)
_EXPIRED = Denied(
    DenialCode.KEY_EXPIRED, "The key that asked for this has expired: create the batch again with another key."
)
UNKNOWN = Denied(
    DenialCode.KEY_UNKNOWN,
    "The state of the key that asked for this is unknown now: it is tried again when the store answers.",
    wait_ms=500,
)


def judge(key: KeyState, model: str, resource: str, now_ms: int) -> Denied | None:
    """Return None when a call to `model` by `resource` may be sent, else the denial."""
    if key.deleted:
        return _DELETED
    if key.revoked:
        return _REVOKED
    if key.expires_at_ms is not None and now_ms >= key.expires_at_ms:
        return _EXPIRED
    if key.models and model not in key.models:
        return Denied(
            DenialCode.MODEL_NOT_ALLOWED,
            f"This key does not allow the model {model!r}: name one that it allows, or use another key.",
            "model",
        )
    if key.resources and resource not in key.resources:
        return Denied(
            DenialCode.RESOURCE_NOT_ALLOWED,
            f"This key does not allow the resource {resource!r}: name one that it allows, or use another key.",
            "model",
        )
    return None


def allows(models: frozenset[str], resources: frozenset[str], name: str, model_of: Mapping[str, str]) -> bool:
    """Return whether these allowlists let a request name this as its model, which is whether
    `names_allowed` contains it.
    """
    return (not models or model_of.get(name, name) in models) and (not resources or name in resources)


def names_allowed(
    models: frozenset[str], resources: frozenset[str], model_of: Mapping[str, str]
) -> frozenset[str] | None:
    """Return the names that a request may use for its model under these allowlists; None: any.

    `model_of` is the model behind each resource.
    """
    if not models:
        return resources or None
    named = models.union(name for name, model in model_of.items() if model in models)
    named = frozenset(name for name in named if model_of.get(name, name) in models)
    return named & resources if resources else named
