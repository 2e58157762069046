"""What every store does with the scheduler's switch."""

from __future__ import annotations

import pytest

from tests.contracts.store_world import World
from tidegate.core.schedule.policy import ModeOverride

pytestmark = pytest.mark.anyio


async def test_every_process_sees_the_last_switch(world: World) -> None:
    await world.store.override_mode(ModeOverride())
    other = await world.open_another()
    assert await other.mode_override() == ModeOverride()
    for switch in (
        ModeOverride("fifo_v1", "none"),
        ModeOverride("fifo_v1", "smart_v1"),
        ModeOverride("", "fair_share_v1"),
        ModeOverride(),
    ):
        await world.store.override_mode(switch)
        await world.store.override_mode(switch)
        assert await other.mode_override() == switch
