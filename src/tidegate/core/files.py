"""Files, uploads and blobs: what the store knows of stored bytes."""

import msgspec

from tidegate.core.states import FileState, UploadState


class Stamp(msgspec.Struct, frozen=True):
    """The size of a finished blob, and its SHA-256 in hex."""

    size_bytes: int
    sha256: str


class Placed(msgspec.Struct, frozen=True):
    """A durable byte range of a blob."""

    blob_id: str
    at: int
    size_bytes: int


class File(msgspec.Struct, frozen=True):
    id: str
    tenant_id: str
    purpose: str
    filename: str
    state: FileState
    size_bytes: int
    line_count: int
    sha256: str
    created_at: int
    expires_at: int | None
    job_id: str | None = None


class UploadRequest(msgspec.Struct, frozen=True):
    """A caller's description of a file that will be sent in parts.

    The file expires so long after its completion.
    """

    size_bytes: int
    purpose: str
    filename: str
    mime_type: str
    expires_after_ms: int


class JoinedParts(msgspec.Struct, frozen=True):
    """The parts that completed an upload, in order, and the MD5 of their bytes.

    The MD5 is None where an older program joined them.
    """

    parts_hash: str
    md5: str | None


class PartedUpload(msgspec.Struct, frozen=True):
    """A file that a caller sends in parts. `joined` has the parts that completed it."""

    id: str
    tenant_id: str
    request: UploadRequest
    state: UploadState
    created_at: int
    expires_at: int
    file_id: str | None
    joined: JoinedParts | None


class UploadPart(msgspec.Struct, frozen=True):
    """A durable part of a file that is not complete yet."""

    id: str
    upload_id: str
    blob_id: str
    stamp: Stamp
    created_at: int = 0


class NewFile(msgspec.Struct, frozen=True):
    """A file before it is shown: its bytes are one durable blob."""

    id: str
    blob_id: str
    stamp: Stamp
    purpose: str
    filename: str
    line_count: int
    expires_after_ms: int | None


class Extent(msgspec.Struct, frozen=True):
    """A byte range of a blob that is the part of a file from `at` on."""

    at: int
    size_bytes: int
    blob_id: str
    blob_at: int


class AbandonedBlob(msgspec.Struct, frozen=True):
    """A blob that is still being written though its owner is gone, and for how long it is; a log
    was recorded up to `recorded_to`.
    """

    id: str
    kind: str
    recorded_to: int
    worker_id: str
    gone_for_ms: int


class StoredBlob(msgspec.Struct, frozen=True):
    """The store's entry of a blob: its bytes are needed from the first to `size_bytes` while `uses`
    is above 0.
    """

    id: str
    state: str
    size_bytes: int
    uses: int

    @property
    def is_needed(self) -> bool:
        return self.state != "condemned" and self.uses > 0
