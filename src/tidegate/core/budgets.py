"""Budgets: so many requests and tokens per period, for whoever they bind.

    minutes and hours slide; days, weeks and months are UTC calendar; lifetime is a total

A budget is named by what it binds (a deployment, a resource, a tenant, a user, a key, a job). What is taken is taken from all of a call's
budgets or from none. This module knows arithmetic only: who keeps the numbers is a matter of the Limits port.
"""

from dataclasses import dataclass
from enum import StrEnum

# A grant made at the database's moment g is sent before g + GRANT_MS, or not at all.
GRANT_MS = 250
NEVER_MS = 2**53
# More than anyone can mean: what is above it is a broken estimate or a hostile usage.
TOKENS_MAX = 2**50


class Period(StrEnum):
    MINUTE = "minute"
    HOUR = "hour"
    DAY = "day"
    WEEK = "week"
    MONTH = "month"
    LIFETIME = "lifetime"


class Bound(StrEnum):
    """What a budget binds."""

    DEPLOYMENT = "deployment"
    RESOURCE = "resource"
    TENANT = "tenant"
    USER = "user"
    KEY = "key"
    JOB = "job"


@dataclass(frozen=True, slots=True)
class Limit:
    """At most so many in one period; None leaves that side open."""

    period: Period
    requests: int | None = None
    tokens: int | None = None
    enabled: bool = True


@dataclass(frozen=True, slots=True)
class Budget:
    """What one thing may use. Two budgets with the same name are the same budget, in every process."""

    bound: Bound
    name: str
    limits: tuple[Limit, ...]

    @property
    def id(self) -> str:
        return f"{self.bound}:{self.name}"


@dataclass(frozen=True, slots=True)
class Ask:
    """What a process will send in the next moment under the same budgets. `tokens` is the sum for all of the requests."""

    budgets: tuple[Budget, ...]
    requests: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Grant:
    """Leave to send: `requests` of those asked for, with `tokens` reserved, until `lasts_ms` after the question was asked.

    Fewer than asked for: `wait_ms` is when one more would fit if nobody settled before, NEVER_MS when it never will, and `spent` is the id
    of the budget; with no `wait_ms` it is worth asking for the rest at once. `id` is what settling refers to.
    """

    id: str
    requests: int
    tokens: int
    lasts_ms: int
    wait_ms: int = 0
    spent: str = ""


@dataclass(frozen=True, slots=True)
class Settlement:
    """What became of part of a grant: requests that were never sent, tokens that were reserved for what was, and tokens really used."""

    grant_id: str
    budgets: tuple[Budget, ...]
    unsent_requests: int
    reserved_tokens: int
    used_tokens: int


def with_limits(budgets: tuple[Budget, ...], bound: Bound, name: str, limits: tuple[Limit, ...]) -> tuple[Budget, ...]:
    """These budgets with more limits on one of them: of two for the same period both hold, so the tighter side of each counts."""
    more = [limit for limit in limits if limit.enabled]
    if not more:
        return budgets
    found = next((one for one in budgets if one.bound is bound and one.name == name), Budget(bound, name, ()))
    tightest = {limit.period: limit for limit in found.limits if limit.enabled}
    for limit in more:
        known = tightest.get(limit.period, limit)
        tightest[limit.period] = Limit(
            limit.period, _least(known.requests, limit.requests), _least(known.tokens, limit.tokens)
        )
    others = tuple(one for one in budgets if one is not found)
    return (*others, Budget(bound, name, tuple(tightest.values())))


def _least(one: int | None, other: int | None) -> int | None:
    given = [number for number in (one, other) if number is not None]
    return min(given) if given else None
