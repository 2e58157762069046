"""A directory for one process's passing files, gone when it ends; what a killed one left there is removed by the next.

A living process holds a lock on its directory, and the kernel drops the lock when it dies: no clock and no id of a process has to be
trusted. It knows nothing of what is put there.
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
    """This process's own directory under `root`."""
    # What passes here holds prompts, and so will the data directory around it, which may be made here: both are their user's alone.
    root.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    root.mkdir(exist_ok=True, mode=0o700)
    mine = root / f"{PREFIX}{secrets.token_hex(8)}"
    # One process at a time begins here: a directory that is not locked yet looks like a dead one's.
    turn = _locked(root, fcntl.LOCK_EX)
    assert turn is not None
    try:
        _remove_dead(root)
        mine.mkdir(mode=0o700)
        held = _locked(mine, fcntl.LOCK_EX)
        assert held is not None
    finally:
        os.close(turn)
    try:
        yield mine
    finally:
        shutil.rmtree(mine, ignore_errors=True)
        os.close(held)


def _remove_dead(root: Path) -> None:
    for path in root.glob(PREFIX + "*"):
        try:
            held = _locked(path, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            # It went away by itself, or is no directory of ours.
            continue
        if held is not None:
            shutil.rmtree(path, ignore_errors=True)
            os.close(held)


def _locked(path: Path, how: int) -> int | None:
    """A descriptor that holds the lock; None when somebody else does."""
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
