"""What every store does with jobs, from their creation to the door of their end."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from msgspec.structs import replace

from tests.contracts.store_world import DAY_MS, LEASE_MS, START_MS, StoreWorld, plan_of, refused
from tests.support.store_verbs import any_file, slice_counts, start_job
from tidegate.core.errors import ApiProblem, LostRace
from tidegate.core.ids import job_part
from tidegate.core.job_lists import JobFilter
from tidegate.core.job_shape import JobShape
from tidegate.core.nouns import Idempotency, IngestPlan, Job, JobRequest, JobStart, LineError, PublishTurns, Quotas
from tidegate.core.schedule.snapshot import ModelRoom
from tidegate.core.states import FileState, JobState

pytestmark = pytest.mark.anyio

HOUR_MS = 3_600_000


async def test_a_job_is_accepted_as_it_was_asked_for(world: StoreWorld) -> None:
    caller = await world.caller(user="ann")
    file = await world.file(caller)
    job = await world.job(
        caller, file, metadata={"a": "é\u0000"}, ordered=True, prefix_order=False, output_expires_after_s=7_200,
        invalid_lines="error_file",
    )  # fmt: skip
    assert (job.state, job.closing, job.created_at, job.expires_at) == (
        JobState.VALIDATING, None, START_MS, START_MS + DAY_MS,
    )  # fmt: skip
    assert (job.metadata, job.ordered, job.prefix_order) == ({"a": "é\u0000"}, True, False)
    assert (job.output_expires_after_s, job.invalid_lines, job.window_text) == (7_200, "error_file", "24h")
    assert job.done_count == 0
    assert await world.store.get_job(caller.tenant_id, job.id) == job
    assert await world.store.jobs_waiting_ingest(10) == [job.id]
    assert await world.store.state_counts() == {"validating": 1}


async def test_creating_a_job_may_be_replayed(world: StoreWorld) -> None:
    caller = await world.caller()
    file, job_id = await world.file(caller), world.id("batch")
    first = await world.job(caller, file, job_id=job_id)
    assert await world.job(caller, file, job_id=job_id, quotas=Quotas(pending_jobs_max=1)) == first
    assert await world.store.list_jobs(caller.tenant_id, after=None, count_max=10) == [first]


async def test_a_job_is_tried_without_being_created(world: StoreWorld) -> None:
    caller, other_caller = await world.caller(), await world.caller("another")
    file, output = await world.file(caller), await world.file(caller, purpose="batch_output")
    both = await world.file(caller)
    several = JobRequest("/v1/chat/completions", file.id, DAY_MS, "24h", shape=JobShape(more_inputs=(both.id,)))
    found = await world.store.batch_inputs(caller.tenant_id, several)
    assert [one.id for one in found] == [file.id, both.id]
    for tenant_id, wrong, status in ((caller.tenant_id, output, 400), (other_caller.tenant_id, file, 404)):
        with pytest.raises(ApiProblem) as problem:
            await world.store.batch_inputs(tenant_id, replace(several, input_file_id=wrong.id))
        assert problem.value.status == status
    request = JobRequest("/v1/chat/completions", file.id, DAY_MS, "24h")
    full = Quotas(pending_jobs_max=1)
    assert await world.store.creation_problem(caller, request, full, "tenant") is None
    await world.job(caller, file, share_owner="tenant")
    problem_now = await world.store.creation_problem(caller, request, full, "tenant")
    assert problem_now is not None
    assert problem_now.status == 429
    assert await world.store.state_counts() == {"validating": 1}


async def test_only_a_batch_input_can_be_a_jobs_input(world: StoreWorld) -> None:
    caller = await world.caller()
    with pytest.raises(ApiProblem) as problem:
        await world.job(caller, await world.file(caller, purpose="batch_output"))
    assert (problem.value.status, problem.value.code) == (400, "invalid_file_purpose")
    deleted = await world.file(caller)
    await world.store.delete_file(caller.tenant_id, deleted.id)
    with pytest.raises(ApiProblem) as problem:
        await world.job(caller, deleted)
    assert problem.value.status == 404
    assert await world.store.state_counts() == {}


async def test_a_quota_of_queued_work_counts_what_is_not_done(world: StoreWorld) -> None:
    caller, quotas = await world.caller(), Quotas(queued_units_max=200)
    await world.running(await world.caller("other"), 4)
    job = await world.running(caller, 4)
    assert (await refused(world.job(caller, quotas=quotas))).code == "quota_exceeded"
    await world.answer(await world.log(), job, 0)
    await world.job(caller, quotas=quotas)
    await world.running(caller, 1)
    assert (await refused(world.job(caller, quotas=quotas))).code == "quota_exceeded"
    await world.store.pause_job(caller.tenant_id, job.id)
    assert (await refused(world.job(caller, quotas=quotas))).code == "quota_exceeded", "paused work is still queued"
    await world.store.cancel_job(caller.tenant_id, job.id)
    await world.job(caller, quotas=quotas)


async def test_another_tenants_job_is_like_an_absent_one(world: StoreWorld) -> None:
    ours, theirs = await world.caller("ours"), await world.caller("theirs")
    job = await world.running(theirs)
    for job_id in (job.id, world.id("batch")):
        assert await world.store.get_job(ours.tenant_id, job_id) is None
        assert await world.store.cancel_job(ours.tenant_id, job_id) is None
        assert await world.store.list_jobs(ours.tenant_id, after=job_id, count_max=10) is None
    assert await world.store.list_jobs(ours.tenant_id, after=None, count_max=10) == []
    assert await world.look(job) == job


async def test_pages_meet_jobs_of_the_same_moment_once_each(world: StoreWorld) -> None:
    caller, other_caller = await world.caller(), await world.caller("another")
    made: list[Job] = []
    for _ in range(2):
        made += [await world.job(caller) for _ in range(3)]
        await world.job(other_caller)
        await world.clock.advance(1)
    seen: list[Job] = []
    while page := await world.store.list_jobs(caller.tenant_id, after=seen[-1].id if seen else None, count_max=2):
        seen += page
    assert seen == sorted(made, key=lambda job: (job.created_at, job.id), reverse=True)


async def test_a_deleted_job_still_marks_a_place_in_a_list(world: StoreWorld) -> None:
    caller, other_caller = await world.caller(), await world.caller("another")
    for _ in range(3):
        await world.job(caller)
    page = await world.store.list_jobs(caller.tenant_id, count_max=10)
    assert page is not None
    gone = page[1]
    await world.store.cancel_job(caller.tenant_id, gone.id)
    await world.store.end_unstarted(gone.id)
    await world.store.forget_job(gone.id)
    ours, waiting = caller.tenant_id, JobFilter(status="validating")
    assert await world.store.list_jobs(ours, after=gone.id, count_max=10) == page[2:]
    assert await world.store.list_jobs(ours, before=gone.id, count_max=10) == page[:1]
    assert await world.store.search_jobs(ours, waiting, after=gone.id, count_max=10) == page[2:]
    every = await world.store.search_every_job(None, waiting, after=gone.id, count_max=10)
    assert every is not None
    assert [job for job, _ in every] == page[2:]
    assert await world.store.list_jobs(other_caller.tenant_id, after=gone.id, count_max=10) is None
    await world.clock.advance(3 * DAY_MS)
    await world.store.prune_files(DAY_MS, 10)
    assert await world.store.list_jobs(caller.tenant_id, after=gone.id, count_max=10) is None


async def test_pages_go_back_and_show_one_endpoint(world: StoreWorld) -> None:
    caller = await world.caller()
    made = list[Job]()
    for number in range(5):
        await world.clock.advance(number % 2)
        made.append(await world.job(caller))
    newest_first = sorted(made, key=lambda job: (job.created_at, job.id), reverse=True)
    endpoint = made[0].endpoint

    async def page(before: Job | None = None, **more: Any) -> list[Job] | None:
        return await world.store.list_jobs(caller.tenant_id, before=before.id if before else None, count_max=2, **more)

    assert await page(newest_first[4]) == newest_first[2:4]
    assert await page(newest_first[1], endpoint=endpoint) == newest_first[:1]
    assert await page(newest_first[0]) == []
    assert await page(endpoint=endpoint) == newest_first[:2]
    assert await page(endpoint="/v1/other") == await page(newest_first[4], endpoint="/v1/other") == []
    other_caller = await world.caller("another")
    assert await world.store.list_jobs(other_caller.tenant_id, before=made[0].id, count_max=2) is None


async def test_the_marks_of_jobs_change_with_them(world: StoreWorld) -> None:
    caller = await world.caller()
    jobs = [await world.job(caller) for _ in range(3)]
    ids = [job.id for job in jobs]
    marks = await world.store.job_marks([*ids, world.id("batch")])
    assert marks.keys() == set(ids)
    assert await world.store.job_marks(ids) == marks
    await world.store.cancel_job(caller.tenant_id, ids[1])
    changed = await world.store.job_marks(ids)
    assert [changed[one] == marks[one] for one in ids] == [True, False, True]
    running = await world.running(caller, 2)
    [held], [begun] = (
        await world.lease(await world.worker(), running),
        (await world.store.job_marks([running.id])).values(),
    )
    await world.record(world.errors(await world.log("errors"), running, 0, token=held.token))
    assert (await world.store.job_marks([running.id]))[running.id] != begun, "a failed item shows too"
    assert await world.store.job_marks([]) == {}
    with pytest.raises(ValueError, match="fixed length"):
        await world.store.job_marks(["batch_1"])


async def test_the_same_key_and_body_make_one_job_for_a_day(world: StoreWorld) -> None:
    caller, key = await world.caller(), Idempotency("k", "body")
    file = await world.file(caller)
    first = await world.job(caller, file, idempotency=key)
    assert await world.job(caller, file, idempotency=key, quotas=Quotas(pending_jobs_max=1)) == first
    with pytest.raises(ApiProblem) as problem:
        await world.job(caller, file, idempotency=Idempotency("k", "other"))
    assert problem.value.status == 422
    await world.clock.advance(DAY_MS)
    assert (await world.job(caller, file, idempotency=key)).id != first.id


async def test_two_creations_with_one_key_at_once_make_one_job(world: StoreWorld) -> None:
    caller, key = await world.caller(), Idempotency("k", "body")
    file = await world.file(caller)
    made = await asyncio.gather(*(world.job(caller, file, idempotency=key) for _ in range(6)))
    assert len({job.id for job in made}) == 1
    assert await world.store.state_counts() == {"validating": 1}


async def test_a_refused_creation_does_not_use_up_its_key(world: StoreWorld) -> None:
    caller, key = await world.caller(), Idempotency("k", "body")
    file = await world.file(caller, line_count=2)
    with pytest.raises(ApiProblem):
        await world.job(caller, file, idempotency=key, quotas=Quotas(queued_items_max=1))
    assert (await world.job(caller, file, idempotency=key)).state is JobState.VALIDATING


async def test_quotas_stop_at_their_limits(world: StoreWorld) -> None:
    caller, other_caller = await world.caller(user="ann"), await world.caller("another")

    async def refused(caller_: object = None, **limits: Any) -> None:
        with pytest.raises(ApiProblem) as problem:
            await world.job(caller, await world.file(caller, line_count=5, size_bytes=50), quotas=Quotas(**limits))
        assert (problem.value.status, problem.value.code) == (429, "quota_exceeded")
        assert problem.value.retry_after_s

    async def allowed(**limits: Any) -> Job:
        return await world.job(caller, await world.file(caller, line_count=5, size_bytes=50), quotas=Quotas(**limits))

    job = await allowed(pending_jobs_max=1, queued_items_max=5, jobs_per_hour_max=1, bytes_per_day_max=50)
    await refused(pending_jobs_max=1)
    await refused(queued_items_max=9)
    await refused(jobs_per_hour_max=1)
    await refused(bytes_per_day_max=99)
    await world.job(other_caller, await world.file(other_caller), quotas=Quotas(1, 5, 0, 1, 500))
    await allowed(pending_jobs_max=2, queued_items_max=10, jobs_per_hour_max=2, bytes_per_day_max=100)
    started = await world.ingested(job, plan_of(5))
    await world.answer(await world.log(), started, 0, 1)
    await refused(queued_items_max=12)
    await allowed(queued_items_max=13)
    await world.clock.advance(HOUR_MS)
    await allowed(jobs_per_hour_max=1)
    await refused(bytes_per_day_max=249)
    await world.clock.advance(DAY_MS)
    await allowed(bytes_per_day_max=50)


async def test_a_job_of_several_files_counts_with_all_of_them(world: StoreWorld) -> None:
    caller = await world.caller()
    first, *more = [await world.file(caller, line_count=count, size_bytes=100 * count) for count in (1, 2, 4)]
    await world.job(caller, first, shape=JobShape(more_inputs=tuple(file.id for file in more)))
    own = await world.file(caller, line_count=3, size_bytes=300)
    request = JobRequest("/v1/chat/completions", own.id, DAY_MS, "24h")
    for enough in (Quotas(queued_items_max=10), Quotas(bytes_per_day_max=1_000)):
        assert await world.store.creation_problem(caller, request, enough, "tenant") is None
    for little in (Quotas(queued_items_max=9), Quotas(bytes_per_day_max=999)):
        assert await world.store.creation_problem(caller, request, little, "tenant") is not None


async def test_periods_count_per_user_where_there_is_one(world: StoreWorld) -> None:
    ann, bob = await world.caller(user="ann"), await world.caller(user="bob")
    limit = Quotas(jobs_per_hour_max=1)
    await world.job(ann, quotas=limit)
    await world.job(bob, quotas=limit)
    for caller in (ann, bob, await world.caller()):
        with pytest.raises(ApiProblem):
            await world.job(caller, quotas=limit)


async def test_pending_jobs_count_for_whose_share_they_are(world: StoreWorld) -> None:
    caller = await world.caller()
    limit = Quotas(pending_jobs_max=1)
    file = await world.file(caller)
    for share_owner in ("user:ann", "user:bob"):
        await world.job(caller, file, quotas=limit, share_owner=share_owner)
    for share_owner in ("user:ann", "user:bob"):
        with pytest.raises(ApiProblem, match="You have 1 batch waiting"):
            await world.job(caller, file, quotas=limit, share_owner=share_owner)
    await world.job(caller, file, quotas=limit)


async def test_pending_jobs_count_for_a_key_where_that_is_set(world: StoreWorld) -> None:
    ours = await world.caller()
    first, second = replace(ours, key_id="k1"), replace(ours, key_id="k2")
    limit = Quotas(pending_jobs_per_key_max=1)
    file = await world.file(ours)
    for caller in (first, second, ours, ours):
        await world.job(caller, file, quotas=limit)
    for caller in (first, second):
        with pytest.raises(ApiProblem, match="Your key has 1 batch waiting"):
            await world.job(caller, file, quotas=limit)


async def test_a_forgotten_input_does_not_hide_a_running_job_from_the_quota(world: StoreWorld) -> None:
    caller = await world.caller()
    file = await world.file(caller)
    await world.ingested(await world.job(caller, file), plan_of(3))
    await world.store.delete_file(caller.tenant_id, file.id)
    await world.clock.advance(2)
    await world.store.prune_files(1, 100)
    with pytest.raises(ApiProblem):
        await world.job(caller, quotas=Quotas(pending_jobs_max=1))
    with pytest.raises(ApiProblem):
        await world.job(caller, quotas=Quotas(queued_items_max=5))


async def test_racing_creations_cannot_pass_the_quota_together(world: StoreWorld) -> None:
    caller = await world.caller()
    file = await world.file(caller)
    tries = [world.job(caller, file, quotas=Quotas(pending_jobs_max=3)) for _ in range(8)]
    done = await asyncio.gather(*tries, return_exceptions=True)
    assert sum(isinstance(one, Job) for one in done) == 3
    assert all(isinstance(one, Job | ApiProblem) for one in done)


async def test_one_process_at_a_time_has_the_step(world: StoreWorld) -> None:
    job = await world.job(await world.caller())
    first, second = await world.worker(1_000), await world.worker(60_000)
    take = world.store.take_step
    assert await take(job.id, JobState.VALIDATING, first, "t1")
    assert await take(job.id, JobState.VALIDATING, first, "t1"), "a replay"
    assert not await take(job.id, JobState.VALIDATING, second, "t2")
    assert not await take(job.id, JobState.FINALIZING, first, "t1")
    assert not await take(job.id, JobState.VALIDATING, world.id("worker"), "t3"), "this worker is unknown"
    assert await world.store.jobs_waiting_ingest(10) == []
    await world.clock.advance(1_001)
    assert await world.store.declare_gone(first)
    assert await world.store.jobs_waiting_ingest(10) == [job.id]
    assert await take(job.id, JobState.VALIDATING, second, "t2")
    with pytest.raises(LostRace):
        await start_job(
            world.store,
            JobStart(job.id, "t1", plan_of(3), work_blob_id=world.id("blob"), output_file_id="a", error_file_id="b"),
        )
    assert not await world.store.refuse_job(job.id, "t1", [])
    assert await world.store.drop_step(job.id, "t1", 0) == 0
    assert (await world.look(job)).state is JobState.VALIDATING


async def test_a_dropped_step_rests_before_it_is_tried_again(world: StoreWorld) -> None:
    job, worker = await world.job(await world.caller()), await world.worker()
    for failures, rest_ms in ((1, 500), (2, 1_000), (3, 2_000), (4, 4_000), (5, 8_000), (6, 16_000), (7, 16_000)):
        assert await world.store.take_step(job.id, JobState.VALIDATING, worker, "t")
        assert await world.store.drop_step(job.id, "t", 500) == failures
        assert await world.store.drop_step(job.id, "t", 500) == 0
        assert await world.store.jobs_waiting_ingest(10) == []
        await world.clock.advance(rest_ms - 1)
        assert not await world.store.take_step(job.id, JobState.VALIDATING, worker, "u")
        await world.clock.advance(1)
        assert await world.store.jobs_waiting_ingest(10) == [job.id]


async def test_failures_of_ingest_are_over_when_the_job_has_started(world: StoreWorld) -> None:
    job, worker = await world.job(await world.caller()), await world.worker()
    assert await world.store.take_step(job.id, JobState.VALIDATING, worker, "t")
    assert await world.store.drop_step(job.id, "t", 500) == 1
    await world.clock.advance(500)
    await world.ingested(job, plan_of(1), worker)
    await world.answer(await world.log(), job, 0)
    assert await world.store.take_step(job.id, JobState.FINALIZING, worker, "u")
    assert await world.store.drop_step(job.id, "u", 500) == 1, "the first failure of its publishing"


async def test_starting_a_job_adds_slices_and_hidden_files(world: StoreWorld) -> None:
    caller, worker = await world.caller(), await world.worker()
    job = await world.job(caller)
    await world.store.take_step(job.id, JobState.VALIDATING, worker, "t")
    work, output, errors = world.id("blob"), world.id("file"), world.id("file")
    await world.store.begin_blob(work, "work", worker)
    plan = IngestPlan(5, None, [*plan_of(2, 2).slices, *plan_of(1, model="other").slices], 500, 400, 100)
    plan.slices[2] = plan_of(4, 1, model="other").slices[1]
    for _ in range(2):
        await start_job(
            world.store, JobStart(job.id, "t", plan, work_blob_id=work, output_file_id=output, error_file_id=errors)
        )
    job = await world.look(job)
    assert (job.state, job.item_count, job.in_progress_at) == (JobState.IN_PROGRESS, 5, START_MS)
    assert (job.work_bytes, job.prompt_bytes, job.shared_prefix_bytes) == (500, 400, 100)
    [kept] = [blob for blob in await world.store.list_blobs("", 10) if blob.id == work]
    assert kept.size_bytes == 500 + 4 * 5, "behind its lines are the places of their items in the input"
    assert await slice_counts(world.store, job.id) == {"ready": 3}
    seen = await world.store.snapshot("", {"llama": ModelRoom(9), "other": ModelRoom(9)}, slice_items=2, slices_max=9)
    assert [(view.job_id, view.model) for view in seen.jobs] == [(job.id, "llama"), (job.id, "other")]
    assert await world.store.get_file(caller.tenant_id, output) is None, "a growing file is not seen"
    assert await world.store.delete_file(caller.tenant_id, output) is False
    hidden = await any_file(world.store, errors)
    assert hidden is not None
    assert (hidden.state, hidden.job_id) == (FileState.GROWING, job.id)
    listed = await world.store.list_files(caller.tenant_id, after=None, count_max=10)
    assert listed is not None
    assert [file.id for file in listed] == [job.input_file_id]
    assert await world.store.list_files(caller.tenant_id, after=output, count_max=10) is None
    assert await world.store.delete_file(caller.tenant_id, job.input_file_id), "ingest is done with it"


async def test_a_work_file_that_was_given_up_starts_nothing(world: StoreWorld) -> None:
    job, worker, work = await world.job(await world.caller()), await world.worker(), world.id("blob")
    await world.store.take_step(job.id, JobState.VALIDATING, worker, "t")
    await world.store.begin_blob(work, "work", worker)
    await world.store.give_up_blob(work)
    with pytest.raises(LostRace):
        await start_job(
            world.store, JobStart(job.id, "t", plan_of(3), work_blob_id=work, output_file_id="a", error_file_id="b")
        )
    assert (await world.look(job)).state is JobState.VALIDATING
    assert await slice_counts(world.store, job.id) == {}
    assert await any_file(world.store, "a") is None


async def test_a_bad_input_fails_with_its_lines(world: StoreWorld) -> None:
    caller = await world.caller()
    job, worker = await world.job(caller), await world.worker()
    await world.store.take_step(job.id, JobState.VALIDATING, worker, "t")
    errors = [LineError("invalid_json", "not JSON", "body", 3), LineError("empty_file", "é \u2028 \u0000")]
    assert await world.store.refuse_job(job.id, "t", errors)
    assert not await world.store.refuse_job(job.id, "t", [])
    job = await world.look(job)
    assert (job.state, job.failed_at, job.errors) == (JobState.FAILED, START_MS, tuple(errors))
    assert (job.output_file_id, job.error_file_id) == (None, None)
    with pytest.raises(ApiProblem, match="failed"):
        await world.store.cancel_job(caller.tenant_id, job.id)
    assert await world.store.delete_file(caller.tenant_id, job.input_file_id)


async def test_cancelling_twice_is_the_same_as_once(world: StoreWorld) -> None:
    caller = await world.caller()
    job = await world.running(caller)
    first = await world.store.cancel_job(caller.tenant_id, job.id)
    assert first is not None
    assert (first.state, first.closing, first.cancelling_at) == (JobState.CANCELLING, JobState.CANCELLED, START_MS)
    await world.clock.advance(5)
    assert await world.store.cancel_job(caller.tenant_id, job.id) == first
    assert (await world.store.snapshot("", {"llama": ModelRoom(9)}, slice_items=2, slices_max=9)).jobs == []
    assert await world.lease(await world.worker(), job) == []


async def test_a_job_cancelled_before_ingest_ends_when_its_ingest_stops(world: StoreWorld) -> None:
    caller, worker = await world.caller(), await world.worker(1_000)
    job = await world.job(caller)
    assert await world.store.jobs_closing_unstarted(10) == []
    await world.store.take_step(job.id, JobState.VALIDATING, worker, "t")
    cancelled = await world.store.cancel_job(caller.tenant_id, job.id)
    assert cancelled is not None
    assert (cancelled.state, cancelled.closing) == (JobState.VALIDATING, JobState.CANCELLED)
    assert await world.store.jobs_closing_unstarted(10) == []
    assert not await world.store.end_unstarted(job.id)
    assert not await world.store.end_unstarted(job.id, "other")
    with pytest.raises(LostRace):
        await start_job(
            world.store,
            JobStart(job.id, "t", plan_of(1), work_blob_id=world.id("blob"), output_file_id="a", error_file_id="b"),
        )
    assert not await world.store.refuse_job(job.id, "t", [])
    assert await world.store.end_unstarted(job.id, "t")
    assert not await world.store.end_unstarted(job.id, "t")
    ended = await world.look(job)
    assert (ended.state, ended.cancelled_at, ended.output_file_id) == (JobState.CANCELLED, START_MS, None)
    assert await world.store.cancel_job(caller.tenant_id, job.id) == ended


async def test_a_dead_ingester_does_not_keep_a_cancelled_job_open(world: StoreWorld) -> None:
    caller, worker = await world.caller(), await world.worker(1_000)
    job = await world.job(caller)
    await world.store.take_step(job.id, JobState.VALIDATING, worker, "t")
    await world.store.cancel_job(caller.tenant_id, job.id)
    await world.clock.advance(1_001)
    await world.store.declare_gone(worker)
    assert await world.store.jobs_closing_unstarted(10) == [job.id]
    assert await world.store.end_unstarted(job.id)
    assert (await world.look(job)).state is JobState.CANCELLED


async def test_a_window_that_passed_closes_a_job(world: StoreWorld) -> None:
    caller = await world.caller()
    waiting, running = await world.job(caller, window_ms=1_000), await world.running(caller, window_ms=1_000)
    await world.clock.advance(999)
    assert await world.store.overdue_jobs(10) == []
    assert not await world.store.expire_job(running.id)
    await world.clock.advance(1)
    assert await world.lease(await world.worker(), running) == [], "no new call after its window, swept or not"
    assert (await world.store.snapshot("", {"llama": ModelRoom(9)}, slice_items=2, slices_max=9)).jobs == []
    assert sorted(await world.store.overdue_jobs(10)) == sorted([waiting.id, running.id])
    assert len(await world.store.overdue_jobs(1)) == 1
    for job in (waiting, running):
        assert await world.store.expire_job(job.id)
        assert not await world.store.expire_job(job.id)
        assert (await world.look(job)).closing is JobState.EXPIRED
    assert await world.store.overdue_jobs(10) == []
    assert await world.store.jobs_waiting_ingest(10) == []
    assert await world.store.jobs_closing_unstarted(10) == [waiting.id]
    assert await world.store.end_unstarted(waiting.id)
    ended = await world.look(waiting)
    assert (ended.state, ended.expired_at) == (JobState.EXPIRED, START_MS + 1_000)
    assert await world.store.draining_jobs(60_000, 10) == [running.id]


async def test_a_job_must_begin_in_time_only_until_it_begins(world: StoreWorld) -> None:
    caller, worker = await world.caller(), await world.worker(10 * LEASE_MS)
    late = await world.running(caller, begin_within_ms=1_000)
    begun = await world.running(caller, begin_within_ms=1_000)
    assert await world.lease(worker, begun)
    await world.clock.advance(1_000)
    assert await world.store.overdue_jobs(10) == [late.id]
    assert not await world.store.expire_job(begun.id)
    assert await world.store.expire_job(late.id)


async def test_a_running_job_can_be_stopped_as_failed_once(world: StoreWorld) -> None:
    caller = await world.caller()
    job = await world.running(caller)
    error = LineError("model_not_found", "gone")
    assert await world.store.fail_job(job.id, error)
    assert not await world.store.fail_job(job.id, error)
    job = await world.look(job)
    assert (job.state, job.closing, job.errors) == (JobState.IN_PROGRESS, JobState.FAILED, (error,))
    assert await world.lease(await world.worker(), job) == []
    assert not await world.store.fail_job((await world.job(caller)).id, error)


async def test_closing_waits_for_leases_or_for_the_grace(world: StoreWorld) -> None:
    caller, worker = await world.caller(), await world.worker()
    job = await world.running(caller, 2, 2)
    [held] = await world.lease(worker, job, 1)
    idle = await world.running(caller, 2)
    for one in (job, idle):
        assert not await world.store.close_job(one.id, 0), "nothing asked it to close"
    assert await world.store.draining_jobs(0, 10) == []
    await world.store.cancel_job(caller.tenant_id, job.id)
    assert await world.store.draining_jobs(1_000, 10) == []
    assert not await world.store.close_job(job.id, 1_000)
    await world.clock.advance(1_000)
    assert await world.store.draining_jobs(1_001, 10) == []
    assert await world.store.draining_jobs(1_000, 10) == [job.id]
    await world.store.release_slice(job.id, held.first, held.token, 0)
    assert await world.store.draining_jobs(60_000, 10) == [job.id]
    assert await world.store.close_job(job.id, 60_000)
    assert not await world.store.close_job(job.id, 60_000)
    job = await world.look(job)
    assert (job.state, job.finalizing_at) == (JobState.FINALIZING, START_MS + 1_000)
    assert await world.store.jobs_to_publish(PublishTurns()) == [job.id]
    assert await world.store.cancel_job(caller.tenant_id, job.id) == job


async def test_an_item_finds_its_open_job_by_its_letters(world: StoreWorld) -> None:
    caller = await world.caller()
    job, waiting = await world.running(caller), await world.job(caller)
    assert await world.store.job_of_item(job_part(job.id)) == job.id
    assert await world.store.job_of_item(job_part(waiting.id)) is None
    assert await world.store.job_of_item("0" * 16) is None
    twin = await world.job(caller, job_id=job.id[:-6] + "zzzzzz")
    await world.ingested(twin, plan_of(1))
    assert await world.store.job_of_item(job_part(job.id)) is None, "two have these letters: neither is sure"


async def test_a_late_cancel_leaves_an_expiring_job_expired(world: StoreWorld) -> None:
    """The deadline came first: the caller reads that it is about to expire, and that is how it ends."""
    caller = await world.caller()
    waiting, running = await world.job(caller, window_ms=1_000), await world.running(caller, window_ms=1_000)
    await world.clock.advance(1_000)
    for job in (waiting, running):
        assert await world.store.expire_job(job.id)
        before = await world.look(job)
        with pytest.raises(ApiProblem, match="about to be expired") as refused:
            await world.store.cancel_job(caller.tenant_id, job.id)
        assert refused.value.status == 409
        assert await world.look(job) == before
        assert (before.closing, before.cancelling_at) == (JobState.EXPIRED, None)


async def test_each_pair_of_metadata_must_match_to_the_letter(world: StoreWorld) -> None:
    caller, pairs = await world.caller(), {"a": "w", "b": "x", "c": "y", "d": "z"}
    job = await world.job(caller, metadata=pairs)

    async def found(wanted: dict[str, str]) -> list[str]:
        jobs = await world.store.search_jobs(caller.tenant_id, JobFilter(metadata=wanted), count_max=10)
        return [one.id for one in jobs or []]

    assert await found(pairs) == [job.id]
    for name in pairs:
        assert await found({**pairs, name: pairs[name].upper()}) == []


async def test_a_search_finds_what_matches_and_nothing_else(world: StoreWorld) -> None:
    caller, other_caller = await world.caller(), await world.caller("another")
    plain = await world.job(caller, metadata={"team": "a", "note": 'say "x"\\', "é": "Größe"})
    await world.clock.advance(2_000)
    running = await world.running(caller, 2, metadata={"team": "b", 'odd",team': "a"})
    failed = await world.running(caller, 2)
    await world.store.fail_job(failed.id, LineError("max_cost_exceeded", 'it says "code":"fake"'))
    gone = await world.job(caller)
    await world.store.cancel_job(caller.tenant_id, gone.id)
    await world.running(other_caller, 2, metadata={"team": "a"})

    async def found(**wanted: Any) -> set[str]:
        jobs = await world.store.search_jobs(caller.tenant_id, JobFilter(**wanted), count_max=10)
        assert jobs is not None
        return {job.id for job in jobs}

    assert await found() == {plain.id, running.id, failed.id, gone.id}
    assert await found(status="validating") == {plain.id}
    assert await found(status="cancelling") == {gone.id}
    assert await found(model="llama") == {running.id, failed.id}
    assert [await world.store.models_of_job(job.id) for job in (plain, running)] == [[], ["llama"]]
    assert await found(model="LLAMA") == set()
    assert await found(metadata={"team": "a"}) == {plain.id}
    assert await found(metadata={"team": "A"}) == set()
    assert await found(metadata={"note": 'say "x"\\', "é": "Größe", "team": "a"}) == {plain.id}
    assert await found(metadata={"team": "b", "note": "x"}) == set()
    assert await found(error_code="max_cost_exceeded") == {failed.id}
    assert await found(error_code="fake") == set()
    assert await found(from_ms=START_MS) == {plain.id, running.id, failed.id, gone.id}
    assert await found(from_ms=START_MS + 1) == {running.id, failed.id, gone.id}
    assert await found(to_ms=START_MS + 1) == {plain.id}
    assert await found(words="größe") == {plain.id} == await found(words='"X"')
    assert await found(words=running.id[3:12].upper()) == {running.id}
    assert await found(words="100%_") == set()
    assert await found(words="LLAM") == {running.id, failed.id}
    assert await found(words='":"') == set(), "what stands between the texts of a job is none of them"
    assert await found(status="in_progress", words="llama") == {running.id, failed.id}
    assert await found(status="in_progress", metadata={"team": "b"}) == {running.id}
    assert await found(status="completed") == set()
    assert await world.store.search_jobs(other_caller.tenant_id, JobFilter(), after=plain.id, count_max=10) is None
    older = await world.store.search_jobs(
        caller.tenant_id, JobFilter(metadata={"team": "a"}), after=gone.id, count_max=1
    )
    assert [job.id for job in older or []] == [plain.id]
