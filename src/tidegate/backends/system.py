"""The machine's own clock and randomness, and a nudge that stays inside one process."""

import asyncio
import os
import random
import time
from pathlib import Path

# Counts while the machine sleeps too, where there is such a clock.
_BOOT_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def boot_ms() -> int:
    """Return the time since this machine was started, by a clock that cannot be set."""
    return time.clock_gettime_ns(_BOOT_CLOCK) // 1_000_000


def boot_id() -> str:
    """Which start of the machine this is; empty where it does not say."""
    try:
        return _BOOT_ID.read_text("ascii").strip()
    except OSError:
        return ""


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

    def notify(self) -> None:
        self._rung.set()

    async def wait(self, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await self._rung.wait()
        except TimeoutError:
            pass
        self._rung.clear()


class LocalWake:
    """Wake every loop that listens once, also one that is busy."""

    def __init__(self) -> None:
        self._listeners: list[LocalListener] = []

    def notify(self) -> None:
        for listener in self._listeners:
            listener.notify()

    def listen(self) -> LocalListener:
        listener = LocalListener()
        self._listeners.append(listener)
        return listener
