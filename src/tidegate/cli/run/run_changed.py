"""Deals with earlier runs of a file that was edited since: ends their open batches, and finds the
answers that can be kept.

Runs of one series read the same file, edited or not, and write the same results. The batches of a
series have its name in their metadata.
"""

from contextlib import suppress
from typing import TYPE_CHECKING

from tidegate.core.errors import ApiProblem
from tidegate.core.job_lists import JobFilter
from tidegate.core.nouns import Job
from tidegate.core.states import JOB_ENDED

if TYPE_CHECKING:
    from tidegate.storage import Parts

SERIES = "series"
# The most batches of a series that are read, newest first.
EARLIER_MAX = 50


async def end_outdated(parts: "Parts", series: str, sha256: str | None) -> list[Job]:
    """Cancel the open batches of other versions of the file than this one, and return them; without
    a version, all of them.

    Nothing more of them should be sent; their answers are kept."""
    cancelled = await find_outdated(parts, series, sha256)
    for job in cancelled:
        # A batch that already closes for another reason ends as well.
        with suppress(ApiProblem):
            await parts.store.cancel_job(parts.tenant_id, job.id)
    if cancelled:
        parts.wakes.jobs.notify()
    return cancelled


async def find_outdated(parts: "Parts", series: str, sha256: str | None) -> list[Job]:
    """Return the open batches of other versions of the file than this one; without a version, all
    of them.
    """
    if parts.settings.store.is_postgresql:
        # Another process may be running them for a caller of its own.
        return []
    return [
        job
        for job in await _batches(parts, series)
        if job.state not in JOB_ENDED and (sha256 is None or await _input_sha256(parts, job) != sha256)
    ]


async def find_answered(parts: "Parts", series: str) -> Job | None:
    """Return the batch of the last version of the file that has answers; among its
    retries, the one with the most."""
    ended = [job for job in await _batches(parts, series) if job.state in JOB_ENDED]
    by_id = {job.id: job for job in ended}

    def answered_count(job: Job) -> int:
        first = by_id.get(job.retry_of or "")
        return job.answered_count + (answered_count(first) if first is not None else 0)

    last = next((job for job in ended if answered_count(job)), None)
    if last is None:
        return None
    return max((job for job in ended if job.input_file_id == last.input_file_id), key=answered_count)


async def _batches(parts: "Parts", series: str) -> list[Job]:
    if not series:
        return []
    wanted = JobFilter(metadata={SERIES: series})
    return await parts.store.search_jobs(parts.tenant_id, wanted, count_max=EARLIER_MAX) or []


async def _input_sha256(parts: "Parts", job: Job) -> str | None:
    file = await parts.store.get_file(parts.tenant_id, job.input_file_id)
    return None if file is None else file.sha256
