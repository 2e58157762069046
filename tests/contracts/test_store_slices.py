"""What every store does with slices and leases."""

from __future__ import annotations

import pytest

from tests.contracts.store_world import LEASE_MS, MODEL, StoreWorld, plan_of, tries
from tests.support.store_verbs import lease_slices, slice_counts
from tidegate.core.nouns import AnswerTry, Attempts, IngestPlan, Job, JobFlush, LeasedSlice, LineError, Usage
from tidegate.core.schedule import Pick, Why
from tidegate.core.schedule.snapshot import ModelRoom
from tidegate.core.states import JobState
from tidegate.store.road.leases import SUSPECT_AFTER

pytestmark = pytest.mark.anyio


def spans(leased: list[LeasedSlice]) -> list[tuple[int, int]]:
    return [(piece.first, piece.count) for piece in leased]


async def lose(world: StoreWorld, worker_id: str) -> int:
    """Let a worker miss its heartbeat, and free what it held."""
    await world.clock.advance(LEASE_MS + 1)
    assert await world.store.declare_gone(worker_id)
    return await world.store.reclaim_slices(worker_id)


async def ready_jobs(world: StoreWorld) -> list[str]:
    look = await world.store.snapshot("", {MODEL: ModelRoom(9)}, slice_items=4, slices_max=9)
    return sorted(view.job_id for view in look.jobs)


async def test_a_job_whose_own_budgets_are_spent_is_not_looked_at_until_they_allow_something(world: StoreWorld) -> None:
    caller = await world.caller()
    first, second = await world.running(caller, 1), await world.running(caller, 1)
    await world.store.rest_job(first.id, MODEL, 10_000)
    await world.store.rest_job(first.id, MODEL, 2_000)
    await world.clock.advance(9_999)
    assert await ready_jobs(world) == [second.id], "a shorter rest never overwrites a longer one"
    await world.clock.advance(1)
    assert await ready_jobs(world) == sorted([first.id, second.id])


async def test_a_lease_says_all_a_worker_must_know(world: StoreWorld) -> None:
    caller, worker = await world.caller(), await world.worker()
    job = await world.running(caller, 3, 2)
    await world.clock.advance(10)
    [first] = await lease_slices(world.store, worker, job.id, MODEL, 1, "t")
    assert first == LeasedSlice(
        job.id, caller.tenant_id, "/v1/chat/completions", MODEL, 0, 3, 0, str(job.work_blob_id), 0, 300, 50, 0, "t",
        job.expires_at - world.clock.now, "acme", f"tenant:{caller.tenant_id}", caller.key_id, caller.user,
    )  # fmt: skip
    assert await slice_counts(world.store, job.id) == {"leased": 1, "ready": 1}
    [second] = await world.lease(worker, job)
    assert (second.first, second.work_at, second.work_bytes) == (3, 300, 200)
    assert await world.lease(worker, job) == []
    assert await ready_jobs(world) == []


async def test_a_replayed_lease_gives_the_same_slices(world: StoreWorld) -> None:
    worker = await world.worker()
    job = await world.running(await world.caller(), 1, 1, 1)
    taken = await lease_slices(world.store, worker, job.id, MODEL, 2, "t")
    assert await lease_slices(world.store, worker, job.id, MODEL, 2, "t") == taken
    assert await slice_counts(world.store, job.id) == {"leased": 2, "ready": 1}
    other = await world.worker()
    assert spans(await lease_slices(world.store, other, job.id, MODEL, 2, "t")) == [(2, 1)], "a token is its worker's"


async def test_what_was_picked_is_leased_together_and_a_replay_gives_the_same(world: StoreWorld) -> None:
    """Several jobs, one of them under two rules; one that closed and one that has nothing ready keep no other from its slices."""
    caller, worker = await world.caller(), await world.worker()
    jobs = [await world.running(caller, 1, 1, 1) for _ in range(4)]
    await world.lease(await world.worker(), jobs[2])
    await world.store.cancel_job(caller.tenant_id, jobs[3].id)
    picks = [
        (Pick(jobs[1].id, MODEL, 2, Why.FAIR), "b"),
        (Pick(jobs[0].id, MODEL, 1, Why.URGENT), "a"),
        (Pick(jobs[2].id, MODEL, 1, Why.FAIR), "none ready"),
        (Pick(jobs[3].id, MODEL, 1, Why.FAIR), "closed"),
        (Pick(jobs[0].id, MODEL, 1, Why.FAIR), "a too"),
    ]
    taken = await world.store.lease_picks(worker, picks)
    assert [(piece.job_id, piece.first, piece.token) for piece in taken] == [
        (jobs[1].id, 0, "b"), (jobs[1].id, 1, "b"), (jobs[0].id, 0, "a"), (jobs[0].id, 1, "a too"),
    ]  # fmt: skip
    assert await world.store.lease_picks(worker, picks) == taken
    look = await world.store.snapshot(worker, {MODEL: ModelRoom(9)}, slice_items=4, slices_max=9)
    assert look.models[MODEL].in_flight_by_why == {Why.FAIR: 3 * 50, Why.URGENT: 50, Why.FIFO: 3 * 50}


async def test_a_lease_that_is_asked_for_again_is_the_same_though_its_job_closes(world: StoreWorld) -> None:
    caller, worker = await world.caller(), await world.worker()
    job = await world.running(caller, 1, 1)
    taken = await lease_slices(world.store, worker, job.id, MODEL, 1, "t")
    await world.store.cancel_job(caller.tenant_id, job.id)
    assert await lease_slices(world.store, worker, job.id, MODEL, 1, "t") == taken
    assert await lease_slices(world.store, worker, job.id, MODEL, 1, "another") == []


async def test_a_gone_unknown_or_overdue_worker_gets_no_lease(world: StoreWorld) -> None:
    job = await world.running(await world.caller())
    late, left = await world.worker(1_000), await world.worker()
    await world.store.declare_gone(left, leaving=True)
    await world.clock.advance(1_000)
    for worker in (late, left, world.id("worker")):
        assert await world.lease(worker, job) == []
    assert await world.store.beat(late, LEASE_MS) == []
    assert len(await world.lease(late, job)) == 1


async def test_a_lease_is_for_one_model_of_one_open_job(world: StoreWorld) -> None:
    caller, worker = await world.caller(), await world.worker()
    plan = IngestPlan(2, None, [*plan_of(1).slices, plan_of(1, 1, model="other").slices[1]], 200, 0, 0)
    job = await world.ingested(await world.job(caller), plan)
    assert spans(await lease_slices(world.store, worker, job.id, "other", 10, "t")) == [(1, 1)]
    assert await lease_slices(world.store, worker, job.id, "unknown", 10, "u") == []
    assert await lease_slices(world.store, worker, world.id("batch"), MODEL, 10, "v") == []
    assert await world.lease(worker, await world.job(caller)) == []
    await world.store.fail_job(job.id, LineError("stopped", "by hand"))
    assert await world.lease(worker, job) == []


async def test_a_look_shows_only_those_with_something_ready(world: StoreWorld) -> None:
    caller, worker = await world.caller(), await world.worker()
    jobs = []
    for _ in range(3):
        jobs.append(await world.running(caller, 1))
        await world.clock.advance(1)
    assert await ready_jobs(world) == sorted(job.id for job in jobs)
    [held] = await world.lease(worker, jobs[0])
    assert await ready_jobs(world) == sorted(job.id for job in jobs[1:])
    await world.store.release_slice(jobs[0].id, held.first, held.token, 500)
    assert await ready_jobs(world) == sorted(job.id for job in jobs[1:])
    assert await world.lease(worker, jobs[0]) == []
    await world.clock.advance(500)
    assert len(await ready_jobs(world)) == 3
    assert spans(await world.lease(worker, jobs[0])) == [(0, 1)]


async def test_only_the_token_that_holds_a_slice_gives_it_back(world: StoreWorld) -> None:
    worker = await world.worker()
    job = await world.running(await world.caller(), 2)
    [held] = await world.lease(worker, job)
    assert not await world.store.release_slice(job.id, 0, "someone else's", 0)
    assert not await world.store.release_slice(job.id, 1, held.token, 0)
    await world.store.record_outcomes([], [(job.id, 0, "someone else's")], [(job.id, 0, "someone else's", 0)])
    assert await slice_counts(world.store, job.id) == {"leased": 1}
    assert await world.store.release_slice(job.id, 0, held.token, 0)
    assert not await world.store.release_slice(job.id, 0, held.token, 0)
    assert await slice_counts(world.store, job.id) == {"ready": 1}
    [again] = await world.lease(worker, job)
    assert not await world.store.release_slice(job.id, 0, held.token, 0), "the old token means nothing now"
    assert again.lost_count == 0, "what was given back was not lost"


async def test_a_slice_that_comes_back_is_not_run_from_its_start(world: StoreWorld) -> None:
    worker, log = await world.worker(), await world.log()
    job = await world.running(await world.caller(), 4)
    [held] = await world.lease(worker, job)
    await world.record(world.answers(log, job, 0, 2, token=held.token))
    await world.record(JobFlush(job.id, attempts=[(held.token, tries(1, 2, 700, "upstream_throttled"))]))
    await world.store.record_outcomes([], [], [(job.id, 0, held.token, 100)])
    await world.clock.advance(100)
    [again] = await world.lease(worker, job)
    assert again.done == {0, 2}
    assert again.attempts == {1: tries(1, 2, 600, "upstream_throttled")}


async def test_a_finished_slice_never_comes_back(world: StoreWorld) -> None:
    worker = await world.worker()
    job = await world.running(await world.caller(), 2, 1)
    [held] = await world.lease(worker, job, 1)
    for _ in range(2):
        await world.store.record_outcomes([], [(job.id, 0, held.token)], [])
    assert await slice_counts(world.store, job.id) == {"done": 1, "ready": 1}
    assert not await world.store.release_slice(job.id, 0, held.token, 0)
    assert await lose(world, worker) == 0
    assert await world.store.unfinished_slices(job.id) == [(2, 1, 2, 200, 100)]


async def test_the_slices_of_the_living_are_not_reclaimed(world: StoreWorld) -> None:
    worker = await world.worker()
    job = await world.running(await world.caller(), 1, 1)
    await world.lease(worker, job)
    assert await world.store.reclaim_slices(worker) == 0
    assert await world.store.stranded_workers(10) == []
    assert await slice_counts(world.store, job.id) == {"leased": 2}


async def test_the_slices_of_a_lost_worker_are_ready_for_others(world: StoreWorld) -> None:
    worker = await world.worker()
    job = await world.running(await world.caller(), 2, 2)
    held = await world.lease(worker, job)
    await world.clock.advance(LEASE_MS + 1)
    assert await world.store.declare_gone(worker)
    assert await world.store.stranded_workers(10) == [worker]
    assert await world.store.stranded_workers(0) == []
    assert await world.store.reclaim_slices(worker) == 2
    assert await world.store.reclaim_slices(worker) == 0
    assert await world.store.stranded_workers(10) == []
    taken = await world.lease(await world.worker(), job)
    assert spans(taken) == spans(held)
    assert {piece.lost_count for piece in taken} == {1}


async def lost_before(world: StoreWorld, job: Job, count: int, slice_count: int = 100) -> None:
    """Let so many workers be lost one after the other, each of which held the first slices of this job."""
    for _ in range(count):
        worker = await world.worker()
        await world.lease(worker, job, slice_count)
        await lose(world, worker)


def held_by(leased: list[LeasedSlice]) -> dict[tuple[int, int], int]:
    return {(piece.first, piece.count): piece.lost_count for piece in leased}


async def test_a_suspect_that_was_lost_without_others_is_cut_in_two(world: StoreWorld) -> None:
    log = await world.log()
    job = await world.running(await world.caller(), 6)
    await lost_before(world, job, 2)
    worker = await world.worker()
    [held] = await world.lease(worker, job)
    assert held.lost_count == 2
    await world.record(world.answers(log, job, 1, token=held.token))
    await world.record(JobFlush(job.id, attempts=[(held.token, tries(4, 1, 10))]))
    assert await lose(world, worker) == 1
    halves = await world.lease(await world.worker(), job)
    assert held_by(halves) == {(0, 3): 3, (3, 3): 3}, "its five open items, as two slices"
    assert {(half.read_first, half.work_at, half.work_bytes) for half in halves} == {(0, 0, 600)}
    assert [half.item_units for half in halves] == [50, 50]
    assert (set(halves[0].done), halves[1].attempts[4].count) == ({1}, 1)


async def test_suspects_that_were_lost_together_stay_one_group(world: StoreWorld) -> None:
    """Only when a group is a single slice there is anything to cut; what is not suspected yet loses its first owner beside them."""
    job = await world.running(await world.caller(), 2, 2, 2)
    await lost_before(world, job, 2, slice_count=2)
    worker = await world.worker()
    assert held_by(await world.lease(worker, job)) == {(0, 2): 2, (2, 2): 2, (4, 2): 0}
    await lose(world, worker)
    other = await world.worker()
    assert held_by(await world.store.lease_picks(other, [(Pick(job.id, MODEL, 9, Why.FAIR), "t")], 1)) == {
        (0, 2): 3,
        (4, 2): 1,
    }
    await lose(world, other)
    assert held_by(await world.lease(await world.worker(), job)) == {(0, 1): 4, (1, 1): 4, (2, 2): 3, (4, 2): 2}


async def test_a_worker_holds_only_as_many_suspects_as_it_asks_for_the_worst_first(world: StoreWorld) -> None:
    job = await world.running(await world.caller(), 2, 2)
    await lost_before(world, job, 3, slice_count=1)
    await lost_before(world, job, 1, slice_count=1)
    careful = await world.worker()
    pick = Pick(job.id, MODEL, 9, Why.FAIR)
    assert held_by(await world.store.lease_picks(careful, [(pick, "none")], 0)) == {(2, 2): 0}, "no suspect at all"
    [held] = await world.store.lease_picks(careful, [(pick, "one")], 1)
    assert (held.first, held.count, held.lost_count) == (0, 1, 4)
    assert await world.store.lease_picks(careful, [(pick, "no more")], 1) == []
    assert held_by(await world.store.lease_picks(careful, [(pick, "another")], 2)) == {(1, 1): 3}


async def test_suspects_that_a_worker_has_already_count_for_how_many_it_may_have(world: StoreWorld) -> None:
    job = await world.running(await world.caller(), 1, 1, 1)
    await lost_before(world, job, 3)
    worker, pick = await world.worker(), Pick(job.id, MODEL, 9, Why.FAIR)
    assert len(await world.store.lease_picks(worker, [(pick, "one")], 1)) == 1
    assert len(await world.store.lease_picks(worker, [(pick, "two")], 2)) == 1


async def test_the_worst_suspect_is_taken_first_wherever_it_lies(world: StoreWorld) -> None:
    job = await world.running(await world.caller(), 1, 1)
    await lost_before(world, job, 3, slice_count=2)
    [kept] = await world.lease(await world.worker(), job, 1)
    await lost_before(world, job, 1)
    await world.store.release_slice(job.id, kept.first, kept.token, 0)
    [held] = await world.store.lease_picks(await world.worker(), [(Pick(job.id, MODEL, 9, Why.FAIR), "t")], 1)
    assert (held.first, held.lost_count) == (1, 4)


@pytest.mark.parametrize("is_leased", [False, True])
async def test_lesser_suspects_are_kept_for_the_check_of_the_worst_one(world: StoreWorld, *, is_leased: bool) -> None:
    """Where every slice lost owners, an item that rests before it runs alone would be the last, with nothing to be compared with."""
    job = await world.running(await world.caller(), 1, 1, 1, 1, 1)
    await lost_before(world, job, SUSPECT_AFTER)
    await lost_before(world, job, 1, slice_count=1)
    searcher, pick = await world.worker(), Pick(job.id, MODEL, 9, Why.FAIR)
    [worst] = await world.store.lease_picks(searcher, [(pick, "worst")], 1)
    assert (worst.first, worst.lost_count) == (0, SUSPECT_AFTER + 1)
    if not is_leased:
        await world.store.release_slice(job.id, worst.first, worst.token, 30_000)
    other = await world.worker()

    async def take(token: str, *, keeps_rest: bool) -> list[int]:
        leased = await world.store.lease_picks(other, [(pick, token)], keeps_rest=keeps_rest)
        return [piece.first for piece in leased]

    assert await take("all but the last two", keeps_rest=True) == [1, 2]
    assert await take("nothing", keeps_rest=True) == []
    if is_leased:
        assert await ready_jobs(world) == [], "nor does a look show them"
    assert await take("for the check", keeps_rest=False) == [3, 4]


async def test_no_suspect_is_kept_for_others_that_cannot_run_alone(world: StoreWorld) -> None:
    job = await world.running(await world.caller(), 1, 1, 1, 1)
    await lost_before(world, job, SUSPECT_AFTER - 1)
    await lost_before(world, job, 1, slice_count=1)
    taken = await world.store.lease_picks(
        await world.worker(), [(Pick(job.id, MODEL, 9, Why.FAIR), "t")], keeps_rest=True
    )
    assert held_by(taken) == {(0, 1): 3, (1, 1): 2, (2, 1): 2, (3, 1): 2}


async def test_the_loss_of_a_worker_counts_for_the_item_that_it_ran_alone(world: StoreWorld) -> None:
    worker, job = await world.worker(), await world.running(await world.caller(), 3, 2)
    await world.lease(worker, job)
    assert await world.store.run_alone(worker, (job.id, 1))
    assert await lose(world, worker) == 2
    again = await world.lease(await world.worker(), job)
    assert held_by(again) == {(0, 1): 0, (1, 1): 3, (2, 1): 0, (3, 2): 0}
    assert {number: one.alone_losses for piece in again for number, one in piece.attempts.items()} == {1: 1}


async def test_losses_alone_count_when_another_item_survived_in_between(world: StoreWorld) -> None:
    job = await world.running(await world.caller(), 1)
    counts = []
    for is_checked in (False, False, True, True):
        worker = await world.worker()
        await world.lease(worker, job)
        assert await world.store.run_alone(worker, (job.id, 0), is_checked=is_checked)
        await lose(world, worker)
        [piece] = await world.lease(heir := await world.worker(), job)
        counts.append(piece.attempts[0].alone_losses)
        await world.store.release_slice(job.id, 0, piece.token, 0)
        assert await world.store.run_alone(heir, None)
    assert counts == [1, 1, 2, 3]


async def test_an_item_that_ended_before_its_worker_was_lost_is_not_blamed(world: StoreWorld) -> None:
    worker, log = await world.worker(), await world.log()
    job = await world.running(await world.caller(), 2)
    await world.lease(worker, job)
    await world.store.run_alone(worker, (job.id, 0))
    await world.answer(log, job, 0)
    await lose(world, worker)
    assert held_by(await world.lease(await world.worker(), job)) == {(0, 2): 0}
    assert not await world.store.run_alone(worker, (job.id, 1)), "a worker that is gone runs nothing"


async def test_a_slice_whose_items_are_all_done_vanishes_when_it_is_cut(world: StoreWorld) -> None:
    log = await world.log()
    job = await world.running(await world.caller(), 2, 2)
    await lost_before(world, job, 2, slice_count=1)
    worker = await world.worker()
    await world.lease(worker, job, 1)
    await world.answer(log, job, 0, 1)
    await lose(world, worker)
    assert await slice_counts(world.store, job.id) == {"ready": 1}, "nothing of the first one is open"
    assert [span[0] for span in await world.store.unfinished_slices(job.id)] == [2]


async def test_what_is_unfinished_covers_every_item_without_an_outcome(world: StoreWorld) -> None:
    caller, worker, log = await world.caller(), await world.worker(), await world.log()
    job = await world.running(caller, 3, 3, 3)
    [held] = await world.lease(worker, job, 1)
    await world.answer(log, job, 0, 1, 2, 4)
    await world.store.record_outcomes([], [(job.id, 0, held.token)], [])
    [late] = await world.lease(worker, job, 1)
    await world.store.cancel_job(caller.tenant_id, job.id)
    await world.store.close_job(job.id, -1)
    assert (await world.look(job)).state is JobState.FINALIZING
    # Its owner's outcomes came too late, so its end says nothing.
    await world.store.record_outcomes([], [(job.id, late.first, late.token)], [])
    assert await world.store.unfinished_slices(job.id) == [(3, 3, 3, 300, 300), (6, 3, 6, 600, 300)]


async def test_the_unsent_tail_of_a_slice_is_given_back_while_its_head_is_kept(world: StoreWorld) -> None:
    caller, worker, other = await world.caller(), await world.worker(), await world.worker()
    job = await world.running(caller, 5)
    [held] = await world.lease(worker, job)
    for _ in range(2):
        assert await world.store.release_tail(job.id, held.first, held.token, 2), "also when it is replayed"
    [tail] = await lease_slices(world.store, other, job.id, MODEL, 9, "other")
    assert (tail.first, tail.count, tail.read_first) == (2, 3, 0)
    assert (tail.work_at, tail.work_bytes) == (held.work_at, held.work_bytes)
    assert [holding.first for holding in await world.store.beat(worker, LEASE_MS) or []] == [0]
    assert tail.item_units == held.item_units, "a part of the work goes with its items"
    look = await world.store.snapshot(worker, {MODEL: ModelRoom(9)}, slice_items=4, slices_max=9)
    assert look.models[MODEL].in_flight_units == 5 * 50, "and none of it counts twice"


async def test_the_tail_of_a_slice_that_lost_owners_lost_as_many(world: StoreWorld) -> None:
    job = await world.running(await world.caller(), 4)
    await lost_before(world, job, 2)
    [held] = await world.lease(await world.worker(), job)
    assert await world.store.release_tail(job.id, held.first, held.token, 2)
    [tail] = await world.lease(await world.worker(), job)
    assert (tail.first, tail.lost_count) == (2, 2)


async def test_a_tail_needs_the_token_and_something_behind_it(world: StoreWorld) -> None:
    worker = await world.worker()
    job = await world.running(await world.caller(), 5)
    [held] = await world.lease(worker, job)
    assert not await world.store.release_tail(job.id, held.first, "someone else's", 2)
    assert not await world.store.release_tail(job.id, held.first, held.token, 0)
    assert not await world.store.release_tail(job.id, held.first, held.token, 6)
    assert not await world.store.release_tail(job.id, 3, held.token, 4)
    assert await slice_counts(world.store, job.id) == {"leased": 1}


async def test_a_slice_keeps_its_endpoint_when_it_is_cut(world: StoreWorld) -> None:
    caller, worker = await world.caller(), await world.worker()
    job = await world.ingested(await world.job(caller), plan_of(4, endpoint="/v1/responses"))
    [held] = await world.lease(worker, job)
    assert held.endpoint == "/v1/responses"
    assert await lease_slices(world.store, worker, job.id, MODEL, 1, held.token) == [held]
    assert await world.store.release_tail(job.id, held.first, held.token, 2)
    for _ in range(3):
        await lose(world, worker)
        worker = await world.worker()
        leased = [piece for _ in range(4) for piece in await world.lease(worker, job)]
        assert {piece.endpoint for piece in leased} == {"/v1/responses"}
    assert len(leased) > 2, "it was cut"


async def test_a_slice_that_comes_back_names_its_own_items_that_are_done(world: StoreWorld) -> None:
    worker, log = await world.worker(), await world.log()
    job = await world.running(await world.caller(), 2, 2)
    first, second = await world.lease(worker, job)
    await world.answer(log, job, 0, token=first.token)
    await world.answer(log, job, 2, token=second.token)
    for held in (first, second):
        assert await world.store.release_slice(job.id, held.first, held.token, 0)
    again = await world.lease(worker, job)
    assert {held.first: set(held.done) for held in again} == {0: {0}, 2: {2}}


async def test_a_lost_workers_slices_are_freed_and_those_of_the_living_in_other_jobs_are_not(world: StoreWorld) -> None:
    lost, living, caller = await world.worker(), await world.worker(), await world.caller()
    theirs, ours = await world.running(caller, 2), await world.running(caller, 2)
    await world.lease(lost, theirs)
    [held] = await world.lease(living, ours)
    assert await world.store.declare_gone(lost, leaving=True)
    assert await world.store.reclaim_slices(lost) == 1
    leases = await world.store.beat(living, LEASE_MS)
    assert [(one.job_id, one.token) for one in leases or ()] == [(ours.id, held.token)]


async def test_what_was_paid_for_and_taken_back_of_an_item_is_never_forgotten_by_a_later_note(
    world: StoreWorld,
) -> None:
    worker, job = await world.worker(), await world.running(await world.caller(), 1)
    [held] = await world.lease(worker, job)
    paid = (AnswerTry("m", "d", Usage(1, 0, 1, 0), (1, 0, 1), "no number"),)
    for note in (Attempts(0, 2, 0, "x", hand_backs=2, tries=paid), Attempts(0, 1, 0, "y", hand_backs=1)):
        await world.record(JobFlush(job.id, attempts=[(held.token, note)]))
    await world.store.release_slice(job.id, 0, held.token, 0)
    [again] = await world.lease(worker, job)
    found = again.attempts[0]
    assert (found.count, found.hand_backs, found.tries) == (2, 2, paid)
