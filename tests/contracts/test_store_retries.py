"""What every store does with a retry: a new job over an ended one's items, and the file that holds the answers of both."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable
from typing import Any

import pytest
from msgspec.structs import replace

from tests.contracts.store_world import StoreWorld, plan_of, refused
from tests.contracts.test_store_publish import closed, rest_of
from tests.support.store_verbs import any_file
from tidegate.core.answer_terms import AnswerTerms
from tidegate.core.errors import ApiProblem
from tidegate.core.follow_up import FollowUp
from tidegate.core.job_controls import Canary, JobControls, MaxErrors, RetryChoice
from tidegate.core.job_shape import JobRetry, JobShape
from tidegate.core.nouns import Caller, Idempotency, Job, JobEnd, JobWebhook, LineError, Quotas
from tidegate.core.states import FileState, JobState

pytestmark = pytest.mark.anyio

CANCELLED = RetryChoice(("cancelled",))
FAILED = RetryChoice(("failed",))


def wanted(world: StoreWorld, job: Job, choice: RetryChoice = CANCELLED) -> FollowUp:
    return FollowUp(job.id, choice, world.id("batch"), world.id("file"), world.id("file"), b"s" * 32)


async def ended(world: StoreWorld, **counts: Any) -> Job:
    """A cancelled job with two answers, an error and two items that never ran."""
    job, _, token = await closed(world, **{"answered": 2, "failed": 1, "rest": 2} | counts)
    rest = await rest_of(world, job, 3, 4) if job.done_count < job.item_count else None
    await world.store.publish_job(job, token, added=(None, rest), end=JobEnd(None))
    return await world.look(job)


async def retried(world: StoreWorld, job: Job, choice: RetryChoice = CANCELLED, **more: Any) -> Job:
    made = await world.store.retry_job(Caller(job.tenant_id), wanted(world, job, choice), **more)
    assert made is not None
    return made


async def finished_retry(world: StoreWorld, job: Job, *, answered: int = 2) -> Job:
    """Run it: so many items get an answer, the others fail."""
    job, worker = await world.ingested(job, plan_of(2)), await world.worker()
    [held] = await world.lease(worker, job)
    if answered:
        await world.answer(await world.log(), job, *range(answered))
    if answered < 2:
        await world.record(world.errors(await world.log("errors"), job, *range(answered, 2), token=held.token))
    job, token = await world.look(job), world.token()
    assert await world.store.take_step(job.id, JobState.FINALIZING, worker, token)
    await world.store.publish_job(job, token, end=JobEnd(None))
    return await world.look(job)


async def conflict(call: Awaitable[Any]) -> str:
    problem = await refused(call)
    assert problem.status == 409
    return problem.code


async def test_a_retry_asks_for_what_the_first_asked_for_and_leaves_it_alone(world: StoreWorld) -> None:
    first = await ended(world, metadata={"a": "b"}, ordered=True, queue="night", begin_within_ms=60_000)
    output, errors = await world.content(first.output_file_id), await world.content(first.error_file_id)
    made = await retried(world, first)
    assert (made.state, made.retry_of, made.retry_choice) == (JobState.VALIDATING, first.id, CANCELLED)
    assert (made.input_file_id, made.metadata, made.ordered, made.queue) == (
        first.input_file_id,
        {"a": "b"},
        True,
        "night",
    )
    assert made.begin_by == made.created_at + 60_000
    assert await world.content(made.retry_file_id) == errors
    done = await finished_retry(world, made)
    assert await world.content(done.merged_file_id) == output + await world.content(done.output_file_id)
    merged = await any_file(world.store, done.merged_file_id or "")
    assert merged is not None
    assert (merged.state, merged.line_count, merged.size_bytes) == (FileState.READY, 4, len(output) + done.output_bytes)
    after = await world.judge(first)
    assert after.retried_by == (made.id,)
    assert await world.content(first.output_file_id) == output


async def test_a_retry_keeps_bounds_and_priority_and_begins_at_once(world: StoreWorld) -> None:
    asked = JobControls(priority=7, not_before=1, max_cost_nano=5_000, max_errors=MaxErrors(count=9))
    first = await ended(world, controls=asked, canary=Canary(1, 1_000_000))
    made = await retried(world, first)
    assert made.controls == replace(asked, not_before=0)
    assert (first.canary is None, made.canary) == (False, None), "what runs again needs no sample"


async def test_a_retry_takes_no_answers_of_the_job_whose_answers_the_first_took(world: StoreWorld) -> None:
    earlier = await ended(world)
    first = await ended(world, shape=JobShape(reuse_from=earlier.id))
    assert (await retried(world, first)).shape == replace(first.shape, reuse_from="")


async def test_the_items_of_a_retry_count_as_queued(world: StoreWorld) -> None:
    first = await ended(world)
    problem = await refused(retried(world, first, quotas=Quotas(queued_items_max=1)))
    assert problem.code == "quota_exceeded"
    await retried(world, first, quotas=Quotas(queued_items_max=2))


async def test_each_piece_that_a_chain_has_of_a_log_is_a_use_of_it(world: StoreWorld) -> None:
    caller, worker, log = await world.caller(), await world.worker(), await world.log()
    first, other = await world.running(caller, 3), await world.running(caller, 1)
    [held] = await world.lease(worker, first)
    for job, number in ((first, 0), (other, 0), (first, 1)):
        await world.answer(log, job, number)
    await world.record(world.errors(await world.log("errors"), first, 2, token=held.token))
    token = world.token()
    assert await world.store.take_step(first.id, JobState.FINALIZING, worker, token)
    await world.store.publish_job(await world.look(first), token, end=JobEnd(None))
    made = await retried(world, await world.look(first), FAILED)
    await world.store.forget_job(first.id)
    assert len(await world.extents(made.merged_file_id)) == 2
    [uses] = [blob.uses for blob in await world.store.list_blobs("", 100) if blob.id == log.blob_id]
    assert uses == 2 + 1, "those of the chain, and that of the other job"


async def test_a_forgotten_retry_takes_the_file_of_its_chain_along(world: StoreWorld) -> None:
    done = await finished_retry(world, await retried(world, await ended(world)))
    merged = str(done.merged_file_id)
    assert await world.store.get_file(done.tenant_id, merged) is not None
    await world.store.forget_job(done.id)
    assert await world.store.get_file(done.tenant_id, merged) is None
    assert await world.extents(merged) == []


async def test_a_chain_is_merged_and_outlives_what_it_was_made_of(world: StoreWorld) -> None:
    first = await ended(world)
    output = await world.content(first.output_file_id)
    second = await finished_retry(world, await retried(world, first), answered=1)
    output += await world.content(second.output_file_id)
    third = await retried(world, second, FAILED)
    await world.store.forget_job(first.id)
    await world.store.forget_job(second.id)
    done = await finished_retry(world, third)
    await world.store.condemn_unused_blobs(-1, -1, 1_000)
    assert await world.content(done.merged_file_id) == output + await world.content(done.output_file_id)
    for extent in await world.extents(done.merged_file_id):
        assert await world.store.knows_blob(extent.blob_id)
    assert not set(await world.store.condemned_blobs(-1, -1, 1_000)) & {
        extent.blob_id for extent in await world.extents(done.merged_file_id)
    }
    await world.store.forget_job(done.id)
    await world.store.condemn_unused_blobs(-1, -1, 1_000)
    assert (await any_file(world.store, done.retry_file_id or "")).state is FileState.DELETED  # type: ignore[union-attr]


async def test_what_a_retry_is_made_of_is_needed_once_more(world: StoreWorld) -> None:
    first = await ended(world)
    pieces = [*await world.extents(first.error_file_id), *await world.extents(first.output_file_id)]
    lent = Counter(one.blob_id for one in pieces)
    before = {one.id: one.uses for one in await world.store.list_blobs("", 100)}
    await retried(world, first)
    after = {one.id: one.uses for one in await world.store.list_blobs("", 100)}
    assert {id: after[id] - before[id] for id in before} == {id: lent[id] for id in before}


async def test_the_same_request_is_the_same_retry_and_another_is_not(world: StoreWorld) -> None:
    first = await ended(world)
    made = await retried(world, first, idempotency=Idempotency("k", "hash"))
    assert (await retried(world, first)).id == made.id
    assert (await retried(world, first, idempotency=Idempotency("k", "hash"))).id == made.id
    with pytest.raises(ApiProblem) as problem:
        await retried(world, first, idempotency=Idempotency("k", "other"))
    assert problem.value.status == 422
    other = await retried(world, first, FAILED)
    assert other.id != made.id
    assert (await world.look(first)).retried_by == (made.id, other.id)
    asked = wanted(world, first, RetryChoice(("failed",), ("x",)))
    twice = [await world.store.retry_job(Caller(first.tenant_id), asked) for _ in range(2)]
    assert twice[0] == twice[1], "a call whose commit is unknown is made again"


async def test_a_retry_that_never_ran_is_made_again_and_a_forgotten_one_is_not_named(world: StoreWorld) -> None:
    first = await ended(world)
    made = await retried(world, first)
    worker, token = await world.worker(), world.token()
    assert await world.store.take_step(made.id, JobState.VALIDATING, worker, token)
    assert await world.store.refuse_job(made.id, token, [LineError("nothing_to_retry", "none")])
    assert (await world.look(made)).merged_file_id is None
    again = await retried(world, first)
    assert again.id != made.id
    await world.store.cancel_job(again.tenant_id, again.id)
    assert await world.store.end_unstarted(again.id)
    assert (await world.look(again)).merged_file_id is None
    await world.store.forget_job(made.id)
    assert (await world.look(first)).retried_by == (again.id,)


async def test_what_cannot_be_retried_is_refused(world: StoreWorld) -> None:
    caller = await world.caller()
    assert await world.store.retry_job(caller, wanted(world, await ended(world)), quotas=Quotas()) is not None
    running = await world.running(caller, 2)
    assert await conflict(world.store.retry_job(caller, wanted(world, running))) == "batch_not_ended"
    other_caller = await world.caller("another")
    first = await ended(world)
    assert await world.store.retry_job(other_caller, wanted(world, first)) is None
    assert await conflict(retried(world, first, RetryChoice(("expired",)))) == "batch_not_retryable"
    for file_id in (first.output_file_id, first.error_file_id, first.input_file_id):
        job = await ended(world)
        gone = {first.output_file_id: job.output_file_id, first.error_file_id: job.error_file_id}
        await world.store.delete_file(job.tenant_id, gone.get(file_id) or job.input_file_id)
        assert await conflict(retried(world, job)) == "batch_not_retryable"
    spoken_for = await ended(world, door="{}")
    assert await conflict(retried(world, spoken_for)) == "batch_not_retryable"


async def test_the_input_cannot_be_deleted_before_the_retry_has_read_it(world: StoreWorld) -> None:
    first = await ended(world)
    made = await retried(world, first)
    assert await conflict(world.store.delete_file(first.tenant_id, first.input_file_id)) == "file_in_use"
    await world.ingested(made, plan_of(2))
    assert await world.store.delete_file(first.tenant_id, first.input_file_id)


async def test_answers_of_neither_make_no_merged_file(world: StoreWorld) -> None:
    first = await ended(world, answered=0, failed=3)
    done = await finished_retry(world, await retried(world, first), answered=0)
    assert (done.merged_file_id, done.output_file_id) == (None, None)


async def test_a_webhook_gets_the_event_of_a_retry_too(world: StoreWorld) -> None:
    first = await ended(world, webhook=JobWebhook("https://x.example/h", ("batch.completed",), secret=b"a" * 32))
    made = await retried(world, first)
    assert made.webhook == JobWebhook("https://x.example/h", ("batch.completed",))
    endpoint = await world.store.webhook_endpoint_of_job(made.tenant_id, made.id)
    assert endpoint is not None


async def test_a_retry_may_have_bounds_a_canary_and_terms_of_its_own(world: StoreWorld) -> None:
    had = JobShape(defaults={"n": 1}, retry=JobRetry(attempts_max=2))
    first = await ended(world, shape=had, answers=AnswerTerms("{}"))
    plain = await retried(world, first, FAILED)
    assert (plain.shape, plain.answers) == (had, AnswerTerms("{}"))
    terms, again = AnswerTerms("{}", escalate_to="large"), JobRetry(attempts_max=9)
    own = JobControls(max_cost_nano=7, max_errors=MaxErrors(count=3))
    made = await world.store.retry_job(
        Caller(first.tenant_id),
        replace(wanted(world, first), controls=own, canary=Canary(1, 100_000), retry=again, answers=terms),
    )
    assert made is not None
    assert (made.controls, made.canary) == (own, Canary(1, 100_000))
    assert (made.shape, made.answers) == (JobShape(defaults={"n": 1}, retry=again), terms)
    assert (await world.look(first)).controls != own
