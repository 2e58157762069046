"""Verbs about a job's canary: the sample that runs first, its end, and the caller's decision."""

from enum import Enum, auto

from tidegate.core.errors import ApiProblem
from tidegate.core.nouns import FOREVER_MS, Job, LineError
from tidegate.core.states import JobState
from tidegate.core.wording import in_words
from tidegate.store.database.driver import Tx
from tidegate.store.database.rows import errors_text, job_from
from tidegate.store.database.table import Table, writes
from tidegate.store.jobs.flows import wake_flows
from tidegate.store.jobs.job_controls import open_job

STOPPED_BY = "canary"


class SampleEnd(Enum):
    """The result of a sample: the job stops, its other items may run, or its caller decides."""

    STOPPED = auto()
    LET_GO = auto()
    WAITS = auto()


class Canaries(Table):
    @writes
    async def end_canary(self, tx: Tx, tenant_id: str, job_id: str, *, goes_on: bool) -> Job | None:
        """Continue or stop a job, whatever its sample showed so far. None if there is no such job.

        A repeat is harmless.
        """
        await tx.one("job_halt", id=job_id)
        rows = await tx.dicts("job_get", tenant_id=tenant_id, id=job_id)
        if not rows:
            return None
        job = job_from(rows[0])
        if job.canary is None:
            raise ApiProblem(409, "batch_not_changeable", "This batch was created without a canary.", param="batch_id")
        if job.stopped_by == STOPPED_BY and not goes_on:
            return job
        await open_job(tx, tenant_id, job_id, "batch_not_changeable", "continued or stopped after its canary")
        if goes_on:
            await tx.all("job_canary_set", id=job_id, state="passed")
            await let_go(tx, job_id)
        elif job.state is JobState.VALIDATING or job.canary.state == "passed":
            message = "The canary of this batch has not begun, or is over: to stop the batch, cancel it."
            raise ApiProblem(409, "batch_not_changeable", message, param="batch_id")
        else:
            await _stop(tx, job, "failed", "The batch was stopped by its caller while or after its canary ran.")
            await tx.all("job_models_close", job_id=job_id)
        return job_from((await tx.dicts("job_any", id=job_id))[0])


async def begin_sample(tx: Tx, job_id: str, count: int) -> None:
    """Start a job with a canary: only the first `count` items may run.

    With none, the canary has passed.
    """
    if not count:
        await tx.all("job_canary_set", id=job_id, state="passed")
    elif await tx.one("job_canary_begin", id=job_id, items=count) is not None:
        await tx.all("slices_hold_back", job_id=job_id, first=count, forever=FOREVER_MS)


async def end_sample(tx: Tx, job_id: str) -> SampleEnd:
    """Decide what follows a sample that is done. The caller has locked the job's row."""
    job = job_from((await tx.dicts("job_any", id=job_id))[0])
    canary = job.canary
    assert canary is not None
    done = job.answered_count + job.failed_count
    if 1_000_000 * job.failed_count > canary.error_ppm * done:
        share = canary.error_ppm / 1_000_000
        tried = in_words(done, "request")
        message = f"{job.failed_count:,} of the {tried} of its canary failed, more than the share of {share:g} that it allows."
        await _stop(tx, job, "failed", message)
        return SampleEnd.STOPPED
    if canary.then == "stop" and done < job.run_count:
        await _stop(
            tx,
            job,
            "passed",
            f"The {in_words(done, 'request of its canary is', 'requests of its canary are')} done, and it was to stop then.",
        )
        return SampleEnd.STOPPED
    waits = canary.then == "wait" and done < job.run_count
    await tx.all("job_canary_set", id=job_id, state="waiting" if waits else "passed")
    return SampleEnd.WAITS if waits else SampleEnd.LET_GO


async def let_go(tx: Tx, job_id: str) -> None:
    """Release the items that waited for the sample."""
    await tx.all("slices_let_go", job_id=job_id, forever=FOREVER_MS)
    [row] = await tx.dicts("job_any", id=job_id)
    for model, share_owner in await tx.all("job_flows", job_id=job_id):
        await wake_flows(tx, [model], share_owner, row["tenant_id"], None)


async def _stop(tx: Tx, job: Job, state: str, message: str) -> None:
    """Stop the job and keep its results. Items that never ran become `batch_failed`."""
    await tx.all("job_canary_set", id=job.id, state=state)
    errors = errors_text([LineError("canary_failed", message, "canary")])
    await tx.one("job_stop", id=job.id, stopped_by=STOPPED_BY, errors=errors)
