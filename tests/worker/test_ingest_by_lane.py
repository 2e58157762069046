"""Small inputs are ingested together and in this process, large ones a few at a time, and no tenant keeps another waiting."""

from __future__ import annotations

import asyncio
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import wait_until_async
from tests.worker.world import WorkerWorld, chat_lines, here
from tidegate.core.errors import BlobUnavailable, IngestCrashed, IngestFailed, StoreUnavailable
from tidegate.core.input.lines import LineRules
from tidegate.core.input.turns import IngestLane, IngestLimits
from tidegate.core.nouns import IngestPlan, Job
from tidegate.core.policies import Policies
from tidegate.core.states import JobState
from tidegate.stages.ingest.ingest import SMALL_AT_ONCE, IngestStage, RunPass
from tidegate.stages.ingest.ingest_file import InputPasses

pytestmark = pytest.mark.anyio

# Sixteen inputs of one line are small together, and one of twenty lines is not.
LIMITS = IngestLimits(small_bytes_max=12_000, passes_max=3)
LARGE_LINES = 20
# Work files that are being written. They count as in use as long as their process lives.
WRITTEN = "select count(*) from blobs where state = 'writing' and kind = 'work'"


class Gate:
    """A pass that waits until it is let through, and knows whose inputs wait."""

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.counts: Counter[IngestLane] = Counter()

    async def __call__(self, input_path: Path, work_path: Path, rules: LineRules, lane: IngestLane) -> IngestPlan:
        self.counts[lane] += 1
        if lane is IngestLane.LARGE:
            await self.open.wait()
        return await here(input_path, work_path, rules, lane)


def ingest_stage(world: WorkerWorld, run_pass: RunPass) -> IngestStage:
    return IngestStage(world.store, world.blobs, world.entropy, world.scratch, Policies(), run_pass, LIMITS)


async def states(world: WorkerWorld, jobs: list[Job]) -> list[str]:
    return [(await world.look(job)).state for job in jobs]


async def test_one_tenants_large_inputs_leave_a_pass_for_another_tenant(world: WorkerWorld) -> None:
    a, b = await world.caller("a"), await world.caller("b")
    theirs = [await world.job(chat_lines(LARGE_LINES), caller=a) for _ in range(5)]
    gate, worker = Gate(), await world.worker()
    ingest = ingest_stage(world, gate)
    passes = [asyncio.create_task(ingest.next_large(worker)) for _ in range(3)]

    async def settled() -> None:
        """Wait until every pass has come to the gate or ended."""

        def there() -> bool:
            return gate.counts[IngestLane.LARGE] + sum(task.done() for task in passes) >= len(passes)

        await wait_until_async(there, 30, "every pass to come to the gate or to end")

    await settled()
    assert gate.counts == {IngestLane.LARGE: 2}, "the third pass is kept for a tenant that has none"
    assert sum(task.done() for task in passes) == 1
    small = await world.job(chat_lines(1), caller=b)
    assert await ingest.next_small(worker)
    assert await states(world, [small]) == [JobState.IN_PROGRESS]
    large = await world.job(chat_lines(LARGE_LINES), caller=b)
    passes.append(asyncio.create_task(ingest.next_large(worker)))
    await settled()
    assert gate.counts[IngestLane.LARGE] == 3
    gate.open.set()
    await asyncio.gather(*passes)
    assert await states(world, [large]) == [JobState.IN_PROGRESS]
    while await ingest.next_large(worker):
        pass
    assert set(await states(world, theirs)) == {JobState.IN_PROGRESS}


async def test_small_inputs_are_ingested_some_at_a_time_and_a_bad_one_harms_no_other(world: WorkerWorld) -> None:
    caller = await world.caller("a")
    jobs = [await world.job(chat_lines(1), caller=caller) for _ in range(SMALL_AT_ONCE + 1)]
    bad = await world.job([b"nonsense"], caller=caller)
    worker, ingest = await world.worker(), ingest_stage(world, here)
    assert await ingest.next_small(worker)
    assert Counter(await states(world, [bad, *jobs])) == {
        JobState.FAILED: 1,
        JobState.IN_PROGRESS: SMALL_AT_ONCE - 1,
        JobState.VALIDATING: 2,
    }
    assert await ingest.next_small(worker)
    assert not await ingest.next_small(worker)
    assert set(await states(world, jobs)) == {JobState.IN_PROGRESS}
    assert await world.rows(WRITTEN) == [(0,)]
    assert list(world.scratch.iterdir()) == []


async def test_one_of_many_that_fails_is_tried_again_and_the_others_start(world: WorkerWorld) -> None:
    caller = await world.caller("a")
    jobs = [await world.job(chat_lines(1), caller=caller) for _ in range(3)]
    failures: list[Exception] = [IngestFailed("disk full"), IngestCrashed("broke")]

    async def fails_twice(input_path: Path, work_path: Path, rules: LineRules, lane: IngestLane) -> IngestPlan:
        if failures:
            raise failures.pop()
        return await here(input_path, work_path, rules, lane)

    worker, ingest = await world.worker(), ingest_stage(world, fails_twice)
    assert await ingest.next_small(worker)
    assert Counter(await states(world, jobs)) == {JobState.IN_PROGRESS: 1, JobState.VALIDATING: 2}
    world.clock.advance(2_000)
    assert await ingest.next_small(worker)
    assert set(await states(world, jobs)) == {JobState.IN_PROGRESS}


async def test_steps_whose_end_is_unknown_are_given_back(world: WorkerWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = [await world.job(chat_lines(1)) for _ in range(3)]
    worker, ingest = await world.worker(), ingest_stage(world, here)
    start_jobs = world.store.start_jobs

    async def away(*_: Any) -> set[str]:
        raise StoreUnavailable("away")

    monkeypatch.setattr(world.store, "start_jobs", away)
    with pytest.raises(StoreUnavailable):
        await ingest.next_small(worker)
    monkeypatch.setattr(world.store, "start_jobs", start_jobs)
    assert await ingest.next_small(worker), "the owner lives, so only it can give them back"
    assert set(await states(world, jobs)) == {JobState.IN_PROGRESS}


async def test_large_inputs_whose_end_is_unknown_take_no_pass_from_their_tenant(
    world: WorkerWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, worker, ingest = await world.job(chat_lines(LARGE_LINES)), await world.worker(), ingest_stage(world, here)

    async def away(*_: Any) -> set[str]:
        raise StoreUnavailable("away")

    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(world.store, "start_jobs", away)
        for _ in range(LIMITS.tenant_passes_max):
            with pytest.raises(StoreUnavailable):
                await ingest.next_large(worker)
    assert await ingest.next_large(worker)
    assert await states(world, [job]) == [JobState.IN_PROGRESS]


async def test_a_job_cancelled_during_its_pass_ends_and_the_others_start(world: WorkerWorld) -> None:
    jobs = [await world.job(chat_lines(1)) for _ in range(3)]

    async def cancels(input_path: Path, work_path: Path, rules: LineRules, lane: IngestLane) -> IngestPlan:
        await world.store.cancel_job(jobs[1].tenant_id, jobs[1].id)
        return await here(input_path, work_path, rules, lane)

    assert await ingest_stage(world, cancels).next_small(await world.worker())
    assert await states(world, jobs) == [JobState.IN_PROGRESS, JobState.CANCELLED, JobState.IN_PROGRESS]
    assert await world.rows(WRITTEN) == [(0,)], "nothing keeps the bytes that the cancelled one would have had"


async def test_a_work_file_that_could_not_be_made_durable_is_written_again_and_leaves_nothing(
    world: WorkerWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, worker, ingest = await world.job(chat_lines(1)), await world.worker(), ingest_stage(world, here)

    async def full(*_: Any) -> None:
        raise BlobUnavailable("no space left")

    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(world.blobs, "adopt", full)
        assert await ingest.next_small(worker)
    assert await world.rows(WRITTEN) == [(0,)]
    world.clock.advance(2_000)
    assert await ingest.next_small(worker)
    assert await states(world, [job]) == [JobState.IN_PROGRESS]


async def test_a_small_input_needs_no_process(world: WorkerWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_process(*_: Any, **__: Any) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(asyncio, "create_subprocess_exec", no_process)
    monkeypatch.setattr(subprocess, "Popen", no_process)
    job, worker = await world.job(chat_lines(3)), await world.worker()
    assert await ingest_stage(world, InputPasses()).next_small(worker)
    assert await states(world, [job]) == [JobState.IN_PROGRESS]


async def test_a_small_pass_that_breaks_says_where_and_not_what(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(*_: Any, **__: Any) -> IngestPlan:
        raise RuntimeError("the caller's secret")

    monkeypatch.setattr("tidegate.stages.ingest.ingest_file.ingest_file", breaks)
    with pytest.raises(IngestCrashed, match="RuntimeError") as crash:
        await InputPasses()(tmp_path, tmp_path, LineRules("/v1/chat/completions"), IngestLane.SMALL)
    assert "secret" not in str(crash.value)


async def test_a_small_pass_that_finds_no_disk_is_clear(tmp_path: Path) -> None:
    with pytest.raises(IngestFailed, match="No such file"):
        await InputPasses()(tmp_path / "absent", tmp_path / "work", LineRules("/v1/chat/completions"), IngestLane.SMALL)


@pytest.mark.parametrize(("weight", "weight_milli"), [(0.001, 1), (0.0004, 1), (2.5, 2_500)])
async def test_a_started_job_weighs_what_its_tenant_does_and_never_nothing(
    world: WorkerWorld, weight: float, weight_milli: int
) -> None:
    class Weights(Policies):
        def weight(self, tenant: str) -> float:
            return {"light": weight}[tenant]

    await world.job(chat_lines(1), caller=await world.caller("light"))
    assert await world.ingest(policies=Weights()).next(await world.worker())
    assert [flow.weight_milli for flow in await world.store.awake_flows(None, 10)] == [weight_milli]
