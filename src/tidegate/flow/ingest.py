"""ingest: an accepted input becomes a work file, slices and two hidden result files, in one pass and one transaction.

The pass itself (`ingest_file`) runs in a process of its own; this stage takes the step, hands paths over, and tells the store.
"""

from collections.abc import Awaitable, Callable
from pathlib import Path

import structlog

from tidegate.core import ids
from tidegate.core.errors import BlobError, BlobMissing, IngestFailed, LostRace
from tidegate.core.lines import LineRules
from tidegate.core.nouns import Extent, IngestPlan, Job, LineError
from tidegate.core.ports import Blobs, Entropy
from tidegate.core.states import JobState
from tidegate.failpoints import hit
from tidegate.flow.steps import Steps
from tidegate.store.store import Store

log = structlog.get_logger()

RETRY_MS = 2_000
RETRIES_MAX = 20

RunPass = Callable[[Path, Path, LineRules], Awaitable[IngestPlan]]


async def ingest_next(
    store: Store,
    blobs: Blobs,
    entropy: Entropy,
    steps: Steps,
    worker_id: str,
    scratch: Path,
    rules_for: Callable[[Job], LineRules],
    run_pass: RunPass,
) -> bool:
    """Ingest the oldest job that waits for it; False when none does."""
    await steps.give_back_leftovers()
    for job_id in await store.jobs_waiting_ingest(4):
        token = await steps.take(job_id, JobState.VALIDATING, worker_id)
        if token is not None:
            await hit("ingest_taken")
            if await _ingest(store, blobs, entropy, worker_id, scratch, rules_for, run_pass, job_id, token):
                steps.end(token)
            return True
    return False


async def _ingest(
    store: Store,
    blobs: Blobs,
    entropy: Entropy,
    worker_id: str,
    scratch: Path,
    rules_for: Callable[[Job], LineRules],
    run_pass: RunPass,
    job_id: str,
    token: str,
) -> bool:
    """True when the step ended here, however it ended; False when it must still be given back."""
    job = await store.any_job(job_id)
    if job is None:
        return True
    input_path: Path | None = None
    work_blob_id: str | None = None
    work_path = scratch / f"{job_id}-{token}.work"
    try:
        extent = await _input_extent(store, job)
        if extent is None:
            return await store.refuse_job(job_id, token, [_gone(job)])
        try:
            input_path = await blobs.local_path(extent.blob_id, scratch)
        except BlobMissing:
            return await store.refuse_job(job_id, token, [_gone(job)])
        plan = await run_pass(input_path, work_path, rules_for(job))
        if plan.errors:
            return await store.refuse_job(job_id, token, plan.errors)
        work_blob_id = ids.make("blob", entropy.token_bytes(16))
        await store.begin_blob(work_blob_id, "work", worker_id)
        await blobs.adopt(work_blob_id, work_path)
        await hit("ingest_work_durable")
        await store.start_job(
            job_id,
            token,
            plan,
            work_blob_id=work_blob_id,
            output_file_id=ids.make("file", entropy.token_bytes(16)),
            error_file_id=ids.make("file", entropy.token_bytes(16)),
        )
        await hit("ingest_committed")
        return True
    except LostRace:
        log.info("ingest_lost", job=job_id)
        if work_blob_id is not None:
            await store.give_up_blob(work_blob_id)
        return await store.end_unstarted(job_id, token)
    except (BlobError, IngestFailed, OSError) as error:
        await _give_back(store, job_id, token, error)
        return True
    finally:
        work_path.unlink(missing_ok=True)
        if input_path is not None and input_path.parent == scratch:
            input_path.unlink(missing_ok=True)


async def _input_extent(store: Store, job: Job) -> Extent | None:
    """An uploaded file is one extent."""
    extents = await store.list_extents(job.input_file_id, 0, 1)
    return extents[0] if extents else None


async def _give_back(store: Store, job_id: str, token: str, error: Exception) -> None:
    """Bytes cannot be reached now: someone tries again, and after long enough the job says why it failed."""
    log.warning("ingest_waits", job=job_id, error=str(error))
    failures = await store.drop_step(job_id, token, RETRY_MS)
    if failures >= RETRIES_MAX:
        log.error("ingest_gives_up", job=job_id, failures=failures)


def _gone(job: Job) -> LineError:
    return LineError(
        "input_file_gone",
        f"The input file {job.input_file_id} is gone. Upload it again and create a new batch.",
        "input_file_id",
    )
