"""Calls that stand ready at a tide: one that begins stands no longer, and no room is kept for it."""

from __future__ import annotations

from typing import cast

import pytest
from msgspec.structs import replace

from tests.upstream.tide.test_tides import sea
from tidegate.core.errors import Unavailable
from tidegate.upstream.http.transport import Client
from tidegate.upstream.tide.tides import prompt_tokens

pytestmark = pytest.mark.anyio


async def test_a_call_that_begins_stands_no_longer() -> None:
    async with sea() as at:
        at.tide.stands("first", b"x" * 100)
        at.tide.stands("second", b"x" * 100)
        flight = at.tide.begin_flight("first", b"x" * 100, at.world.clock.monotonic_ms())
        assert list(at.tide._waiting) == ["second"]
        at.tide.end_flight(flight, None)
        at.tide.forget("second")
        assert not at.tide._waiting


async def test_calls_teach_how_long_a_prompt_waits_but_not_each_of_those_that_end_at_once() -> None:
    """Fitting a line costs more than a short call: one in 5 ms is enough to learn from."""

    def answered(after_ms: float) -> None:
        flight = at.tide.begin_flight("one", b"x" * 4_000, clock.monotonic_ms())
        clock.advance(after_ms)
        at.tide.end_flight(flight, 10)

    async with sea() as at:
        clock, estimate = at.world.clock, at.tide._prefill
        waits_ms = [estimate.first_token_ms(1_000)]
        for after_ms in (60_000, 0, 4, 1):
            answered(after_ms)
            waits_ms.append(estimate.first_token_ms(1_000))
    first, slower, *within, later = waits_ms
    assert slower > first
    assert within == [slower, slower], "nothing is learned within 5 ms"
    assert later != slower


async def test_an_engine_that_cannot_be_reached_is_asked_for_its_metrics_rarely() -> None:
    asked: list[float] = []

    class Gone:
        async def get(self, *question: object) -> None:
            asked.append(clock.monotonic_ms())
            raise Unavailable("no route")

    async with sea() as at:
        clock, at.tide._control = at.world.clock, cast(Client, Gone())
        at.tide.stands("one", b"x")
        for ahead_ms in (600_000, 0, 4_999, 1):
            clock.advance(ahead_ms)
            await at.tide.look()
        assert asked == [clock.monotonic_ms() - 5_000, clock.monotonic_ms()]


async def test_a_prompt_that_fits_exactly_may_begin() -> None:
    async with sea() as at:
        tide, body = at.tide, b"x" * 4_000
        tide.decision = replace(tide.decision, prompt_tokens=prompt_tokens(body))
        assert tide.can_take("one", body)
        tide.decision = replace(tide.decision, prompt_tokens=prompt_tokens(body) - 1)
        assert not tide.can_take("one", body)
