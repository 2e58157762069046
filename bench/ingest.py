"""Ingest beside a loop that only typed-decodes each line, on three kinds of input; and the memory of a 200 MB one.

Both read the same file in the same run, by turns. The loop reads the file line by line and decodes each into the very struct that
ingest uses. On a machine where others take a core the seconds say little; the CPU, in loops, stands beside them.
"""

import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from bench import ingest_turns
from bench.machinery import median, table
from tidegate.core.input.lines import LineRules, decode_request
from tidegate.stages.ingest.ingest_file import ingest_file

RULES = LineRules("/v1/chat/completions")
WORDS = [f"{chr(97 + number % 26)}{number:x}" for number in range(4000)]


def _line(number: int, system: str, text: str) -> bytes:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": text}]
    body = {"model": "llama-3-8b", "messages": messages, "max_tokens": 200, "temperature": 0.7}
    line = {"custom_id": f"request-{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}
    return json.dumps(line).encode() + b"\n"


def _text(chance: random.Random, size: int) -> str:
    return " ".join(chance.choices(WORDS, k=size // 4))[:size]


def mostly_shared(count: int, line_bytes: int = 1500) -> Iterator[bytes]:
    """One long system prompt, and a short question of its own in each line."""
    system = _text(random.Random(3), line_bytes - 280)
    for number in range(count):
        yield _line(number, system, f"Question {number}: what is the capital of country {number}?")


def half_shared(count: int, line_bytes: int = 1500) -> Iterator[bytes]:
    """One system prompt of about half of each line, and texts that have nothing in common."""
    chance = random.Random(1)
    half = (line_bytes - 220) // 2
    system = _text(chance, half)
    for number in range(count):
        yield _line(number, system, _text(chance, half))


def shuffled(count: int, line_bytes: int = 1500) -> Iterator[bytes]:
    """Twenty system prompts, each with three examples, in no order."""
    chance = random.Random(2)
    part = (line_bytes - 220) // 3
    systems = [_text(chance, part) for _ in range(20)]
    examples = [_text(chance, part) for _ in range(3)]
    for number in range(count):
        yield _line(number, chance.choice(systems), chance.choice(examples) + " " + _text(chance, part))


def _decode_only(path: Path) -> None:
    with path.open("rb") as file:
        for line in file:
            decode_request(line)


def _times(what: Callable[[], object]) -> tuple[float, float]:
    """Seconds, and seconds of CPU in all processes."""
    cpu = _cpu_seconds()
    begun = time.perf_counter()
    what()
    return time.perf_counter() - begun, _cpu_seconds() - cpu


def _cpu_seconds() -> float:
    """To the microsecond: a loop takes a tenth of a second."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


class Speed(NamedTuple):
    """Medians of some rounds: the loop's time over ingest's, ingest's CPU over the loop's, and ingest's seconds."""

    ratio: float
    cpu: float
    seconds: float


def _speed(lines: Iterator[bytes], rounds: int) -> Speed:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "in")
        with path.open("wb") as file:
            file.writelines(lines)
        # The bytes are held against their upload's hash, as they are in a server.
        rules = replace(RULES, input_sha256=sha256(path.read_bytes()).hexdigest())
        loops, ingests = [], []
        for turn in range(rounds + 1):
            work = Path(directory, f"work-{turn}")
            loops.append(_times(lambda: _decode_only(path)))
            ingests.append(_times(lambda work=work: ingest_file(path, work, rules)))  # type: ignore[misc]
            work.unlink()
        # The first turn finds cold caches.
        (loop, loop_cpu), (ingest, ingest_cpu) = ([*zip(*times[1:], strict=True)] for times in (loops, ingests))
        return Speed(median(loop) / median(ingest), median(ingest_cpu) / median(loop_cpu), median(ingest))


def _peak_bytes(path: Path, work: Path) -> int:
    """The peak memory of a child that ingests this file; its `ru_maxrss` would carry this process's over."""
    code = (
        "import re, sys\nfrom tidegate.stages.ingest.ingest_file import main\nmain()\n"
        "sys.stderr.write(re.search('VmHWM:(.*)kB', open('/proc/self/status').read())[1])"
    )
    request = {"input_path": str(path), "work_path": str(work), "rules": {"endpoint": RULES.endpoint}}
    child = subprocess.run(
        [sys.executable, "-c", code], input=json.dumps(request).encode(), capture_output=True, check=True
    )
    return int(child.stderr) * 1024


def _growth_mb(count: int) -> float:
    with tempfile.TemporaryDirectory() as directory:
        path, work = Path(directory, "in"), Path(directory, "work")
        path.write_bytes(_line(0, "", "x"))
        idle = _peak_bytes(path, work)
        with path.open("wb") as file:
            file.writelines(shuffled(count, 4000))
        return (_peak_bytes(path, work) - idle) / (1 << 20)


def main(quick: bool = False) -> dict[str, float]:
    count, rounds = (5_000, 3) if quick else (50_000, 15)
    found: dict[str, float] = {}
    rows = []
    inputs = {
        "one long shared prompt, short questions": mostly_shared(count),
        "half shared, half their own": half_shared(count),
        "twenty prompts and three examples, shuffled": shuffled(count),
    }
    for name, lines in inputs.items():
        speed = _speed(lines, rounds)
        found[f"ratio, {name}"] = speed.ratio
        found[f"cpu, {name}"] = speed.cpu
        found[f"seconds, {name}"] = speed.seconds
        figures = f"{speed.ratio:.2f} of the loop's speed, {speed.cpu:.1f} times its CPU, {speed.seconds:.2f} s"
        rows.append((name, figures, "under 1 s"))
    found["growth_mb"] = _growth_mb(count)
    rows.append((f"memory of {count * 4000 / 1e6:.0f} MB, shuffled", f"+{found['growth_mb']:.0f} MB", "under 64 MB"))
    table(f"Ingest of {count:,} lines of 1.5 kB, {rounds} rounds (medians)", rows)
    turns, rows = ingest_turns.measure(quick)
    table("Waiting inputs: small batches, and turns between tenants", rows)
    return found | turns


if __name__ == "__main__":
    main("--quick" in sys.argv)
