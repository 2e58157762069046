"""The check of a job's controls, at its create and later: priority, `not_before`, thresholds."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from tidegate.core.errors import ApiProblem, SettingsError
from tidegate.core.job_controls import Canary, JobControls, MaxErrors
from tidegate.core.usage.prices import nano_of

PRIORITY_MAX = 100
# The end of the year 9999.
NOT_BEFORE_S_MAX = 253_402_300_799
ERRORS_AFTER = 100
CANARY_ERROR_SHARE = 0.1
COUNT_MAX = 1_000_000_000

Priority = Annotated[int, Meta(ge=-PRIORITY_MAX, le=PRIORITY_MAX)]
NotBefore = Annotated[int, Meta(ge=0, le=NOT_BEFORE_S_MAX)]
CountOrZero = Annotated[int, Meta(ge=0, le=COUNT_MAX)]
CONTROLS_ALLOWED = {
    "priority": f"a whole number from -{PRIORITY_MAX} to {PRIORITY_MAX}",
    "not_before": "a moment in unix seconds",
    "max_cost": "an amount of money, as its decimal text",
    "max_errors": "an object with `count` or with `share` and, if you like, `after`",
    "max_errors.count": "a whole number from 0 on",
    "max_errors.share": "a number from 0 to below 1",
    "max_errors.after": "a whole number from 1 on",
    "canary": "an object with `items` and, if you like, `max_error_share` and `then`",
    "canary.items": "a whole number from 1 on",
    "canary.max_error_share": "a number from 0 to 1",
    "canary.then": "`continue`, `stop` or `wait`",
    "action": "`continue` or `stop`",
}


class MaxErrorsFields(msgspec.Struct, forbid_unknown_fields=True):
    """The failures that stop a batch: more than `count` requests, or more than `share` of those
    that are done, once `after` are done.
    """

    count: CountOrZero | None = None
    share: Annotated[float, Meta(ge=0, lt=1)] | None = None
    after: Annotated[int, Meta(ge=1, le=COUNT_MAX)] | None = None


class CanaryFields(msgspec.Struct, forbid_unknown_fields=True):
    """The sample that runs before the rest of a batch, the share of it that may fail, and what
    follows.
    """

    items: Annotated[int, Meta(ge=1, le=COUNT_MAX)]
    max_error_share: Annotated[float, Meta(ge=0, le=1)] = CANARY_ERROR_SHARE
    then: Literal["continue", "stop", "wait"] = "continue"


class CanaryWord(msgspec.Struct, forbid_unknown_fields=True):
    """The body of POST /v1/batches/{batch_id}/canary."""

    action: Literal["continue", "stop"]


class BatchChange(msgspec.Struct, forbid_unknown_fields=True):
    """The body of POST /v1/batches/{batch_id}: absent fields stay unchanged, and null removes a
    value.
    """

    priority: Priority | UnsetType = UNSET
    not_before: NotBefore | UnsetType | None = UNSET
    completion_window: str | UnsetType = UNSET
    max_cost: str | float | UnsetType | None = UNSET
    max_errors: MaxErrorsFields | UnsetType | None = UNSET


def job_controls(
    priority: int, not_before: int | None, max_cost: str | float | None, max_errors: MaxErrorsFields | None
) -> JobControls:
    """Return a new batch's controls, checked."""
    return JobControls(priority, 1000 * (not_before or 0), cost_nano(max_cost), errors_max(max_errors))


def job_canary(asked: CanaryFields | None) -> Canary | None:
    """Return a new batch's canary."""
    return None if asked is None else Canary(asked.items, round(1_000_000 * asked.max_error_share), asked.then)


def changed_controls(body: BatchChange) -> dict[str, Any]:
    """Return the controls that a change names, checked."""
    changed: dict[str, Any] = {}
    if body.priority is not UNSET:
        changed["priority"] = body.priority
    if body.not_before is not UNSET:
        changed["not_before"] = 1000 * (body.not_before or 0)
    if body.max_cost is not UNSET:
        changed["max_cost_nano"] = cost_nano(body.max_cost)
    if body.max_errors is not UNSET:
        changed["max_errors"] = errors_max(body.max_errors)
    return changed


def cost_nano(cost: str | float | None) -> int | None:
    """Return money in billionths; None without a maximum."""
    if cost is None:
        return None
    try:
        nano = nano_of(cost)
    except SettingsError as error:
        raise _bad("max_cost", f"`max_cost`{str(error).removeprefix('cost')}.") from None
    if not nano:
        raise _bad("max_cost", "`max_cost` must be above 0.")
    return nano


def errors_max(asked: MaxErrorsFields | None) -> MaxErrors | None:
    """Return the failed items that a batch allows; None without a maximum."""
    if asked is None:
        return None
    if (asked.count is None) == (asked.share is None):
        raise _bad("max_errors", "`max_errors` needs `count` or `share`, one of them.")
    if asked.share is None:
        if asked.after is not None:
            raise _bad(
                "max_errors.after", "`max_errors.after` goes with `share`; a `count` holds from the first request on."
            )
        return MaxErrors(count=asked.count)
    return MaxErrors(share_ppm=round(1_000_000 * asked.share), after=asked.after or ERRORS_AFTER)


def _bad(param: str, message: str) -> ApiProblem:
    return ApiProblem(400, "invalid_parameter", message, param=param)
