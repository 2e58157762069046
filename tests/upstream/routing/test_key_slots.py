"""Slots of a key, a user or a tenant that several processes share: a part is asked for while it is needed, used and given back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from tests.support.ports import HandClock
from tidegate.core.errors import Withheld
from tidegate.upstream.routing import key_slots
from tidegate.upstream.routing.key_slots import AGAIN_MS, KeySlots, TakenKeySlots
from tidegate.upstream.routing.slots import ModelSlots, SlotDemand

pytestmark = pytest.mark.anyio

KEY = (("key:k", 5),)


def shared(safe_until_ms: Callable[[], float] = lambda: 2_000_000.0) -> tuple[SlotDemand, KeySlots]:
    demand = SlotDemand(lambda: "me", ModelSlots({}, 0, is_alone=False), safe_until_ms)
    return demand, KeySlots(demand, HandClock())


async def waiting(parallel: KeySlots, count: int) -> list[asyncio.Task[TakenKeySlots]]:
    tasks = [asyncio.create_task(parallel.take_slots(KEY)) for _ in range(count)]
    await asyncio.sleep(0)
    return tasks


async def turns() -> None:
    for _ in range(4):
        await asyncio.sleep(0)


async def leave(tasks: list[asyncio.Task[TakenKeySlots]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_share_that_comes_lets_as_many_go_as_it_has_slots() -> None:
    demand, parallel = shared()
    tasks = await waiting(parallel, 4)
    await demand.wait(60, is_urgent=True)
    [slots] = parallel.slots()
    assert (slots.name, slots.wanted(), slots.share) == ("parallel:key:k", 4, 0)
    slots.grant(3)
    parallel.has_shares()
    await turns()
    assert [task.done() for task in tasks] == [False] * 4, "the share was another life's"
    demand.given_to("me")
    parallel.has_shares()
    await turns()
    gone, left = [task for task in tasks if task.done()], [task for task in tasks if not task.done()]
    assert (len(gone), [task.result().until_ms for task in gone]) == (3, [2_000_000.0] * 3)
    more = await waiting(parallel, 3)
    assert slots.wanted() == 5, "not more than the cap"
    await leave([*left, *more])
    for task in gone:
        task.result().release_key_slots()
    parallel.has_shares()
    assert list(parallel.slots()) == [slots], "what is shared goes when its share does"
    slots.grant(0)
    parallel.has_shares()
    assert not parallel.slots()


async def test_nothing_goes_on_slots_that_may_be_anothers() -> None:
    until_ms = 1_000_000.0
    demand, parallel = shared(lambda: until_ms)
    demand.given_to("me")
    tasks = await waiting(parallel, 1)
    [slots] = parallel.slots()
    slots.grant(1)
    parallel.has_shares()
    await turns()
    assert not tasks[0].done()
    until_ms += 1
    parallel.has_shares()
    await turns()
    assert tasks[0].done()


async def test_one_that_leaves_when_its_turn_has_come_passes_it_on() -> None:
    parallel = KeySlots(SlotDemand(None, ModelSlots({}, 0, is_alone=True)), HandClock())
    one = (("key:k", 1),)
    held = await parallel.take_slots(one)
    tasks = [asyncio.create_task(parallel.take_slots(one)) for _ in range(2)]
    await asyncio.sleep(0)
    held.release_key_slots()
    tasks[0].cancel()
    taken = await tasks[1]
    taken.release_key_slots()
    assert not parallel.slots()


async def test_one_that_waited_in_vain_is_put_off_for_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_slots, "WAIT_S", 0.0)
    _, parallel = shared()
    with pytest.raises(Withheld) as put_off:
        await parallel.take_slots(KEY)
    assert (put_off.value.until_ms, put_off.value.retry_after_ms) == (1_000_000.0 + AGAIN_MS, AGAIN_MS)
    [slots] = parallel.slots()
    assert slots.wanted() == 0
