"""How long the end of a large job takes: publishing 50,000 finished items, and publishing 50,000 that
never ran. Embedded store, local blobs.
"""

import tempfile
import time
from pathlib import Path

import uvloop

from bench.inputs import chat_lines
from bench.machinery import median, table
from bench.throughput import submit
from tidegate.core import ids
from tidegate.core.answers import results
from tidegate.core.files import Placed
from tidegate.core.nouns import Finished, JobFlush, KeepTimes, Usage
from tidegate.core.states import JobState, Outcome
from tidegate.live_config import LiveConfig
from tidegate.settings import Settings, load
from tidegate.stages.ingest.ingest import IngestStage
from tidegate.stages.ingest.ingest_file import InputPasses
from tidegate.stages.ship import Ship
from tidegate.storage import Parts, opened
from tidegate.worker.policies import OperatorPolicies

FLUSH_LINES = 256


class _Idle:
    """Stands where a running worker would: the parts and the incarnation, and no loops."""

    def __init__(self, parts: Parts, worker_id: str) -> None:
        self.parts = parts
        self.incarnation = self
        self.id = worker_id


async def _ingested(parts: Parts, worker_id: str, lines: list[bytes]) -> str:
    job_id = await submit(_Idle(parts, worker_id), lines)  # type: ignore[arg-type]
    live = LiveConfig(parts.store, parts.settings, lambda *served: {})
    policies = OperatorPolicies(parts.settings, live)
    ingest = IngestStage(parts.store, parts.blobs, parts.entropy, parts.scratch, policies, InputPasses())
    await ingest.next(worker_id)
    return job_id


async def _finish_all(parts: Parts, worker_id: str, job_id: str, count: int) -> None:
    """Record an answer for every item, as a worker's flushes would."""

    async def next_blob_id() -> str:
        blob_id = ids.make("blob", parts.entropy.token_bytes(16))
        await parts.store.begin_blob(blob_id, "answers", worker_id)
        return blob_id

    log = await parts.blobs.open_log(next_blob_id)
    for first in range(0, count, FLUSH_LINES):
        lines = [
            results.response_line(ids.item_id(job_id, number), b'"x"', 200, b'{"choices":[{}]}')
            for number in range(first, min(count, first + FLUSH_LINES))
        ]
        await log.append(b"".join(lines))
        placed = await log.seal()
        assert placed is not None
        entries = [
            Finished(first + index, Outcome.ANSWERED, len(line), first, "", Usage()) for index, line in enumerate(lines)
        ]
        where = Placed(placed.blob_id, placed.at, placed.size_bytes)
        await parts.store.record_outcomes([JobFlush(job_id, entries, where)], [], [])


async def _publish(parts: Parts, worker_id: str) -> float:
    ship = Ship(parts.store, parts.blobs, parts.entropy, parts.scratch, KeepTimes())
    began = time.perf_counter()
    await ship.close_drained(0)
    published = await ship.publish_all(worker_id)
    seconds = time.perf_counter() - began
    if published != 1:
        raise RuntimeError("the job was not published")
    return seconds * 1000


async def _measure(settings: Settings, count: int) -> dict[str, float]:
    lines = list(chat_lines(count, 400))
    async with opened(settings) as parts:
        worker_id = ids.make("worker", parts.entropy.token_bytes(16))
        await parts.store.enlist_worker(worker_id, "bench", "0", 3_600_000)
        finished = await _ingested(parts, worker_id, lines)
        await _finish_all(parts, worker_id, finished, count)
        finished_ms = await _publish(parts, worker_id)
        waiting = await _ingested(parts, worker_id, lines)
        await parts.store.cancel_job(parts.tenant_id, waiting)
        never_ran_ms = await _publish(parts, worker_id)
        ended = await parts.store.any_job(waiting)
        assert ended is not None
        assert ended.state is JobState.CANCELLED
        assert ended.cancelled_count == count
        return {"finished_ms": finished_ms, "never_ran_ms": never_ran_ms}


def main(quick: bool = False) -> dict[str, float]:
    count, rounds = (5_000, 1) if quick else (50_000, 3)
    runs = []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as data:
            runs.append(uvloop.run(_measure(load(None, Path(data), {}, {}).settings, count)))
    found = {name: median([run[name] for run in runs]) for name in runs[0]}
    table(
        f"Ending a job of {count:,} items, embedded store, {rounds} rounds (medians)",
        [
            ("publish, all finished", f"{found['finished_ms']:.0f} ms", "under 100 ms"),
            ("publish, none ever ran", f"{found['never_ran_ms']:.0f} ms", "under 2,000 ms"),
        ],
    )
    return found


if __name__ == "__main__":
    main()
