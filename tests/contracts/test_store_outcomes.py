"""What every store does when outcomes are recorded. `StoreWorld.judge` holds rows, counters and files to one another, line by line."""

from __future__ import annotations

import random

import pytest
from msgspec.structs import replace

from tests.contracts.store_world import DAY_MS, StoreWorld, finished, line, tries
from tests.support.store_verbs import slice_counts
from tidegate.core.errors import LostRace
from tidegate.core.nouns import Finished, JobFlush, PublishTurns, Recorded, Usage
from tidegate.core.states import JobState, Outcome

pytestmark = pytest.mark.anyio


async def test_answers_and_errors_go_to_their_files(world: StoreWorld) -> None:
    worker, answers, errors = await world.worker(), await world.log(), await world.log("errors")
    job = await world.running(await world.caller(), 4)
    [held] = await world.lease(worker, job)
    good = world.answers(answers, job, 2, 0, token=held.token)
    bad = world.errors(errors, job, 1, token=held.token)
    both = replace(good, errors=bad.errors, errors_placed=bad.errors_placed)
    assert await world.record(both) == Recorded(job.id, 3, 0, closed=False, complete=False)
    job = await world.judge(job)
    assert (job.answered_count, job.failed_count, job.unused_count) == (2, 1, 0)
    assert job.usage == Usage(20, 2, 10, 4)
    assert await world.content(job.output_file_id) == line(job.id, 2) + line(job.id, 0)
    assert await world.content(job.error_file_id) == line(job.id, 1, "error")


async def test_recording_may_be_replayed(world: StoreWorld) -> None:
    worker, answers, errors = await world.worker(), await world.log(), await world.log("errors")
    job = await world.running(await world.caller(), 4)
    [held] = await world.lease(worker, job)
    good, bad = world.answers(answers, job, 0, 1), world.errors(errors, job, 2, token=held.token)
    attempts = JobFlush(job.id, attempts=[(held.token, tries(3))])
    await world.store.record_outcomes([good, bad, attempts], [], [])
    once, extents = await world.judge(job), await world.extents(job.output_file_id)
    replayed = await world.store.record_outcomes([good, bad, attempts], [], [])
    assert [one.new_count for one in replayed] == [0, 0, 0]
    assert await world.judge(job) == once, "nor is an answer that is in the file counted as unused"
    assert await world.extents(job.output_file_id) == extents
    await world.store.settle_blob(answers.blob_id)
    assert await world.store.condemn_unused_blobs(-1, -1, 10) == 0


async def test_replaying_the_flush_that_completed_a_job_changes_nothing(world: StoreWorld) -> None:
    log = await world.log()
    job = await world.running(await world.caller(), 2)
    flush = world.answers(log, job, 0, 1)
    assert (await world.record(flush)).complete
    once = await world.judge(job)
    again = await world.record(flush)
    assert (again.new_count, again.unused_count, again.closed) == (0, 0, True)
    assert await world.judge(job) == once


@pytest.mark.parametrize("item_count", [3, 4], ids=["completes", "goes on"])
async def test_a_log_that_was_recorded_in_part_may_be_replayed_whole(world: StoreWorld, item_count: int) -> None:
    """A worker's last flush arrives late: who adopts its log records these lines and those behind them. No answer is counted as unused."""
    log = await world.log()
    job = await world.running(await world.caller(), item_count)
    first, rest = world.answers(log, job, 0), world.answers(log, job, 1, 2)
    assert first.answers_placed is not None
    assert rest.answers_placed is not None
    size_bytes = first.answers_placed.size_bytes + rest.answers_placed.size_bytes
    whole = replace(
        first,
        answers=[*first.answers, *rest.answers],
        answers_placed=replace(first.answers_placed, size_bytes=size_bytes),
    )
    assert (await world.record(first)).new_count == 1
    for new_count in (2, 0):
        recorded = await world.record(whole)
        assert (recorded.new_count, recorded.unused_count) == (new_count, 0)
    job = await world.judge(job)
    assert (job.answered_count, job.unused_count) == (3, 0)
    late = await world.answer(log, job, 1)
    assert (late.new_count, late.unused_count) == (0, 1), "another answer to the same item is one"


async def test_the_first_result_wins_and_the_second_is_counted(world: StoreWorld) -> None:
    first, second = await world.log(), await world.log()
    job = await world.running(await world.caller(), 5)
    await world.answer(first, job, 1, 3, word="first")
    recorded = await world.answer(second, job, 0, 1, 2, 3, 4, word="second")
    assert recorded == Recorded(job.id, 3, 2, closed=False, complete=True)
    job = await world.judge(job)
    assert (job.answered_count, job.unused_count) == (5, 2)
    assert job.usage.input_tokens == 50
    words = {int(text.split()[1]): text.split()[2].strip(b".") for text in (await lines_of(world, job.output_file_id))}
    assert words == {0: b"second", 1: b"first", 2: b"second", 3: b"first", 4: b"second"}


async def lines_of(world: StoreWorld, file_id: str | None) -> list[bytes]:
    return (await world.content(file_id)).splitlines()


async def test_an_answer_beats_a_failure_only_when_it_is_first(world: StoreWorld) -> None:
    worker, answers, errors = await world.worker(), await world.log(), await world.log("errors")
    job = await world.running(await world.caller(), 3)
    [held] = await world.lease(worker, job)
    await world.answer(answers, job, 0)
    await world.record(world.errors(errors, job, 0, 1, token=held.token))
    recorded = await world.answer(answers, job, 1)
    assert (recorded.new_count, recorded.unused_count) == (0, 1)
    job = await world.judge(job)
    assert (job.answered_count, job.failed_count, job.unused_count) == (1, 1, 1)


async def test_a_failure_without_the_token_is_refused(world: StoreWorld) -> None:
    worker, errors = await world.worker(), await world.log("errors")
    job = await world.running(await world.caller(), 2, 2)
    [held] = await world.lease(worker, job, 1)
    for token, number in (("someone else's", 0), (held.token, 2), ("", 1)):
        assert (await world.record(world.errors(errors, job, number, token=token))).new_count == 0
    mixed = world.errors(errors, job, 3, 0, 2, 1, token=held.token)
    assert (await world.record(mixed)).new_count == 2
    job = await world.judge(job)
    assert set(await world.outcomes(job)) == {0, 1}
    await world.store.release_slice(job.id, 0, held.token, 0)
    [again] = await world.lease(worker, job, 1)
    await world.record(world.errors(errors, job, 0, token=held.token))
    assert (await world.judge(job)).failed_count == 2
    assert again.token != held.token


async def test_a_stale_failure_before_a_rightful_one_does_not_lend_it_its_line(world: StoreWorld) -> None:
    worker, log = await world.worker(), await world.log("errors")
    job = await world.running(await world.caller(), 2)
    [held] = await world.lease(worker, job)
    texts = [line(job.id, 0, "stale"), line(job.id, 0, "rightful"), line(job.id, 1, "rightful")]
    entries = finished(texts[:1], (0,), Outcome.FAILED, "stale") + finished(
        texts[1:], (0, 1), Outcome.FAILED, held.token
    )
    assert (await world.record(JobFlush(job.id, errors=entries, errors_placed=log.append(texts)))).new_count == 2
    job = await world.judge(job)
    assert b"stale" not in await world.content(job.error_file_id)


async def test_attempts_are_refused_without_the_token_of_their_slice(world: StoreWorld) -> None:
    worker = await world.worker()
    job = await world.running(await world.caller(), 2, 2)
    token = world.token()
    [first, second] = await world.lease(worker, job, 2, token)
    await world.store.release_slice(job.id, second.first, token, 0)
    await world.record(JobFlush(job.id, attempts=[("stale", tries(0)), (token, tries(1)), (token, tries(2))]))
    [theirs] = await world.lease(await world.worker(), job)
    assert theirs.attempts == {}, "the token still holds a slice, but not this one"
    await world.store.release_slice(job.id, first.first, token, 0)
    [again] = await world.lease(worker, job)
    assert set(again.attempts) == {1}


async def test_a_shorter_deferral_never_overwrites_a_longer_one(world: StoreWorld) -> None:
    worker = await world.worker()
    job = await world.running(await world.caller(), 2)
    [held] = await world.lease(worker, job)
    for attempt in (tries(0, 1, 3_000), tries(0, 2, 5_000), tries(0, 1, 100), tries(0, 3, 4_000)):
        await world.record(JobFlush(job.id, attempts=[(held.token, attempt)]))
    await world.store.release_slice(job.id, 0, held.token, 0)
    [again] = await world.lease(worker, job)
    assert again.attempts == {0: tries(0, 3, 5_000)}


async def test_an_item_twice_in_one_flush_counts_once(world: StoreWorld) -> None:
    log = await world.log()
    job = await world.running(await world.caller(), 5)
    recorded = await world.answer(log, job, 0, 1, 1, 2, 0, 3)
    assert (recorded.new_count, recorded.unused_count) == (4, 2)
    job = await world.judge(job)
    assert job.usage.input_tokens == 40
    await world.answer(log, job, 4)
    assert (await world.judge(job)).state is JobState.FINALIZING


async def test_neighbouring_lines_are_one_extent(world: StoreWorld) -> None:
    log, other = await world.log(), await world.log()
    job = await world.running(await world.caller(), 9)
    for number in range(4):
        await world.answer(log, job, number)
    assert len(await world.extents(job.output_file_id)) == 1
    await world.answer(other, job, 4)
    await world.answer(log, job, 5)
    assert len(await world.extents(job.output_file_id)) == 3, "another log stands between"
    log.append([b"a line of another job\n"])
    await world.answer(log, job, 6)
    assert len(await world.extents(job.output_file_id)) == 4, "other bytes stand between"
    await world.answer(log, job, 7, 7, 8)
    assert len(await world.extents(job.output_file_id)) == 5
    await world.judge(job)


async def test_one_flush_may_have_outcomes_of_several_jobs(world: StoreWorld) -> None:
    caller, log = await world.caller(), await world.log()
    jobs = [await world.running(caller, 3) for _ in range(3)]
    flushes = [world.answers(log, job, 0, 1) for job in jobs]
    recorded = await world.store.record_outcomes(flushes, [], [])
    assert sorted((one.job_id, one.new_count) for one in recorded) == sorted((job.id, 2) for job in jobs)
    for job in jobs:
        assert (await world.judge(job)).answered_count == 2


async def test_one_flush_may_have_several_parts_for_a_job(world: StoreWorld) -> None:
    worker, answers, errors = await world.worker(), await world.log(), await world.log("errors")
    job = await world.running(await world.caller(), 6)
    [held] = await world.lease(worker, job)
    parts = [
        world.answers(answers, job, 0, 1),
        world.errors(errors, job, 2, token=held.token),
        world.answers(answers, job, 1, 3),
        world.errors(errors, job, 4, 0, token=held.token),
        world.answers(answers, job, 5),
        world.answers(answers, job, 5, word="late"),
    ]
    for _ in range(2):
        await world.store.record_outcomes(parts, [(job.id, 0, held.token)], [])
        job = await world.judge(job)
        assert (job.answered_count, job.failed_count, job.unused_count) == (4, 2, 2)
        assert job.state is JobState.FINALIZING
        assert await slice_counts(world.store, job.id) == {"done": 1}


async def test_the_last_outcome_moves_the_job_on_exactly_once(world: StoreWorld) -> None:
    caller, log = await world.caller(), await world.log()
    job = await world.running(caller, 3)
    assert not (await world.answer(log, job, 0, 1)).complete
    assert await world.store.jobs_to_publish(PublishTurns()) == []
    await world.clock.advance(5)
    assert (await world.answer(log, job, 2)).complete
    ended = await world.judge(job)
    assert (ended.state, ended.closing, ended.finalizing_at) == (
        JobState.FINALIZING, JobState.COMPLETED, world.clock.now,
    )  # fmt: skip
    assert await world.store.jobs_to_publish(PublishTurns()) == [job.id]
    late = await world.log()
    recorded = await world.answer(late, job, 0, 1)
    assert recorded == Recorded(job.id, 0, 2, closed=True, complete=False)
    assert (await world.judge(job)).unused_count == 2


async def test_answers_after_closing_are_counted_once_and_not_recorded(world: StoreWorld) -> None:
    caller, log, errors = await world.caller(), await world.log(), await world.log("errors")
    worker = await world.worker()
    job = await world.running(caller, 4)
    [held] = await world.lease(worker, job)
    await world.answer(log, job, 0)
    await world.store.cancel_job(caller.tenant_id, job.id)
    await world.answer(log, job, 1)
    await world.store.close_job(job.id, 0)
    good = world.answers(log, job, 2)
    bad = world.errors(errors, job, 3, token=held.token)
    for _ in range(2):
        await world.record(replace(good, errors=bad.errors, errors_placed=bad.errors_placed))
        job = await world.judge(job)
        assert (job.answered_count, job.failed_count, job.unused_count) == (2, 0, 1)
        assert job.state is JobState.FINALIZING


async def test_an_unknown_job_takes_nothing(world: StoreWorld) -> None:
    job, log = await world.running(await world.caller(), 2), await world.log()
    ghost = replace(job, id=world.id("batch"))
    recorded = await world.record(world.answers(log, ghost, 0), world.answers(log, job, 0))
    assert recorded.closed or recorded.new_count == 1
    assert (await world.judge(job)).answered_count == 1
    assert await world.outcomes(ghost) == {}


async def test_cancelling_keeps_what_is_recorded_and_never_completes(world: StoreWorld) -> None:
    caller, log = await world.caller(), await world.log()
    job = await world.running(caller, 2)
    await world.answer(log, job, 0)
    await world.store.cancel_job(caller.tenant_id, job.id)
    assert not (await world.answer(log, job, 1)).complete
    job = await world.judge(job)
    assert (job.state, job.closing, job.answered_count) == (JobState.CANCELLING, JobState.CANCELLED, 2)


async def test_an_expiring_job_stays_open_until_it_is_closed_though_its_last_item_is_done(world: StoreWorld) -> None:
    job = await world.running(await world.caller(), 2)
    await world.lease(await world.worker(10**9), job)
    await world.clock.advance(DAY_MS)
    assert await world.store.expire_job(job.id)
    recorded = await world.answer(await world.log(), job, 0, 1)
    assert not recorded.complete
    found = await world.look(job)
    assert (found.state, found.closing, found.finalizing_at) == (JobState.IN_PROGRESS, JobState.EXPIRED, None)


async def test_a_condemned_log_is_refused_and_leaves_nothing(world: StoreWorld) -> None:
    caller, log = await world.caller(), await world.log()
    fine, other = await world.log(), await world.running(caller, 2)
    job = await world.running(caller, 2)
    await world.store.settle_blob(log.blob_id)
    assert await world.store.condemn_unused_blobs(-1, -1, 10) == 1
    flush = world.answers(log, job, 0)
    with pytest.raises(LostRace):
        await world.record(flush, world.answers(fine, other, 0))
    for one in (job, other):
        assert (await world.judge(one)).done_count == 0
    await world.answer(await world.log(), job, 0)
    await world.judge(job)


async def test_outcomes_are_paged_by_number(world: StoreWorld) -> None:
    job, log = await world.running(await world.caller(), 9), await world.log()
    await world.answer(log, job, 8, 1, 5, 3)
    page = await world.store.outcomes_page(job.id, 0, 2)
    assert [row[0] for row in page] == [1, 3]
    assert [row[0] for row in await world.store.outcomes_page(job.id, page[-1][0] + 1, 2)] == [5, 8]


@pytest.mark.parametrize("seed", range(2))
async def test_counts_and_files_agree_after_any_mixture_of_flushes(world: StoreWorld, seed: int) -> None:
    """Workers come and go, say things twice and too late; the first result of each item stays where it was put."""
    rng = random.Random(seed)
    caller = await world.caller()
    jobs = [await world.running(caller, *([5] * 4)) for _ in range(2)]
    logs = [(await world.log(), await world.log("errors")) for _ in range(3)]
    tokens: list[str] = [piece.token for job in jobs for piece in await world.lease(await world.worker(), job, 3)]
    kept: dict[str, dict[int, tuple[str, int, int]]] = {job.id: {} for job in jobs}
    past: list[list[JobFlush]] = []
    for _ in range(14):
        flushes = []
        for job in rng.choices(jobs, k=rng.randint(1, 3)):
            answers, errors = rng.choice(logs)
            numbers = [rng.randrange(20) for _ in range(rng.randint(1, 6))]
            token = rng.choice([*tokens, "stale"])
            flushes.append(
                world.answers(answers, job, *numbers)
                if rng.random() < 0.6
                else world.errors(errors, job, *numbers, token=token)
            )
        past.append(flushes)
        await world.store.record_outcomes(flushes, [], [])
        if rng.random() < 0.3:
            before = [await world.look(job) for job in jobs]
            await world.store.record_outcomes(rng.choice(past), [], [])
            assert [await world.look(job) for job in jobs] == before
        for job in jobs:
            await world.judge(job)
            now = await world.outcomes(job)
            assert kept[job.id].items() <= now.items(), "an outcome is never changed"
            kept[job.id] = now


async def test_thousands_of_outcomes_fit_in_one_flush(world: StoreWorld) -> None:
    job, log = await world.running(await world.caller(), 2_000), await world.log()
    texts = [b"x\n"] * 2_000
    entries = [Finished(number, Outcome.ANSWERED, 2, 0, "") for number in range(2_000)]
    recorded = await world.record(JobFlush(job.id, answers=entries, answers_placed=log.append(texts)))
    assert (recorded.new_count, recorded.complete) == (2_000, True)
    assert len(await world.extents(job.output_file_id)) == 1


async def test_a_log_counts_as_recorded_up_to_its_last_line_whichever_job_that_is_of(world: StoreWorld) -> None:
    """What lies behind that place is adopted when its worker is lost, and would count as answered twice."""
    caller, log = await world.caller(), await world.log()
    first, last = sorted([await world.running(caller, 2) for _ in range(2)], key=lambda job: job.id)
    flushes = [world.answers(log, last, 0), world.answers(log, first, 0)]
    await world.record(*flushes)
    assert await world.store.answers_recorded_to(log.blob_id) == len(world.blobs[log.blob_id])
