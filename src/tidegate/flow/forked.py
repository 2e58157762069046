"""A task in a process that is forked off for it, and its answer.

For a process that does one piece of work and has no threads, such as ingest's own. What the task needs is there already, because
the memory is a copy. A helper does not outlive who forked it, and where none can be had the task is done in place. What the tasks
are is not this module's business.
"""

import os
import pickle
import signal
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Generic, Self, TypeVar

ORPHAN_CHECK_S = 0.2

Answer = TypeVar("Answer")


class Forked(Generic[Answer]):
    """One task, begun at once. Leaving the context ends it, done or not."""

    def __init__(self, task: Callable[[], Answer]) -> None:
        self._task = task
        self._pid = 0
        self._reader, writer = os.pipe()
        owner = os.getpid()
        try:
            self._pid = os.fork()
        except OSError:
            # No process to be had is no reason to fail.
            os.close(writer)
            return
        if not self._pid:
            _answer(task, writer, owner)
        os.close(writer)

    def answer(self) -> Answer:
        """Wait for what came of it; an OSError of the task is raised here."""
        if not self._pid:
            return self._task()
        with open(self._reader, "rb", closefd=False) as pipe:
            packed = pipe.read()
        _, status = os.waitpid(self._pid, 0)
        self._pid = 0
        if status:
            raise RuntimeError(f"a forked task ended with {os.waitstatus_to_exitcode(status)}")
        answer, error = pickle.loads(packed)
        if error is not None:
            raise error
        return answer  # type: ignore[no-any-return]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pid:
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
            self._pid = 0
        os.close(self._reader)


def _answer(task: Callable[[], object], writer: int, owner: int) -> None:
    """The life of the helper."""
    status = 1
    try:
        _end_with(owner)
        try:
            answer = (task(), None)
        except OSError as error:
            answer = (None, error)  # type: ignore[assignment]
        with open(writer, "wb") as pipe:
            pickle.dump(answer, pipe, pickle.HIGHEST_PROTOCOL)
        status = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stderr.flush()
        # Nothing that the owner has open or buffered is this process's to end.
        os._exit(status)


def _end_with(owner: int) -> None:
    """End soon after the owner did, however that was."""

    def look(_signal: int, _frame: object) -> None:
        if os.getppid() != owner:
            os._exit(1)

    signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, ORPHAN_CHECK_S, ORPHAN_CHECK_S)
