"""Verbs about files that come in parts.

Each verb that changes an upload locks its tenant's row, so that quotas are counted exactly.
"""

from typing import Any

from tidegate.core.errors import ApiProblem, LostRace
from tidegate.core.files import JoinedParts, NewFile, PartedUpload, Stamp, UploadPart, UploadRequest
from tidegate.core.nouns import Caller, Idempotency, Quotas
from tidegate.core.problems import no_such_upload, upload_not_pending
from tidegate.core.states import UploadState
from tidegate.core.wording import in_words
from tidegate.store.database.driver import Tx
from tidegate.store.database.table import (
    Table,
    frees,
    idempotent_object,
    reads,
    refuse_forgotten,
    remember_object,
    writes,
)
from tidegate.store.tenants.files import check_stored_bytes, show_file

PENDING_MS = 3_600_000
PENDING_MAX = 1_000
PARTS_MAX = 10_000
# A part that was sent twice uses its room twice until the upload is complete.
SENT_TWICE = 2


class StoredUploads(Table):
    @writes
    async def create_upload(
        self,
        tx: Tx,
        caller: Caller,
        upload_id: str,
        request: UploadRequest,
        *,
        idempotency: Idempotency | None = None,
        quotas: Quotas | None = None,
    ) -> PartedUpload:
        """Begin an upload, or return the one that a known Idempotency-Key began before."""
        tenant_id = caller.tenant_id
        await tx.one("tenant_lock", tenant_id=tenant_id)
        if known := await _upload(tx, tenant_id, upload_id):
            return known
        if earlier := await idempotent_object(tx, tenant_id, "uploads", idempotency):
            return await _upload(tx, tenant_id, earlier) or refuse_forgotten()
        [(count,)] = await tx.all("upload_count", tenant_id=tenant_id)
        if count >= PENDING_MAX:
            message = f"You have {in_words(count, 'pending upload')}. Complete or cancel one."
            raise ApiProblem(429, "too_many_pending_uploads", message, retry_after_s=60)
        await check_stored_bytes(tx, caller, quotas, request.size_bytes)
        await tx.all(
            "upload_put",
            id=upload_id,
            tenant_id=tenant_id,
            size_bytes=request.size_bytes,
            purpose=request.purpose,
            filename=request.filename,
            mime_type=request.mime_type,
            expires_after_ms=request.expires_after_ms,
            keep_ms=PENDING_MS,
        )
        await remember_object(tx, tenant_id, "uploads", idempotency, upload_id)
        return await _upload(tx, tenant_id, upload_id) or refuse_forgotten()

    @reads
    async def get_upload(self, tx: Tx, tenant_id: str, upload_id: str) -> PartedUpload | None:
        return await _upload(tx, tenant_id, upload_id)

    @writes
    async def add_upload_part(
        self,
        tx: Tx,
        caller: Caller,
        part: UploadPart,
        *,
        idempotency: Idempotency | None = None,
        quotas: Quotas | None = None,
    ) -> UploadPart:
        """Keep a durable blob as a part, or return the part of a known Idempotency-Key."""
        tenant_id, upload_id = caller.tenant_id, part.upload_id
        await tx.one("tenant_lock", tenant_id=tenant_id)
        if known := await tx.dicts("upload_part_get", id=part.id):
            return _part_from(known[0])
        upload = await _pending(tx, tenant_id, upload_id)
        if earlier := await idempotent_object(tx, tenant_id, "uploads/parts", idempotency):
            made = await tx.dicts("upload_part_get", id=earlier)
            return _part_from(made[0]) if made else refuse_forgotten()
        await _check_room(tx, upload, part.stamp.size_bytes)
        await check_stored_bytes(tx, caller, quotas, part.stamp.size_bytes)
        if await tx.one("blob_keep", id=part.blob_id, size_bytes=part.stamp.size_bytes, uses=1) is None:
            raise LostRace(f"{part.blob_id} was collected while it was uploaded")
        await tx.all(
            "upload_part_put",
            id=part.id,
            upload_id=upload_id,
            blob_id=part.blob_id,
            size_bytes=part.stamp.size_bytes,
            sha256=part.stamp.sha256,
        )
        await remember_object(tx, tenant_id, "uploads/parts", idempotency, part.id)
        return _part_from((await tx.dicts("upload_part_get", id=part.id))[0])

    @reads
    async def upload_parts(self, tx: Tx, tenant_id: str, upload_id: str) -> dict[str, UploadPart]:
        """Return the parts of a pending upload, by id."""
        await _pending(tx, tenant_id, upload_id)
        return {row["id"]: _part_from(row) for row in await tx.dicts("upload_part_list", upload_id=upload_id)}

    @writes
    async def complete_upload(
        self, tx: Tx, tenant_id: str, upload_id: str, file: NewFile, joined: JoinedParts
    ) -> tuple[PartedUpload, list[str]]:
        """Show the parts, joined to one durable blob, as a file.

        Return the blobs that are not needed any more.

        An upload that was completed before is returned without a change. The quota counted the
        parts already.
        """
        await tx.one("tenant_lock", tenant_id=tenant_id)
        upload = await _upload(tx, tenant_id, upload_id)
        if upload is None:
            raise no_such_upload(upload_id)
        if upload.state is UploadState.COMPLETED:
            return upload, []
        moved = await tx.one(
            "upload_complete",
            tenant_id=tenant_id,
            id=upload_id,
            file_id=file.id,
            parts_hash=joined.parts_hash,
            md5=joined.md5,
        )
        if moved is None:
            raise upload_not_pending(upload.state)
        unused = await _release_parts(tx, upload_id)
        await show_file(tx, tenant_id, file)
        return await _upload(tx, tenant_id, upload_id) or refuse_forgotten(), unused

    @frees
    async def cancel_upload(self, tx: Tx, tenant_id: str, upload_id: str) -> tuple[PartedUpload, list[str]]:
        """Cancel a pending upload.

        Return the blobs that are not needed any more. A repeat is harmless.
        """
        await tx.one("tenant_lock", tenant_id=tenant_id)
        moved = await tx.one("upload_cancel", tenant_id=tenant_id, id=upload_id)
        upload = await _upload(tx, tenant_id, upload_id)
        if upload is None:
            raise no_such_upload(upload_id)
        if upload.state is not UploadState.CANCELLED:
            raise upload_not_pending(upload.state)
        return upload, [] if moved is None else await _release_parts(tx, upload_id)

    @reads
    async def overdue_uploads(self, tx: Tx, count_max: int) -> list[tuple[str, str]]:
        """Return pending uploads whose time is over, each with its tenant."""
        return [(row[0], row[1]) for row in await tx.all("uploads_overdue", count_max=count_max)]

    @frees
    async def expire_upload(self, tx: Tx, tenant_id: str, upload_id: str) -> bool:
        """Let an upload expire whose time is over; False if it ended otherwise meanwhile."""
        await tx.one("tenant_lock", tenant_id=tenant_id)
        if await tx.one("upload_expire", id=upload_id) is None:
            return False
        await _release_parts(tx, upload_id)
        return True

    @frees
    async def prune_uploads(self, tx: Tx, keep_ms: int) -> None:
        """Forget uploads that ended long ago."""
        await tx.all("uploads_prune", keep_ms=keep_ms)


async def _upload(tx: Tx, tenant_id: str, upload_id: str) -> PartedUpload | None:
    rows = await tx.dicts("upload_get", tenant_id=tenant_id, id=upload_id)
    return _upload_from(rows[0]) if rows else None


async def _pending(tx: Tx, tenant_id: str, upload_id: str) -> PartedUpload:
    upload = await _upload(tx, tenant_id, upload_id)
    if upload is None:
        raise no_such_upload(upload_id)
    if upload.state is not UploadState.PENDING:
        raise upload_not_pending(upload.state)
    return upload


async def _check_room(tx: Tx, upload: PartedUpload, size_bytes: int) -> None:
    [(count, sent)] = await tx.all("upload_part_sums", upload_id=upload.id)
    if count >= PARTS_MAX:
        raise ApiProblem(400, "too_many_parts", f"An upload may have {PARTS_MAX:,} parts.", param="data")
    if int(sent) + size_bytes > SENT_TWICE * upload.request.size_bytes:
        raise ApiProblem(
            400,
            "upload_bytes_exceeded",
            f"The upload was created for {upload.request.size_bytes:,} bytes, and its parts have twice as many with this one. "
            "Cancel it, and create one for the size that the file really has.",
            param="data",
        )


async def _release_parts(tx: Tx, upload_id: str) -> list[str]:
    """Release all parts of an upload and return their blobs, locked in order of their ids."""
    blob_ids = sorted(row[0] for row in await tx.all("upload_parts_delete", upload_id=upload_id))
    for blob_id in blob_ids:
        await tx.all("blob_release", id=blob_id, uses=1)
    return blob_ids


def _upload_from(row: dict[str, Any]) -> PartedUpload:
    return PartedUpload(
        id=row["id"],
        tenant_id=row["tenant_id"],
        request=UploadRequest(
            row["size_bytes"], row["purpose"], row["filename"], row["mime_type"], row["expires_after_ms"]
        ),
        state=UploadState(row["shown_state"]),
        created_at=row["created_at"],
        expires_at=row["expires_at"],
        file_id=row["file_id"],
        joined=JoinedParts(row["parts_hash"], row["md5"]) if row["parts_hash"] else None,
    )


def _part_from(row: dict[str, Any]) -> UploadPart:
    return UploadPart(
        id=row["id"],
        upload_id=row["upload_id"],
        blob_id=row["blob_id"],
        stamp=Stamp(row["size_bytes"], row["sha256"]),
        created_at=row["created_at"],
    )
