"""Limits that a caller asks for on a batch of its own: checked until they can be trusted. They can only tighten what binds it anyway."""

from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from tidegate.core.budgets import Limit, Period
from tidegate.core.errors import ApiProblem

LIMITS_MAX = 12
COUNT_MAX = 1_000_000_000_000_000
_SHOWN_CHARS_MAX = 40

Count = Annotated[int, Meta(ge=1, le=COUNT_MAX)]


class LimitAsk(msgspec.Struct, forbid_unknown_fields=True):
    """At most so many in one period; `enabled: false` skips the entry."""

    period: str
    requests: Count | None = None
    tokens: Count | None = None
    enabled: bool = True


LimitAsks = Annotated[list[LimitAsk], Meta(max_length=LIMITS_MAX)]


def job_limits(asked: Sequence[LimitAsk] | None) -> tuple[Limit, ...]:
    """The same limits as budgets know them; each period once, each limiting something."""
    found: dict[Period, Limit] = {}
    for index, one in enumerate(asked or ()):
        where = f"limits[{index}]"
        period = next((known for known in Period if known == one.period.lower()), None)
        if period is None:
            shown = one.period[:_SHOWN_CHARS_MAX]
            raise _bad(f"{where}.period", f"`{where}.period` is {shown!r}; it must be one of: {', '.join(Period)}.")
        if period in found:
            raise _bad(f"{where}.period", f"`limits` names {period} twice; put requests and tokens in one entry.")
        if one.requests is None and one.tokens is None:
            raise _bad(where, f"`{where}` limits nothing: give `requests`, `tokens` or both.")
        found[period] = Limit(period, one.requests, one.tokens, one.enabled)
    return tuple(found.values())


def _bad(param: str, message: str) -> ApiProblem:
    return ApiProblem(400, "invalid_parameter", message, param=param)
