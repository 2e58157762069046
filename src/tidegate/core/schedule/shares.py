"""Bounded shares: how much of a model's work in flight a rule may have taken. It counts by what is stored with the leases."""

from collections.abc import Mapping

from tidegate.core.schedule.snapshot import Why

_SHARED = frozenset({Why.URGENT, Why.FAST_LANE})


def within(
    share: float, why: Why, units: int, in_flight_units: int, in_flight_by_why: Mapping[Why, int], last: Why | None
) -> bool:
    """Whether a rule may take one more slice.

    Where a share is smaller than one slice, none would ever fit: then a rule that has nothing in flight may take the slice after one
    that no such rule took.
    """
    if share <= 0:
        return False
    taken = in_flight_by_why.get(why, 0)
    return taken + units <= share * (in_flight_units + units) or (taken == 0 and last not in _SHARED)
