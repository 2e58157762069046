"""Files in many pieces: the smallest neighbours are copied into one, and the file stays the same, byte for byte."""

from __future__ import annotations

from typing import Any

import pytest

from tests.stages.test_publish_failures import answer
from tests.worker.world import WorkerWorld, chat_lines
from tidegate.core.errors import BlobUnavailable
from tidegate.core.files import Extent
from tidegate.stages.tend import compact_extents
from tidegate.stages.tend.compact_extents import PIECES_MAX, smallest_run

pytestmark = pytest.mark.anyio


def pieces(*sizes: int) -> list[Extent]:
    return [Extent(sum(sizes[:at]), size, f"blob_{at}", 0) for at, size in enumerate(sizes)]


def test_the_run_with_the_fewest_bytes_is_copied_and_never_the_last_piece() -> None:
    assert smallest_run([]) == []
    assert smallest_run(pieces(1, 1)) == []
    both = pieces(5, 5, 1)
    assert smallest_run(both) == both[:2]
    width = PIECES_MAX // 2
    many = pieces(*[9] * 10, *[1] * width, *[9] * 10)
    assert smallest_run(many) == many[10 : 10 + width]
    # Just as many as one run holds, beside the last.
    exact = pieces(*[1] * (width + 1))
    assert smallest_run(exact) == exact[:width]
    far = pieces(*[1] * 20, *[50] * 20, *[2] * width, 9)
    assert smallest_run(far) == far[40 : 40 + width]
    growing = pieces(*[2] * width, *[1] * width, 1)
    assert smallest_run(growing) == growing[width : 2 * width]


def test_no_more_is_copied_at_once_than_the_bound() -> None:
    half = 32 << 20
    large = pieces(half, half, half, 1)
    assert smallest_run(large) == large[:2]
    over = pieces(half, half + 1, half, 1)
    assert smallest_run(over) == over[:1]
    # A piece that is larger than the bound alone has nothing to be joined with.
    huge = pieces(3 * half, 1, 1)
    assert smallest_run(huge) == huge[:1]


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compact_extents, "PIECES_MAX", 6)


@pytest.mark.usefixtures("few")
async def test_a_crowded_file_stays_the_same_in_fewer_pieces(world: WorkerWorld) -> None:
    job = await world.started(chat_lines(8))
    for number in range(8):
        await answer(world, job, [number])
    [(file_id, count)] = await world.store.crowded_files(6)
    before = await world.file_bytes(file_id)
    assert count == 8
    gone = await compact_extents.tend(world.store, world.blobs, world.entropy, await world.worker())
    assert gone == 2
    extents = await world.store.list_extents(file_id, 0, 100)
    assert len(extents) == 6
    # The first three lines are one piece now.
    assert extents[1].at == before.index(b"\n", before.index(b"\n", before.index(b"\n") + 1) + 1) + 1
    assert await world.file_bytes(file_id) == before
    assert await compact_extents.tend(world.store, world.blobs, world.entropy, await world.worker()) == 0


async def test_two_pieces_are_joined_and_one_alone_is_not_copied(
    world: WorkerWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compact_extents, "PIECES_MAX", 4)
    job = await world.started(chat_lines(5))
    for number in range(5):
        await answer(world, job, [number])
    worker, blobs = await world.worker(), set(await world.blobs.list_ids("", 100))
    with monkeypatch.context() as bound:
        bound.setattr(compact_extents, "_COPY_BYTES_MAX", 1)
        assert await compact_extents.tend(world.store, world.blobs, world.entropy, worker) == 0
    assert set(await world.blobs.list_ids("", 100)) == blobs
    assert await compact_extents.tend(world.store, world.blobs, world.entropy, worker) == 1


@pytest.mark.usefixtures("few")
async def test_a_copy_that_fails_leaves_the_file_as_it_was_and_nothing_behind(world: WorkerWorld) -> None:
    job = await world.started(chat_lines(8))
    for number in range(8):
        await answer(world, job, [number])
    [(file_id, _)] = await world.store.crowded_files(6)
    before, blobs = await world.store.list_extents(file_id, 0, 100), set(await world.blobs.list_ids("", 100))

    class Unreadable:
        create = world.blobs.create

        def stream(self, blob_id: str, at: int, size_bytes: int) -> Any:
            raise BlobUnavailable("away")

    away: Any = Unreadable()
    assert await compact_extents.tend(world.store, away, world.entropy, await world.worker()) == 0
    assert await world.store.list_extents(file_id, 0, 100) == before
    assert set(await world.blobs.list_ids("", 100)) == blobs
    assert await world.rows("select count(*) from blobs where kind = 'compacted' and state <> 'condemned'") == [(0,)]
