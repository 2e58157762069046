"""accept, in parts: a file comes as durable parts, which become one blob at the end.

The parts may come in any order; the owner gives their order at the end. They are joined before the
file is visible, and one transaction creates the file and frees the parts. A failure on the way
leaves a pending upload, which can be completed again. The bytes pass through memory in bounded
pieces.
"""

import hashlib
from collections import Counter
from collections.abc import Sequence

import msgspec

from tidegate.core.errors import ApiProblem, BlobMissing, BlobUnavailable
from tidegate.core.files import File, JoinedParts, NewFile, PartedUpload, UploadPart, UploadRequest
from tidegate.core.nouns import Caller, Idempotency, Quotas
from tidegate.core.ports import Blobs
from tidegate.core.problems import no_such_upload, shown_id, upload_not_pending
from tidegate.core.states import UploadState
from tidegate.core.wording import in_words
from tidegate.failpoints import hit
from tidegate.stages.accept import Reception, Upload
from tidegate.store.store import Store

PART_BYTES_MAX = 64 << 20


class PartedUploads:
    """The entry of files that come in parts, of one process."""

    def __init__(self, store: Store, blobs: Blobs, reception: Reception) -> None:
        self._store = store
        self._blobs = blobs
        self._reception = reception

    async def create(
        self, caller: Caller, request: UploadRequest, *, idempotency_key: str | None, quotas: Quotas
    ) -> PartedUpload:
        """Begin an upload, or return the one that this Idempotency-Key began before."""
        upload_id = self._reception.new_id("upload")
        idempotency = Idempotency(idempotency_key, _hash(request)) if idempotency_key else None
        return await self._reception.replayed(
            lambda: self._store.create_upload(caller, upload_id, request, idempotency=idempotency, quotas=quotas)
        )

    async def find(self, caller: Caller, upload_id: str) -> PartedUpload:
        """Return one of the caller's uploads; refuse any other id."""
        upload = await self._store.get_upload(caller.tenant_id, upload_id)
        if upload is None:
            raise no_such_upload(upload_id)
        return upload

    async def keep_part(
        self, caller: Caller, upload_id: str, incoming: Upload, *, idempotency_key: str | None, quotas: Quotas
    ) -> UploadPart:
        """Make the bytes durable and keep them as a part.

        Return the part that this Idempotency-Key made before, if it did.
        """
        stamp = await incoming.finish()
        idempotency = Idempotency(idempotency_key, _hash((upload_id, stamp.sha256))) if idempotency_key else None
        part = UploadPart(self._reception.new_id("part"), upload_id, incoming.blob_id, stamp)
        kept = await self._reception.replayed(
            lambda: self._store.add_upload_part(caller, part, idempotency=idempotency, quotas=quotas)
        )
        if kept.id != part.id:
            await self._reception.give_up(incoming.blob_id)
        await hit("upload_committed")
        return kept

    async def complete(
        self, caller: Caller, upload: PartedUpload, part_ids: Sequence[str], md5: str | None
    ) -> tuple[PartedUpload, File | None]:
        """Join the parts, in this order, to one file.

        A repeated call with the same parts returns the same file.

        An `md5` that differs from the file's is refused in both cases.
        """
        parts_hash = _hash(list(part_ids))
        try:
            if upload.state is UploadState.PENDING:
                upload = await self._join(caller, upload, part_ids, md5, parts_hash)
        except (BlobMissing, ApiProblem) as problem:
            # Another request may have ended the upload and removed its parts. Else a part is lost
            # in storage.
            upload = await self.find(caller, upload.id)
            is_other = isinstance(problem, ApiProblem) and problem.code != "upload_not_pending"
            if upload.state is UploadState.PENDING or is_other:
                raise
        if upload.joined is None or upload.joined.parts_hash != parts_hash:
            raise upload_not_pending(upload.state)
        _check_md5(md5, upload.joined.md5)
        assert upload.file_id is not None
        return upload, await self._store.get_file(caller.tenant_id, upload.file_id)

    async def cancel(self, caller: Caller, upload_id: str) -> PartedUpload:
        """Give up a pending upload and its parts."""
        upload, unused = await self._reception.replayed(lambda: self._store.cancel_upload(caller.tenant_id, upload_id))
        await self._reception.remove_unused(unused)
        return upload

    async def _join(
        self, caller: Caller, upload: PartedUpload, part_ids: Sequence[str], md5: str | None, parts_hash: str
    ) -> PartedUpload:
        wanted = upload.request
        parts = _chosen(await self._store.upload_parts(caller.tenant_id, upload.id), part_ids, wanted.size_bytes)
        incoming = await self._reception.begin_upload(wanted.size_bytes)
        try:
            joined = JoinedParts(parts_hash, await self._copy(parts, incoming))
            _check_md5(md5, joined.md5)
            stamp = await incoming.finish()
            file = NewFile(
                incoming.file_id,
                incoming.blob_id,
                stamp,
                wanted.purpose,
                wanted.filename,
                incoming.line_count,
                wanted.expires_after_ms,
            )
            completed, unused = await self._reception.replayed(
                lambda: self._store.complete_upload(caller.tenant_id, upload.id, file, joined)
            )
        except BaseException:
            await incoming.abandon()
            raise
        if completed.file_id != file.id:
            await self._reception.give_up(incoming.blob_id)
        await hit("upload_committed")
        await self._reception.remove_unused(unused)
        return completed

    async def _copy(self, parts: Sequence[UploadPart], incoming: Upload) -> str:
        """Copy the parts one after the other and check that each is unchanged.

        Return the MD5 of all bytes.
        """
        whole = hashlib.md5(usedforsecurity=False)
        for part in parts:
            digest = hashlib.sha256()
            async for chunk in self._blobs.stream(part.blob_id, 0, part.stamp.size_bytes):
                digest.update(chunk)
                whole.update(chunk)
                await incoming.write(chunk)
            if digest.hexdigest() != part.stamp.sha256:
                raise BlobUnavailable(f"the bytes of {part.id} are not those that were sent: send this part again")
        return whole.hexdigest()


def _check_md5(claimed: str | None, actual: str | None) -> None:
    if claimed is not None and actual not in (None, claimed):
        message = f"The parts have the MD5 {actual}, not {claimed}. Check their order, or send them again."
        raise ApiProblem(400, "md5_mismatch", message, param="md5")


def _chosen(parts: dict[str, UploadPart], part_ids: Sequence[str], size_bytes: int) -> list[UploadPart]:
    """Return the parts in their owner's order.

    Together they must have the declared number of bytes.
    """
    for part_id, count in Counter(part_ids).items():
        if part_id not in parts:
            message = f"The upload has no part '{shown_id(part_id)}'."
            raise ApiProblem(400, "part_not_found", message, param="part_ids")
        if count > 1:
            message = f"`part_ids` names '{part_id}' {count} times; name each part once."
            raise ApiProblem(400, "invalid_parameter", message, param="part_ids")
    chosen = [parts[part_id] for part_id in part_ids]
    sent = sum(part.stamp.size_bytes for part in chosen)
    if sent != size_bytes:
        message = f"The parts have {in_words(sent, 'byte')} together, and the upload was created for {size_bytes:,}."
        raise ApiProblem(400, "upload_bytes_mismatch", message, param="part_ids")
    return chosen


def _hash(meaning: object) -> str:
    return hashlib.sha256(msgspec.json.encode(meaning)).hexdigest()
