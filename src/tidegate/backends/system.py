"""The machine's clock and randomness, and a wake-up inside one process."""

import asyncio
import os
import random
import time
from pathlib import Path

# This clock also counts while the machine sleeps, if the machine has such a clock.
_BOOT_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def boot_ms() -> int:
    """Return the time since this machine was started, by a clock that cannot be set."""
    return time.clock_gettime_ns(_BOOT_CLOCK) // 1_000_000


def boot_id() -> str:
    """Return the id of this start of the machine; empty if the machine has none."""
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
    """A wake-up for all loops of one process that listen. A busy loop gets it later."""

    def __init__(self) -> None:
        self._listeners: list[LocalListener] = []

    def notify(self) -> None:
        for listener in self._listeners:
            listener.notify()

    def listen(self) -> LocalListener:
        listener = LocalListener()
        self._listeners.append(listener)
        return listener
