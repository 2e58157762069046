"""One small world for every test of the engine's stages."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.engine.world import World


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    made = World(tmp_path)
    await made.store.migrate()
    yield made
    await made.blobs.close()
    await made.store.close()
