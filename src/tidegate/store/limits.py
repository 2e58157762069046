"""The Limits port answered by the store: the truth about budgets and slots, and the default.

Debits that several callers of one process ask at the same time go in one transaction; settlements too. A caller that goes away takes
nothing with it but its own grant, which dies unused. Settlements that could not be entered, or may have been, are sent again under their
number before any others: the store counts them once, so nothing is given back twice and no money stays set aside for ever.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence

from tidegate.core.budgets.budget import BudgetRequest, Grant, Settlement
from tidegate.core.budgets.deal import check
from tidegate.core.errors import LimitsUnavailable, StoreUnavailable
from tidegate.store.store import Store

_ASKS_PER_DEBIT_MAX = 1_000
_SETTLEMENTS_MAX = 10_000


class StoreLimits:
    """Limits kept in the store. `writer` is a name that no other process has. `holder` is the incarnation whose calls they are, asked each
    time; calls without one count as in flight for an hour."""

    def __init__(self, store: Store, writer: str, holder: Callable[[], str] = lambda: "") -> None:
        self._store = store
        self._writer = writer
        self._holder = holder
        self._asked: list[tuple[Sequence[BudgetRequest], asyncio.Future[list[Grant]]]] = []
        self._debiting: asyncio.Task[None] | None = None
        self._settling = asyncio.Lock()
        self._to_settle: list[Settlement] = []
        # What was sent under the last number, until it is known to be entered.
        self._sent: list[Settlement] = []
        self._number = 0

    async def debit(self, asks: Sequence[BudgetRequest]) -> list[Grant]:
        if not asks:
            return []
        for ask in asks:
            # One that cannot be meant fails its own caller, not those whose asks go in the same transaction.
            check(ask)
        answer: asyncio.Future[list[Grant]] = asyncio.get_running_loop().create_future()
        self._asked.append((asks, answer))
        if self._debiting is None or self._debiting.done():
            self._debiting = asyncio.create_task(self._debit_all())
        return await answer

    async def _debit_all(self) -> None:
        """One transaction after the other, each for everything that was asked meanwhile."""
        while self._asked:
            some: list[tuple[Sequence[BudgetRequest], asyncio.Future[list[Grant]]]] = []
            count = 0
            while self._asked and (not some or count + len(self._asked[0][0]) <= _ASKS_PER_DEBIT_MAX):
                some.append(self._asked.pop(0))
                count += len(some[-1][0])
            waiting = [(asks, answer) for asks, answer in some if not answer.done()]
            try:
                grants = await self._store.debit_budgets([ask for asks, _ in waiting for ask in asks], self._holder())
            except BaseException as error:
                for _, answer in waiting:
                    if not answer.done():
                        answer.set_exception(_explained(error))
                if not isinstance(error, Exception):
                    raise
                continue
            for asks, answer in waiting:
                mine, grants = grants[: len(asks)], grants[len(asks) :]
                if not answer.done():
                    answer.set_result(mine)

    async def settle_grants(self, settlements: Sequence[Settlement]) -> None:
        self._to_settle = [*self._to_settle, *settlements][-_SETTLEMENTS_MAX:]
        async with self._settling:
            while self._sent or self._to_settle:
                if not self._sent:
                    self._number += 1
                    self._sent, self._to_settle = self._to_settle, []
                try:
                    await self._store.settle_budgets(self._sent, self._writer, self._number, self._holder())
                except StoreUnavailable as error:
                    raise _explained(error) from error
                except Exception:
                    # It would fail each time, and nothing behind it would ever be entered.
                    self._sent = []
                    raise
                self._sent = []

    async def share_slots(
        self, worker_id: str, wanted: Mapping[str, int], in_use: Mapping[str, int], caps: Mapping[str, int]
    ) -> dict[str, int]:
        try:
            return await self._store.share_slots(worker_id, wanted, in_use, caps)
        except StoreUnavailable as error:
            raise _explained(error) from error


def _explained(error: BaseException) -> BaseException:
    if isinstance(error, StoreUnavailable):
        return LimitsUnavailable(f"shared limits cannot be asked: {error}")
    if isinstance(error, Exception):
        return error
    return LimitsUnavailable("this process is stopping: nothing new is sent")
