"""Blobs as plain files under one directory of one host.

A blob `blob_Xy…` lies at `Xy/blob_Xy…`: two characters of its own random part, so no name comes from a caller. While it is
written it has the suffix `.part`; `finish` syncs it, renames it and syncs the directory, so a name without the suffix is a
whole, durable blob (a log has its final name from the start, and only its sealed ranges are ever referred to).

What a crash leaves behind is found by its id: `list_ids` names unfinished blobs too, and `delete` removes both names. The
sweep that looks for orphans thus needs no second mechanism, because a blob has a row before it has bytes. A deletion is
not synced: one that a power cut undoes is found again in the same way.
"""

import asyncio
import contextlib
import errno
import os
import secrets
import stat
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tidegate.backends import one_host
from tidegate.backends.blobs_local_writer import FAN_OUT, LOG_BYTES_MAX, LocalLayout, LocalLog, LocalWriter
from tidegate.backends.disk import (
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
)
from tidegate.core import ids
from tidegate.core.errors import BlobError, BlobMissing, BlobUnavailable
from tidegate.core.ports import LogIds

PIECE_BYTES = 131_072
THREAD_COUNT = 8
PART_SUFFIX = ".part"


class LocalBlobs:
    """The constructor touches the disk: it makes the directory and claims it for this host.

    It raises BlobUnavailable when that cannot be done and StoreRefused when the directory is another host's, unless
    `other_hosts_accepted`."""

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

    async def create(self, blob_id: str) -> LocalWriter:
        final = self._layout.path(blob_id)
        return await hop_or_undo(self._threads, lambda: self._begin(final), LocalWriter.discard)

    async def adopt(self, blob_id: str, path: Path) -> None:
        final = self._layout.path(blob_id)
        await hop(self._threads, lambda: self._begin(final).adopt(path))

    async def open_log(self, next_blob_id: LogIds) -> LocalLog:
        return LocalLog(self._threads, next_blob_id, self._layout, self._log_bytes_max)

    async def read(self, blob_id: str, at: int, count: int) -> bytes:
        return await hop(self._threads, self._read, self._layout.path(blob_id), at, count)

    async def stream(self, blob_id: str, at: int, count: int) -> AsyncGenerator[bytes, None]:
        path = self._layout.path(blob_id)
        # One descriptor for the whole stream: a blob that is deleted meanwhile is still read to its end.
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
                # Cancelled while a thread still reads from it.
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
        """There is no spool: a log is where all of its lines are."""
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

    def _begin(self, final: Path) -> LocalWriter:
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
        """A blob that is not there is only missing while the directory itself is: an unmounted disk loses nothing."""
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
        """Lines that a killed process wrote may lie in memory only: they are synced before anybody relies on them."""
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
