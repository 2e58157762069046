"""An input that cannot be ingested now is tried again, ever more rarely; one that kills its pass each time ends its job."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.worker.world import HOUR_MS, WorkerWorld, chat_lines, here
from tidegate.core.errors import BlobUnavailable, IngestCrashed, IngestFailed, StoreUnavailable
from tidegate.core.input.lines import LineRules
from tidegate.core.input.turns import IngestLane
from tidegate.core.nouns import Caller, IngestPlan
from tidegate.core.states import JobState
from tidegate.stages.ingest.ingest import CRASHES_MAX, RunPass
from tidegate.stages.tend import deadlines
from tidegate.store.tenants.keys import KeyRights

pytestmark = pytest.mark.anyio


class Passes:
    """A pass that fails so many times, and counts."""

    def __init__(self, *failures: Exception) -> None:
        self.failures = list(failures)
        self.count = 0

    async def __call__(self, input_path: Path, work_path: Path, rules: LineRules, lane: IngestLane) -> IngestPlan:
        self.count += 1
        if self.failures:
            raise self.failures.pop(0)
        return await here(input_path, work_path, rules, lane)


async def test_a_full_disk_is_waited_out_with_growing_pauses_until_the_deadline(world: WorkerWorld) -> None:
    job, worker = await world.job(chat_lines(3)), await world.worker()
    passes = Passes(*[IngestFailed("disk full")] * 10_000)
    ingest = world.ingest(passes)
    for _ in range(HOUR_MS // 1000):
        while await ingest.next(worker):
            pass
        world.clock.advance(1000)
        await world.store.beat(worker, 30_000)
    assert 50 <= passes.count <= 70, "every 64 seconds in the end, and never hot"
    await deadlines.tend(world.store)
    assert (await world.look(job)).state is JobState.EXPIRED
    assert not await ingest.next(worker)


async def test_a_try_that_failed_leaves_no_half_of_a_work_file(world: WorkerWorld) -> None:
    """On a full disk they would pile up."""

    async def half(input_path: Path, work_path: Path, rules: LineRules, lane: IngestLane) -> IngestPlan:
        await asyncio.to_thread(work_path.write_bytes, b"half")
        raise IngestFailed("disk full")

    await world.job(chat_lines(3))
    assert await world.ingest(half).next(await world.worker())
    assert list(world.scratch.iterdir()) == []


async def test_an_outage_however_long_does_not_fail_the_job(world: WorkerWorld) -> None:
    job, worker = await world.job(chat_lines(3)), await world.worker(10 * HOUR_MS)
    ingest = world.ingest(Passes(*[BlobUnavailable("away")] * 20))
    while (await world.look(job)).state is JobState.VALIDATING:
        await ingest.next(worker)
        world.clock.advance(64_000)
    assert (await world.look(job)).state is JobState.IN_PROGRESS
    assert await world.rows("select count(*) from blobs where state = 'writing'") == [(0,)], (
        "no work file is left behind"
    )


async def test_what_a_failed_try_may_have_taken_is_given_back_once(
    world: WorkerWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store may have taken inputs for a try that got no answer."""
    job, worker = await world.job(chat_lines(3)), await world.worker()
    take, give_back, tokens = world.store.take_ingests, world.store.give_back_ingests, []

    async def take_and_vanish(*arguments: Any) -> Any:
        await take(*arguments)
        monkeypatch.setattr(world.store, "take_ingests", take)
        raise StoreUnavailable("away")

    async def noted(owner: str, token: str) -> None:
        tokens.append(token)
        await give_back(owner, token)

    monkeypatch.setattr(world.store, "take_ingests", take_and_vanish)
    monkeypatch.setattr(world.store, "give_back_ingests", noted)
    ingest = world.ingest()
    with pytest.raises(StoreUnavailable):
        await ingest.next(worker)
    assert await ingest.next(worker)
    assert (await world.look(job)).state is JobState.IN_PROGRESS
    assert not await ingest.next(worker)
    assert len(tokens) == 1


async def test_a_pass_that_dies_each_time_fails_the_job_with_a_reason(world: WorkerWorld) -> None:
    job, other = await world.job(chat_lines(3)), await world.job(chat_lines(2))
    worker = await world.worker(10 * HOUR_MS)
    ingest = world.ingest(Passes(*[IngestCrashed("ended with -11")] * 1_000))
    for _ in range(CRASHES_MAX):
        assert (await world.look(job)).state is JobState.VALIDATING
        while await ingest.next(worker):
            pass
        world.clock.advance(64_000)
    for one in (job, other):
        ended = await world.look(one)
        assert ended.state is JobState.FAILED
        assert [error.code for error in ended.errors] == ["ingest_failed"]
    assert not await ingest.next(worker)


async def test_the_crashes_of_the_oldest_job_are_forgotten_first(
    world: WorkerWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidegate.stages.ingest.ingest._CRASHED_MAX", 2)
    oldest, worker = await world.job(chat_lines(1)), await world.worker(10 * HOUR_MS)
    ingest = world.ingest(Passes(*[IngestCrashed("ended with -11")] * 1_000))
    assert await ingest.next(worker)
    await world.store.cancel_job(oldest.tenant_id, oldest.id)
    others = [await world.job(chat_lines(2)), await world.job(chat_lines(3))]
    for _ in range(CRASHES_MAX):
        while await ingest.next(worker):
            pass
        world.clock.advance(64_000)
    assert [(await world.look(one)).state for one in others] == [JobState.FAILED] * 2


async def test_crashes_with_other_failures_between_them_are_not_the_inputs_doing(world: WorkerWorld) -> None:
    job, worker = await world.job(chat_lines(3)), await world.worker(10 * HOUR_MS)
    ingest = world.ingest(Passes(*[IngestCrashed("-9"), IngestFailed("disk full")] * CRASHES_MAX))
    while (await world.look(job)).state is JobState.VALIDATING:
        await ingest.next(worker)
        world.clock.advance(64_000)
    assert (await world.look(job)).state is JobState.IN_PROGRESS


async def test_a_cancelled_job_ends_though_its_pass_keeps_failing(world: WorkerWorld) -> None:
    job, worker = await world.job(chat_lines(3)), await world.worker()
    ingest = world.ingest(Passes(*[IngestFailed("disk full")] * 3))
    assert await ingest.next(worker)
    await world.store.cancel_job(job.tenant_id, job.id)
    await deadlines.tend(world.store)
    assert (await world.look(job)).state is JobState.CANCELLED


@pytest.mark.parametrize("named", ["models", "resources"])
async def test_a_key_that_names_models_or_resources_admits_only_those(world: WorkerWorld, named: str) -> None:
    tenant_id = await world.store.put_tenant(world.id("tenant"), "acme")
    caller = Caller(tenant_id, "k1")
    rights: dict[str, Any] = {"models": "[]", named: '["small"]'}
    await world.store.put_key(caller, b"", "", KeyRights(**rights))
    fine = await world.job(chat_lines(2, "small"), caller=caller)
    mixed = await world.job([*chat_lines(2, "small"), *chat_lines(2, "large", 2)], caller=caller)
    worker, ingest = await world.worker(), world.ingest()
    while await ingest.next(worker):
        pass
    assert (await world.look(fine)).state is JobState.IN_PROGRESS
    refused = await world.look(mixed)
    assert refused.state is JobState.FAILED
    assert [(error.code, error.line, error.param) for error in refused.errors] == [
        ("model_not_found", 3, "body.model"),
        ("model_not_found", 4, "body.model"),
    ]
    assert "key does not allow" in refused.errors[0].message


async def test_an_input_whose_bytes_changed_after_upload_runs_nothing(world: WorkerWorld) -> None:
    job, worker = await world.job(chat_lines(3)), await world.worker()
    extents = await world.store.list_extents((await world.look(job)).input_file_id, 0, 1)
    path = await world.blobs.local_path(extents[0].blob_id, Path("/nowhere"))
    path.write_bytes(path.read_bytes().replace(b"custom_id", b"custom_iD", 1))
    assert await world.ingest(here).next(worker)
    ended = await world.look(job)
    assert ended.state is JobState.FAILED
    assert [error.code for error in ended.errors] == ["input_changed"]
    assert ended.item_count == 0


async def test_an_input_that_was_damaged_on_the_way_is_read_once_more(
    world: WorkerWorld, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    job, worker = await world.job(chat_lines(3)), await world.worker()
    damaged = [tmp_path / "damaged"]
    local_path = world.blobs.local_path

    async def once_damaged(blob_id: str, directory: Path) -> Path:
        path = await local_path(blob_id, directory)
        if not damaged:
            return path
        damaged[0].write_bytes(path.read_bytes().replace(b"custom_id", b"custom_iD", 1))
        return damaged.pop()

    monkeypatch.setattr(world.blobs, "local_path", once_damaged)
    assert await world.ingest(here).next(worker)
    assert ((await world.look(job)).state, damaged) == (JobState.IN_PROGRESS, [])


async def test_a_truncated_input_is_a_changed_one_even_when_its_lines_are_good(world: WorkerWorld) -> None:
    job, worker = await world.job(chat_lines(3)), await world.worker()
    extents = await world.store.list_extents((await world.look(job)).input_file_id, 0, 1)
    path = await world.blobs.local_path(extents[0].blob_id, Path("/nowhere"))
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:2]))
    assert await world.ingest(here).next(worker)
    assert [error.code for error in (await world.look(job)).errors] == ["input_changed"]


@pytest.mark.parametrize("run_pass", [here, Passes(IngestFailed("disk full"))], ids=["read", "failed"])
async def test_a_local_copy_of_an_input_goes_when_its_pass_has_ended(
    world: WorkerWorld, monkeypatch: pytest.MonkeyPatch, run_pass: RunPass
) -> None:
    """An object store makes one. Many of them would fill the disk."""
    job, worker = await world.job(chat_lines(3)), await world.worker()
    local_path, copies = world.blobs.local_path, list[Path]()

    async def copied(blob_id: str, directory: Path) -> Path:
        copies.append(directory / blob_id)
        copies[-1].write_bytes((await local_path(blob_id, directory)).read_bytes())
        return copies[-1]

    monkeypatch.setattr(world.blobs, "local_path", copied)
    assert await world.ingest(run_pass).next(worker)
    assert (await world.look(job)).state in (JobState.IN_PROGRESS, JobState.VALIDATING)
    assert (len(copies), list(world.scratch.iterdir())) == (1, [])
