"""Calls that stand ready at a tide: one that begins stands no longer, and no room is kept for it."""

from __future__ import annotations

import pytest

from tests.upstream.tide.test_tides import sea

pytestmark = pytest.mark.anyio


async def test_a_call_that_begins_stands_no_longer() -> None:
    async with sea() as at:
        at.tide.stands("first", b"x" * 100)
        at.tide.stands("second", b"x" * 100)
        flight = at.tide.begin_flight("first", b"x" * 100, at.world.clock.monotonic_ms())
        assert list(at.tide._held) == ["second"]
        at.tide.end_flight(flight, None)
        at.tide.forget("second")
        assert not at.tide._held
