"""Limits that deployments reported: when they are written for other processes, and when those of others are read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.ports import HandClock
from tests.upstream.limits import MemoryLimits, minute
from tests.upstream.raw_server import eventually
from tidegate.core.budgets.budget import Limit
from tidegate.core.errors import StoreError
from tidegate.upstream.routing import discovered_limits
from tidegate.upstream.routing.discovered_limits import DiscoveredLimits

pytestmark = pytest.mark.anyio


class Kept(MemoryLimits):
    """Counts what it is asked."""

    def __init__(self) -> None:
        super().__init__(HandClock())
        self.reads = self.writes = 0

    async def put_discovered(self, deployment: str, limit: Limit) -> None:
        self.writes += 1
        await super().put_discovered(deployment, limit)

    async def discovered(self) -> dict[str, Limit]:
        self.reads += 1
        if self.away:
            raise StoreError("the store is away")
        return await super().discovered()


def state_of(discovered: Limit | None = None) -> Any:
    state = SimpleNamespace(deployment=SimpleNamespace(name="one"), discovered=discovered)
    state.discover = lambda limit: setattr(state, "discovered", limit)
    return state


@asynccontextmanager
async def sharing(kept: Kept, state: Any) -> AsyncIterator[DiscoveredLimits]:
    shared = DiscoveredLimits(kept, {"one": state})
    try:
        yield shared
    finally:
        await shared.close()
        assert shared._task.done()


async def a_few_turns() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_limits_are_read_at_the_start_and_then_only_with_news(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovered_limits, "WRITE_AFTER_S", 0)
    kept, state = Kept(), state_of()
    kept.reported["one"] = minute(requests=7)
    async with sharing(kept, state) as shared:
        await eventually(lambda: state.discovered == minute(requests=7), "the limit that another process found")
        await a_few_turns()
        assert (kept.reads, kept.writes) == (1, 0)
        state.discovered = minute(requests=5)
        shared.note(state)
        await eventually(lambda: kept.reads == 2, "the next read")
        assert (kept.reported["one"], state.discovered, kept.writes) == (minute(requests=5), minute(requests=5), 1)


async def test_answers_that_come_together_are_one_write(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovered_limits, "WRITE_AFTER_S", 600)
    kept = Kept()
    async with sharing(kept, state := state_of(minute(requests=5))) as shared:
        await eventually(lambda: kept.reads == 1, "the first read")
        shared.note(state)
        await a_few_turns()
        assert kept.writes == 0, "more answers may report the same limits"


async def test_limits_are_shared_again_once_the_store_is_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovered_limits, "READ_EVERY_S", 0.001)
    kept, state = Kept(), state_of()
    kept.away = True
    async with sharing(kept, state):
        await eventually(lambda: kept.reads > 1, "a second attempt")
        kept.away = False
        kept.reported["one"] = minute(requests=7)
        await eventually(lambda: state.discovered is not None, "the limit")


async def test_a_limit_whose_write_failed_is_written_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovered_limits, "READ_EVERY_S", 0.001)
    monkeypatch.setattr(discovered_limits, "WRITE_AFTER_S", 0)
    kept, state, failures = Kept(), state_of(minute(requests=5)), [StoreError("the store is away")]
    put_discovered = kept.put_discovered

    async def fails_once(deployment: str, limit: Limit) -> None:
        if failures:
            raise failures.pop()
        await put_discovered(deployment, limit)

    monkeypatch.setattr(kept, "put_discovered", fails_once)
    kept.reported["one"] = minute(requests=7)
    async with sharing(kept, state) as shared:
        shared.note(state)
        await eventually(lambda: kept.reported["one"] == minute(requests=5), "the second write")
    assert state.discovered == minute(requests=5)


async def test_a_limit_that_is_reported_while_another_one_is_written_is_written_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was forgotten, and gave way to the older one that was read right afterwards."""
    monkeypatch.setattr(discovered_limits, "WRITE_AFTER_S", 0)
    kept, state = Kept(), state_of(minute(requests=5))
    put_discovered = kept.put_discovered

    async def reported_meanwhile(deployment: str, limit: Limit) -> None:
        await put_discovered(deployment, limit)
        if limit == minute(requests=5):
            state.discovered = minute(requests=3)
            shared.note(state)

    monkeypatch.setattr(kept, "put_discovered", reported_meanwhile)
    async with sharing(kept, state) as shared:
        shared.note(state)
        await eventually(lambda: kept.writes == 2, "the second write")
        await a_few_turns()
    assert (kept.reported["one"], state.discovered) == (minute(requests=3), minute(requests=3))
