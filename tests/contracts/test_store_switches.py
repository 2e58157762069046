"""What every store does with the scheduler's switch."""

from __future__ import annotations

import pytest

from tests.contracts.store_world import World
from tidegate.core.schedule.mode_override import ModeOverride

pytestmark = pytest.mark.anyio


async def test_every_process_sees_the_last_switch(world: World) -> None:
    await world.store.switch_scheduler(ModeOverride())
    other = await world.open_another()
    assert await other.scheduler_switch() == ModeOverride()
    for switch in (
        ModeOverride("fifo_v1", "none"),
        ModeOverride("fifo_v1", "smart_v1"),
        ModeOverride("", "fair_share_v1"),
        ModeOverride(),
    ):
        await world.store.switch_scheduler(switch)
        await world.store.switch_scheduler(switch)
        assert await other.scheduler_switch() == switch
