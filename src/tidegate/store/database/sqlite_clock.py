"""The time of the embedded store.

The processes that write to it keep it, by a clock that cannot be set.

That clock is the same for all processes and counts from the machine's start. Its relation to the
store's time is written down. So a process that starts later continues exactly where the last one
was. After a restart of the machine, the store's time does not go back before the last note.
"""

from collections.abc import Callable

from tidegate.core.store_clock import NEVER_SET, STEP_MS_MIN, going_on_from, is_to_follow
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
    machine that `boot` names.
    """

    def __init__(self, wall_ms: Callable[[], int], steady_ms: Callable[[], int], boot: str) -> None:
        self.wall_ms = wall_ms
        self._steady_ms = steady_ms
        self._boot = boot
        self._is_begun = False
        self._stepped_at = 0
        # One assignment changes both values, so that other threads always read a matching pair.
        self._state = (wall_ms() - steady_ms(), NEVER_SET)

    def now_ms(self) -> int:
        """Return the store's time."""
        base, steady = self._state
        wall = self._steady_ms() + base
        return wall if steady == NEVER_SET else steady.reading(wall)

    async def look(self, tx: Tx) -> None:
        """Take a step of the machine's clock out of the store's time.

        Continue where the last process was.
        """
        row = await read_clock(tx)
        here = Boot(self._boot, self._steady_ms())
        if not self._is_begun:
            now, step = self._first_reading(row, here)
            self._is_begun = True
        elif row.stepped_at != self._stepped_at and row.steady != self._state[1]:
            # Another process of this store took the step out, or followed it.
            self._state = (self.wall_ms() - here.ms, row.steady)
            now, step = self.now_ms(), 0
        else:
            now, step = self.now_ms(), self.wall_ms() - here.ms - self._state[0]
        self._stepped_at = row.stepped_at
        if abs(step) >= STEP_MS_MIN:
            steady = going_on_from(now, self._read_from(here))
            self._state = (self._state[0], steady)
            await set_clock(tx, steady, now, here)
            say_stepped(step, steady)
        elif is_to_follow(row.steady, now, row.stepped_at):
            jump_ms = -row.behind_ms
            await move_along(tx, jump_ms)
            steady = going_on_from(now + jump_ms, self._read_from(here))
            self._state = (self._state[0], steady)
            await set_clock(tx, steady, now + jump_ms, here)
            say_followed(jump_ms)
        elif now - row.ticked_at >= _TICK_MS:
            await tick(tx, now, here)

    async def borrow(self, tx: Tx) -> None:
        """Read the store's time as the process that writes does."""
        row = await tx.one("clock_look")
        if row is not None:
            self._state = (self._state[0], ClockRow(*row).steady)

    def _read_from(self, here: Boot) -> int:
        """Read the machine's clock, and count from what it shows now."""
        wall = self.wall_ms()
        self._state = (wall - here.ms, self._state[1])
        return wall

    def _first_reading(self, row: ClockRow, here: Boot) -> tuple[int, int]:
        """Return the store's time to begin at, and the machine's step since the last look."""
        self._state = (self._state[0], row.steady)
        shown = row.steady.reading(here.ms + self._state[0])
        is_same_boot = row.boot_id != "" and row.boot_id == here.id
        now = row.ticked_at + here.ms - row.boot_ms if is_same_boot else max(shown, row.ticked_at)
        return (now, shown - now) if abs(shown - now) >= STEP_MS_MIN else (shown, 0)
