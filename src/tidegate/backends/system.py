"""The machine's own clock and randomness, and a nudge that stays inside one process."""

import asyncio
import os
import random
import time


class SystemClock:
    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def monotonic_ms(self) -> float:
        return time.monotonic() * 1000


class SystemEntropy:
    def token_bytes(self, count: int) -> bytes:
        return os.urandom(count)

    def uniform(self, low: float, high: float) -> float:
        return random.uniform(low, high)


class LocalListener:
    def __init__(self) -> None:
        self._rung = asyncio.Event()

    def hear(self) -> None:
        self._rung.set()

    async def wait(self, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await self._rung.wait()
        except TimeoutError:
            pass
        self._rung.clear()


class LocalWake:
    """One ring, heard once by every loop that listens, also by one that was busy."""

    def __init__(self) -> None:
        self._listeners: list[LocalListener] = []

    def ring(self) -> None:
        for listener in self._listeners:
            listener.hear()

    def listen(self) -> LocalListener:
        listener = LocalListener()
        self._listeners.append(listener)
        return listener
