"""What every store does with a canary: the sample runs alone, and then the job goes on, stops or waits."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from tests.contracts.store_world import MODEL, StoreWorld, plan_of, refused
from tests.contracts.test_store_controls import flush, offered
from tidegate.core.job_controls import Canary, JobControls
from tidegate.core.nouns import Caller, Job
from tidegate.core.states import JobState
from tidegate.store.operators.operated import WaitingWork
from tidegate.store.tenants.keys import KeyRights

pytestmark = pytest.mark.anyio


async def sampled(world: StoreWorld, then: str = "continue", ppm: int = 500_000, sample: int = 2) -> tuple[Job, Caller]:
    """A job of a sample and two more slices of two items."""
    caller = await world.caller()
    job = await world.job(caller, canary=Canary(sample, ppm, then))
    return await world.ingested(job, replace(plan_of(2, 2, 2), sample_count=sample)), caller


async def run_sample(world: StoreWorld, job: Job, *, failures: int = 0) -> Any:
    worker = await world.worker()
    [held] = await world.lease(worker, job)
    assert (held.first, held.count) == (0, 2)
    answers = range(2 - failures)
    recorded = await world.answer(await world.log(), job, *answers, token=held.token) if answers else None
    if failures:
        numbers = range(2 - failures, 2)
        recorded = await world.record(world.errors(await world.log("errors"), job, *numbers, token=held.token))
    return recorded


async def test_only_the_sample_is_leased_until_it_is_done_and_then_all(world: StoreWorld) -> None:
    job, caller = await sampled(world)
    assert await offered(world) == [job.id]
    recorded = await run_sample(world, job, failures=1)
    assert recorded.let_go
    assert (await world.look(job)).canary == Canary(2, 500_000, "continue", "passed")
    assert await offered(world) == [job.id]
    assert [one.first for one in await world.lease(await world.worker(), job)] == [2, 4]
    again = await world.store.end_canary(caller.tenant_id, job.id, goes_on=True)
    assert again == await world.look(job)
    assert (await refused(world.store.end_canary(caller.tenant_id, job.id, goes_on=False))).status == 409


async def test_a_sample_that_ends_lets_go_of_its_own_job_alone(world: StoreWorld) -> None:
    (job, _), (other, _) = await sampled(world), await sampled(world, "wait")
    await run_sample(world, other)
    assert (await run_sample(world, job)).let_go
    worker = await world.worker()
    assert [one.first for one in await world.lease(worker, job)] == [2, 4]
    assert await world.lease(worker, other) == []


async def test_a_sample_that_begins_changes_its_own_job_alone(world: StoreWorld) -> None:
    waiting = await world.job(await world.caller(), canary=Canary(5, 1))
    await sampled(world)
    assert (await world.look(waiting)).canary == Canary(5, 1)


async def test_nothing_more_is_leased_while_the_sample_runs_or_is_waited_for(world: StoreWorld) -> None:
    job, caller = await sampled(world, "wait")
    worker = await world.worker()
    [held] = await world.lease(worker, job)
    assert await world.lease(worker, job) == []
    await world.answer(await world.log(), job, 0, 1, token=held.token)
    assert (await world.look(job)).canary.state == "waiting"  # type: ignore[union-attr]
    await world.clock.advance(3_600_000)
    assert await world.lease(await world.worker(), job) == []
    assert await offered(world) == []
    await world.store.record_outcomes([], [(job.id, held.first, held.token)], [])
    assert await world.store.rest_flow(MODEL, job.share_owner)
    assert await world.store.wake_rested(10) == 0
    for _ in range(2):
        passed = await world.store.end_canary(caller.tenant_id, job.id, goes_on=True)
        assert passed is not None
        assert passed.canary is not None
        assert passed.canary.state == "passed"
    assert await world.store.awake_models(10) == [MODEL]
    assert [one.first for one in await world.lease(await world.worker(), job)] == [2, 4]


@pytest.mark.parametrize("act", ["key_changed", "key_revoked", "requeued", "other_terms"])
async def test_what_is_held_back_stays_so_when_all_that_rests_is_looked_at_again(world: StoreWorld, act: str) -> None:
    tenant = (await world.caller()).tenant_id
    caller = Caller(tenant, "k1")
    await world.store.put_key(caller, b"hash", "", KeyRights())
    job = await world.job(caller, canary=Canary(2, 500_000, "continue"))
    job = await world.ingested(job, replace(plan_of(2, 2, 2), sample_count=2))
    worker = await world.worker()
    [held] = await world.lease(worker, job)
    if act == "key_changed":
        assert await world.store.change_key("k1", KeyRights(models="[]"))
    elif act == "key_revoked":
        assert await world.store.revoke_key("k1")
    elif act == "requeued":
        assert await world.store.requeue_job(job.id)
    else:
        await world.store.wake_under("other")
    assert await world.lease(worker, job) == []
    await world.answer(await world.log(), job, 0, 1, token=held.token)
    assert [one.first for one in await world.lease(worker, job)] == [2, 4]


@pytest.mark.parametrize("then", ["continue", "stop", "wait"])
async def test_too_many_failures_stop_the_job_and_keep_its_results(world: StoreWorld, then: str) -> None:
    job, _ = await sampled(world, then, ppm=499_999)
    recorded = await run_sample(world, job, failures=1)
    assert recorded.stopped
    stopped = await world.look(job)
    assert (stopped.closing, stopped.stopped_by) == (JobState.FAILED, "canary")
    assert stopped.canary is not None
    assert stopped.canary.state == "failed"
    assert [error.code for error in stopped.errors] == ["canary_failed"]
    assert await world.store.due_work() == WaitingWork({}, True), "a worker is wanted to end it, and no replica"
    assert await world.lease(await world.worker(), job) == []
    await world.judge(job)


async def test_a_sample_whose_end_passes_a_threshold_is_not_judged_beside(world: StoreWorld) -> None:
    job = await world.job(await world.caller(), canary=Canary(2, 0, "continue"), controls=JobControls(max_cost_nano=99))
    job = await world.ingested(job, replace(plan_of(2, 2), sample_count=2))
    await world.lease(await world.worker(), job, token=job.id)
    await flush(world, job, (0, 1), (), nano=50)
    stopped = await world.look(job)
    assert (stopped.stopped_by, stopped.closing) == ("max_cost", JobState.FAILED)
    assert stopped.canary is not None
    assert stopped.canary.state == "failed", "nothing runs any more"
    # Its caller has no canary left to stop: that is a conflict.
    assert (await refused(world.store.end_canary(job.tenant_id, job.id, goes_on=False))).status == 409


async def test_a_slice_that_rests_is_not_woken_when_the_others_are_let_go(world: StoreWorld) -> None:
    job, caller = await sampled(world, "wait")
    worker = await world.worker()
    [held] = await world.lease(worker, job)
    await world.store.release_slice(job.id, held.first, held.token, 10_000)
    await world.store.end_canary(caller.tenant_id, job.id, goes_on=True)
    assert [one.first for one in await world.lease(worker, job)] == [2, 4]
    await world.clock.advance(10_000)
    assert [one.first for one in await world.lease(worker, job)] == [0]


async def test_a_caller_who_stops_a_batch_after_its_sample_wants_no_more_of_it(world: StoreWorld) -> None:
    job, caller = await sampled(world, "wait")
    await run_sample(world, job)
    await world.store.end_canary(caller.tenant_id, job.id, goes_on=False)
    assert await world.store.due_work() == WaitingWork({}, True)


async def test_a_batch_may_be_only_its_canary(world: StoreWorld) -> None:
    job, _ = await sampled(world, "stop")
    assert (await run_sample(world, job)).stopped
    stopped = await world.look(job)
    assert (stopped.closing, stopped.stopped_by, stopped.canary and stopped.canary.state) == (
        JobState.FAILED,
        "canary",
        "passed",
    )


@pytest.mark.parametrize("then", ["stop", "wait"])
@pytest.mark.parametrize("failures", [0, 2])
async def test_a_sample_that_is_the_whole_job_only_judges_it(world: StoreWorld, failures: int, then: str) -> None:
    caller = await world.caller()
    job = await world.job(caller, canary=Canary(9, 0, then))
    job = await world.ingested(job, replace(plan_of(2), sample_count=2))
    recorded = await run_sample(world, job, failures=failures)
    assert recorded.complete
    ended = await world.look(job)
    wanted = (JobState.FAILED, "failed") if failures else (JobState.COMPLETED, "passed")
    assert (ended.closing, ended.canary and ended.canary.state) == wanted


async def test_the_caller_may_end_a_canary_at_any_time(world: StoreWorld) -> None:
    job, caller = await sampled(world, "wait")
    passed = await world.store.end_canary(caller.tenant_id, job.id, goes_on=True)
    assert passed is not None
    assert [one.first for one in await world.lease(await world.worker(), job)] == [0, 2, 4]
    early = await world.job(caller, canary=Canary(2, 0, "wait"))
    await world.store.end_canary(caller.tenant_id, early.id, goes_on=True)
    early = await world.ingested(early, replace(plan_of(2, 2), sample_count=2))
    assert [one.first for one in await world.lease(await world.worker(), early)] == [0, 2]
    job, caller = await sampled(world, "wait")
    for _ in range(2):
        stopped = await world.store.end_canary(caller.tenant_id, job.id, goes_on=False)
        assert stopped is not None
        assert (stopped.closing, stopped.stopped_by) == (JobState.FAILED, "canary")
    assert (await refused(world.store.end_canary(caller.tenant_id, job.id, goes_on=True))).status == 409
    plain = await world.running(caller, 2)
    assert (await refused(world.store.end_canary(caller.tenant_id, plain.id, goes_on=True))).status == 409
    other_caller = await world.caller("another")
    assert await world.store.end_canary(other_caller.tenant_id, job.id, goes_on=True) is None


async def test_an_input_without_a_good_line_has_no_canary(world: StoreWorld) -> None:
    caller = await world.caller()
    job = await world.job(caller, canary=Canary(2, 0))
    job = await world.ingested(job, replace(plan_of(2), sample_count=0))
    assert job.canary is not None
    assert job.canary.state == "passed"
    assert [one.first for one in await world.lease(await world.worker(), job)] == [0]
