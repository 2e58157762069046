"""Where local blobs lie, and what writes them: one whole blob, or a log that grows by durable appends.

Here is the order of writes, syncs and names; what is read, listed and deleted is the part of `blobs_local`.
"""

import asyncio
import contextlib
import errno
import hashlib
import os
import threading
from collections.abc import Callable
from concurrent.futures import Executor
from pathlib import Path
from typing import TypeVar

from tidegate.backends.disk import (
    AppendFile,
    hop,
    hop_or_undo,
    open_plain,
    sync_directory,
    unavailable,
    write_all,
)
from tidegate.core import ids
from tidegate.core.errors import BlobError, BlobVoid
from tidegate.core.nouns import Placed, Stamp
from tidegate.core.ports import LogIds

T = TypeVar("T")

HOP_BYTES = 262_144
COPY_BYTES = 1_048_576
SEAL_AFTER_MS = 50
SEAL_AFTER_BYTES = 1_048_576
# A log is one blob, and a blob can go only when nothing in it is needed: shorter ones free their space sooner.
LOG_BYTES_MAX = 67_108_864
FAN_OUT = slice(len("blob_"), len("blob_") + 2)


class LocalWriter:
    """A blob under its unfinished name. Bytes are gathered so that a thread is asked once per `HOP_BYTES`."""

    def __init__(self, threads: Executor, fd: int, partial: Path, final: Path) -> None:
        self._threads = threads
        self._fd = fd
        self._partial = partial
        self._final = final
        self._gathered: list[bytes] = []
        self._gathered_bytes = 0
        self._size_bytes = 0
        self._sha256 = hashlib.sha256()
        self._void = False
        self._renamed = False
        self._finished = False
        # A cancelled write may still run in its thread when `abort` comes: one at a time touches the descriptor.
        self._turn = threading.Lock()

    async def write(self, data: bytes) -> None:
        self._refuse_when_over()
        self._gathered.append(data)
        self._gathered_bytes += len(data)
        if self._gathered_bytes >= HOP_BYTES:
            gathered, self._gathered, self._gathered_bytes = self._gathered, [], 0
            await self._do(lambda: self._take(gathered))

    async def finish(self) -> Stamp:
        self._refuse_when_over()
        gathered, self._gathered = self._gathered, []

        def complete() -> Stamp:
            self._take(gathered)
            return self._publish()

        stamp = await self._do(complete)
        self._finished = True
        return stamp

    async def abort(self) -> None:
        self._void = True
        self._gathered = []
        if not self._finished:
            await hop(self._threads, self.discard)

    def discard(self) -> None:
        """Remove every name of the blob, also the final one while no caller knows it."""
        with self._turn, contextlib.suppress(OSError):
            self._void = True
            self._close()
            self._partial.unlink(missing_ok=True)
            if self._renamed:
                self._final.unlink(missing_ok=True)

    def adopt(self, path: Path) -> None:
        """Take over a finished file, blocking. It is synced before it moves, so until then a failure leaves it alone."""
        try:
            source = open_plain(path)
            try:
                os.fsync(source)
                synced = _size_and_change(source)
            finally:
                os.close(source)
            try:
                path.rename(self._partial)
                sync_directory(path.parent)
            except OSError as failure:
                if failure.errno != errno.EXDEV:
                    raise
                self._copy(path, synced)
            self._publish()
        except OSError as failure:
            self.discard()
            raise unavailable(failure, self._final.parent, f"adopting {path.name} as a blob") from failure
        except BaseException:
            self.discard()
            raise
        path.unlink(missing_ok=True)

    def _copy(self, path: Path, synced: tuple[int, int]) -> None:
        with path.open("rb") as source:
            while chunk := source.read(COPY_BYTES):
                write_all(self._fd, chunk)
            copied = _size_and_change(source.fileno())
        if copied != synced:
            raise OSError(errno.EIO, "the file changed while it was copied")

    async def _do(self, work: Callable[[], T]) -> T:
        try:
            return await hop(self._threads, work)
        except BaseException:
            self._void = True
            raise

    def _refuse_when_over(self) -> None:
        if self._void or self._finished:
            raise BlobVoid(f"blob {self._final.name} takes no more bytes: begin another one under a fresh id")

    def _count(self, data: bytes) -> None:
        self._sha256.update(data)
        self._size_bytes += len(data)

    def _take(self, gathered: list[bytes]) -> None:
        data = b"".join(gathered)
        with self._turn:
            if self._fd < 0:
                raise BlobVoid(f"blob {self._final.name} was thrown away")
            try:
                write_all(self._fd, data)
            except OSError as failure:
                self._drop_partial()
                raise unavailable(failure, self._final.parent, "writing a blob") from failure
            self._count(data)

    def _publish(self) -> Stamp:
        """Bytes first, then the name, then the directory: at no moment is there a name without all its bytes."""
        with self._turn:
            if self._fd < 0:
                raise BlobVoid(f"blob {self._final.name} was thrown away")
            try:
                os.fsync(self._fd)
                self._partial.rename(self._final)
                self._renamed = True
                sync_directory(self._final.parent)
            except OSError as failure:
                self._drop_partial()
                raise unavailable(failure, self._final.parent, "finishing a blob") from failure
            self._close()
            return Stamp(self._size_bytes, self._sha256.hexdigest())

    def _drop_partial(self) -> None:
        self._close()
        with contextlib.suppress(OSError):
            (self._final if self._renamed else self._partial).unlink(missing_ok=True)

    def _close(self) -> None:
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)


def _size_and_change(fd: int) -> tuple[int, int]:
    """Return what differs when a file was written to: its size and the moment of its last change."""
    seen = os.fstat(fd)
    return seen.st_size, seen.st_mtime_ns


class LocalLayout:
    """Where blobs lie under one directory, and the directories of their names."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._known: set[str] = set()

    def path(self, blob_id: str) -> Path:
        if not ids.is_valid("blob", blob_id):
            raise BlobError(f"{blob_id[:60]!r} is no id of a blob: nothing was touched")
        return self._root / blob_id[FAN_OUT] / blob_id

    def ensure_directory(self, path: Path) -> None:
        """Make the directory of this blob.

        It is synced once by every process: another one may have died between making it and syncing its name.
        """
        directory = path.parent
        if directory.name in self._known:
            return
        try:
            with contextlib.suppress(FileExistsError):
                directory.mkdir(mode=0o700)
            sync_directory(self._root)
        except OSError as failure:
            raise unavailable(failure, self._root, "making a directory") from failure
        self._known.add(directory.name)


class LocalLog:
    """A log that is readable where it grows: sealing costs nothing, because an append is durable already."""

    def __init__(self, threads: Executor, next_blob_id: LogIds, layout: LocalLayout, bytes_max: int) -> None:
        self._threads = threads
        self._bytes_max = bytes_max
        self._next_blob_id = next_blob_id
        self._layout = layout
        self._file: AppendFile | None = None
        self._sealed_bytes = 0
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
            blob_id = await self._next_blob_id() if self._file is None else ""
            try:
                if self._file is None:
                    self._file = await hop_or_undo(self._threads, lambda: self._begin(blob_id), AppendFile.close)
                    self._sealed_bytes = 0
                await hop(self._threads, self._file.append, data)
            except BaseException:
                # Also when cancelled: it is unknown then whether these lines are in.
                self._void = True
                raise

    async def seal(self) -> Placed | None:
        async with self._turn:
            self._refuse_when_void()
            if self._file is None or self._file.durable_bytes == self._sealed_bytes:
                return None
            start, self._sealed_bytes = self._sealed_bytes, self._file.durable_bytes
            placed = Placed(self._file.path.name, start, self._sealed_bytes - start)
            if self._sealed_bytes >= self._bytes_max:
                self._file.close()
                self._file = None
            return placed

    async def close(self) -> None:
        self._void = True
        if self._file is not None:
            await hop(self._threads, self._file.close)

    def _begin(self, blob_id: str) -> AppendFile:
        path = self._layout.path(blob_id)
        self._layout.ensure_directory(path)
        return AppendFile(path)

    def _refuse_when_void(self) -> None:
        if self._void:
            raise BlobVoid("this log failed or was closed: open another one")
