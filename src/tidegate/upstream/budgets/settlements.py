"""The settlements of permits, handed to the Limits port in batches and soon.

A settlement is handed over once: twice would give back more than was taken. The Limits port keeps
settlements that it could not enter, and is asked again until it has entered them. Otherwise money
that was set aside in a month or a lifetime would never come back.
"""

import asyncio

import structlog

from tidegate.core.budgets.budget import Settlement
from tidegate.core.errors import LimitsUnavailable
from tidegate.core.ports import Limits
from tidegate.upstream.budgets.spent_budgets import Budgets, SpentBudgets

log = structlog.get_logger(__name__)

SETTLE_S = 0.05
# The pause between two tries while the Limits port is away.
AGAIN_S = 0.5
SETTLEMENTS_MAX = 50_000


class Settlements:
    """Open settlements. A budget that got something back is asked again sooner."""

    def __init__(self, limits: Limits | None, spent: SpentBudgets) -> None:
        self._limits = limits
        self._spent = spent
        # A debit returns grants that share an id; (id, budgets) is unique.
        self._open: dict[tuple[str, Budgets], Settlement] = {}
        self._settling: asyncio.Task[None] | None = None
        self._closed = False

    def add(self, settlement: Settlement) -> None:
        if len(self._open) >= SETTLEMENTS_MAX:
            # Without a settlement, a reservation stays until it leaves its window, so the limit
            # still holds.
            return
        key = (settlement.grant_id, settlement.budgets)
        other = self._open.get(key)
        self._open[key] = settlement if other is None else other.plus(settlement)
        if self._settling is None:
            self._settling = asyncio.create_task(self._settle_while_any_is_open())

    async def _settle_while_any_is_open(self) -> None:
        is_away, unfreed = False, set[Budgets]()
        try:
            while self._open or is_away:
                if is_away or not self._closed:
                    await asyncio.sleep(AGAIN_S if is_away else SETTLE_S)
                settlements, self._open = list(self._open.values()), {}
                unfreed.update(one.budgets for one in settlements if one.gives_back)
                assert self._limits is not None
                try:
                    await self._limits.settle_grants(settlements)
                except LimitsUnavailable as error:
                    if not is_away:
                        log.warning("settlement_postponed", why=str(error))
                    is_away = True
                    continue
                except Exception as error:
                    # Without a settlement a reservation stays, so the limit holds; later
                    # settlements still count.
                    log.warning("settlement_failed", kind=type(error).__name__, why=str(error))
                else:
                    for budgets in unfreed:
                        self._spent.free(budgets)
                is_away, unfreed = False, set()
        finally:
            self._settling = None

    async def close(self, timeout_s: float) -> None:
        """Hand over open settlements, and wait at most `timeout_s` for it."""
        self._closed = True
        if self._settling is not None:
            await asyncio.wait({self._settling}, timeout=timeout_s)
        if self._settling is not None:
            self._settling.cancel()
            await asyncio.gather(self._settling, return_exceptions=True)
