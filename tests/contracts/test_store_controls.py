"""What every store does with a job that is paused, changed, or over one of its thresholds."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tests.contracts.store_world import DAY_MS, MODEL, START_MS, StoreWorld, plan_of, refused
from tidegate.core.job_controls import EVERYTHING, JobChange, JobControls, MaxErrors
from tidegate.core.nouns import IngestPlan, Job, JobFlush
from tidegate.core.schedule.snapshot import ModelRoom
from tidegate.core.states import JobState
from tidegate.store.operators.operated import WaitingWork

pytestmark = pytest.mark.anyio

HOUR_MS = 3_600_000


async def offered(world: StoreWorld, worker_id: str | None = None) -> list[str]:
    """The jobs that a worker with room is shown, in the order of the look."""
    look = await world.store.snapshot(
        worker_id or await world.worker(), {MODEL: ModelRoom(100)}, slice_items=10, slices_max=10
    )
    return [view.job_id for view in look.jobs]


async def test_another_tenant_neither_pauses_nor_resumes_a_job(world: StoreWorld) -> None:
    caller, other_caller = await world.caller(), await world.caller("another")
    job = await world.running(caller, 2)
    assert await world.store.pause_job(other_caller.tenant_id, job.id) is None
    assert (await world.look(job)).paused_at is None
    assert await world.store.pause_job(caller.tenant_id, job.id)
    assert await world.store.resume_job(other_caller.tenant_id, job.id) is None
    assert (await world.look(job)).paused_at is not None


async def test_a_paused_job_is_neither_offered_nor_leased_until_it_is_resumed(world: StoreWorld) -> None:
    caller, worker_id = await world.caller(), await world.worker()
    job, other = await world.running(caller, 2, 2), await world.running(caller, 2)
    held = await world.lease(worker_id, job, 1)
    paused = await world.store.pause_job(caller.tenant_id, job.id)
    assert paused is not None
    assert (paused.state, paused.paused_at) == (JobState.IN_PROGRESS, START_MS)
    await world.clock.advance(1_000)
    assert await world.store.pause_job(caller.tenant_id, job.id) == paused
    assert await offered(world) == [other.id]
    assert await world.lease(worker_id, job) == []
    leases = await world.store.beat(worker_id, 30_000) or []
    assert [(one.job_id, one.must_wait, one.expires_in_ms) for one in leases] == [(job.id, True, DAY_MS - 1_000)]
    # What was in flight ends as always.
    await world.answer(await world.log(), job, 0, 1, token=held[0].token)
    assert (await world.look(job)).answered_count == 2
    resumed = await world.store.resume_job(caller.tenant_id, job.id)
    assert resumed is not None
    assert resumed.paused_at is None
    assert await world.store.resume_job(caller.tenant_id, job.id) == resumed
    assert sorted(await offered(world)) == sorted([job.id, other.id])
    assert [leased.first for leased in await world.lease(worker_id, job)] == [2]


async def test_the_flow_of_a_paused_job_sleeps_and_wakes_with_it(world: StoreWorld) -> None:
    caller = await world.caller()
    job = await world.running(caller, 2)
    owner = job.share_owner
    await world.store.pause_job(caller.tenant_id, job.id)
    assert await world.store.rest_flow(MODEL, owner)
    assert await world.store.awake_models(10) == []
    await world.store.resume_job(caller.tenant_id, job.id)
    assert await world.store.awake_models(10) == [MODEL]
    assert await offered(world) == [job.id]


async def test_a_job_may_be_paused_before_it_is_ingested(world: StoreWorld) -> None:
    caller = await world.caller()
    job = await world.job(caller)
    await world.store.pause_job(caller.tenant_id, job.id)
    await world.ingested(job, plan_of(2))
    assert await offered(world) == []
    await world.store.resume_job(caller.tenant_id, job.id)
    assert await offered(world) == [job.id]


async def test_the_deadline_of_a_paused_job_runs_on(world: StoreWorld) -> None:
    caller = await world.caller()
    job = await world.running(caller, 2)
    await world.store.pause_job(caller.tenant_id, job.id)
    await world.clock.advance(DAY_MS)
    assert await world.store.overdue_jobs(10) == [job.id]
    assert await world.store.expire_job(job.id)
    assert (await refused(world.store.resume_job(caller.tenant_id, job.id))).code == "batch_not_pausable"
    assert await world.store.close_job(job.id, 0)


async def test_what_ended_or_ends_can_neither_be_paused_nor_changed(world: StoreWorld) -> None:
    caller = await world.caller()
    job = await world.running(caller, 2)
    await world.store.cancel_job(caller.tenant_id, job.id)
    for call, code in (
        (world.store.pause_job(caller.tenant_id, job.id), "batch_not_pausable"),
        (world.store.resume_job(caller.tenant_id, job.id), "batch_not_pausable"),
        (world.store.change_job(caller.tenant_id, job.id, JobChange({"priority": 1})), "batch_not_changeable"),
    ):
        problem = await refused(call)
        assert (problem.status, problem.code) == (409, code)


async def test_another_tenants_job_cannot_be_controlled(world: StoreWorld) -> None:
    ours, theirs = await world.caller("ours"), await world.caller("theirs")
    job = await world.running(theirs)
    for job_id in (job.id, world.id("batch")):
        assert await world.store.pause_job(ours.tenant_id, job_id) is None
        assert await world.store.resume_job(ours.tenant_id, job_id) is None
        assert await world.store.change_job(ours.tenant_id, job_id, JobChange({"priority": 5})) is None
    assert await world.look(job) == job


async def test_higher_priorities_are_looked_at_first_and_priority_can_change(world: StoreWorld) -> None:
    caller = await world.caller()
    ordinary = [await world.running(caller, 2) for _ in range(12)]
    first = await world.running(caller, 2, controls=JobControls(priority=7))
    last = await world.running(caller, 2, controls=JobControls(priority=-1))
    look = await world.store.snapshot(await world.worker(), {MODEL: ModelRoom(100)}, slice_items=10, slices_max=10)
    shown = [view for view in look.jobs if view.priority]
    assert look.jobs[0].job_id == first.id
    assert {view.job_id: view.priority for view in shown if view.job_id != last.id} == {first.id: 7}
    await world.store.change_job(caller.tenant_id, last.id, JobChange({"priority": 100}))
    assert (await offered(world))[:2] == [last.id, first.id]
    assert (await world.look(last)).controls.priority == 100
    assert [(await world.look(one)).controls.priority for one in ordinary] == [0] * 12


async def test_a_change_wakes_no_flow_of_a_model_that_a_job_is_done_with(world: StoreWorld) -> None:
    caller = await world.caller()
    slices = [*plan_of(1).slices, plan_of(1, 1, model="other").slices[1]]
    job = await world.ingested(await world.job(caller), IngestPlan(2, None, slices, 200, 0, 0))
    [held] = await world.lease(await world.worker(), job)
    await world.answer(await world.log(), job, 0)
    await world.store.record_outcomes([], [(job.id, held.first, held.token)], [])
    await world.store.close_spent(MODEL, job.share_owner)
    assert await world.store.rest_flow(MODEL, job.share_owner)
    await world.store.change_job(caller.tenant_id, job.id, JobChange({"priority": 1}))
    assert await world.store.awake_models(10) == ["other"]


async def test_nothing_of_a_job_runs_before_its_moment(world: StoreWorld) -> None:
    caller, worker_id = await world.caller(), await world.worker(lease_ms=DAY_MS)
    job = await world.running(caller, 2, 2, controls=JobControls(not_before=START_MS + HOUR_MS))
    assert await offered(world) == []
    assert await world.lease(worker_id, job) == []
    # Nor when an operator has all of it looked at again, or changes the terms of what is sent.
    assert await world.store.requeue_job(job.id) is not None
    assert await offered(world) == []
    await world.store.wake_under("terms")
    assert await offered(world) == []
    # The flow sleeps until then, and a key that is changed does not wake it earlier.
    assert await world.store.rest_flow(MODEL, job.share_owner)
    await world.clock.advance(HOUR_MS - 1)
    assert await world.store.wake_rested(10) == 0
    await world.clock.advance(1)
    assert await world.store.wake_rested(10) == 1
    assert await offered(world) == [job.id]
    assert len(await world.lease(worker_id, job, 1)) == 1
    # Moved ahead again, what is out is called back; taken back, it goes on at once.
    await world.store.change_job(caller.tenant_id, job.id, JobChange({"not_before": START_MS + 2 * HOUR_MS}))
    assert [one.must_wait for one in await world.store.beat(worker_id, 30_000) or []] == [True]
    assert await offered(world) == []
    assert await world.lease(worker_id, job) == []
    await world.store.change_job(caller.tenant_id, job.id, JobChange({"not_before": 0}))
    assert await offered(world) == [job.id]


@pytest.mark.parametrize(
    ("fields", "not_before"),
    [({}, START_MS + DAY_MS), ({"begin_within_ms": HOUR_MS}, START_MS + HOUR_MS)],
    ids=["behind_the_window", "behind_begin_within"],
)
async def test_a_moment_at_which_it_could_not_begin_is_refused(
    world: StoreWorld, fields: dict[str, Any], not_before: int
) -> None:
    caller = await world.caller()
    problem = await refused(world.job(caller, controls=JobControls(not_before=not_before), **fields))
    assert (problem.status, problem.code, problem.param) == (400, "invalid_parameter", "not_before")
    job = await world.running(caller, 2, controls=JobControls(not_before=not_before - 1), **fields)
    problem = await refused(world.store.change_job(caller.tenant_id, job.id, JobChange({"not_before": not_before})))
    assert problem.param == "not_before"


async def test_a_job_that_has_begun_may_wait_longer_than_it_had_to_begin(world: StoreWorld) -> None:
    caller = await world.caller()
    job = await world.running(caller, 2, 2, begin_within_ms=HOUR_MS)
    assert await world.lease(await world.worker(), job, 1)
    changed = await world.store.change_job(caller.tenant_id, job.id, JobChange({"not_before": START_MS + 2 * HOUR_MS}))
    assert changed is not None
    assert changed.controls.not_before == START_MS + 2 * HOUR_MS


async def test_a_job_that_has_not_begun_is_due_when_it_must_begin_whatever_its_window(world: StoreWorld) -> None:
    caller = await world.caller()
    job = await world.running(caller, 2, begin_within_ms=HOUR_MS)

    async def due_after(days: int) -> int:
        await world.store.change_job(caller.tenant_id, job.id, JobChange({}, days * DAY_MS, f"{days}d"))
        [due] = (await world.store.due_work()).due[MODEL]
        return due.due_in_ms

    assert await due_after(2) == HOUR_MS
    await world.lease(await world.worker(), job)
    assert await due_after(3) == 3 * DAY_MS


async def test_only_a_new_moment_ends_the_rest_that_a_budget_asked_for(world: StoreWorld) -> None:
    caller = await world.caller()
    job = await world.running(caller, 2)
    await world.store.rest_job(job.id, MODEL, HOUR_MS)
    await world.store.change_job(caller.tenant_id, job.id, JobChange({"priority": 5}))
    assert await offered(world) == []
    await world.store.change_job(caller.tenant_id, job.id, JobChange({"not_before": 0}))
    assert await offered(world) == [job.id]


async def test_a_deadline_moves_with_its_window(world: StoreWorld) -> None:
    caller, worker_id = await world.caller(), await world.worker()
    job = await world.running(caller, 2)
    await world.lease(worker_id, job)
    changed = await world.store.change_job(caller.tenant_id, job.id, JobChange({}, 2 * DAY_MS, "48h"))
    assert changed is not None
    assert (changed.expires_at, changed.window_text) == (START_MS + 2 * DAY_MS, "48h")
    assert await world.store.change_job(caller.tenant_id, job.id, JobChange({}, 2 * DAY_MS, "48h")) == changed
    await world.clock.advance(HOUR_MS)
    problem = await refused(world.store.change_job(caller.tenant_id, job.id, JobChange({}, HOUR_MS + 59_999, "1h59s")))
    assert (problem.status, problem.param) == (400, "completion_window")
    soon = JobChange({}, HOUR_MS + 60_000, "61m")
    changed = await world.store.change_job(caller.tenant_id, job.id, soon)
    assert await world.store.overdue_jobs(10) == []
    await world.clock.advance(59_999)
    assert await world.store.change_job(caller.tenant_id, job.id, soon) == changed, "a repeat is never too late"
    await world.clock.advance(1)
    assert await world.store.overdue_jobs(10) == [job.id]


async def leased(world: StoreWorld, count: int, **controls: Any) -> Job:
    """A job of one slice that a worker holds, under the token that `flush` names."""
    job = await world.running(await world.caller(), count, controls=JobControls(**controls))
    await world.lease(await world.worker(), job, token=job.id)
    return job


async def flush(
    world: StoreWorld,
    job: Job,
    answered: tuple[int, ...],
    failed: tuple[int, ...],
    nano: int = 0,
    model: str | None = None,
) -> None:
    """Record these outcomes in one transaction; each answer costs so much, and each failed line names this model."""
    answers = world.answers(await world.log(), job, *answered, token=job.id)
    errors = world.errors(await world.log("errors"), job, *failed, token=job.id)
    paid = [msgspec.structs.replace(entry, cost_nano=(nano, 0, 0)) for entry in answers.answers]
    await world.record(
        JobFlush(
            job.id,
            paid,
            answers.answers_placed if answered else None,
            [msgspec.structs.replace(entry, model=model) for entry in errors.errors],
            errors.errors_placed if failed else None,
        )
    )


async def ended_by(world: StoreWorld, job: Job) -> tuple[str | None, str | None]:
    job = await world.look(job)
    return job.stopped_by, job.errors[0].code if job.errors else None


async def test_more_errors_than_allowed_stop_a_job_and_keep_its_results(world: StoreWorld) -> None:
    job = await leased(world, 10, max_errors=MaxErrors(count=2))
    await flush(world, job, (0, 1), (2, 3))
    assert await ended_by(world, job) == (None, None)
    await flush(world, job, (4,), (5,))
    stopped = await world.judge(job)
    assert (stopped.state, stopped.closing) == (JobState.IN_PROGRESS, JobState.FAILED)
    assert await ended_by(world, job) == ("max_errors", "max_errors_exceeded")
    assert (stopped.answered_count, stopped.failed_count) == (3, 3)
    assert await offered(world) == []
    assert await world.store.due_work() == WaitingWork({}, True), "a worker is wanted to end it, and no replica"
    # Results of calls that were out are kept until it closes.
    await flush(world, job, (6,), ())
    assert (await world.judge(job)).answered_count == 4
    assert await world.store.close_job(job.id, 0)


async def test_a_share_of_errors_counts_once_enough_are_done(world: StoreWorld) -> None:
    job = await leased(world, 10, max_errors=MaxErrors(share_ppm=500_000, after=4))
    await flush(world, job, (), (0, 1))
    assert await ended_by(world, job) == (None, None)
    await flush(world, job, (2, 3), ())
    assert await ended_by(world, job) == (None, None), "half of them is not more than half"
    await flush(world, job, (), (4,))
    assert await ended_by(world, job) == ("max_errors", "max_errors_exceeded")


async def test_a_job_is_stopped_when_all_that_was_sent_failed_and_bad_lines_do_not_count(world: StoreWorld) -> None:
    job = await leased(world, 20, max_errors=MaxErrors(share_ppm=EVERYTHING, after=3))
    await flush(world, job, (), tuple(range(10)), model="")
    await flush(world, job, (), (10, 11), model="m")
    assert await ended_by(world, job) == (None, None)
    await flush(world, job, (), (12,), model="m")
    assert await ended_by(world, job) == ("max_errors", "max_errors_exceeded")
    assert "The first 3 requests failed" in (await world.judge(job)).errors[0].message


async def test_one_answer_keeps_a_job_going_whatever_else_fails(world: StoreWorld) -> None:
    job = await leased(world, 20, max_errors=MaxErrors(share_ppm=EVERYTHING, after=3))
    await flush(world, job, (0,), tuple(range(1, 20)))
    assert (await world.judge(job)).closing is JobState.COMPLETED


async def test_a_job_that_is_done_with_too_many_errors_failed_too(world: StoreWorld) -> None:
    """How its lines were cut into flushes must not decide how a job ends."""
    job = await leased(world, 3, max_errors=MaxErrors(share_ppm=0, after=100))
    await flush(world, job, (0, 1), (2,))
    ended = await world.judge(job)
    assert (ended.state, ended.closing, ended.stopped_by) == (JobState.FINALIZING, JobState.FAILED, "max_errors")


async def test_more_cost_than_allowed_stops_a_job(world: StoreWorld) -> None:
    job = await leased(world, 10, max_cost_nano=100)
    await flush(world, job, (0, 1), (), nano=50)
    assert await ended_by(world, job) == (None, None)
    await flush(world, job, (2,), (), nano=1)
    assert await ended_by(world, job) == ("max_cost", "max_cost_exceeded")
    assert "more than its max_cost" in (await world.look(job)).errors[0].message


async def test_a_threshold_below_what_is_spent_stops_a_job_at_once(world: StoreWorld) -> None:
    job = await leased(world, 10)
    await flush(world, job, (0,), (1,), nano=50)
    for change in (
        {"max_errors": MaxErrors(count=1)},
        {"max_errors": MaxErrors(share_ppm=500_000, after=2)},
        {"max_cost_nano": 50},
    ):
        await world.store.change_job(job.tenant_id, job.id, JobChange(change))
        assert await ended_by(world, job) == (None, None), "what is reached is not passed"
    await world.store.change_job(job.tenant_id, job.id, JobChange({"max_cost_nano": 49}))
    assert await ended_by(world, job) == ("max_cost", "max_cost_exceeded")
    assert await offered(world) == []
    assert await world.store.due_work() == WaitingWork({}, True)


async def test_a_job_that_closes_keeps_its_reason(world: StoreWorld) -> None:
    job = await leased(world, 10, max_errors=MaxErrors(count=0))
    await world.store.cancel_job(job.tenant_id, job.id)
    await world.record(world.errors(await world.log("errors"), job, 0, token=job.id))
    assert await ended_by(world, job) == (None, None)
    assert (await world.look(job)).closing is JobState.CANCELLED
