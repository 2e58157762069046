"""Run an operator's own code away from the event loop: it may be slow or never return, and holds up
only its own call.

A plain function runs in a thread of its own, a coroutine in an event loop of its own, both with a
time limit. A thread cannot be ended from outside, so one that overran is left behind and counted;
when too many are, the code is not called again until one comes back. What holds the interpreter
itself (a C extension that never lets go of it) is beyond this. It knows nothing of bodies or
verdicts.
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
    """The code did not return within its time limit, or so many calls of it have not that it was not called."""


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
        """What the code returns; raises what it raises, or Overran."""
        if self._left_behind >= LEFT_BEHIND_MAX:
            raise Overran
        if self._is_coroutine:
            return await self._in_its_loop(given)
        if self._room is None:
            self._room = asyncio.Semaphore(THREADS_MAX)
        # Waiting for a thread is no fault of this call: its time begins when it has one.
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
                # It has not turned once in all this time: something in it blocks. The next call has a fresh one.
                self._left_behind += 1
                self._loop = None
                used.stop_loop(self._came_back)
            raise Overran from None

    def _came_back(self) -> None:
        self._left_behind -= 1

    def close(self) -> None:
        """Let go of what is idle; what is not ends with the process."""
        for thread in self._idle:
            thread.stop_thread()
        self._idle.clear()
        if self._loop is not None:
            self._loop.stop_loop()
            self._loop = None


async def _contained(function: Callable[..., Coroutine[Any, Any, Any]], given: tuple[Any, ...]) -> Any:
    """Nothing that own code raises may look like an order to those who wait for it: to stop, or to leave."""
    try:
        return await function(*given)
    except Exception:
        raise
    except BaseException as error:
        raise RuntimeError(f"it raised {type(error).__name__}") from None


Returned = Callable[[Any, Exception | None], None]


class _Thread:
    """One thread that runs one call after another. The process does not wait for it at its end."""

    def __init__(self, name: str) -> None:
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        threading.Thread(target=self._live, name=name, daemon=True).start()

    def run(
        self, loop: asyncio.AbstractEventLoop, function: Callable[..., Any], given: tuple[Any, ...], returned: Returned
    ) -> None:
        """Run the code; `returned` is called in the loop with its result."""

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
                # The loop that asked is closed, and with it the process's work.
                return


class _Loop:
    """An event loop in a thread of its own."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._live, name=name, daemon=True).start()

    def submit(self, work: Coroutine[Any, Any, Any], turned: threading.Event) -> concurrent.futures.Future[Any]:
        """Run this there. `turned` is set when the loop gets to it."""
        self._loop.call_soon_threadsafe(turned.set)
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def stop_loop(self, ended: Callable[[], None] = lambda: None) -> None:
        """Stop it as soon as it turns again; `ended` is called in the caller's loop then."""
        asking = asyncio.get_running_loop()

        def stop() -> None:
            self._loop.stop()
            asking.call_soon_threadsafe(ended)

        self._loop.call_soon_threadsafe(stop)

    def _live(self) -> None:
        self._loop.run_forever()
        # Calls that came while it was blocked are ended here, or Python complains of them later.
        if left := asyncio.all_tasks(self._loop):
            for task in left:
                task.cancel()
            self._loop.run_until_complete(asyncio.wait(left))
        self._loop.close()
