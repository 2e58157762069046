"""The watch for ready work that no worker leases.

It runs outside of the loops that should lease, so that a stuck loop shows.
"""

import asyncio
from collections.abc import Callable

import structlog

from tidegate import metrics
from tidegate.core.errors import StoreUnavailable
from tidegate.core.ports import Clock
from tidegate.store.store import Store

log = structlog.get_logger()

_LOOK_S = 5.0
_MODELS_MAX = 100
LONG_MS = 60_000


class Unleased:
    """The models that wait, and since when, by this process's clock.

    `takes` returns whether the worker here is idle and has room for a model.
    """

    def __init__(self, store: Store, clock: Clock, takes: Callable[[str], bool] | None) -> None:
        self._store = store
        self._clock = clock
        self._takes = takes
        self._since_ms: dict[str, float] = {}

    async def watch(self) -> None:
        """Look every few seconds, without end."""
        while True:
            try:
                await self.look()
            except StoreUnavailable as error:
                log.warning("ready_work_check_failed", error=str(error))
            await asyncio.sleep(_LOOK_S)

    async def look(self) -> None:
        """Ask which models wait, and set the metric of the longest wait."""
        now_ms = self._clock.monotonic_ms()
        waiting = await self._store.unleased_models(_MODELS_MAX)
        self._since_ms = {model: self._since_ms.get(model, now_ms) for model in waiting}
        metrics.ready_unleased_seconds.set((now_ms - min(self._since_ms.values(), default=now_ms)) / 1000)

    def trouble(self) -> str | None:
        """Return a text if the worker is idle though work waits that it could take; None if not."""
        if self._takes is None:
            return None
        now_ms = self._clock.monotonic_ms()
        waited_ms = max((now_ms - since for model, since in self._since_ms.items() if self._takes(model)), default=0.0)
        if waited_ms < LONG_MS:
            return None
        return f"work that is ready has not been leased for {waited_ms / 1000:.0f} s; look at the log, then restart this process"

    def checks(self, worker_trouble: Callable[[], str | None] | None) -> dict[str, str | None]:
        """Return the worker's troubles by the name of the check; empty if there is no worker."""
        return {} if worker_trouble is None else {"worker": worker_trouble(), "work": self.trouble()}
