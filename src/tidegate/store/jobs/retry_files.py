"""The files of a retry: error lines that choose what it runs, and answers of its whole chain.

Both are made of existing bytes.
"""

from collections import Counter

import msgspec

from tidegate.core.errors import LostRace
from tidegate.core.files import File
from tidegate.core.nouns import Job
from tidegate.store.database.driver import Tx
from tidegate.store.database.rows import file_from, job_from
from tidegate.store.tenants.files import release_extents


async def share_file(tx: Tx, job_id: str, source: File | None, file_id: str, tenant_id: str, name: str) -> None:
    """Make a hidden file of a job from the extents of another; an empty one without a `source`.

    The caller has locked the source's row.
    """
    await tx.all(
        "file_put",
        id=file_id,
        tenant_id=tenant_id,
        job_id=job_id,
        purpose="batch_output",
        filename=f"{job_id}_{name}.jsonl",
        state="growing",
        size_bytes=source.size_bytes if source else 0,
        line_count=source.line_count if source else 0,
        sha256="",
        expires_after_ms=None,
    )
    if source is not None:
        await _share_extents(tx, source.id, file_id, 0)


async def show_merged(tx: Tx, job: Job, expires_after_ms: int | None) -> None:
    """Add the answers of an ended retry to those of its chain.

    Show that file unless it is empty.
    """
    if job.merged_file_id is None:
        return
    ended = job_from((await tx.dicts("job_any", id=job.id))[0])
    merged = file_from((await tx.dicts("file_any", id=job.merged_file_id))[0])
    line_count = merged.line_count + ended.answered_count
    if not line_count:
        await _drop(tx, job.merged_file_id)
        await tx.all("job_merged_none", id=job.id)
        return
    if ended.output_file_id is not None:
        await _share_extents(tx, ended.output_file_id, job.merged_file_id, merged.size_bytes)
    own_bytes = ended.output_bytes if ended.output_file_id is not None else 0
    await tx.all(
        "file_show",
        id=job.merged_file_id,
        size_bytes=merged.size_bytes + own_bytes,
        line_count=line_count,
        expires_after_ms=expires_after_ms,
    )


async def drop_retry_files(tx: Tx, job_id: str) -> None:
    """Drop the merged file of a job that ended before it ran, if it is a retry."""
    job = job_from((await tx.dicts("job_any", id=job_id))[0])
    if job.merged_file_id is not None:
        await _drop(tx, job.merged_file_id)
        await tx.all("job_merged_none", id=job_id)


async def forget_retry(tx: Tx, job: Job) -> None:
    """Remove a forgotten retry's file of chosen lines, and its id from the first job.

    The caller has locked both jobs.
    """
    if job.retry_of is None:
        return
    if job.retry_file_id is not None:
        await _drop(tx, job.retry_file_id)
    for row in await tx.dicts("job_any", id=job.retry_of):
        left = [one for one in job_from(row).retried_by if one != job.id]
        await put_retried_by(tx, job.retry_of, left)


async def put_retried_by(tx: Tx, job_id: str, job_ids: list[str]) -> None:
    await tx.all("job_retried", id=job_id, retried_by=msgspec.json.encode(job_ids).decode() if job_ids else None)


async def _share_extents(tx: Tx, source_id: str, file_id: str, from_at: int) -> None:
    """Give a file the extents of another from this place on.

    The other's row is locked, so its blobs are in use.
    """
    shared = await tx.all("extents_share", file_id=source_id, to_file_id=file_id, from_at=from_at)
    for blob_id, uses in sorted(Counter(row[0] for row in shared).items()):
        if await tx.one("blob_lend", id=blob_id, uses=uses) is None:
            raise LostRace(f"{blob_id} was collected while {file_id} was made of it")


async def _drop(tx: Tx, file_id: str) -> None:
    if await tx.one("file_drop", id=file_id) is not None:
        await release_extents(tx, file_id)
