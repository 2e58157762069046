"""Verbs about blobs, and about the files that are made of them."""

from collections import Counter
from collections.abc import Iterable, Sequence

from tidegate.core.errors import ApiProblem, LostRace
from tidegate.core.files import AbandonedBlob, Extent, File, NewFile, Placed, StoredBlob
from tidegate.core.job_shape import WHOLE, parts_from
from tidegate.core.nouns import Caller, Idempotency, Quotas
from tidegate.store.database.driver import Row, Tx
from tidegate.store.database.rows import file_from
from tidegate.store.database.table import (
    Table,
    forget_object,
    frees,
    idempotent_object,
    reads,
    refuse_forgotten,
    remember_object,
    writes,
)

_LAST = 1 << 62
_LIST_START = {"desc": (_LAST, ""), "asc": (-1, "")}


# There may be many keys and places in lists, so they are removed in pieces: the rows of a piece,
# and the pieces of a pass.
PIECE_ROWS, PIECES_MAX = 1_000, 100


class StoredFiles(Table):
    async def begin_blob(self, blob_id: str, kind: str, worker_id: str) -> None:
        """Write the row of a blob, before it has bytes."""
        await self.begin_blobs([blob_id], kind, worker_id)

    @writes
    async def begin_blobs(self, tx: Tx, blob_ids: list[str], kind: str, worker_id: str) -> None:
        await tx.many("blob_put", [(blob_id, kind, worker_id) for blob_id in blob_ids])

    @frees
    async def give_up_blob(self, tx: Tx, blob_id: str) -> bool:
        """Condemn a blob that its owner will not finish.

        Return False if it is in use or condemned already.
        """
        return await tx.one("blob_condemn", id=blob_id) is not None

    @frees
    async def condemn_uploads(self, tx: Tx, blob_ids: Sequence[str]) -> list[str]:
        """Condemn the uploads among these that no file uses any more.

        Return them: their bytes may be removed at once.
        """
        return [one for one in sorted(blob_ids) if await tx.one("blob_condemn_upload", id=one) is not None]

    @writes
    async def create_file(
        self,
        tx: Tx,
        caller: Caller,
        new: NewFile,
        *,
        idempotency: Idempotency | None = None,
        quotas: Quotas | None = None,
    ) -> File:
        """Show a durable blob as a caller's file, or return the file of a known Idempotency-Key."""
        if known := await tx.dicts("file_any", id=new.id):
            return file_from(known[0])
        await tx.one("tenant_lock", tenant_id=caller.tenant_id)
        if earlier := await idempotent_object(tx, caller.tenant_id, "files", idempotency):
            made = await tx.dicts("file_any", id=earlier)
            return file_from(made[0]) if made and made[0]["state"] != "deleted" else refuse_forgotten()
        await check_stored_bytes(tx, caller, quotas, new.stamp.size_bytes)
        await show_file(tx, caller.tenant_id, new)
        await remember_object(tx, caller.tenant_id, "files", idempotency, new.id)
        return file_from((await tx.dicts("file_any", id=new.id))[0])

    @reads
    async def get_file(self, tx: Tx, tenant_id: str, file_id: str) -> File | None:
        rows = await tx.dicts("file_get", tenant_id=tenant_id, id=file_id)
        return file_from(rows[0]) if rows else None

    @reads
    async def file_owner(self, tx: Tx, file_id: str) -> str | None:
        """Return the name of a file's tenant, for an operator who knows only the file's id."""
        row = await tx.one("file_owner", id=file_id)
        return None if row is None else str(row[0])

    @reads
    async def get_growing_file(self, tx: Tx, tenant_id: str, file_id: str) -> File | None:
        """Return a result file that a running job still writes to."""
        rows = await tx.dicts("file_get_growing", tenant_id=tenant_id, id=file_id)
        return file_from(rows[0]) if rows else None

    @reads
    async def result_line_place(self, tx: Tx, job_id: str, lines: int, *, is_output: bool) -> int | None:
        """Return the place in a job's result file after `lines` lines; None after the last."""
        row = await tx.one("outcome_place", job_id=job_id, is_output=int(is_output), lines=lines)
        return None if row is None else int(row[0])

    @reads
    async def list_files(
        self,
        tx: Tx,
        tenant_id: str,
        *,
        after: str | None,
        count_max: int,
        order: str = "desc",
        purpose: str | None = None,
    ) -> list[File] | None:
        """Return a page of a tenant's files; None if `after` is no file of this tenant."""
        start: Row | None = _LIST_START[order]
        if after is not None:
            start = await tx.one("file_cursor", tenant_id=tenant_id, id=after)
            if start is None:
                return None
        assert start is not None
        rows = await tx.dicts(
            f"file_list_{order}",
            tenant_id=tenant_id,
            purpose=purpose,
            created_at=start[0],
            id=start[1],
            count_max=count_max,
        )
        return [file_from(row) for row in rows]

    @frees
    async def delete_file(self, tx: Tx, tenant_id: str, file_id: str) -> bool:
        """Hide a file and release its bytes; False if there is none.

        Refuse an input that ingest needs.
        """
        # The creation of a job with this input takes the same lock, so one of the two sees the
        # other.
        await tx.one("tenant_lock", tenant_id=tenant_id)
        deleted = await tx.one("file_delete", tenant_id=tenant_id, id=file_id)
        if deleted is None:
            return False
        if await tx.one("file_needed", id=file_id) is not None:
            raise ApiProblem(
                409,
                "file_in_use",
                "A batch that is still validating reads this file. Wait until it is in progress, or cancel it first.",
                param="file_id",
            )
        wholes = [] if deleted[1] is None else await _delete_wholes(tx, tenant_id, deleted[1])
        await hold_blobs(tx, (file_id, *wholes))
        for one in (file_id, *wholes):
            await release_extents(tx, one)
        return True

    @frees
    async def take_back_file(self, tx: Tx, tenant_id: str, file_id: str, key: str | None) -> bool:
        """Delete a file and free its Idempotency-Key, as if it had not been uploaded.

        Return False if a job uses it, or if there is none.
        """
        await tx.one("tenant_lock", tenant_id=tenant_id)
        if await tx.one("file_used", id=file_id) is not None:
            return False
        if await tx.one("file_delete", tenant_id=tenant_id, id=file_id) is None:
            return False
        await release_extents(tx, file_id)
        if key is not None:
            await forget_object(tx, tenant_id, "files", key, file_id)
        return True

    @reads
    async def list_extents(self, tx: Tx, file_id: str, from_at: int, count_max: int) -> list[Extent]:
        """Return the extents of a file that end after a place, in order."""
        rows = await tx.all("extent_list", file_id=file_id, from_at=from_at, count_max=count_max)
        return [Extent(*row) for row in rows]

    @reads
    async def crowded_files(self, tx: Tx, count_max: int) -> list[tuple[str, int]]:
        """Return the files with more than `count_max` extents, worst first."""
        return [(row[0], row[1]) for row in await tx.all("extent_crowded", count_max=count_max)]

    @writes
    async def replace_extents(self, tx: Tx, file_id: str, old: list[Extent], placed: Placed) -> None:
        """Replace neighbouring extents by one copy of them. Raise LostRace if they have changed."""
        copy = Extent(old[0].at, placed.size_bytes, placed.blob_id, placed.at)
        if await tx.one("file_lock", id=file_id) is None:
            raise LostRace(f"{file_id} was deleted while its pieces were copied")
        present = await tx.all("extent_list", file_id=file_id, from_at=copy.at, count_max=1)
        if present and Extent(*present[0]) == copy:
            return
        span = {"from_at": copy.at, "to_at": old[-1].at + old[-1].size_bytes}
        removed = [Extent(*row) for row in await tx.all("extent_delete", file_id=file_id, **span)]
        if sorted(removed, key=lambda extent: extent.at) != old:
            raise LostRace(f"the pieces of {file_id} changed while they were copied")
        if await tx.one("blob_keep", id=placed.blob_id, size_bytes=placed.size_bytes, uses=1) is None:
            raise LostRace(f"{placed.blob_id} was collected while it was written")
        await _release_blobs(tx, removed)
        await tx.all(
            "extent_put",
            file_id=file_id,
            at=copy.at,
            size_bytes=copy.size_bytes,
            blob_id=copy.blob_id,
            blob_at=copy.blob_at,
        )

    @reads
    async def expired_files(self, tx: Tx, count_max: int) -> list[tuple[str, str]]:
        return [(row[0], row[1]) for row in await tx.all("files_expired", count_max=count_max)]

    async def prune_files(self, keep_ms: int, count_max: int) -> None:
        """Forget some long deleted files, and old Idempotency-Keys and places in lists.

        They are removed in pieces.
        """
        for _ in range(PIECES_MAX):
            if not await self._prune_some(keep_ms, count_max):
                return

    @frees
    async def _prune_some(self, tx: Tx, keep_ms: int, count_max: int) -> bool:
        """Forget one piece. Return whether there may be more old keys or places."""
        await tx.all("files_prune", keep_ms=keep_ms, count_max=count_max)
        is_more = False
        for name in ("idempotency_prune", "list_places_prune"):
            gone = await tx.all(name, keep_ms=2 * 24 * 3600 * 1000, count_max=PIECE_ROWS)
            is_more = is_more or len(gone) == PIECE_ROWS
        return is_more

    @reads
    async def abandoned_blobs(self, tx: Tx, count_max: int) -> list[AbandonedBlob]:
        """Return blobs that are being written by owners that are gone."""
        return [AbandonedBlob(*row) for row in await tx.all("blobs_abandoned", count_max=count_max)]

    @reads
    async def answers_recorded_to(self, tx: Tx, blob_id: str) -> int | None:
        """Return how far an answer log was recorded.

        Return None if this is no such log, or it is condemned.
        """
        rows = await tx.dicts("blob_get", id=blob_id)
        if not rows or rows[0]["kind"] != "answers" or rows[0]["state"] == "condemned":
            return None
        return int(rows[0]["recorded_to"])

    @frees
    async def settle_blob(self, tx: Tx, blob_id: str) -> None:
        """Settle a blob from which its owner will record nothing more.

        From now on only its uses keep it.
        """
        await tx.all("blob_settle", id=blob_id)

    @frees
    async def condemn_unused_blobs(self, tx: Tx, age_ms: int, soon_ms: int, count_max: int) -> int:
        """Condemn unused blobs: logs once they are old enough, others soon. Return how many."""
        return len(await tx.all("blobs_condemn_unused", age_ms=age_ms, soon_ms=soon_ms, count_max=count_max))

    @reads
    async def condemned_blobs(self, tx: Tx, age_ms: int, soon_ms: int, count_max: int) -> list[str]:
        """Return condemned blobs whose bytes may be removed: logs after a while, others soon."""
        rows = await tx.all("blobs_condemned", age_ms=age_ms, soon_ms=soon_ms, count_max=count_max)
        return [row[0] for row in rows]

    @frees
    async def forget_blob(self, tx: Tx, blob_id: str) -> None:
        """Remove the row of a blob whose bytes are gone."""
        await tx.all("blob_forget", id=blob_id)

    @reads
    async def list_blobs(self, tx: Tx, after: str, count_max: int) -> list[StoredBlob]:
        """Return a page of all blobs, by id."""
        return [StoredBlob(*row) for row in await tx.all("blobs_page", after=after, count_max=count_max)]

    @reads
    async def files_of_blob(self, tx: Tx, blob_id: str, count_max: int) -> list[str]:
        """Return some of the files that use a blob."""
        return [row[0] for row in await tx.all("blob_files", id=blob_id, count_max=count_max)]

    @reads
    async def knows_blob(self, tx: Tx, blob_id: str) -> bool:
        return await tx.one("blob_get", id=blob_id) is not None


async def _delete_wholes(tx: Tx, tenant_id: str, job_id: str) -> list[str]:
    """Delete the whole result files of a job whose last part was deleted.

    Return those that were deleted.
    """
    rows = await tx.dicts("job_any", id=job_id)
    parts = parts_from(rows[0]["parts"]) if rows else WHOLE
    gone = []
    for whole_id, part_ids in (
        ((rows[0]["output_file_id"], parts.output), (rows[0]["error_file_id"], parts.error)) if rows else ()
    ):
        if not part_ids or any([await tx.one("file_is_shown", id=part_id) for part_id in part_ids]):
            continue
        if await tx.one("file_delete", tenant_id=tenant_id, id=whole_id) is not None:
            gone.append(whole_id)
    return gone


async def release_extents(tx: Tx, file_id: str) -> None:
    """Remove a file's extents and release their blobs. The caller has locked the file's row."""
    removed = await tx.all("extent_delete", file_id=file_id, from_at=-1, to_at=_LAST)
    await _release_blobs(tx, [Extent(*row) for row in removed])


async def hold_blobs(tx: Tx, file_ids: Iterable[str | None]) -> None:
    """Lock the blobs of these files in order of their ids, before the first of them changes.

    The caller has locked the files' rows. Logs have lines of many jobs, so transactions about
    different jobs need the same blobs, and must lock them in one order.
    """
    pieces = await tx.many_returning("extent_blobs", [(one,) for one in file_ids if one])
    await tx.many_returning("blob_hold", sorted({(row[0],) for row in pieces}))


async def _release_blobs(tx: Tx, removed: list[Extent]) -> None:
    """Release the blobs of extents that were really removed, in order of their ids."""
    for blob_id, uses in sorted(Counter(extent.blob_id for extent in removed).items()):
        await tx.all("blob_release", id=blob_id, uses=uses)


async def show_file(tx: Tx, tenant_id: str, file: NewFile) -> None:
    """Show a durable blob as a tenant's file."""
    size_bytes = file.stamp.size_bytes
    if await tx.one("blob_keep", id=file.blob_id, size_bytes=size_bytes, uses=1) is None:
        raise LostRace(f"{file.blob_id} was collected while it was uploaded")
    await tx.all(
        "file_put",
        id=file.id,
        tenant_id=tenant_id,
        job_id=None,
        purpose=file.purpose,
        filename=file.filename,
        state="ready",
        size_bytes=size_bytes,
        line_count=file.line_count,
        sha256=file.stamp.sha256,
        expires_after_ms=file.expires_after_ms,
    )
    await tx.all("extent_put", file_id=file.id, at=0, size_bytes=size_bytes, blob_id=file.blob_id, blob_at=0)


async def check_stored_bytes(tx: Tx, caller: Caller, quotas: Quotas | None, size_bytes: int) -> None:
    if quotas is None or not quotas.stored_bytes_max:
        return
    [(total,)] = await tx.all("tenant_bytes", tenant_id=caller.tenant_id)
    stored = int(total)
    most = quotas.stored_bytes_max
    if stored + size_bytes > most:
        advice = "Delete files that you no longer need." if size_bytes <= most else "It never fits: split it."
        raise ApiProblem(
            429,
            "storage_quota_exceeded",
            f"Your files take {stored:,} of {most:,} bytes, and this takes {size_bytes:,} more. {advice}",
            param="file",
            retry_after_s=3600,
        )
