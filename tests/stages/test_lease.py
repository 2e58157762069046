"""Slices whose items cannot be read go back."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tidegate.core.errors import BlobUnavailable
from tidegate.core.nouns import LeasedSlice
from tidegate.stages.lease import LeaseStage

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
