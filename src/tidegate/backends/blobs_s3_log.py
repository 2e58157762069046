"""The log of an S3 store: lines wait in a durable local spool until they fill an object.

The name of a spool file is the id of its future object, so a process that finds it after a crash
knows where it belongs. Its owner holds a lock on it. The lock ends with the process, so `recover`
can tell a dead owner from a slow one.

A sealed file is kept, and stays locked, until the next seal succeeds or the log is closed. It is
only a second copy: once `seal` has returned, the store holds a verified object with the same bytes.
"""

import asyncio
import contextlib
import fcntl
import hashlib
from concurrent.futures import Executor
from pathlib import Path

from tidegate.backends.blobs_s3_client import Objects, object_key
from tidegate.backends.disk import AppendFile, hop, hop_or_undo
from tidegate.core.errors import BlobUnavailable, BlobVoid
from tidegate.core.files import Placed
from tidegate.core.ports import LogIds

SEAL_AFTER_MS = 5_000
SEAL_AFTER_BYTES = 8_388_608
# How much may wait for a store that is away before appends are refused. Also the memory of one
# seal.
UNSEALED_BYTES_MAX = 33_554_432


class SpoolFile(AppendFile):
    """An append file that is locked while its owner lives, and knows the hash of its content."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        fcntl.flock(self.fd, fcntl.LOCK_EX)
        self._sha256 = hashlib.sha256()

    def append(self, data: bytes) -> None:
        super().append(data)
        self._sha256.update(data)

    def content(self) -> bytes:
        """Return the appended bytes, read back.

        Raise BlobVoid if they are not those that were written.
        """
        data = self.read_back()
        if hashlib.sha256(data).digest() != self._sha256.digest():
            self.close()
            raise BlobVoid(f"the spool file {self.path} gave back other bytes than were written: check that disk")
        return data


class SpooledLog:
    """A log that is written to a spool file and sealed to an object.

    If `seal` fails because the store is away, the lines stay in the spool and it may be called
    again.
    """

    def __init__(self, objects: Objects, threads: Executor, next_blob_id: LogIds, spool: Path) -> None:
        self._objects = objects
        self._threads = threads
        self._next_blob_id = next_blob_id
        self._spool = spool
        self._file: SpoolFile | None = None
        self._sealed: SpoolFile | None = None
        self._void = False
        self._turn = asyncio.Lock()

    @property
    def seal_after_ms(self) -> int:
        return SEAL_AFTER_MS

    @property
    def seal_after_bytes(self) -> int:
        return SEAL_AFTER_BYTES

    async def append(self, data: bytes) -> None:
        if not data.endswith(b"\n"):
            raise ValueError("a log takes whole lines: the last byte must be a newline")
        async with self._turn:
            self._refuse_when_void()
            if self._file is not None and self._file.durable_bytes + len(data) > UNSEALED_BYTES_MAX:
                raise BlobUnavailable(
                    f"{self._file.durable_bytes} bytes wait in the spool for the object store: seal them first"
                )
            blob_id = await self._next_blob_id() if self._file is None else ""
            try:
                if self._file is None:
                    self._file = await hop_or_undo(self._threads, lambda: self._begin(blob_id), SpoolFile.close)
                await hop(self._threads, self._file.append, data)
            except BaseException:
                # Also when cancelled: it is unknown whether these lines were written.
                self._void = True
                raise

    async def seal(self) -> Placed | None:
        async with self._turn:
            self._refuse_when_void()
            if self._file is None:
                return None
            key = self._file.path.name
            try:
                data = await hop(self._threads, self._file.content)
            except BlobVoid:
                self._void = True
                raise
            if await self._objects.grow(key, data) != len(data):
                self._void = True
                raise BlobVoid(f"the object {key} is longer than this log: someone else writes under its id")
            await self._forget_sealed()
            self._sealed, self._file = self._file, None
            return Placed(key, 0, len(data))

    async def close(self) -> None:
        """Close the log. Lines that were never sealed stay in the spool, for `recover`."""
        self._void = True
        if self._file is not None:
            await hop(self._threads, self._file.close)
        await self._forget_sealed()

    async def _forget_sealed(self) -> None:
        if self._sealed is not None:
            with contextlib.suppress(OSError):
                await hop(self._threads, self._sealed.path.unlink)
            await hop(self._threads, self._sealed.close)
            self._sealed = None

    def _begin(self, blob_id: str) -> SpoolFile:
        return SpoolFile(self._spool / object_key(blob_id))

    def _refuse_when_void(self) -> None:
        if self._void:
            raise BlobVoid("this log failed or was closed: open another one")
