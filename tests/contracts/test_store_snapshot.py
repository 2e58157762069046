"""What every store shows a scheduler: bounded, exact after any loss, and never hiding one job behind another."""

from __future__ import annotations

import pytest
from msgspec import structs
from msgspec.structs import replace

from tests.contracts.store_world import LEASE_MS, MODEL, StoreWorld, plan_of
from tests.support.store_verbs import lease_slices, slice_counts
from tidegate.core.job_controls import JobControls
from tidegate.core.nouns import IngestPlan, Job, Usage, WorkerDuty
from tidegate.core.schedule.share_owner import tenant_owner
from tidegate.core.schedule.snapshot import ModelRoom, Pick, Snapshot, Suspects, Turn, Why
from tidegate.store.road.leases import BOUNDS, SEARCH_LOSSES_MAX, SnapshotBounds

pytestmark = pytest.mark.anyio

HOUR_MS = 3_600_000
ROOM = ModelRoom(100)


async def look(
    world: StoreWorld, worker_id: str = "unknown", *models: str, bounds: SnapshotBounds = BOUNDS, room: ModelRoom = ROOM
) -> Snapshot:
    rooms = dict.fromkeys(models or (MODEL,), room)
    return await world.store.snapshot(worker_id, rooms, bounds, slice_items=64, slices_max=8)


def ids(seen: Snapshot) -> list[str]:
    """Oldest first."""
    return [job.job_id for job in sorted(seen.jobs, key=lambda job: job.created_at)]


async def test_a_look_shows_a_job_as_it_stands(world: StoreWorld) -> None:
    caller, worker, log = await world.caller(), await world.worker(), await world.log()
    job = await world.running(caller, 4, 4, 4, queue="nightly", begin_within_ms=HOUR_MS)
    [seen] = (await look(world)).jobs
    assert (seen.job_id, seen.model, seen.share_owner, seen.queue) == (
        job.id,
        MODEL,
        tenant_owner(caller.tenant_id),
        "nightly",
    )
    assert (seen.created_at, seen.expires_at, seen.begin_by) == (
        job.created_at, job.expires_at, job.created_at + HOUR_MS,
    )  # fmt: skip
    assert (seen.total_units, seen.left_units, seen.in_flight_units) == (600, 600, 0)
    assert (seen.slice_units, seen.slice_items, seen.leased_at, seen.rate) == (200, 4, None, None)
    await world.clock.advance(500)
    [held] = await lease_slices(world.store, worker, job.id, MODEL, 1, "t", Why.URGENT)
    begun_at = world.clock.now
    await world.clock.advance(10_000)
    await world.answer(log, job, 0, 1, 2, token=held.token)
    later = await look(world)
    [seen] = later.jobs
    assert (seen.begin_by, seen.leased_at) == (None, begun_at)
    assert (seen.total_units, seen.left_units, seen.in_flight_units) == (600, 450, 200)
    assert seen.rate == pytest.approx(150 / 10)
    assert later.models[MODEL].in_flight_by_why == {Why.URGENT: 200}
    assert (later.now, later.slice_items, later.slices_max) == (world.clock.now, 64, 8)
    alive = [row for row in await world.store.list_workers(100) if row["state"] == "alive"]
    assert later.workers == len(alive)
    [flow] = later.flows
    assert (flow.share_owner, flow.weight, flow.served, flow.in_flight_units) == (seen.share_owner, 1.0, 3 * 20, 200)


async def test_a_job_whose_window_has_passed_hides_no_other_of_its_flow(world: StoreWorld) -> None:
    caller = await world.caller()
    await world.running(caller, 4, window_ms=1_000)
    other = await world.running(caller, 4)
    await world.clock.advance(1_000)
    assert ids(await look(world)) == [other.id]


async def test_what_rests_takes_no_place_among_the_smallest_and_the_first_due(world: StoreWorld) -> None:
    caller = await world.caller()
    oldest = await world.running(caller, 8)
    resting = await world.running(caller, 1, window_ms=HOUR_MS)
    other = await world.running(caller, 4, window_ms=2 * HOUR_MS)
    await world.store.rest_job(resting.id, MODEL, 10_000)
    seen = await look(world, bounds=SnapshotBounds(jobs_per_flow_max=1, due_jobs_max=1))
    assert {job.job_id for job in seen.jobs} == {oldest.id, other.id}


async def test_the_smallest_jobs_are_looked_for_among_those_of_the_highest_priority(world: StoreWorld) -> None:
    caller, high = await world.caller(), JobControls(priority=1)
    oldest = await world.running(caller, 8, controls=high)
    await world.running(caller, 1)
    smallest = await world.running(caller, 4, controls=high, window_ms=HOUR_MS)
    seen = await look(world, bounds=SnapshotBounds(jobs_per_flow_max=1, due_jobs_max=1))
    assert {job.job_id for job in seen.jobs} == {oldest.id, smallest.id}


async def test_a_flow_that_has_work_out_takes_no_others_place(world: StoreWorld) -> None:
    busy, idle = await world.caller("busy"), await world.caller("idle")
    first, second = await world.running(busy, 1, 1), await world.running(idle, 2)
    await world.answer(await world.log(), second, 0)
    await world.lease(await world.worker(), first, 1)
    seen = await look(world, bounds=SnapshotBounds(flows_max=2, due_jobs_max=1))
    assert {flow.share_owner for flow in seen.flows} == {first.share_owner, second.share_owner}


async def test_what_rates_and_turns_the_worker_brings_is_shown(world: StoreWorld) -> None:
    job = await world.running(await world.caller(), 4)
    await world.answer(await world.log(), job, 0, 1)
    await world.clock.advance(60_000)
    paces = await world.store.paces([MODEL])
    turn = Turn(5, Why.FAIR, {})
    seen = (await look(world, room=ModelRoom(100, None, paces[MODEL], turn))).models[MODEL]
    assert seen.rate is not None
    assert (seen.ratio, seen.weights, seen.turn) == (40 / 100, 1.0, turn)


async def test_only_jobs_with_a_slice_that_is_ready_are_shown(world: StoreWorld) -> None:
    caller, worker = await world.caller(), await world.worker()
    jobs = []
    for _ in range(3):
        jobs.append(await world.running(caller, 1))
        await world.clock.advance(1)
    assert ids(await look(world)) == [job.id for job in jobs]
    [held] = await world.lease(worker, jobs[0])
    assert ids(await look(world)) == [job.id for job in jobs[1:]]
    await world.store.release_slice(jobs[0].id, held.first, held.token, 500)
    assert ids(await look(world)) == [job.id for job in jobs[1:]]
    await world.clock.advance(500)
    assert len((await look(world)).jobs) == 3
    await world.store.cancel_job(caller.tenant_id, jobs[1].id)
    assert ids(await look(world)) == [jobs[0].id, jobs[2].id]
    await world.job(caller)
    assert len((await look(world)).jobs) == 2, "what was not ingested is not shown"


async def test_an_overdue_job_is_not_shown(world: StoreWorld) -> None:
    await world.running(await world.caller(), 1, window_ms=HOUR_MS)
    await world.clock.advance(HOUR_MS)
    assert (await look(world)).jobs == []


async def test_a_model_without_room_is_shown_closed_and_hides_nothing(world: StoreWorld) -> None:
    caller = await world.caller()
    for _ in range(5):
        await world.running(caller, 1)
    other = await world.ingested(await world.job(caller), plan_of(2, model="other"))
    assert await world.store.awake_models(10) == [MODEL, "other"]
    assert await world.store.awake_models(1) == [MODEL]
    seen = await world.store.snapshot(
        "unknown",
        {MODEL: ModelRoom(0, "rests"), "other": ModelRoom(10)},
        SnapshotBounds(1, 1, 1),
        slice_items=64,
        slices_max=8,
    )
    assert ids(seen) == [other.id]
    assert (seen.models[MODEL].closed, seen.models[MODEL].room_items) == ("rests", 0)
    assert seen.models["other"].room_items == 10
    assert {flow.model for flow in seen.flows} == {"other"}
    nothing = await world.store.snapshot("unknown", {}, slice_items=64, slices_max=8)
    assert (nothing.jobs, nothing.flows) == ([], [])


async def test_a_look_names_the_models_that_it_was_not_asked_for(world: StoreWorld) -> None:
    caller = await world.caller()
    await world.running(caller, 1)
    await world.ingested(await world.job(caller), plan_of(2, model="other"))
    seen = await look(world, "unknown", MODEL)
    assert (list(seen.awake), list(seen.models)) == ([MODEL, "other"], [MODEL])
    assert {job.model for job in seen.jobs} == {flow.model for flow in seen.flows} == {MODEL}
    assert list((await look(world, bounds=SnapshotBounds(models_max=1))).awake) == [MODEL]
    assert list((await world.store.snapshot("unknown", {}, slice_items=64, slices_max=8)).awake) == [MODEL, "other"]


async def test_a_look_says_whether_it_may_hide_flows(world: StoreWorld) -> None:
    for number in range(3):
        await world.running(await world.caller(f"tenant {number}"), 1)
    few, enough = (SnapshotBounds(flows_max, 1, 1) for flows_max in (6, 8))
    assert (await look(world, bounds=few)).models[MODEL].hides_flows
    assert not (await look(world, bounds=enough)).models[MODEL].hides_flows


async def test_models_with_similar_names_are_kept_apart(world: StoreWorld) -> None:
    caller = await world.caller()
    for model in ("gpt", "gpt-4", "4", "", "g,p\tt"):
        await world.ingested(await world.job(caller), plan_of(1, model=model))
    assert await world.store.awake_models(10) == ["", "4", "g,p\tt", "gpt", "gpt-4"]
    for model in ("gpt", "gpt-4", "4", "", "g,p\tt"):
        assert {job.model for job in (await look(world, "unknown", model)).jobs} == {model}


async def test_flows_are_shown_by_least_service_and_so_many(world: StoreWorld) -> None:
    callers = [await world.caller(f"tenant {number}") for number in range(6)]
    jobs = [await world.running(caller, 2) for caller in callers]
    for number, job in enumerate(jobs):
        flush = world.answers(await world.log(), job, 0)
        usage = Usage((number * 5) % 6 * 100)
        paid = [structs.replace(entry, usage=usage, model=MODEL, units=50) for entry in flush.answers]
        await world.record(replace(flush, answers=paid))
    seen = await look(world, bounds=SnapshotBounds(flows_max=6, jobs_per_flow_max=5, due_jobs_max=1))
    assert sorted(flow.served for flow in seen.flows)[:3] == [50, 100, 200]
    assert len(seen.jobs) <= 4


async def test_a_flow_with_nothing_ready_takes_no_other_flows_place(world: StoreWorld) -> None:
    """The least served flow has everything out, another rests: the next ones are shown all the same."""
    callers, worker = [await world.caller(f"tenant {number}") for number in range(4)], await world.worker()
    jobs = [await world.running(caller, 1) for caller in callers]
    await world.lease(worker, jobs[0])
    [held] = await world.lease(worker, jobs[1])
    await world.store.release_slice(jobs[1].id, 0, held.token, 10_000)
    seen = await look(world, bounds=SnapshotBounds(flows_max=2, jobs_per_flow_max=1, due_jobs_max=1))
    assert {job.job_id for job in seen.jobs} & {jobs[2].id, jobs[3].id}
    assert seen.owner_in_flight_units == {tenant_owner(callers[0].tenant_id): 50}, "what is out is always counted"


async def test_of_a_crowded_flow_the_oldest_and_the_smallest_jobs_are_shown(world: StoreWorld) -> None:
    caller = await world.caller()
    jobs: list[Job] = []
    for size in (50, 40, 30, 20, 10, 1):
        jobs.append(await world.running(caller, size))
        await world.clock.advance(1)
    seen = await look(world, bounds=SnapshotBounds(flows_max=2, jobs_per_flow_max=2, due_jobs_max=1))
    assert set(ids(seen)) == {jobs[0].id, jobs[1].id, jobs[4].id, jobs[5].id}


async def test_the_job_that_is_due_first_is_shown_wherever_it_stands(world: StoreWorld) -> None:
    crowd = await world.caller("crowd")
    for _ in range(4):
        await world.running(crowd, 1)
    await world.clock.advance(1)
    urgent = await world.running(crowd, 90, window_ms=HOUR_MS)
    soon = await world.running(crowd, 80, begin_within_ms=HOUR_MS // 2)
    bounds = SnapshotBounds(flows_max=2, jobs_per_flow_max=1, due_jobs_max=1)
    assert soon.id in ids(await look(world, bounds=bounds)), "when it must begin counts until it has begun"
    worker = await world.worker()
    [held] = await world.lease(worker, soon)
    await world.store.release_slice(soon.id, 0, held.token, 0)
    assert urgent.id in ids(await look(world, bounds=bounds))


async def test_a_look_counts_the_workers_that_choose_of_the_same_jobs(world: StoreWorld) -> None:
    async def enlisted(duty: WorkerDuty, lease_ms: int = LEASE_MS) -> str:
        worker = world.id("worker")
        await world.store.enlist_worker(worker, "host", "1", lease_ms, duty)
        return worker

    everyones, anns, bobs = [await enlisted(WorkerDuty(share_owner=owner)) for owner in ("", "user:ann", "user:bob")]
    await enlisted(WorkerDuty(runs_items=False))
    await enlisted(WorkerDuty(), 1)
    await world.clock.advance(1)
    assert [(await look(world, one)).workers for one in (everyones, anns, bobs)] == [1, 2, 2]
    await enlisted(WorkerDuty())
    assert [(await look(world, one)).workers for one in (everyones, anns, bobs)] == [2, 3, 3]


async def test_a_look_counts_the_worst_suspects_and_hides_them_when_asked(world: StoreWorld) -> None:
    job = await world.running(await world.caller(), 2)
    assert (await look(world)).suspects == Suspects()
    for _ in range(3):
        worker = await world.worker()
        await world.lease(worker, job, 1)
        await world.clock.advance(LEASE_MS + 1)
        await world.store.declare_gone(worker)
        await world.store.reclaim_slices(worker)
    assert (await look(world)).suspects == Suspects(0, 3, 2, True)
    await world.store.pause_job(job.tenant_id, job.id)
    assert (await look(world)).suspects == Suspects(0, 0, 0, True), "no worker can run them"
    await world.store.resume_job(job.tenant_id, job.id)
    assert (await look(world)).suspects == Suspects(0, 3, 2, True)
    assert ids(await look(world)) == [job.id]
    assert ids(await look(world, bounds=SnapshotBounds(shows_suspects=False))) == []
    holder = await world.worker()
    await world.lease(holder, job, 1)
    assert (await look(world, holder)).suspects == Suspects(0, 3, 1, True)
    assert (await look(world, "another")).suspects == Suspects(3, 3, 1, True)


async def test_a_jobs_last_slices_that_lost_no_worker_are_kept_while_a_culprit_is_searched_for_in_it(
    world: StoreWorld,
) -> None:
    caller = await world.caller()
    job, other = await world.running(caller, 1, 1, 1, 1), await world.running(caller, 1)
    worker = await world.worker()
    await world.lease(worker, job, 1)
    await world.clock.advance(LEASE_MS + 1)
    await world.store.declare_gone(worker)
    await world.store.reclaim_slices(worker)
    heir, third = await world.worker(), await world.worker()

    async def take(taker: str, token: str, *, keeps_rest: bool = True) -> list[int]:
        picks = [(Pick(one.id, MODEL, 9, Why.FAIR), f"{token}-{one.id}") for one in (job, other)]
        leased = await world.store.lease_picks(taker, picks, keeps_rest=keeps_rest)
        return [piece.first for piece in leased if piece.job_id == job.id]

    assert ids(await look(world)) == [job.id, other.id]
    assert await take(heir, "a") == [0, 1], "what lost its owner, and all but the last two"
    assert await slice_counts(world.store, other.id) == {"leased": 1}, "another job keeps nothing back"
    assert ids(await look(world, third)) == []
    assert await take(third, "b") == []
    assert ids(await look(world, third, bounds=SnapshotBounds(shows_kept=True))) == [job.id]
    assert await take(third, "c", keeps_rest=False) == [2, 3]


async def test_nothing_waits_any_more_for_a_search_that_lost_too_many_workers(world: StoreWorld) -> None:
    job = await world.running(await world.caller(), 1, 1, 1)
    for _ in range(SEARCH_LOSSES_MAX + 1):
        worker = await world.worker()
        await world.lease(worker, job, 1)
        await world.clock.advance(LEASE_MS + 1)
        await world.store.declare_gone(worker)
        await world.store.reclaim_slices(worker)
    assert not (await look(world)).suspects.is_searching
    pick = Pick(job.id, MODEL, 9, Why.FAIR)
    leased = await world.store.lease_picks(await world.worker(), [(pick, "t")], keeps_rest=True)
    assert [piece.first for piece in leased] == [0, 1, 2]


async def test_a_job_with_more_slices_than_are_kept_is_shown_while_its_culprit_is_searched_for(
    world: StoreWorld,
) -> None:
    job = await world.running(await world.caller(), *([1] * 6))
    for _ in range(2):
        worker = await world.worker()
        [held] = await world.lease(worker, job, 1)
        assert held.first == 0
        assert ids(await look(world, "another")) == [job.id]
        await world.clock.advance(LEASE_MS + 1)
        await world.store.declare_gone(worker)
        await world.store.reclaim_slices(worker)


async def test_models_of_one_job_are_shown_apart(world: StoreWorld) -> None:
    caller, worker = await world.caller(), await world.worker()
    plan = IngestPlan(3, None, [*plan_of(1).slices, plan_of(1, 2, model="other").slices[1]], 300, 0, 0)
    job = await world.ingested(await world.job(caller), plan)
    seen = await look(world, "unknown", MODEL, "other")
    assert [(one.model, one.total_units) for one in sorted(seen.jobs, key=lambda one: one.model)] == [
        (MODEL, 50), ("other", 100),
    ]  # fmt: skip
    await lease_slices(world.store, worker, job.id, "other", 1, "t", Why.LARGE)
    seen = await look(world, "unknown", MODEL, "other")
    assert [one.model for one in seen.jobs] == [MODEL]
    assert seen.owner_in_flight_units == {tenant_owner(caller.tenant_id): 100}
    assert seen.models["other"].in_flight_by_why == {Why.LARGE: 100}


async def test_a_lease_says_when_to_the_second(world: StoreWorld) -> None:
    worker = await world.worker()
    job = await world.running(await world.caller(), *([1] * 4))
    seen = []
    for wait_ms in (0, 900, 200):
        await world.clock.advance(wait_ms)
        await world.lease(worker, job, 1)
        seen.append((await look(world)).jobs[0].leased_at)
    start = seen[0]
    assert start is not None
    assert seen == [start, start, start + 1_100]
