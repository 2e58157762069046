"""One small world for every test of the engine's stages."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.worker.world import World
from tidegate.backends.system import SystemClock


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    made = World(tmp_path)
    await made.store.migrate()
    yield made
    await made.blobs.close()
    await made.store.close()


@pytest.fixture
async def live(tmp_path: Path) -> AsyncIterator[World]:
    """A world whose clock is the machine's, for whole workers."""
    made = World(tmp_path, SystemClock())
    await made.store.migrate()
    yield made
    await made.blobs.close()
    await made.store.close()
