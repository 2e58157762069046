"""Items that take another's line get it when their job is published, whatever became of the other."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
from msgspec.structs import replace as replace_shape
from structlog.testing import capture_logs

from tests.stages.test_publish_failures import answer, closed, lose_work_file, shipping
from tests.support.store_verbs import lease_slices
from tests.worker.world import WorkerWorld, chat_lines
from tidegate.core.answers import results
from tidegate.core.errors import StoreUnavailable
from tidegate.core.ids import item_id
from tidegate.core.job_controls import Canary, JobControls, MaxErrors
from tidegate.core.job_shape import JobShape
from tidegate.core.nouns import Finished, Job, JobFlush, Usage
from tidegate.core.states import JobState, Outcome
from tidegate.stages import publish_lines
from tidegate.stages import ship as ships
from tidegate.stages.tend import deadlines

pytestmark = pytest.mark.anyio

DEDUPE = JobShape(dedupe=True)


def same(count: int, kinds: int) -> list[bytes]:
    return [
        json.dumps(
            {
                "custom_id": f"c{number}",
                "body": {
                    "model": "m",
                    "temperature": 0,
                    "messages": [{"role": "user", "content": f"{number % kinds}"}],
                },
            }
        ).encode()
        for number in range(count)
    ]


async def fail(world: WorkerWorld, job: Job, number: int, line: bytes) -> None:
    worker, token = await world.worker(), world.id("worker")
    await lease_slices(world.store, worker, job.id, "m", 10, token)
    blob_id = world.id("blob")

    async def next_blob_id() -> str:
        await world.store.begin_blob(blob_id, "errors", worker)
        return blob_id

    log = await world.blobs.open_log(next_blob_id)
    await log.append(line)
    placed = await log.seal()
    failed = Finished(number, Outcome.FAILED, len(line), 0, token, Usage())
    await world.store.record_outcomes([JobFlush(job.id, [], None, [failed], placed)], [], [])
    await log.close()


async def published(world: WorkerWorld, job: Job) -> tuple[Job, list[Any], list[Any]]:
    assert await shipping(world).publish_all(await world.worker()) == 1
    ended = await world.look(job)
    files = [await world.file_bytes(file_id) for file_id in (ended.output_file_id, ended.error_file_id)]
    assert list(map(len, files)) == [ended.output_bytes, ended.error_bytes]
    output, errors = ([json.loads(line) for line in file.splitlines()] for file in files)
    assert Counter(one["custom_id"] for one in output + errors) == Counter(f"c{n}" for n in range(job.item_count))
    assert not list(world.scratch.iterdir())
    return ended, output, errors


async def test_a_job_is_done_when_what_runs_is_done(world: WorkerWorld) -> None:
    job = await world.started(same(6, 2), shape=DEDUPE)
    assert (job.item_count, job.run_count, job.copied.deduplicated) == (6, 2, 4)
    await answer(world, job, [0])
    assert (await world.look(job)).state is JobState.IN_PROGRESS
    await answer(world, job, [1])
    with capture_logs() as logged:
        ended, output, _ = await published(world, job)
    assert (ended.state, ended.answered_count, ended.failed_count) == (JobState.COMPLETED, 6, 0)
    assert [(one["completed"], one["failed"]) for one in logged if one["event"] == "job_completed"] == [(6, 0)]
    assert ended.usage == Usage(0, 0, 0, 0)
    sources = {one["id"]: one for one in output}
    copies = [one for one in output if "tidegate" in one]
    assert len(copies) == 4
    for copy in copies:
        source = sources[copy["tidegate"]["deduplicated"]]
        assert "tidegate" not in source
        assert int(copy["custom_id"][1:]) % 2 == int(source["custom_id"][1:]) % 2
        assert copy["response"] == source["response"]


async def test_an_ordered_job_has_copies_at_their_places(world: WorkerWorld) -> None:
    job = await world.started(same(6, 2), shape=DEDUPE, ordered=True)
    await answer(world, job, [1, 0])
    _, output, _ = await published(world, job)
    assert [one["custom_id"] for one in output] == [f"c{number}" for number in range(6)]


async def test_what_failed_fails_for_all_and_is_not_sent_again(world: WorkerWorld) -> None:
    job = await world.started(same(5, 2), shape=DEDUPE)
    await fail(world, job, 0, results.error_line(job.id, 0, b'"c0"', "upstream_refused", "no"))
    await answer(world, job, [1])
    ended, output, errors = await published(world, job)
    assert (ended.state, ended.answered_count, ended.failed_count) == (JobState.COMPLETED, 2, 3)
    assert {one["custom_id"] for one in errors} == {"c0", "c2", "c4"}
    assert {one["error"]["code"] for one in errors} == {"upstream_refused"}
    assert len({one["id"] for one in output + errors}) == 5


async def test_copies_of_answers_that_did_not_fit_are_counted_with_what_came_instead(world: WorkerWorld) -> None:
    job = await world.started(same(3, 1), shape=DEDUPE)
    line = results.error_line(job.id, 0, b'"c0"', "schema_invalid", "no")
    await fail(world, job, 0, results.with_members(line, [results.raw_member(b"{}"), results.cost_members((1, 0, 0))]))
    ended, _, errors = await published(world, job)
    assert [one["tidegate"]["raw"] for one in errors] == ["{}"] * 3
    assert sum("cost" in one["tidegate"] for one in errors) == 1
    # The outcome on record here does not say so of the first.
    assert ended.schema_invalid_count == 2


async def test_copies_of_what_never_ran_end_as_it_does(world: WorkerWorld) -> None:
    job = await world.started(same(6, 2), shape=DEDUPE)
    await answer(world, job, [0])
    await closed(world, job)
    ended, _, errors = await published(world, job)
    assert (ended.state, ended.answered_count, ended.cancelled_count) == (JobState.CANCELLED, 3, 3)
    assert {one["error"]["code"] for one in errors} == {"batch_cancelled"}
    assert all("tidegate" not in one for one in errors)


async def test_a_job_that_a_threshold_stopped_keeps_the_copies_of_what_it_has(world: WorkerWorld) -> None:
    job = await world.started(same(6, 2), shape=DEDUPE, controls=JobControls(max_errors=MaxErrors(count=0)))
    await fail(world, job, 0, results.error_line(job.id, 0, b'"c0"', "upstream_refused", "no"))
    assert await world.store.close_job(job.id, 0)
    ended, _, errors = await published(world, job)
    assert (ended.state, ended.failed_count, ended.stopped_by) == (JobState.FAILED, 6, "max_errors")
    assert Counter(one["error"]["code"] for one in errors) == {"upstream_refused": 3, "batch_failed": 3}


async def test_copies_cost_nothing_and_those_of_a_job_that_stops_at_its_cost_are_kept(world: WorkerWorld) -> None:
    job = await world.started(same(9, 3), shape=DEDUPE, controls=JobControls(max_cost_nano=100))
    await answer(world, job, [0], cost_nano=60)
    assert (await world.look(job)).stopped_by is None, "nine answers would cost 180, and one of three kinds costs 60"
    await answer(world, job, [1], cost_nano=60)
    assert await world.store.close_job(job.id, 0)
    ended, output, errors = await published(world, job)
    assert (ended.state, ended.stopped_by, ended.cost_nano) == (JobState.FAILED, "max_cost", 120)
    assert (len(output), Counter(one["error"]["code"] for one in errors)) == (6, {"batch_failed": 3})


async def test_copies_of_what_a_deadline_left_expire_with_it(world: WorkerWorld) -> None:
    job = await world.started(same(6, 2), shape=DEDUPE, window_ms=60_000)
    await answer(world, job, [1])
    world.clock.advance(60_001)
    assert await deadlines.tend(world.store) == 1
    assert await world.store.close_job(job.id, 0)
    ended, output, errors = await published(world, job)
    assert (ended.state, ended.answered_count, ended.expired_count) == (JobState.EXPIRED, 3, 3)
    assert {one["custom_id"] for one in output} == {"c1", "c3", "c5"}
    assert {one["error"]["code"] for one in errors} == {"batch_expired"}


async def test_unchanged_lines_take_the_answers_of_an_earlier_job(world: WorkerWorld) -> None:
    lines = chat_lines(4)
    first = await world.started(lines, shape=JobShape(overrides={"seed": 1}))
    await answer(world, first, [0, 2])
    await closed(world, first)
    await published(world, first)
    edited = [lines[2], chat_lines(1, "other", first=0)[0], lines[1], lines[3]]
    second = await world.started(edited, shape=JobShape(overrides={"seed": 1}, reuse_from=first.id))
    assert (second.run_count, second.copied.reused) == (3, 1), "c2 alone was answered and is unchanged"
    await world.store.forget_job(first.id)
    await closed(world, second)
    assert await shipping(world).publish_all(await world.worker()) == 1
    ended = await world.look(second)
    assert (ended.state, ended.answered_count, ended.cancelled_count) == (JobState.CANCELLED, 1, 3)
    [line] = [json.loads(line) for line in (await world.file_bytes(ended.output_file_id)).splitlines()]
    assert (line["custom_id"], line["tidegate"]) == ("c2", {"reused": item_id(first.id, 2)})
    assert not list(world.scratch.iterdir())


@pytest.mark.parametrize("shape", [JobShape(), JobShape(dedupe=True), JobShape(overrides={"seed": 2})])
async def test_a_job_that_an_earlier_one_answered_runs_nothing_and_ends(world: WorkerWorld, shape: JobShape) -> None:
    lines = chat_lines(3)
    first = await world.started(lines)
    await answer(world, first, [0, 1, 2])
    await published(world, first)
    again = replace_shape(shape, reuse_from=first.id)
    second = await world.started(lines, shape=again, canary=Canary(2, 0, "wait"), ordered=True)
    if shape.overrides:
        assert second.copied.reused == 0, "the bodies that were sent differ"
        return
    assert second.state is JobState.FINALIZING
    ended, output, _ = await published(world, second)
    assert (ended.state, ended.answered_count, ended.copied.reused) == (JobState.COMPLETED, 3, 3)
    assert [one["custom_id"] for one in output] == ["c0", "c1", "c2"]
    third = await world.started(lines, shape=JobShape(reuse_from=second.id))
    assert (await published(world, third))[1][0]["tidegate"]["reused"] == output[0]["id"]


@pytest.mark.parametrize("read", ["", "input_file_id", "output_file_id"])
async def test_a_job_whose_earlier_one_is_gone_runs_nothing(
    world: WorkerWorld, monkeypatch: pytest.MonkeyPatch, read: str
) -> None:
    """It may be deleted before it is read, or while a file of it is."""
    first = await world.started(chat_lines(2))
    await answer(world, first, [0, 1])
    first, *_ = await published(world, first)
    second = await world.job(chat_lines(2), shape=JobShape(reuse_from=first.id))
    if read:
        list_extents = world.store.list_extents

        async def list_too_late(file_id: str, *arguments: Any) -> Any:
            if file_id == getattr(first, read):
                await world.store.forget_job(first.id)
            return await list_extents(file_id, *arguments)

        monkeypatch.setattr(world.store, "list_extents", list_too_late)
    else:
        await world.store.forget_job(first.id)
    assert await world.ingest().next(await world.worker())
    ended = await world.look(second)
    assert (ended.state, ended.errors[0].code, ended.item_count) == (JobState.FAILED, "reuse_source_gone", 0)
    assert not list(world.scratch.iterdir())


async def test_a_lost_work_file_ends_the_job_all_the_same(world: WorkerWorld) -> None:
    job = await world.started(same(4, 1), shape=DEDUPE)
    await answer(world, job, [0])
    lose_work_file(world, job)
    assert await shipping(world).publish_all(await world.worker()) == 1
    ended = await world.look(job)
    assert (ended.state, ended.answered_count, ended.failed_count) == (JobState.COMPLETED, 1, 3)
    errors = [json.loads(line) for line in (await world.file_bytes(ended.error_file_id)).splitlines()]
    assert [(one["custom_id"], one["error"]["code"]) for one in errors] == [(None, "internal_error")] * 3
    assert item_id(job.id, 3) == errors[-1]["id"]


async def test_results_in_many_parts_and_pages_are_read_as_one(
    world: WorkerWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers of several flushes and workers, and outcomes and parts of files that come a few at a time."""
    job = await world.started(same(12, 5), shape=DEDUPE, ordered=True, slice_items=2)
    for numbers in ([3, 0], [4], [1]):
        await answer(world, job, numbers)
    await closed(world, job)
    list_extents = world.store.list_extents

    async def one_at_a_time(file_id: str, at: int, _: int) -> Any:
        return await list_extents(file_id, at, 1)

    with monkeypatch.context() as patch:
        patch.setattr(ships, "_PAGE", 2)
        patch.setattr(ships, "WRITE_BYTES", 300)
        patch.setattr(publish_lines, "WRITE_BYTES", 300)
        patch.setattr(world.store, "list_extents", one_at_a_time)
        assert await shipping(world).publish_all(await world.worker()) == 1
    ended = await world.look(job)
    files = [await world.file_lines(file_id) for file_id in (ended.output_file_id, ended.error_file_id)]
    assert [[one["custom_id"] for one in lines] for lines in files] == [
        [f"c{number}" for number in range(12) if number % 5 != 2],
        ["c2", "c7"],
    ]
    assert (ended.answered_count, ended.cancelled_count) == (10, 2)


@pytest.mark.parametrize("lost", ["take_step", "publish_job"])
async def test_a_step_whose_begin_or_end_is_unknown_is_given_back_before_the_next_look(
    world: WorkerWorld, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    job, worker = await world.started(same(2, 2)), await world.worker()
    await answer(world, job, [0, 1])
    ship, take_step = shipping(world), world.store.take_step
    with monkeypatch.context() as patch:

        async def unknown(*what: Any, **__: Any) -> None:
            if lost == "take_step":
                assert await take_step(*what)
            raise StoreUnavailable("away")

        patch.setattr(world.store, lost, unknown)
        with pytest.raises(StoreUnavailable):
            await ship.publish_all(worker)
    assert await ship.publish_all(worker) == 1, "and not only when its lease is over"
    assert (await world.look(job)).state is JobState.COMPLETED


@pytest.mark.parametrize("garbage", [b"{" * 16, b"\0" * 16, b"\xff" * 16])
async def test_items_that_copy_a_damaged_line_fail_and_hold_nothing_up(world: WorkerWorld, garbage: bytes) -> None:
    job = await world.started(same(6, 2), shape=DEDUPE)
    await answer(world, job, [0, 1])
    damaged = results.response_line(item_id(job.id, 0), b'"c0"', 200, b'{"choices":[{}]}')
    [path] = [one for one in world.scratch.parent.rglob("*") if one.is_file() and damaged in one.read_bytes()]
    path.write_bytes(path.read_bytes().replace(damaged, damaged.replace(b'{"choices":[{}]}', garbage)))
    assert await shipping(world).publish_all(await world.worker()) == 1
    ended = await world.look(job)
    assert (ended.state, ended.answered_count, ended.failed_count) == (JobState.COMPLETED, 4, 2)
    assert ended.error_file_id is not None
    errors = [json.loads(line) for line in (await world.file_bytes(ended.error_file_id)).splitlines()]
    assert {(one["custom_id"], one["error"]["code"]) for one in errors} == {
        ("c2", "internal_error"),
        ("c4", "internal_error"),
    }
