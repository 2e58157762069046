"""The time of the embedded store.

The processes that write to it keep it, by a clock that cannot be set.

That clock is the same for all processes and counts from the machine's start. Its relation to the
store's time is written down. So a process that starts later continues exactly where the last one
was. After a restart of the machine, the store's time does not go back before the last note.
"""

from collections.abc import Callable
from functools import partial
from operator import add

from tidegate.core.store_clock import NEVER_SET, STEP_MS_MIN, Steady, going_on_from, is_to_follow
from tidegate.store.database.clock import (
    Boot,
    ClockRow,
    move_along,
    read_clock,
    say_followed,
    say_stepped,
    set_clock,
    tick,
)
from tidegate.store.database.driver import Tx

_TICK_MS = 10_000


class EmbeddedClock:
    """The clock of an embedded store.

    `wall_ms` is the machine's clock, which may be set. `steady_ms` counts from the start of the
    machine that `boot` names. `reading` returns the store's time for a moment of `steady_ms`.
    """

    reading: Callable[[int], int]

    def __init__(self, wall_ms: Callable[[], int], steady_ms: Callable[[], int], boot: str) -> None:
        self.wall_ms = wall_ms
        self.steady_ms = steady_ms
        self._boot = boot
        self._is_begun = False
        self._stepped_at = 0
        self._go_by(wall_ms() - steady_ms(), NEVER_SET)

    def _go_by(self, base: int, steady: Steady) -> None:
        """Read the machine's clock as `steady_ms` plus `base`, and the store's time from it."""
        self._base, self._steady = base, steady
        # Other threads read the time, so one assignment changes all of it.
        self.reading = partial(add, base) if steady == NEVER_SET else lambda ms: steady.reading(ms + base)

    async def look(self, tx: Tx) -> None:
        """Take a step of the machine's clock out of the store's time.

        Continue where the last process was.
        """
        row = await read_clock(tx)
        here = Boot(self._boot, self.steady_ms())
        if not self._is_begun:
            now, step = self._first_reading(row, here)
            self._is_begun = True
        elif row.stepped_at != self._stepped_at and row.steady != self._steady:
            # Another process of this store took the step out, or followed it.
            self._go_by(self.wall_ms() - here.ms, row.steady)
            now, step = self.reading(here.ms), 0
        else:
            now, step = self.reading(here.ms), self.wall_ms() - here.ms - self._base
        self._stepped_at = row.stepped_at
        if abs(step) >= STEP_MS_MIN:
            steady = going_on_from(now, self._read_from(here))
            self._go_by(self._base, steady)
            await set_clock(tx, steady, now, here)
            say_stepped(step, steady)
        elif is_to_follow(row.steady, now, row.stepped_at):
            jump_ms = -row.behind_ms
            await move_along(tx, jump_ms)
            steady = going_on_from(now + jump_ms, self._read_from(here))
            self._go_by(self._base, steady)
            await set_clock(tx, steady, now + jump_ms, here)
            say_followed(jump_ms)
        elif now - row.ticked_at >= _TICK_MS:
            await tick(tx, now, here)

    async def borrow(self, tx: Tx) -> None:
        """Read the store's time as the process that writes does."""
        row = await tx.one("clock_look")
        if row is not None:
            self._go_by(self._base, ClockRow(*row).steady)

    def _read_from(self, here: Boot) -> int:
        """Read the machine's clock, and count from what it shows now."""
        wall = self.wall_ms()
        self._go_by(wall - here.ms, self._steady)
        return wall

    def _first_reading(self, row: ClockRow, here: Boot) -> tuple[int, int]:
        """Return the store's time to begin at, and the machine's step since the last look."""
        self._go_by(self._base, row.steady)
        shown = row.steady.reading(here.ms + self._base)
        is_same_boot = row.boot_id != "" and row.boot_id == here.id
        now = row.ticked_at + here.ms - row.boot_ms if is_same_boot else max(shown, row.ticked_at)
        return (now, shown - now) if abs(shown - now) >= STEP_MS_MIN else (shown, 0)
