"""Moves a job along its road with the Store's own verbs, so that its looks on the wire can be tested without a worker."""

from __future__ import annotations

from array import array
from typing import Any

import httpx2

from tests.support.store_verbs import lease_slices, start_job
from tests.web.calls import create, upload
from tests.web.server import WebServer, fresh_id
from tidegate.core.files import Placed
from tidegate.core.nouns import Attempts, Finished, IngestPlan, JobEnd, JobFlush, JobStart, SlicePlan, UnrunLines, Usage
from tidegate.core.states import JobState, Outcome

MODEL = "m"
CHAT = "/v1/chat/completions"


def start(web: WebServer, job_id: str, item_count: int) -> None:
    """Ingested: in_progress, one slice, nothing done."""

    async def go() -> None:
        token = fresh_id("worker")
        assert await web.store.take_step(job_id, JobState.VALIDATING, web.worker_id, token)
        work = await blob(web, "work", b"{}\n" * item_count)
        plan = IngestPlan(
            item_count, MODEL, [SlicePlan(0, item_count, MODEL, CHAT, 0, work.size_bytes, 1)], work.size_bytes, 200, 50
        )
        await start_job(
            web.store,
            JobStart(
                job_id,
                token,
                plan,
                work_blob_id=work.blob_id,
                output_file_id=fresh_id("file"),
                error_file_id=fresh_id("file"),
            ),
        )

    web.run(go())


def running(web: WebServer, client: httpx2.Client, item_count: int, **asked: Any) -> str:
    """A batch of this client that was ingested, by its id."""
    batch_id = str(create(client, upload(client), **asked)["id"])
    start(web, batch_id, item_count)
    return batch_id


def finish(
    web: WebServer,
    job_id: str,
    answers: dict[int, bytes],
    errors: dict[int, bytes] | None = None,
    tried: dict[int, int] | None = None,
) -> None:
    """Some items got their outcome; with the last one the job goes on to finalizing. `tried`: how often items were tried before."""

    async def go() -> None:
        token = f"token-of-{job_id}"
        await lease_slices(web.store, web.worker_id, job_id, MODEL, 1, token)
        usage = Usage(10, 4, 5, 2)
        parts = []
        for kind, outcome, lines in (
            ("answers", Outcome.ANSWERED, answers),
            ("errors", Outcome.FAILED, errors or {}),
        ):
            entries = [
                Finished(n, outcome, len(line), 0, token, usage if kind == "answers" else Usage())
                for n, line in lines.items()
            ]
            parts.append((entries, await blob(web, kind, b"".join(lines.values())) if lines else None))
        attempts = [(token, Attempts(number, count, 0, "throttled")) for number, count in (tried or {}).items()]
        if attempts:
            await web.store.record_outcomes([JobFlush(job_id, attempts=attempts)], [], [])
        flush = JobFlush(job_id, parts[0][0], parts[0][1], parts[1][0], parts[1][1])
        await web.store.record_outcomes([flush], [], [])

    web.run(go())


def publish(web: WebServer, job_id: str, rest: dict[int, bytes] | None = None, outcome: Outcome | None = None) -> None:
    """Closed and published; `rest` are the lines of what never ran."""

    async def go() -> None:
        await web.store.close_job(job_id, 0)
        token = fresh_id("worker")
        assert await web.store.take_step(job_id, JobState.FINALIZING, web.worker_id, token)
        job = await web.store.any_job(job_id)
        assert job is not None
        ending = None
        if rest:
            placed = await blob(web, "rest", b"".join(rest.values()))
            kind = outcome or Outcome.CANCELLED
            ending = UnrunLines(placed, array("I", rest), [kind] * len(rest), array("I", map(len, rest.values())))
        await web.store.publish_job(job, token, added=(None, ending), end=JobEnd(3_600_000))

    web.run(go())


def completed(web: WebServer, client: httpx2.Client) -> str:
    """A batch of this client that ended with one answer, by its id."""
    batch_id = running(web, client, 1)
    finish(web, batch_id, {0: b"{}\n"})
    publish(web, batch_id)
    return batch_id


async def blob(web: WebServer, kind: str, data: bytes) -> Placed:
    blob_id = fresh_id("blob")
    await web.store.begin_blob(blob_id, kind, web.worker_id)
    writer = await web.blobs.create(blob_id)
    await writer.write(data)
    stamp = await writer.finish()
    return Placed(blob_id, 0, stamp.size_bytes)
