"""The names of each `tidegate run` that is under way in a data directory.

One process has a name at a time.

A living process holds a lock on a file for each name, and the kernel drops the lock when it dies.
The file names the process and the worker that held it last, so a killed run is known to be over at
once.
"""

import fcntl
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec

from tidegate.core.errors import StoreRefused

_FILE_BYTES_MAX = 200


class LockedNames(msgspec.Struct, frozen=True):
    """The names of this process, and the workers of dead processes that had one of them before."""

    descriptors: tuple[int, ...]
    dead_worker_ids: tuple[str, ...]

    def note_worker(self, worker_id: str) -> None:
        """Write the id of the worker that runs under these names to their files."""
        for descriptor in self.descriptors:
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()} {worker_id}\n".encode(), 0)


@contextmanager
def hold_names(directory: Path, names: Sequence[str]) -> Iterator[LockedNames]:
    """Hold these names. Raise StoreRefused if another process has one of them."""
    directory.mkdir(exist_ok=True, mode=0o700)
    with ExitStack() as locks:
        descriptors = tuple(locks.enter_context(_locked(directory / name)) for name in names)
        found = [os.pread(one, _FILE_BYTES_MAX, 0).decode("ascii", "replace").split() for one in descriptors]
        yield LockedNames(descriptors, tuple(dict.fromkeys(words[1] for words in found if len(words) == 2)))


@contextmanager
def _locked(path: Path) -> Iterator[int]:
    """Open and lock the file, and remove it at the end. Only a process that dies leaves it."""
    descriptor = _open(path)
    while not _is_still(path, descriptor):
        # Its last holder removed it between the open and the lock.
        os.close(descriptor)
        descriptor = _open(path)
    try:
        yield descriptor
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)


def _open(path: Path) -> int:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = os.pread(descriptor, _FILE_BYTES_MAX, 0).decode("ascii", "replace").partition(" ")[0] or "unknown"
        os.close(descriptor)
        raise StoreRefused(
            f"these requests are being run here already, by another process (pid {holder}). "
            "Wait until it ends or stop it, then run the same command again: nothing is sent twice."
        ) from error
    return descriptor


def _is_still(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False
