"""What every store does with incarnations and their heartbeats."""

from __future__ import annotations

import pytest

from tests.contracts.store_world import DAY_MS, LEASE_MS, MODEL, START_MS, StoreWorld
from tidegate.core.input.turns import IngestLane
from tidegate.core.nouns import Holding, WorkerDuty
from tidegate.core.ports import DeploymentTrouble, ReportedWorker, WorkerReport
from tidegate.core.schedule import ModelRoom
from tidegate.core.states import JobState

pytestmark = pytest.mark.anyio


async def test_a_heartbeat_brings_back_what_is_held_and_how_the_jobs_stand(world: StoreWorld) -> None:
    caller, worker = await world.caller(), await world.worker()
    job, stopped = await world.running(caller, 1), await world.running(caller, 1)
    [one], [two] = await world.lease(worker, job), await world.lease(worker, stopped)
    assert await world.lease(await world.worker(), job) == []
    await world.store.cancel_job(caller.tenant_id, stopped.id)
    await world.clock.advance(40)
    held = await world.store.beat(worker, LEASE_MS)
    assert held is not None
    assert sorted(held, key=lambda one: one.token) == [
        Holding(job.id, 0, one.token, JobState.IN_PROGRESS, None, 0, False, DAY_MS - 40),
        Holding(stopped.id, 0, two.token, JobState.CANCELLING, JobState.CANCELLED, 40, False, DAY_MS - 40),
    ]


async def test_a_heartbeat_keeps_a_worker_alive_by_the_databases_clock(world: StoreWorld) -> None:
    worker = await world.worker(1_000)
    for _ in range(3):
        await world.clock.advance(999)
        assert await world.store.beat(worker, 1_000) == []
    await world.clock.advance(1_000)
    assert await world.store.overdue_workers(10) == {}
    assert not await world.store.declare_gone(worker)
    await world.clock.advance(1)
    assert await world.store.overdue_workers(10) == {worker: "host"}
    assert await world.store.beat(worker, 1_000) == [], "late, but not declared gone"
    assert not await world.store.declare_gone(worker)


async def test_an_incarnation_that_is_gone_stays_gone(world: StoreWorld) -> None:
    worker = await world.worker(1_000)
    await world.clock.advance(1_001)
    assert await world.store.declare_gone(worker)
    assert not await world.store.declare_gone(worker)
    assert await world.store.beat(worker, LEASE_MS) is None
    await world.store.enlist_worker(worker, "host", "1", LEASE_MS)
    assert await world.store.beat(worker, LEASE_MS) is None
    assert await world.store.overdue_workers(10) == {}
    assert await world.store.beat(world.id("worker"), LEASE_MS) is None


async def test_a_worker_may_leave_before_its_time(world: StoreWorld) -> None:
    worker = await world.worker()
    job = await world.running(await world.caller(), 1)
    await world.lease(worker, job)
    assert await world.store.declare_gone(worker, leaving=True)
    assert not await world.store.declare_gone(worker, leaving=True)
    assert await world.store.stranded_workers(10) == [worker]
    assert await world.store.reclaim_slices(worker) == 1


async def test_enlisting_may_be_replayed(world: StoreWorld) -> None:
    worker = await world.worker()
    await world.clock.advance(5)
    await world.store.enlist_worker(worker, "elsewhere", "2", 1)
    [row] = await world.store.list_workers(10)
    assert (row["id"], row["host"], row["state"], row["started_at"]) == (worker, "host", "alive", START_MS)
    assert (row["alive_until"], row["now"]) == (START_MS + LEASE_MS, START_MS + 5)


async def test_sweeps_are_bounded(world: StoreWorld) -> None:
    workers = [await world.worker(1_000) for _ in range(3)]
    await world.clock.advance(1_001)
    assert len(await world.store.overdue_workers(2)) == 2
    assert sorted(await world.store.overdue_workers(10)) == sorted(workers)
    assert len(await world.store.list_workers(2)) == 2


async def test_a_list_begins_with_those_alive(world: StoreWorld) -> None:
    alive = await world.worker(10**9)
    for _ in range(3):
        await world.clock.advance(5)
        await world.store.declare_gone(await world.worker(1_000), leaving=True)
    assert [row["id"] for row in await world.store.list_workers(1)] == [alive]


async def test_the_gone_are_forgotten_once_they_own_nothing(world: StoreWorld) -> None:
    alive, writer, idle = await world.worker(10**9), await world.worker(1_000), await world.worker(1_000)
    log = await world.log("answers", writer)
    await world.clock.advance(2_000)
    for worker in (writer, idle):
        await world.store.declare_gone(worker)

    async def known() -> set[object]:
        return {row["id"] for row in await world.store.list_workers(10)}

    await world.store.prune_workers(2_000)
    assert await known() == {alive, writer, idle}, "too young"
    await world.store.prune_workers(1_999)
    assert await known() == {alive, writer}, "a log of its own is not settled yet"
    await world.store.settle_blob(log.blob_id)
    await world.store.prune_workers(1_999)
    assert await known() == {alive}


async def test_the_clock_is_the_databases(world: StoreWorld) -> None:
    assert await world.store.now_ms() == START_MS
    await world.clock.advance(3)
    assert await world.store.now_ms() == START_MS + 3


async def test_only_processes_that_run_items_count_as_workers(world: StoreWorld) -> None:
    worker, api = await world.worker(), world.id("worker")
    await world.store.enlist_worker(api, "front", "1", LEASE_MS, WorkerDuty(runs_items=False))
    assert await world.store.workers_alive() == 1
    assert (await world.store.census()).workers == 1
    assert [one.host for one in await world.store.worker_reports()] == ["host"]
    assert {row["id"]: row["runs_items"] for row in await world.store.list_workers(10)} == {worker: 1, api: 0}


async def test_a_worker_of_one_share_owner_takes_no_input_and_sees_no_job_of_another(world: StoreWorld) -> None:
    caller, worker, all_round = await world.caller(), world.id("worker"), await world.worker()
    await world.store.enlist_worker(worker, "host", "1", LEASE_MS, WorkerDuty(share_owner="run:x/a"))
    mine, other = [await world.job(caller, share_owner=owner) for owner in ("run:x/a", "run:x/b")]
    sizes = (0, 1 << 40)
    assert await world.store.take_ingests(IngestLane.SMALL, sizes, 9, worker, "t") == [mine.id]
    assert await world.store.take_ingests(IngestLane.SMALL, sizes, 9, all_round, "u") == [other.id]
    own = await world.running(caller, 4, share_owner="run:x/a")
    others = [await world.running(caller, 4, share_owner=owner) for owner in ("run:x/b", "run:x/c")]
    for worker_id, seen in ((worker, [own]), (all_round, [own, *others])):
        look = await world.store.snapshot(worker_id, {MODEL: ModelRoom(100)}, slice_items=64, slices_max=8)
        assert {job.job_id for job in look.jobs} == {job.id for job in seen}
        assert {flow.share_owner for flow in look.flows} >= {"run:x/a"}
        assert len(look.flows) == len(seen)


async def test_a_report_lasts_until_the_next_one_and_outlives_its_worker_for_a_while(world: StoreWorld) -> None:
    worker = await world.worker(1_000)
    down = WorkerReport("results cannot be stored", (DeploymentTrouble("gpu", True, 5_000, "401"),))
    await world.store.report_worker(worker, down)
    assert await world.store.worker_reports() == [ReportedWorker("host", True, 0, down)]
    await world.clock.advance(2_000)
    assert await world.store.worker_reports() == [ReportedWorker("host", False, 2_000, down)]
    assert await world.store.declare_gone(worker)
    await world.store.report_worker(worker, WorkerReport("ends after an internal error"))
    [last] = await world.store.worker_reports()
    assert (last.is_alive, last.report) == (False, WorkerReport("ends after an internal error"))
    await world.clock.advance(600_000)
    assert await world.store.worker_reports() == []


async def test_workers_are_listed_living_ones_first_and_the_newest_of_them_first(world: StoreWorld) -> None:
    ids = list[str]()
    for _ in range(4):
        ids.append(await world.worker())
        await world.clock.advance(1)
    assert await world.store.declare_gone(ids[0], leaving=True)
    assert await world.store.declare_gone(ids[2], leaving=True)
    assert [row["id"] for row in await world.store.list_workers(10)] == [ids[3], ids[1], ids[2], ids[0]]
