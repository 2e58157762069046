"""Tasks in a process that is forked off for them, and their answers.

For a process that does one piece of work and has no threads, such as ingest's own. What the tasks need is there already, because
the memory is a copy. A helper does not outlive who forked it, and where none can be had the tasks are done in place. What they
are is not this module's business.
"""

import os
import pickle
import signal
import sys
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, Self

ORPHAN_CHECK_S = 0.2

Task = Callable[[], Any]


class Forked:
    """Tasks that are done one after the other, from now on. Leaving the context ends them, done or not."""

    def __init__(self, *tasks: Task) -> None:
        self._tasks = list(tasks)
        self._pid = 0
        reader, writer = os.pipe()
        self._answers = os.fdopen(reader, "rb")
        owner = os.getpid()
        try:
            self._pid = os.fork()
        except OSError:
            # No process to be had is no reason to fail.
            os.close(writer)
            return
        if not self._pid:
            _answer(tasks, writer, owner)
        os.close(writer)

    def answer(self) -> Any:
        """Wait for what came of the next task; an OSError of the task is raised here."""
        task = self._tasks.pop(0)
        if not self._pid:
            return task()
        try:
            answer, error = pickle.load(self._answers)
        except (EOFError, pickle.UnpicklingError):
            _, status = os.waitpid(self._pid, 0)
            self._pid = 0
            raise RuntimeError(f"a forked task ended with {os.waitstatus_to_exitcode(status)}") from None
        if error is not None:
            raise error
        return answer

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pid:
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
            self._pid = 0
        self._answers.close()


def _answer(tasks: Iterable[Task], writer: int, owner: int) -> None:
    """The life of the helper."""
    status = 1
    try:
        _end_with(owner)
        with open(writer, "wb") as pipe:
            for task in tasks:
                try:
                    answer = (task(), None)
                except OSError as error:
                    answer = (None, error)  # type: ignore[assignment]
                pickle.dump(answer, pipe, pickle.HIGHEST_PROTOCOL)
                pipe.flush()
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
