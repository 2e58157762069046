"""Blobs as plain files under one directory of one host.

A blob `blob_Xy…` lies at `Xy/blob_Xy…`: the directory is two characters of its random part, so no
name comes from a caller. While it is written it has the suffix `.part`. `finish` syncs it, renames
it and syncs the directory, so a name without the suffix is a whole, durable blob. (A log has its
final name from the start, and only its sealed ranges are used.)

The sweep for orphans finds what a crash leaves behind: a blob has a row before it has bytes,
`list_ids` lists unfinished blobs too, and `delete` removes both names. A deletion is not synced: if
a power cut undoes it, the sweep finds the blob again.
"""

import asyncio
import contextlib
import errno
import hashlib
import os
import secrets
import stat
import threading
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from tidegate.backends import one_host
from tidegate.backends.disk import (
    AppendFile,
    create_exclusive,
    hop,
    hop_or_undo,
    make_directories,
    open_plain,
    read_exact,
    sync_directory,
    try_write,
    unavailable,
    whole_lines_bytes,
    write_all,
)
from tidegate.core import ids
from tidegate.core.errors import BlobError, BlobMissing, BlobUnavailable, BlobVoid
from tidegate.core.files import Placed, Stamp
from tidegate.core.ports import LogIds

T = TypeVar("T")

PIECE_BYTES = 131_072
THREAD_COUNT = 8
PART_SUFFIX = ".part"
HOP_BYTES = 262_144
COPY_BYTES = 1_048_576
SEAL_AFTER_MS = 50
SEAL_AFTER_BYTES = 1_048_576
# A log is one blob, which can be removed only when none of its bytes are used: shorter logs go
# sooner.
LOG_BYTES_MAX = 67_108_864
FAN_OUT = slice(len("blob_"), len("blob_") + 2)


class LocalBlobs:
    """The blobs of one directory.

    The constructor makes the directory and claims it for this host.

    The constructor raises BlobUnavailable if that fails, and StoreRefused if the directory belongs
    to another host, unless `other_hosts_accepted`.
    """

    def __init__(
        self,
        root: Path,
        *,
        host: str | None = None,
        other_hosts_accepted: bool = False,
        log_bytes_max: int = LOG_BYTES_MAX,
    ) -> None:
        self.root = root.absolute()
        self._log_bytes_max = log_bytes_max
        self._checking = asyncio.Lock()
        self._probe = f".probe-{secrets.token_hex(8)}"
        self._layout = LocalLayout(self.root)
        self._claim_fd = -1
        try:
            make_directories(self.root)
            if not other_hosts_accepted:
                self._claim_fd = one_host.claim(self.root, host or one_host.this_host())
        except OSError as failure:
            raise unavailable(failure, self.root, "opening the blob directory") from failure
        self._threads = ThreadPoolExecutor(THREAD_COUNT, thread_name_prefix="blobs")

    async def create(self, blob_id: str) -> "LocalWriter":
        final = self._layout.path(blob_id)
        return await hop_or_undo(self._threads, lambda: self._begin(final), LocalWriter.discard)

    async def adopt(self, blob_id: str, path: Path) -> None:
        final = self._layout.path(blob_id)
        await hop(self._threads, lambda: self._begin(final).adopt(path))

    async def open_log(self, next_blob_id: LogIds) -> "LocalLog":
        return LocalLog(self._threads, next_blob_id, self._layout, self._log_bytes_max)

    async def read(self, blob_id: str, at: int, count: int) -> bytes:
        return await hop(self._threads, self._read, self._layout.path(blob_id), at, count)

    async def stream(self, blob_id: str, at: int, count: int) -> AsyncGenerator[bytes, None]:
        path = self._layout.path(blob_id)
        # One descriptor for the whole stream: a blob that is deleted meanwhile can still be read to
        # its end.
        fd = await hop_or_undo(self._threads, lambda: self._open(path), os.close)
        reading: asyncio.Future[bytes] | None = None
        try:
            loop, end = asyncio.get_running_loop(), at + count
            while at < end:
                count = min(PIECE_BYTES, end - at)
                reading = loop.run_in_executor(self._threads, self._read_open, fd, path, at, count)
                yield await asyncio.shield(reading)
                at += count
        finally:
            if reading is None or reading.done():
                os.close(fd)
            else:
                # Cancelled while a thread still reads from the descriptor.
                reading.add_done_callback(lambda _: os.close(fd))

    async def size(self, blob_id: str) -> int | None:
        path = self._layout.path(blob_id)
        with contextlib.suppress(BlobMissing):
            return await hop(self._threads, self._size, path)
        return None

    async def recover(self, blob_id: str) -> int | None:
        path = self._layout.path(blob_id)
        with contextlib.suppress(BlobMissing):
            return await hop(self._threads, self._recover, path)
        return None

    async def holds_end(self, blob_id: str) -> bool:
        """Return True: there is no spool, so the blob of a log has all of its lines."""
        return True

    async def left_logs(self) -> list[str]:
        return []

    async def delete(self, blob_id: str) -> None:
        await hop(self._threads, self._delete, self._layout.path(blob_id))

    async def list_ids(self, after: str, count_max: int) -> list[str]:
        return await hop(self._threads, self._list, after, count_max)

    async def local_path(self, blob_id: str, scratch: Path) -> Path:
        path = self._layout.path(blob_id)
        await hop(self._threads, self._size, path)
        return path

    async def check(self) -> None:
        async with self._checking:
            await hop(self._threads, self._check)

    async def close(self) -> None:
        self._threads.shutdown(wait=False)
        if self._claim_fd >= 0:
            fd, self._claim_fd = self._claim_fd, -1
            os.close(fd)

    def _begin(self, final: Path) -> "LocalWriter":
        self._layout.ensure_directory(final)
        partial = final.with_name(final.name + PART_SUFFIX)
        try:
            fd = create_exclusive(partial)
        except FileExistsError:
            raise BlobError(f"blob {final.name} is being written already: take a fresh id") from None
        except OSError as failure:
            raise unavailable(failure, self.root, "creating a blob") from failure
        writer = LocalWriter(self._threads, fd, partial, final)
        if os.path.lexists(final):
            writer.discard()
            raise BlobError(f"blob {final.name} exists already: take a fresh id")
        return writer

    def _open(self, path: Path) -> int:
        try:
            fd = open_plain(path, os.O_RDONLY | os.O_NONBLOCK)
        except FileNotFoundError:
            raise self._missing(path) from None
        except OSError as failure:
            raise unavailable(failure, self.root, f"opening blob {path.name}") from failure
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise BlobUnavailable(f"{path} is no plain file: remove it and restore the blob from a backup")
        return fd

    def _missing(self, path: Path) -> BlobError:
        """Return the error for an absent blob.

        If the directory's mark is absent too, the disk may be unmounted.
        """
        if self._claim_fd >= 0 and not (self.root / one_host.MARK).exists():
            return unavailable(OSError(errno.ENOENT, "its mark is gone"), self.root, f"opening blob {path.name}")
        return BlobMissing(f"there is no blob {path.name}")

    def _read(self, path: Path, at: int, count: int) -> bytes:
        fd = self._open(path)
        try:
            return self._read_open(fd, path, at, count)
        finally:
            os.close(fd)

    def _read_open(self, fd: int, path: Path, at: int, count: int) -> bytes:
        try:
            data = read_exact(fd, at, count)
        except OSError as failure:
            raise unavailable(failure, self.root, f"reading blob {path.name}") from failure
        if len(data) < count:
            raise BlobMissing(f"blob {path.name} ends before byte {at + count}: those bytes are gone")
        return data

    def _size(self, path: Path) -> int:
        fd = self._open(path)
        try:
            return os.fstat(fd).st_size
        finally:
            os.close(fd)

    def _recover(self, path: Path) -> int:
        """Sync a log and return where its last whole line ends.

        Lines of a killed process may not be on the disk.
        """
        fd = self._open(path)
        try:
            os.fsync(fd)
            sync_directory(path.parent)
            return whole_lines_bytes(fd)
        except OSError as failure:
            raise unavailable(failure, self.root, f"recovering log {path.name}") from failure
        finally:
            os.close(fd)

    def _delete(self, path: Path) -> None:
        try:
            path.with_name(path.name + PART_SUFFIX).unlink(missing_ok=True)
            path.unlink(missing_ok=True)
        except OSError as failure:
            raise unavailable(failure, self.root, f"deleting blob {path.name}") from failure

    def _list(self, after: str, count_max: int) -> list[str]:
        found: list[str] = []
        try:
            for directory in sorted(entry.name for entry in os.scandir(self.root) if entry.is_dir()):
                if directory < after[FAN_OUT]:
                    continue
                names = {name.removesuffix(PART_SUFFIX) for name in os.listdir(self.root / directory)}
                found += sorted(name for name in names if name > after and self._is_at_home(name, directory))
                if len(found) >= count_max:
                    break
        except OSError as failure:
            raise unavailable(failure, self.root, "listing blobs") from failure
        return found[:count_max]

    @staticmethod
    def _is_at_home(name: str, directory: str) -> bool:
        return ids.is_valid("blob", name) and name[FAN_OUT] == directory

    def _check(self) -> None:
        try:
            try_write(self.root, self._probe)
        except OSError as failure:
            raise unavailable(failure, self.root, "writing a probe file") from failure


class LocalWriter:
    """The writer of a blob under its unfinished name.

    It uses a thread once for each `HOP_BYTES` bytes.
    """

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
        # A cancelled write may still run in its thread during `abort`: only one may use the
        # descriptor.
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
        """Remove all names of the blob, also the final one as long as no caller knows it."""
        with self._turn, contextlib.suppress(OSError):
            self._void = True
            self._close()
            self._partial.unlink(missing_ok=True)
            if self._renamed:
                self._final.unlink(missing_ok=True)

    def adopt(self, path: Path) -> None:
        """Take over a finished file, blocking.

        It is synced before it is moved, so a failed sync leaves it in place.
        """
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
        """Sync the bytes, rename, sync the directory: the final name always has all its bytes."""
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
    """Return a file's size and the moment of its last change: they differ after a write."""
    seen = os.fstat(fd)
    return seen.st_size, seen.st_mtime_ns


class LocalLayout:
    """The paths of blobs under one directory."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._known: set[str] = set()

    def path(self, blob_id: str) -> Path:
        if not ids.is_valid("blob", blob_id):
            raise BlobError(f"{blob_id[:60]!r} is no id of a blob: nothing was touched")
        return self._root / blob_id[FAN_OUT] / blob_id

    def ensure_directory(self, path: Path) -> None:
        """Make the directory of this blob.

        Each process syncs its name once: another process may have died before it synced the name.
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
    """A log in one blob on the disk. Sealing is free, because each append is durable already."""

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
                # Also when cancelled: it is unknown whether these lines were written.
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
