"""The Limits port through Redis: the store lends blocks of budget, and Redis deals them out.

A process takes from the block in Redis. If there is none, one process borrows a block from the
store, takes its own part and puts the rest into Redis.

- Redis holds only budget that was charged in the store before. So whatever Redis forgets, repeats
  or loses can only lose budget, never create any.
- A block is stored under the run id of its server. After a restart or a fail-over, no process reads
  a block of an older server.
- The life of a block is measured by that server's clock, from a moment before the store was asked.
  So it ends before the store's own grant does.
- The rest of a block goes back to the store with the next block.
- Without Redis all requests go to the store. Requests for money always do.
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
# The store may have room again earlier, so no process waits longer than this before one asks again.
_REST_MS_MAX = 250
_LONG_MS = 10**12


class RedisLimits:
    """The limits of an installation.

    `store` lends; `name` is unique for each installation in one Redis.
    """

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
            # A lost block of requests comes back with the next minute; money of a month would not,
            # so it is not lent.
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
            # The block that another process fetches includes this part too; its rest goes back to
            # the store.
            grant = await self._ask_store(ask)
            return grant if grant.wait_ms == NEVER_MS else replace(grant, wait_ms=min(grant.wait_ms, _REST_MS_MAX))
        except RedisAway:
            pass
        return await self._ask_store(ask)

    async def _ask_store(self, ask: BudgetRequest) -> Grant:
        [grant] = await self._store.debit([ask])
        return grant

    async def _borrow(self, ask: BudgetRequest, each: int, key: str, run_id: str, server_ms: int, demand: int) -> Grant:
        """Borrow what all processes asked for lately, and leave to others what is not ours."""
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
            # The rest of the last block came back to the store after it computed that wait.
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
        """Put a block into Redis.

        Return whether a rest of the last block went back to the store.
        """
        try:
            grant_id, requests, tokens = await self._line.call("deposit", key, *words, run_id=run_id)
        except RedisAway:
            return False
        if requests > 0:
            # If the store is away, the next settlement includes this one.
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
