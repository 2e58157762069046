"""The check of limits that a caller sets on its own batch, or an operator on a key.

A batch's limits can only tighten those that bind it anyway."""

from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from tidegate.core.budgets.budget import Limit, Period
from tidegate.core.errors import ApiProblem, SettingsError
from tidegate.core.usage.prices import nano_of

LIMITS_MAX = 12
COUNT_MAX = 1_000_000_000_000_000
_SHOWN_CHARS_MAX = 40

LimitCount = Annotated[int, Meta(ge=1, le=COUNT_MAX)]


class LimitFields(msgspec.Struct, forbid_unknown_fields=True):
    """The most that may be used in one period.

    `enabled: false` skips the entry. `cost` is money, as a number or as decimal text.
    """

    period: str
    requests: LimitCount | None = None
    tokens: LimitCount | None = None
    enabled: bool = True
    cost: str | float | None = None


class KeyLimitFields(LimitFields, forbid_unknown_fields=True):
    """A limit of a key.

    It can also bound the batches that the key creates, and the bytes of their inputs.
    """

    batches: LimitCount | None = None
    bytes: LimitCount | None = None


RequestLimits = Annotated[list[LimitFields], Meta(max_length=LIMITS_MAX)]
KeyRequestLimits = Annotated[list[KeyLimitFields], Meta(max_length=LIMITS_MAX)]


def job_limits(asked: Sequence[LimitFields] | None, name: str = "limits") -> tuple[Limit, ...]:
    """Return the limits for budgets.

    Each period may occur once, and each entry must limit something. `name` is the name of their
    field.
    """
    found: dict[Period, Limit] = {}
    for index, one in enumerate(asked or ()):
        where = f"{name}[{index}]"
        period = next((known for known in Period if known == one.period.lower()), None)
        if period is None:
            shown = one.period[:_SHOWN_CHARS_MAX]
            raise _bad(f"{where}.period", f"`{where}.period` is {shown!r}; it must be one of: {', '.join(Period)}.")
        if period in found:
            raise _bad(f"{where}.period", f"`{name}` names {period} twice; put all that it limits in one entry.")
        created = (one.batches, one.bytes) if isinstance(one, KeyLimitFields) else (None, None)
        if (one.requests, one.tokens, one.cost, *created) == (None,) * 5:
            raise _bad(where, f"`{where}` limits nothing: give `requests`, `tokens`, `cost` or several of them.")
        found[period] = Limit(period, one.requests, one.tokens, one.enabled, _nano(where, one.cost), *created)
    return tuple(found.values())


def _nano(where: str, cost: str | float | None) -> int | None:
    if cost is None:
        return None
    try:
        nano = nano_of(cost)
    except SettingsError as error:
        raise _bad(f"{where}.cost", f"`{where}.cost`{str(error).removeprefix('cost')}.") from None
    if not nano:
        raise _bad(f"{where}.cost", f"`{where}.cost` must be above 0.")
    return nano


def _bad(param: str, message: str) -> ApiProblem:
    return ApiProblem(400, "invalid_parameter", message, param=param)
