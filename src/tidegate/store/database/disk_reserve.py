"""Reserved disk room of an embedded store, for deletes, cancels, sweeps and a start.

The room is a file of allocated bytes. On a full disk a transaction gives some of them up, and then
takes back what it did not need. Everything here blocks and is meant for the writer's thread.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

RESERVE_BYTES = 8 << 20
# How much is given up at a time. It is little, because other processes may take it.
STEP_BYTES = 1 << 20
_PIECE_BYTES = 1 << 16


class DiskReserve:
    """The file of reserved bytes beside the database.

    Several processes may share it by its size.
    """

    def __init__(self, database: Path) -> None:
        self._path = database.with_name(database.name + ".reserve")

    def size_bytes(self) -> int:
        try:
            return self._path.stat().st_size
        except OSError:
            return 0

    def give_up(self) -> bool:
        """Give one step of the reserve back to the disk; False if none is left."""
        size = self.size_bytes()
        if size == 0:
            return False
        try:
            with self._opened(os.O_RDWR) as fd:
                os.ftruncate(fd, max(0, size - STEP_BYTES))
                # Some file systems reuse the room only after the change is durable.
                os.fsync(fd)
        except OSError:
            return False
        return True

    def make_room(self) -> None:
        """Give one step up if the disk has less room than a step."""
        if self._free_bytes() < STEP_BYTES:
            self.give_up()

    def take_back(self, size_bytes: int) -> None:
        """Grow to this size again, as far as the disk has room."""
        self._grow(size_bytes, keep_free=0)

    def fill(self) -> None:
        """Grow to the full size, but leave one step free, which a start may need."""
        if self.size_bytes() < RESERVE_BYTES:
            self._grow(RESERVE_BYTES, keep_free=STEP_BYTES)

    def _grow(self, size_bytes: int, *, keep_free: int) -> None:
        # Without this system call, or without room, the store works without a reserve.
        if not hasattr(os, "posix_fallocate"):
            return
        with contextlib.suppress(OSError), self._opened(os.O_RDWR | os.O_CREAT) as fd:
            size = os.fstat(fd).st_size
            while size < size_bytes and (free := self._free_bytes() - keep_free) >= _PIECE_BYTES:
                size = min(size + free // _PIECE_BYTES * _PIECE_BYTES, size + STEP_BYTES, size_bytes)
                os.posix_fallocate(fd, 0, size)

    def _free_bytes(self) -> int:
        found = os.statvfs(self._path.parent)
        return found.f_bavail * found.f_frsize

    @contextlib.contextmanager
    def _opened(self, flags: int) -> Iterator[int]:
        fd = os.open(self._path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            yield fd
        finally:
            os.close(fd)
