"""A table of two million rows: in and out of `tidegate run` with bounded memory, killed twice, nothing asked twice."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import psutil
import pyarrow as pa
import pytest
from pyarrow import parquet

from tests.cli.conftest import Desk
from tests.support.processes import Proc, wait_until

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3_600)]

ROWS = 2_000_000
ROWS_PER_GROUP = 50_000
IN_FLIGHT = 64
GROWTH_MAX_BYTES = 128 << 20


def write_table(path: Path) -> None:
    schema = pa.schema([("id", pa.int64()), ("text", pa.string())])
    with parquet.ParquetWriter(path, schema) as writer:
        for first in range(0, ROWS, ROWS_PER_GROUP):
            ids = range(first, first + ROWS_PER_GROUP)
            texts = [f"say {number}, and why it is worth saying" for number in ids]
            writer.write_table(pa.table({"id": list(ids), "text": texts}, schema=schema))


class Memory:
    """The most memory that a process had, over what it had when it began to work."""

    def __init__(self) -> None:
        self.growth_bytes = 0

    def watch(self, proc: Proc, until: Callable[[], bool]) -> None:
        process = psutil.Process(proc.pid)
        start = process.memory_info().rss

        def looked() -> bool:
            try:
                self.growth_bytes = max(self.growth_bytes, process.memory_info().rss - start)
            except psutil.NoSuchProcess:
                return True
            return until()

        wait_until(looked, timeout_s=3_000, what="the rows", poll_s=0.5)


class Calls:
    """Counts the lines of the engine's log, which is too long to be read again each time."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._read_bytes = 0
        self._count = 0

    def count(self) -> int:
        with self._log.open("rb") as stream:
            stream.seek(self._read_bytes)
            while chunk := stream.read(1 << 20):
                self._count += chunk.count(b"\n")
                self._read_bytes += len(chunk)
        return self._count


def test_two_million_rows_killed_twice(desk: Desk) -> None:
    write_table(desk.here / "in.parquet")
    body = {"model": "m", "messages": [{"role": "user", "content": "{{text}}"}], "max_tokens": 1}
    (desk.here / "t.json").write_text(json.dumps(body))
    command = [
        "run",
        "in.parquet",
        "--template",
        "t.json",
        "--upstream",
        desk.engine.url,
        "-o",
        "out.parquet",
        "--json",
    ]
    quick = {"TIDEGATE_WORKER_IN_FLIGHT_MAX": str(IN_FLIGHT), "TIDEGATE_INGEST_SLICE_COUNT_MAX": "64"}
    memory, calls = Memory(), Calls(desk.engine.calls_log)
    for kill_at in (ROWS // 5, ROWS // 2):
        proc = desk.start(*command, **quick)
        proc.wait_for_line(r"Rows 1 to", timeout_s=300)
        memory.watch(proc, lambda kill_at=kill_at: calls.count() >= kill_at)  # type: ignore[misc]
        proc.kill()
    last = desk.start(*command, **quick)
    last.wait_for_line(r"Rows 1 to", timeout_s=300)
    memory.watch(last, lambda: not last.running)
    assert last.wait() == 0, last.logs()
    assert json.loads(last.stdout())["succeeded"] == ROWS
    number = 0
    for batch in parquet.ParquetFile(desk.here / "out.parquet").iter_batches(columns=["id", "answer"]):
        ids, answers = batch.column("id").to_pylist(), batch.column("answer").to_pylist()
        assert ids == list(range(number, number + len(ids)))
        assert None not in answers
        number += len(ids)
    assert number == ROWS
    assert memory.growth_bytes < GROWTH_MAX_BYTES
    # What was in flight or not yet durable at a kill may be asked again (P5).
    assert calls.count() <= ROWS + 2 * 8 * IN_FLIGHT
