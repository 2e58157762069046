"""When a job will end, and whether it can end in time: pure arithmetic on measured rates, its place in the queue and its limits.

Rates are what a model served a second while it had work to do, one sample a minute; idle time says nothing about what a model can
serve. Where nothing was measured there is no answer, and None says so.

What requests take of a model is fitted to those that it answered lately: a part that each takes, however long it is, and a part for every
unit. So a backlog of short requests and one of long ones can be compared, and added up.
"""

from collections.abc import Sequence
from enum import StrEnum
from statistics import fmean, median, stdev

import msgspec

from tidegate.core.schedule.outlooks import Backlog, Minute

_ONE_IN_TWENTY = 1.645
_MINUTE_MS = 60_000
# A rate never falls to nothing in a forecast: the slowest that is believed is a tenth of the usual.
_SLOWEST = 0.1
# With a single sample nothing is known of the spread: half of the rate is a wide guess.
_SPREAD_UNKNOWN = 0.5
# What was served in less time than this says little.
_BUSY_MS_MIN = 1_000
# A job that began more recently has too little to show for a rate of its own.
_OWN_MS_MIN = 1_000
# The pace of now is that of the last half minute in which there was work.
_RECENT_BUSY_MS = 30_000
# Requests whose units differ by less (the variance, as a share of the mean's square) do not show what longer or shorter ones take.
_VARIANCE_MIN = 0.01


class Linear(msgspec.Struct, frozen=True):
    """An amount that requests take: so much each, and so much for each unit."""

    each: float
    per_unit: float

    def of(self, backlog: Backlog) -> float:
        return self.each * backlog.items + self.per_unit * backlog.units


class RequestCost(msgspec.Struct, frozen=True):
    """What requests take of a model: the time of their calls, and the tokens that shares are counted in."""

    ms: Linear
    tokens: Linear


# Work is counted in units.
IN_UNITS = RequestCost(Linear(0.0, 1.0), Linear(0.0, 1.0))


class Position(msgspec.Struct, frozen=True):
    """A job's place on one model: what is left of it, what is ahead of it in its flow, the flow's weight, and the weight and backlog of
    each other awake flow (None where the backlog is not known)."""

    left: Backlog
    ahead: Backlog = Backlog()
    weight: float = 1.0
    others: Sequence[tuple[float, Backlog | None]] = ()

    @property
    def share(self) -> float:
        """The part of the model that its flow can count on while all the others have work."""
        return self.weight / (self.weight + sum(weight for weight, _ in self.others))

    @property
    def own(self) -> Backlog:
        """All that its flow serves until the job is done."""
        return Backlog(self.left.units + self.ahead.units, self.left.items + self.ahead.items)


class Eta(msgspec.Struct, frozen=True):
    """How long from now: half of such jobs end by `p50_ms`, nineteen of twenty by `p95_ms`."""

    p50_ms: int
    p95_ms: int


class JobOutlook(StrEnum):
    LIKELY = "likely"
    AT_RISK = "at_risk"
    IMPOSSIBLE = "impossible"
    UNKNOWN = "unknown"


def slack_ms(time_left_ms: int, left_units: int, rate: float | None) -> int | None:
    """Time to spare at this rate, negative when there is none; None while there is no rate."""
    if rate is None:
        return None
    return int(max(time_left_ms - 1_000 * left_units / max(rate, 1e-9), -1e15))


def fitted(minutes: Sequence[Minute]) -> RequestCost:
    """What requests of a model take, by those of these minutes. An earlier version of the program wrote down no sums of products."""
    minutes = [one for one in minutes if one.unit_squares] or minutes
    timed = [one for one in minutes if one.call_ms]
    return RequestCost(
        _fitted(timed, sum(one.call_ms for one in timed), sum(one.unit_ms for one in timed)),
        _fitted(minutes, sum(one.tokens for one in minutes), sum(one.unit_tokens for one in minutes)),
    )


def _fitted(minutes: Sequence[Minute], amount: float, unit_amount: float) -> Linear:
    """Fit a line to all requests of these minutes, with neither part below nothing. Where their units hardly differ, all goes by units."""
    items, units = sum(one.items for one in minutes), sum(one.units for one in minutes)
    if not (items and units and amount):
        return IN_UNITS.ms
    variance = sum(one.unit_squares for one in minutes) - units * units / items
    if variance < _VARIANCE_MIN * units * units / items:
        return Linear(0.0, amount / units)
    per_unit = min(max((unit_amount - units * amount / items) / variance, 0.0), amount / units)
    return Linear((amount - per_unit * units) / items, per_unit)


def work_before_end(position: Position, takes: RequestCost = IN_UNITS) -> float:
    """What the whole model serves until this job is done, if flows share its tokens by weight: of every other flow as many for its weight
    as of ours, and not more than it has."""
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
    """Work a second of each minute while there was any, the newest last."""
    return [1_000 * _work(one, takes) / _busy_ms(one) for one in minutes if one.units]


def recent_rate(minutes: Sequence[Minute], takes: RequestCost = IN_UNITS) -> float | None:
    """Work a second in the last half minute of work; None where nothing was measured."""
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
    """Work a second that the model serves with requests as this job has them, from the progress of a job that is alone there; None while
    it has little to show. Requests of the jobs before may cost more or less for their units."""
    items = sum(one.items for one in minutes)
    call_ms = sum(one.call_ms for one in minutes) / items if items else 0.0
    if done.units <= 0 or begun_ms_ago < max(_OWN_MS_MIN, 2 * call_ms):
        return None
    # What is in flight is half done on average.
    return 1_000 * takes.ms.of(done) / (begun_ms_ago - call_ms / 2)


def best_rates(minutes: Sequence[Minute], slots: int) -> tuple[float, float] | None:
    """Work units and items a second that a model may reach: the best of each that was measured, and as much more as slots stayed free
    meanwhile. None where nothing was measured."""
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
    """When a job in this place ends. A default rate, where one was configured, stands in for a measured one; the rate of now, where it is
    known, says more than those of earlier minutes, and those say how much it may change."""
    measured = [rate for rate in rates if rate > 0]
    if not measured and rate_default is not None and rate_default > 0:
        measured = [rate_default]
    if not measured:
        return None
    work = work_before_end(position, takes)
    p50_ms = 1_000 * work / (rate_now or median(measured))
    # The longer it takes, the more minutes good and bad even out; the fewer were measured, the less is known.
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
    """Whether a job in this place ends in time.

    At risk is what the share alone may not reach but urgency can help; impossible is what would miss even with the whole urgent share.
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
