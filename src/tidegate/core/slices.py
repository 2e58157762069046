"""Cutting work into slices: runs of neighbouring items of one model, bounded in count, bytes and cost.

An item that is larger than a bound by itself has a slice of its own. Items are known only by what a scan kept of them.
"""

from array import array
from collections.abc import Iterator, Sequence

from tidegate.core import estimate
from tidegate.core.lines import LineRules
from tidegate.core.nouns import SlicePlan
from tidegate.core.scan import Scan


def cut_slices(model: str, numbers: "array[int]", first: int, at: int, scan: Scan) -> Iterator[SlicePlan]:
    """The slices of one model's items, of which the first is item `first` of the work and stands at byte `at`."""
    rules = scan.rules
    place = 0
    while place < len(numbers):
        taken = numbers[place : place + rules.slice_count_max]
        size, units = _measure(taken, scan)
        if size > rules.slice_bytes_max or units > rules.slice_units_max:
            taken = _fitting(taken, scan)
            size, units = _measure(taken, scan)
        yield SlicePlan(first + place, len(taken), model, at, size, units)
        place += len(taken)
        at += size


def _measure(numbers: Sequence[int], scan: Scan) -> tuple[int, int]:
    """The bytes that items take in the work file, and their cost."""
    size = sum(map(scan.size.__getitem__, numbers))
    prompt_size = sum(map(scan.prompt_size.__getitem__, numbers)) + sum(map(scan.fixed_size.__getitem__, numbers))
    return size, estimate.work_units(prompt_size, sum(map(scan.output_tokens.__getitem__, numbers)))


def _fitting(numbers: "array[int]", scan: Scan) -> "array[int]":
    """As many of the items, from the first on, as stay within the bounds; at least one."""
    rules = scan.rules
    size = units = count = 0
    for number in numbers:
        one_size, one_units = _measure((number,), scan)
        size += one_size
        units += one_units
        if count and (size > rules.slice_bytes_max or units > rules.slice_units_max):
            break
        count += 1
    return numbers[:count]


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
