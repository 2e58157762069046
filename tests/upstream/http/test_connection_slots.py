"""The connection ceiling with a part kept for interactive calls: batch never has it, interactive goes first, nothing leaks."""

from __future__ import annotations

import asyncio

import pytest

from tidegate.core.deployments import HttpLimits
from tidegate.core.errors import PoolExhausted, SettingsError
from tidegate.upstream.http.connections import ConnectionSlots

pytestmark = pytest.mark.anyio


def slots(connections_max: int, kept: int) -> ConnectionSlots:
    limits = HttpLimits(connections_max=connections_max, kept_alive_max=1, interactive_connections=kept)
    return ConnectionSlots(limits)


async def test_batch_leaves_the_kept_part_alone() -> None:
    some = slots(4, 1)
    assert [some.take_slot(interactive=False) for _ in range(4)] == [True, True, True, False]
    assert some.free() == 0
    assert some.take_slot(interactive=True)
    assert not some.take_slot(interactive=True)
    some.release_slot(interactive=False)
    assert some.free() == 1
    assert some.take_slot(interactive=True), "what is free of all the rest is for interactive calls too"
    assert some.free() == 0


async def test_interactive_calls_go_first() -> None:
    some = slots(2, 1)
    assert some.take_slot(interactive=False)
    assert some.take_slot(interactive=True)
    batch = asyncio.create_task(some.wait(60, interactive=False))
    await asyncio.sleep(0)
    first = asyncio.create_task(some.wait(60, interactive=True))
    await asyncio.sleep(0)
    some.release_slot(interactive=False)
    await first
    assert not batch.done()
    some.release_slot(interactive=True)
    await batch
    assert some.free() == 0
    some.release_slot(interactive=True)
    some.release_slot(interactive=False)
    assert some.free() == 1


async def test_a_call_that_stops_waiting_takes_no_slot() -> None:
    some = slots(2, 0)
    assert some.take_slot(interactive=False)
    assert some.take_slot(interactive=False)
    with pytest.raises(PoolExhausted) as refused:
        await some.wait(0.01, interactive=True)
    assert refused.value.code == "upstream_pool_timeout"
    waiting = asyncio.create_task(some.wait(60, interactive=False))
    await asyncio.sleep(0)
    some.release_slot(interactive=False)
    # The slot was handed over, and in the same moment the waiting call is cancelled.
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert some.free() == 1
    assert some.take_slot(interactive=False)


@pytest.mark.parametrize("interactive", [False, True])
@pytest.mark.parametrize("handed_over", [False, True])
async def test_a_cancelled_waiter_leaves_every_slot_usable(interactive: bool, handed_over: bool) -> None:
    some = slots(2, 1)
    assert some.take_slot(interactive=False)
    assert some.take_slot(interactive=True)
    waiting = asyncio.create_task(some.wait(60, interactive=interactive))
    await asyncio.sleep(0)
    if handed_over:
        some.release_slot(interactive=interactive)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert not some._background, "the line holds only calls that still wait"
    assert not some._interactive
    if not handed_over:
        some.release_slot(interactive=interactive)
    some.release_slot(interactive=not interactive)
    assert some.free() == 1
    assert [some.take_slot(interactive=False), some.take_slot(interactive=False)] == [True, False]
    assert [some.take_slot(interactive=True), some.take_slot(interactive=True)] == [True, False]


@pytest.mark.parametrize("interactive", [False, True])
async def test_a_slot_passes_over_a_cancelled_waiter_to_the_next(interactive: bool) -> None:
    some = slots(2, 1)
    assert some.take_slot(interactive=False)
    assert some.take_slot(interactive=True)
    gone, next_one = (asyncio.create_task(some.wait(60, interactive=interactive)) for _ in range(2))
    await asyncio.sleep(0)
    gone.cancel()
    some.release_slot(interactive=interactive)
    await asyncio.wait_for(next_one, 10)
    assert gone.cancelled()


def test_batch_keeps_at_least_one() -> None:
    with pytest.raises(SettingsError, match="interactive_connections"):
        HttpLimits(connections_max=2, kept_alive_max=1, interactive_connections=2)
