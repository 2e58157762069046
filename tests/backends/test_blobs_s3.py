"""Blobs in a bucket that answers oddly: what is missing for a moment, and what comes back short."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tidegate.backends.blobs_s3 import S3Blobs
from tidegate.backends.blobs_s3_client import S3Settings
from tidegate.core.errors import BlobMissing, BlobUnavailable

pytestmark = pytest.mark.anyio

BLOB = "blob_" + "a" * 22
LATER = "blob_" + "b" * 22
HOUR_S = 3_600.0


class Bucket:
    """Holds one object, when it shows it; `short` bytes of it are not sent."""

    def __init__(self) -> None:
        self.is_shown = True
        self.short = 0

    async def read(self, key: str, at: int, count: int) -> bytes:
        if not self.is_shown:
            raise BlobMissing(f"there is no blob {key}")
        return b"0123456789"[at : at + count]

    async def surely_head(self, key: str) -> Any:
        return SimpleNamespace(size_bytes=10)

    async def chunks(self, key: str, at: int, count: int) -> AsyncIterator[bytes]:
        yield b"0123456789"[: count - self.short]

    async def keys_after(self, after: str, count_max: int) -> tuple[list[str], bool]:
        keys = [key for key in ("README", BLOB, BLOB + ".bak", LATER, "notes/blob") if key > after]
        return keys[:2], len(keys) > 2


@pytest.fixture
def bucket() -> Bucket:
    return Bucket()


@pytest.fixture
def blobs(bucket: Bucket, tmp_path: Path) -> S3Blobs:
    made = S3Blobs(S3Settings("bucket", missing_after_ms=60_000), tmp_path / "spool")
    made._objects = bucket  # type: ignore[assignment]
    return made


async def test_an_object_is_gone_only_when_it_was_missing_for_a_while_and_all_that_time(
    blobs: S3Blobs, bucket: Bucket
) -> None:
    for is_shown_between in (True, False):
        bucket.is_shown = False
        with pytest.raises(BlobUnavailable):
            await blobs.read(BLOB, 0, 5)
        blobs._missed[BLOB] -= HOUR_S
        if is_shown_between:
            bucket.is_shown = True
            assert await blobs.read(BLOB, 0, 5) == b"01234"
    with pytest.raises(BlobMissing):
        await blobs.read(BLOB, 0, 5)
    await blobs.close()


@pytest.mark.parametrize("short", [0, 1])
async def test_a_copy_that_is_not_whole_is_none(blobs: S3Blobs, bucket: Bucket, tmp_path: Path, short: int) -> None:
    (tmp_path / "scratch").mkdir()
    bucket.short = short
    if short:
        with pytest.raises(BlobUnavailable, match="is not whole"):
            await blobs.local_path(BLOB, tmp_path / "scratch")
        assert [*(tmp_path / "scratch").iterdir()] == []
    else:
        copies = [await blobs.local_path(BLOB, tmp_path / "scratch") for _ in range(2)]
        assert [copy.read_bytes() for copy in copies] == [b"0123456789"] * 2
        assert copies[0] != copies[1], "each job removes its own"
    await blobs.close()


async def test_only_our_objects_are_listed_among_those_of_others(blobs: S3Blobs) -> None:
    """What is listed and has no row is deleted."""
    assert await blobs.list_ids("", 9) == [BLOB, LATER]
    assert await blobs.list_ids("", 1) == [BLOB]
    assert await blobs.list_ids(BLOB, 9) == [LATER]
    await blobs.close()
