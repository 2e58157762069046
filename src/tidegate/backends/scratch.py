"""A directory for the temporary files of one process, removed when the process ends.

The next process removes what a killed one left. A living process holds a lock on its directory, and
the kernel drops the lock when it dies, so neither clocks nor process ids are needed.
"""

import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PREFIX = "process-"


@contextmanager
def scratch_directory(root: Path) -> Iterator[Path]:
    """Yield this process's own directory under `root`."""
    # Both directories hold prompts, so only their user may read them. The outer one may be made
    # here.
    root.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    root.mkdir(exist_ok=True, mode=0o700)
    mine = root / f"{PREFIX}{secrets.token_hex(8)}"
    # Processes start here one at a time: a directory that is not locked yet looks like a dead
    # process's.
    turn = _locked(root, fcntl.LOCK_EX)
    assert turn is not None
    try:
        _remove_dead(root)
        mine.mkdir(mode=0o700)
        lock = _locked(mine, fcntl.LOCK_EX)
        assert lock is not None
    finally:
        os.close(turn)
    try:
        yield mine
    finally:
        shutil.rmtree(mine, ignore_errors=True)
        os.close(lock)


def _remove_dead(root: Path) -> None:
    for path in root.glob(PREFIX + "*"):
        try:
            lock = _locked(path, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            # The directory is gone already, or is not one of ours.
            continue
        if lock is not None:
            shutil.rmtree(path, ignore_errors=True)
            os.close(lock)


def _locked(path: Path, how: int) -> int | None:
    """Return a descriptor that holds the lock; None if another process holds it."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, how)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
