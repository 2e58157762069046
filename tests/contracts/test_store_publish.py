"""What every store does at the end of a job: publishing, and forgetting."""

from __future__ import annotations

from array import array
from itertools import accumulate
from typing import Any

import pytest
from msgspec.structs import replace

from tests.contracts.store_world import DAY_MS, StoreWorld, line, plan_of
from tests.support.store_verbs import any_file, slice_counts
from tidegate.core.errors import ApiProblem, LostRace
from tidegate.core.job_lists import JobFilter, JobSort
from tidegate.core.job_shape import CopiedItems, JobShape
from tidegate.core.nouns import Caller, Idempotency, Job, JobEnd, LineError, PublishTurns, Quotas, Rewrite, UnrunLines
from tidegate.core.states import FileState, JobState, Outcome
from tidegate.store.road.result_parts import part_spans

pytestmark = pytest.mark.anyio


async def closed(world: StoreWorld, *, answered: int, failed: int, rest: int, **fields: Any) -> tuple[Job, str, str]:
    """A cancelled job in `finalizing` with so many items of each kind; says who may publish it and with which token."""
    caller, worker = await world.caller(), await world.worker()
    job = await world.running(caller, answered + failed + rest, **fields)
    [held] = await world.lease(worker, job)
    if answered:
        await world.answer(await world.log(), job, *range(answered))
    if failed:
        numbers = range(answered, answered + failed)
        await world.record(world.errors(await world.log("errors"), job, *numbers, token=held.token))
    if rest:
        await world.store.cancel_job(caller.tenant_id, job.id)
        await world.store.release_slice(job.id, held.first, held.token, 0)
        assert await world.store.close_job(job.id, 0)
    token = world.token()
    assert await world.store.take_step(job.id, JobState.FINALIZING, worker, token)
    return await world.look(job), worker, token


async def rest_of(world: StoreWorld, job: Job, *numbers: int, outcome: Outcome = Outcome.CANCELLED) -> UnrunLines:
    lines = [line(job.id, number, "batch_cancelled") for number in numbers]
    placed = (await world.log("rest")).append(lines)
    return UnrunLines(placed, array("I", numbers), [outcome] * len(numbers), array("I", map(len, lines)))


async def publish(world: StoreWorld, job: Job, token: str, **parts: Any) -> None:
    added = (parts.get("answers"), parts.get("rest"))
    rewrites = (parts.get("output"), parts.get("errors"))
    keep_ms = parts.get("keep_ms")
    await world.store.publish_job(job, token, added=added, rewrites=rewrites, end=JobEnd(keep_ms))


async def unused_blobs(world: StoreWorld) -> int:
    """How many kept blobs nothing needs any more."""
    return await world.store.condemn_unused_blobs(-1, -1, 100)


async def test_no_job_is_shown_as_expired_before_its_deadline_though_the_clock_was_set_back(world: StoreWorld) -> None:
    """A step that is too small to be noticed passes into the store's time."""
    caller, worker = await world.caller(), await world.worker(2 * DAY_MS)
    waiting, running = await world.job(caller), await world.running(caller, 2)
    await world.clock.advance(DAY_MS)
    for job in (waiting, running):
        assert await world.store.expire_job(job.id)
    await world.clock.advance(-1_500)
    assert await world.store.end_unstarted(waiting.id)
    assert await world.store.close_job(running.id, 0)
    token = world.token()
    assert await world.store.take_step(running.id, JobState.FINALIZING, worker, token)
    running = await world.look(running)
    await publish(world, running, token, rest=await rest_of(world, running, 0, 1, outcome=Outcome.EXPIRED))
    for job in (waiting, running):
        ended = await world.look(job)
        assert (ended.state, ended.expired_at) == (JobState.EXPIRED, ended.expires_at)


@pytest.mark.parametrize("copied", [CopiedItems(3, 0, 200), CopiedItems(2, 1, 200)])
async def test_items_that_are_not_run_are_done_when_their_lines_are_added(
    world: StoreWorld, copied: CopiedItems
) -> None:
    caller, worker = await world.caller(), await world.worker()
    plan = replace(plan_of(2), item_count=5, copied=copied)
    job = await world.ingested(await world.job(caller, shape=JobShape(dedupe=True)), plan)
    assert (job.copied, job.run_count) == (copied, 2)
    await world.lease(worker, job)
    await world.clock.advance(7)
    await world.answer(await world.log(), job, 0, 1)
    job = await world.look(job)
    assert (job.state, job.done_count) == (JobState.FINALIZING, 2)
    assert (job.closing, job.finalizing_at) == (JobState.COMPLETED, world.clock.now)
    answered = await rest_of(world, job, 2, 3, outcome=Outcome.ANSWERED)
    failed = replace(await rest_of(world, job, 4, outcome=Outcome.FAILED), schema_invalid=1)
    token = world.token()
    assert await world.store.take_step(job.id, JobState.FINALIZING, worker, token)
    for _ in range(2):
        await publish(world, job, token, answers=answered, rest=failed)
    ended = await world.judge(job)
    assert (ended.state, ended.answered_count, ended.failed_count) == (JobState.COMPLETED, 4, 1)
    assert (ended.schema_invalid_count, ended.usage) == (1, job.usage)
    listed = await world.store.search_jobs(job.tenant_id, JobFilter(), after=None, count_max=10, sort=JobSort.FAILED)
    assert [one.id for one in listed or ()] == [job.id]


async def test_an_answered_job_shows_its_output_and_no_error_file(world: StoreWorld) -> None:
    job, _, token = await closed(world, answered=3, failed=0, rest=0)
    await world.clock.advance(7)
    await publish(world, job, token, keep_ms=500)
    ended = await world.judge(job)
    assert (ended.state, ended.completed_at, ended.error_file_id) == (JobState.COMPLETED, world.clock.now, None)
    assert ended.output_file_id == job.output_file_id
    file = await world.store.get_file(job.tenant_id, str(job.output_file_id))
    assert file is not None
    assert (file.size_bytes, file.line_count, file.purpose) == (ended.output_bytes, 3, "batch_output")
    assert (file.created_at, file.expires_at) == (world.clock.now, world.clock.now + 500)
    empty = await any_file(world.store, str(job.error_file_id))
    assert empty is not None
    assert empty.state is FileState.DELETED
    assert await slice_counts(world.store, job.id) == {}
    assert await unused_blobs(world) == 1, "the work file is needed no more"


async def test_an_all_failed_job_is_completed_without_an_output_file(world: StoreWorld) -> None:
    job, _, token = await closed(world, answered=0, failed=2, rest=0)
    await publish(world, job, token)
    ended = await world.judge(job)
    assert (ended.state, ended.output_file_id, ended.error_file_id) == (
        JobState.COMPLETED, None, job.error_file_id,
    )  # fmt: skip


@pytest.mark.parametrize("failed", [0, 2])
async def test_what_never_ran_gets_its_lines_behind_the_errors(world: StoreWorld, failed: int) -> None:
    job, _, token = await closed(world, answered=2, failed=failed, rest=3)
    numbers = range(2 + failed, 5 + failed)
    growing = await world.store.get_growing_file(job.tenant_id, str(job.error_file_id))
    assert growing is not None
    assert growing.state is FileState.GROWING
    assert await world.store.get_growing_file("another", growing.id) is None
    await publish(world, job, token, rest=await rest_of(world, job, *numbers))
    ended = await world.judge(job)
    assert (ended.state, ended.answered_count, ended.failed_count, ended.cancelled_count) == (
        JobState.CANCELLED, 2, failed, 3,
    )  # fmt: skip
    assert ended.done_count == ended.item_count
    file = await world.store.get_file(job.tenant_id, str(job.error_file_id))
    assert file is not None
    assert (file.line_count, file.size_bytes) == (3 + failed, ended.error_bytes)
    assert await world.store.get_growing_file(job.tenant_id, file.id) is None
    outcomes = await world.store.outcomes_page(job.id, 0, 100)
    for is_output in (True, False):
        places = sorted(at for _, outcome, at, _ in outcomes if (outcome == Outcome.ANSWERED) is is_output)
        found = [await world.store.result_line_place(job.id, n, is_output=is_output) for n in range(len(places) + 1)]
        assert found == [*places, None]


@pytest.mark.parametrize(("outcome", "state"), [(Outcome.FAILED, JobState.FAILED), (Outcome.EXPIRED, JobState.EXPIRED)])
async def test_the_end_is_what_closed_the_job(world: StoreWorld, outcome: Outcome, state: JobState) -> None:
    worker = await world.worker()
    job = await world.running(await world.caller(), 2, window_ms=1_000)
    if state is JobState.FAILED:
        await world.store.fail_job(job.id, LineError("stopped", "by hand"))
    else:
        await world.clock.advance(1_000)
        await world.store.expire_job(job.id)
    await world.store.close_job(job.id, 0)
    await world.store.take_step(job.id, JobState.FINALIZING, worker, "t")
    job = await world.look(job)
    await publish(world, job, "t", rest=await rest_of(world, job, 0, 1, outcome=outcome))
    ended = await world.judge(job)
    assert ended.state is state
    assert (ended.output_file_id, ended.error_file_id) == (None, job.error_file_id)
    assert {ended.failed_at, ended.expired_at, ended.completed_at, ended.cancelled_at} == {None, world.clock.now}


async def test_publishing_may_be_replayed(world: StoreWorld) -> None:
    job, _, token = await closed(world, answered=1, failed=1, rest=1)
    rest = await rest_of(world, job, 2)
    await publish(world, job, token, rest=rest)
    ended = await world.judge(job)
    await world.clock.advance(5)
    await publish(world, job, token, rest=rest)
    assert await world.judge(job) == ended, "a terminal state, its times and its files never change"
    assert await unused_blobs(world) == 1
    assert await world.store.jobs_to_publish(PublishTurns()) == []
    assert not await world.store.take_step(job.id, JobState.FINALIZING, await world.worker(), "t")


async def test_a_worker_that_lost_the_step_publishes_nothing(world: StoreWorld) -> None:
    job, worker, token = await closed(world, answered=1, failed=0, rest=1)
    rest = await rest_of(world, job, 1)
    await world.store.drop_step(job.id, token, 0)
    with pytest.raises(LostRace):
        await publish(world, job, token, rest=rest)
    assert await world.judge(job) == job
    assert await world.store.take_step(job.id, JobState.FINALIZING, worker, "next")
    with pytest.raises(LostRace):
        await publish(world, job, token, rest=rest)
    await publish(world, job, "next", rest=rest)
    assert (await world.judge(job)).state is JobState.CANCELLED


async def test_a_dead_publisher_is_followed_by_another(world: StoreWorld) -> None:
    job, worker, token = await closed(world, answered=1, failed=0, rest=0)
    other = await world.worker(10 * 60_000)
    assert await world.store.jobs_to_publish(PublishTurns()) == []
    assert not await world.store.take_step(job.id, JobState.FINALIZING, other, "next")
    await world.clock.advance(60_000)
    assert await world.store.declare_gone(worker)
    assert await world.store.jobs_to_publish(PublishTurns()) == [job.id]
    assert await world.store.take_step(job.id, JobState.FINALIZING, other, "next")
    with pytest.raises(LostRace):
        await publish(world, job, token)
    await publish(world, job, "next")
    assert (await world.judge(job)).state is JobState.COMPLETED


async def test_tenants_are_published_in_turns_and_by_what_it_costs(world: StoreWorld) -> None:
    ours, theirs = await world.caller(), await world.caller("other")
    ended: dict[str, list[str]] = {}
    for name, caller, counts in (("ours", ours, (9, 3, 8, 7)), ("theirs", theirs, (8, 2))):
        for count in counts:
            job = await world.running(caller, count)
            await world.store.cancel_job(job.tenant_id, job.id)
            assert await world.store.close_job(job.id, 0)
            await world.clock.advance(1)
            ended.setdefault(name, []).append(job.id)
    (nine, three, eight, seven), (their_eight, two) = ended["ours"], ended["theirs"]
    every = await world.store.jobs_to_publish(PublishTurns())
    assert every == [nine, their_eight, three, two, eight, seven], "of each tenant one, the oldest, and so on"
    long = PublishTurns(bytes_min=4 * 512, tenant_max=1)
    assert await world.store.jobs_to_publish(long) == [nine, their_eight]
    assert await world.store.jobs_to_publish(PublishTurns(bytes_max=4 * 512 - 1)) == [three, two]
    assert await world.store.jobs_to_publish(PublishTurns(bytes_min=7 * 512, bytes_max=7 * 512)) == [seven]
    assert await world.store.jobs_to_publish(PublishTurns(count_max=3)) == every[:3]


@pytest.mark.parametrize(("ordered", "copies"), [(True, 0), (False, 0), (False, 1)])
async def test_lines_cost_what_they_have_in_bytes_where_they_are_written_again(
    world: StoreWorld, ordered: bool, copies: int
) -> None:
    """In order, or read for the copies of an answer, each of which is one more line."""
    log = await world.log()
    plan = replace(plan_of(2), item_count=2 + copies, copied=CopiedItems(deduplicated=copies))
    job = await world.ingested(await world.job(await world.caller(), ordered=ordered), plan)
    await world.answer(log, job, 1, 0)
    job = await world.look(job)
    assert job.output_bytes
    cost = 512 * copies + (job.output_bytes if ordered or copies else 0)
    assert await world.store.jobs_to_publish(PublishTurns(bytes_min=cost, bytes_max=cost)) == [job.id]
    assert await world.store.jobs_to_publish(PublishTurns(bytes_min=cost + 1)) == []


async def test_a_rest_that_was_collected_publishes_nothing(world: StoreWorld) -> None:
    job, _, token = await closed(world, answered=1, failed=0, rest=1)
    rest = await rest_of(world, job, 1)
    await world.store.give_up_blob(rest.placed.blob_id)
    with pytest.raises(LostRace):
        await publish(world, job, token, rest=rest)
    assert await world.judge(job) == job
    await publish(world, job, token, rest=await rest_of(world, job, 1))
    assert (await world.judge(job)).done_count == 2


async def test_a_rewrite_puts_the_lines_in_order_and_frees_the_old_ones(world: StoreWorld) -> None:
    worker, log = await world.worker(), await world.log()
    errors = await world.log("errors")
    job = await world.running(await world.caller(), 6, ordered=True)
    [held] = await world.lease(worker, job)
    await world.record(world.errors(errors, job, 4, 1, token=held.token))
    await world.answer(log, job, 5, 0, 2)
    await world.store.cancel_job(job.tenant_id, job.id)
    await world.store.release_slice(job.id, 0, held.token, 0)
    await world.store.close_job(job.id, 0)
    await world.store.take_step(job.id, JobState.FINALIZING, worker, "t")
    job = await world.look(job)

    async def rewrite(kind: str, lines: dict[int, bytes]) -> Rewrite:
        sizes = [0, *map(len, lines.values())]
        placed = (await world.log(kind)).append(list(lines.values()))
        return Rewrite(placed, array("I", lines), array("q", accumulate(sizes[:-1])))

    output = await rewrite("compacted", {number: line(job.id, number) for number in (0, 2, 5)})
    word = {1: "error", 3: "batch_cancelled", 4: "error"}
    bad = await rewrite("compacted", {number: line(job.id, number, word[number]) for number in word})
    await publish(world, job, "t", rest=await rest_of(world, job, 3), output=output, errors=bad)
    ended = await world.judge(job)
    texts = [text.split()[1] for text in (await world.content(ended.output_file_id)).splitlines()]
    assert texts == [b"0", b"2", b"5"]
    texts = [text.split()[1] for text in (await world.content(ended.error_file_id)).splitlines()]
    assert texts == [b"1", b"3", b"4"]
    for blob in (log, errors):
        await world.store.settle_blob(blob.blob_id)
    assert await unused_blobs(world) == 4, "both logs, the rest and the work file"
    for file_id in (ended.output_file_id, ended.error_file_id):
        assert await world.store.delete_file(job.tenant_id, str(file_id))
    assert await unused_blobs(world) == 2, "what was rewritten"


async def test_a_job_that_ended_long_ago_is_forgotten_with_its_files(world: StoreWorld) -> None:
    caller, key = await world.caller(), Idempotency("k", "body")
    job, _, token = await closed(world, answered=2, failed=1, rest=0, idempotency=key)
    await world.clock.advance(10)
    await publish(world, job, token)
    await world.clock.advance(100)
    assert await world.store.ended_jobs(100, 10) == []
    assert await world.store.ended_jobs(99, 10) == [job.id]
    for _ in range(2):
        await world.store.forget_job(job.id)
    assert await world.store.any_job(job.id) is None
    assert await world.outcomes(job) == {}
    assert await world.extents(job.output_file_id) == []
    assert await world.store.get_file(caller.tenant_id, str(job.output_file_id)) is None
    assert await world.store.get_file(caller.tenant_id, job.input_file_id) is not None, "an input is its owner's"
    with pytest.raises(Exception, match="Send a new key"):
        await world.job(caller, idempotency=key)


async def test_of_more_jobs_than_are_looked_at_those_that_ended_first_are_forgotten(world: StoreWorld) -> None:
    ended = []
    for _ in range(3):
        job, _, token = await closed(world, answered=1, failed=0, rest=0)
        ended.append((job, token))
    for job, token in reversed(ended):
        await publish(world, job, token)
        await world.clock.advance(10)
    assert await world.store.ended_jobs(0, 2) == [ended[2][0].id, ended[1][0].id]


async def test_an_open_job_is_never_forgotten(world: StoreWorld) -> None:
    job, _, _ = await closed(world, answered=1, failed=0, rest=1)
    running = await world.running(await world.caller(), 2)
    await world.clock.advance(1_000_000)
    assert await world.store.ended_jobs(0, 10) == []
    for one in (job, running):
        await world.store.forget_job(one.id)
        assert await world.look(one) == one


async def test_a_result_file_may_be_deleted_before_its_job_is_forgotten(world: StoreWorld) -> None:
    job, _, token = await closed(world, answered=2, failed=0, rest=0)
    await publish(world, job, token)
    assert await world.store.delete_file(job.tenant_id, str(job.output_file_id))
    ended = await world.look(job)
    assert ended.output_file_id == job.output_file_id
    await world.clock.advance(10)
    await world.store.forget_job(job.id)
    assert await world.store.any_job(job.id) is None
    await world.store.prune_files(1, 100)
    assert await any_file(world.store, str(job.error_file_id)) is None


async def test_an_abandoned_job_fails_with_what_was_recorded(world: StoreWorld) -> None:
    job, _, token = await closed(world, answered=2, failed=1, rest=3)
    for _ in range(2):
        ended = await world.store.abandon_job(job.tenant_id, job.id, None)
        assert ended is not None
        assert (ended.state, ended.answered_count, ended.failed_count) == (JobState.FAILED, 2, 1)
        assert [error.code for error in ended.errors] == ["abandoned"]
    assert ended is not None
    for file_id, count in ((ended.output_file_id, 2), (ended.error_file_id, 1)):
        file = await world.store.get_file(job.tenant_id, str(file_id))
        assert file is not None
        assert file.line_count == count
    await publish(world, job, token)
    after = await world.store.any_job(job.id)
    assert after is not None
    assert after.state is JobState.FAILED, "the publisher that comes late changes nothing"
    listed = await world.store.search_jobs(job.tenant_id, JobFilter(), after=None, count_max=10, sort=JobSort.FAILED)
    assert [one.id for one in listed or ()] == [job.id]
    assert not await slice_counts(world.store, job.id)


def test_a_part_may_be_exactly_as_large_as_is_allowed() -> None:
    assert part_spans([5, 5, 1], 10) == [(10, 2), (1, 1)]
    assert part_spans([11, 1], 10) == [(11, 1), (1, 1)], "a longer line has a file of its own"


async def test_the_work_file_of_an_abandoned_job_is_needed_no_more(world: StoreWorld) -> None:
    job, _, _ = await closed(world, answered=1, failed=0, rest=1)
    await world.store.abandon_job(job.tenant_id, job.id, None)
    assert [blob.uses for blob in await world.store.list_blobs("", 99) if blob.id == job.work_blob_id] == [0]


async def test_an_abandoned_job_without_an_answer_has_no_output_file(world: StoreWorld) -> None:
    job, _, _ = await closed(world, answered=0, failed=1, rest=1)
    ended = await world.store.abandon_job(job.tenant_id, job.id, None)
    assert ended is not None
    assert (ended.output_file_id, ended.error_file_id) == (None, job.error_file_id)


async def test_a_publishing_that_failed_is_not_next_before_its_rest_is_over(world: StoreWorld) -> None:
    job, _, token = await closed(world, answered=1, failed=0, rest=0)
    assert await world.store.drop_step(job.id, token, 500) == 1
    assert await world.store.jobs_to_publish(PublishTurns()) == []
    await world.clock.advance(500)
    assert await world.store.jobs_to_publish(PublishTurns()) == [job.id]


async def test_only_a_job_that_is_finalizing_can_be_abandoned(world: StoreWorld) -> None:
    caller = await world.caller()
    job = await world.running(caller, 2)
    with pytest.raises(ApiProblem) as refused:
        await world.store.abandon_job(caller.tenant_id, job.id, None)
    assert refused.value.code == "batch_not_abandonable"
    assert await world.store.abandon_job(world.id("tenant"), job.id, None) is None


async def test_a_job_is_kept_as_long_as_its_own_setting_keeps_its_files(world: StoreWorld) -> None:
    """`output_expires_after` wins over both times of the operator: that of the files and that of the record."""
    caller = await world.caller()
    job, _, token = await closed(world, answered=2, failed=0, rest=0, output_expires_after_s=1)
    await publish(world, job, token, keep_ms=100)
    await world.clock.advance(999)
    assert await world.store.get_file(caller.tenant_id, str(job.output_file_id)) is not None
    assert await world.store.ended_jobs(100, 10) == []
    await world.clock.advance(1)
    assert await world.store.get_file(caller.tenant_id, str(job.output_file_id)) is None
    assert await world.store.ended_jobs(100, 10) == [job.id]


async def test_an_abandoned_job_keeps_its_files_as_long_as_it_asked(world: StoreWorld) -> None:
    job, _, _ = await closed(world, answered=2, failed=0, rest=1, output_expires_after_s=1)
    assert await world.store.abandon_job(job.tenant_id, job.id, 100)
    file = await world.store.get_file(job.tenant_id, str(job.output_file_id))
    assert file is not None
    assert file.expires_at == world.clock.now + 1_000


async def test_results_are_cut_into_files_of_bounded_size_by_the_same_bytes(world: StoreWorld) -> None:
    most = 120
    shape = JobShape(output_file_bytes_max=most)
    job, _, token = await closed(world, answered=5, failed=0, rest=3, shape=shape)
    await publish(world, job, token, rest=await rest_of(world, job, 5, 6, 7), keep_ms=500)
    ended = await world.judge(job)
    assert len(ended.parts.output) >= 2
    assert len(ended.parts.error) >= 2
    for whole_id, part_ids in ((job.output_file_id, ended.parts.output), (job.error_file_id, ended.parts.error)):
        contents = [await world.content(part_id) for part_id in part_ids]
        assert b"".join(contents) == await world.content(whole_id)
        for part_id, content in zip(part_ids, contents, strict=True):
            file = await world.store.get_file(job.tenant_id, part_id)
            assert file is not None
            assert (file.size_bytes, file.line_count) == (len(content), content.count(b"\n"))
            assert content.endswith(b"\n")
            assert len(content) <= most or content.count(b"\n") == 1
    listed = await world.store.list_files(job.tenant_id, after=None, count_max=50, purpose="batch_output")
    assert {file.id for file in listed or ()} == set(ended.parts.all)
    # The same bytes count once.
    files = await world.store.list_files(job.tenant_id, after=None, count_max=50)
    rising = await world.store.list_files(job.tenant_id, after=None, count_max=50, order="asc")
    assert {file.id for file in rising or ()} == {file.id for file in files or ()}
    stored = sum(file.size_bytes for file in files or ())
    await world.file(Caller(job.tenant_id), size_bytes=10, quotas=Quotas(stored_bytes_max=stored + 10))
    # The whole goes with the last of its parts, and so do the bytes.
    for part_id in ended.parts.output:
        whole = await any_file(world.store, str(job.output_file_id))
        assert whole is not None
        assert whole.state is FileState.READY
        assert await world.store.delete_file(job.tenant_id, part_id)
    whole = await any_file(world.store, str(job.output_file_id))
    assert whole is not None
    assert whole.state is FileState.DELETED
    assert await world.extents(job.output_file_id) == []


async def test_small_results_stay_one_file_and_a_forgotten_job_takes_its_parts_along(world: StoreWorld) -> None:
    job, _, token = await closed(world, answered=2, failed=1, rest=0, shape=JobShape(output_file_bytes_max=100_000))
    await publish(world, job, token)
    assert (await world.judge(job)).parts.all == ()
    cut, _, token = await closed(world, answered=4, failed=0, rest=0, shape=JobShape(output_file_bytes_max=1))
    await publish(world, cut, token)
    parts = (await world.judge(cut)).parts.output
    assert len(parts) == 4
    await world.store.forget_job(cut.id)
    for file_id in (*parts, str(cut.output_file_id)):
        assert await world.extents(file_id) == []


async def test_bytes_of_results_in_parts_are_needed_once_for_each_piece(world: StoreWorld) -> None:
    job, _, token = await closed(world, answered=3, failed=0, rest=0, shape=JobShape(output_file_bytes_max=1))
    before = {one.id: one.uses for one in await world.store.list_blobs("", 100)}
    [whole] = await world.extents(job.output_file_id)
    await publish(world, job, token)
    parts = (await world.look(job)).parts.output
    assert [one.blob_id for part in parts for one in await world.extents(part)] == [whole.blob_id] * 3
    after = {one.id: one.uses for one in await world.store.list_blobs("", 100)}
    assert after == before | {whole.blob_id: before[whole.blob_id] + 3, str(job.work_blob_id): 0}


async def test_a_part_has_no_empty_piece_where_an_extent_ends_with_it(world: StoreWorld) -> None:
    caller, worker, token = await world.caller(), await world.worker(), world.token()
    job = await world.running(caller, 3, shape=JobShape(output_file_bytes_max=1))
    await world.lease(worker, job)
    for number in range(3):
        await world.answer(await world.log(), job, number)
    assert await world.store.take_step(job.id, JobState.FINALIZING, worker, token)
    await publish(world, await world.look(job), token)
    parts = (await world.look(job)).parts.output
    assert [len(await world.extents(part)) for part in parts] == [1, 1, 1]
