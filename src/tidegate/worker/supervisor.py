"""The supervisor of one worker's services, which ends the worker after an internal error."""

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import structlog

from tidegate import metrics
from tidegate.core.errors import BlobError, LostRace, StoreUnavailable

log = structlog.get_logger()

_RETRY_S = 0.5

Service = Callable[[], Coroutine[Any, Any, None]]


class Supervisor:
    """The supervisor of services.

    - `is_working` is true while new work may be taken and sent: the worker is neither stopping nor
      broken.
    - `broken` names the internal error that ended this worker, and its service.
    """

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        self._broke = asyncio.Event()
        self.is_working = True
        self.broken: str | None = None

    def start(self, name: str, run: Service) -> None:
        """Run a service until `cancel_services`, and again after each failure."""
        # The task itself reports its end. A wrapper would be slower, because each step of a runner
        # would pass through it.
        self._begin(name, run, run())

    async def wait(self, stop: asyncio.Event) -> None:
        """Wait until `stop` is set or the worker is broken."""
        waits = [asyncio.create_task(event.wait()) for event in (stop, self._broke)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waits:
                task.cancel()

    def stop(self) -> None:
        """Take and send no new work from now on.

        The services go on, so that calls in flight can end.
        """
        self.is_working = False

    async def cancel_services(self) -> None:
        """Cancel all services."""
        while self._tasks:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _begin(self, name: str, run: Service, service: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(service)
        self._tasks.add(task)
        task.add_done_callback(partial(self._end, name, run))

    def _end(self, name: str, run: Service, task: asyncio.Task[None]) -> None:
        """Start a failed service again.

        An unforeseen failure breaks the worker, whose calls in flight go on.
        """
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if not isinstance(error, Exception):
            return
        if isinstance(error, (StoreUnavailable, BlobError, LostRace)):
            log.warning("worker_loop_postponed", loop=name, error=str(error))
        else:
            if self.broken is None:
                metrics.worker_broken.set(1)
                self.broken = f"{type(error).__name__} in {name}"
                self.is_working = False
                self._broke.set()
            log.error("worker_broken", loop=name, exc_info=error)
        self._begin(name, run, _after_a_pause(run))


async def _after_a_pause(run: Service) -> None:
    await asyncio.sleep(_RETRY_S)
    await run()
