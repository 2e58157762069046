"""How long a process may begin calls after a heartbeat: always less than its lease, counted from before it asked."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.support.ports import FairDice, HandClock
from tidegate.core.errors import StoreUnavailable
from tidegate.core.nouns import Holding
from tidegate.worker.registration import Registration, beat_until

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
    for ask in (incarnation.enlist, incarnation.beat):
        asked_ms = clock.monotonic
        await ask()
        assert incarnation.safe_until_ms == asked_ms + LEASE_MS * 5 / 6
    store.lost = True
    assert await incarnation.beat() is None
    assert incarnation.safe_until_ms == 0.0
    store.lost = False
    await incarnation.enlist()
    await incarnation.leave()
    assert incarnation.safe_until_ms == 0.0


class Noting(SlowStore):
    """Notes which workers were enlisted and which left; the third heartbeat says that the process was declared gone."""

    def __init__(self, clock: HandClock) -> None:
        super().__init__(clock)
        self.events: list[tuple[str, str]] = []
        self.beats = 0
        self.done = asyncio.Event()

    async def enlist_worker(self, *words: Any) -> None:
        self.events.append(("enlisted", words[0]))

    async def beat(self, worker_id: str, lease_ms: int) -> list[Holding] | None:
        self.beats += 1
        if self.beats == 2:
            raise StoreUnavailable("away")
        if self.beats == 5:
            self.done.set()
        return None if self.beats == 3 else []

    async def declare_gone(self, worker_id: str, *, leaving: bool) -> None:
        assert leaving
        self.events.append(("left", worker_id))


async def test_a_process_without_a_worker_beats_until_it_stops_and_begins_again_when_it_was_declared_gone() -> None:
    clock = HandClock()
    store: Any = Noting(clock)
    me = Registration(store, clock, FairDice(), host="here", version="1", lease_ms=LEASE_MS)
    await me.enlist()
    first, stop = me.id, asyncio.Event()
    beating = asyncio.create_task(beat_until(stop, me, 1))
    async with asyncio.timeout(60):
        await store.done.wait()
        assert not me.has_left
        stop.set()
        await beating
    assert me.id != first
    assert store.events == [("enlisted", first), ("enlisted", me.id), ("left", me.id)]
    assert me.has_left


async def test_nothing_begins_at_the_very_end_of_the_safe_time_or_after_leaving() -> None:
    clock = HandClock()
    store: Any = SlowStore(clock)
    me = Registration(store, clock, FairDice(), host="here", version="1", lease_ms=LEASE_MS)
    assert not me.is_safe()
    await me.enlist()
    clock.advance(LEASE_MS * 5 / 6 - 1)
    assert me.is_safe()
    clock.advance(1)
    assert not me.is_safe()
    await me.beat()
    assert me.is_safe()
    await me.leave()
    assert not me.is_safe()
