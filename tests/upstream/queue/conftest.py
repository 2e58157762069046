"""What tests of the queue share: pauses that are noted and not waited for."""

from __future__ import annotations

import asyncio

import pytest


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses between two questions to the queue, none of which is waited for."""
    found: list[float] = []
    sleep = asyncio.sleep

    async def note(pause_s: float) -> None:
        found.append(pause_s)
        await sleep(0)

    monkeypatch.setattr(asyncio, "sleep", note)
    return found
