"""Cut work into slices: runs of neighbouring items of one endpoint and one model, bounded in count,
bytes and cost.

An item that is larger than a bound gets a slice of its own. Of the items only a scan's columns are
known.
"""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from operator import sub
from typing import NamedTuple

from tidegate.core.input.lines import LineRules, check_line
from tidegate.core.input.scan import Scan
from tidegate.core.nouns import IngestPlan, SlicePlan
from tidegate.core.usage import estimate
from tidegate.core.usage.inline_files import unread_bytes


class WorkRun(NamedTuple):
    """The items of one endpoint and one model, in work order."""

    endpoint: str
    model: str
    numbers: "array[int]"


def sample_first(runs: Sequence[WorkRun], count: int) -> list[WorkRun]:
    """Put so many items, spread evenly over the input, before all others."""
    numbers = sorted(number for run in runs for number in run.numbers)
    count = min(count, len(numbers))
    sample = {numbers[(2 * place + 1) * len(numbers) // (2 * count)] for place in range(count)}
    parts = [
        WorkRun(run.endpoint, run.model, array("I", [one for one in run.numbers if (one in sample) is is_sample]))
        for is_sample in (True, False)
        for run in runs
    ]
    return [run for run in parts if run.numbers]


def cut_slices(run: WorkRun, first: int, places: Sequence[int], scan: Scan) -> Iterator[SlicePlan]:
    """Yield the slices of a run.

    `first` is the number of the run's first item in the work. `places` are where each item begins
    in the work file, and where the last ends.
    """
    endpoint, model, numbers = run
    if not numbers:
        return
    rules = scan.rules
    columns = (scan.prompt_size, scan.fixed_size, scan.unread_size, scan.output_tokens)
    prompt_size, fixed_size, unread_size, output_tokens = (_Column(column, numbers) for column in columns)

    def units(start: int, stop: int) -> int:
        read = prompt_size.sum(start, stop) + fixed_size.sum(start, stop) - unread_size.sum(start, stop)
        return estimate.work_units(read, output_tokens.sum(start, stop))

    place = 0
    while place < len(numbers):
        stop = min(place + rules.slice_count_max, len(numbers))
        cost = units(place, stop)
        if places[stop] - places[place] > rules.slice_bytes_max or cost > rules.slice_units_max:
            sizes = map(sub, places[place + 1 : stop + 1], places[place:stop])
            costs = (units(at, at + 1) for at in range(place, stop))
            stop = place + _fitting(sizes, costs, rules)
            cost = units(place, stop)
        size = places[stop] - places[place]
        yield SlicePlan(first + place, stop - place, model, endpoint, places[place], size, cost)
        place = stop


class _Column:
    """One number of each item, summed over neighbours in the work; usually it is equal for all."""

    def __init__(self, values: "array[int]", numbers: "array[int]") -> None:
        self._same = values[0] if values == values[:1] * len(values) else None
        self._sums: list[int] = []
        if self._same is None:
            first, count = numbers[0], len(numbers)
            as_read = numbers[-1] - first == count - 1 and numbers == array("I", range(first, first + count))
            own = values[first : first + count] if as_read else map(values.__getitem__, numbers)
            self._sums = [*accumulate(own, initial=0)]

    def sum(self, start: int, stop: int) -> int:
        return self._sums[stop] - self._sums[start] if self._same is None else self._same * (stop - start)


def _fitting(sizes: Iterable[int], costs: Iterable[int], rules: LineRules) -> int:
    """Return how many items, from the first on, stay within the bounds; at least one."""
    size = units = count = 0
    for one_size, one_units in zip(sizes, costs, strict=True):
        size += one_size
        units += one_units
        if count and (size > rules.slice_bytes_max or units > rules.slice_units_max):
            break
        count += 1
    return count


def plan_of_line(line: bytes, rules: LineRules) -> IngestPlan:
    """Return the plan of an input of one good line, with its newline; raise LineFault for a bad
    line.
    """
    checked = check_line(line[:-1], rules)
    prompt_bytes = checked.prompt_size + len(checked.fixed)
    unread = unread_bytes(line[checked.prompt_at : checked.prompt_at + checked.prompt_size])
    units = estimate.work_units(prompt_bytes - unread, checked.output_tokens)
    return IngestPlan(
        1,
        checked.model,
        [SlicePlan(0, 1, checked.model, rules.endpoint, 0, len(line), units)],
        len(line),
        prompt_bytes,
        0,
        file_bytes=unread,
    )


def add_bad(slices: list[SlicePlan], number: int, at: int, size: int, rules: LineRules) -> None:
    """Append a bad item to the last slice of bad items, or to a new one when that is full."""
    last = slices[-1] if slices else None
    if (
        last is None
        or last.model
        or last.count >= rules.slice_count_max
        or last.work_bytes + size > rules.slice_bytes_max
    ):
        slices.append(SlicePlan(number, 1, "", "", at, size, 0))
    else:
        slices[-1] = SlicePlan(last.first, last.count + 1, "", "", last.work_at, last.work_bytes + size, 0)
