"""Time and chance as tests give them: one clock that a test moves, one that a loop moves, and chance from a seed."""

import random
from asyncio import AbstractEventLoop

EPOCH_MS = 1_700_000_000_000


class HandClock:
    """Stands still until a test moves it."""

    def __init__(self, monotonic: float = 1_000_000.0) -> None:
        self.monotonic = monotonic
        self.wall = EPOCH_MS

    def now_ms(self) -> int:
        return self.wall

    def monotonic_ms(self) -> float:
        return self.monotonic

    def advance(self, ms: float) -> None:
        self.monotonic += ms
        self.wall += int(ms)


class LoopClock:
    """Tells the time of a loop, which may be a virtual one."""

    def __init__(self, loop: AbstractEventLoop, began_ms: float = 0.0) -> None:
        self._loop = loop
        self._began_ms = began_ms

    def now_ms(self) -> int:
        return EPOCH_MS + int(self.monotonic_ms())

    def monotonic_ms(self) -> float:
        return self._began_ms + self._loop.time() * 1000


class FairDice:
    """Gives the same bytes always, and the middle of every range."""

    def token_bytes(self, count: int) -> bytes:
        return b"\x07" * count

    def uniform(self, low: float, high: float) -> float:
        return (low + high) / 2


class SeededDice:
    """Gives what follows from a seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def token_bytes(self, count: int) -> bytes:
        return self._random.randbytes(count)

    def uniform(self, low: float, high: float) -> float:
        return self._random.uniform(low, high)
