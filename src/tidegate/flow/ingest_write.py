"""Writing the work file: the lines in work order, the bad ones behind them, and the trailer.

The input is read in its own order, a window at a time, and what of a window stands together in the work is written together; so
several processes can each write a range of the input, and no line is read by itself. Nothing here checks or orders.
"""

import os
import sys
from array import array
from bisect import bisect_left
from collections.abc import Iterable
from contextlib import ExitStack
from functools import partial
from heapq import merge
from itertools import accumulate, pairwise, repeat

import msgspec

from tidegate.core.line_faults import LineFault, custom_id_of
from tidegate.core.nouns import IngestPlan, SlicePlan
from tidegate.core.scan import Scan
from tidegate.core.slices import add_bad, cut_slices
from tidegate.flow.forked import Forked
from tidegate.flow.ingest_order import Run

WINDOW_BYTES = 8 << 20
PIECES_MAX = min(1024, os.sysconf("SC_IOV_MAX"))


class BadItem(msgspec.Struct):
    """A bad line as the work file carries it to the worker that turns it into an item error."""

    custom_id: str | None
    code: str
    message: str
    line: int


def duplicate_fault(first: int) -> LineFault:
    message = f"Line {first} has this custom_id already: give every line one of its own."
    return LineFault("duplicate_custom_id", message, "custom_id")


def write_work(
    source: int, target: int, scan: Scan, twice: dict[int, int], runs: list[Run], shared: int, process_count: int
) -> IngestPlan:
    """Write the work file, and say what stands where in it."""
    numbers = array("I")
    for _, run in runs:
        numbers += run
    places = [*accumulate(map(scan.size.__getitem__, numbers), initial=0)]
    copy = partial(_copy, source, target, scan, numbers, places)
    bounds = [len(scan.at) * number // process_count for number in range(process_count + 1)]
    ranges = [*pairwise(bounds)]
    slices: list[SlicePlan] = []
    with ExitStack() as helpers:
        others = [helpers.enter_context(Forked(partial(copy, *bounds))) for bounds in ranges[1:]]
        lines = array("I", [scan.line[number] for number in numbers])
        first = 0
        for model, run in runs:
            slices += cut_slices(model, run, first, places[first : first + len(run) + 1], scan)
            first += len(run)
        copy(*ranges[0])
        for other in others:
            other.answer()
    at = places[-1]
    os.lseek(target, at, os.SEEK_SET)
    for record in _bad_items(source, scan, twice):
        text = msgspec.json.encode(record) + b"\n"
        _write_all(target, memoryview(text))
        add_bad(slices, len(lines), at, len(text), scan.rules)
        lines.append(record.line)
        at += len(text)
    count = len(lines)
    if sys.byteorder == "big":
        lines.byteswap()
    _write_all(target, memoryview(lines.tobytes()))
    left_out = sum(scan.prompt_size[number] + scan.fixed_size[number] for number in twice)
    prompt_bytes = sum(scan.prompt_size) + sum(scan.fixed_size) - left_out
    return IngestPlan(count, scan.models[0] if scan.models else None, slices, at, prompt_bytes, shared)


def _copy(source: int, target: int, scan: Scan, order: "array[int]", places: list[int], first: int, last: int) -> None:
    """Copy the lines of items `first` up to `last` of the input to their places, of which there is one for each in `order`."""
    rows = _rows(order, first)
    buffer = bytearray()
    while first < last:
        start = scan.at[first]
        stop = bisect_left(scan.at, start + WINDOW_BYTES, first + 1, last)
        if stop - 1 > first and scan.at[stop - 1] + scan.size[stop - 1] > start + WINDOW_BYTES:
            stop -= 1
        size = scan.at[stop - 1] + scan.size[stop - 1] - start
        if len(buffer) < size:
            buffer = bytearray(max(size, WINDOW_BYTES))
        view = memoryview(buffer)[:size]
        got = os.preadv(source, (view,), start)
        # Only the input's last line may lack its newline.
        if got == size - 1 and stop == len(scan.at):
            buffer[got] = 0x0A
        elif got != size:
            raise OSError("the input became shorter while it was read")
        for row in rows:
            at, end = row
            if at < end and order[at] < stop:
                row[0] = after = bisect_left(order, stop, at, end)
                pieces = _pieces(view, scan, start, order[at:after], places[after] - places[at])
                _write_pieces(target, pieces, places[at])
        first = stop


def _rows(order: "array[int]", first: int) -> list[list[int]]:
    """The stretches of the work in which items follow one another as in the input, each from item `first` on."""
    bounds = [0, *(at for at, (one, next_one) in enumerate(pairwise(order), 1) if next_one < one), len(order)]
    return [[bisect_left(order, first, at, end), end] for at, end in pairwise(bounds)]


def _pieces(view: memoryview, scan: Scan, base: int, numbers: "array[int]", size: int) -> list[memoryview]:
    """The lines of items, of `size` bytes in all; `view` is the input from `base` on."""
    starts, sizes = scan.at, scan.size
    start = starts[numbers[0]]
    end = starts[numbers[-1]] + sizes[numbers[-1]]
    if end - start == size:
        # Lines do not overlap, so these stand together.
        return [view[start - base : end - base]]
    return [view[(start := starts[number] - base) : start + sizes[number]] for number in numbers]


def _write_pieces(target: int, pieces: list[memoryview], at: int) -> None:
    for first in range(0, len(pieces), PIECES_MAX):
        some = pieces[first : first + PIECES_MAX]
        size = sum(map(len, some))
        written = os.pwritev(target, some, at)
        while written < size:
            # A full disk or a limit on file sizes can stop a write in the middle: the next one says why.
            written += os.pwrite(target, b"".join(some)[written:], at + written)
        at += size


def _write_all(target: int, view: memoryview) -> None:
    while view:
        view = view[os.write(target, view) :]


def _bad_items(source: int, scan: Scan, twice: dict[int, int]) -> Iterable[BadItem]:
    """The bad lines in the order of the input. Each is read and checked again, so that no message is kept meanwhile."""
    bad = zip(scan.bad_line, scan.bad_at, scan.bad_size, repeat(0))
    again = ((scan.line[number], scan.at[number], scan.size[number] - 1, twice[number]) for number in sorted(twice))
    for number, at, size, first in merge(bad, again):
        line = os.pread(source, size, at)
        try:
            if first:
                raise duplicate_fault(first)
            scan.check(line)
        except LineFault as fault:
            custom_id = custom_id_of(line, scan.rules.custom_id_bytes_max)
            yield BadItem(custom_id, fault.code, fault.message, number)
