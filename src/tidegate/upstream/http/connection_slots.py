"""The process's connection ceiling, handed out one by one: a part of it is kept for interactive calls, and they go first.

Batch work never has more than the ceiling less that part; interactive calls may have all that is free. It knows no call and no server.
"""

import asyncio

from tidegate import metrics
from tidegate.core.deployments import HttpLimits
from tidegate.core.errors import PoolExhausted
from tidegate.upstream.http.wait_line import WaitLine


class ConnectionSlots:
    def __init__(self, limits: HttpLimits) -> None:
        self._max = limits.connections_max
        self._background_max = limits.connections_max - limits.interactive_connections
        self.in_use = 0
        self._background_in_use = 0
        self._background = WaitLine()
        self._interactive = WaitLine()
        # Calls in either line: mostly none, and then neither line need be looked at.
        self._waiting = 0

    def free(self) -> int:
        """How many more calls of batch work fit."""
        all_free, background_free = self._max - self.in_use, self._background_max - self._background_in_use
        return background_free if background_free < all_free else all_free

    def take_slot(self, *, interactive: bool) -> bool:
        """Take a slot if one is free and no call of a higher class waits for it."""
        if self.in_use >= self._max or (self._waiting and self._interactive):
            return False
        if not interactive:
            if self._background_in_use >= self._background_max:
                return False
            self._background_in_use += 1
        self.in_use += 1
        return True

    async def wait(self, timeout_s: float, *, interactive: bool) -> None:
        """Wait in line for a seat that another call hands over; it is ours when this returns."""
        line = self._interactive if interactive else self._background
        turn = line.join()
        self._waiting += 1
        try:
            async with asyncio.timeout(timeout_s):
                await turn
            metrics.upstream_connection_waits.of("connected").inc()
            return
        except BaseException as stopped:
            if line.give_up(turn):
                # The seat was handed over in the moment we stopped waiting for it.
                self.release_slot(interactive=interactive)
            if not isinstance(stopped, TimeoutError):
                raise
        finally:
            self._waiting -= 1
        metrics.upstream_connection_waits.of("timed_out").inc()
        raise PoolExhausted(
            f"no free connection within {timeout_s:g} s: all {self._max} are in use; "
            "raise http.connections_max or lower the calls in flight",
            retry_after_ms=1000,
        )

    def release_slot(self, *, interactive: bool) -> None:
        self.in_use -= 1
        if not interactive:
            self._background_in_use -= 1
        if self._waiting:
            self._pass_on()

    def _pass_on(self) -> None:
        while self.in_use < self._max and self._interactive.call_first():
            self.in_use += 1
        while self.free() > 0 and self._background.call_first():
            self.in_use += 1
            self._background_in_use += 1
