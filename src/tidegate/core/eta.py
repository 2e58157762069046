"""When a job will end, and whether it can end in time: pure arithmetic on measured rates, its place in the queue and its limits.

Rates are a model's work units a second, one sample a minute, of minutes in which it had work to do; an idle minute says nothing about
what a model can serve. Where nothing was measured there is no answer, and None says so.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import fmean, median, stdev

from tidegate.core.budgets import Budget, Kind, Period

_ONE_IN_TWENTY = 1.645
_MINUTE_MS = 60_000
# A rate never falls to nothing in a forecast: the slowest that is believed is a tenth of the usual.
_SLOWEST = 0.1
# With a single sample nothing is known of the spread: half of the rate is a wide guess.
_SPREAD_UNKNOWN = 0.5
# Months are as short as they ever are, for what is asked is the least.
_PERIODS_MS = {
    Period.MINUTE: _MINUTE_MS,
    Period.HOUR: 60 * _MINUTE_MS,
    Period.DAY: 24 * 60 * _MINUTE_MS,
    Period.WEEK: 7 * 24 * 60 * _MINUTE_MS,
    Period.MONTH: 28 * 24 * 60 * _MINUTE_MS,
}
_SLIDING = frozenset({Period.MINUTE, Period.HOUR})
# Nobody looks further ahead than this many minutes, about two years.
_MINUTES_MAX = 1 << 20


@dataclass(frozen=True, slots=True)
class Position:
    """A job's place on one model: its own work left, the work ahead of it in its flow, the flow's weight, and the weight and backlog of
    each other awake flow (None where the backlog is not known)."""

    left_units: int
    ahead_units: int = 0
    weight: float = 1.0
    others: Sequence[tuple[float, int | None]] = ()

    @property
    def share(self) -> float:
        """The part of the model that its flow can count on while all the others have work."""
        return self.weight / (self.weight + sum(weight for weight, _ in self.others))


@dataclass(frozen=True, slots=True)
class Eta:
    """How long from now: half of such jobs end by `p50_ms`, nineteen of twenty by `p95_ms`."""

    p50_ms: int
    p95_ms: int


class Outlook(StrEnum):
    LIKELY = "likely"
    AT_RISK = "at_risk"
    IMPOSSIBLE = "impossible"
    UNKNOWN = "unknown"


def slack_ms(time_left_ms: int, left_units: int, rate: float | None) -> int | None:
    """Time to spare at this rate, negative when there is none; None while there is no rate."""
    if rate is None:
        return None
    return int(max(time_left_ms - 1_000 * left_units / max(rate, 1e-9), -1e15))


def units_before_end(position: Position) -> float:
    """What the whole model serves until this job is done, if flows share by weight: of every other flow as much for its weight as ours,
    and not more than it has."""
    own = position.ahead_units + position.left_units
    theirs = 0.0
    for weight, backlog in position.others:
        equal = own * weight / position.weight
        theirs += equal if backlog is None else min(backlog, equal)
    return own + theirs


def eta(position: Position, rates: Sequence[float], rate_default: float | None = None) -> Eta | None:
    """When a job in this place ends. A default rate, where one was configured, stands in for a measured one."""
    measured = [rate for rate in rates if rate > 0]
    if not measured and rate_default is not None and rate_default > 0:
        measured = [rate_default]
    if not measured:
        return None
    units = units_before_end(position)
    p50_ms = 1_000 * units / median(measured)
    # The longer it takes, the more minutes good and bad even out; the fewer were measured, the less is known.
    mean = fmean(measured)
    spread = stdev(measured) if len(measured) > 1 else _SPREAD_UNKNOWN * mean
    minutes = max(1.0, p50_ms / _MINUTE_MS)
    slow = mean - _ONE_IN_TWENTY * spread * (1 / minutes + 1 / len(measured)) ** 0.5
    p95_ms = 1_000 * units / max(slow, _SLOWEST * mean)
    return Eta(int(p50_ms), int(max(p50_ms, p95_ms)))


def least_ms(calls: int, ways: Sequence[Sequence[Budget]]) -> int:
    """How long so many calls take at the least over ways that are each bound by these budgets, were all of them unused now.

    What is measured in a quiet minute knows nothing of a limit that was not reached yet. A way that nothing binds takes any number at once.
    """
    if calls <= 0 or not ways or any(_sent(way, 0) is None for way in ways):
        return 0
    soonest, latest = 0, _MINUTES_MAX
    while soonest < latest:
        minutes = (soonest + latest) // 2
        if sum(_sent(way, minutes * _MINUTE_MS) or 0 for way in ways) >= calls:
            latest = minutes
        else:
            soonest = minutes + 1
    return soonest * _MINUTE_MS


def _sent(way: Sequence[Budget], within_ms: int) -> int | None:
    """How many calls these budgets can let through within this time; None for any number."""
    counts = [
        # A sliding period is full once at the beginning; of a calendar's, one may end and the next begin a moment from now.
        limit.requests * (within_ms // _PERIODS_MS[limit.period] + (1 if limit.period in _SLIDING else 2))
        for budget in way
        if budget.kind is Kind.CALLS
        for limit in budget.limits
        if limit.enabled and limit.requests is not None and limit.period in _PERIODS_MS
    ]
    return min(counts) if counts else None


def not_before(expected: Eta, least: int) -> Eta:
    """The same forecast, but nothing ends sooner than this."""
    return Eta(max(expected.p50_ms, least), max(expected.p95_ms, least))


def feasible(
    time_left_ms: int,
    position: Position,
    rates: Sequence[float],
    urgent_share: float,
    rate_default: float | None = None,
) -> Outlook:
    """Whether a job in this place ends in time.

    At risk is what the share alone may not reach but urgency can help; impossible is what would miss even with the whole urgent share.
    """
    expected = eta(position, rates, rate_default)
    if expected is None:
        return Outlook.UNKNOWN
    if expected.p95_ms <= time_left_ms:
        return Outlook.LIKELY
    hurried = Position(position.left_units)
    alone = eta(hurried, rates, rate_default)
    assert alone is not None, "there was a rate just now"
    best_share = urgent_share + (1 - urgent_share) * position.share
    if min(expected.p50_ms, alone.p50_ms / max(best_share, 1e-9)) <= time_left_ms:
        return Outlook.AT_RISK
    return Outlook.IMPOSSIBLE
