"""Ingest of one input file: read it once, order its lines, write them again as the work file.

The work file holds the lines byte for byte, each ended by a newline, in work order, and behind them a trailer: for each item a
little-endian uint32 with its 1-based line number in the input. Bad lines that are to become item errors stand behind all
good ones as `{"custom_id", "code", "message", "line"}`, in slices without a model. Nothing here knows jobs, stores or blobs,
and nothing is made durable: whoever adopts the work file does that.

Run as a module it is a process of its own: a JSON request on stdin, the plan on stdout, trouble on stderr. So few things
are imported at the top, and asyncio only by the side that starts the process.
"""

import os
import sys
from array import array
from collections.abc import Iterable
from hashlib import sha256
from heapq import merge
from itertools import repeat
from pathlib import Path

import msgspec

from tidegate.core.errors import IngestCrashed, IngestFailed
from tidegate.core.line_faults import LineFault, custom_id_of
from tidegate.core.lines import LineRules, decode_request
from tidegate.core.nouns import IngestPlan, LineError, SlicePlan
from tidegate.core.prefix import Read, common_prefix, order_family
from tidegate.core.scan import Scan
from tidegate.core.slices import add_bad, consecutive, cut_slices

READ_BYTES = 256 << 10
WRITE_BYTES = 256 << 10
NEAR_BYTES = 4 << 10
ROW_MIN = 8
EXIT_BAD_REQUEST = 64
EXIT_FILE = 74

# A model and its items in work order.
Run = tuple[str, "array[int]"]


class BadItem(msgspec.Struct):
    """A bad line as the work file carries it to the worker that turns it into an item error."""

    custom_id: str | None
    code: str
    message: str
    line: int


class ChildRequest(msgspec.Struct):
    input_path: str
    work_path: str
    rules: LineRules


def ingest_file(input_path: Path, work_path: Path, rules: LineRules) -> IngestPlan:
    """Check the input and write the work file; a plan with errors has no work file and no slices."""
    source = os.open(input_path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        scan, found_sha256 = _scan(source, rules)
        if rules.input_sha256 and found_sha256 not in ("", rules.input_sha256):
            return IngestPlan(0, None, [], 0, 0, 0, [_changed()])
        twice = _duplicates(source, scan)
        errors = _errors(scan, twice)
        if errors:
            return IngestPlan(0, scan.models[0] if scan.models else None, [], 0, 0, 0, errors)
        order, shared = _order(source, scan, twice)
        target = os.open(work_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            return _write(source, target, scan, twice, order, shared)
        finally:
            os.close(target)
    finally:
        os.close(source)


def _scan(source: int, rules: LineRules) -> tuple[Scan, str]:
    """The one pass over the input, and its SHA-256; empty when the pass ended early because of what it found."""
    scan = Scan(rules)
    data = os.read(source, READ_BYTES)
    hashed = sha256(data)
    scan.begin(data)
    while not scan.stopped and (data := os.read(source, READ_BYTES)):
        hashed.update(data)
        scan.feed(data)
    stopped = scan.stopped
    scan.finish()
    return scan, "" if stopped else hashed.hexdigest()


def _changed() -> LineError:
    message = "The input's bytes are not those that were uploaded: its storage changed them. Upload the file again; nothing was run."
    return LineError("input_changed", message, "input_file_id")


def _duplicates(source: int, scan: Scan) -> dict[int, int]:
    """Good items whose id an earlier line has already: item number -> that line. Ids are compared by hash, and exactly,
    by reading them again, only where two hashes agree."""
    seen: set[int] = set()
    again: set[int] = set()
    for value in scan.id_hash:
        (again if value in seen else seen).add(value)
    if not again:
        return {}
    suspects = sorted((value, number) for number, value in enumerate(scan.id_hash) if value in again)
    twice: dict[int, int] = {}
    ids: dict[str, int] = {}
    last = None
    for value, number in suspects:
        if value != last:
            ids = {}
            last = value
        line = os.pread(source, scan.size[number] - 1, scan.at[number])
        first = ids.setdefault(decode_request(line).custom_id, scan.line[number])
        if first != scan.line[number]:
            twice[number] = first
    return twice


def _duplicate_fault(first: int) -> LineFault:
    message = f"Line {first} has this custom_id already: give every line one of its own."
    return LineFault("duplicate_custom_id", message, "custom_id")


def _errors(scan: Scan, twice: dict[int, int]) -> list[LineError]:
    """What fails the whole input, in the order of its lines."""
    errors = list(scan.errors)
    if scan.rules.invalid_lines != "error_file":
        firsts = sorted(twice)[: scan.rules.errors_max]
        errors += [_duplicate_fault(twice[number]).at(scan.line[number]) for number in firsts]
    errors.sort(key=lambda error: error.line or 0)
    return errors[: scan.rules.errors_max]


def _order(source: int, scan: Scan, twice: dict[int, int]) -> tuple[list[Run], int]:
    """The good items in work order, a run for each model, and how many prompt bytes each shares with the one before it."""
    members = [array("I") for _ in scan.families]
    if len(members) == 1 and not twice:
        members[0].extend(range(len(scan.at)))
    else:
        for number, family in enumerate(scan.family):
            if number not in twice:
                members[family].append(number)
    read = _Prompts(source, scan).read
    runs: list[Run] = [(model, array("I")) for model in scan.models]
    shared = 0
    keys = bytes(scan.keys)
    for family, numbers in enumerate(members):
        if scan.rules.prefix_order:
            numbers, bytes_shared = order_family(scan.families[family], numbers, keys, read)
            shared += bytes_shared + scan.family_fixed_size[family] * max(0, len(numbers) - 1)
        runs[scan.family_model[family]][1].extend(numbers)
    if not scan.rules.prefix_order:
        runs = [(model, array("I", sorted(numbers))) for model, numbers in runs]
        shared = sum(_shared(scan, numbers, read) for _, numbers in runs)
    return runs, shared


class _Prompts:
    """Parts of prompts, read from the input. Neighbours that are asked for in their order come out of one larger read."""

    def __init__(self, source: int, scan: Scan) -> None:
        self._source = source
        self._at = scan.at
        self._prompt_at = scan.prompt_at
        self._prompt_size = scan.prompt_size
        self._buffer = b""
        self._buffer_at = 0
        self._last = 0
        self._row = 0

    def read(self, number: int, at: int, count: int) -> bytes:
        place = self._at[number] + self._prompt_at[number] + at
        rest = self._prompt_size[number] - at
        if rest < count:
            count = rest
        start = place - self._buffer_at
        if start < 0 or start + count > len(self._buffer):
            # A larger read pays only after some neighbours in a row.
            self._row = self._row + 1 if abs(place - self._last) <= NEAR_BYTES else 0
            self._last = place
            if self._row < ROW_MIN or count > READ_BYTES:
                return os.pread(self._source, count, place)
            self._buffer = os.pread(self._source, READ_BYTES, place)
            self._buffer_at = place
            self._last = place + READ_BYTES
            start = 0
        return self._buffer[start : start + count]


def _shared(scan: Scan, numbers: "array[int]", read: Read) -> int:
    """What neighbours in the order of the input share."""
    shared = 0
    before, family = b"", -1
    for number in numbers:
        prompt = read(number, 0, scan.prompt_size[number])
        if scan.family[number] == family:
            shared += common_prefix(before, prompt) + scan.family_fixed_size[family]
        before, family = prompt, scan.family[number]
    return shared


def _write(source: int, target: int, scan: Scan, twice: dict[int, int], runs: list[Run], shared: int) -> IngestPlan:
    slices: list[SlicePlan] = []
    lines = array("I")
    prompt_bytes = at = 0
    for model, numbers in runs:
        cut = list(cut_slices(model, numbers, len(lines), at, scan))
        _copy(source, target, numbers, cut, scan)
        slices += cut
        lines.extend(map(scan.line.__getitem__, numbers))
        prompt_bytes += sum(map(scan.prompt_size.__getitem__, numbers)) + sum(map(scan.fixed_size.__getitem__, numbers))
        at += sum(one.work_bytes for one in cut)
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
    return IngestPlan(count, scan.models[0] if scan.models else None, slices, at, prompt_bytes, shared)


def _copy(source: int, target: int, numbers: "array[int]", slices: list[SlicePlan], scan: Scan) -> None:
    """Write the lines of one model's slices in order; what stands together in the input is read together."""
    buffer = bytearray(max([WRITE_BYTES, *(one.work_bytes for one in slices)]))
    view = memoryview(buffer)
    fill = place = 0
    for one in slices:
        if fill + one.work_bytes > len(buffer):
            _write_all(target, view[:fill])
            fill = 0
        taken = numbers[place : place + one.count]
        place += one.count
        first, last = taken[0], taken[-1]
        if scan.at[last] + scan.size[last] - scan.at[first] == one.work_bytes and consecutive(taken):
            places = [(scan.at[first], one.work_bytes)]
        else:
            places = [(scan.at[number], scan.size[number]) for number in taken]
        for at, size in places:
            got = os.preadv(source, (view[fill : fill + size],), at)
            # Only the input's last line may lack its newline.
            if got == size - 1:
                buffer[fill + got] = 0x0A
            elif got != size:
                raise OSError("the input became shorter while it was read")
            fill += size
    _write_all(target, view[:fill])


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
                raise _duplicate_fault(first)
            scan.check(line)
        except LineFault as fault:
            custom_id = custom_id_of(line, scan.rules.custom_id_bytes_max)
            yield BadItem(custom_id, fault.code, fault.message, number)


def main() -> int:
    """One request, one plan."""
    try:
        request = msgspec.json.decode(sys.stdin.buffer.read(), type=ChildRequest)
    except msgspec.DecodeError as error:
        sys.stderr.write(f"not a request for an ingest: {error}")
        return EXIT_BAD_REQUEST
    try:
        plan = ingest_file(Path(request.input_path), Path(request.work_path), request.rules)
    except OSError as error:
        sys.stderr.write(str(error))
        return EXIT_FILE
    sys.stdout.buffer.write(msgspec.json.encode(plan))
    return 0


async def run_in_child(input_path: Path, work_path: Path, rules: LineRules, *, limit_s: float = 600.0) -> IngestPlan:
    """`ingest_file` in a process of its own, which is gone when this returns, fails or is cancelled."""
    import asyncio

    pipe = asyncio.subprocess.PIPE
    # In a session of its own, a Ctrl-C that is meant for us does not reach it.
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tidegate.flow.ingest_file", stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True
    )
    try:
        async with asyncio.timeout(limit_s):
            request = ChildRequest(str(input_path), str(work_path), rules)
            out, trouble = await child.communicate(msgspec.json.encode(request))
    except TimeoutError:
        raise IngestCrashed(
            f"reading the input took longer than {limit_s:g} s: try again when there is less to do"
        ) from None
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()
    if child.returncode == EXIT_FILE:
        raise IngestFailed(
            f"the input could not be read or the work file not written ({trouble.decode()}): check the disk"
        )
    if child.returncode != 0:
        raise IngestCrashed(
            f"the ingest process ended with {child.returncode}: {_where(trouble.decode(errors='replace'))}"
        )
    return msgspec.json.decode(out, type=IngestPlan)


def _where(trouble: str) -> str:
    """The places and the kind of a crash, without its words: they may hold a caller's text, which is no log's business."""
    lines = trouble.strip().splitlines()
    places = [line.strip() for line in lines if line.startswith('  File "')]
    return " < ".join([*(line.partition(":")[0][:100] for line in lines[-1:]), *reversed(places[-5:])])


if __name__ == "__main__":
    sys.exit(main())
