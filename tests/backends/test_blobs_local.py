"""Blobs in a directory: logs that roll over, directories that are made once, and writers that were given up."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from pathlib import Path

import pytest

from tests.support.processes import wait_until_async
from tidegate.backends import blobs_local
from tidegate.backends.blobs_local import LocalBlobs
from tidegate.core.errors import BlobUnavailable
from tidegate.core.files import Placed

pytestmark = pytest.mark.anyio

FIRST, SECOND = "blob_" + "a" * 22, "blob_" + "a" * 21 + "b"


async def test_a_log_that_rolls_over_counts_from_the_beginning_of_its_next_blob(tmp_path: Path) -> None:
    blobs, ids = LocalBlobs(tmp_path / "blobs", log_bytes_max=1), [SECOND, FIRST]

    async def next_id() -> str:
        return ids.pop()

    log = await blobs.open_log(next_id)
    placed = []
    for line in (b"one\n", b"two\n"):
        await log.append(line)
        placed.append(await log.seal())
    assert placed == [Placed(FIRST, 0, 4), Placed(SECOND, 0, 4)]
    await log.close()
    await blobs.close()


async def test_the_directory_of_many_blobs_is_synced_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = list[Path]()
    blobs = LocalBlobs(tmp_path / "blobs")
    monkeypatch.setattr(blobs_local, "sync_directory", synced.append)
    for blob_id in (FIRST, SECOND):
        await blobs.create(blob_id)
    assert synced == [tmp_path / "blobs"]
    await blobs.close()


async def test_a_blob_that_was_given_up_while_it_got_its_name_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its caller never learned that it was finished, and begins another one."""
    blobs = LocalBlobs(tmp_path / "blobs")
    writer = await blobs.create(FIRST)
    await writer.write(b"12345")
    loop, named, go_on = asyncio.get_running_loop(), asyncio.Event(), threading.Event()

    def sync(_: Path) -> None:
        loop.call_soon_threadsafe(named.set)
        go_on.wait()

    monkeypatch.setattr(blobs_local, "sync_directory", sync)
    finishing = asyncio.create_task(writer.finish())
    await named.wait()
    finishing.cancel()
    await asyncio.gather(finishing, return_exceptions=True)
    go_on.set()
    await writer.abort()
    assert await blobs.size(FIRST) is None
    assert await blobs.list_ids("", 10) == []
    await blobs.close()


@pytest.mark.parametrize("step", ["its bytes", "its name"])
async def test_a_blob_that_could_not_be_made_durable_has_no_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    blobs = LocalBlobs(tmp_path / "blobs")
    writer = await blobs.create(FIRST)
    await writer.write(b"12345")

    def fail(_: object) -> None:
        raise OSError(errno.EIO, "the disk reported an error")

    if step == "its bytes":
        monkeypatch.setattr(os, "fsync", fail)
    else:
        monkeypatch.setattr(blobs_local, "sync_directory", fail)
    with pytest.raises(BlobUnavailable):
        await writer.finish()
    assert [*(tmp_path / "blobs").glob("*/*")] == []
    await blobs.close()


async def test_what_a_thread_still_reads_is_open_though_the_download_was_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its descriptor could belong to another file by then."""
    blobs = LocalBlobs(tmp_path / "blobs")
    writer = await blobs.create(FIRST)
    await writer.write(b"12345")
    await writer.finish()
    loop, begun, go_on, read = asyncio.get_running_loop(), asyncio.Event(), threading.Event(), blobs._read_open
    seen = list[bytes]()

    def read_slowly(fd: int, path: Path, at: int, count: int) -> bytes:
        loop.call_soon_threadsafe(begun.set)
        go_on.wait()
        seen.append(read(fd, path, at, count))
        return seen[0]

    monkeypatch.setattr(blobs, "_read_open", read_slowly)
    download = asyncio.create_task(anext(blobs.stream(FIRST, 0, 5)))
    await begun.wait()
    download.cancel()
    await asyncio.gather(download, return_exceptions=True)
    go_on.set()
    await asyncio.to_thread(blobs._threads.shutdown)
    assert seen == [b"12345"]
    await blobs.close()


async def test_a_blob_and_a_log_can_be_read_by_their_user_alone(tmp_path: Path) -> None:
    """They hold prompts, and their directory may be opened for others."""
    blobs = LocalBlobs(tmp_path / "blobs")

    async def next_id() -> str:
        return SECOND

    writer, log = await blobs.create(FIRST), await blobs.open_log(next_id)
    await writer.finish()
    await log.append(b"one\n")
    await log.close()
    await blobs.close()
    found = (tmp_path / "blobs").glob("*/*")
    assert {path.name: path.stat().st_mode & 0o777 for path in found} == {FIRST: 0o600, SECOND: 0o600}


async def test_a_blob_that_was_never_finished_is_listed_and_deleted(tmp_path: Path) -> None:
    """So a sweep finds what a killed process left behind."""
    blobs = LocalBlobs(tmp_path / "blobs")
    await blobs.create(FIRST)
    assert await blobs.list_ids("", 10) == [FIRST]
    await blobs.delete(FIRST)
    assert await blobs.list_ids("", 10) == []
    await blobs.close()


async def test_a_blob_whose_beginning_was_cancelled_leaves_nothing(tmp_path: Path) -> None:
    blobs = LocalBlobs(tmp_path / "blobs")
    beginning = asyncio.create_task(blobs.create(FIRST))
    await asyncio.sleep(0)
    beginning.cancel()
    with pytest.raises(asyncio.CancelledError):
        await beginning
    await asyncio.to_thread(blobs._threads.shutdown)
    await wait_until_async(lambda: not [*(tmp_path / "blobs").glob("*/*")], what="the begun blob to be removed")
    await blobs.close()
