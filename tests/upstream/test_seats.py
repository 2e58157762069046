"""The connection ceiling with a part kept for interactive calls: batch never has it, interactive goes first, nothing leaks."""

from __future__ import annotations

import asyncio

import pytest

from tidegate.core.deployments import HttpLimits
from tidegate.core.errors import PoolExhausted, SettingsError
from tidegate.upstream.seats import Seats

pytestmark = pytest.mark.anyio


def seats(connections_max: int, kept: int) -> Seats:
    limits = HttpLimits(connections_max=connections_max, kept_alive_max=1, interactive_connections=kept)
    return Seats(asyncio.get_running_loop(), limits)


async def test_batch_leaves_the_kept_part_alone() -> None:
    some = seats(4, 1)
    assert [some.take(interactive=False) for _ in range(4)] == [True, True, True, False]
    assert some.free() == 0
    assert some.take(interactive=True)
    assert not some.take(interactive=True)
    some.give_back(interactive=False)
    assert some.free() == 1
    assert some.take(interactive=True), "what is free of all the rest is for interactive calls too"
    assert some.free() == 0


async def test_interactive_calls_go_first() -> None:
    some = seats(2, 1)
    assert some.take(interactive=False)
    assert some.take(interactive=True)
    batch = asyncio.create_task(some.wait(60, interactive=False))
    await asyncio.sleep(0)
    first = asyncio.create_task(some.wait(60, interactive=True))
    await asyncio.sleep(0)
    some.give_back(interactive=False)
    await first
    assert not batch.done()
    some.give_back(interactive=True)
    await batch
    assert some.free() == 0
    some.give_back(interactive=True)
    some.give_back(interactive=False)
    assert some.free() == 1


async def test_whoever_stops_waiting_takes_nothing() -> None:
    some = seats(2, 0)
    assert some.take(interactive=False)
    assert some.take(interactive=False)
    with pytest.raises(PoolExhausted) as said:
        await some.wait(0.01, interactive=True)
    assert said.value.code == "upstream_pool_timeout"
    waiting = asyncio.create_task(some.wait(60, interactive=False))
    await asyncio.sleep(0)
    some.give_back(interactive=False)
    # The seat was handed over, and in the same moment nobody wants it any more.
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert some.free() == 1
    assert some.take(interactive=False)


def test_batch_keeps_at_least_one() -> None:
    with pytest.raises(SettingsError, match="interactive_connections"):
        HttpLimits(connections_max=2, kept_alive_max=1, interactive_connections=2)
