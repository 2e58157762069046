"""Counts of failed attempts by name over a window, in a table of bounded size."""

from collections import OrderedDict

from tidegate.core.ports import Clock

WINDOW_MS = 60_000
NAMES_MAX = 10_000


class Failures:
    """Recent failures by name. A full table forgets the name whose last failure is oldest."""

    def __init__(self, clock: Clock, count_max: int, names_max: int = NAMES_MAX) -> None:
        self._clock = clock
        self._count_max = count_max
        self._names_max = names_max
        self._counted: OrderedDict[str, tuple[float, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._counted)

    def add(self, name: str) -> None:
        began_ms, count = self._current(name)
        self._counted[name] = (began_ms, count + 1)
        self._counted.move_to_end(name)
        if len(self._counted) > self._names_max:
            self._counted.popitem(last=False)

    def wait_s(self, name: str) -> int:
        """Return how long this name must wait before its next try; 0 when it may try now."""
        began_ms, count = self._current(name)
        if count < self._count_max:
            return 0
        return max(1, int((began_ms + WINDOW_MS - self._clock.monotonic_ms()) // 1000) + 1)

    def _current(self, name: str) -> tuple[float, int]:
        now_ms = self._clock.monotonic_ms()
        began_ms, count = self._counted.get(name, (now_ms, 0))
        return (began_ms, count) if now_ms - began_ms < WINDOW_MS else (now_ms, 0)
