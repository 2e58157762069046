"""An operator's own code, run away from the event loop: slow code delays only its own call.

- A plain function runs in a thread, a coroutine in another event loop, both with a time limit.
- A thread cannot be ended from outside, so one that overran is left behind and counted. With too
  many of them the code is not called again until one returns.
- Code that holds the interpreter lock (a C extension that never releases it) stops everything.

This module knows nothing of bodies or verdicts.
"""

import asyncio
import concurrent.futures
import inspect
import queue
import threading
from collections.abc import Callable, Coroutine
from typing import Any

THREADS_MAX = 32
LEFT_BEHIND_MAX = 32


class Overran(Exception):
    """The code overran its time limit, or was not called because too many of its calls overran."""


class OwnCode:
    def __init__(self, name: str, function: Callable[..., Any], timeout_s: float) -> None:
        self._name = name
        self._function = function
        self._timeout_s = timeout_s
        self._is_coroutine = inspect.iscoroutinefunction(function)
        self._idle: list[_Thread] = []
        self._room: asyncio.Semaphore | None = None
        self._loop: _Loop | None = None
        self._left_behind = 0

    async def call(self, *given: Any) -> Any:
        """Call the code and return its value. Raise its exception, or Overran."""
        if self._left_behind >= LEFT_BEHIND_MAX:
            raise Overran
        if self._is_coroutine:
            return await self._in_its_loop(given)
        if self._room is None:
            self._room = asyncio.Semaphore(THREADS_MAX)
        # The wait for a thread is not this call's fault: its time begins when it has one.
        async with self._room:
            return await self._in_a_thread(given)

    async def _in_a_thread(self, given: tuple[Any, ...]) -> Any:
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Any] = loop.create_future()
        thread = self._idle.pop() if self._idle else _Thread(f"hook {self._name}")

        def returned(value: Any, error: Exception | None) -> None:
            self._idle.append(thread)
            if done.cancelled():
                self._left_behind -= 1
            elif error is None:
                done.set_result(value)
            else:
                done.set_exception(error)

        thread.run(loop, self._function, given, returned)
        try:
            async with asyncio.timeout(self._timeout_s):
                return await done
        except TimeoutError:
            if done.cancelled():
                raise Overran from None
            return done.result()
        finally:
            if done.cancelled():
                self._left_behind += 1

    async def _in_its_loop(self, given: tuple[Any, ...]) -> Any:
        if self._loop is None:
            self._loop = _Loop(f"hook {self._name}")
        used = self._loop
        turned = threading.Event()
        future = used.submit(_contained(self._function, given), turned)
        waited = asyncio.wrap_future(future)
        try:
            async with asyncio.timeout(self._timeout_s):
                return await waited
        except TimeoutError:
            if waited.done() and not waited.cancelled():
                return waited.result()
            if not turned.is_set() and self._loop is used:
                # The loop has not run since, so a call blocks it. The next call gets a new loop.
                self._left_behind += 1
                self._loop = None
                used.stop_loop(self._came_back)
            raise Overran from None

    def _came_back(self) -> None:
        self._left_behind -= 1

    def close(self) -> None:
        """Stop idle threads and the loop. Busy threads end with the process."""
        for thread in self._idle:
            thread.stop_thread()
        self._idle.clear()
        if self._loop is not None:
            self._loop.stop_loop()
            self._loop = None


async def _contained(function: Callable[..., Coroutine[Any, Any, Any]], given: tuple[Any, ...]) -> Any:
    """Run the operator's coroutine, and turn its SystemExit or CancelledError into a RuntimeError.

    Otherwise the caller would take it for an order to exit or for its own cancellation.
    """
    try:
        return await function(*given)
    except Exception:
        raise
    except BaseException as error:
        raise RuntimeError(f"it raised {type(error).__name__}") from None


Returned = Callable[[Any, Exception | None], None]


class _Thread:
    """One thread that runs one call after another. A process that exits does not wait for it."""

    def __init__(self, name: str) -> None:
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        threading.Thread(target=self._live, name=name, daemon=True).start()

    def run(
        self, loop: asyncio.AbstractEventLoop, function: Callable[..., Any], given: tuple[Any, ...], returned: Returned
    ) -> None:
        """Run the code in this thread; `returned` is called in `loop` with its result."""

        def work() -> None:
            value: Any = None
            error: Exception | None = None
            try:
                value = function(*given)
            except (StopIteration, StopAsyncIteration) as raised:
                error = RuntimeError(f"it raised {type(raised).__name__}")
            except Exception as raised:
                error = raised
            except BaseException as raised:
                error = RuntimeError(f"it raised {type(raised).__name__}")
            loop.call_soon_threadsafe(returned, value, error)

        self._work.put(work)

    def stop_thread(self) -> None:
        self._work.put(None)

    def _live(self) -> None:
        while (work := self._work.get()) is not None:
            try:
                work()
            except RuntimeError:
                # The caller's loop is closed, so the process is ending.
                return


class _Loop:
    """An event loop in its own thread."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._live, name=name, daemon=True).start()

    def submit(self, work: Coroutine[Any, Any, Any], turned: threading.Event) -> concurrent.futures.Future[Any]:
        """Run a coroutine in this loop. `turned` is set as soon as the loop runs."""
        self._loop.call_soon_threadsafe(turned.set)
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def stop_loop(self, ended: Callable[[], None] = lambda: None) -> None:
        """Stop this loop as soon as it runs again; then call `ended` in the caller's loop."""
        asking = asyncio.get_running_loop()

        def stop() -> None:
            self._loop.stop()
            asking.call_soon_threadsafe(ended)

        self._loop.call_soon_threadsafe(stop)

    def _live(self) -> None:
        self._loop.run_forever()
        # Cancel the calls that came while it was blocked, or Python warns about them later.
        if left := asyncio.all_tasks(self._loop):
            for task in left:
                task.cancel()
            self._loop.run_until_complete(asyncio.wait(left))
        self._loop.close()
