"""What every store does about ingest: whose input is next, steps under one token, and jobs that start together."""

from __future__ import annotations

import asyncio

import pytest

from tests.contracts.store_world import LEASE_MS, MODEL, StoreWorld, plan_of
from tests.contracts.test_store_budgets import rows
from tests.support.store_verbs import slice_counts
from tidegate.core.errors import LostRace
from tidegate.core.input.turns import IngestLane
from tidegate.core.job_shape import JobShape
from tidegate.core.nouns import Caller, Job, JobStart
from tidegate.core.schedule.share_owner import tenant_owner
from tidegate.core.states import JobState
from tidegate.store.tenants.keys import KeyRights

pytestmark = pytest.mark.anyio

SMALL, LARGE = (0, 65_536), (65_537, 1 << 62)


async def input_of(world: StoreWorld, caller: Caller, size_bytes: int) -> Job:
    return await world.job(caller, await world.file(caller, size_bytes=size_bytes, line_count=1))


async def taken(
    world: StoreWorld, count: int, lane: IngestLane = IngestLane.LARGE, worker: str | None = None
) -> list[str]:
    """Take so many inputs of a lane, one after the other."""
    worker = worker or await world.worker()
    sizes = SMALL if lane is IngestLane.SMALL else LARGE
    found: list[str] = []
    for _ in range(count):
        found += await world.store.take_ingests(lane, sizes, 1, worker, world.token())
    return found


async def test_tenants_take_turns_by_bytes_and_small_inputs_go_first_within_one(world: StoreWorld) -> None:
    a, b = await world.caller("a"), await world.caller("b")
    ours = [await input_of(world, a, size) for size in (900_000, 300_000, 600_000)]
    theirs = [await input_of(world, b, 100_000) for _ in range(9)]
    order = await taken(world, 12)
    assert sorted(order) == sorted(job.id for job in (*ours, *theirs))
    assert [job_id for job_id in order if job_id in {job.id for job in ours}] == [ours[1].id, ours[2].id, ours[0].id]
    for count in range(1, 9):
        served_a = sum(
            300_000 * (1, 2, 3)[n] for n, job in enumerate((ours[1], ours[2], ours[0])) if job.id in order[:count]
        )
        served_b = 100_000 * sum(job.id in order[:count] for job in theirs)
        assert abs(served_a - served_b) <= 1_010_000, "no further apart than the largest input of each"


async def test_an_input_that_waits_long_is_not_passed_by_small_ones_for_ever(world: StoreWorld) -> None:
    caller = await world.caller()
    large = await input_of(world, caller, 1_000_000)
    await world.clock.advance(20_000)
    await input_of(world, caller, 100_000)
    assert await taken(world, 1) == [large.id]


async def test_each_lane_has_inputs_and_a_clock_of_its_own(world: StoreWorld) -> None:
    a, b = await world.caller("a"), await world.caller("b")
    large, small, other = await input_of(world, a, 10**8), await input_of(world, a, 200), await input_of(world, b, 300)
    assert await world.store.jobs_waiting_ingest(10, LARGE) == [large.id]
    assert await taken(world, 2) == [large.id]
    assert await taken(world, 3, IngestLane.SMALL) == [small.id, other.id], "what a large input cost says nothing here"
    assert await world.store.jobs_waiting_ingest(10) == []


async def test_what_a_tenant_had_counts_in_its_turns_and_in_its_lane_alone(world: StoreWorld) -> None:
    """Of tenants that are level the smaller input goes first: here that is always the first tenant's."""
    a, b = await world.caller("a"), await world.caller("b")
    ours = {(await input_of(world, a, 200_000)).id for _ in range(3)}
    for _ in range(3):
        await input_of(world, b, 300_000)
    small = [await input_of(world, caller, size) for caller, size in ((a, 100), (a, 200), (b, 300))]
    assert await taken(world, 1, IngestLane.SMALL) == [small[0].id]
    assert [job_id in ours for job_id in await taken(world, 4)] == [True, False, True, False]
    assert await taken(world, 2, IngestLane.SMALL) == [small[2].id, small[1].id]


async def test_a_tenant_that_comes_late_to_a_lane_gets_no_arrears(world: StoreWorld) -> None:
    a, b = await world.caller("a"), await world.caller("b")
    for _ in range(6):
        await input_of(world, a, 1_000_000)
    await taken(world, 5)
    theirs = {(await input_of(world, b, 900_000)).id for _ in range(4)}
    await world.clock.advance(1)
    order = await taken(world, 5)
    assert [job_id in theirs for job_id in order].index(False) <= 2


async def test_the_place_of_a_tenant_is_forgotten_when_its_lane_has_passed_it(world: StoreWorld) -> None:
    a, b = await world.caller("a"), await world.caller("b")
    await input_of(world, a, 200_000)
    for _ in range(2):
        await input_of(world, b, 300_000)
    places = "select tenant_id from ingest_turns order by place"
    await taken(world, 2)
    assert await rows(world, places) == [a.tenant_id, b.tenant_id]
    await taken(world, 1)
    assert await rows(world, places) == [b.tenant_id]


async def test_several_are_taken_under_one_token_and_the_call_may_be_replayed(world: StoreWorld) -> None:
    a, b, worker = await world.caller("a"), await world.caller("b"), await world.worker()
    jobs = [await input_of(world, caller, 200) for caller in (a, a, b, a)]
    found = await world.store.take_ingests(IngestLane.SMALL, SMALL, 3, worker, "t")
    assert len(found) == 3
    assert jobs[2].id in found, "each tenant has its turn"
    again = await world.store.take_ingests(IngestLane.SMALL, SMALL, 3, worker, "t")
    assert again == sorted(found)
    assert len(await world.store.take_ingests(IngestLane.SMALL, SMALL, 3, worker, "u")) == 1
    await world.store.give_back_ingests(worker, "t")
    assert sorted(await world.store.jobs_waiting_ingest(10)) == sorted(found)


async def test_tenants_that_are_passed_over_do_not_hide_the_others(world: StoreWorld) -> None:
    a, b, worker = await world.caller("a"), await world.caller("b"), await world.worker()
    for _ in range(3):
        await input_of(world, a, 200_000)
    theirs = await input_of(world, b, 5_000_000)
    busy = frozenset({a.tenant_id})
    assert await world.store.take_ingests(IngestLane.LARGE, LARGE, 1, worker, "t", busy) == [theirs.id]
    assert await world.store.take_ingests(IngestLane.LARGE, LARGE, 1, worker, "u", busy) == []


async def test_a_tenant_all_of_whose_inputs_are_taken_hides_no_other(world: StoreWorld) -> None:
    a, b = await world.caller("a"), await world.caller("b")
    first = await input_of(world, a, 200_000)
    theirs = await input_of(world, b, 5_000_000)
    assert await world.store.take_step(first.id, JobState.VALIDATING, await world.worker(), world.token())
    assert await taken(world, 1) == [theirs.id]


async def test_of_tenants_that_are_level_the_input_of_the_lower_rank_goes_first(world: StoreWorld) -> None:
    """Both together are more than one turn of the lane may cost. One that waits gains 100 bytes a millisecond."""
    first = await input_of(world, await world.caller("a"), 60_000)
    await world.clock.advance(300)
    second = await input_of(world, await world.caller("b"), 10_000)
    worker = await world.worker()
    assert await world.store.take_ingests(IngestLane.SMALL, SMALL, 2, worker, "t") == [second.id]
    assert await world.store.take_ingests(IngestLane.SMALL, SMALL, 2, worker, "u") == [first.id]


async def test_what_is_taken_resting_closing_or_a_dead_workers_own_takes_nothing(world: StoreWorld) -> None:
    caller, worker = await world.caller(), await world.worker()
    job = await input_of(world, caller, 200)
    assert await world.store.take_ingests(IngestLane.SMALL, SMALL, 9, worker, "t") == [job.id]
    assert await world.store.take_ingests(IngestLane.SMALL, SMALL, 9, await world.worker(), "u") == []
    assert await world.store.drop_step(job.id, "t", 500) == 1
    assert await world.store.take_ingests(IngestLane.SMALL, SMALL, 9, worker, "v") == [], "it rests"
    await world.clock.advance(501)
    gone = await world.worker()
    await world.store.declare_gone(gone, leaving=True)
    assert await world.store.take_ingests(IngestLane.SMALL, SMALL, 9, gone, "w") == []
    assert await world.store.take_ingests(IngestLane.SMALL, SMALL, 9, worker, "x") == [job.id]
    await world.clock.advance(LEASE_MS + 1)
    await world.store.declare_gone(worker)
    assert await taken(world, 1, IngestLane.SMALL) == [job.id], "its owner is dead"
    other = await input_of(world, caller, 200)
    await world.store.cancel_job(caller.tenant_id, other.id)
    assert await taken(world, 1, IngestLane.SMALL) == []


async def test_what_ingest_must_know_is_read_at_once(world: StoreWorld) -> None:
    caller = await world.caller()
    holder = Caller(caller.tenant_id, "k1")
    await world.store.put_key(holder, b"", "", KeyRights(models='["m"]'))
    plain, keyed = await input_of(world, caller, 200), await input_of(world, holder, 300)
    first, second = await world.store.ingest_sources([plain.id, "batch_none", keyed.id])
    assert (first.job, first.tenant, first.key_names, first.sha256) == (plain, "acme", None, "ab" * 32)
    assert (second.job, second.key_names) == (keyed, ('["m"]', ""))
    extents = await world.store.list_extents(plain.input_file_id, 0, 1)
    assert first.blob_id == extents[0].blob_id
    await world.store.delete_key("k1")
    [second] = await world.store.ingest_sources([keyed.id])
    assert second.key_names is None, "as without a key"


async def test_ingest_gets_the_place_of_each_further_input(world: StoreWorld) -> None:
    caller = await world.caller()
    more = [await world.file(caller) for _ in range(2)]
    job = await world.job(caller, shape=JobShape(more_inputs=tuple(file.id for file in more)))
    [source] = await world.store.ingest_sources([job.id])
    extents = [(await world.extents(file.id))[0] for file in more]
    assert source.more == tuple(
        (file.id, "ab" * 32, extent.blob_id) for file, extent in zip(more, extents, strict=True)
    )


async def test_further_inputs_are_kept_when_another_job_is_forgotten(world: StoreWorld) -> None:
    caller = await world.caller()
    more = [await world.file(caller) for _ in range(2)]
    gone, kept = [await world.job(caller, shape=JobShape(more_inputs=(file.id,))) for file in more]
    await world.store.cancel_job(caller.tenant_id, gone.id)
    assert await world.store.end_unstarted(gone.id)
    await world.store.forget_job(gone.id)
    [source] = await world.store.ingest_sources([kept.id])
    assert [one[0] for one in source.more] == [more[1].id]


async def starts_of(world: StoreWorld, worker: str, jobs: list[Job]) -> list[JobStart]:
    found = []
    for job in jobs:
        work = world.id("blob")
        await world.store.begin_blob(work, "work", worker)
        found.append(JobStart(job.id, "t", plan_of(2, 1), work, world.id("file"), world.id("file"), 2_000))
    return found


async def test_jobs_start_together_and_one_that_closed_meanwhile_starts_nothing(world: StoreWorld) -> None:
    a, b, worker = await world.caller("a"), await world.caller("b"), await world.worker()
    jobs = [await input_of(world, caller, 200) for caller in (a, b, a)]
    await world.store.take_ingests(IngestLane.SMALL, SMALL, 9, worker, "t")
    starts = await starts_of(world, worker, jobs)
    await world.store.cancel_job(b.tenant_id, jobs[1].id)
    assert await world.store.start_jobs(starts) == {jobs[1].id}
    assert await world.store.start_jobs(starts) == {jobs[1].id}, "a replay changes nothing"
    for job in (jobs[0], jobs[2]):
        found = await world.look(job)
        assert (found.state, found.item_count) == (JobState.IN_PROGRESS, 3)
        assert await slice_counts(world.store, job.id) == {"ready": 2}
    assert (await world.look(jobs[1])).state is JobState.VALIDATING
    assert await slice_counts(world.store, jobs[1].id) == {}
    flows = await world.store.awake_flows(None, 10)
    assert [(flow.model, flow.share_owner, flow.weight_milli) for flow in flows] == [
        (MODEL, tenant_owner(a.tenant_id), 2_000)
    ]


async def test_a_work_file_that_was_collected_starts_none_of_them(world: StoreWorld) -> None:
    caller, worker = await world.caller(), await world.worker()
    jobs = [await input_of(world, caller, 200) for _ in range(2)]
    await world.store.take_ingests(IngestLane.SMALL, SMALL, 9, worker, "t")
    starts = await starts_of(world, worker, jobs)
    await world.store.give_up_blob(starts[1].work_blob_id)
    with pytest.raises(LostRace):
        await world.store.start_jobs(starts)
    assert {(await world.look(job)).state for job in jobs} == {JobState.VALIDATING}


async def test_processes_that_take_inputs_at_once_take_different_ones(postgres_world: StoreWorld) -> None:
    """Several processes choose by the same clock: each input is taken once, and the tenants' turns are kept."""
    world = postgres_world
    callers = [await world.caller(name) for name in "abc"]
    jobs = [await input_of(world, caller, 200) for caller in callers for _ in range(8)]
    stores = [await world.open_another() for _ in range(4)]
    workers = [await world.worker() for _ in stores]
    found: list[str] = []
    for turn in range(3):
        calls = [
            store.take_ingests(IngestLane.SMALL, SMALL, 2, worker, f"{turn}-{worker}")
            for store, worker in zip(stores, workers, strict=True)
        ]
        for some in await asyncio.gather(*calls):
            found += some
        tenant_of = {job.id: job.tenant_id for job in jobs}
        counts = [sum(tenant_of[job_id] == caller.tenant_id for job_id in found) for caller in callers]
        assert max(counts) - min(counts) <= 1
    assert sorted(found) == sorted(job.id for job in jobs)
