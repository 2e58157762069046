"""What several processes do to each other on PostgreSQL. Deadlocks are not resolved here: one would fail its test by time-out."""

from __future__ import annotations

import asyncio
import random
from typing import Any, TypeVar

import asyncpg
import pytest

from tests.contracts.limits_world import budget, minute
from tests.contracts.store_world import LEASE_MS, MODEL, StoreWorld, plan_of
from tests.support.ports import FairDice
from tests.support.processes import wait_until_async
from tests.support.store_verbs import granted, lease_slices, slice_counts, start_job
from tidegate.core.errors import ApiProblem, LostRace
from tidegate.core.nouns import Job, JobEnd, JobFlush, JobStart, LeasedSlice
from tidegate.core.operations import OperationScope
from tidegate.core.schedule import Pick, Why
from tidegate.core.schedule.share_owner import tenant_owner
from tidegate.core.schedule.snapshot import ModelRoom
from tidegate.core.states import JobState
from tidegate.stages.operate import job_verbs
from tidegate.store.database.clock import move_along
from tidegate.store.database.driver import TransactionBody, Tx
from tidegate.store.database.postgres import PostgresDriver
from tidegate.store.operators.audit import AuditFilter
from tidegate.store.operators.operations import JobVerb, OperationStep
from tidegate.store.store import Store

pytestmark = pytest.mark.anyio

T = TypeVar("T")
ROUNDS = 12
FOREVER_MS = 10**12
VERBS = job_verbs(FairDice(), 0)
CANCEL, RESUME, REQUEUE = VERBS["cancel"], VERBS["resume"], VERBS["requeue"]


@pytest.fixture
async def world(postgres_world: StoreWorld) -> StoreWorld:
    return postgres_world


async def several(world: StoreWorld, count: int) -> list[Store]:
    """Stores with connections that are open already, so that what follows is truly at once."""
    stores = [await world.open_another() for _ in range(count)]
    await asyncio.gather(*(store.now_ms() for store in stores))
    return stores


async def test_eight_leasers_at_once_get_slices_of_their_own(world: StoreWorld) -> None:
    job = await world.running(await world.caller(), *([1] * 40))
    stores = await several(world, 8)
    workers = [await world.worker() for _ in stores]

    async def take(turn: int) -> list[list[LeasedSlice]]:
        calls = [
            lease_slices(store, worker, job.id, MODEL, 2, f"{turn}-{worker}")
            for store, worker in zip(stores, workers, strict=True)
        ]
        return await asyncio.gather(*calls)

    taken: list[int] = []
    for turn in range(2):
        for pieces in await take(turn):
            assert len(pieces) == 2, "a leaser that meets locked slices takes the next ones"
            taken += [piece.first for piece in pieces]
    assert len(set(taken)) == 32
    assert await slice_counts(world.store, job.id) == {"leased": 32, "ready": 8}


async def test_the_last_slice_goes_to_one_of_many(world: StoreWorld) -> None:
    stores = await several(world, 6)
    worker = await world.worker()
    job = await world.running(await world.caller(), *([1] * 3))
    calls = [lease_slices(store, worker, job.id, MODEL, 1, f"t{n}") for n, store in enumerate(stores)]
    taken = [piece.first for pieces in await asyncio.gather(*calls) for piece in pieces]
    assert len(taken) == len(set(taken)) <= 3


@pytest.mark.parametrize("seed", range(3))
async def test_recorders_at_once_neither_deadlock_nor_count_twice(world: StoreWorld, seed: int) -> None:
    rng = random.Random(seed)
    caller = await world.caller()
    jobs = [await world.running(caller, *([10] * 3)) for _ in range(3)]
    stores = await several(world, 5)
    sent: dict[str, int] = {job.id: 0 for job in jobs}

    async def recorder(store: Store, worker: str) -> None:
        log, errors = await world.log("answers", worker), await world.log("errors", worker)
        held = [(job, piece) for job in jobs for piece in await lease_slices(store, worker, job.id, MODEL, 1, worker)]
        for turn in range(6):
            flushes: list[JobFlush] = []
            for job in rng.choices(jobs, k=rng.randint(1, 4)):
                numbers = [rng.randrange(30) for _ in range(rng.randint(1, 8))]
                flushes.append(world.answers(log, job, *numbers))
                sent[job.id] += len(numbers)
            for job, piece in held:
                number = rng.randrange(piece.first, piece.first + piece.count)
                flushes.append(world.errors(errors, job, number, token=piece.token))
            done = [(job.id, piece.first, piece.token) for job, piece in held] if turn == 5 else []
            rng.shuffle(flushes)
            for _ in range(rng.choice((1, 1, 2))):
                await store.record_outcomes(flushes, done, [])

    await asyncio.gather(*[recorder(store, await world.worker()) for store in stores])
    for job in jobs:
        job = await world.judge(job)
        assert job.answered_count + job.unused_count == sent[job.id], "every answer is in the file or counted as unused"
        assert (job.state is JobState.FINALIZING) == (job.done_count == job.item_count)


async def test_an_owner_and_the_sweep_that_adopts_its_log_meet(world: StoreWorld) -> None:
    """The woken owner commits what the sweep is adopting: the same lines of the same log, jobs in other combinations."""
    caller = await world.caller()
    owner, sweep = await several(world, 2)
    for _ in range(ROUNDS):
        log = await world.log()
        jobs = [await world.running(caller, 4) for _ in range(2)]
        first, second = [world.answers(log, job, 0, 1) for job in jobs], [world.answers(log, job, 2) for job in jobs]
        await asyncio.gather(
            owner.record_outcomes(first + second, [], []),
            sweep.record_outcomes([first[0], first[1]], [], []),
            sweep.record_outcomes([first[1]], [], []),
        )
        for job in jobs:
            judged = await world.judge(job)
            assert (judged.answered_count, judged.unused_count) == (3, 0)


async def test_cancel_racing_completion_ends_in_exactly_one(world: StoreWorld) -> None:
    caller, worker, log = await world.caller(), await world.worker(), await world.log()
    canceller, recorder = await several(world, 2)
    ends = set()
    for turn in range(ROUNDS):
        job = await world.running(caller, 1)
        cancelling = asyncio.create_task(canceller.cancel_job(caller.tenant_id, job.id))
        if turn % 2:
            await asyncio.sleep(0)
        recording = asyncio.create_task(recorder.record_outcomes([world.answers(log, job, 0)], [], []))
        [reply, _] = await asyncio.gather(cancelling, recording, return_exceptions=True)
        await world.store.close_job(job.id, FOREVER_MS)
        assert await world.store.take_step(job.id, JobState.FINALIZING, worker, "t")
        job = await world.look(job)
        await world.store.publish_job(job, "t", end=JobEnd(None))
        ended = await world.judge(job)
        assert ended.answered_count == 1
        assert ended.state is (JobState.CANCELLED if isinstance(reply, Job) else JobState.COMPLETED)
        assert isinstance(reply, Job | ApiProblem)
        ends.add(ended.state)
    assert ends <= {JobState.CANCELLED, JobState.COMPLETED}


class Hesitant(PostgresDriver):
    """Everything is done, and the commit waits for a word."""

    def __init__(self, url: str) -> None:
        super().__init__(url, pool_size=2, statement_timeout_ms=20_000, pooler="none")
        self.done = asyncio.Event()
        self.go = asyncio.Event()

    async def write(self, body: TransactionBody[T]) -> T:
        async def slow(tx: Tx) -> T:
            result = await body(tx)
            self.done.set()
            await self.go.wait()
            return result

        return await super().write(slow)


@pytest.mark.parametrize("begun", [False, True])
async def test_a_job_never_closes_under_a_lease_that_commits_at_the_same_time(
    world: StoreWorld, shared_database: str, begun: bool
) -> None:
    caller, worker = await world.caller(), await world.worker()
    job = await world.running(caller, 1, 1)
    if begun:
        [first] = await world.lease(worker, job, 1)
        await world.store.record_outcomes([], [(job.id, 0, first.token)], [])

    async def stop() -> bool:
        await world.store.cancel_job(caller.tenant_id, job.id)
        return await world.store.close_job(job.id, FOREVER_MS)

    driver = Hesitant(shared_database)
    try:
        leasing = asyncio.create_task(lease_slices(Store(driver), worker, job.id, MODEL, 1, "late"))
        await driver.done.wait()
        stopping = asyncio.create_task(stop())
        await until_a_lock_is_awaited(shared_database)
        assert (await world.look(job)).state is JobState.IN_PROGRESS, "no cancel is answered under a lease"
        driver.go.set()
        assert [piece.first for piece in await leasing] == [int(begun)]
        assert await stopping is False
    finally:
        await driver.close()
    assert (await world.look(job)).state is JobState.CANCELLING
    assert await world.store.release_slice(job.id, int(begun), "late", 0)
    assert await world.store.close_job(job.id, FOREVER_MS)


async def until_a_lock_is_awaited(url: str) -> None:
    """Return once a connection to this database waits for a lock."""
    waiting = "select count(*) from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'"
    connection: Any = await asyncpg.connect(url)

    async def look() -> bool:
        return bool(await connection.fetchval(waiting))

    try:
        await wait_until_async(look, what="a connection waiting for a lock")
    finally:
        await connection.close()


async def test_a_debit_that_commits_while_a_clock_is_followed_counts(world: StoreWorld, shared_database: str) -> None:
    gpu = budget("gpu", minute(9))
    assert await granted(world.store, gpu, 2) == 2
    driver = Hesitant(shared_database)
    try:
        debiting = asyncio.create_task(granted(Store(driver), gpu, 3))
        await driver.done.wait()
        moving = asyncio.ensure_future(world.store._driver.write(lambda tx: move_along(tx, 1_000)))
        await until_a_lock_is_awaited(shared_database)
        driver.go.set()
        assert await debiting == 3
        await moving
    finally:
        await driver.close()
    await world.clock.advance(1_000)
    assert await granted(world.store, gpu, 9) == 4


async def test_leasing_and_stopping_at_once_agree(world: StoreWorld) -> None:
    caller, worker = await world.caller(), await world.worker()
    leaser, stopper = await several(world, 2)
    for turn in range(ROUNDS):
        job = await world.running(caller, 2, 2)

        async def stop(job: Job = job) -> bool:
            await stopper.cancel_job(caller.tenant_id, job.id)
            return await stopper.close_job(job.id, FOREVER_MS)

        taken, closed = await asyncio.gather(lease_slices(leaser, worker, job.id, MODEL, 2, f"t{turn}"), stop())
        assert closed == (not taken)


async def test_one_of_many_gets_the_step(world: StoreWorld) -> None:
    stores, workers = await several(world, 5), [await world.worker() for _ in range(5)]
    for _ in range(4):
        job = await world.job(await world.caller())
        calls = [
            store.take_step(job.id, JobState.VALIDATING, worker, worker)
            for store, worker in zip(stores, workers, strict=True)
        ]
        assert sum(await asyncio.gather(*calls)) == 1


async def test_an_input_is_either_taken_or_deleted(world: StoreWorld) -> None:
    caller = await world.caller()
    deleter = (await several(world, 1))[0]
    for _ in range(ROUNDS):
        file = await world.file(caller)
        job, gone = await asyncio.gather(
            world.job(caller, file), deleter.delete_file(caller.tenant_id, file.id), return_exceptions=True
        )
        assert isinstance(job, Job) != (gone is True), (job, gone)
        assert isinstance(job, Job | ApiProblem)
        assert isinstance(gone, bool | ApiProblem)


async def test_compacting_a_file_while_it_is_deleted_leaks_nothing(world: StoreWorld) -> None:
    caller, worker = await world.caller(), await world.worker()
    compactor, deleter = await several(world, 2)
    for turn in range(ROUNDS):
        job = await world.running(caller, 4)
        logs = [await world.log() for _ in range(2)]
        for number in range(4):
            await world.answer(logs[number % 2], job, number)
        old, text = await world.extents(job.output_file_id), await world.content(job.output_file_id)
        await world.store.take_step(job.id, JobState.FINALIZING, worker, "t")
        job = await world.look(job)
        await world.store.publish_job(job, "t", end=JobEnd(None))
        copy = await world.log("compacted")
        placed = copy.append([text[: old[2].at]])
        calls = [
            compactor.replace_extents(str(job.output_file_id), old[:2], placed),
            deleter.delete_file(caller.tenant_id, str(job.output_file_id)),
        ]
        done = await asyncio.gather(*(calls if turn % 2 else calls[::-1]), return_exceptions=True)
        assert all(isinstance(one, LostRace | bool | None) for one in done)
        assert await world.extents(job.output_file_id) == []
        await world.store.give_up_blob(copy.blob_id)
        for log in logs:
            await world.store.settle_blob(log.blob_id)
        condemned = await world.store.condemn_unused_blobs(-1, -1, 100)
        assert condemned + any(isinstance(one, LostRace) for one in done) == 4, "both logs, the copy and the work file"


async def test_growing_a_file_while_it_is_compacted_loses_no_byte(world: StoreWorld) -> None:
    caller = await world.caller()
    compactor, recorder = await several(world, 2)
    for turn in range(ROUNDS):
        job = await world.running(caller, 5)
        first, second = await world.log(), await world.log()
        await world.answer(first, job, 0)
        await world.answer(second, job, 1)
        old, text = await world.extents(job.output_file_id), await world.content(job.output_file_id)
        placed = (await world.log("compacted")).append([text])
        calls = [
            compactor.replace_extents(str(job.output_file_id), old, placed),
            recorder.record_outcomes([world.answers(second, job, 2, 3)], [], []),
        ]
        await asyncio.gather(*(calls if turn % 2 else calls[::-1]), return_exceptions=True)
        assert (await world.judge(job)).answered_count == 4


async def test_a_late_owner_and_the_sweep_that_frees_its_slices(world: StoreWorld) -> None:
    """Whichever is first: no slice has two owners, no verdict of a lost owner counts after another has the slice."""
    caller = await world.caller()
    late, sweep, next_one = await several(world, 3)
    for turn in range(ROUNDS):
        owner, heir, log = await world.worker(), await world.worker(10 * LEASE_MS), await world.log("errors")
        jobs = sorted([await world.running(caller, 2, 2) for _ in range(2)], key=lambda job: job.id)
        held = [piece for job in jobs for piece in await world.lease(owner, job)]
        await world.clock.advance(LEASE_MS + 1)
        await world.store.declare_gone(owner)
        flushes = [
            world.errors(log, job, piece.first, token=piece.token)
            for job in jobs
            for piece in held
            if piece.job_id == job.id
        ]
        done = [(piece.job_id, piece.first, piece.token) for piece in held[::2]]
        calls = [
            late.record_outcomes(flushes, done, []),
            sweep.reclaim_slices(owner),
            lease_slices(next_one, heir, jobs[turn % 2].id, MODEL, 9, f"t{turn}"),
        ]
        await asyncio.gather(*calls[turn % 3 :], *calls[: turn % 3])
        await sweep.reclaim_slices(owner)
        for job in jobs:
            await world.judge(job)
            failed, open_at = (
                await world.outcomes(job),
                {span[0] for span in await world.store.unfinished_slices(job.id)},
            )
            for job_id, first, _ in done:
                assert job_id != job.id or (first in failed) == (first not in open_at)
        assert await world.store.stranded_workers(10) == []


async def test_choices_of_the_same_jobs_in_any_order_beside_what_is_recorded_of_them(world: StoreWorld) -> None:
    """Each slice has one owner, and no worker waits in a circle: a deadlock would be seen by the database and counted."""
    caller, log = await world.caller(), await world.log()
    stores = await several(world, 3)
    for turn in range(ROUNDS):
        jobs = [await world.running(caller, 1, 1, 1, 1) for _ in range(3)]
        workers = [await world.worker() for _ in range(2)]
        if turn % 2:
            [await world.lease(await world.worker(), job, 1) for job in jobs]
            await world.clock.advance(1_001)
        orders = [jobs, jobs[::-1]]
        picks = [
            [(Pick(job.id, MODEL, 2, Why.FAIR), f"{worker}-{job.id}") for job in order]
            for worker, order in zip(workers, orders, strict=True)
        ]
        flushes = [world.answers(log, job, 0, 3) for job in jobs]
        one, other, _ = await asyncio.gather(
            stores[0].lease_picks(workers[0], picks[0]),
            stores[1].lease_picks(workers[1], picks[1]),
            stores[2].record_outcomes(flushes, [], []),
        )
        owned = [(piece.job_id, piece.first) for piece in (*one, *other)]
        assert owned
        assert len(owned) == len(set(owned))
        for job in jobs:
            await world.judge(job)


async def test_sleeping_and_waking_at_once_leave_no_work_asleep(world: StoreWorld) -> None:
    """A sweep finds nothing to do in the moment in which a job starts: whichever is first, the flow is awake in the end."""
    caller = await world.caller()
    sweeper, starter = await several(world, 2)
    share_owner = tenant_owner(caller.tenant_id)
    for turn in range(ROUNDS):
        ended = await world.running(caller, 1)
        await world.store.cancel_job(caller.tenant_id, ended.id)
        waiting, worker, token, work = await world.job(caller), await world.worker(), world.token(), world.id("blob")
        assert await world.store.take_step(waiting.id, JobState.VALIDATING, worker, token)
        await world.store.begin_blob(work, "work", worker)
        output, errors = world.id("file"), world.id("file")
        calls = [
            start_job(
                starter,
                JobStart(waiting.id, token, plan_of(1), work_blob_id=work, output_file_id=output, error_file_id=errors),
            ),
            sweeper.rest_flow(MODEL, share_owner),
        ]
        await asyncio.gather(*(calls if turn % 2 else calls[::-1]))
        assert await world.store.awake_models(10) == [MODEL]
        seen = await world.store.snapshot(worker, {MODEL: ModelRoom(1)}, slice_items=64, slices_max=1)
        assert [job.job_id for job in seen.jobs] == [waiting.id]
        await world.store.cancel_job(caller.tenant_id, waiting.id)


async def test_a_job_that_starts_waits_for_the_sweep_that_holds_its_flow(
    world: StoreWorld, shared_database: str
) -> None:
    caller = await world.caller()
    ended = await world.running(caller, 1)
    await world.store.cancel_job(caller.tenant_id, ended.id)
    driver = Hesitant(shared_database)
    try:
        sleeping = asyncio.create_task(Store(driver).rest_flow(MODEL, tenant_owner(caller.tenant_id)))
        await driver.done.wait()
        starting = asyncio.create_task(world.running(caller, 1))
        await until_a_lock_is_awaited(shared_database)
        driver.go.set()
        assert await sleeping
        job = await starting
    finally:
        await driver.close()
    seen = await world.store.snapshot("unknown", {MODEL: ModelRoom(1)}, slice_items=64, slices_max=1)
    assert [one.job_id for one in seen.jobs] == [job.id]


async def test_a_lease_does_not_wait_for_a_flush_of_its_job(world: StoreWorld, shared_database: str) -> None:
    """Nor a flush for a lease: on a hot job the two never stand in line."""
    worker, log = await world.worker(), await world.log()
    job = await world.running(await world.caller(), 2, 2, 2)
    [first] = await world.lease(worker, job, 1)
    driver = Hesitant(shared_database)
    try:
        flush = world.answers(log, job, 0, token=first.token)
        recording = asyncio.create_task(Store(driver).record_outcomes([flush], [], []))
        await driver.done.wait()
        assert [piece.first for piece in await world.lease(worker, job, 1)] == [2]
        driver.go.set()
        await recording
    finally:
        await driver.close()
    driver = Hesitant(shared_database)
    try:
        leasing = asyncio.create_task(lease_slices(Store(driver), worker, job.id, MODEL, 1, "slow"))
        await driver.done.wait()
        assert (await world.record(world.answers(log, job, 1, token=first.token))).new_count == 1
        driver.go.set()
        assert [piece.first for piece in await leasing] == [4]
    finally:
        await driver.close()
    assert (await world.judge(job)).answered_count == 2


async def test_flushes_of_one_flow_at_once_charge_exactly_what_was_new(world: StoreWorld) -> None:
    caller = await world.caller()
    stores = await several(world, 5)
    jobs = [await world.running(caller, 20) for _ in range(4)]

    async def recorder(store: Store, turn: int) -> None:
        log = await world.log()
        for step in range(4):
            chosen = [jobs[(turn + step) % 4], jobs[(turn + 2 * step + 1) % 4]]
            flushes = [world.answers(log, job, step, 4 + turn, step + 10) for job in chosen]
            for _ in range(1 + (turn + step) % 2):
                await store.record_outcomes(flushes, [], [])

    await asyncio.gather(*[recorder(store, turn) for turn, store in enumerate(stores)])
    answered = sum([(await world.judge(job)).answered_count for job in jobs])
    [flow] = await world.store.awake_flows(None, 10)
    assert flow.served == answered * (10 + 2 * 5)
    seen = await world.store.snapshot("unknown", {MODEL: ModelRoom(1)}, slice_items=64, slices_max=1)
    assert sum(job.total_units - job.left_units for job in seen.jobs) == answered * 50


async def operating(world: StoreWorld, verb: JobVerb, action: str, jobs: list[Job]) -> asyncio.Task[None]:
    """Begin a step of an operation that comes to these jobs in this order."""
    await world.clock.advance(5)
    made = await world.store.put_operation(world.id("op"), "operator", OperationScope(action))
    worker = await world.worker()
    assert await world.store.take_operation(made.id, worker) is not None
    step = OperationStep(made, worker, verb, [(job, world.id("aud")) for job in jobs])
    return asyncio.create_task(world.store.step_operation(step))


async def test_an_operation_takes_jobs_in_the_order_of_all_others(world: StoreWorld, shared_database: str) -> None:
    """A flush of several jobs takes them by id. An operation that took the newest first would wait for it in a circle."""
    caller = await world.caller()
    jobs = sorted([await world.running(caller, 4) for _ in range(2)], key=lambda job: job.id, reverse=True)
    other: Any = await asyncpg.connect(shared_database)
    try:
        async with other.transaction():
            await other.execute("select id from jobs where id = $1 for no key update", jobs[1].id)
            stepping = await operating(world, CANCEL, "cancel", jobs)
            await until_a_lock_is_awaited(shared_database)
            await other.execute("select id from jobs where id = $1 for no key update nowait", jobs[0].id)
        await stepping
    finally:
        await other.close()
    assert [(await world.look(job)).state for job in jobs] == [JobState.CANCELLING] * 2


@pytest.mark.parametrize("action", ["resume", "requeue"])
async def test_an_operation_takes_flows_in_the_order_of_all_others(
    world: StoreWorld, shared_database: str, action: str
) -> None:
    """A flush charges flows by model. The jobs of an operation name theirs in any order."""
    caller = await world.caller()
    jobs = [await world.ingested(await world.job(caller), plan_of(4, model=model)) for model in ("model-z", "model-a")]
    if action == "resume":
        [await world.store.pause_job(caller.tenant_id, job.id) for job in jobs]
    other: Any = await asyncpg.connect(shared_database)
    await other.execute("update flows set state = 'asleep', wakes_at = $1", FOREVER_MS * 10)
    try:
        async with other.transaction():
            await other.execute("select served from flows where model = 'model-a' for update")
            stepping = await operating(world, RESUME if action == "resume" else REQUEUE, action, jobs)
            await until_a_lock_is_awaited(shared_database)
            await other.execute("select served from flows where model = 'model-z' for update nowait")
        await stepping
    finally:
        await other.close()


@pytest.mark.parametrize("seed", range(3))
async def test_operations_beside_cancels_and_flushes_of_the_same_jobs(world: StoreWorld, seed: int) -> None:
    """No one waits in a circle: a deadlock is not resolved here. Each job is cancelled once, by the process that was first."""
    rng = random.Random(seed)
    caller, log = await world.caller(), await world.log()
    canceller, recorder, retrier = await several(world, 3)
    for _ in range(ROUNDS):
        jobs = [await world.running(caller, 2, 2) for _ in range(6)]
        [await world.store.pause_job(caller.tenant_id, job.id) for job in jobs[::2]]
        orders = [rng.sample(jobs, len(jobs)) for _ in range(4)]
        steps = [
            await operating(world, verb, action, order)
            for (verb, action), order in zip(((RESUME, "resume"), (CANCEL, "cancel")), orders, strict=False)
        ]

        async def cancel(order: list[Job] = orders[2]) -> None:
            for job in order[:3]:
                await canceller.cancel_job(caller.tenant_id, job.id)

        async def record(store: Store, number: int, order: list[Job] = orders[3]) -> None:
            await store.record_outcomes([world.answers(log, job, number) for job in order], [], [])

        await asyncio.gather(*steps, cancel(), record(recorder, 0), record(retrier, 1))
        for job in jobs:
            assert (await world.look(job)).closing is JobState.CANCELLED
            noted = await world.store.list_audit(AuditFilter(target=job.id), after=None, count_max=9)
            assert [one.action for one in noted or ()].count("batch.cancel") <= 1
