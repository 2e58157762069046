"""The clock of the store's machine, which may be set back and ahead, and what must hold of the store's time above it: promise P29.

The store's time is the real one (`EmbeddedClock`): it stands on a clock that is never set, and takes out what the machine's was set by.
Steps of `behind_ms` pass into it, as small ones do on PostgreSQL.
"""

from collections.abc import Callable

from tests.simulation.world.loop import VirtualLoop
from tests.simulation.world.process import EPOCH_MS
from tidegate.store.database.sqlite_clock import EmbeddedClock

# One percent slower while the machine's clock catches up; whole milliseconds are rounded down at every reading.
_SLOWEST = 0.99
_ROUNDED_MS = 2


class StoreTime:
    def __init__(self, loop: VirtualLoop, broken: Callable[[str], None]) -> None:
        self._loop = loop
        self._broken = broken
        self._behind_ms = 0
        self._set_ms = 0
        self._set_ms_most = 0
        # While the store's time runs slower, it takes a fall one percent shorter, too.
        self._not_fallen_ms = 0.0
        self.clock = EmbeddedClock(self._wall_ms, self._steady_ms, "one boot")
        self._seen = self._look()
        self.jumped_ms = 0

    def _steady_ms(self) -> int:
        return int(self._loop.time() * 1000) - self._behind_ms

    def _wall_ms(self) -> int:
        return EPOCH_MS + self._steady_ms() + self._set_ms

    def _look(self) -> tuple[int, int]:
        """Return the clock that is never set, and the store's time."""
        steady_ms = self._steady_ms()
        return steady_ms, self.clock.reading(steady_ms)

    def now_s(self) -> float:
        """How long the run has lasted, whatever clocks say."""
        return self._loop.time()

    def fall_behind(self, by_ms: int) -> None:
        """A step back that the store cannot tell from time."""
        self._behind_ms += by_ms
        self._not_fallen_ms += (1 - _SLOWEST) * by_ms
        steady_ms, now_ms = self._seen
        self._seen = (steady_ms - by_ms, now_ms - by_ms)

    def set_machine(self, by_ms: int) -> None:
        self._set_ms += by_ms
        self._set_ms_most = max(self._set_ms_most, self._set_ms)

    def check(self) -> None:
        """The store's time never runs backwards, never stands still, and is never further ahead than the machine's clock was set."""
        (steady_before_ms, before_ms), self._seen = self._seen, self._look()
        steady_ms, now_ms = self._seen
        passed_ms, moved_ms = steady_ms - steady_before_ms, now_ms - before_ms
        if moved_ms < _SLOWEST * passed_ms - _ROUNDED_MS:
            self._broken(f"P29: the store's time moved by {moved_ms} ms in {passed_ms} ms")
        ahead_ms = now_ms - EPOCH_MS - steady_ms
        if ahead_ms > self._set_ms_most + self._not_fallen_ms:
            self._broken(f"P29: the store's time is {ahead_ms} ms ahead; its machine was set {self._set_ms_most} ahead")
        self.jumped_ms += max(0, moved_ms - passed_ms - _ROUNDED_MS)
