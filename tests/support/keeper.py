"""The process that cleans up after a test run, however the run ended: it waits for the run's lock, then stops everything.

It never polls: the kernel gives it the lock at the moment the pytest process that held it is gone.
"""

from __future__ import annotations

import fcntl
import os
import sys

from tests.support.run_directory import RunDirectory


def main(path: str) -> None:
    alive_fd = os.open(os.path.join(path, "alive"), os.O_RDWR)
    fcntl.flock(alive_fd, fcntl.LOCK_EX)
    RunDirectory.attach(path).clean_up()


if __name__ == "__main__":
    main(sys.argv[1])
