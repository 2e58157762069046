"""Slices last as long as the store says from the moment on at which it was asked, and those whose items cannot be read go back."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.ports import FairDice, HandClock
from tidegate.core.errors import BlobUnavailable
from tidegate.core.nouns import LeasedSlice
from tidegate.core.schedule import Pick, Why
from tidegate.stages.lease import NONE_SUSPECTED, LeaseStage

pytestmark = pytest.mark.anyio


async def test_a_slice_whose_items_cannot_be_read_now_goes_back_and_rests() -> None:
    """Otherwise its workers would lease and read it again without a pause while the disk is away."""
    released: list[tuple[Any, ...]] = []

    async def read(*_: Any) -> bytes:
        raise BlobUnavailable("away")

    async def release_slice(*slice_and_wait: Any) -> None:
        released.append(slice_and_wait)

    store, blobs = SimpleNamespace(release_slice=release_slice), SimpleNamespace(read=read)
    ports: Any = (store, blobs, None, None)
    leased = LeasedSlice("job", "tenant", "/v1/x", "m", 0, 1, 0, "blob", 0, 0, 0, 0, "token", 1)
    assert await LeaseStage(*ports).read(leased) is None
    assert released == [("job", 0, "token", 5_000)]


async def test_the_time_that_a_lease_takes_is_no_time_of_its_slices() -> None:
    """Their calls would begin after the deadline, by as much."""
    clock = HandClock()
    leased = LeasedSlice("job", "tenant", "/v1/x", "m", 0, 1, 0, "blob", 0, 0, 0, 0, "token", 60_000)

    async def lease_picks(*_: Any, keeps_rest: bool) -> list[LeasedSlice]:
        clock.advance(2_000)
        return [leased]

    ports: Any = (SimpleNamespace(lease_picks=lease_picks), None, clock, FairDice())
    asked_ms = clock.monotonic_ms()
    picks = [Pick("job", "m", 1, Why.FAIR)]
    assert await LeaseStage(*ports).lease_slices("worker", picks, NONE_SUSPECTED) == [(leased, asked_ms + 60_000)]
