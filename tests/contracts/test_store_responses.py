"""What every store does with background responses: accepted and started at once, hidden when they are deleted, forgotten at their end."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from msgspec.structs import replace

from tests.contracts.store_world import DAY_MS, MODEL, StoreWorld, plan_of, refused
from tidegate.core.errors import StoreUnavailable
from tidegate.core.job_lists import JobFilter
from tidegate.core.nouns import (
    Caller,
    Idempotency,
    Job,
    JobEnd,
    JobRequest,
    JobStart,
    Quotas,
    ResponseInput,
    ResponseTerms,
)
from tidegate.core.operations import OperationScope
from tidegate.core.states import JobKind, JobState
from tidegate.core.webhooks import BATCH_EVENT_TYPES, RESPONSE_EVENT_TYPES, EndpointShape

pytestmark = pytest.mark.anyio

ENDPOINT = "/v1/responses"


class Ask:
    """One background response, ready to be accepted as often as a test likes."""

    def __init__(self, world: StoreWorld, key: str | None = None, **quotas: Any) -> None:
        plan, self.file_id = plan_of(1), world.id("file")
        self.start = JobStart(
            world.id("batch"), world.token(), plan, world.id("blob"), world.id("file"), world.id("file")
        )
        self.request = JobRequest(ENDPOINT, self.file_id, DAY_MS, "24h", kind=JobKind.RESPONSE)
        self.input = ResponseInput(self.file_id, "a" * 64, Idempotency(key, "hash") if key else None)
        self.terms = ResponseTerms(ENDPOINT, DAY_MS, "tenant:x", Quotas(**quotas))

    async def accept(self, world: StoreWorld, caller: Caller, worker_id: str) -> Job:
        await world.store.begin_blob(self.start.work_blob_id, "work", worker_id)
        return await world.store.create_response(caller, self.request, self.start, self.input, self.terms, worker_id)


async def test_a_response_is_accepted_and_started_at_once(world: StoreWorld) -> None:
    caller, worker_id, ask = await world.caller(), await world.worker(), Ask(world)
    job = await ask.accept(world, caller, worker_id)
    assert (job.kind, job.state, job.item_count, job.begun_at) == (JobKind.RESPONSE, JobState.IN_PROGRESS, 1, None)
    assert await ask.accept(world, caller, worker_id) == job
    file = await world.store.get_file(caller.tenant_id, ask.file_id)
    assert file is not None
    assert (file.purpose, file.size_bytes) == ("response", ask.start.plan.work_bytes)
    # No list has it.
    assert await world.store.list_jobs(caller.tenant_id, count_max=10) == []
    assert await world.store.list_files(caller.tenant_id, after=None, count_max=10) == []
    # It is leased, recorded and judged like any other job.
    assert await world.lease(worker_id, job)
    assert (await world.answer(await world.log(worker_id=worker_id), job, 0)).complete
    assert (await world.look(job)).begun_at is not None


async def test_so_many_responses_may_wait_and_no_batch_counts(world: StoreWorld) -> None:
    caller, worker_id = await world.caller(), await world.worker()
    await world.running(caller, 3)
    await Ask(world).accept(world, await world.caller("other"), worker_id)
    first = await Ask(world, pending_responses_max=1).accept(world, caller, worker_id)
    assert (
        await refused(Ask(world, pending_responses_max=1).accept(world, caller, worker_id))
    ).code == "quota_exceeded"
    assert (
        await refused(Ask(world, stored_bytes_max=1).accept(world, caller, worker_id))
    ).code == "storage_quota_exceeded"
    await world.job(caller, await world.file(caller), quotas=Quotas(pending_jobs_max=2))
    await world.store.delete_response(caller.tenant_id, first.id)
    await Ask(world, pending_responses_max=1).accept(world, caller, worker_id)


async def test_a_key_stands_for_one_response(world: StoreWorld) -> None:
    caller, worker_id = await world.caller(), await world.worker()
    first = await Ask(world, "key").accept(world, caller, worker_id)
    assert (await Ask(world, "key").accept(world, caller, worker_id)).id == first.id
    await world.store.delete_response(caller.tenant_id, first.id)
    assert (await refused(Ask(world, "key").accept(world, caller, worker_id))).code == "idempotency_result_deleted"


async def test_a_key_stands_for_one_response_and_a_limit_holds_also_when_several_come_at_once(
    world: StoreWorld,
) -> None:
    caller, worker_id = await world.caller(), await world.worker()
    made = await asyncio.gather(*(Ask(world, "key").accept(world, caller, worker_id) for _ in range(4)))
    assert len({job.id for job in made}) == 1
    asks = [Ask(world, pending_responses_max=2) for _ in range(4)]
    found = await asyncio.gather(*(ask.accept(world, caller, worker_id) for ask in asks), return_exceptions=True)
    assert sum(isinstance(one, Job) for one in found) == 1, "of two that may wait one waits already"


async def test_a_process_that_is_gone_accepts_none(world: StoreWorld) -> None:
    caller, worker_id, ask = await world.caller(), await world.worker(), Ask(world)
    await world.store.declare_gone(worker_id, leaving=True)
    with pytest.raises(StoreUnavailable):
        await ask.accept(world, caller, worker_id)
    assert await world.store.any_job(ask.start.job_id) is None


async def test_an_overview_of_batches_shows_no_response_neither_open_nor_late_nor_ended(world: StoreWorld) -> None:
    worker_id = await world.worker()
    job = await Ask(world).accept(world, await world.caller(), worker_id)
    await world.clock.advance(DAY_MS - 1)
    seen = await world.store.overview()
    assert (seen.jobs, seen.stuck) == ([], [])
    assert await world.store.search_jobs(job.tenant_id, JobFilter(from_ms=1), count_max=10) == []
    assert (await world.answer(await world.log(), job, 0)).complete
    token = world.token()
    assert await world.store.take_step(job.id, JobState.FINALIZING, await world.worker(), token)
    await world.store.publish_job(await world.look(job), token, end=JobEnd(None))
    assert (await world.look(job)).state is JobState.COMPLETED
    assert (await world.store.overview()).ended == []
    for order in ("asc", "desc"):
        assert await world.store.list_files(job.tenant_id, after=None, count_max=10, order=order) == []


async def test_an_operation_on_all_jobs_matches_no_response_neither_open_nor_failed(world: StoreWorld) -> None:
    worker_id, token = await world.worker(), world.token()
    job = await Ask(world).accept(world, await world.caller(), worker_id)

    async def matched(action: str) -> tuple[int, list[Job]]:
        scope = OperationScope(action)
        made = await world.store.put_operation(world.id("op"), "operator", scope)
        return (await world.store.impact_of(scope)).jobs, await world.store.operation_jobs(made, 9)

    assert await matched("cancel") == (0, [])
    (leased,) = await world.lease(worker_id, job)
    assert (await world.record(world.errors(await world.log("errors"), job, 0, token=leased.token))).complete
    assert await world.store.take_step(job.id, JobState.FINALIZING, worker_id, token)
    await world.store.publish_job(await world.look(job), token, end=JobEnd(None))
    assert (await world.look(job)).failed_count == 1
    assert await matched("retry") == (0, [])


async def test_a_deleted_response_is_hidden_and_forgotten_at_its_end(world: StoreWorld) -> None:
    caller, worker_id, ask = await world.caller(), await world.worker(), Ask(world)
    job = await ask.accept(world, caller, worker_id)
    other = await world.caller("other")
    assert not await world.store.delete_response(other.tenant_id, job.id)
    assert await world.store.delete_response(caller.tenant_id, job.id)
    assert not await world.store.delete_response(caller.tenant_id, job.id)
    assert await world.store.get_job(caller.tenant_id, job.id) is None
    left = await world.look(job)
    assert (left.kind, left.state) == (JobKind.DELETED, JobState.CANCELLING)
    await world.store.forget_job(job.id)
    assert await world.store.deleted_responses(10) == []
    await world.store.close_job(job.id, 0)
    token = world.token()
    await world.store.take_step(job.id, JobState.FINALIZING, worker_id, token)
    await world.store.publish_job(await world.look(job), token, end=JobEnd(None))
    assert await world.store.deleted_responses(10) == [job.id]
    await world.store.forget_job(job.id)
    assert await world.store.any_job(job.id) is None
    assert await world.store.get_file(caller.tenant_id, ask.file_id) is None
    assert await world.extents(ask.file_id) == []
    await world.clock.advance(1)
    assert await world.store.condemn_unused_blobs(0, 0, 10) == 1, "the file and the work were the same bytes"


async def test_a_response_that_has_waited_long_enough_is_listed_until_it_is_leased(world: StoreWorld) -> None:
    caller, worker_id = await world.caller(), await world.worker()
    plain, soon, later = Ask(world), Ask(world), Ask(world)
    soon.terms = replace(soon.terms, interactive_after_ms=0)
    later.terms = replace(later.terms, interactive_after_ms=DAY_MS // 2)
    await plain.accept(world, caller, worker_id)
    job, waiting = await soon.accept(world, caller, worker_id), await later.accept(world, caller, worker_id)
    assert await world.store.long_waiting_responses(10) == [(job.id, MODEL)]
    assert await world.store.long_waiting_responses(0) == []
    (leased,) = await world.lease(worker_id, job)
    assert leased.interactive_in_ms is not None
    assert leased.interactive_in_ms <= 0
    assert await world.store.long_waiting_responses(10) == []
    (held,) = await world.lease(worker_id, waiting)
    assert held.interactive_in_ms is not None
    assert 0 < held.interactive_in_ms <= DAY_MS // 2
    # The loss of its worker changes nothing about its moment.
    await world.store.release_slice(job.id, leased.first, leased.token, 5_000)
    assert await world.store.long_waiting_responses(10) == [], "what rests is not leased before its time"
    await world.clock.advance(5_000)
    assert await world.store.long_waiting_responses(10) == [(job.id, MODEL)]
    await world.store.pause_job(caller.tenant_id, job.id)
    assert await world.store.long_waiting_responses(10) == []
    await world.store.resume_job(caller.tenant_id, job.id)
    assert await world.store.long_waiting_responses(10) == [(job.id, MODEL)]
    await world.store.cancel_job(caller.tenant_id, job.id)
    assert await world.store.long_waiting_responses(10) == []


async def test_the_response_that_has_waited_longest_is_first(world: StoreWorld) -> None:
    caller, worker_id, found = await world.caller(), await world.worker(), list[tuple[str, str]]()
    for after_ms in (3_000, 1_000, 2_000, 5_000, 4_000):
        ask = Ask(world)
        ask.terms = replace(ask.terms, interactive_after_ms=after_ms)
        found.append(((await ask.accept(world, caller, worker_id)).id, MODEL))
    await world.clock.advance(5_000)
    assert await world.store.long_waiting_responses(10) == [found[number] for number in (1, 2, 0, 4, 3)]
    assert await world.store.long_waiting_responses(2) == [found[1], found[2]]


@pytest.mark.parametrize("status", ["completed", "incomplete", "failed"])
async def test_the_event_of_a_response_names_how_its_answer_ended(world: StoreWorld, status: str) -> None:
    caller, worker_id, ask = await world.caller(), await world.worker(), Ask(world)
    other_caller = await world.caller("another")
    for tenant_id, wanted in ((caller.tenant_id, RESPONSE_EVENT_TYPES), (other_caller.tenant_id, BATCH_EVENT_TYPES)):
        shape = EndpointShape("one", "https://hooks.example.com/a", wanted)
        await world.store.create_webhook_endpoint(tenant_id, world.id("whk"), shape, b"s" * 32)
    assert await world.store.wants_response_events(caller.tenant_id)
    assert not await world.store.wants_response_events(other_caller.tenant_id)
    job = await ask.accept(world, caller, worker_id)
    assert await world.lease(worker_id, job)
    assert (await world.answer(await world.log(worker_id=worker_id), job, 0)).complete
    token = world.token()
    assert await world.store.take_step(job.id, JobState.FINALIZING, worker_id, token)
    await world.store.publish_job(await world.look(job), token, end=JobEnd(None, status))
    deliveries = await world.store.list_webhook_deliveries(caller.tenant_id, None, None, 10)
    assert [one.event_type for one in deliveries or []] == [f"response.{status}"]


async def test_deleted_responses_that_ended_are_listed_a_few_at_a_time_by_id(world: StoreWorld) -> None:
    caller, worker_id, ended = await world.caller(), await world.worker(), list[str]()
    for _ in range(3):
        job = await Ask(world).accept(world, caller, worker_id)
        assert await world.store.delete_response(caller.tenant_id, job.id)
        await world.store.close_job(job.id, 0)
        token = world.token()
        await world.store.take_step(job.id, JobState.FINALIZING, worker_id, token)
        await world.store.publish_job(await world.look(job), token, end=JobEnd(None))
        ended.append(job.id)
    assert await world.store.deleted_responses(10) == sorted(ended)
    assert await world.store.deleted_responses(2) == sorted(ended)[:2]


async def test_deleting_one_response_leaves_the_others_of_its_caller(world: StoreWorld) -> None:
    caller, worker_id = await world.caller(), await world.worker()
    gone, kept = [await Ask(world).accept(world, caller, worker_id) for _ in range(2)]
    assert await world.store.delete_response(caller.tenant_id, gone.id)
    assert [(await world.look(job)).kind for job in (gone, kept)] == [JobKind.DELETED, JobKind.RESPONSE]
