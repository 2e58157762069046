"""A store in memory with a clock that a test moves, blobs on a real disk, and short ways to put a job into them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from tests.support.ports import FairDice, HandClock
from tidegate.backends.blobs_local import LocalBlobs
from tidegate.core import ids
from tidegate.core.input.lines import LineRules
from tidegate.core.input.turns import IngestLane
from tidegate.core.nouns import Caller, IngestPlan, Job, JobRequest, NewFile
from tidegate.core.policies import Policies
from tidegate.stages.ingest.ingest import IngestStage, RunPass
from tidegate.stages.ingest.ingest_file import ingest_file
from tidegate.store.sqlite import SqliteDriver
from tidegate.store.store import Store

LEASE_MS = 30_000
HOUR_MS = 3_600_000


def chat_lines(count: int, model: str = "m", first: int = 0) -> list[bytes]:
    return [
        json.dumps(
            {
                "custom_id": f"c{number}",
                "body": {"model": model, "messages": [{"role": "user", "content": f"{number}"}]},
            }
        ).encode()
        for number in range(first, first + count)
    ]


async def here(input_path: Path, work_path: Path, rules: LineRules, lane: IngestLane = IngestLane.SMALL) -> IngestPlan:
    return ingest_file(input_path, work_path, rules)


class SmallSlices(Policies):
    def __init__(self, slice_items: int) -> None:
        self._slice_items = slice_items

    def line_rules(self, job: Job) -> LineRules:
        return replace(super().line_rules(job), slice_count_max=self._slice_items)


class World:
    def __init__(self, directory: Path, clock: Any = None) -> None:
        self.clock = clock or HandClock(0.0)
        self.entropy = FairDice(7)
        self.scratch = directory / "scratch"
        self.scratch.mkdir(parents=True)
        self.store = Store(SqliteDriver(None, self.clock.now_ms))
        self.blobs = LocalBlobs(directory / "blobs")

    def id(self, kind: str) -> str:
        return ids.make(kind, self.entropy.token_bytes(16))

    async def worker(self, lease_ms: int = LEASE_MS) -> str:
        worker_id = self.id("worker")
        await self.store.enlist_worker(worker_id, "here", "test", lease_ms)
        return worker_id

    async def job(
        self, lines: list[bytes], *, window_ms: int = HOUR_MS, caller: Caller | None = None, **ask: Any
    ) -> Job:
        """A job that waits for its ingest."""
        if caller is None:
            caller = Caller(await self.store.put_tenant(self.id("tenant"), "acme"))
        owner = await self.worker(10 * HOUR_MS)
        blob_id = self.id("blob")
        await self.store.begin_blob(blob_id, "upload", owner)
        writer = await self.blobs.create(blob_id)
        await writer.write(b"".join(line + b"\n" for line in lines))
        file = await self.store.create_file(
            caller, NewFile(self.id("file"), blob_id, await writer.finish(), "batch", "in.jsonl", len(lines), None)
        )
        request = JobRequest("/v1/chat/completions", file.id, window_ms, "1h", **ask)
        return await self.store.create_job(caller, self.id("batch"), request)

    def ingest(self, run_pass: RunPass = here, policies: Policies | None = None) -> IngestStage:
        return IngestStage(self.store, self.blobs, self.entropy, self.scratch, policies or Policies(), run_pass)

    async def started(self, lines: list[bytes], *, slice_items: int = 64, **ask: Any) -> Job:
        """A job that was ingested."""
        job = await self.job(lines, **ask)
        worker = await self.worker()
        policies = SmallSlices(slice_items)
        while (await self.look(job)).state == "validating":
            assert await self.ingest(policies=policies).next(worker)
        return await self.look(job)

    async def look(self, job: Job) -> Job:
        found = await self.store.any_job(job.id)
        assert found is not None
        return found

    async def rows(self, sql: str, *values: object) -> list[Any]:
        """Ask the database directly, past the Store."""

        async def body(tx: Any) -> list[Any]:
            return list(tx._connection.execute(sql, values))

        return await self.store._driver.read(body)

    async def file_bytes(self, file_id: str | None) -> bytes:
        if file_id is None:
            return b""
        data = b""
        for extent in await self.store.list_extents(file_id, 0, 10_000):
            data += await self.blobs.read(extent.blob_id, extent.blob_at, extent.size_bytes)
        return data

    async def file_lines(self, file_id: str | None) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (await self.file_bytes(file_id)).splitlines()]
