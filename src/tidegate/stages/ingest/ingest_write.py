"""The writer of the work file: good lines, bad lines, lines that are not run, and the trailer.

The input is read in its own order, a window at a time. Lines of a window that stand together in the
work file are written together, so no line is read by itself. Nothing is checked or ordered here.
"""

import os
import sys
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from heapq import merge
from itertools import accumulate, compress, count, pairwise
from operator import gt
from pathlib import Path

import msgspec

from tidegate.core.answers.copied_lines import WorkCopy, read_source
from tidegate.core.input.line_faults import BodyFault, LineFault, custom_id_of
from tidegate.core.input.scan import Scan
from tidegate.core.input.slices import WorkRun, add_bad, cut_slices
from tidegate.core.job_shape import NO_COPIES, CopiedItems
from tidegate.core.nouns import IngestPlan, SlicePlan
from tidegate.stages.ingest.join_input import LinePlaces
from tidegate.stages.ingest.same_lines import NONE_SAME, SameLines, read_keyed

WINDOW_BYTES = 8 << 20
BAD_REQUEST = 400
_COPIES_AT_ONCE = 1_000
# Lines that keep the order of the input need no large window, and a small one fits the processor's
# cache.
WINDOW_BYTES_IN_ORDER = 256 << 10


class BadItem(msgspec.Struct):
    """A bad line as the work file carries it to the worker, which turns it into an item error.

    `status` is 400 if only the body is wrong: then the item's line looks like a model server's
    answer, and `param` names the parameter. `place` says in words where the author finds the line;
    its number in `file` is `line`.
    """

    custom_id: str | None
    code: str
    message: str
    line: int
    status: int | None = None
    param: str | None = None
    place: str = ""
    file: str = ""


class WorkInput(msgspec.Struct, frozen=True):
    """The facts about an input beside its scan.

    - `twice`: items whose custom_id an earlier line has, with that line.
    - `places`: where its lines stand.
    - `same`: items that are not run.
    """

    twice: dict[int, int]
    places: LinePlaces
    same: SameLines = NONE_SAME


def duplicate_fault(first: str) -> LineFault:
    """Return the fault of a line whose custom_id an earlier line has.

    `first` names that line in words.
    """
    message = f"{first[:1].upper()}{first[1:]} has this custom_id already: give every line one of its own."
    return LineFault("duplicate_custom_id", message, "custom_id")


def write_work(source: int, target: int, scan: Scan, known: WorkInput, runs: list[WorkRun], shared: int) -> IngestPlan:
    """Write the work file and return its plan."""
    numbers = array("I")
    for run in runs:
        numbers += run.numbers
    # Most inputs need no other order than their own.
    as_read = numbers == array("I", range(len(scan.at)))
    # Reading elements of a list is twice as fast as of an array.
    order = [] if as_read else numbers.tolist()
    sizes = scan.size if as_read else map(scan.size.tolist().__getitem__, order)
    places = [*accumulate(sizes, initial=0)]
    rows = [(0, len(numbers))] if as_read else _rows(order)
    _copy(source, target, scan, numbers, places, rows)
    slices: list[SlicePlan] = []
    lines = scan.line[:] if as_read else array("I", [*map(scan.line.tolist().__getitem__, order)])
    first = 0
    for run in runs:
        slices += cut_slices(run, first, places[first : first + len(run.numbers) + 1], scan)
        first += len(run.numbers)
    at = places[-1]
    for line, record in _bad_items(source, scan, known):
        text = msgspec.json.encode(record) + b"\n"
        _write_all(target, memoryview(text), at)
        add_bad(slices, len(lines), at, len(text), scan.rules)
        lines.append(line)
        at += len(text)
    copied = NO_COPIES
    if known.same:
        copied = CopiedItems(len(known.same.leaders), len(known.same.answers), at)
        for copy_lines, text in _copies(source, scan, known.same, numbers):
            _write_all(target, memoryview(text), at)
            lines.extend(copy_lines)
            at += len(text)
    item_count = len(lines)
    if sys.byteorder == "big":
        lines.byteswap()
    _write_all(target, memoryview(lines.tobytes()), at)
    not_run = (*_good(known.twice, scan), *known.same.numbers)
    left_out = sum(scan.prompt_size[one] + scan.fixed_size[one] for one in not_run)
    prompt_bytes = sum(scan.prompt_size) + sum(scan.fixed_size) - left_out
    file_bytes = sum(scan.unread_size) - sum(scan.unread_size[one] for one in not_run)
    model = scan.models[0] if scan.models else None
    return IngestPlan(item_count, model, slices, at, prompt_bytes, shared, copied=copied, file_bytes=file_bytes)


def _good(twice: dict[int, int], scan: Scan) -> list[int]:
    """Return the items, in order, that would run if no earlier line had their custom_id."""
    return sorted(number for number in twice if number < len(scan.at))


def _rows(order: list[int]) -> list[tuple[int, int]]:
    """Return the stretches of the work order in which the items keep the order of the input."""
    bounds = [0, *compress(range(1, len(order)), map(gt, order, order[1:])), len(order)]
    return [*pairwise(bounds)]


def _copy(
    source: int,
    target: int,
    scan: Scan,
    order: "array[int]",
    places: list[int],
    rows: list[tuple[int, int]],
) -> None:
    """Copy the lines of all items to their places. `places` has one for each item in `order`."""
    rests = [[at, end] for at, end in rows]
    first, last = 0, len(scan.at)
    window_bytes = WINDOW_BYTES if len(rows) > 1 else WINDOW_BYTES_IN_ORDER
    buffer = bytearray()
    while first < last:
        start = scan.at[first]
        stop = bisect_left(scan.at, start + window_bytes, first + 1, last)
        if stop - 1 > first and scan.at[stop - 1] + scan.size[stop - 1] > start + window_bytes:
            stop -= 1
        size = scan.at[stop - 1] + scan.size[stop - 1] - start
        if len(buffer) < size:
            buffer = bytearray(max(size, window_bytes))
        view = memoryview(buffer)[:size]
        got = os.preadv(source, (view,), start)
        # Only the input's last line may lack its newline.
        if got == size - 1 and stop == len(scan.at):
            buffer[got] = 0x0A
        elif got != size:
            raise OSError("the input became shorter while it was read")
        for row in rests:
            at, end = row
            if at < end and order[at] < stop:
                row[0] = after = bisect_left(order, stop, at, end)
                lines = _lines(view, scan, start, order[at:after], places[after] - places[at])
                _write_all(target, lines, places[at])
        first = stop


def _lines(view: memoryview, scan: Scan, base: int, numbers: "array[int]", size: int) -> memoryview:
    """Return the lines of items, of `size` bytes in all. `view` is the input from `base` on."""
    starts, sizes = scan.at, scan.size
    start = starts[numbers[0]]
    end = starts[numbers[-1]] + sizes[numbers[-1]]
    if end - start == size:
        # Lines do not overlap, so these stand together.
        return view[start - base : end - base]
    return memoryview(b"".join([view[(start := starts[number] - base) : start + sizes[number]] for number in numbers]))


def _write_all(target: int, view: memoryview, at: int) -> None:
    while view:
        # A full disk or a limit on file sizes can stop a write in the middle: the next write
        # raises.
        written = os.pwrite(target, view, at)
        view = view[written:]
        at += written


def _bad_items(source: int, scan: Scan, known: WorkInput) -> Iterable[tuple[int, BadItem]]:
    """Yield the bad lines of the input in its order, with their numbers.

    Each is read and checked again, so that no message is kept in memory meanwhile.
    """
    twice, places = known.twice, known.places
    firsts = (twice.get(number, 0) for number in count(len(scan.at)))
    bad = zip(scan.bad_line, scan.bad_at, scan.bad_size, firsts, strict=False)
    good = _good(twice, scan)
    again = ((scan.line[number], scan.at[number], scan.size[number] - 1, twice[number]) for number in good)
    for number, at, size, first in merge(bad, again):
        line = os.pread(source, size, at)
        try:
            if first:
                raise duplicate_fault(places.words(first))
            scan.check(line)
        except LineFault as fault:
            custom_id = custom_id_of(line, scan.rules.custom_id_bytes_max)
            message, answer = places.message(fault.message, fault.param), _answer_of(fault)
            place = (places.words(number), places.name(number))
            yield number, BadItem(custom_id, fault.code, message, places.line(number), *answer, *place)


def _copies(source: int, scan: Scan, same: SameLines, work: "array[int]") -> Iterator[tuple[list[int], bytes]]:
    """Yield items that are not run, as lines of the work file, with their lines in the input.

    Items that take the line of the same item stand together. `work` are the items that run, in work
    order.
    """
    place_of = {number: place for place, number in enumerate(work)}
    order = sorted((place_of[leader], number) for number, leader in same.leaders.items())
    for first in range(0, len(order), _COPIES_AT_ONCE):
        some = order[first : first + _COPIES_AT_ONCE]
        texts = [
            msgspec.json.encode(
                WorkCopy(read_keyed(os.pread(source, scan.size[number], scan.at[number])).custom_id, of=place)
            )
            for place, number in some
        ]
        yield [scan.line[number] for _, number in some], b"\n".join([*texts, b""])
    earlier = scan.rules.earlier
    if earlier is None:
        return
    with Path(earlier.answers_path).open("rb") as answers:
        for number, (at, size) in sorted(same.answers.items(), key=lambda one: one[1]):
            answers.seek(at)
            answer = read_source(answers.read(size))
            custom_id = read_keyed(os.pread(source, scan.size[number], scan.at[number])).custom_id
            copy = WorkCopy(custom_id, source=answer.id, response=answer.response)
            yield [scan.line[number]], msgspec.json.encode(copy) + b"\n"


def _answer_of(fault: LineFault) -> tuple[int | None, str | None]:
    """Return the status of a wrong body, and the parameter by the name that its caller uses."""
    if not isinstance(fault, BodyFault):
        return None, None
    return BAD_REQUEST, (fault.param or "").removeprefix("body.") or None
