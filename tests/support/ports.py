"""Time and chance as tests give them: clocks that a test, a loop or the machine moves, and chance from a seed."""

import random
import time
from asyncio import AbstractEventLoop

EPOCH_MS = 1_800_000_000_000


class HandClock:
    """Stands still until a test moves it."""

    def __init__(self, monotonic: float = 1_000_000.0) -> None:
        self.monotonic = monotonic

    def now_ms(self) -> int:
        return EPOCH_MS + int(self.monotonic)

    def monotonic_ms(self) -> float:
        return self.monotonic

    def advance(self, ms: float) -> None:
        self.monotonic += ms


class LoopClock:
    """Tells the time of a loop, which may be a virtual one."""

    def __init__(self, loop: AbstractEventLoop, began_ms: float = 0.0) -> None:
        self._loop = loop
        self._began_ms = began_ms

    def now_ms(self) -> int:
        return EPOCH_MS + int(self.monotonic_ms())

    def monotonic_ms(self) -> float:
        return self._began_ms + self._loop.time() * 1000


class PushedClock:
    """Tells the machine's time, ahead by as much as a test has pushed it."""

    def __init__(self) -> None:
        self.ahead_ms = 0.0

    def now_ms(self) -> int:
        return int(time.time() * 1000 + self.ahead_ms)

    def monotonic_ms(self) -> float:
        return time.monotonic() * 1000 + self.ahead_ms


class SeededDice:
    """Gives what follows from a seed; without one, what no other test is given."""

    def __init__(self, seed: int | None = None) -> None:
        self._random = random.Random(seed)

    def token_bytes(self, count: int) -> bytes:
        return self._random.randbytes(count)

    def uniform(self, low: float, high: float) -> float:
        return self._random.uniform(low, high)


class FairDice(SeededDice):
    """Gives bytes as the seeded dice do, and the middle of every range."""

    def uniform(self, low: float, high: float) -> float:
        return (low + high) / 2
