"""The mark that a directory of blobs belongs to one host.

Local blobs are durable and visible on one machine only. The mark names the host, and every process
that uses the directory holds a shared lock on it. A different machine id is always refused. A
different host name is refused only while a process holds the lock, because a recreated container
has a new name but the same disk.
"""

import contextlib
import errno
import fcntl
import hashlib
import os
import socket
from pathlib import Path

from tidegate.backends.disk import sync_directory
from tidegate.core.errors import StoreRefused

MARK = "host"
_MACHINE_ID = Path("/etc/machine-id")
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)


def this_host() -> str:
    """Return a stable name for this machine: its machine id or its host name.

    The machine id is hashed, because it is private.
    """
    with contextlib.suppress(OSError):
        machine = _MACHINE_ID.read_text().strip()
        if machine:
            return "machine:" + hashlib.sha256(b"tidegate " + machine.encode()).hexdigest()[:32]
    return "name:" + socket.gethostname()


def claim(root: Path, host: str) -> int:
    """Mark the directory as this host's, or check the mark.

    Return the descriptor that holds the lock.

    Raise StoreRefused for another host's directory, and OSError for errors of the disk.
    """
    fd = _open(root / MARK)
    try:
        alone = _lock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not alone:
            # Another process uses the directory, or is writing the mark, which takes a moment.
            _lock(fd, fcntl.LOCK_SH)
        marked = os.pread(fd, 1_000, 0).decode(errors="replace").strip()
        if marked != host:
            if marked and not (alone and _may_move(marked, host)):
                raise _refusal(root, marked, host)
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"{host}\n".encode(), 0)
            os.fsync(fd)
            sync_directory(root)
        if alone:
            _lock(fd, fcntl.LOCK_SH)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _open(path: Path) -> int:
    flags = os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | flags, 0o600)
    except OSError as failure:
        # A reader without the right to write may still use a directory that is marked already.
        if failure.errno not in (errno.EACCES, errno.EROFS, errno.EPERM):
            raise
        return os.open(path, os.O_RDONLY | flags)


def _lock(fd: int, how: int) -> bool:
    """Return whether the lock was taken.

    Without locks in the file system, the mark alone decides.
    """
    try:
        fcntl.flock(fd, how)
    except BlockingIOError:
        return False
    except OSError as failure:
        if failure.errno not in _NO_LOCKS:
            raise
        return False
    return True


def _may_move(marked: str, host: str) -> bool:
    return not (marked.startswith("machine:") and host.startswith("machine:"))


def _refusal(root: Path, marked: str, host: str) -> StoreRefused:
    return StoreRefused(
        f"{root} belongs to another host ({marked}; this one is {host}). Local blobs serve one host: for several, use an "
        f"S3 store. If the directory has moved here for good and nothing else uses it, delete {root / MARK} and start again."
    )
