"""Shared limits of every kind, each with several processes that use them, over a store whose clock stands still until a test moves it.

`send` writes down what was granted by the store's own moment, and the world judges at any time whether a window holds too much.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from tests.contracts.store_world import StoreWorld
from tests.support.faulty_driver import FaultyDriver
from tidegate.backends.limits_redis import RedisLimits
from tidegate.core.budgets.budget import GRANT_MS, Budget, BudgetRequest, Grant, Limit, LimitBound, Period
from tidegate.core.ports import Limits
from tidegate.store.limits import StoreLimits
from tidegate.store.store import Store

KINDS = ("sqlite", "postgresql", "redis")
# A slow machine must not look like a Redis that is away.
PATIENCE_S = 20.0
DEADLINE_S = 60.0


def minute(requests: int | None = None, tokens: int | None = None) -> Limit:
    return Limit(Period.MINUTE, requests, tokens)


def budget(name: str, *limits: Limit, bound: LimitBound = LimitBound.DEPLOYMENT) -> Budget:
    return Budget(bound, name, limits)


@dataclass
class LimitsWorld:
    stores: StoreWorld
    redis_url: str | None
    name: str = field(default_factory=lambda: f"t-{secrets.token_hex(8)}")
    granted: list[tuple[int, int, int]] = field(default_factory=list)
    _opened: list[RedisLimits] = field(default_factory=list)

    async def process(
        self, redis_url: str | None = None, faults: FaultyDriver | None = None, holder: str = ""
    ) -> Limits:
        """The limits as one more process sees them; `holder` is the worker that it is."""
        store = Store(faults) if faults else await self.stores.open_another()
        limits: Limits = StoreLimits(store, secrets.token_hex(8), lambda: holder)
        url = redis_url or self.redis_url
        if url is not None:
            self._opened.append(RedisLimits(url, self.name, limits, timeout_s=PATIENCE_S))
            limits = self._opened[-1]
        return limits

    async def faulty_process(self) -> tuple[Limits, FaultyDriver]:
        driver = FaultyDriver((await self.stores.open_another())._driver)
        return await self.process(faults=driver), driver

    async def send(self, limits: Limits, one: Budget, requests: int = 1, tokens: int = 0) -> Grant:
        """Ask a budget for requests and write down what was granted."""
        [grant] = await limits.debit([BudgetRequest((one,), requests, tokens)])
        self.note(grant)
        return grant

    def note(self, grant: Grant) -> None:
        if grant.requests:
            assert 0 <= grant.lasts_ms <= GRANT_MS
            self.granted.append((int(grant.id), grant.requests, grant.tokens))

    def judge(self, requests_max: int, period_ms: int = 60_000) -> None:
        """What was granted at g is sent until g + GRANT_MS: no such span, and so no window by send time, holds too much."""
        for first, _, _ in self.granted:
            within = sum(count for at, count, _ in self.granted if first <= at <= first + period_ms + GRANT_MS)
            assert within <= requests_max, f"{within} requests within a period of a limit of {requests_max}"

    @property
    def sent(self) -> int:
        return sum(count for _, count, _ in self.granted)

    async def exhaust(self, processes: list[Limits], one: Budget, requests: int = 1) -> None:
        """All processes ask until each gets nothing twice in a row."""

        async def ask(limits: Limits) -> None:
            refused = 0
            while refused < 2:
                grant = await self.send(limits, one, requests)
                refused = 0 if grant.requests else refused + 1
                assert grant.requests == requests or grant.wait_ms or grant.lasts_ms
                await asyncio.sleep(0)

        await asyncio.gather(*(ask(limits) for limits in processes))

    async def close(self) -> None:
        for limits in self._opened:
            await limits.close()


async def until_sent(world: LimitsWorld, processes: list[Limits], one: Budget, count: int) -> None:
    """Ask until so much was granted in all: what lay unused in a block finds its way back."""
    deadline = time.monotonic() + DEADLINE_S
    while world.sent < count:
        assert time.monotonic() < deadline, f"only {world.sent} of {count} were ever granted"
        await world.exhaust(processes, one)
        # A rest that was written to Redis, and a block's life, pass by Redis' own clock.
        await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def limits_world(stores: StoreWorld, redis_url: str | None) -> AsyncIterator[LimitsWorld]:
    world = LimitsWorld(stores, redis_url)
    try:
        yield world
    finally:
        await world.close()
