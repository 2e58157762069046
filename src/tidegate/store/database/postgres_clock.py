"""The store's time on PostgreSQL, whose clock may be set while many processes use it.

No session of the database has another clock to compare with, so the processes watch it:

- Each process looks once a second and leaves a note in one row. So the last note is new, unless the
  clock stepped or no process looked.
- A process knows which of the two it was from its own clock, which cannot be set.
- A step is taken out by replacing the function now_ms(). Numbers in its text cost a statement
  nothing, and plans that were made with the old ones are made again.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from tidegate.core.store_clock import TICK_MS, Look, Steady, going_on_from, is_doubtful, is_to_follow, step_between
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
from tidegate.store.database.driver import TransactionBody, Tx

Write = Callable[[TransactionBody[ClockRow]], Awaitable[ClockRow]]

# The SQLSTATE that assert_clock() raises.
DOUBTFUL_CLOCK = "TG001"
_NO_BOOT = Boot()
_CLOCK_LOCK = 7_308_327_417_366


class PostgresClock:
    def __init__(self, steady_ms: Callable[[], float]) -> None:
        self._steady_ms = steady_ms
        self._before: Look | None = None
        self._turn = asyncio.Lock()

    @property
    def is_watched(self) -> bool:
        """Return whether this process looks at the clock, and so knows a step from passed time."""
        return self._before is not None

    async def look(self, write: Write) -> None:
        """Take a step of the database's clock out of the store's time.

        `write` must not check the clock.
        """
        async with self._turn:
            asked_ms = self._steady_ms()
            row = await write(_note_look)
            if is_doubtful(row.now, row.ticked_at) or is_to_follow(row.steady, row.now, row.stepped_at):
                asked_ms = self._steady_ms()
                row = await write(self._correct)
            self._before = Look(row.now, asked_ms, self._steady_ms())

    async def _correct(self, tx: Tx) -> ClockRow:
        """Decide under a lock what time it is, and return the row as it is read afterwards."""
        asked_ms = self._steady_ms()
        connection: Any = tx._connection  # type: ignore[attr-defined]
        # Lock before the row is read: only a table that is new to this transaction is read with the
        # current functions.
        await connection.execute("select pg_advisory_xact_lock($1)", _CLOCK_LOCK)
        row = await read_clock(tx)
        if is_to_follow(row.steady, row.now, row.stepped_at):
            jump_ms = -row.behind_ms
            await move_along(tx, jump_ms)
            say_followed(jump_ms)
            return await _replace_clock(tx, connection, row, row.now + jump_ms)
        if not is_doubtful(row.now, row.ticked_at):
            return row
        step = 0 if self._before is None else step_between(self._before, Look(row.now, asked_ms, self._steady_ms()))
        now = max(row.now - step, row.ticked_at)
        if now == row.now:
            # The time did pass, and no process looked.
            await tick(tx, now, _NO_BOOT)
            return row
        done = await _replace_clock(tx, connection, row, now)
        say_stepped(row.now - now, done.steady)
        return done


async def _note_look(tx: Tx) -> ClockRow:
    row = await read_clock(tx)
    if row.now - row.ticked_at >= TICK_MS and not is_doubtful(row.now, row.ticked_at):
        await tick(tx, row.now, _NO_BOOT)
    return row


async def _replace_clock(tx: Tx, connection: Any, row: ClockRow, now: int) -> ClockRow:
    steady = going_on_from(now, row.wall)
    await set_clock(tx, steady, now, _NO_BOOT)
    await connection.execute(_now_function(steady))
    return row._replace(now=now, behind_ms=steady.behind_ms, from_ms=steady.from_ms, since_ms=steady.since_ms)


def _now_function(steady: Steady) -> str:
    """Return the SQL function that reads the store's time as core/store_clock.py does."""
    return (
        "create or replace function now_ms() returns bigint language sql volatile parallel safe as "
        f"'select greatest(wall_ms() + ({steady.behind_ms}), {steady.from_ms} + (wall_ms() - {steady.since_ms}) * 99 / 100)'"
    )
