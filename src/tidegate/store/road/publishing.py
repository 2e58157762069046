"""Verbs that end a job: publish its files, with lines of items that were not run, or abandon it.

The job's row is locked first, then files and blobs, in the order of all transactions.
"""

from collections import Counter
from itertools import accumulate

from tidegate.core.errors import ApiProblem, LostRace
from tidegate.core.nouns import Job, JobEnd, LineError, Rewrite, UnrunLines
from tidegate.core.states import JOB_ENDED, Outcome
from tidegate.store.database.driver import Tx
from tidegate.store.database.rows import errors_text, job_from
from tidegate.store.database.table import Table, writes
from tidegate.store.jobs.job_events import record_lines
from tidegate.store.jobs.retry_files import show_merged
from tidegate.store.road.result_parts import cut_results
from tidegate.store.tenants.files import hold_blobs, release_extents
from tidegate.store.tenants.webhooks import put_events

ABANDONED = LineError(
    "abandoned",
    "An operator gave up publishing this batch: its files hold what was recorded, and what never ran is in neither.",
)
_OUTCOME_COLUMNS = ("job_id", "number", "outcome", "at", "size_bytes")


class PublishedJobs(Table):
    @writes
    async def publish_job(
        self,
        tx: Tx,
        job: Job,
        token: str,
        *,
        added: tuple[UnrunLines | None, UnrunLines | None] = (None, None),
        rewrites: tuple[Rewrite | None, Rewrite | None] = (None, None),
        end: JobEnd,
    ) -> None:
        """End a job: add lines of items that were not run, replace rewritten files, show the files.

        The first of each pair is for the output file.
        """
        counts = Counter(outcome for one in added if one for outcome in one.outcomes)
        output_bytes, error_bytes = (
            rewrite.placed.size_bytes if rewrite else size_bytes + (one.placed.size_bytes if one else 0)
            for rewrite, one, size_bytes in zip(rewrites, added, (job.output_bytes, job.error_bytes), strict=True)
        )
        published = await tx.one(
            "job_publish",
            id=job.id,
            token=token,
            answered=counts[Outcome.ANSWERED],
            failed=counts[Outcome.FAILED],
            expired=counts[Outcome.EXPIRED],
            cancelled=counts[Outcome.CANCELLED],
            schema_invalid=sum(one.schema_invalid for one in added if one),
            output_bytes=output_bytes,
            error_bytes=error_bytes,
        )
        if published is None:
            rows = await tx.dicts("job_any", id=job.id)
            if rows and job_from(rows[0]).state in JOB_ENDED:
                return
            raise LostRace(f"{job.id} is published by someone else")
        if any(rewrites) or job.merged_file_id or job.shape.output_file_bytes_max:
            await _hold_results(tx, job)
        places = ((job.output_file_id, job.output_bytes), (job.error_file_id, job.error_bytes))
        for (file_id, at), one, rewrite in zip(places, added, rewrites, strict=True):
            if one:
                await _append_lines(tx, job, file_id, at, one)
            if rewrite and file_id:
                await _replace_file(tx, job.id, file_id, rewrite)
        if job.door is not None and (rest := added[1]):
            items = [
                (number, "item.cancelled" if outcome is Outcome.CANCELLED else "item.failed")
                for number, outcome, _ in rest.lines()
            ]
            place = (job.error_bytes, rest.placed.size_bytes)
            await record_lines(tx, job.id, (job.output_bytes, 0), place, items)
        await _show_files(tx, job, end.keep_ms)
        await show_merged(tx, job, end.keep_ms)
        await tx.all("slices_drop_job", job_id=job.id)
        await tx.all("blob_release", id=job.work_blob_id, uses=1)
        await put_events(tx, job.id, end.response_status)

    @writes
    async def abandon_job(self, tx: Tx, tenant_id: str, job_id: str, keep_ms: int | None) -> Job | None:
        """End a job that cannot be published, with what was recorded; None if there is no such job.

        Refuse a job that is not `finalizing`.
        """
        rows = await tx.dicts("job_get", tenant_id=tenant_id, id=job_id)
        if not rows:
            return None
        job = job_from(rows[0])
        if any(error.code == ABANDONED.code for error in job.errors):
            return job
        if await tx.one("job_abandon", tenant_id=tenant_id, id=job_id, errors=errors_text([ABANDONED])) is None:
            raise ApiProblem(
                409,
                "batch_not_abandonable",
                f"This batch is {job.state}; only one that is finalizing can be abandoned. A running one can be cancelled.",
                param="batch_id",
            )
        await _hold_results(tx, job)
        await _show_files(tx, job, keep_ms)
        await show_merged(tx, job, keep_ms)
        await tx.all("slices_drop_job", job_id=job_id)
        await tx.all("blob_release", id=job.work_blob_id, uses=1)
        await put_events(tx, job.id)
        return job_from((await tx.dicts("job_any", id=job_id))[0])


async def _hold_results(tx: Tx, job: Job) -> None:
    """Lock the result files of a job and their blobs, in the order of all transactions."""
    results = [one for one in (job.output_file_id, job.error_file_id) if one]
    await tx.many_returning("file_lock", sorted((one,) for one in results))
    await hold_blobs(tx, results)


async def _show_files(tx: Tx, job: Job, keep_ms: int | None) -> None:
    """Show the result files of a job that ended, and drop empty ones.

    `job` is its row before the end.

    `output_expires_after` takes precedence over `keep_ms`.
    """
    if job.output_expires_after_s is not None:
        keep_ms = job.output_expires_after_s * 1000
    ended = job_from((await tx.dicts("job_any", id=job.id))[0])
    failures = ended.failed_count + ended.expired_count + ended.cancelled_count
    for file_id, size_bytes, line_count in (
        (job.output_file_id, ended.output_bytes, ended.answered_count),
        (job.error_file_id, ended.error_bytes, failures),
    ):
        if line_count:
            await tx.all(
                "file_show", id=file_id, size_bytes=size_bytes, line_count=line_count, expires_after_ms=keep_ms
            )
        else:
            await tx.all("file_drop", id=file_id)
    await cut_results(tx, job, ended, keep_ms)


async def _append_lines(tx: Tx, job: Job, file_id: str | None, at: int, added: UnrunLines) -> None:
    """Add lines at the end of a result file, and their outcomes."""
    places = accumulate(added.sizes, initial=at)
    rows = (
        (job.id, number, outcome.value, line_at, size_bytes)
        for (number, outcome, size_bytes), line_at in zip(added.lines(), places, strict=False)
    )
    await tx.copy("outcomes", _OUTCOME_COLUMNS, rows)
    placed = added.placed
    if await tx.one("blob_keep", id=placed.blob_id, size_bytes=placed.size_bytes, uses=1) is None:
        raise LostRace(f"{placed.blob_id} was collected before {job.id} was published")
    await tx.all(
        "extent_put", file_id=file_id, at=at, size_bytes=placed.size_bytes, blob_id=placed.blob_id, blob_at=placed.at
    )


async def _replace_file(tx: Tx, job_id: str, file_id: str, rewrite: Rewrite) -> None:
    await tx.one("file_lock", id=file_id)
    await release_extents(tx, file_id)
    if await tx.one("blob_keep", id=rewrite.placed.blob_id, size_bytes=rewrite.placed.size_bytes, uses=1) is None:
        raise LostRace(f"{rewrite.placed.blob_id} was collected before {job_id} was published")
    await tx.all(
        "extent_put",
        file_id=file_id,
        at=0,
        size_bytes=rewrite.placed.size_bytes,
        blob_id=rewrite.placed.blob_id,
        blob_at=rewrite.placed.at,
    )
    await tx.many(
        "outcome_move", ((at, job_id, number) for number, at in zip(rewrite.numbers, rewrite.places, strict=True))
    )
