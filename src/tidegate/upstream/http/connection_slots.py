"""The process's connection ceiling, handed out one by one: a part of it is kept for interactive calls, and they go first.

Batch work never has more than the ceiling less that part; interactive calls may have all that is free. It knows no call and no server.
"""

import asyncio
from collections import deque

from tidegate.core.deployments import HttpLimits
from tidegate.core.errors import PoolExhausted


class ConnectionSlots:
    def __init__(self, loop: asyncio.AbstractEventLoop, limits: HttpLimits) -> None:
        self._loop = loop
        self._max = limits.connections_max
        self._background_max = limits.connections_max - limits.interactive_connections
        self._in_use = 0
        self._background_in_use = 0
        self._batch: deque[asyncio.Future[None]] = deque()
        self._interactive: deque[asyncio.Future[None]] = deque()

    def free(self) -> int:
        """How many more calls of batch work fit."""
        all_free, background_free = self._max - self._in_use, self._background_max - self._background_in_use
        return background_free if background_free < all_free else all_free

    def take(self, *, interactive: bool) -> bool:
        """A seat, when one is free and nobody with a better right waits for it."""
        if self._in_use >= self._max or self._interactive:
            return False
        if not interactive:
            if self._background_in_use >= self._background_max:
                return False
            self._background_in_use += 1
        self._in_use += 1
        return True

    async def wait(self, timeout_s: float, *, interactive: bool) -> None:
        """Wait in line for a seat that another call hands over; it is ours when this returns."""
        place: asyncio.Future[None] = self._loop.create_future()
        line = self._interactive if interactive else self._batch
        line.append(place)
        try:
            async with asyncio.timeout(timeout_s):
                await place
            return
        except TimeoutError:
            self._stop_waiting(place, line, interactive=interactive)
        except asyncio.CancelledError:
            self._stop_waiting(place, line, interactive=interactive)
            raise
        raise PoolExhausted(
            f"no free connection within {timeout_s:g} s: all {self._max} are in use; "
            "raise http.connections_max or lower the calls in flight",
            retry_after_ms=1000,
        )

    def give_back(self, *, interactive: bool) -> None:
        self._in_use -= 1
        if not interactive:
            self._background_in_use -= 1
        if self._interactive or self._batch:
            self._hand_over()

    def _hand_over(self) -> None:
        while self._interactive and self._in_use < self._max:
            place = self._interactive.popleft()
            if not place.done():
                self._in_use += 1
                place.set_result(None)
        while self._batch and self.free() > 0:
            place = self._batch.popleft()
            if not place.done():
                self._in_use += 1
                self._background_in_use += 1
                place.set_result(None)

    def _stop_waiting(
        self, place: "asyncio.Future[None]", line: "deque[asyncio.Future[None]]", *, interactive: bool
    ) -> None:
        if place.done() and not place.cancelled():
            # The seat was handed over in the moment we stopped waiting for it.
            self.give_back(interactive=interactive)
        elif place in line:
            line.remove(place)
