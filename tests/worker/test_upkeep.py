"""What processes leave behind on the disk goes, and what cannot go keeps nothing else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.contracts.blobs_places import descriptors_under
from tests.worker.world import WorkerWorld
from tidegate.backends.scratch import scratch_directory
from tidegate.core.errors import BlobUnavailable
from tidegate.core.files import NewFile
from tidegate.core.nouns import KeepTimes
from tidegate.stages.tend import garbage as garbage_room
from tidegate.stages.tend.garbage import Garbage

pytestmark = pytest.mark.anyio

LIVES = """
import sys
from pathlib import Path
from tidegate.backends.scratch import scratch_directory
with scratch_directory(Path(sys.argv[1])) as mine:
    (mine / "half-done").write_bytes(b"x")
    print(mine, flush=True)
    sys.stdin.read()
"""


def process(root: Path) -> tuple[subprocess.Popen[str], Path]:
    child = subprocess.Popen(
        [sys.executable, "-c", LIVES, str(root)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    return child, Path(child.stdout.readline().strip())


def test_what_a_killed_process_left_in_scratch_goes_with_the_next_one_and_the_livings_stays(tmp_path: Path) -> None:
    dead, left = process(tmp_path)
    alive, state = process(tmp_path)
    dead.kill()
    dead.wait()
    assert (left / "half-done").exists()
    with scratch_directory(tmp_path) as mine:
        assert mine.is_dir()
        assert not left.exists()
        assert (state / "half-done").exists()
    assert not mine.exists()
    assert descriptors_under(tmp_path) == []
    alive.communicate("")
    assert alive.returncode == 0
    assert list(tmp_path.iterdir()) == []


def test_scratch_is_for_its_user_alone(tmp_path: Path) -> None:
    """It holds prompts."""
    with scratch_directory(tmp_path / "data" / "scratch") as mine:
        places = (mine, mine.parent, mine.parent.parent)
        assert {place.stat().st_mode & 0o777 for place in places} == {0o700}


class Stubborn:
    """Blobs of which one cannot be removed, and that cannot be listed."""

    def __init__(self, world: WorkerWorld, blob_id: str) -> None:
        self._inner: Any = world.blobs
        self._blob_id = blob_id

    async def delete(self, blob_id: str) -> None:
        if blob_id == self._blob_id:
            raise BlobUnavailable("not permitted")
        await self._inner.delete(blob_id)

    async def list_ids(self, after: str, count_max: int) -> list[str]:
        raise BlobUnavailable("the listing failed")


async def test_neither_a_blob_that_cannot_be_removed_nor_a_listing_that_fails_keeps_another(world: WorkerWorld) -> None:
    """It ended every pass at the same place, so nothing behind it was ever removed, and the upkeep began again twice a second."""
    worker, ids = await world.worker(), [world.id("blob") for _ in range(3)]
    for blob_id in ids:
        await world.store.begin_blob(blob_id, "rest", worker)
        await (await world.blobs.create(blob_id)).finish()
        await world.store.give_up_blob(blob_id)
        world.clock.advance(1)
    world.clock.advance(1)
    blobs: Any = Stubborn(world, ids[0])
    assert await Garbage(world.store, blobs, world.clock, KeepTimes(orphan_ms=0)).tend() == 2
    assert [await world.blobs.size(blob_id) for blob_id in ids] == [0, None, None]
    assert await world.store.condemned_blobs(0, 0, 10) == [ids[0]]


async def _blob(world: WorkerWorld, blob_id: str) -> None:
    await (await world.blobs.create(blob_id)).finish()


async def test_bytes_without_a_row_go_once_they_were_seen_so_for_the_whole_safety_period(world: WorkerWorld) -> None:
    world.clock.advance(10**6)
    worker, (known, orphan) = await world.worker(10**9), sorted(world.id("blob") for _ in range(2))
    await world.store.begin_blob(known, "rest", worker)
    for blob_id in (known, orphan):
        await _blob(world, blob_id)
    # A page of one: each pass goes on behind the last, and begins again at the end.
    garbage = Garbage(world.store, world.blobs, world.clock, KeepTimes(orphan_ms=1_000, scan_max=1))
    for _ in range(3):
        assert await garbage.tend() == 0
    world.clock.advance(999)
    for _ in range(3):
        assert await garbage.tend() == 0
    world.clock.advance(1)
    assert sum([await garbage.tend() for _ in range(3)]) == 1
    assert await world.blobs.list_ids("", 10) == [known]


async def test_a_bounded_number_of_orphans_is_watched_and_all_go_in_turn(
    world: WorkerWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(garbage_room, "_SUSPECTS_MAX", 2)
    for _ in range(3):
        await _blob(world, world.id("blob"))
    garbage = Garbage(world.store, world.blobs, world.clock, KeepTimes(orphan_ms=1_000))
    removed = []
    for _ in range(3):
        removed.append(await garbage.tend())
        world.clock.advance(1_000)
    assert removed == [0, 2, 1]
    assert await world.blobs.list_ids("", 10) == []


async def test_a_row_that_appears_in_time_saves_its_bytes_and_the_wait_begins_again_without_it(
    world: WorkerWorld,
) -> None:
    worker, blob_id = await world.worker(10**9), world.id("blob")
    await _blob(world, blob_id)
    garbage = Garbage(world.store, world.blobs, world.clock, KeepTimes(orphan_ms=1_000))
    assert await garbage.tend() == 0
    world.clock.advance(5_000)
    await world.store.begin_blob(blob_id, "rest", worker)
    assert await garbage.tend() == 0
    await world.store.give_up_blob(blob_id)
    await world.store.forget_blob(blob_id)
    assert await garbage.tend() == 0
    assert await world.blobs.size(blob_id) == 0
    world.clock.advance(1_000)
    assert await garbage.tend() == 1


async def test_a_deleted_files_bytes_are_condemned_after_a_short_while_and_then_removed(world: WorkerWorld) -> None:
    worker, caller = await world.worker(10**9), await world.caller()
    files = []
    for name in ("kept", "deleted"):
        blob_id = world.id("blob")
        await world.store.begin_blob(blob_id, "upload", worker)
        size_bytes = await (await world.blobs.create(blob_id)).finish()
        new = NewFile(world.id("file"), blob_id, size_bytes, "batch", name, 0, None)
        files.append((await world.store.create_file(caller, new), blob_id))
    (_, kept), (deleted, gone) = files
    garbage = Garbage(world.store, world.blobs, world.clock, KeepTimes())
    await world.store.delete_file(caller.tenant_id, deleted.id)
    # Once until they are condemned, once until they are removed.
    for removed in (0, 1):
        world.clock.advance(20_000)
        assert await garbage.tend() == 0
        world.clock.advance(1)
        assert await garbage.tend() == removed
    assert await world.blobs.list_ids("", 10) == [kept]
    assert not await world.store.knows_blob(gone)
