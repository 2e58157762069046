"""What processes leave behind on the disk goes, and what cannot go keeps nothing else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.worker.world import World
from tidegate.backends.scratch import scratch_directory
from tidegate.core.errors import BlobUnavailable
from tidegate.core.nouns import KeepTimes
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
    alive.communicate("")
    assert alive.returncode == 0
    assert list(tmp_path.iterdir()) == []


class Stubborn:
    """Blobs of which one cannot be removed."""

    def __init__(self, world: World, blob_id: str) -> None:
        self._inner: Any = world.blobs
        self._blob_id = blob_id

    async def delete(self, blob_id: str) -> None:
        if blob_id == self._blob_id:
            raise BlobUnavailable("not permitted")
        await self._inner.delete(blob_id)

    async def list_ids(self, after: str, count_max: int) -> list[str]:
        return list(await self._inner.list_ids(after, count_max))


async def test_one_blob_that_cannot_be_removed_keeps_no_other(world: World) -> None:
    """It ended every pass at the same place, so nothing behind it was ever removed, and the upkeep began anew twice a second."""
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
