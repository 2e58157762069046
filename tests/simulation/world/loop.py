"""Virtual time for asyncio, and processes inside it.

Waiting is moving the clock; with nothing to wait for, the run is stuck and says so. Each callback belongs to the simulated process in whose
context it was made: those of a stopped process wait until it goes on, and those of a killed one never run again, not even their `finally`.
"""

import asyncio
import contextlib
import heapq
import warnings
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context, ContextVar, copy_context
from typing import Any, Protocol, cast


class Timer(float):
    """A callback at its time, in place of `asyncio.TimerHandle`: numbers compare without a call of Python, ten times for each timer."""

    __slots__ = ("_args", "_callback", "_cancelled", "_context")
    _callback: Callable[..., object]
    _args: tuple[Any, ...]
    _context: Context

    def __new__(cls, when: float, callback: Callable[..., object], args: tuple[Any, ...], context: Context) -> "Timer":
        made = float.__new__(cls, when)
        made._callback, made._args, made._context, made._cancelled = callback, args, context, False
        return made

    def when(self) -> float:
        return float(self)

    def cancel(self) -> None:
        self._cancelled = True

    def cancelled(self) -> bool:
        return self._cancelled


class Owner(Protocol):
    """The owner of callbacks: the loop asks for its state before each of them."""

    dead: bool
    stopped: bool
    frozen: list[asyncio.Handle | Timer]
    tasks: list["asyncio.Task[Any]"]


OWNER: ContextVar[Owner] = ContextVar("owner")


class Stuck(Exception):
    """Nothing is scheduled: every task waits for something that will never come."""


class VirtualLoop(asyncio.BaseEventLoop):
    def __init__(self) -> None:
        super().__init__()
        self._now_s = 0.0
        self._inner = cast(Any, self)
        self._own_tasks: list[asyncio.Task[Any]] = []
        self.halted: BaseException | None = None
        self.steps = 0
        self._inner.set_task_factory(self._make_task)
        self.set_exception_handler(lambda loop, context: None)

    def time(self) -> float:
        return self._now_s

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> Any:
        timer = Timer(self._now_s + delay, callback, args, copy_context() if context is None else context)
        heapq.heappush(self._inner._scheduled, timer)
        return timer

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> Any:
        timer = Timer(when, callback, args, copy_context() if context is None else context)
        heapq.heappush(self._inner._scheduled, timer)
        return timer

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> "asyncio.Future[Any]":  # type: ignore[override]
        """Do at once what a thread would do meanwhile."""
        done: asyncio.Future[Any] = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as error:
            done.set_exception(error)
        return done

    def halt(self, reason: BaseException) -> None:
        """End the run before the next step."""
        self.halted = self.halted or reason

    def thaw(self, owner: Owner) -> None:
        """Let a stopped process go on: all that came due meanwhile runs now, in order."""
        handles, owner.frozen = owner.frozen, []
        self._inner._ready.extend(handles)

    def _make_task(
        self, loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, Any], context: Context | None = None
    ) -> "asyncio.Task[Any]":
        # Tasks of the dead are kept to the end of the run: collecting one would run its `finally`.
        task = asyncio.Task(coroutine, loop=self, context=context)
        owner = context.get(OWNER) if context is not None else OWNER.get(None)
        (self._own_tasks if owner is None else owner.tasks).append(task)
        return task

    def _run_once(self) -> None:
        ready: deque[asyncio.Handle | Timer] = self._inner._ready
        scheduled: list[Timer] = self._inner._scheduled
        while scheduled and scheduled[0]._cancelled:
            heapq.heappop(scheduled)
        if not ready and not self._inner._stopping:
            if not scheduled:
                raise Stuck("nothing is scheduled")
            self._now_s = max(self._now_s, float(scheduled[0]))
        while scheduled and scheduled[0] <= self._now_s:
            ready.append(heapq.heappop(scheduled))
        # Written out here: a run takes hundreds of thousands of these steps.
        for _ in range(len(ready)):
            handle: Any = ready.popleft()
            if not handle._cancelled:
                context: Context = handle._context
                owner = context.get(OWNER)
                if owner is not None and (owner.dead or owner.stopped):
                    owner.frozen.append(handle)
                else:
                    self.steps += 1
                    try:
                        context.run(handle._callback, *handle._args)
                    except (SystemExit, KeyboardInterrupt):
                        raise
                    except BaseException as error:
                        self.call_exception_handler({"message": "a callback failed", "exception": error})
            if self.halted is not None:
                raise self.halted

    def _write_to_self(self) -> None:
        """Do nothing: no call comes from another thread."""

    def dismantle(self, owners: list[Owner]) -> None:
        """Close every coroutine that is still waiting, quietly, and then the loop."""
        for owner in owners:
            self._own_tasks.extend(owner.tasks)
        with warnings.catch_warnings():
            # Whatever they do in their `finally` no longer counts.
            warnings.simplefilter("ignore")
            for task in self._own_tasks:
                if not task.done():
                    quiet: Any = task
                    quiet._log_destroy_pending = False
                    with contextlib.suppress(BaseException):
                        quiet.get_coro().close()
        self._inner._ready.clear()
        self._inner._scheduled.clear()
        self.close()
