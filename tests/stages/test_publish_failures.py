"""A job comes to its end though its stored requests are gone, and a publish that fails leaves nothing behind."""

from __future__ import annotations

import asyncio
import errno
import json
import os
from collections.abc import AsyncIterator
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
from msgspec.structs import replace

from tests.support.processes import wait_until_async
from tests.support.store_verbs import lease_slices
from tests.worker.world import HOUR_MS, WorkerWorld, chat_lines
from tidegate.backends.system import LocalWake
from tidegate.core.answers import results
from tidegate.core.errors import BlobMissing, BlobUnavailable
from tidegate.core.ids import item_id
from tidegate.core.input.prefix_tree import shared_beginnings
from tidegate.core.nouns import Finished, Job, JobFlush, KeepTimes, PublishTurns, Usage
from tidegate.core.states import JobState, Outcome
from tidegate.stages import lease
from tidegate.stages.ship import LONG, QUICK, Ship
from tidegate.worker.registration import Registration
from tidegate.worker.shipping import Publishing

pytestmark = pytest.mark.anyio

SHORT_READ = 1 << 16


def shipping(world: WorkerWorld, blobs: Any = None) -> Ship:
    return Ship(world.store, blobs or world.blobs, world.entropy, world.scratch, KeepTimes())


async def answer(world: WorkerWorld, job: Job, numbers: list[int], cost_nano: int = 0) -> None:
    """Some items are answered, in this order; each answer costs so much."""
    worker, blob_id = await world.worker(), world.id("blob")

    async def next_blob_id() -> str:
        await world.store.begin_blob(blob_id, "answers", worker)
        return blob_id

    log = await world.blobs.open_log(next_blob_id)
    for number in numbers:
        line = results.response_line(item_id(job.id, number), b'"c%d"' % number, 200, b'{"choices":[{}]}')
        await log.append(line)
        placed = await log.seal()
        finished = Finished(number, Outcome.ANSWERED, len(line), 0, "", Usage(), cost_nano=(cost_nano, 0, 0))
        await world.store.record_outcomes([JobFlush(job.id, [finished], placed)], [], [])
    await log.close()
    await world.store.settle_blob(blob_id)


async def closed(world: WorkerWorld, job: Job) -> None:
    await world.store.cancel_job(job.tenant_id, job.id)
    assert await world.store.close_job(job.id, 0)


def lose_work_file(world: WorkerWorld, job: Job) -> None:
    assert job.work_blob_id is not None
    world.blobs._layout.path(job.work_blob_id).unlink()


async def test_a_job_whose_requests_are_gone_still_ends(world: WorkerWorld) -> None:
    """It stayed `finalizing` for ever, because the ids of what never ran could not be read."""
    job = await world.started(chat_lines(5))
    await answer(world, job, [1, 3])
    await closed(world, job)
    lose_work_file(world, job)
    assert await shipping(world).publish_all(await world.worker()) == 1
    ended = await world.look(job)
    assert ended.state is JobState.CANCELLED
    lines = await world.file_lines(ended.error_file_id)
    assert [line["custom_id"] for line in lines] == [None] * 3
    assert {line["error"]["code"] for line in lines} == {"batch_cancelled"}
    assert len(await world.file_lines(ended.output_file_id)) == 2


async def test_an_ordered_job_whose_order_is_gone_ends_in_the_order_it_has(world: WorkerWorld) -> None:
    job = await world.started(chat_lines(4), ordered=True)
    await answer(world, job, [3, 0, 2, 1])
    lose_work_file(world, job)
    assert await shipping(world).publish_all(await world.worker()) == 1
    ended = await world.look(job)
    assert ended.state is JobState.COMPLETED
    assert {line["custom_id"] for line in await world.file_lines(ended.output_file_id)} == {"c0", "c1", "c2", "c3"}
    assert await world.rows("select count(*) from blobs where kind = 'rest' and state = 'writing'") == [(0,)]


async def test_what_never_ran_of_an_ordered_job_is_kept_when_its_order_is_gone(world: WorkerWorld) -> None:
    job = await world.started(chat_lines(5), ordered=True)
    await answer(world, job, [3, 0])
    await closed(world, job)
    lose_work_file(world, job)
    assert await shipping(world).publish_all(await world.worker()) == 1
    ended = await world.look(job)
    assert ended.state is JobState.CANCELLED
    assert len(await world.file_lines(ended.output_file_id)) == 2
    assert len(await world.file_lines(ended.error_file_id)) == 3


@pytest.mark.parametrize("damage", [b"\0" * SHORT_READ, b"\n" * SHORT_READ])
async def test_a_damaged_work_file_breaks_no_worker(world: WorkerWorld, damage: bytes) -> None:
    """A line that could not be decoded raised what no loop foresees, so every worker that leased the slice stopped for good."""
    job = await world.started(chat_lines(3))
    assert job.work_blob_id is not None
    path = world.blobs._layout.path(job.work_blob_id)
    path.write_bytes(damage[: path.stat().st_size])
    worker = await world.worker()
    [leased] = await lease_slices(world.store, worker, job.id, "m", 1, "t")
    with pytest.raises(BlobMissing):
        await lease.read_items(world.blobs, leased)
    await world.store.release_slice(job.id, leased.first, "t", 0)
    await closed(world, job)
    assert await shipping(world).publish_all(worker) == 1
    assert (await world.look(job)).cancelled_count == 3


@pytest.mark.parametrize("model", ["m", ""], ids=["requests", "lines that cannot be run"])
@pytest.mark.parametrize("junk", [b"\xff", b"\0", b"}"])
async def test_one_damaged_line_of_the_work_file_is_sent_to_no_server(
    world: WorkerWorld, model: str, junk: bytes
) -> None:
    job = await world.started(chat_lines(3))
    assert job.work_blob_id is not None
    path = world.blobs._layout.path(job.work_blob_id)
    path.write_bytes(path.read_bytes().replace(b'"user"', junk * 6 if junk == b"}" else b'"us%br"' % junk, 1))
    [leased] = await lease_slices(world.store, await world.worker(), job.id, "m", 1, "t")
    with pytest.raises(BlobMissing):
        await lease.read_items(world.blobs, replace(leased, model=model))


async def test_requests_that_were_damaged_on_the_way_are_read_once_more(
    world: WorkerWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batch would end by them."""
    job = await world.started(chat_lines(3))
    [leased] = await lease_slices(world.store, await world.worker(), job.id, "m", 1, "t")
    read, damages = world.blobs.read, [b"\n", b"}"]

    async def once_damaged(blob_id: str, at: int, count: int) -> bytes:
        data = await read(blob_id, at, count)
        return data.replace(b'"user"', damages.pop() * 6, 1) if len(damages) == 2 else data

    monkeypatch.setattr(world.blobs, "read", once_damaged)
    assert len(await lease.read_items(world.blobs, leased)) == 3
    assert len(damages) == 1


async def test_a_slice_brings_only_items_without_outcome_and_how_much_neighbours_share(world: WorkerWorld) -> None:
    """What neighbours share chooses the server that has it in its cache."""
    shared = "one long beginning " * 100
    contents = ["something else " * 200, *(f"{shared}{number}" for number in range(3))]
    lines = [
        json.dumps(
            {"custom_id": f"c{at}", "body": {"model": "m", "messages": [{"role": "user", "content": text}]}}
        ).encode()
        for at, text in enumerate(contents)
    ]
    job = await world.started(lines)
    [leased] = await lease_slices(world.store, await world.worker(), job.id, "m", 1, "t")
    items = await lease.read_items(world.blobs, leased)
    assert [item.prefix_bytes for item in items] == shared_beginnings([item.body for item in items])
    assert sorted(item.prefix_bytes > 1_000 for item in items) == [False, True, True, True]
    rest = await lease.read_items(world.blobs, replace(leased, done=frozenset({items[1].number, items[3].number})))
    assert [item.number for item in rest] == [items[0].number, items[2].number]
    # Of a slice that was cut, the bytes of the whole are read.
    tail = await lease.read_items(world.blobs, replace(leased, first=leased.first + 2, count=2))
    assert [(item.number, item.body) for item in tail] == [(item.number, item.body) for item in items[2:]]


class Away:
    """Blobs that can be read, and take nothing."""

    def __init__(self, world: WorkerWorld) -> None:
        self.read = world.blobs.read

    async def create(self, blob_id: str) -> Any:
        raise BlobUnavailable("the store is away")


class Held(Away):
    """Blobs whose lines are read only when they are let go."""

    def __init__(self, world: WorkerWorld) -> None:
        super().__init__(world)
        self.create = world.blobs.create  # type: ignore[method-assign]
        self._stream = world.blobs.stream
        self.is_asked, self.let_go = asyncio.Event(), asyncio.Event()

    async def stream(self, blob_id: str, at: int, count: int) -> AsyncIterator[bytes]:
        self.is_asked.set()
        await self.let_go.wait()
        async for part in self._stream(blob_id, at, count):
            yield part


async def test_every_job_is_quick_or_long_and_no_tenant_has_a_whole_look_to_itself() -> None:
    assert (QUICK.bytes_min, QUICK.bytes_max + 1) == (0, LONG.bytes_min)
    assert LONG.bytes_max >= 1 << 50
    assert 4 * QUICK.tenant_max <= QUICK.count_max
    assert LONG.tenant_max == 1, "of large jobs each tenant has one before anyone has another"


async def test_a_job_whose_lines_are_written_again_keeps_no_other_one_waiting(world: WorkerWorld) -> None:
    ordered = await world.started(chat_lines(4), ordered=True)
    await answer(world, ordered, [3, 0, 2, 1])
    plain = await world.started(chat_lines(2))
    held = Held(world)
    ways: Any = ((world.blobs, PublishTurns(bytes_max=0)), (held, PublishTurns(bytes_min=1, tenant_max=1)))
    quick, long = (Ship(world.store, blobs, world.entropy, world.scratch, KeepTimes(), turns) for blobs, turns in ways)
    due, me = asyncio.Event(), cast(Registration, SimpleNamespace(id=await world.worker()))
    publishing = Publishing(quick, long, me, due, LocalWake(), 20)
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(run()) for run in (publishing.run, publishing.run_long)]
        await held.is_asked.wait()
        await answer(world, plain, [0, 1])
        due.set()
        await wait_until_async(partial(has_state, world, plain, JobState.COMPLETED))
        assert await has_state(world, ordered, JobState.FINALIZING)
        held.let_go.set()
        await wait_until_async(partial(has_state, world, ordered, JobState.COMPLETED))
        for task in tasks:
            task.cancel()


async def has_state(world: WorkerWorld, job: Job, state: JobState) -> bool:
    return (await world.look(job)).state is state


async def test_a_publish_that_fails_half_way_leaves_no_bytes(world: WorkerWorld) -> None:
    job = await world.started(chat_lines(4), slice_items=2)
    await closed(world, job)

    class AwayAfterOne(Away):
        def __init__(self) -> None:
            self.create = world.blobs.create  # type: ignore[method-assign]
            self._reads = iter([True])

        async def read(self, blob_id: str, at: int, count: int) -> bytes:
            if next(self._reads, False):
                return bytes(await world.blobs.read(blob_id, at, count))
            raise BlobUnavailable("the store is away")

    def on_disk() -> set[str]:
        return {str(path) for path in world.blobs.root.rglob("*") if path.is_file()}

    before = on_disk()
    assert await shipping(world, AwayAfterOne()).publish_all(await world.worker()) == 0
    assert on_disk() == before


async def test_publishing_into_an_outage_leaves_no_rows_and_goes_on_after_it(world: WorkerWorld) -> None:
    """Each try left a row that counted as being written until the process ended."""
    job = await world.started(chat_lines(3))
    await closed(world, job)
    worker, away = await world.worker(10 * HOUR_MS), shipping(world, Away(world))
    tries = 0
    for _ in range(600):
        tries += len(await world.store.jobs_to_publish(PublishTurns(count_max=1)))
        assert await away.publish_all(worker) == 0
        world.clock.advance(1000)
    assert 10 <= tries <= 20, "ever more rarely"
    assert await world.rows("select count(*) from blobs where kind = 'rest' and state = 'writing'") == [(0,)]
    assert (await world.look(job)).state is JobState.FINALIZING
    world.clock.advance(64_000)
    assert await shipping(world).publish_all(worker) == 1
    assert (await world.look(job)).state is JobState.CANCELLED


async def test_a_disk_that_takes_a_part_of_a_write_does_not_shorten_an_ordered_file(
    world: WorkerWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the count that `write` returns says so: ignoring it published lines that were cut off."""
    job = await world.started(chat_lines(4), ordered=True)
    await answer(world, job, [3, 0, 2, 1])
    write, full = os.write, [True]

    def partial(descriptor: int, data: Any) -> int:
        if not os.readlink(f"/proc/self/fd/{descriptor}").endswith("-ordered"):
            return write(descriptor, data)
        if full and len(data) <= 10:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, bytes(data)[: max(1, len(data) // 2)])

    worker = await world.worker()
    monkeypatch.setattr(os, "write", partial)
    assert await shipping(world).publish_all(worker) == 0
    assert (await world.look(job)).state is JobState.FINALIZING
    full.clear()
    world.clock.advance(2_000)
    assert await shipping(world).publish_all(worker) == 1
    monkeypatch.undo()
    ended = await world.look(job)
    assert [line["custom_id"] for line in await world.file_lines(ended.output_file_id)] == ["c0", "c1", "c2", "c3"]
    assert list(world.scratch.iterdir()) == []
