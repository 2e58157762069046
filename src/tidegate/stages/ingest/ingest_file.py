"""Ingest of one input file: read it once, order its lines, and write them as the work file.

The work file has, in this order:

1. The good lines byte for byte in work order, each with a newline.
2. Bad lines that become item errors, as `{"custom_id", "code", "message", "line"}`, in slices
   without a model.
3. Items that are not run, in no slice (see core/answers/copied_lines.py).
4. A trailer: for each item a little-endian uint32 with its 1-based line number in the input.

This module knows nothing of jobs, stores or blobs, and makes nothing durable: the adopter of the
work file does that.

Run as a module it is a separate process: a JSON request on stdin, the plan on stdout, trouble on
stderr. So it imports little at the top, and asyncio only where it starts the process.
"""

import os
import sys
from array import array
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from queue import Queue
from threading import Thread
from typing import Self

import msgspec
from msgspec.structs import replace

from tidegate.core.errors import IngestCrashed, IngestFailed
from tidegate.core.input.line_faults import custom_id_of
from tidegate.core.input.lines import LineRules
from tidegate.core.input.scan import NO_ID, Scan
from tidegate.core.input.slices import sample_first
from tidegate.core.input.turns import IngestLane
from tidegate.core.nouns import IngestPlan, LineError
from tidegate.stages.ingest.chosen_lines import copy_chosen
from tidegate.stages.ingest.ingest_order import order_items
from tidegate.stages.ingest.ingest_write import WorkInput, duplicate_fault, write_work
from tidegate.stages.ingest.join_input import LinePlaces, changed_input, join_input
from tidegate.stages.ingest.same_lines import find_same

READ_BYTES = 256 << 10
HASHED_LATER_MAX = 16
EXIT_BAD_REQUEST = 64
EXIT_FILE = 74


class ChildRequest(msgspec.Struct):
    input_path: str
    work_path: str
    rules: LineRules


def ingest_file(input_path: Path, work_path: Path, rules: LineRules) -> IngestPlan:
    """Check the input and write the work file. An input of parts is joined first.

    A plan with errors has no work file and no slices.
    """
    places = LinePlaces(rules.places)
    if rules.parts:
        places, unusable = join_input(input_path, rules)
        if unusable is not None:
            return _refused([unusable])
    if rules.chosen is None:
        return _ingest_lines(input_path, work_path, rules, places)
    chosen_path = work_path.with_suffix(".chosen")
    try:
        lines, digest = copy_chosen(input_path, chosen_path, rules, rules.chosen)
        if rules.input_sha256 not in ("", digest):
            return _refused([changed_input()])
        if not lines:
            return _refused([_nothing_chosen()])
        return _ingest_lines(chosen_path, work_path, replace(rules, input_sha256=""), places, lines)
    finally:
        chosen_path.unlink(missing_ok=True)


def _ingest_lines(
    input_path: Path, work_path: Path, rules: LineRules, places: LinePlaces, lines: "array[int] | None" = None
) -> IngestPlan:
    """Ingest all lines of a file.

    `lines` are their numbers in the input that they were copied from.
    """
    with _opened(input_path, os.O_RDONLY) as source:
        scan, digest = _scan(source, rules)
        if lines is not None:
            scan.renumber(lines)
        twice = _duplicates(source, scan)
        errors = _errors(scan, twice, places)
        if digest not in ("", rules.input_sha256):
            errors = [changed_input()]
        if errors:
            return _refused(errors, scan.models[0] if scan.models else None)
        same = find_same(source, scan, twice)
        runs, shared = order_items(source, scan, same.numbers.union(twice) if same else twice)
        good_count = sum(len(run.numbers) for run in runs)
        if rules.sample:
            runs = sample_first(runs, rules.sample)
        with _opened(work_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as target:
            plan = write_work(source, target, scan, WorkInput(twice, places, same), runs, shared)
        return replace(plan, sample_count=min(rules.sample, good_count)) if rules.sample else plan


def _refused(errors: list[LineError], model: str | None = None) -> IngestPlan:
    return IngestPlan(0, model, [], 0, 0, 0, errors)


def _scan(source: int, rules: LineRules) -> tuple[Scan, str]:
    """Read the whole input. Return its scan and its SHA-256.

    The SHA-256 is empty if there is none to compare it with, or if errors stopped the scan early.
    """
    scan = Scan(rules)
    data = os.read(source, READ_BYTES)
    with _Hashing(data) as hashing:
        scan.read_first(data)
        while not scan.stopped and (data := os.read(source, READ_BYTES)):
            hashing.add(data)
            scan.feed(data)
    stopped = scan.stopped
    scan.finish()
    return scan, "" if stopped or not rules.input_sha256 else hashing.digest


class _Hashing:
    """The SHA-256 of the bytes that are read. `digest` is set at the end.

    From the second piece on a thread hashes while the scan goes on: hashing releases the GIL.
    """

    def __init__(self, first: bytes) -> None:
        self._hashed = sha256(first)
        self._pieces: Queue[bytes] = Queue(HASHED_LATER_MAX)
        self._thread: Thread | None = None
        self.digest = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_failure: object) -> None:
        if self._thread is not None:
            self._pieces.put(b"")
            self._thread.join()
        self.digest = self._hashed.hexdigest()

    def add(self, data: bytes) -> None:
        if self._thread is None:
            self._thread = Thread(target=self._hash, name="ingest-hash")
            self._thread.start()
        self._pieces.put(data)

    def _hash(self) -> None:
        while data := self._pieces.get():
            self._hashed.update(data)


@contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    opened = os.open(path, flags | os.O_CLOEXEC, 0o600)
    try:
        yield opened
    finally:
        os.close(opened)


def _nothing_chosen() -> LineError:
    message = (
        "There is nothing to run: no request of the batch that is retried failed with one of these codes, "
        "or only lines did that have no custom_id of their own."
    )
    return LineError("nothing_to_retry", message, "codes")


def _duplicates(source: int, scan: Scan) -> dict[int, int]:
    """Return the items whose custom_id an earlier line has, each with that line.

    Ids are compared by hash. Only if two hashes agree are the ids read again and compared exactly.
    The numbers of the bad items follow those of the good ones.
    """
    # Reading a list is faster than reading an array.
    hashes = scan.id_hash.tolist() + scan.bad_id_hash.tolist()
    if len(set(hashes)) == len(hashes):
        return {}
    counts = Counter(hashes)
    del counts[NO_ID]
    suspects = sorted(
        (value, _line_of(scan, number), number) for number, value in enumerate(hashes) if counts[value] > 1
    )
    twice: dict[int, int] = {}
    ids: dict[str | None, int] = {}
    last = None
    for value, line, number in suspects:
        if value != last:
            ids = {}
            last = value
        bad = number - len(scan.at)
        size, at = (scan.size[number] - 1, scan.at[number]) if bad < 0 else (scan.bad_size[bad], scan.bad_at[bad])
        first = ids.setdefault(custom_id_of(os.pread(source, size, at), size), line)
        if first != line:
            twice[number] = first
    return twice


def _line_of(scan: Scan, number: int) -> int:
    return scan.line[number] if number < len(scan.at) else scan.bad_line[number - len(scan.at)]


def _errors(scan: Scan, twice: dict[int, int], places: LinePlaces) -> list[LineError]:
    """Return the errors that fail the whole input, in the order of its lines."""
    errors = list(scan.errors)
    if scan.rules.invalid_lines != "error_file":
        again = sorted((_line_of(scan, number), first) for number, first in twice.items())
        errors += [duplicate_fault(places.words(first)).at(line) for line, first in again[: scan.rules.errors_max]]
    errors.sort(key=lambda error: error.line or 0)
    return [places.error(error) for error in errors[: scan.rules.errors_max]]


def main() -> int:
    """Read one request, and write its plan."""
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


class InputPasses:
    """The runner of `ingest_file`: one thread for small inputs, a process for each large one."""

    def __init__(self) -> None:
        from concurrent.futures import ThreadPoolExecutor

        # One thread, because several would only compete for the GIL with the event loop and one
        # another.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ingest")

    async def __call__(self, input_path: Path, work_path: Path, rules: LineRules, lane: IngestLane) -> IngestPlan:
        import asyncio

        if lane is IngestLane.LARGE:
            return await run_in_child(input_path, work_path, rules)
        return await asyncio.get_running_loop().run_in_executor(
            self._thread, _ingest_here, input_path, work_path, rules
        )


def _ingest_here(input_path: Path, work_path: Path, rules: LineRules) -> IngestPlan:
    """Run `ingest_file` in this process. It raises the same errors as `run_in_child`."""
    try:
        return ingest_file(input_path, work_path, rules)
    except OSError as error:
        raise _unusable(str(error)) from error
    except Exception as error:
        import traceback

        trouble = "".join(traceback.format_exception(error))
        raise IngestCrashed(f"the ingest of a small input broke: {_where(trouble)}") from error


def _unusable(trouble: str) -> IngestFailed:
    return IngestFailed(f"the input could not be read or the work file not written ({trouble}): check the disk")


async def run_in_child(input_path: Path, work_path: Path, rules: LineRules, *, limit_s: float = 600.0) -> IngestPlan:
    """Run `ingest_file` in a child process, which ends before this returns or raises."""
    import asyncio

    pipe = asyncio.subprocess.PIPE
    # A new session, so that a Ctrl-C for this process does not reach the child.
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tidegate.stages.ingest.ingest_file",
        stdin=pipe,
        stdout=pipe,
        stderr=pipe,
        start_new_session=True,
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
        raise _unusable(trouble.decode())
    if child.returncode != 0:
        raise IngestCrashed(
            f"the ingest process ended with {child.returncode}: {_where(trouble.decode(errors='replace'))}"
        )
    return msgspec.json.decode(out, type=IngestPlan)


def _where(trouble: str) -> str:
    """Return the kind and places of a crash, without its message: that may hold a caller's text."""
    lines = trouble.strip().splitlines()
    places = [line.strip() for line in lines if line.startswith('  File "')]
    return " < ".join([*(line.partition(":")[0][:100] for line in lines[-1:]), *reversed(places[-5:])])


if __name__ == "__main__":
    sys.exit(main())
