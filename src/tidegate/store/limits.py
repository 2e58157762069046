"""The Limits port over the store, which holds the truth about budgets and slots.

This is the default.

- Debits of several callers at the same time go in one transaction, and so do settlements.
- The grant of a caller that went away is given back.
- A debit whose commit is unknown is released under its number before the next debit, or soon if
  there is none.
- Settlements that failed, or may have been written, are sent again under their number before any
  others. The store counts each number once.

So nothing is given back twice, and neither money nor tokens stay reserved for ever.
"""

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence

import structlog

from tidegate.core.budgets.budget import BudgetRequest, Grant, Settlement
from tidegate.core.budgets.deal import check
from tidegate.core.errors import LimitsUnavailable, StoreUnavailable
from tidegate.store.store import Store
from tidegate.store.tenants.budgets import DebitAttempt

log = structlog.get_logger(__name__)

_ASKS_PER_DEBIT_MAX = 1_000
_SETTLEMENTS_MAX = 10_000
_RELEASE_AGAIN_S = 1.0


class StoreLimits:
    """The limits in the store.

    `writer` is the unique name of this process. `holder` returns the incarnation that makes the
    calls; calls without one count as in flight for an hour.
    """

    def __init__(self, store: Store, writer: str, holder: Callable[[], str] = lambda: "") -> None:
        self._store = store
        self._writer = writer
        self._holder = holder
        self._asked: list[tuple[Sequence[BudgetRequest], asyncio.Future[list[Grant]]]] = []
        self._asked_more = asyncio.Event()
        self._debiting: asyncio.Task[None] | None = None
        self._debit_number = -1
        # The last debit, while it is unknown whether it was committed.
        self._doubtful: DebitAttempt | None = None
        self._settling = asyncio.Lock()
        self._to_settle: list[Settlement] = []
        # The settlements that were sent under the last number, until they are known to be written.
        self._sent: list[Settlement] = []
        self._number = 0

    async def debit(self, asks: Sequence[BudgetRequest]) -> list[Grant]:
        if not asks:
            return []
        for ask in asks:
            # A wrong request fails only its own caller, not the others in the same transaction.
            check(ask)
        answer: asyncio.Future[list[Grant]] = asyncio.get_running_loop().create_future()
        self._asked.append((asks, answer))
        self._asked_more.set()
        if self._debiting is None or self._debiting.done():
            self._debiting = asyncio.create_task(self._debit_all())
        return await answer

    async def _debit_all(self) -> None:
        """Run one transaction after the other, each for all debits that were asked meanwhile."""
        while self._asked or self._doubtful is not None:
            if not self._asked:
                await self._release_soon()
                continue
            some: list[tuple[Sequence[BudgetRequest], asyncio.Future[list[Grant]]]] = []
            count = 0
            while self._asked and (not some or count + len(self._asked[0][0]) <= _ASKS_PER_DEBIT_MAX):
                some.append(self._asked.pop(0))
                count += len(some[-1][0])
            waiting = [(asks, answer) for asks, answer in some if not answer.done()]
            try:
                grants = await self._debit_once([ask for asks, _ in waiting for ask in asks])
            except BaseException as error:
                for _, answer in waiting:
                    if not answer.done():
                        answer.set_exception(_explained(error))
                if not isinstance(error, Exception):
                    raise
                continue
            for asks, answer in waiting:
                mine, grants = grants[: len(asks)], grants[len(asks) :]
                if answer.done():
                    self._to_settle += [
                        Settlement(grant.id, ask.budgets, grant.requests, grant.tokens, 0, grant.nano)
                        for ask, grant in zip(asks, mine, strict=True)
                        if grant.requests
                    ]
                else:
                    answer.set_result(mine)

    async def _debit_once(self, asks: Sequence[BudgetRequest]) -> list[Grant]:
        # Once a later number is used, the doubtful debit could not be released any more.
        await self._release()
        self._debit_number += 2
        attempt = DebitAttempt(asks, f"{self._writer} debits", self._debit_number, self._holder())
        try:
            return await self._store.debit_budgets(asks, attempt.holder, attempt)
        except StoreUnavailable:
            self._doubtful = attempt if attempt.grants else None
            raise

    async def _release(self) -> None:
        if self._doubtful is None:
            return
        try:
            await self._store.release_debit(self._doubtful)
        except StoreUnavailable:
            raise
        except Exception as error:
            # It would fail each time and block all later debits. What it took stays taken, so the
            # limits hold.
            log.warning("debit_release_failed", kind=type(error).__name__, why=str(error))
        self._doubtful = None

    async def _release_soon(self) -> None:
        """Release the doubtful debit.

        If the store is away, wait a little, or until the next debit.
        """
        self._asked_more.clear()
        try:
            await self._release()
        except StoreUnavailable:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_RELEASE_AGAIN_S):
                    await self._asked_more.wait()

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
                    # It would fail each time and block all later settlements.
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
