"""The slots of a tenant: who waits, who is refused, and what becomes of the slot of one who leaves."""

from __future__ import annotations

import asyncio

import pytest

from tidegate.core.errors import ApiProblem
from tidegate.web.http.tenant_slots import WAITING_MAX, TenantSlots

pytestmark = pytest.mark.anyio


async def hold(slots: TenantSlots, has_begun: asyncio.Event) -> None:
    async with slots.taken("acme"):
        has_begun.set()
        await asyncio.Event().wait()


async def a_few_turns() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def end(*tasks: asyncio.Task[None]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_so_many_wait_for_a_slot_and_one_more_is_refused_without_a_wait() -> None:
    slots = TenantSlots(1, "too_many", "Wait.", 1, wait_s=300)
    async with slots.taken("acme"):
        waiting = [asyncio.create_task(hold(slots, asyncio.Event())) for _ in range(WAITING_MAX)]
        await a_few_turns()
        one_more = asyncio.create_task(hold(slots, asyncio.Event()))
        await a_few_turns()
        assert one_more.done()
        refused = one_more.exception()
        assert isinstance(refused, ApiProblem)
        assert (refused.status, refused.code) == (429, "too_many")
        assert not slots.are_taken("globex"), "nor does it hold up another tenant"
        await end(*waiting)
    assert not slots.are_taken("acme")
    assert not slots._lines, "nothing is kept of a tenant that has nothing under way"


async def test_one_that_leaves_when_its_turn_has_come_passes_the_slot_on() -> None:
    slots = TenantSlots(1, "too_many", "Wait.", 1, wait_s=300)
    left, got = asyncio.Event(), asyncio.Event()
    async with slots.taken("acme"):
        leaving, staying = asyncio.create_task(hold(slots, left)), asyncio.create_task(hold(slots, got))
        await a_few_turns()
    await end(leaving)
    await a_few_turns()
    assert (left.is_set(), got.is_set()) == (False, True)
    await end(staying)
    assert not slots.are_taken("acme")
