"""How much was used in windows of any alignment: what a limit is held against. It knows moments and amounts, and not whose they are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

MINUTE_S = 60.0

# When something was used, and how much of it.
Use = tuple[float, int]


def fullest(uses: Iterable[Use], window_s: float = MINUTE_S) -> int:
    """The most in any window of this length."""
    ordered = sorted(uses)
    most = held = first = 0
    for at, amount in ordered:
        held += amount
        while ordered[first][0] <= at - window_s:
            held -= ordered[first][1]
            first += 1
        most = max(most, held)
    return most


def exceeded(uses: Iterable[Use], limit: int, window_s: float = MINUTE_S) -> int:
    """How many of the windows that end with a use hold more than the limit."""
    ordered = sorted(uses)
    held = first = count = 0
    for at, amount in ordered:
        held += amount
        while ordered[first][0] <= at - window_s:
            held -= ordered[first][1]
            first += 1
        count += held > limit
    return count


def mean_use(uses: Iterable[Use], begin: float, end: float, limit: int, window_s: float = MINUTE_S) -> float:
    """How full a window is on average, over all windows that lie between two moments.

    What comes in bursts a little more than a window apart is measured so too: whether the last burst lies just before or just after the
    end says nothing about how much of the limit was used."""
    last = end - window_s
    within = sum(amount * max(0.0, min(at, last) - max(at - window_s, begin)) for at, amount in uses)
    return within / (limit * (last - begin))


def used(uses: Sequence[Use], begin: float, end: float, limit: int, window_s: float = MINUTE_S) -> float:
    """The part that was used of what a limit allows between two moments."""
    return sum(amount for at, amount in uses if begin <= at < end) / (limit * (end - begin) / window_s)
