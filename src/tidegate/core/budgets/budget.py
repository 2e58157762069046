"""Budgets: so many requests and tokens per period, or so much money, for what they bind.

    minutes and hours slide; days, weeks and months are UTC calendar; lifetime is a total

A budget is named by what it binds (a deployment, a resource, a tenant, a team, a user, a key, a
job). A call takes from all of its budgets or from none. A limit in money makes a budget of its own,
in nano-units. It is hard: a call sets aside the most that it can cost. This module knows arithmetic
only: the Limits port keeps the numbers.
"""

from collections.abc import Iterable
from enum import StrEnum

import msgspec

# A grant made at the database's moment g is sent before g + GRANT_MS, or not at all.
GRANT_MS = 250
NEVER_MS = 2**53
# A number above this is a broken estimate or a hostile usage.
TOKENS_MAX = 2**50


class Period(StrEnum):
    MINUTE = "minute"
    HOUR = "hour"
    DAY = "day"
    WEEK = "week"
    MONTH = "month"
    LIFETIME = "lifetime"

    @property
    def slides(self) -> bool:
        """Return whether room comes back bit by bit."""
        return self in (Period.MINUTE, Period.HOUR)


class BudgetKind(StrEnum):
    """The kinds of budgets: requests and tokens of calls, their cost, or created jobs and the bytes
    of their inputs.
    """

    CALLS = "calls"
    MONEY = "money"
    CREATED = "created"


class LimitBound(StrEnum):
    """The kinds of things that a budget can bind."""

    DEPLOYMENT = "deployment"
    RESOURCE = "resource"
    TENANT = "tenant"
    TEAM = "team"
    USER = "user"
    KEY = "key"
    JOB = "job"


class Limit(msgspec.Struct, frozen=True):
    """The most that one period may use.

    None sets no limit. `nano` is money; `jobs` and `bytes` limit what is created.
    """

    period: Period
    requests: int | None = None
    tokens: int | None = None
    enabled: bool = True
    nano: int | None = None
    jobs: int | None = None
    bytes: int | None = None


class Budget(msgspec.Struct, frozen=True):
    """The limits of one thing.

    Budgets of a kind with the same name are the same budget, in every process.
    """

    bound: LimitBound
    name: str
    limits: tuple[Limit, ...]
    kind: BudgetKind = BudgetKind.CALLS

    @property
    def in_money(self) -> bool:
        return self.kind is BudgetKind.MONEY

    @property
    def id(self) -> str:
        # No bound is named like a kind, so no name can be taken for another budget's.
        return f"{self.bound}:{self.name}" if self.kind is BudgetKind.CALLS else f"{self.kind}:{self.bound}:{self.name}"


def budgets_of(bound: LimitBound, name: str, limits: Iterable[Limit]) -> tuple[Budget, ...]:
    """Return the budgets that these limits make: one of requests and tokens, one of money, or
    neither.
    """
    binding = [limit for limit in limits if limit.enabled]
    counted = tuple(
        Limit(one.period, one.requests, one.tokens) for one in binding if (one.requests, one.tokens) != (None, None)
    )
    money = tuple(Limit(one.period, nano=one.nano) for one in binding if one.nano is not None)
    found = (Budget(bound, name, counted), Budget(bound, name, money, BudgetKind.MONEY))
    return tuple(one for one in found if one.limits)


def creation_budgets(bound: LimitBound, name: str, limits: Iterable[Limit]) -> tuple[Budget, ...]:
    """Return the budget of created jobs, counted as requests, and of the bytes of their inputs,
    counted as tokens.
    """
    created = tuple(
        Limit(one.period, one.jobs, one.bytes)
        for one in limits
        if one.enabled and (one.jobs, one.bytes) != (None, None)
    )
    return (Budget(bound, name, created, BudgetKind.CREATED),) if created else ()


class BudgetRequest(msgspec.Struct, frozen=True):
    """The requests that a process will soon send under the same budgets.

    `tokens` and `nano` are sums over all of them.
    """

    budgets: tuple[Budget, ...]
    requests: int
    tokens: int
    nano: int = 0


class SideRoom(msgspec.Struct, frozen=True):
    """The requests or tokens that a limit has left, and the time until it has all again.

    `resets_ms` is NEVER_MS when time alone does not bring the room back.
    """

    most: int
    left: int
    resets_ms: int

    def later(self, ms: int) -> "SideRoom":
        """Return this room after some time in which nothing was taken."""
        if self.resets_ms >= NEVER_MS:
            return self
        resets_ms = max(0, self.resets_ms - ms)
        return SideRoom(self.most, self.left if resets_ms else self.most, resets_ms)


class LimitRoom(msgspec.Struct, frozen=True):
    """The room that one limit of one budget has left; None for a side without a limit."""

    budget: Budget
    period: Period
    requests: SideRoom | None
    tokens: SideRoom | None

    def later(self, ms: float) -> "LimitRoom":
        """Return this room after some time in which nothing was taken."""
        requests = None if self.requests is None else self.requests.later(int(ms))
        tokens = None if self.tokens is None else self.tokens.later(int(ms))
        return LimitRoom(self.budget, self.period, requests, tokens)


class Grant(msgspec.Struct, frozen=True):
    """The right to send `requests` of those asked for, with `tokens` reserved, until `lasts_ms`
    after the question.

    Settling refers to the grant by its `id`. `nano` of money are set aside. `rooms` is the room
    that the limits of requests and tokens have left after this grant, where that is known.

    When fewer requests are granted than asked for:

    - `wait_ms` is the time until one more would fit if nothing is settled before; NEVER_MS when it
      never will. 0 means: ask for the rest at once.
    - `spent` is the id of the budget that refused.
    - `left_tokens` is the most tokens of a smaller request that would still be granted, where a
      day, a week, a month or a lifetime has too few left.
    - `left_nano` is what the tightest budget in money has left if all calls in flight cost nothing,
      `renews_ms` the time until it has more, and `tightest` its id.
    """

    id: str
    requests: int
    tokens: int
    lasts_ms: int
    wait_ms: int = 0
    spent: str = ""
    left_tokens: int = 0
    nano: int = 0
    left_nano: int = TOKENS_MAX
    renews_ms: int = 0
    tightest: str = ""
    rooms: tuple[LimitRoom, ...] = ()


class Settlement(msgspec.Struct, frozen=True):
    """The end of a part of a grant: the requests never sent, what was reserved, and what was
    used."""

    grant_id: str
    budgets: tuple[Budget, ...]
    unsent_requests: int
    reserved_tokens: int
    used_tokens: int
    reserved_nano: int = 0
    used_nano: int = 0

    @property
    def gives_back(self) -> bool:
        """Return whether less was used than was taken."""
        return (
            self.unsent_requests > 0 or self.used_tokens < self.reserved_tokens or self.used_nano < self.reserved_nano
        )

    def plus(self, other: "Settlement") -> "Settlement":
        """Return this and another settlement of the same grant as one."""
        return Settlement(
            self.grant_id,
            self.budgets,
            self.unsent_requests + other.unsent_requests,
            self.reserved_tokens + other.reserved_tokens,
            self.used_tokens + other.used_tokens,
            self.reserved_nano + other.reserved_nano,
            self.used_nano + other.used_nano,
        )


def with_limits(
    budgets: tuple[Budget, ...], bound: LimitBound, name: str, limits: tuple[Limit, ...]
) -> tuple[Budget, ...]:
    """Return the budgets with more limits on one of them.

    Of two limits for a period the tighter side of each counts.
    """
    more = [limit for limit in limits if limit.enabled]
    if not more:
        return budgets
    own = [one for one in budgets if one.bound is bound and one.name == name]
    others = tuple(one for one in budgets if one not in own)
    return (*others, *budgets_of(bound, name, tightest([*(limit for one in own for limit in one.limits), *more])))


def tightest(limits: Iterable[Limit]) -> tuple[Limit, ...]:
    """Return one limit for each period, with the least of each side, because all of the limits
    hold.
    """
    found: dict[Period, Limit] = {}
    for limit in limits:
        if limit.enabled:
            known = found.get(limit.period, limit)
            found[limit.period] = Limit(
                limit.period,
                _least(known.requests, limit.requests),
                _least(known.tokens, limit.tokens),
                nano=_least(known.nano, limit.nano),
                jobs=_least(known.jobs, limit.jobs),
                bytes=_least(known.bytes, limit.bytes),
            )
    return tuple(found.values())


def _least(one: int | None, other: int | None) -> int | None:
    given = [number for number in (one, other) if number is not None]
    return min(given) if given else None
