"""Run `tidegate` of any tree under a profiler, and tell which functions of it one item or one call passes through.

This file is the main script of a traced process; `trace_roads` starts it with the tree on PYTHONPATH. It knows nothing of
the tree's modules but `failpoints.hit`, whose names mark the borders of an item's road. Commands come on stdin:

- `item`: record from the next `ingest_committed` until the next `record_committed`
- `call`: record from now on
- `end`: print what was recorded as one line of JSON

An item's road is what ran in the tasks that passed its borders, and in tasks that these began meanwhile. A call's road is
what ran in tasks that began after `call`. What runs in another thread is part of the task that asked for it. Both roads
count callbacks of the event loop, which have no task.
"""

from __future__ import annotations

import asyncio
import contextvars
import json
import runpy
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

BORDERS = ("lease_committed", "before_send", "after_answer", "record_durable", "record_committed")
REPLY = "TRACED "
_NO_TASK = 0
# The task that runs, also for a thread that it asked and for a task that it begins.
_ASKER = contextvars.ContextVar("asker", default=_NO_TASK)
_submit = ThreadPoolExecutor.submit


def _submit_as_asker(pool: ThreadPoolExecutor, /, *work: Any, **more: Any) -> Future[Any]:
    """Run work in a thread under the name of the task that asks for it."""
    return _submit(pool, contextvars.copy_context().run, *work, **more)


class Tracer:
    """Note the functions of one package, by the task in which they ran."""

    def __init__(self, package: Path) -> None:
        self._package = f"{package}/"
        self._names: dict[CodeType, str] = {}
        self._seen: set[tuple[int, str]] = set()
        self._tasks: dict[int, asyncio.Task[Any]] = {}
        self._begun_by: dict[int, int] = {}
        self._earlier: set[int] = set()
        self._at_borders: set[int] = set()
        self._mode = self._phase = ""
        self._done = threading.Event()

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        if not self._mode or event != "call":
            return
        code = frame.f_code
        name = self._names.get(code)
        if name is None:
            is_ours = code.co_filename.startswith(self._package)
            name = f"{code.co_filename.removeprefix(self._package)} {code.co_qualname}" if is_ours else ""
            self._names[code] = name
        if name:
            task = self._task()
            if self._mode == "call":
                self._seen.add((task, name))
            else:
                self._note_item(task, name, frame)

    def _note_item(self, task: int, name: str, frame: FrameType) -> None:
        if name == "failpoints.py hit":
            self._note_border(task, frame.f_locals["name"])
        elif self._phase == "leasing":
            self._seen.add((task, name))

    def _note_border(self, task: int, border: str) -> None:
        """A border is passed only while a failpoint is armed, so it is no part of the road."""
        if border == "ingest_committed":
            self._phase = "leasing"
        elif self._phase == "leasing":
            if border in BORDERS:
                self._at_borders.add(task)
            if border == "record_committed":
                self._phase = ""
                self._done.set()

    def _task(self) -> int:
        try:
            task = asyncio.current_task()
        except RuntimeError:
            return _ASKER.get()
        if task is None:
            return _NO_TASK
        if id(task) not in self._tasks:
            # Kept, so that no other task gets its number.
            self._tasks[id(task)] = task
            self._begun_by[id(task)] = _ASKER.get()
            _ASKER.set(id(task))
        return id(task)

    def _is_of_item(self, task: int) -> bool:
        if task == _NO_TASK or task in self._at_borders:
            return True
        maker = self._begun_by.get(task, _NO_TASK)
        return task not in self._earlier and maker != _NO_TASK and self._is_of_item(maker)

    def begin(self, mode: str) -> None:
        self._seen.clear()
        self._at_borders.clear()
        self._earlier = set(self._tasks)
        self._phase = ""
        self._done.clear()
        self._mode = mode

    def end(self) -> list[str]:
        if self._mode == "item" and not self._done.wait(30):
            raise TimeoutError("no item was recorded")
        mode, self._mode = self._mode, ""
        if mode == "item":
            return sorted({name for task, name in self._seen if self._is_of_item(task)})
        return sorted({name for task, name in self._seen if task not in self._earlier})

    def warm(self) -> None:
        """Get to know the tasks that live as long as the process, before the first call is traced."""
        self.begin("call")


def _obey(tracer: Tracer) -> None:
    for line in sys.stdin:
        if line.strip() == "end":
            print(REPLY + json.dumps(tracer.end()), flush=True)
        else:
            tracer.begin(line.strip())
            print(f"{REPLY}[]", flush=True)


def main() -> None:
    sys.path.pop(0)
    import tidegate  # the tree's, found by PYTHONPATH

    tracer = Tracer(Path(str(tidegate.__file__)).parent)
    tracer.warm()
    threading.Thread(target=_obey, args=(tracer,), daemon=True).start()
    ThreadPoolExecutor.submit = _submit_as_asker  # type: ignore[method-assign,assignment]
    threading.setprofile(tracer)
    sys.setprofile(tracer)
    runpy.run_module("tidegate", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
