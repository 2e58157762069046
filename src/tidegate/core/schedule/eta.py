"""Forecast when a job will end, and whether in time: pure arithmetic on measured rates, its place
in the queue and its limits.

Rates are what a model served a second while it had work to do, one sample a minute; idle time says
nothing about what a model can serve. Where nothing was measured the answer is None.

What requests take of a model is fitted to those that it answered lately: a part that each takes,
however long it is, and a part for every unit. So backlogs of short and of long requests can be
compared and added up.
"""

from collections.abc import Sequence
from enum import StrEnum
from statistics import fmean, median, stdev

import msgspec

from tidegate.core.schedule.outlooks import Backlog, Minute

_ONE_IN_TWENTY = 1.645
_MINUTE_MS = 60_000
# The slowest rate of a forecast, as a share of the mean.
_SLOWEST = 0.1
# With a single sample the spread is unknown: half of the rate is a wide guess.
_SPREAD_UNKNOWN = 0.5
# A minute counts as busy for at least this long, because less time says little.
_BUSY_MS_MIN = 1_000
# A job that began more recently has shown too little for a rate of its own.
_OWN_MS_MIN = 1_000
# The current rate is measured over the last half minute of work.
_RECENT_BUSY_MS = 30_000
# Below this variance of units (as a share of the mean's square), requests do not show how much
# their length matters.
_VARIANCE_MIN = 0.01


class Linear(msgspec.Struct, frozen=True):
    """An amount that requests take: one part for each request and one for each unit."""

    each: float
    per_unit: float

    def of(self, backlog: Backlog) -> float:
        return self.each * backlog.items + self.per_unit * backlog.units


class RequestCost(msgspec.Struct, frozen=True):
    """The time and the tokens that requests take of a model; shares are counted in tokens."""

    ms: Linear
    tokens: Linear


# Work counted in plain units.
IN_UNITS = RequestCost(Linear(0.0, 1.0), Linear(0.0, 1.0))


class Position(msgspec.Struct, frozen=True):
    """The place of a job on one model: its own rest, the work before it, and the flows beside its
    own.

    `ahead` is the work ahead of the job in its flow. `others` are the weight and the backlog of
    each other awake flow; a backlog is None where it is unknown.
    """

    left: Backlog
    ahead: Backlog = Backlog()
    weight: float = 1.0
    others: Sequence[tuple[float, Backlog | None]] = ()

    @property
    def share(self) -> float:
        """Return the part of the model that the flow can count on while all the others have
        work."""
        return self.weight / (self.weight + sum(weight for weight, _ in self.others))

    @property
    def own(self) -> Backlog:
        """Return all that the flow serves until the job is done."""
        return Backlog(self.left.units + self.ahead.units, self.left.items + self.ahead.items)


class Eta(msgspec.Struct, frozen=True):
    """The time until a job ends: half of such jobs end by `p50_ms`, nineteen of twenty by
    `p95_ms`."""

    p50_ms: int
    p95_ms: int


class JobOutlook(StrEnum):
    LIKELY = "likely"
    AT_RISK = "at_risk"
    IMPOSSIBLE = "impossible"
    UNKNOWN = "unknown"


def slack_ms(time_left_ms: int, left_units: int, rate: float | None) -> int | None:
    """Return the time to spare at this rate, negative when there is none; None without a rate."""
    if rate is None:
        return None
    return int(max(time_left_ms - 1_000 * left_units / max(rate, 1e-9), -1e15))


def fitted(minutes: Sequence[Minute]) -> RequestCost:
    """Return what requests of a model take, fitted to these minutes.

    Minutes that an earlier version wrote have no sums of products; they count only when there are
    no others.
    """
    minutes = [one for one in minutes if one.unit_squares] or minutes
    timed = [one for one in minutes if one.call_ms]
    return RequestCost(
        _fitted(timed, sum(one.call_ms for one in timed), sum(one.unit_ms for one in timed)),
        _fitted(minutes, sum(one.tokens for one in minutes), sum(one.unit_tokens for one in minutes)),
    )


def _fitted(minutes: Sequence[Minute], amount: float, unit_amount: float) -> Linear:
    """Fit a line to all requests of these minutes, with neither part below zero.

    Where their units hardly differ, the whole amount goes by units.
    """
    items, units = sum(one.items for one in minutes), sum(one.units for one in minutes)
    if not (items and units and amount):
        return IN_UNITS.ms
    variance = sum(one.unit_squares for one in minutes) - units * units / items
    if variance < _VARIANCE_MIN * units * units / items:
        return Linear(0.0, amount / units)
    per_unit = min(max((unit_amount - units * amount / items) / variance, 0.0), amount / units)
    return Linear((amount - per_unit * units) / items, per_unit)


def work_before_end(position: Position, takes: RequestCost = IN_UNITS) -> float:
    """Return what the whole model serves until this job is done, if flows share its tokens by
    weight.

    Each other flow gets as many tokens for its weight as the job's flow, but at most its backlog.
    """
    own = takes.ms.of(position.own)
    tokens = max(takes.tokens.of(position.own), 1e-9)
    theirs = 0.0
    for weight, backlog in position.others:
        equal = weight / position.weight
        if backlog is None:
            theirs += own * equal
        else:
            has = takes.tokens.of(backlog)
            theirs += takes.ms.of(backlog) * min(1.0, equal * tokens / has) if has > 0 else 0.0
    return own + theirs


def busy_rates(minutes: Sequence[Minute], takes: RequestCost = IN_UNITS) -> list[float]:
    """Return the work per second of busy time in each minute, the newest last."""
    return [1_000 * _work(one, takes) / _busy_ms(one) for one in minutes if one.units]


def recent_rate(minutes: Sequence[Minute], takes: RequestCost = IN_UNITS) -> float | None:
    """Return the work per second in the last half minute of work; None where nothing was
    measured."""
    work, busy_ms = 0.0, 0
    for one in reversed(minutes):
        work += _work(one, takes)
        busy_ms += _busy_ms(one)
        if busy_ms >= _RECENT_BUSY_MS:
            break
    return 1_000 * work / busy_ms if work else None


def own_rate(
    done: Backlog, begun_ms_ago: int, minutes: Sequence[Minute], takes: RequestCost = IN_UNITS
) -> float | None:
    """Return the work per second that a model serves of this job, by the job's own progress.

    For a job that is alone on the model: requests of earlier jobs may cost more or less for their
    units. None while the job has too little to show.
    """
    items = sum(one.items for one in minutes)
    call_ms = sum(one.call_ms for one in minutes) / items if items else 0.0
    if done.units <= 0 or begun_ms_ago < max(_OWN_MS_MIN, 2 * call_ms):
        return None
    # Calls in flight are half done on average.
    return 1_000 * takes.ms.of(done) / (begun_ms_ago - call_ms / 2)


def best_rates(minutes: Sequence[Minute], slots: int) -> tuple[float, float] | None:
    """Return the work units and items per second that a model may reach; None where nothing was
    measured.

    This takes the best measured minute of each, raised by the slots that stayed free in it.
    """
    found = []
    for one in minutes:
        if one.units:
            at_once = max(1.0, one.call_ms / _busy_ms(one)) if one.call_ms else float(slots)
            each = 1_000 / _busy_ms(one) * max(1.0, slots / at_once)
            found.append((each * one.units, each * one.items))
    return (max(units for units, _ in found), max(items for _, items in found)) if found else None


def _work(minute: Minute, takes: RequestCost) -> float:
    return takes.ms.of(Backlog(minute.units, minute.items))


def _busy_ms(minute: Minute) -> int:
    """Return how long there was work in a minute; the whole minute where it was not counted."""
    return max(minute.busy_ms, _BUSY_MS_MIN) if minute.busy_ms else _MINUTE_MS


def eta(
    position: Position,
    rates: Sequence[float],
    rate_default: float | None = None,
    rate_now: float | None = None,
    takes: RequestCost = IN_UNITS,
) -> Eta | None:
    """Return when a job in this place ends; None where no rate is known.

    A configured default rate stands in for a measured one. The current rate, where known, counts
    more than those of earlier minutes; they still say how much it may change.
    """
    measured = [rate for rate in rates if rate > 0]
    if not measured and rate_default is not None and rate_default > 0:
        measured = [rate_default]
    if not measured:
        return None
    work = work_before_end(position, takes)
    p50_ms = 1_000 * work / (rate_now or median(measured))
    # Over more minutes good and bad ones even out; fewer measured minutes mean less certainty.
    mean = fmean(measured)
    spread = stdev(measured) if len(measured) > 1 else _SPREAD_UNKNOWN * mean
    minutes = max(1.0, p50_ms / _MINUTE_MS)
    slow = mean - _ONE_IN_TWENTY * spread * (1 / minutes + 1 / len(measured)) ** 0.5
    p95_ms = 1_000 * work / (max(slow, _SLOWEST * mean) * ((rate_now or mean) / mean))
    return Eta(int(p50_ms), int(max(p50_ms, p95_ms)))


def not_before(expected: Eta, least: int) -> Eta:
    """Return a forecast in which nothing ends sooner than this."""
    return Eta(max(expected.p50_ms, least), max(expected.p95_ms, least))


def feasible(
    time_left_ms: int,
    position: Position,
    rates: Sequence[float],
    urgent_share: float,
    rate_default: float | None = None,
) -> JobOutlook:
    """Return whether a job in this place ends in time.

    A job is at risk when its share alone may not suffice but urgency can help. It is impossible
    when it would miss its end even with the whole urgent share.
    """
    expected = eta(position, rates, rate_default)
    if expected is None:
        return JobOutlook.UNKNOWN
    if expected.p95_ms <= time_left_ms:
        return JobOutlook.LIKELY
    hurried = Position(position.left)
    alone = eta(hurried, rates, rate_default)
    assert alone is not None, "there was a rate just now"
    best_share = urgent_share + (1 - urgent_share) * position.share
    if min(expected.p50_ms, alone.p50_ms / max(best_share, 1e-9)) <= time_left_ms:
        return JobOutlook.AT_RISK
    return JobOutlook.IMPOSSIBLE
