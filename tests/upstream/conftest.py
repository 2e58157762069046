"""The world of this room, and limits that the router in it may be given."""

import pytest

from tests.upstream.limits import MemoryLimits
from tests.upstream.world import RouterWorld


@pytest.fixture
def world() -> RouterWorld:
    return RouterWorld()


@pytest.fixture
def limits(world: RouterWorld) -> MemoryLimits:
    return MemoryLimits(world.clock)
