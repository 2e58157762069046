"""Verbs about a running job: pause, resume and change it, and stop it at a threshold."""

from msgspec.structs import replace

from tidegate.core.errors import ApiProblem
from tidegate.core.job_controls import EVERYTHING, JobChange
from tidegate.core.nouns import Job, LineError
from tidegate.core.states import JobState
from tidegate.core.usage.prices import units_text
from tidegate.core.wording import in_words
from tidegate.store.database.driver import Row, Tx
from tidegate.store.database.rows import controls_columns, errors_text, job_from
from tidegate.store.database.table import Table, writes
from tidegate.store.jobs.flows import wake_flows

# A worker without the store sends until its lease ends, so a deadline may not move closer than
# that.
DEADLINE_AHEAD_MS_MIN = 60_000


class RunningJobs(Table):
    @writes
    async def pause_job(self, tx: Tx, tenant_id: str, job_id: str) -> Job | None:
        """Pause a job: nothing new of it is sent until it is resumed. None if there is no such job.

        A repeat is harmless.
        """
        await tx.one("job_halt", id=job_id)
        if await tx.one("job_pause", tenant_id=tenant_id, id=job_id) is not None:
            await tx.all("job_models_hold", job_id=job_id)
        return await open_job(tx, tenant_id, job_id, "batch_not_pausable", "paused or resumed")

    @writes
    async def resume_job(self, tx: Tx, tenant_id: str, job_id: str) -> Job | None:
        """Resume a paused job; a repeat is harmless. None if there is no such job."""
        await tx.one("job_halt", id=job_id)
        if await tx.one("job_resume", tenant_id=tenant_id, id=job_id) is not None:
            await _wake(tx, tenant_id, await tx.all("job_models_resume", job_id=job_id))
        return await open_job(tx, tenant_id, job_id, "batch_not_pausable", "paused or resumed")

    @writes
    async def change_job(self, tx: Tx, tenant_id: str, job_id: str, change: JobChange) -> Job | None:
        """Change the terms of an open job; a repeat is harmless. None if there is no such job."""
        await tx.one("job_halt", id=job_id)
        job = await open_job(tx, tenant_id, job_id, "batch_not_changeable", "changed")
        if job is None:
            return None
        controls = replace(job.controls, **change.controls)
        expires_at, window_text = job.expires_at, job.window_text
        if change.window_ms is not None and change.window_text != job.window_text:
            expires_at, window_text = job.created_at + change.window_ms, change.window_text
            await _check_deadline(tx, expires_at)
        check_not_before(controls.not_before, expires_at, job.begin_by if job.begun_at is None else None)
        await tx.all(
            "job_change", id=job_id, window_text=window_text, **controls_columns(controls), expires_at=expires_at
        )
        not_before = controls.not_before if "not_before" in change.controls else None
        changed = await tx.all(
            "job_models_change", job_id=job_id, not_before=not_before, priority=controls.priority, expires_at=expires_at
        )
        if await stop_job_over(tx, job_id):
            await tx.all("job_models_close", job_id=job_id)
        else:
            await _wake(tx, tenant_id, changed)
        return job_from((await tx.dicts("job_any", id=job_id))[0])


async def open_job(tx: Tx, tenant_id: str, job_id: str, code: str, verb: str) -> Job | None:
    """Return the job; refuse one that has ended or is closing. None if there is no such job."""
    rows = await tx.dicts("job_get", tenant_id=tenant_id, id=job_id)
    if not rows:
        return None
    job = job_from(rows[0])
    if job.closing is not None or job.state not in (JobState.VALIDATING, JobState.IN_PROGRESS):
        about = f" It is about to be {job.closing}." if job.closing and job.closing is not job.state else ""
        what = f"A batch with status '{job.state}' cannot be {verb}.{about}"
        raise ApiProblem(409, code, f"{what} A retry runs what it leaves without an answer.", param="batch_id")
    return job


async def _wake(tx: Tx, tenant_id: str, flows: list[Row]) -> None:
    for model, share_owner in sorted((row[0], row[1]) for row in flows):
        await wake_flows(tx, [model], share_owner, tenant_id, None)


async def _check_deadline(tx: Tx, expires_at: int) -> None:
    [(now,)] = await tx.all("now")
    if expires_at < now + DEADLINE_AHEAD_MS_MIN:
        raise ApiProblem(
            400,
            "invalid_parameter",
            "`completion_window` counts from the creation of the batch and must end at least a minute from now. To stop it now, cancel it.",
            param="completion_window",
        )


def check_not_before(not_before: int, expires_at: int, begin_by: int | None) -> None:
    """Refuse a `not_before` after the moment by which the job must have begun or ended."""
    if not_before >= expires_at:
        message = "`not_before` lies behind the end of the batch's `completion_window`: nothing of it would run."
    elif begin_by is not None and not_before >= begin_by:
        message = "`not_before` lies behind the end of the batch's `begin_within`: nothing of it would run."
    else:
        return
    raise ApiProblem(400, "invalid_parameter", message, param="not_before")


async def stop_job_over(tx: Tx, job_id: str) -> bool:
    """Stop a job that passed its maximum cost or errors; False if it did not, or closes already.

    The caller has locked its row.
    """
    job = job_from((await tx.dicts("job_any", id=job_id))[0])
    passed = _passed(job)
    if passed is None:
        return False
    stopped_by, message = passed
    errors = errors_text([LineError(f"{stopped_by}_exceeded", message, stopped_by)])
    return await tx.one("job_stop", id=job_id, stopped_by=stopped_by, errors=errors) is not None


def _passed(job: Job) -> tuple[str, str] | None:
    """Return the threshold that a job passed, and a message; None if none.

    `job_add` checks the same.
    """
    most, errors = job.controls.max_cost_nano, job.controls.max_errors
    if most is not None and job.cost_nano > most:
        return (
            "max_cost",
            f"The answers of this batch cost {units_text(job.cost_nano)}, more than its max_cost of {units_text(most)}.",
        )
    if errors is None:
        return None
    done = job.answered_count + job.failed_count
    if errors.count is not None and job.failed_count > errors.count:
        return (
            "max_errors",
            f"{in_words(job.failed_count, 'request')} failed, more than the {errors.count:,} that max_errors allows.",
        )
    if errors.share_ppm == EVERYTHING:
        sent_in_vain = 0 if job.answered_count else job.failed_count - job.unsent_count
        passed = f"The first {in_words(sent_in_vain, 'request')} failed, and none succeeded."
        return ("max_errors", passed) if sent_in_vain >= errors.after else None
    if errors.share_ppm is None or done < min(errors.after, job.run_count):
        return None
    if 1_000_000 * job.failed_count <= errors.share_ppm * done:
        return None
    share = errors.share_ppm / 1_000_000
    return (
        "max_errors",
        f"{job.failed_count:,} of {in_words(done, 'request')} failed, more than the share of {share:g} that max_errors allows.",
    )
