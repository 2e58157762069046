"""What every store does with the scheduler's switch."""

from __future__ import annotations

import asyncio

import pytest

from tests.contracts.store_world import StoreWorld
from tidegate.core.schedule.policy import ModeOverride

pytestmark = pytest.mark.anyio


async def test_every_process_sees_the_last_switch(world: StoreWorld) -> None:
    assert await world.store.override_mode() == ModeOverride()
    other = await world.open_another()
    assert await other.mode_override() == ModeOverride()
    for switch in (
        ModeOverride("fifo_v1", "none"),
        ModeOverride("fifo_v1", "smart_v1"),
        ModeOverride("", "fair_share_v1"),
        ModeOverride(),
    ):
        for _ in range(2):
            assert await world.store.override_mode(switch.mode, switch.shadow_mode) == switch
        assert await other.mode_override() == switch


async def test_a_mode_that_is_not_named_stays(world: StoreWorld) -> None:
    await world.store.override_mode("fifo_v1", "smart_v1")
    assert await world.store.override_mode(mode="slice_v1") == ModeOverride("slice_v1", "smart_v1")
    assert await world.store.override_mode(shadow_mode="none") == ModeOverride("slice_v1", "none")


async def test_two_operators_who_switch_one_mode_each_at_once_both_succeed(world: StoreWorld) -> None:
    other = await world.open_another()
    await world.store.override_mode("", "")
    for mode, shadow_mode in (("fifo_v1", "smart_v1"), ("fair_share_v1", "none"), ("", "")):
        await asyncio.gather(world.store.override_mode(mode), other.override_mode(None, shadow_mode))
        assert await other.mode_override() == ModeOverride(mode, shadow_mode)
