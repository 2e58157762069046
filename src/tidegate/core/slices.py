"""Cutting work into slices: runs of neighbouring items of one model, bounded in count, bytes and cost.

An item that is larger than a bound by itself has a slice of its own. Items are known only by what a scan kept of them.
"""

from array import array
from collections.abc import Iterator

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


def consecutive(numbers: "array[int]") -> bool:
    """Whether items stand in the work as they stand in the input."""
    first, count = numbers[0], len(numbers)
    return numbers[-1] - first == count - 1 and numbers == array("I", range(first, first + count))


def _measure(numbers: "array[int]", scan: Scan) -> tuple[int, int]:
    """The bytes that items take in the work file, and their cost."""
    columns = (scan.size, scan.prompt_size, scan.fixed_size, scan.output_tokens)
    if consecutive(numbers):
        chosen = slice(numbers[0], numbers[-1] + 1)
        size, prompt_size, fixed_size, output_tokens = (sum(column[chosen]) for column in columns)
    else:
        size, prompt_size, fixed_size, output_tokens = (sum(map(column.__getitem__, numbers)) for column in columns)
    return size, estimate.work_units(prompt_size + fixed_size, output_tokens)


def _fitting(numbers: "array[int]", scan: Scan) -> "array[int]":
    """As many of the items, from the first on, as stay within the bounds; at least one."""
    rules = scan.rules
    size = units = count = 0
    for place in range(len(numbers)):
        one_size, one_units = _measure(numbers[place : place + 1], scan)
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
