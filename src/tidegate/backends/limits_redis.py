"""The Limits port with Redis in between: the store lends blocks of budget, Redis deals them out.

    take from the block in Redis  --none-->  one process borrows a block from the store, takes its own part, puts the rest into Redis

Everything that Redis holds was charged in the store before, so what Redis forgets, repeats or loses
can only lose budget, never make any. A block lies under the run id of the server that it was given
to: after a restart or a fail-over, no process reads what an older server may still remember. Its
life is measured by that server's clock from a moment before the store was asked, so it ends before
the store's own grant does. What is left of a block goes back to the store with the next one.
Without Redis every question goes to the store, and those about money always do.
"""

import asyncio
import hashlib
from collections.abc import Mapping, Sequence
from contextlib import suppress

from msgspec.structs import replace

from tidegate.backends.redis_line import RedisAway, RedisLine
from tidegate.core.budgets.budget import GRANT_MS, NEVER_MS, Budget, BudgetRequest, Grant, Settlement
from tidegate.core.budgets.deal import check
from tidegate.core.errors import LimitsUnavailable
from tidegate.core.ports import Limits

_TIMEOUT_S = 0.1
_BUSY_TRIES_MAX = 5
_BUSY_S = 0.01
_LENDER_MS = 100
_BLOCK_REQUESTS_MAX = 1_000
# The store may have room again earlier, so a process waits no longer than this before one looks.
_REST_MS_MAX = 250
_LONG_MS = 10**12


class RedisLimits:
    """`store` is who lends; `name` tells installations apart that use one Redis."""

    def __init__(self, url: str, name: str, store: Limits, timeout_s: float = _TIMEOUT_S) -> None:
        self._store = store
        self._name = name
        self._line = RedisLine(url, ("take", "deposit"), timeout_s)
        self._deposits: set[asyncio.Task[bool]] = set()

    async def debit(self, asks: Sequence[BudgetRequest]) -> list[Grant]:
        for ask in asks:
            check(ask)
        if len(asks) == 1:
            return [await self._debit(asks[0])]
        grants = await asyncio.gather(*(self._debit(ask) for ask in asks), return_exceptions=True)
        for grant in grants:
            if isinstance(grant, BaseException):
                raise grant
        return [grant for grant in grants if isinstance(grant, Grant)]

    async def settle_grants(self, settlements: Sequence[Settlement]) -> None:
        await self._store.settle_grants(settlements)

    async def share_slots(
        self, worker_id: str, wanted: Mapping[str, int], in_use: Mapping[str, int], caps: Mapping[str, int]
    ) -> dict[str, int]:
        return await self._store.share_slots(worker_id, wanted, in_use, caps)

    async def _debit(self, ask: BudgetRequest) -> Grant:
        if any(budget.in_money for budget in ask.budgets):
            # A block that is lost comes back with the next minute; money of a month or a lifetime would not, so nothing of it is lent.
            return await self._ask_store(ask)
        each = -(-ask.tokens // ask.requests)
        try:
            run_id = await self._line.run_id()
            key = f"{self._name}:{run_id}:{_digest(ask.budgets)}"
            for tries in range(_BUSY_TRIES_MAX):
                fresh = 0 if tries else ask.requests
                words = (ask.requests, each, fresh, _LENDER_MS)
                kind, *reply = await self._line.call("take", key, *words, run_id=run_id)
                if kind == b"granted":
                    count, left_ms, grant_id = reply
                    return Grant(grant_id.decode(), count, count * each, min(GRANT_MS, left_ms))
                if kind == b"resting":
                    wait_ms, spent, left_tokens = reply
                    wait_ms = NEVER_MS if wait_ms > _LONG_MS // 2 else max(1, wait_ms)
                    return Grant("", 0, 0, 0, wait_ms, spent.decode(), left_tokens)
                if kind == b"lend":
                    server_ms, demand = reply
                    return await self._borrow(ask, each, key, run_id, server_ms, demand)
                await asyncio.sleep(_BUSY_S)
            # The block of another process has this part too; what is left of it comes back.
            grant = await self._ask_store(ask)
            return grant if grant.wait_ms == NEVER_MS else replace(grant, wait_ms=min(grant.wait_ms, _REST_MS_MAX))
        except RedisAway:
            pass
        return await self._ask_store(ask)

    async def _ask_store(self, ask: BudgetRequest) -> Grant:
        [grant] = await self._store.debit([ask])
        return grant

    async def _borrow(self, ask: BudgetRequest, each: int, key: str, run_id: str, server_ms: int, demand: int) -> Grant:
        """Ask the store for what all processes lately asked for, keep our own part and leave the rest to the others."""
        count = min(max(ask.requests, demand), max(ask.requests, _BLOCK_REQUESTS_MAX))
        tokens = ask.tokens if count == ask.requests else count * each
        [lent] = await self._store.debit([BudgetRequest(ask.budgets, count, tokens)])
        own = min(lent.requests, ask.requests)
        spare = lent.requests - own
        rest_ms = min(lent.wait_ms, _REST_MS_MAX)
        words = (spare, spare * each, server_ms, server_ms + GRANT_MS, lent.id, rest_ms, each)
        wait_till = server_ms + min(lent.wait_ms, _LONG_MS)
        deposit = asyncio.create_task(
            self._deposit(ask.budgets, key, run_id, (*words, wait_till, lent.spent, lent.left_tokens))
        )
        self._deposits.add(deposit)
        deposit.add_done_callback(self._deposits.discard)
        short = own < ask.requests
        wait_ms = lent.wait_ms if short else 0
        if short and await asyncio.shield(deposit):
            # The store did not know of what came back when it named that moment.
            wait_ms = min(wait_ms, _REST_MS_MAX)
        return Grant(
            lent.id,
            own,
            min(lent.tokens, ask.tokens if own == ask.requests else own * each),
            lent.lasts_ms,
            wait_ms,
            lent.spent if short else "",
            lent.left_tokens if short else 0,
            rooms=lent.rooms,
        )

    async def _deposit(self, budgets: tuple[Budget, ...], key: str, run_id: str, words: Sequence[str | int]) -> bool:
        """Put a block down; True when something of the last one went back to the store."""
        try:
            grant_id, requests, tokens = await self._line.call("deposit", key, *words, run_id=run_id)
        except RedisAway:
            return False
        if requests > 0:
            # What the store cannot enter now it enters with the next settlement.
            with suppress(LimitsUnavailable):
                await self._store.settle_grants([Settlement(grant_id.decode(), budgets, requests, max(0, tokens), 0)])
        return bool(requests > 0)

    async def close(self) -> None:
        for deposit in list(self._deposits):
            deposit.cancel()
        await asyncio.gather(*self._deposits, return_exceptions=True)
        await self._line.close()


def _digest(budgets: Sequence[Budget]) -> str:
    """Return a key that is equal for equal sets of budgets, in any order."""
    text = "\n".join(sorted(f"{budget.id!r} {budget.limits!r}" for budget in budgets))
    return hashlib.sha256(text.encode()).hexdigest()[:32]
