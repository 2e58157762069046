"""How long a process may begin calls after a heartbeat: always less than its lease, counted from before it asked."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.ports import FairDice, HandClock
from tidegate.core.nouns import Holding
from tidegate.worker.registration import Registration

pytestmark = pytest.mark.anyio

LEASE_MS = 30_000


class SlowStore:
    """A store that takes its time; `lost` says that the process was declared gone."""

    def __init__(self, clock: HandClock) -> None:
        self._clock = clock
        self.takes_ms = 0
        self.lost = False

    async def enlist_worker(self, *words: Any) -> None:
        self._clock.advance(self.takes_ms)

    async def beat(self, worker_id: str, lease_ms: int) -> list[Holding] | None:
        self._clock.advance(self.takes_ms)
        return None if self.lost else []

    async def declare_gone(self, worker_id: str, *, leaving: bool) -> None:
        self._clock.advance(self.takes_ms)


@pytest.mark.parametrize("takes_ms", [0, 400, 29_000])
async def test_no_call_begins_in_the_last_part_of_a_lease(takes_ms: int) -> None:
    """The store counts the lease from when it was asked or later, so both ends are on the safe side by a sixth of it."""
    clock = HandClock()
    store = SlowStore(clock)
    incarnation = Registration(
        store,  # type: ignore[arg-type]
        clock,
        FairDice(),
        host="here",
        version="1",
        lease_ms=LEASE_MS,
    )
    store.takes_ms = takes_ms
    for ask in (incarnation.begin, incarnation.beat):
        asked_ms = clock.monotonic
        await ask()
        assert incarnation.safe_until_ms == asked_ms + LEASE_MS * 5 / 6
    store.lost = True
    assert await incarnation.beat() is None
    assert incarnation.safe_until_ms == 0.0
    store.lost = False
    await incarnation.begin()
    await incarnation.leave()
    assert incarnation.safe_until_ms == 0.0
