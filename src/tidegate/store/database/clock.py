"""The parts of the store's time that both drivers share.

They read its row, write down a step, and follow a clock that was set forward.
"""

from typing import NamedTuple

import structlog

from tidegate.core.budgets.budget import BudgetKind
from tidegate.core.budgets.ledger import Ledger
from tidegate.core.budgets.money import MoneyLedger
from tidegate.core.nouns import FOREVER_MS
from tidegate.core.store_clock import Steady
from tidegate.store.database.driver import Tx

log = structlog.get_logger()


class ClockRow(NamedTuple):
    """The row of `clock`, with the store's time and the wall time at which it was read."""

    now: int
    wall: int
    ticked_at: int
    behind_ms: int
    from_ms: int
    since_ms: int
    stepped_at: int
    boot_id: str
    boot_ms: int

    @property
    def steady(self) -> Steady:
        return Steady(self.behind_ms, self.from_ms, self.since_ms)


class Boot(NamedTuple):
    """A start of a machine, and the time since.

    Only processes of the same start can compare these.
    """

    id: str = ""
    ms: int = 0


async def read_clock(tx: Tx) -> ClockRow:
    """Read the row. The first process that looks makes it."""
    row = await tx.one("clock_look")
    if row is None:
        await tx.all("clock_begin")
        row = await tx.one("clock_look")
    assert row is not None
    return ClockRow(*row)


async def set_clock(tx: Tx, steady: Steady, now: int, boot: Boot) -> None:
    """Write how the store's time is read from now on."""
    await tx.all(
        "clock_set",
        ticked_at=now,
        behind_ms=steady.behind_ms,
        from_ms=steady.from_ms,
        since_ms=steady.since_ms,
        boot_id=boot.id,
        boot_ms=boot.ms,
    )


async def tick(tx: Tx, now: int, boot: Boot) -> None:
    """Note that a process looked at the clock."""
    await tx.all("clock_tick", ticked_at=now, boot_id=boot.id, boot_ms=boot.ms)


async def move_along(tx: Tx, jump_ms: int) -> None:
    """Move leases, waits and rate windows along with a jump of the store's time."""
    await tx.all("clock_move_workers", jump_ms=jump_ms)
    await tx.all("clock_move_slices", jump_ms=jump_ms, forever=FOREVER_MS)
    await tx.all("clock_move_attempts", jump_ms=jump_ms)
    moved = []
    for id, packed in await tx.all("clock_lock_budgets"):
        kind = MoneyLedger if id.startswith(f"{BudgetKind.MONEY}:") else Ledger
        ledger = kind.unpack(bytes(packed))
        if not ledger.is_damaged:
            ledger.move(jump_ms)
            moved.append((ledger.pack(), jump_ms, ledger.empty_at(), id))
    await tx.many("clock_move_budget", moved)


def say_stepped(step_ms: int, steady: Steady) -> None:
    """Log a step: an operator should check a machine whose clock is set while it works."""
    log.warning(
        "store_clock_stepped",
        step_ms=step_ms,
        behind_ms=-steady.behind_ms,
        advice="the store's time goes on without the step; check the time service of the store's machine",
    )


def say_followed(jump_ms: int) -> None:
    log.warning("store_clock_adjusted", jump_ms=jump_ms)
