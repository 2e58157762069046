"""What became of a permit: settled with the Limits port in batches, soon enough that what was not sent still counts as unsent.

A settlement is said once: said twice, what goes back would make budget. Who keeps the budgets sees to it that debts are not forgotten.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from tidegate.core.budgets.budget import Budget, Settlement
from tidegate.core.ports import Limits

log = structlog.get_logger(__name__)

Budgets = tuple[Budget, ...]

SETTLE_S = 0.05
SETTLEMENTS_MAX = 50_000


@dataclass(slots=True)
class _Bill:
    unsent: int = 0
    reserved: int = 0
    used: int = 0
    reserved_nano: int = 0
    used_nano: int = 0


class Settlements:
    """`freed` hears of budgets that were given something back."""

    def __init__(self, limits: Limits | None, freed: Callable[[Budgets], None] = lambda budgets: None) -> None:
        self._limits = limits
        self._freed = freed
        # Grants of one question have the same id: only with its budgets is one told from another.
        self._bills: dict[tuple[str, Budgets], _Bill] = {}
        self._settling: asyncio.Task[None] | None = None
        self._closed = False

    def add(
        self,
        grant_id: str,
        budgets: Budgets,
        *,
        unsent: int,
        reserved: int,
        used: int,
        reserved_nano: int = 0,
        used_nano: int = 0,
    ) -> None:
        if len(self._bills) >= SETTLEMENTS_MAX:
            # What is never settled stays reserved until it leaves its window: that errs on the side of the limit.
            return
        bill = self._bills.setdefault((grant_id, budgets), _Bill())
        bill.unsent += unsent
        bill.reserved += reserved
        bill.used += used
        bill.reserved_nano += reserved_nano
        bill.used_nano += used_nano
        if self._settling is None:
            self._settling = asyncio.create_task(self._settle_while_any_is_open())

    async def _settle_while_any_is_open(self) -> None:
        try:
            while self._bills:
                if not self._closed:
                    await asyncio.sleep(SETTLE_S)
                bills, self._bills = self._bills, {}
                settlements = [
                    Settlement(
                        grant_id, budgets, bill.unsent, bill.reserved, bill.used, bill.reserved_nano, bill.used_nano
                    )
                    for (grant_id, budgets), bill in bills.items()
                ]
                assert self._limits is not None
                try:
                    await self._limits.settle(settlements)
                except Exception as error:
                    # It may have been heard. What is not settled stays reserved, so the limit holds, and the next bills are worth saying.
                    log.warning("settlement_failed", kind=type(error).__name__, why=str(error))
                    continue
                for (_, budgets), bill in bills.items():
                    if bill.unsent or bill.used < bill.reserved or bill.used_nano < bill.reserved_nano:
                        self._freed(budgets)
        finally:
            self._settling = None

    async def close(self, timeout_s: float) -> None:
        """Settle what is known, without waiting any longer than this."""
        self._closed = True
        if self._settling is not None:
            await asyncio.wait({self._settling}, timeout=timeout_s)
        if self._settling is not None:
            self._settling.cancel()
            await asyncio.gather(self._settling, return_exceptions=True)
