"""Durable files: exclusive creation, whole writes, fsync of file and directory, and disk errors in
words.

Everything here blocks and is meant for a thread. Of blobs it knows only their errors.
"""

import asyncio
import contextlib
import errno
import os
import threading
from collections.abc import Callable
from concurrent.futures import Executor
from pathlib import Path
from typing import ParamSpec, TypeVar

from tidegate.core.errors import BlobUnavailable, BlobVoid

P = ParamSpec("P")
T = TypeVar("T")

SCAN_BYTES = 65_536

_ADVICE = {
    errno.ENOSPC: "the disk or its inodes are full: free some space there and try again",
    errno.EDQUOT: "the quota is used up: raise it or free some space there and try again",
    errno.EFBIG: "a file may not grow that large here: raise the file size limit (ulimit -f)",
    errno.EROFS: "the file system is read-only: mount it read-write or choose another directory",
    errno.EIO: "the disk reported an error: check its health (dmesg) before trusting it with more",
    errno.EMFILE: "this process has too many files open: raise its limit (ulimit -n)",
    errno.ENFILE: "this machine has too many files open: raise fs.file-max",
    errno.EACCES: "this user may not do that: give it the rights on that directory",
    errno.EPERM: "this user may not do that: give it the rights on that directory",
    errno.ENOENT: "the directory is gone: restore it, or check the configured path",
    errno.ENOTDIR: "something on that path is no directory: check the configured path",
    errno.EEXIST: "that name is taken: take a fresh id",
    errno.ELOOP: "there is a symbolic link where a plain file must be: remove it",
}


def unavailable(failure: OSError, directory: Path, doing: str) -> BlobUnavailable:
    """Return a disk error as one sentence: what failed, where, and what to do about it."""
    reason = failure.strerror or str(failure)
    advice = _ADVICE.get(failure.errno or 0, "check that directory")
    return BlobUnavailable(f"{doing} in {directory} failed ({reason}): {advice}")


async def hop(threads: Executor, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Do blocking work in a thread.

    A cancelled caller stops waiting, but the work goes on; its errors are dropped.
    """
    return await hop_or_undo(threads, lambda: work(*args, **kwargs), lambda done: None)


async def hop_or_undo(threads: Executor, work: Callable[[], T], undo: Callable[[T], object]) -> T:
    """Run work in a thread, and undo its result if the caller is cancelled."""
    future = asyncio.get_running_loop().run_in_executor(threads, work)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:

        def unmake(done: asyncio.Future[T]) -> None:
            if not done.cancelled() and done.exception() is None:
                undo(done.result())

        future.add_done_callback(unmake)
        raise


def create_exclusive(path: Path) -> int:
    """Create a private file and open it for reading and writing.

    Raise FileExistsError if it exists already, also as a link.
    """
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def open_plain(path: Path, flags: int = os.O_RDONLY) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC)


def write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def read_exact(fd: int, at: int, count: int) -> bytes:
    """Return these bytes, or fewer if the file ends before."""
    chunks: list[bytes] = []
    while count > 0:
        chunk = os.pread(fd, count, at)
        if not chunk:
            break
        chunks.append(chunk)
        at += len(chunk)
        count -= len(chunk)
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def sync_directory(path: Path) -> None:
    """Make the names in a directory survive a power cut."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def make_directories(path: Path) -> None:
    """Make a directory with its parents.

    Sync each name, since a process may have died before it did.
    """
    if not path.is_dir():
        make_directories(path.parent)
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
    # If this user may not read a parent, this user did not make it.
    with contextlib.suppress(PermissionError):
        sync_directory(path.parent)


def whole_lines_bytes(fd: int) -> int:
    """Return where the last whole line of a file ends.

    A torn line after it was never acknowledged.
    """
    end = os.fstat(fd).st_size
    while end > 0:
        start = max(0, end - SCAN_BYTES)
        found = read_exact(fd, start, end - start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        end = start
    return 0


def try_write(directory: Path, name: str) -> None:
    """Write, sync, read back and remove a small file, to find out whether the directory can be
    used.
    """
    path = directory / name
    path.unlink(missing_ok=True)
    fd = create_exclusive(path)
    try:
        write_all(fd, b"probe\n")
        os.fsync(fd)
        if read_exact(fd, 0, 16) != b"probe\n":
            raise OSError(errno.EIO, "other bytes came back than were written")
        sync_directory(directory)
    finally:
        os.close(fd)
        path.unlink(missing_ok=True)


class AppendFile:
    """A file that only grows, each append durable before it counts.

    After a failed write or fsync it is unknown what is on the disk (a second fsync would lie), so
    the file takes nothing more. The bytes after the last durable one are cut off if the disk still
    allows it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.fd = -1
        self.durable_bytes = 0
        # A cancelled caller may close the file while its last append still runs in a thread.
        self._turn = threading.Lock()
        try:
            self.fd = create_exclusive(path)
            try:
                sync_directory(path.parent)
            except OSError:
                self._close()
                path.unlink(missing_ok=True)
                raise
        except OSError as failure:
            raise unavailable(failure, path.parent, "beginning a log") from failure

    def append(self, data: bytes) -> None:
        with self._turn:
            if self.fd < 0:
                raise BlobVoid(f"the log {self.path.name} takes no more lines; open another one")
            try:
                write_all(self.fd, data)
                os.fdatasync(self.fd)
            except OSError as failure:
                with contextlib.suppress(OSError):
                    os.ftruncate(self.fd, self.durable_bytes)
                self._close()
                raise unavailable(failure, self.path.parent, "appending to a log") from failure
            self.durable_bytes += len(data)

    def read_back(self) -> bytes:
        with self._turn:
            try:
                return read_exact(self.fd, 0, self.durable_bytes)
            except OSError as failure:
                raise unavailable(failure, self.path.parent, "reading a log back") from failure

    def close(self) -> None:
        with self._turn:
            self._close()

    def __del__(self) -> None:
        # A log that was dropped without a close must not hold a descriptor or a lock until the
        # process ends.
        self._close()

    def _close(self) -> None:
        if self.fd >= 0:
            fd, self.fd = self.fd, -1
            os.close(fd)
