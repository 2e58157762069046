"""Run the services of one worker, and end the worker when one of them meets an internal error."""

import asyncio
from collections.abc import Awaitable, Callable

import structlog

from tidegate import metrics
from tidegate.core.errors import BlobError, LostRace, StoreUnavailable

log = structlog.get_logger()

_RETRY_S = 0.5


class Supervisor:
    """`is_working` is whether new work may be taken and sent: the worker is not stopping, and nothing in it is broken. `broken` names the
    internal error that ended this worker, and the service that met it."""

    def __init__(self) -> None:
        self._tasks: list[asyncio.Task[None]] = []
        self._broke = asyncio.Event()
        self.is_working = True
        self.broken: str | None = None

    def start(self, name: str, run: Callable[[], Awaitable[None]]) -> None:
        """Run a service until `cancel_services`."""
        self._tasks.append(asyncio.create_task(self._guard(name, run)))

    async def wait(self, stop: asyncio.Event) -> None:
        """Wait until the worker is to stop, or is broken."""
        waits = [asyncio.create_task(event.wait()) for event in (stop, self._broke)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waits:
                task.cancel()

    def stop(self) -> None:
        """Take and send nothing new from now on; the services go on, so that what runs comes to its end."""
        self.is_working = False

    async def cancel_services(self) -> None:
        """Cancel every service."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _guard(self, name: str, run: Callable[[], Awaitable[None]]) -> None:
        """Run a service again after each failure. One that was not foreseen breaks the worker; the calls in flight go on to their end."""
        while True:
            try:
                await run()
                return
            except (StoreUnavailable, BlobError, LostRace) as error:
                log.warning("worker_loop_postponed", loop=name, error=str(error))
            except Exception as error:
                if self.broken is None:
                    metrics.worker_broken.set(1)
                    self.broken = f"{type(error).__name__} in {name}"
                    self.is_working = False
                    self._broke.set()
                log.exception("worker_broken", loop=name)
            await asyncio.sleep(_RETRY_S)
