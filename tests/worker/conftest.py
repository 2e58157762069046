"""The worker's world with a clock that stands still, or with the machine's. Other rooms that use this world take both from here."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.worker.world import WorkerWorld
from tidegate.backends.system import SystemClock


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[WorkerWorld]:
    async with WorkerWorld(tmp_path) as opened:
        yield opened


@pytest.fixture
async def live(tmp_path: Path) -> AsyncIterator[WorkerWorld]:
    """A world whose clock is the machine's, for whole workers."""
    async with WorkerWorld(tmp_path, SystemClock()) as opened:
        yield opened
