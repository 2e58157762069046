"""A dead worker's answers are adopted before its slices go on; a log that cannot be read holds up no other worker's slices."""

from __future__ import annotations

from typing import Any
from zlib import crc32

import pytest

from tests.support.store_verbs import lease_slices, slice_counts
from tests.worker.world import LEASE_MS, Script, WorkerWorld, chat_lines, until, working
from tidegate.core.answers import results
from tidegate.core.errors import BlobMissing, BlobUnavailable
from tidegate.core.files import Placed
from tidegate.core.ids import item_id
from tidegate.core.nouns import AnswerTry, Finished, Job, JobFlush, Usage
from tidegate.core.states import Outcome
from tidegate.stages.tend.lost_workers import ADOPT_FOR_MS, LostWorkers

pytestmark = pytest.mark.anyio

SWEEP_MS = 5_000


class Victim:
    """A worker that holds a slice, wrote an answer, and died before it was committed."""

    def __init__(self, world: WorkerWorld, job: Job) -> None:
        self.world = world
        self.job = job
        self.blob_id = world.id("blob")
        self.worker_id = ""

    async def dies(self) -> None:
        world, job = self.world, self.job
        self.worker_id = worker = await world.worker()
        assert await lease_slices(world.store, worker, job.id, "m", 1, world.id("req"))

        async def next_blob_id() -> str:
            await world.store.begin_blob(self.blob_id, "answers", worker)
            return self.blob_id

        log = await world.blobs.open_log(next_blob_id)
        await log.append(results.response_line(item_id(job.id, 0), b'"c0"', 200, b'{"choices":[{}]}'))
        await log.close()


def answer_of(job: Job, number: int, usage: Usage, nano: int = 0, tries: tuple[Usage, ...] = ()) -> bytes:
    body = b'{"choices":[{}],"usage":{"prompt_tokens":%d,"completion_tokens":%d}}' % (
        usage.input_tokens,
        usage.output_tokens,
    )
    line = results.response_line(item_id(job.id, number), b'"c%d"' % number, 200, body)
    members = [results.cost_members((nano, 0, 0))] if nano else []
    if tries:
        members.append(results.tries_member(tuple(AnswerTry("m", "d", one, (0, 0, 0), None) for one in tries)))
    return results.with_members(line, members) if members else line


@pytest.mark.parametrize("read_bytes", [64, 1 << 20])
async def test_lines_of_several_jobs_are_adopted_each_with_what_it_took(
    world: WorkerWorld, monkeypatch: pytest.MonkeyPatch, read_bytes: int
) -> None:
    """Also lines that are longer than one read, those behind a line that is no answer, and behind what was recorded before."""
    monkeypatch.setattr("tidegate.stages.tend.lost_workers._READ_BYTES", read_bytes)
    jobs = [await world.started(chat_lines(4)) for _ in range(2)]
    worker, blob_id = await world.worker(), world.id("blob")
    lines = [
        answer_of(jobs[0], 0, Usage(10, 0, 1, 0), nano=7),
        b"torn\n",
        answer_of(jobs[0], 1, Usage(20, 0, 2, 0)),
        answer_of(jobs[1], 0, Usage(40, 0, 4, 0), nano=5, tries=(Usage(40, 0, 4, 0), Usage(80, 0, 8, 0))),
        answer_of(jobs[0], 2, Usage(160, 0, 16, 0)),
    ]

    async def next_blob_id() -> str:
        await world.store.begin_blob(blob_id, "answers", worker)
        return blob_id

    log = await world.blobs.open_log(next_blob_id)
    for line in lines:
        await log.append(line)
    await log.close()
    world.clock.advance(LEASE_MS + 1)
    for _ in range(2):
        await LostWorkers(world.store, world.blobs).tend()
    first, second = [await world.look(job) for job in jobs]
    assert (first.answered_count, first.usage, first.cost_nano) == (3, Usage(190, 0, 19, 0), 7)
    assert (second.answered_count, second.usage, second.cost_nano) == (1, Usage(120, 0, 12, 0), 5)
    assert (first.unused_count, second.unused_count) == (0, 0)
    assert [one["custom_id"] for one in await world.file_lines(first.output_file_id)] == ["c0", "c1", "c2"]
    assert [one["custom_id"] for one in await world.file_lines(second.output_file_id)] == ["c0"]
    sums = await world.rows("select crc32 from outcomes where job_id = ? order by number", first.id)
    assert [row[0] for row in sums] == [crc32(lines[at]) for at in (0, 2, 4)], "damage to them would be noticed"


async def test_slices_of_a_worker_that_is_declared_gone_meanwhile_wait_until_its_log_is_adopted(
    world: WorkerWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process sweeps too. Freed at once, the items would be sent again though the log has their answers."""
    job = await world.started(chat_lines(1))
    victim, lost_workers = Victim(world, job), LostWorkers(world.store, world.blobs)
    await victim.dies()
    adopt_logs = lost_workers.adopt_logs

    async def then_is_declared_gone(spool_wait_ms: int = 0) -> set[str]:
        unread = await adopt_logs(spool_wait_ms)
        assert await world.store.declare_gone(victim.worker_id, leaving=True)
        return unread

    monkeypatch.setattr(lost_workers, "adopt_logs", then_is_declared_gone)
    assert await lost_workers.tend() == 0
    monkeypatch.setattr(lost_workers, "adopt_logs", adopt_logs)
    await lost_workers.tend()
    assert (await world.look(job)).answered_count == 1


class Unreadable:
    """Blobs of which one lies on a bad sector."""

    def __init__(self, world: WorkerWorld, blob_id: str) -> None:
        self._inner = world.blobs
        self._blob_id = blob_id

    async def recover(self, blob_id: str) -> int | None:
        if blob_id == self._blob_id:
            raise BlobUnavailable("input/output error")
        return await self._inner.recover(blob_id)

    async def read(self, blob_id: str, at: int, count: int) -> bytes:
        return await self._inner.read(blob_id, at, count)


class OfAnotherHost(Unreadable):
    """Blobs of which one ends in the spool of another host; nothing of it is sealed."""

    async def holds_end(self, blob_id: str) -> bool:
        return blob_id != self._blob_id

    async def recover(self, blob_id: str) -> int | None:
        return None if blob_id == self._blob_id else await self._inner.recover(blob_id)


async def test_a_log_in_another_hosts_spool_is_left_alone_for_one_sweep(world: WorkerWorld) -> None:
    victim = Victim(world, await world.started(chat_lines(2)))
    await victim.dies()
    world.clock.advance(LEASE_MS + 1)
    blobs: Any = OfAnotherHost(world, victim.blob_id)
    assert await LostWorkers(world.store, blobs).tend(SWEEP_MS) == 0
    assert await slice_counts(world.store, victim.job.id) == {"leased": 1}
    assert await LostWorkers(world.store, world.blobs).tend(SWEEP_MS) == 1, "the host that has it waits for nothing"
    assert (await world.look(victim.job)).answered_count == 1


async def test_a_log_that_is_not_delivered_is_given_up_after_one_sweep(world: WorkerWorld) -> None:
    victim = Victim(world, await world.started(chat_lines(2)))
    await victim.dies()
    blobs: Any = OfAnotherHost(world, victim.blob_id)
    world.clock.advance(LEASE_MS + 1)
    assert await LostWorkers(world.store, blobs).tend(SWEEP_MS) == 0
    world.clock.advance(SWEEP_MS)
    assert await LostWorkers(world.store, blobs).tend(SWEEP_MS) == 1
    assert await slice_counts(world.store, victim.job.id) == {"ready": 1}


async def test_a_spool_is_delivered_while_its_worker_still_counts_as_alive_and_after_it_was_given_up(
    world: WorkerWorld,
) -> None:
    for is_given_up in (False, True):
        victim = Victim(world, await world.started(chat_lines(2)))
        await victim.dies()
        if is_given_up:
            await world.store.settle_blob(victim.blob_id)

        class Spool(Unreadable):
            async def left_logs(self) -> list[str]:
                return [self._blob_id, world.id("blob")]

            async def recover(self, blob_id: str) -> int | None:
                assert blob_id == self._blob_id, "a log that the store does not know is another store's"
                return await self._inner.recover(blob_id)

        blobs: Any = Spool(world, victim.blob_id)
        assert await LostWorkers(world.store, blobs).deliver_spool() == 1
        assert await world.rows("select state from blobs where id = ?", victim.blob_id) == [("kept",)]
        assert (await world.look(victim.job)).answered_count == 1
        assert await LostWorkers(world.store, blobs).deliver_spool() == 0, "what has an outcome keeps it"
        assert (await world.look(victim.job)).unused_count == 0


async def test_a_worker_delivers_the_spool_of_its_host_before_it_leases(
    live: WorkerWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its predecessor still counts as alive and holds its slice: what it answered is not waited for, nor sent again."""
    job = await live.started(chat_lines(2), slice_items=1)
    victim, script = Victim(live, job), Script(live, "m")
    await victim.dies()

    async def left_logs() -> list[str]:
        return [victim.blob_id]

    async def has_both() -> bool:
        return (await live.look(job)).answered_count == 2

    monkeypatch.setattr(live.blobs, "left_logs", left_logs)
    async with working(live, script):
        await until(has_both, "both answers")
        assert await live.rows("select state from workers where id = ?", victim.worker_id) == [("alive",)]
    assert [call.number for call in script.calls] == [1]


async def test_one_bad_log_does_not_keep_other_workers_slices_and_not_its_own_for_ever(world: WorkerWorld) -> None:
    """Adoption that failed ended the whole pass, so no slice of any dead worker was ever freed again."""
    jobs = [await world.started(chat_lines(2)) for _ in range(2)]
    bad, good = (Victim(world, job) for job in jobs)
    await bad.dies()
    await good.dies()
    world.clock.advance(LEASE_MS + 1)
    blobs: Any = Unreadable(world, bad.blob_id)
    assert await LostWorkers(world.store, blobs).tend() == 1
    assert (await world.look(good.job)).answered_count == 1
    assert await slice_counts(world.store, good.job.id) == {"ready": 1}
    assert await slice_counts(world.store, bad.job.id) == {"leased": 1}, "its answers may still be read"
    assert await LostWorkers(world.store, blobs).tend() == 0
    world.clock.advance(ADOPT_FOR_MS)
    assert await LostWorkers(world.store, blobs).tend() == 1
    assert await slice_counts(world.store, bad.job.id) == {"ready": 1}
    assert await world.store.abandoned_blobs(10) == []


async def test_a_log_that_is_gone_is_not_waited_for(world: WorkerWorld) -> None:
    victim = Victim(world, await world.started(chat_lines(2)))
    await victim.dies()
    world.clock.advance(LEASE_MS + 1)

    class Gone(Unreadable):
        async def recover(self, blob_id: str) -> int | None:
            raise BlobMissing("no such blob")

    blobs: Any = Gone(world, victim.blob_id)
    assert await LostWorkers(world.store, blobs).tend() == 1
    assert await slice_counts(world.store, victim.job.id) == {"ready": 1}


async def test_more_bad_logs_than_one_pass_holds_do_not_hide_a_good_one(world: WorkerWorld) -> None:
    jobs = [await world.started(chat_lines(2)) for _ in range(23)]
    victims = [Victim(world, job) for job in jobs]
    for victim in victims:
        await victim.dies()
        world.clock.advance(1)
    world.clock.advance(LEASE_MS + 1)

    class AllButOne(Unreadable):
        async def recover(self, blob_id: str) -> int | None:
            if blob_id != victims[-1].blob_id:
                raise BlobUnavailable("input/output error")
            return await world.blobs.recover(blob_id)

    blobs: Any = AllButOne(world, "")
    while await world.store.overdue_workers(1):
        await LostWorkers(world.store, blobs).tend()
    assert (await world.look(jobs[-1])).answered_count == 1
    assert await slice_counts(world.store, jobs[-1].id) == {"ready": 1}


async def test_a_log_that_becomes_readable_is_adopted_and_its_item_is_not_run_again(world: WorkerWorld) -> None:
    victim = Victim(world, await world.started(chat_lines(2)))
    await victim.dies()
    world.clock.advance(LEASE_MS + 1)
    blobs: Any = Unreadable(world, victim.blob_id)
    assert await LostWorkers(world.store, blobs).tend() == 0
    assert await LostWorkers(world.store, world.blobs).tend() == 1
    heir = await world.worker()
    [leased] = await lease_slices(world.store, heir, victim.job.id, "m", 1, "t")
    assert leased.done == {0}


async def test_adoption_begins_behind_what_was_recorded(world: WorkerWorld) -> None:
    """An answer that has its place already is no second one that was paid for in vain."""
    job = await world.started(chat_lines(4))
    worker, blob_id = await world.worker(), world.id("blob")
    lines = [answer_of(job, number, Usage(1, 0, 1, 0)) for number in range(2)]

    async def next_blob_id() -> str:
        await world.store.begin_blob(blob_id, "answers", worker)
        return blob_id

    log = await world.blobs.open_log(next_blob_id)
    for line in lines:
        await log.append(line)
    await log.close()
    done = Finished(0, Outcome.ANSWERED, len(lines[0]), 0, "", Usage(1, 0, 1, 0))
    await world.store.record_outcomes([JobFlush(job.id, [done], Placed(blob_id, 0, len(lines[0])))], [], [])
    world.clock.advance(LEASE_MS + 1)
    await LostWorkers(world.store, world.blobs).tend()
    found = await world.look(job)
    assert (found.answered_count, found.unused_count) == (2, 0)
