"""When a job will end, and whether it can end in time: pure arithmetic on measured rates, its place in the queue and its limits.

Rates are a model's work units a second while it had work to do, one sample a minute; idle time says nothing about what a model can
serve. Where nothing was measured there is no answer, and None says so.
"""

from collections.abc import Sequence
from enum import StrEnum
from statistics import fmean, median, stdev

import msgspec

from tidegate.core.schedule.outlooks import Minute

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


class Position(msgspec.Struct, frozen=True):
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


def units_before_end(position: Position) -> float:
    """What the whole model serves until this job is done, if flows share by weight: of every other flow as much for its weight as ours,
    and not more than it has."""
    own = position.ahead_units + position.left_units
    theirs = 0.0
    for weight, backlog in position.others:
        equal = own * weight / position.weight
        theirs += equal if backlog is None else min(backlog, equal)
    return own + theirs


def busy_rates(minutes: Sequence[Minute]) -> list[float]:
    """Work units a second of each minute while there was work, the newest last."""
    return [1_000 * one.units / _busy_ms(one) for one in minutes if one.units]


def recent_rate(minutes: Sequence[Minute]) -> float | None:
    """Work units a second in the last half minute of work; None where nothing was measured."""
    units = busy_ms = 0
    for one in reversed(minutes):
        units += one.units
        busy_ms += _busy_ms(one)
        if busy_ms >= _RECENT_BUSY_MS:
            break
    return 1_000 * units / busy_ms if units else None


def own_rate(position: Position, done_units: int, begun_ms_ago: int, minutes: Sequence[Minute]) -> float | None:
    """Work units a second that the model serves with requests as this job has them, from its own progress and its share; None while it has
    little to show. Other jobs' requests may cost more or less for their units."""
    items = sum(one.items for one in minutes)
    call_ms = sum(one.call_ms for one in minutes) / items if items else 0.0
    if done_units <= 0 or begun_ms_ago < max(_OWN_MS_MIN, 2 * call_ms):
        return None
    # What is in flight is half done on average.
    return 1_000 * done_units / (begun_ms_ago - call_ms / 2) / position.share


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


def _busy_ms(minute: Minute) -> int:
    """Return how long there was work in a minute; the whole minute where it was not counted."""
    return max(minute.busy_ms, _BUSY_MS_MIN) if minute.busy_ms else _MINUTE_MS


def eta(
    position: Position, rates: Sequence[float], rate_default: float | None = None, rate_now: float | None = None
) -> Eta | None:
    """When a job in this place ends. A default rate, where one was configured, stands in for a measured one; the rate of now, where it is
    known, says more than those of earlier minutes, and those say how much it may change."""
    measured = [rate for rate in rates if rate > 0]
    if not measured and rate_default is not None and rate_default > 0:
        measured = [rate_default]
    if not measured:
        return None
    units = units_before_end(position)
    p50_ms = 1_000 * units / (rate_now or median(measured))
    # The longer it takes, the more minutes good and bad even out; the fewer were measured, the less is known.
    mean = fmean(measured)
    spread = stdev(measured) if len(measured) > 1 else _SPREAD_UNKNOWN * mean
    minutes = max(1.0, p50_ms / _MINUTE_MS)
    slow = mean - _ONE_IN_TWENTY * spread * (1 / minutes + 1 / len(measured)) ** 0.5
    p95_ms = 1_000 * units / (max(slow, _SLOWEST * mean) * ((rate_now or mean) / mean))
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
    hurried = Position(position.left_units)
    alone = eta(hurried, rates, rate_default)
    assert alone is not None, "there was a rate just now"
    best_share = urgent_share + (1 - urgent_share) * position.share
    if min(expected.p50_ms, alone.p50_ms / max(best_share, 1e-9)) <= time_left_ms:
        return JobOutlook.AT_RISK
    return JobOutlook.IMPOSSIBLE
