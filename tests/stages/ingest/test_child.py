"""Ingest as a process of its own: what it answers, how it fails, and that it stays small and goes away."""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tidegate.core.errors import IngestFailed
from tidegate.core.input.lines import LineRules
from tidegate.stages.ingest.ingest_file import ingest_file, run_in_child

RULES = LineRules("/v1/chat/completions", models=frozenset({"m"}))
GROWTH_BYTES_MAX = 64 << 20


def line(number: int, text: str) -> bytes:
    message = {"role": "user", "content": text}
    return json.dumps({"custom_id": f"id-{number}", "body": {"model": "m", "messages": [message]}}).encode() + b"\n"


def test_same_plan_and_work_file_as_in_this_process(tmp_path: Path) -> None:
    path = tmp_path / "in"
    path.write_bytes(b"".join(line(number, f"text {number % 7} of {number}") for number in range(300)))
    plan = asyncio.run(run_in_child(path, tmp_path / "child", RULES))
    assert plan == ingest_file(path, tmp_path / "here", RULES)
    assert plan.item_count == 300
    assert (tmp_path / "child").read_bytes() == (tmp_path / "here").read_bytes()


def test_errors_of_the_input_are_part_of_the_plan(tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(b"nonsense\n")
    plan = asyncio.run(run_in_child(tmp_path / "in", tmp_path / "work", RULES))
    assert [(error.code, error.line) for error in plan.errors] == [("invalid_json_line", 1)]


def test_missing_input_and_unwritable_work_file_are_clear(tmp_path: Path) -> None:
    with pytest.raises(IngestFailed, match="No such file"):
        asyncio.run(run_in_child(tmp_path / "absent", tmp_path / "work", RULES))
    (tmp_path / "in").write_bytes(line(1, "x"))
    with pytest.raises(IngestFailed, match="No such file"):
        asyncio.run(run_in_child(tmp_path / "in", tmp_path / "absent" / "work", RULES))


def test_full_disk_is_clear(tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(line(1, "x"))
    with pytest.raises(IngestFailed, match="No space left"):
        asyncio.run(run_in_child(tmp_path / "in", Path("/dev/full"), RULES))


def test_nonsense_request_is_refused() -> None:
    child = subprocess.run(
        [sys.executable, "-m", "tidegate.stages.ingest.ingest_file"],
        input=b"{}",
        capture_output=True,
        check=False,
        timeout=60,
    )
    assert child.returncode == 64
    assert b"input_path" in child.stderr
    assert child.stdout == b""


@pytest.fixture
def stuck_input(tmp_path: Path) -> Iterator[Path]:
    """An input that never ends: a pipe that is held open and never written to."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    state = os.open(path, os.O_RDWR)
    yield path
    os.close(state)


def children() -> list[psutil.Process]:
    """The ingest processes that run. A process that another test left to be reaped has no command line any more."""
    found = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if "tidegate.stages.ingest.ingest_file" in " ".join(child.cmdline()):
                found.append(child)
    return found


async def child_started() -> None:
    deadline = asyncio.get_running_loop().time() + 30
    while not children():
        assert asyncio.get_running_loop().time() < deadline
        await asyncio.sleep(0.01)


def test_time_limit_ends_the_process(stuck_input: Path, tmp_path: Path) -> None:
    with pytest.raises(IngestFailed, match="longer than"):
        asyncio.run(run_in_child(stuck_input, tmp_path / "work", RULES, limit_s=0.2))
    assert children() == []


def test_cancel_ends_the_process(stuck_input: Path, tmp_path: Path) -> None:
    async def cancelled() -> None:
        task = asyncio.create_task(run_in_child(stuck_input, tmp_path / "work", RULES))
        await child_started()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())
    assert children() == []


def test_killed_process_is_clear(stuck_input: Path, tmp_path: Path) -> None:
    async def killed() -> None:
        task = asyncio.create_task(run_in_child(stuck_input, tmp_path / "work", RULES))
        await child_started()
        for child in children():
            assert os.getsid(child.pid) == child.pid, "a Ctrl-C for this process does not reach it"
            child.kill()
        with pytest.raises(IngestFailed, match="-9"):
            await task

    asyncio.run(killed())


def peak_bytes(path: Path, work: Path, **rules: object) -> tuple[int, dict[str, object]]:
    """The peak memory of the child, and its plan; its `ru_maxrss` would carry this process's over."""
    code = (
        "import re, sys\n"
        "from tidegate.stages.ingest.ingest_file import main\n"
        "main()\n"
        "sys.stderr.write(re.search('VmHWM:(.*)kB', open('/proc/self/status').read())[1])\n"
    )
    request = {"input_path": str(path), "work_path": str(work), "rules": {"endpoint": "/v1/chat/completions", **rules}}
    child = subprocess.run(
        [sys.executable, "-c", code], input=json.dumps(request).encode(), capture_output=True, check=True, timeout=110
    )
    return int(child.stderr) * 1024, json.loads(child.stdout)


@pytest.fixture(scope="module")
def idle_bytes(tmp_path_factory: pytest.TempPathFactory) -> int:
    """The peak memory of a child with one line to ingest."""
    directory = tmp_path_factory.mktemp("idle")
    (directory / "in").write_bytes(line(0, "x"))
    return peak_bytes(directory / "in", directory / "work")[0]


def test_memory_stays_bounded(tmp_path: Path, idle_bytes: int) -> None:
    """200 MB: many lines that share long beginnings, in shuffled order; the ingest's own process grows by under 64 MB."""
    path, work = tmp_path / "in", tmp_path / "work"
    systems = [b"system %d " % number + b"word " * 500 for number in range(40)]
    before, after = line(-1, "+").split(b"+")
    with path.open("wb") as file:
        for number in range(50_000):
            prompt = b"%b %d %b" % (systems[number * 7919 % 40], number * 7907 % 50021, b"tail " * 280)
            file.write(before.replace(b"-1", b"-%d" % number) + prompt + after)
    assert path.stat().st_size > 190_000_000
    peak, plan = peak_bytes(path, work)
    assert plan["item_count"] == 50_000
    assert plan["shared_prefix_bytes"] > 0.6 * plan["prompt_bytes"]  # type: ignore[operator]
    assert peak - idle_bytes < GROWTH_BYTES_MAX


@pytest.mark.parametrize(
    "hostile",
    [
        "one line",
        *(
            pytest.param(kind, marks=pytest.mark.soak)
            for kind in ("bad lines", "prefixes", "ids", "brackets", "equal ids")
        ),
    ],
)
def test_memory_stays_bounded_for_hostile_inputs(hostile: str, tmp_path: Path, idle_bytes: int) -> None:
    path, work = tmp_path / "in", tmp_path / "work"
    count = 50_000
    with path.open("wb") as file:
        for number in range(count):
            if hostile == "one line":
                file.write(b'{"custom_id": "' + b"x" * 4000 if not number else b"x" * 4000)
            elif hostile == "bad lines":
                file.write(b'{"custom_id": "%d", "body": 7, "x": "%b"}\n' % (number, b"y" * 1000))
            elif hostile == "ids":
                file.write(line(number, "x").replace(b"id-", b"i" * 500, 1))
            elif hostile == "equal ids":
                file.write(line(1, "x").replace(b"id-", b"i" * 500, 1))
            elif hostile == "prefixes":
                file.write(line(number, "a" * (number % 2000) + "b"))
            elif hostile == "brackets":
                file.write(line(number, "[{" * 300))
    peak, plan = peak_bytes(path, work, invalid_lines="error_file")
    assert plan["item_count"] == (1 if hostile == "one line" else count)
    assert plan["errors"] == []
    assert peak - idle_bytes < GROWTH_BYTES_MAX
