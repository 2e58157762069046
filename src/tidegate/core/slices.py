"""Cutting work into slices: runs of neighbouring items of one model, bounded in count, bytes and cost.

An item that is larger than a bound by itself has a slice of its own. Items are known only by what a scan kept of them.
"""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from operator import add

from tidegate.core import estimate
from tidegate.core.lines import LineRules
from tidegate.core.nouns import SlicePlan
from tidegate.core.scan import Scan


def cut_slices(model: str, numbers: "array[int]", first: int, places: Sequence[int], scan: Scan) -> Iterator[SlicePlan]:
    """The slices of one model's items, of which the first is item `first` of the work; `places` are where in the work each
    of them begins, and where the last ends."""
    rules = scan.rules
    read = _sums(scan.prompt_size, numbers)
    if any(scan.fixed_size):
        read = [*map(add, read, _sums(scan.fixed_size, numbers))]
    written = _sums(scan.output_tokens, numbers)
    place = 0
    while place < len(numbers):
        stop = min(place + rules.slice_count_max, len(numbers))
        units = estimate.work_units(read[stop] - read[place], written[stop] - written[place])
        if places[stop] - places[place] > rules.slice_bytes_max or units > rules.slice_units_max:
            sizes = (places[at + 1] - places[at] for at in range(place, stop))
            costs = (
                estimate.work_units(read[at + 1] - read[at], written[at + 1] - written[at]) for at in range(place, stop)
            )
            stop = place + _fitting(sizes, costs, rules)
            units = estimate.work_units(read[stop] - read[place], written[stop] - written[place])
        yield SlicePlan(first + place, stop - place, model, places[place], places[stop] - places[place], units)
        place = stop


def _sums(column: "array[int]", numbers: "array[int]") -> list[int]:
    """Of the items before each, and of all."""
    return [*accumulate(map(column.__getitem__, numbers), initial=0)]


def _fitting(sizes: Iterable[int], costs: Iterable[int], rules: LineRules) -> int:
    """How many of the items, from the first on, stay within the bounds; at least one."""
    size = units = count = 0
    for one_size, one_units in zip(sizes, costs, strict=True):
        size += one_size
        units += one_units
        if count and (size > rules.slice_bytes_max or units > rules.slice_units_max):
            break
        count += 1
    return count


def add_bad(slices: list[SlicePlan], number: int, at: int, size: int, rules: LineRules) -> None:
    """Put one bad item behind the others, in the last slice of bad items while that has room."""
    last = slices[-1] if slices else None
    if (
        last is None
        or last.model
        or last.count >= rules.slice_count_max
        or last.work_bytes + size > rules.slice_bytes_max
    ):
        slices.append(SlicePlan(number, 1, "", at, size, 0))
    else:
        slices[-1] = SlicePlan(last.first, last.count + 1, "", last.work_at, last.work_bytes + size, 0)
