"""What the recorder leaves behind: no blob that is written for ever, no log that can never take what is brought to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any, cast
from zlib import crc32

import msgspec
import pytest
from structlog.testing import capture_logs

from tests.support.store_verbs import lease_slices
from tests.worker.world import Script, WorkerWorld, chat_lines, until
from tidegate import metrics
from tidegate.backends.blobs_local import LocalBlobs
from tidegate.backends.system import LocalWake
from tidegate.core.answers import results
from tidegate.core.errors import BlobUnavailable, BlobVoid, StoreUnavailable
from tidegate.core.files import Placed
from tidegate.core.ids import item_id
from tidegate.core.job_controls import JobControls
from tidegate.core.nouns import Attempts, Finished, ItemVerdict, Job
from tidegate.core.ports import LogIds
from tidegate.core.states import Outcome
from tidegate.stages.record import SPARE_COUNT, FlushLimits, Recorder

pytestmark = pytest.mark.anyio


def verdict(job: Job, number: int, size_bytes: int = 0, outcome: Outcome = Outcome.ANSWERED) -> ItemVerdict:
    body = b'{"choices":[{}],"x":"%b"}' % (b"x" * size_bytes)
    line = results.response_line(item_id(job.id, number), b'"c%d"' % number, 200, body)
    finished = Finished(number, outcome, len(line), 0, "t", crc32=crc32(line))
    return ItemVerdict(job.id, number, line, finished)


@asynccontextmanager
async def recording(
    world: WorkerWorld, blobs: Any, refused: str = "", unflushed_bytes_max: int = 64 << 20, upstream: Any = None
) -> AsyncIterator[Recorder]:
    """A recorder that runs; the first blob of the `refused` kind cannot be begun ahead, nor at once when it is needed."""
    worker, refusals = await world.worker(), [refused] * 2

    async def new_blob(kind: str) -> str:
        if kind in refusals:
            refusals.remove(kind)
            raise StoreUnavailable("away")
        blob_id = world.id("blob")
        await world.store.begin_blob(blob_id, kind, worker)
        return blob_id

    limits = FlushLimits(5, 1, 1 << 20, unflushed_bytes_max)
    recorder = Recorder(world.store, blobs, upstream or Script(world), limits, new_blob, asyncio.Event(), LocalWake())
    recorder.expect()
    running = asyncio.create_task(recorder.run())
    yield recorder
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def writing(world: WorkerWorld) -> int:
    """How many logs are being written, but for those that are only begun ahead."""
    counted = "select count(*) from blobs where state = 'writing' and kind in ('answers', 'errors')"
    return int((await world.rows(counted))[0][0]) - 2 * SPARE_COUNT


async def written(world: WorkerWorld) -> list[int]:
    """How long each log of answers is that lines were written to."""
    found = [
        await world.blobs.recover(row[0]) for row in await world.rows("select id from blobs where kind = 'answers'")
    ]
    return [size_bytes for size_bytes in found if size_bytes is not None]


async def test_a_log_that_moves_on_leaves_no_blob_that_is_written_for_ever(world: WorkerWorld, tmp_path: Any) -> None:
    """Rolled logs stayed `writing` while their process lived: their bytes could not go, and its death meant to adopt them all."""
    blobs = LocalBlobs(tmp_path / "small-logs", log_bytes_max=1)
    job = await world.started(chat_lines(8))
    async with recording(world, blobs) as recorder:
        for number in range(7):
            recorder.record(verdict(job, number))
            await recorder.drain()
    assert (await world.look(job)).answered_count == 7
    assert await world.rows("select count(*) from blobs where kind = 'answers'") == [(7 + SPARE_COUNT,)]
    assert await writing(world) == 1
    await blobs.close()


async def test_logs_that_could_not_be_settled_are_settled_after_a_later_commit(
    world: WorkerWorld, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    blobs = LocalBlobs(tmp_path / "small-logs", log_bytes_max=1)
    job = await world.started(chat_lines(4))
    settle, is_away = world.store.settle_blob, True

    async def sometimes(blob_id: str) -> None:
        if is_away:
            raise StoreUnavailable("away")
        await settle(blob_id)

    monkeypatch.setattr(world.store, "settle_blob", sometimes)
    async with recording(world, blobs) as recorder:
        for number in range(4):
            is_away = number < 3
            recorder.record(verdict(job, number))
            await recorder.drain()
    assert await writing(world) == 1
    await blobs.close()


class Torn:
    """Blobs whose logs fail at their first so many appends, as a full disk does."""

    def __init__(self, inner: LocalBlobs, failures: int) -> None:
        self.inner = inner
        self.failures = failures

    async def open_log(self, next_blob_id: LogIds) -> Any:
        log = await self.inner.open_log(next_blob_id)
        append = log.append

        async def torn(data: bytes) -> None:
            if self.failures:
                self.failures -= 1
                await append(data[:1] + b"\n")
                raise BlobUnavailable("no space left")
            await append(data)

        log.append = torn  # type: ignore[method-assign]
        return log


async def test_logs_given_up_on_a_full_disk_are_settled_once_their_lines_are_committed(
    world: WorkerWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidegate.stages.record._RETRY_S", 0.001)
    job = await world.started(chat_lines(4))
    async with recording(world, Torn(world.blobs, 5)) as recorder:
        recorder._retry_s = 0.001
        for number in range(2):
            recorder.record(verdict(job, number))
            await recorder.drain()
    assert (await world.look(job)).answered_count == 2
    assert await world.rows("select count(*) from blobs where kind = 'answers'") == [(6 + SPARE_COUNT,)]
    assert await writing(world) == 1


class Spool:
    """A log like an object store's: sealing is worth a wait, and only so much may wait unsealed."""

    unsealed_bytes_max = 32_000
    seal_after_ms = 3_600_000
    seal_after_bytes = 8_000

    def __init__(self, next_blob_id: LogIds) -> None:
        self._next_blob_id = next_blob_id
        self._blob_id = ""
        self._size_bytes = 0

    async def append(self, data: bytes) -> None:
        if self._size_bytes and self._size_bytes + len(data) > self.unsealed_bytes_max:
            raise BlobUnavailable("seal them first")
        if not self._size_bytes:
            self._blob_id = await self._next_blob_id()
        self._size_bytes += len(data)
        await asyncio.sleep(0)

    async def seal(self) -> Placed | None:
        if not self._size_bytes:
            raise BlobVoid("nothing to seal")
        placed, self._size_bytes = Placed(self._blob_id, 0, self._size_bytes), 0
        return placed

    async def close(self) -> None:
        return


class Spooling:
    async def open_log(self, next_blob_id: LogIds) -> Spool:
        return Spool(next_blob_id)


async def test_more_lines_than_a_spool_holds_are_sealed_in_turn(world: WorkerWorld) -> None:
    """A large part behind a small unsealed one was refused, taken to a fresh log behind the same small one, and refused for ever."""
    job = await world.started(chat_lines(4))
    async with recording(world, Spooling()) as recorder:
        recorder.record(verdict(job, 0))
        while not recorder._appended:  # noqa: ASYNC110 - the recorder says nothing when it waits for more
            await asyncio.sleep(0.001)
        recorder.record(verdict(job, 1, 40_000))
        async with asyncio.timeout(10):
            # Not by a drain, which seals in any case.
            while (await world.look(job)).answered_count < 2:  # noqa: ASYNC110 - what is waited for is in a database
                await asyncio.sleep(0.001)
    assert not recorder.failing


async def test_draining_waits_for_no_larger_object_however_the_last_lines_come(world: WorkerWorld) -> None:
    job = await world.started(chat_lines(8))
    async with recording(world, Spooling()) as recorder:
        for number in range(3):
            recorder.record(verdict(job, number))
            await asyncio.sleep(0)
        draining = asyncio.create_task(recorder.drain())
        for number in range(3, 6):
            await asyncio.sleep(0)
            recorder.record(verdict(job, number))
        async with asyncio.timeout(10):
            await draining
            await recorder.drain()
    assert (await world.look(job)).answered_count == 6


async def test_lines_of_jobs_that_finish_in_turn_are_all_recorded(world: WorkerWorld) -> None:
    jobs = [await world.started(chat_lines(3)) for _ in range(2)]
    async with recording(world, world.blobs) as recorder:
        for number in (2, 0, 1):
            for job in jobs:
                recorder.record(verdict(job, number))
        await recorder.drain()
    for job in jobs:
        done = await world.look(job)
        assert done.answered_count == 3
        assert [line["custom_id"] for line in await world.file_lines(done.output_file_id)] == ["c0", "c1", "c2"]


async def test_a_log_that_begins_late_puts_no_line_of_the_other_down_twice(
    world: WorkerWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidegate.stages.record._RETRY_S", 0.001)
    job = await world.started(chat_lines(3))
    await lease_slices(world.store, await world.worker(), job.id, "m", 1, "t")
    answered = verdict(job, 0)
    async with recording(world, world.blobs, refused="errors") as recorder:
        recorder.record(answered)
        recorder.record(verdict(job, 1, outcome=Outcome.FAILED))
        await recorder.drain()
    done = await world.look(job)
    assert (done.answered_count, done.failed_count) == (1, 1)
    assert await written(world) == [len(answered.line)]


async def test_what_is_committed_is_let_go_of_and_reported(world: WorkerWorld) -> None:
    """Until then a recorder that holds too much is full, and heartbeats leave its slices alone."""
    job = await world.started(chat_lines(3))
    await lease_slices(world.store, await world.worker(), job.id, "m", 1, "t")
    script, reported = Script(world), list[tuple[str, int]]()
    script.recorded = reported.extend  # type: ignore[method-assign, assignment]
    async with recording(world, world.blobs, unflushed_bytes_max=100, upstream=script) as recorder:
        recorder.record(verdict(job, 0, 200))
        recorder.release_slice(job.id, 0, "t", 0)
        assert recorder.full
        assert recorder.is_settling(job.id, 0, "t")
        await recorder.drain()
        assert not recorder.full
        assert not recorder.is_settling(job.id, 0, "t")
    assert reported == [(job.id, 0)]


async def test_what_an_unexpected_error_puts_back_is_written_once_more_and_no_more(
    world: WorkerWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = await world.started(chat_lines(3), slice_items=1)
    assert len(await lease_slices(world.store, await world.worker(), job.id, "m", 3, "t")) == 3
    answered = verdict(job, 0)

    async def breaks(*_: Any) -> Any:
        raise RuntimeError("a fault of ours")

    async with recording(world, world.blobs, unflushed_bytes_max=1) as recorder:
        with monkeypatch.context() as broken:
            broken.setattr(world.store, "record_outcomes", breaks)
            recorder.record(answered)
            recorder.finish_slice(job.id, 0, "t")
            recorder.tried(job.id, "t", Attempts(1, 1, 0, "throttled"))
            recorder.release_slice(job.id, 1, "t", 0)
            # Written and committed in one go, so that it breaks after the line was written.
            recorder.hurry()
            async with asyncio.timeout(10):
                while recorder._logs or not recorder._left_blob_ids:  # noqa: ASYNC110 - nothing announces it
                    await asyncio.sleep(0.001)
        again = asyncio.create_task(recorder.run())
        await recorder.drain()
        assert not recorder.full
        again.cancel()
    assert (await world.look(job)).answered_count == 1
    assert await written(world) == [len(answered.line)] * 2
    slices = "select first, state from slices where job_id = ? order by first"
    assert await world.rows(slices, job.id) == [(0, "done"), (1, "ready"), (2, "leased")]
    assert await world.rows("select number, reason from attempts where job_id = ?", job.id) == [(1, "throttled")]


async def test_lines_of_a_log_that_was_collected_before_their_commit_are_written_to_another(
    world: WorkerWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes of a worker that seemed lost may go before it is back; its answers may not."""
    monkeypatch.setattr("tidegate.stages.record._RETRY_S", 0.001)
    job, commit, tries = await world.started(chat_lines(3)), world.store.record_outcomes, list[Any]()
    before = metrics.counted(metrics.record_failures)["log_collected"]

    async def condemn(tx: Any) -> None:
        tx._connection.execute("update blobs set state = 'condemned', condemned_at = 0 where id = ?", tries)

    async def collected(flushes: list[Any], *more: Any) -> Any:
        tries.append(flushes[0].answers_placed.blob_id)
        if len(tries) == 1:
            await world.store._driver.write(condemn)
        return await commit(flushes, *more)

    monkeypatch.setattr(world.store, "record_outcomes", collected)
    async with recording(world, world.blobs) as recorder:
        recorder._retry_s = 0.001
        recorder.record(verdict(job, 0))
        async with asyncio.timeout(60):
            await recorder.drain()
        assert not recorder.full
    assert (await world.look(job)).answered_count == 1
    assert len(set(tries)) == len(tries) == 2
    assert metrics.counted(metrics.record_failures)["log_collected"] == before + 1


async def test_a_new_life_writes_to_logs_of_its_own_after_what_waits_is_committed(world: WorkerWorld) -> None:
    job = await world.started(chat_lines(4))
    async with recording(world, Spooling()) as recorder:
        recorder.record(verdict(job, 0))
        # The recorder says nothing when it waits for more, nor when it has begun the blobs that its logs take next.
        while not recorder._appended or len(recorder._spare_blob_ids["answers"]) < SPARE_COUNT:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        recorder.renew()
        recorder.record(verdict(job, 1))
        async with asyncio.timeout(10):
            await recorder.drain()
            recorder.record(verdict(job, 2))
            await recorder.drain()
    assert (await world.look(job)).answered_count == 3
    # Three that were written, those that were begun ahead in the first life, and those of the second.
    assert await world.rows("select count(*) from blobs where kind = 'answers'") == [(3 + 2 * SPARE_COUNT,)]


async def test_a_blob_that_was_being_begun_when_a_life_ended_is_not_the_next_ones(
    world: WorkerWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, gate, begun = await world.started(chat_lines(4)), asyncio.Event(), list[str]()
    begin_blob = world.store.begin_blob

    async def slow(blob_id: str, kind: str, worker_id: str) -> None:
        begun.append(blob_id)
        await gate.wait()
        await begin_blob(blob_id, kind, worker_id)

    monkeypatch.setattr(world.store, "begin_blob", slow)
    async with recording(world, world.blobs) as recorder:
        while not begun:  # noqa: ASYNC110 - nothing announces it
            await asyncio.sleep(0.001)
        recorder.renew()
        gate.set()
        recorder.record(verdict(job, 0))
        await recorder.drain()
        assert (await world.rows("select state from blobs where id = ?", begun[0])) == [("kept",)]
    assert (await world.look(job)).answered_count == 1


async def test_a_job_that_a_commit_stopped_is_reported_at_once(world: WorkerWorld) -> None:
    """What this process still sends of it does not wait for the next heartbeat."""
    job = await world.started(chat_lines(4), controls=JobControls(max_cost_nano=6))
    paid = verdict(job, 0)
    paid = msgspec.structs.replace(paid, finished=msgspec.structs.replace(paid.finished, cost_nano=(7, 0, 0)))
    async with recording(world, world.blobs) as recorder:
        recorder.record(verdict(job, 1))
        await recorder.drain()
        assert not recorder.job_stopped.is_set()
        recorder.record(paid)
        await recorder.drain()
        assert recorder.job_stopped.is_set()


class Ledger:
    """A store and blobs that note what they are given, and are away for so many calls."""

    seal_after_ms = 0
    seal_after_bytes = 0

    def __init__(self) -> None:
        self.committed: list[int] = []
        self.blobs_away = self.store_away = self.seals_away = 0
        self._size_bytes = self.appended_bytes = 0

    async def open_log(self, next_blob_id: LogIds) -> Any:
        await next_blob_id()
        return self

    async def append(self, data: bytes) -> None:
        if self.blobs_away:
            self.blobs_away -= 1
            raise BlobUnavailable("no space left")
        self._size_bytes += len(data)
        self.appended_bytes += len(data)

    async def seal(self) -> Placed:
        if self.seals_away:
            self.seals_away -= 1
            raise BlobUnavailable("away")
        size_bytes, self._size_bytes = self._size_bytes, 0
        return Placed("blob", 0, size_bytes)

    async def record_outcomes(self, flushes: list[Any], *_: Any) -> list[Any]:
        if self.store_away:
            self.store_away -= 1
            raise StoreUnavailable("away")
        self.committed.append(sum(len(one.answers) for one in flushes))
        return []

    async def settle_blob(self, blob_id: str) -> None:
        pass


def plain(number: int, size_bytes: int = 10) -> ItemVerdict:
    return ItemVerdict("job", number, b"x" * size_bytes, Finished(number, Outcome.ANSWERED, size_bytes, 0, "t"))


@asynccontextmanager
async def noting(ledger: Ledger, limits: FlushLimits, news: LocalWake | None = None) -> AsyncIterator[Recorder]:
    async def new_blob(kind: str) -> str:
        return "blob"

    upstream: Any = SimpleNamespace(recorded=list)
    world = cast(Any, ledger)
    recorder = Recorder(world, world, upstream, limits, new_blob, asyncio.Event(), news or LocalWake())
    running = asyncio.create_task(recorder.run())
    try:
        yield recorder
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def turns() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_a_flush_waits_for_so_many_lines_or_bytes_and_for_nothing_more() -> None:
    ledger = Ledger()
    async with noting(ledger, FlushLimits(3_600_000, 3, 1_000, 1_500)) as recorder:
        for number in range(2):
            recorder.record(plain(number))
        await turns()
        assert ledger.committed == []
        recorder.record(plain(2))
        await turns()
        assert ledger.committed == [3]
        recorder.record(plain(3, 999))
        await turns()
        assert ledger.committed == [3]
        recorder.record(plain(4, 1))
        await turns()
        assert ledger.committed == [3, 2]
        recorder.record(plain(5, 1_500))
        assert not recorder.full
        recorder.record(plain(6, 1))
        assert recorder.full
        await turns()
        assert (recorder.full, ledger.committed) == (False, [3, 2, 2])
        recorder.record(plain(7))
        recorder.hurry()
        await turns()
        assert ledger.committed == [3, 2, 2, 1]
        recorder.tried("job", "t", Attempts(8, 1, 0, "throttled"))
        for number in range(2):
            recorder.record(plain(number))
        await turns()
        assert len(ledger.committed) == 4, "a hurry is about what waited then"


async def test_who_follows_a_job_looks_again_at_each_commit() -> None:
    ledger, news = Ledger(), LocalWake()
    noticed = list[int]()
    news.notify = lambda: noticed.append(len(ledger.committed))  # type: ignore[method-assign]
    async with noting(ledger, FlushLimits(3_600_000, 1, 1_000, 1_500), news) as recorder:
        for number in range(2):
            recorder.record(plain(number))
            await turns()
    assert noticed == [1, 2], "and not before it is there to be seen"


async def test_what_was_tried_is_recorded_with_no_line_beside_it() -> None:
    """Another worker must not believe that the item was never tried."""
    ledger = Ledger()
    async with noting(ledger, FlushLimits(0, 3, 1_000, 1_500)) as recorder:
        await turns()
        recorder.tried("job", "t", Attempts(8, 1, 0, "throttled"))
        await turns()
        assert ledger.committed == [0]


async def test_an_object_is_worth_waiting_for_until_it_is_large_or_old_enough() -> None:
    ledger = Ledger()
    ledger.seal_after_ms, ledger.seal_after_bytes = 3_600_000, 30

    async def appended(size_bytes: int) -> bool:
        return ledger.appended_bytes == size_bytes

    def committed() -> bool:
        return len(ledger.committed) == 2

    async with noting(ledger, FlushLimits(0, 9, 1_000, 1_500)) as recorder:
        for number in range(2):
            recorder.record(plain(number))
            await until(partial(appended, 10 * (number + 1)), "the line to be durable")
        assert ledger.committed == []
        recorder.record(plain(2))
        await until(partial(appended, 30), "the line to be durable")
        assert ledger.committed == [2], "with the third it would be large enough"
        ledger.seal_after_ms = 1
        await until(committed, "what is old enough")
        assert ledger.committed == [2, 1]


@pytest.mark.parametrize(
    ("what", "slept"), [("blobs_away", [0.5, 1.0, 2.0, 4.0, 0.5]), ("store_away", [0.5] * 5), ("seals_away", [0.5] * 5)]
)
async def test_while_a_disk_or_a_store_is_away_results_are_kept_nothing_new_is_sent_and_it_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, what: str, slept: list[float]
) -> None:
    ledger, waits, sleep = Ledger(), list[float](), asyncio.sleep
    async with noting(ledger, FlushLimits(3_600_000, 1, 1_000, 1_500)) as recorder:

        async def quick(wait_s: float) -> None:
            waits.append(wait_s)
            assert recorder.full
            await sleep(0)

        with monkeypatch.context() as patch, capture_logs() as logged:
            patch.setattr(asyncio, "sleep", quick)
            for failures in (4, 1):
                setattr(ledger, what, failures)
                recorder.record(plain(failures))
                for _ in range(40):
                    await sleep(0)
                assert not recorder.full
    assert (ledger.committed, waits) == ([1, 1], slept)
    assert [line["event"] for line in logged] == ["record_postponed"] * 2, "once for each outage"


class Renewed(Ledger):
    """A ledger with a new log each time, whose objects are worth waiting for."""

    async def open_log(self, next_blob_id: LogIds) -> Any:
        await super().open_log(next_blob_id)
        self._size_bytes = 0
        return SimpleNamespace(append=self.append, seal=self.seal, seal_after_ms=7_200_000, seal_after_bytes=40)

    async def seal(self) -> Placed:
        assert self._size_bytes == 30, "each line lies in the new log, and lies there once"
        return await super().seal()


async def test_lines_that_wait_for_a_larger_object_are_written_again_with_one_that_failed() -> None:
    """The log is given up, and what is not sealed of it with it."""
    ledger = Renewed()
    async with noting(ledger, FlushLimits(3_600_000, 1, 1_000, 1_500)) as recorder:
        recorder.record(plain(0))
        await turns()
        ledger.blobs_away, recorder._retry_s = 1, 0
        recorder.record(plain(1))
        await turns()
        assert (ledger.appended_bytes, ledger.committed) == (30, []), "the first line twice"
        recorder.record(plain(2))
        await turns()
        recorder.hurry()
        await turns()
        assert ledger.committed == [3]


class Halting(Ledger):
    """A ledger whose commits and seals go on only when they are let."""

    def __init__(self) -> None:
        super().__init__()
        self.commits, self.seals = asyncio.Semaphore(0), asyncio.Semaphore(9)
        self.begun = 0

    async def seal(self) -> Placed:
        if self.seals.locked():
            raise BlobUnavailable("away")
        await self.seals.acquire()
        return await super().seal()

    async def record_outcomes(self, flushes: list[Any], *slices: Any) -> list[Any]:
        self.begun += 1
        await self.commits.acquire()
        return await super().record_outcomes(flushes, *slices)


@pytest.mark.parametrize("away", ["a silent store", "a store that is away", "objects that are away"])
async def test_what_comes_while_older_results_wait_is_durable_before_they_are_committed(
    monkeypatch: pytest.MonkeyPatch, away: str
) -> None:
    monkeypatch.setattr("tidegate.stages.record._RETRY_S", 0.001)
    ledger = Halting()
    if away == "a store that is away":
        ledger.commits, ledger.store_away = asyncio.Semaphore(9), 1 << 40
    if away == "objects that are away":
        ledger.seals = asyncio.Semaphore(0)

    async def appended(size_bytes: int) -> bool:
        return ledger.appended_bytes == size_bytes

    def committed() -> bool:
        return sum(ledger.committed) == 3

    async with noting(ledger, FlushLimits(0, 1, 1_000, 1_500)) as recorder:
        for number in range(3):
            recorder.record(plain(number))
            await until(partial(appended, 10 * (number + 1)), "the line to be durable")
        assert ledger.committed == []
        ledger.store_away = 0
        for _ in range(3):
            ledger.seals.release()
            ledger.commits.release()
        await until(committed, "all three")
        assert not recorder.full


async def test_what_comes_behind_a_log_that_is_sealed_already_waits_for_the_next_commit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Errors cannot be sealed at once: an answer that comes meanwhile is not in the bytes that were sealed before."""
    monkeypatch.setattr("tidegate.stages.record._RETRY_S", 0.001)
    ledger, seals = Ledger(), list[int]()
    seal = ledger.seal

    async def sealed() -> Placed:
        seals.append(len(seals))
        if len(seals) == 2:
            recorder.record(plain(2))
            raise BlobUnavailable("away")
        return await seal()

    monkeypatch.setattr(ledger, "seal", sealed)
    async with noting(ledger, FlushLimits(0, 2, 1_000, 1_500)) as recorder:
        recorder.record(plain(0))
        failed = Finished(1, Outcome.FAILED, 10, 0, "t")
        recorder.record(ItemVerdict("job", 1, b"x" * 10, failed))
        await recorder.drain()
    assert ledger.committed == [1, 1]


async def test_a_new_life_takes_nothing_before_the_answers_of_the_last_one_are_committed() -> None:
    """Its slices are lost: leased again, their items would be sent again while their answers wait here."""
    ledger = Halting()

    async def begun(count: int) -> bool:
        return ledger.begun == count

    def open_again() -> bool:
        return not recorder.full

    async with noting(ledger, FlushLimits(0, 1, 1_000, 1_500)) as recorder:
        recorder.record(plain(0))
        await until(partial(begun, 1), "the first commit")
        recorder.record(plain(1))
        assert not recorder.full
        recorder.renew()
        assert recorder.full
        ledger.commits.release()
        await until(partial(begun, 2), "the second commit")
        assert (ledger.committed, recorder.full) == ([1], True)
        ledger.commits.release()
        await until(open_again, "the second answer")
        # A call of the life before that ends later.
        recorder.record(plain(2))
        assert not recorder.full
        recorder.commit_first()
        assert recorder.full
        ledger.commits.release()
        await until(open_again, "the third answer")
    assert ledger.committed == [1, 1, 1]


async def test_a_recorder_that_ends_leaves_no_question_to_the_store_behind() -> None:
    """Its answer would be committed after this process has left, and nothing here would note it."""
    asked, ended = asyncio.Event(), list[int]()

    class Silent(Ledger):
        async def record_outcomes(self, flushes: list[Any], *_: Any) -> list[Any]:
            asked.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended.append(len(flushes))
            return []

    async with noting(Silent(), FlushLimits(0, 1, 1_000, 1_500)) as recorder:
        recorder.record(plain(0))
        await asked.wait()
    await turns()
    assert ended == [1]


async def test_logs_are_begun_ahead_once_results_are_expected() -> None:
    """A process that runs nothing begins none."""
    begun: list[str] = []

    async def new_blob(kind: str) -> str:
        begun.append(kind)
        return f"blob {len(begun)}"

    def are_begun() -> bool:
        return len(begun) == 2 * SPARE_COUNT

    ledger: Any = Ledger()
    upstream: Any = SimpleNamespace(recorded=list)
    recorder = Recorder(
        ledger, ledger, upstream, FlushLimits(0, 1, 1_000, 1_500), new_blob, asyncio.Event(), LocalWake()
    )
    running = asyncio.create_task(recorder.run())
    await turns()
    assert begun == []
    recorder.expect()
    await until(are_begun, "the logs")
    assert sorted(begun) == ["answers"] * SPARE_COUNT + ["errors"] * SPARE_COUNT
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_what_an_unexpected_error_meets_while_older_results_wait_is_written_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tidegate.stages.record._RETRY_S", 0.001)
    ledger = Halting()
    append = ledger.append

    def begun() -> bool:
        return ledger.begun == 1

    async def breaks(data: bytes) -> None:
        raise RuntimeError("a fault of ours")

    async with noting(ledger, FlushLimits(0, 1, 1_000, 1_500)) as recorder:
        recorder.record(plain(0))
        await until(begun, "the first commit")
        monkeypatch.setattr(ledger, "append", breaks)
        recorder.record(plain(1))

        def is_put_back() -> bool:
            return recorder._part.line_count == 2

        await until(is_put_back, "both lines to be put back")
        monkeypatch.setattr(ledger, "append", append)
        ledger.commits = asyncio.Semaphore(9)
        again = asyncio.create_task(recorder.run())
        await recorder.drain()
        again.cancel()
    assert sum(ledger.committed) == 2


@pytest.mark.parametrize("error", [BlobUnavailable("no space left"), StoreUnavailable("no blob can be begun")])
async def test_what_cannot_be_written_while_older_results_wait_is_kept_and_written_once_it_can_be(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.setattr("tidegate.stages.record._RETRY_S", 0.001)
    ledger, refused = Halting(), list[bytes]()
    append = ledger.append

    async def breaks(data: bytes) -> None:
        refused.append(data)
        raise error

    def begun() -> bool:
        return ledger.begun == 1

    def is_refused_again() -> bool:
        return len(refused) >= 3

    async with noting(ledger, FlushLimits(0, 1, 1_000, 1_500)) as recorder:
        recorder.record(plain(0))
        await until(begun, "the first commit")
        monkeypatch.setattr(ledger, "append", breaks)
        recorder.record(plain(1, 20))
        recorder.record(plain(2, 30))
        await until(is_refused_again, "more tries")
        assert len(set(refused)) == 1, "the same lines, however many came since"
        assert ledger.begun == 1, "the commit under way goes on"
        monkeypatch.setattr(ledger, "append", append)
        for _ in range(3):
            ledger.commits.release()
        await recorder.drain()
    assert (sum(ledger.committed), ledger.appended_bytes) == (3, 60)


async def test_a_store_that_falls_silent_as_the_next_log_is_begun_keeps_no_line_from_the_disk(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tidegate.stages.record._RETRY_S", 0.001)
    ledger, asked, gate = Ledger(), list[str](), asyncio.Event()

    async def new_blob(kind: str) -> str:
        asked.append(kind)
        if len(asked) > 1:
            await gate.wait()
        return f"blob {len(asked)}"

    def is_asked() -> bool:
        return len(asked) > 1

    def is_durable() -> bool:
        return ledger.appended_bytes == 10

    upstream: Any = SimpleNamespace(recorded=list)
    world = cast(Any, ledger)
    recorder = Recorder(world, world, upstream, FlushLimits(0, 1, 1_000, 1_500), new_blob, asyncio.Event(), LocalWake())
    recorder.expect()
    running = asyncio.create_task(recorder.run())
    await until(is_asked, "the store to be asked for more")
    recorder.record(plain(0))
    await until(is_durable, "the line to be durable")
    assert ledger.committed == []
    gate.set()
    await recorder.drain()
    assert ledger.committed == [1]
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
