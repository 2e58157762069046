"""How soon waiting inputs are ingested: one-line batches a second on both stores, and a small tenant behind a large one.

The first part lets an `IngestStage` work through waiting one-line batches as a worker's loops do. The second starts
a worker's loops over twenty large inputs of one tenant and measures how long one line of another tenant waits for its start.
"""

import asyncio
import contextlib
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import uvloop

from bench.machinery import median
from tests.support.postgres import PostgresServer
from tidegate.core import ids
from tidegate.core.files import NewFile
from tidegate.core.nouns import Caller, JobRequest
from tidegate.core.states import JobState
from tidegate.live_config import LiveConfig
from tidegate.settings import load
from tidegate.stages.ingest.ingest import IngestStage
from tidegate.stages.ingest.ingest_file import InputPasses
from tidegate.storage import Parts, opened
from tidegate.worker.policies import OperatorPolicies

ENDPOINT = "/v1/chat/completions"
LINE = b'{"custom_id":"%d","body":{"model":"m","messages":[{"role":"user","content":"%s"}]}}\n'
HOUR_MS = 3_600_000
WAIT = "small tenant's wait s"
SMALL_LOOPS, LARGE_LOOPS = 3, 3


async def _upload(parts: Parts, worker_id: str, caller: Caller, pieces: Iterator[bytes], line_count: int) -> str:
    blob_id = ids.make("blob", parts.entropy.token_bytes(16))
    await parts.store.begin_blob(blob_id, "upload", worker_id)
    writer = await parts.blobs.create(blob_id)
    for piece in pieces:
        await writer.write(piece)
    file = await parts.store.create_file(
        caller,
        NewFile(
            ids.make("file", parts.entropy.token_bytes(16)),
            blob_id,
            await writer.finish(),
            "batch",
            "in.jsonl",
            line_count,
            None,
        ),
    )
    return file.id


async def _batch(parts: Parts, caller: Caller, file_id: str) -> str:
    job_id = ids.make("batch", parts.entropy.token_bytes(16))
    await parts.store.create_job(caller, job_id, JobRequest(ENDPOINT, file_id, 24 * HOUR_MS, "24h"))
    return job_id


async def _caller(parts: Parts, name: str) -> Caller:
    return Caller(await parts.store.put_tenant(ids.make("tenant", parts.entropy.token_bytes(16)), name))


@contextlib.asynccontextmanager
async def _stage(directory: Path, store_url: str = "") -> AsyncIterator[tuple[Parts, IngestStage, str]]:
    overrides = {"store.url": store_url} if store_url else {}
    settings = load(None, directory, overrides, environ={}).settings
    async with opened(settings) as parts:
        worker_id = ids.make("worker", parts.entropy.token_bytes(16))
        await parts.store.enlist_worker(worker_id, "bench", "0", HOUR_MS)
        live = LiveConfig(parts.store, parts.settings, lambda *served: {})
        policies = OperatorPolicies(parts.settings, live)
        ingest = IngestStage(parts.store, parts.blobs, parts.entropy, parts.scratch, policies, InputPasses())
        yield parts, ingest, worker_id


async def _rate(directory: Path, count: int, store_url: str = "") -> tuple[float, float]:
    """One-line batches ingested a second, and the longest that the event loop was held meanwhile, in milliseconds."""
    async with _stage(directory, store_url) as (parts, ingest, worker_id):
        caller = await _caller(parts, "many")
        for number in range(count):
            await _batch(parts, caller, await _upload(parts, worker_id, caller, iter([LINE % (number, b"hello")]), 1))

        async def work() -> None:
            while await ingest.next_small(worker_id):
                pass

        held: list[float] = []
        watching = asyncio.create_task(_watch(held))
        begun = time.perf_counter()
        await asyncio.gather(*(work() for _ in range(SMALL_LOOPS)))
        seconds = time.perf_counter() - begun
        watching.cancel()
        left = await parts.store.jobs_waiting_ingest(1)
        if left:
            raise RuntimeError("not every batch was ingested")
        return count / seconds, sorted(held)[int(0.99 * len(held))] if held else 0.0


async def _watch(held: list[float]) -> None:
    """Note how much later than asked the loop wakes us."""
    while True:
        begun = time.perf_counter()
        await asyncio.sleep(0.001)
        held.append(1_000 * (time.perf_counter() - begun) - 1)


async def _wait_s(directory: Path, count: int, size_bytes: int) -> float:
    """How long one line waits behind so many large inputs of another tenant, until its job has started."""
    async with _stage(directory) as (parts, ingest, worker_id):
        large, small = await _caller(parts, "large"), await _caller(parts, "small")
        lines = (LINE % (number, b"word " * 290) for number in range(size_bytes // 1_530))
        file_id = await _upload(parts, worker_id, large, lines, size_bytes // 1_530)
        for _ in range(count):
            await _batch(parts, large, file_id)

        async def work(ingest_next: object) -> None:
            while True:
                if not await ingest_next(worker_id):  # type: ignore[operator]
                    await asyncio.sleep(0.2)

        loops = [ingest.next_small] * SMALL_LOOPS + [ingest.next_large] * LARGE_LOOPS
        tasks = [asyncio.create_task(work(one)) for one in loops]
        await asyncio.sleep(1)
        waits = []
        for number in range(3):
            one_line = await _upload(parts, worker_id, small, iter([LINE % (number, b"hello")]), 1)
            begun = time.perf_counter()
            job_id = await _batch(parts, small, one_line)
            while not await _has_started(parts, job_id):  # noqa: ASYNC110 - asked as a caller would
                await asyncio.sleep(0.01)
            waits.append(time.perf_counter() - begun)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return median(waits)


async def _has_started(parts: Parts, job_id: str) -> bool:
    job = await parts.store.any_job(job_id)
    return job is not None and job.state is not JobState.VALIDATING


def measure(quick: bool) -> tuple[dict[str, float], list[tuple[str, str, str]]]:
    """The figures by name, and the rows of the table."""
    count = 300 if quick else 2_000
    large_count, large_bytes = (4, 20_000_000) if quick else (20, 95_000_000)
    found: dict[str, float] = {}
    rows = []
    with tempfile.TemporaryDirectory() as name:
        # PostgreSQL does not run as root, so its own user must get into the directory.
        Path(name).chmod(0o755)
        server = PostgresServer(Path(name) / "postgres")
        server.start()
        try:
            for kind, url in (("SQLite", ""), ("PostgreSQL", server.create_database())):
                rate, waiting_ms = uvloop.run(_rate(Path(name) / kind, count, url))
                found[f"one-line batches a second, {kind}"] = rate
                found[f"loop held ms p99, {kind}"] = waiting_ms
                rows.append((f"one-line batches, {kind}", f"{rate:.0f} a second", "at least 100"))
                rows.append((f"event loop late meanwhile, {kind}, p99", f"{waiting_ms:.1f} ms", "a few ms"))
        finally:
            server.stop()
        found[WAIT] = uvloop.run(_wait_s(Path(name) / "fair", large_count, large_bytes))
        shown = f"{found[WAIT]:.2f} s"
        rows.append(
            (f"one line behind {large_count} x {large_bytes / 1e6:.0f} MB of another tenant", shown, "under 2 s")
        )
    return found, rows
