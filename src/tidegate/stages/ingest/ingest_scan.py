"""Reading an input through: the one pass over it, in several processes when it is large, and the hash of its bytes.

However many processes there are, the outcome is that of one. Nothing here orders or writes.
"""

import os
import stat
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from hashlib import sha256

from tidegate.core.input.lines import LineRules
from tidegate.core.input.scan import Scan
from tidegate.core.input.scan_parts import join
from tidegate.stages.ingest.forked import Forked, Task

READ_BYTES = 256 << 10
PROCESSES_MAX = 4
# A smaller part is read sooner than a process is started for it.
PART_BYTES_MIN = 4 << 20

# From where to where.
Part = tuple[int, int]


def parts_of(source: int, part_bytes_min: int = PART_BYTES_MIN) -> list[Part]:
    """Parts of the input that one process each may scan, divided behind newlines. What is no regular file is one part."""
    found = os.fstat(source)
    size = found.st_size
    if not stat.S_ISREG(found.st_mode):
        return [(0, 0)]
    count = min(PROCESSES_MAX, _cores(), size // part_bytes_min)
    bounds = [0]
    for number in range(1, count):
        bound = _behind_newline(source, size * number // count, size)
        if bounds[-1] < bound < size:
            bounds.append(bound)
    return [*zip(bounds, [*bounds[1:], size], strict=True)]


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _behind_newline(source: int, at: int, size: int) -> int:
    while at < size and (data := os.pread(source, READ_BYTES, at)):
        end = data.find(b"\n") + 1
        if end:
            return at + end
        at += len(data)
    return size


def scan_input(source: int, parts: list[Part], rules: LineRules, helpers: ExitStack) -> tuple[Scan, Callable[[], str]]:
    """What the input holds, and its SHA-256 for the asking; empty when there is nothing to hold it against, or when the
    pass ended early because of what it found. With several processes the hash is made beside what the caller does next."""
    with ExitStack() as own:
        scanned = _scan_parts(source, parts, rules, own) if len(parts) > 1 else None
        if scanned is not None:
            helpers.enter_context(own.pop_all())
    if scanned is None:
        return _scan_whole(source, rules)
    scan, digest = scanned
    stopped = scan.stopped
    scan.finish()
    return scan, str if stopped else digest


def _scan_whole(source: int, rules: LineRules) -> tuple[Scan, Callable[[], str]]:
    scan = Scan(rules)
    data = os.read(source, READ_BYTES)
    hashed = sha256(data)
    scan.begin(data)
    while not scan.stopped and (data := os.read(source, READ_BYTES)):
        hashed.update(data)
        scan.feed(data)
    stopped = scan.stopped
    scan.finish()
    found = "" if stopped or not rules.input_sha256 else hashed.hexdigest()
    return scan, lambda: found


def _scan_parts(
    source: int, parts: list[Part], rules: LineRules, helpers: ExitStack
) -> tuple[Scan, Callable[[], str]] | None:
    """The parts, each scanned by a process and put together; None when they must be scanned as one. The process of the last part
    goes on to hash the whole."""
    tasks: list[list[Task]] = [[partial(scan_part, source, part, rules)] for part in parts[1:]]
    if rules.input_sha256:
        tasks[-1].append(partial(_hash, source))
    others = [helpers.enter_context(Forked(*each)) for each in tasks]
    whole = scan_part(source, parts[0], rules)
    if not whole.stopped:
        for other in others:
            if not join(whole, other.answer()):
                return None
    return whole, others[-1].answer if rules.input_sha256 else str


def scan_part(source: int, part: Part, rules: LineRules) -> Scan:
    at, end = part
    scan = Scan(rules, at)
    if not at:
        data = os.pread(source, min(READ_BYTES, end), 0)
        scan.begin(data)
        at = len(data)
    while at < end and not scan.stopped and (data := os.pread(source, min(READ_BYTES, end - at), at)):
        at += scan.take(data)
    scan.end()
    return scan


def _hash(source: int) -> str:
    hashed = sha256()
    at = 0
    while data := os.pread(source, READ_BYTES, at):
        hashed.update(data)
        at += len(data)
    return hashed.hexdigest()
