"""What a worker decides on every store: it remembers which models had work, and still misses none that has some now."""

from __future__ import annotations

import pytest

from tests.contracts.store_world import MODEL, StoreWorld, plan_of
from tests.support.ports import HandClock
from tidegate.core.job_controls import JobControls
from tidegate.core.nouns import IngestPlan
from tidegate.core.policies import Policies
from tidegate.core.schedule import Choice, Reason
from tidegate.worker.scheduler import Scheduler

pytestmark = pytest.mark.anyio


class Decider:
    """A chooser with room for all models but those that are closed."""

    def __init__(self, world: StoreWorld) -> None:
        self.clock = HandClock(0.0)
        self.scheduler = Scheduler(world.store, self.clock, Policies(), 64)
        self.closed: set[str] = set()
        self.asked: list[str] = []

    def room(self, model: str) -> tuple[int, str | None]:
        self.asked.append(model)
        return (0, Reason.RESTING) if model in self.closed else (8, None)

    async def choose(self) -> Choice:
        self.asked = []
        return await self.scheduler.choose("unknown", self.room, 8)


def jobs_of(choice: Choice) -> set[str]:
    return {pick.job_id for pick in choice.picks}


async def test_a_model_that_wakes_after_the_last_decision_is_dealt_in_the_next(world: StoreWorld) -> None:
    decider, caller = Decider(world), await world.caller()
    assert await decider.choose() == Choice([], [])
    first = await world.running(caller, 1)
    assert jobs_of(await decider.choose()) == {first.id}
    other = await world.ingested(await world.job(caller), plan_of(1, model="other"))
    assert jobs_of(await decider.choose()) == {first.id, other.id}
    assert sorted(decider.asked) == [MODEL, "other"], "each model's room is asked for once"
    assert jobs_of(await decider.choose()) == {first.id, other.id}


async def test_one_that_wakes_while_all_others_are_closed_is_dealt_too(world: StoreWorld) -> None:
    decider, caller = Decider(world), await world.caller()
    await world.running(caller, 1)
    await decider.choose()
    decider.closed = {MODEL}
    [skip] = (await decider.choose()).skips
    assert (skip.model, skip.reason) == (MODEL, Reason.RESTING)
    other = await world.ingested(await world.job(caller), plan_of(1, model="other"))
    choice = await decider.choose()
    assert jobs_of(choice) == {other.id}
    assert [(skip.model, skip.reason) for skip in choice.skips] == [(MODEL, Reason.RESTING)]


async def test_a_model_that_sleeps_gets_no_picks_and_no_skips(world: StoreWorld) -> None:
    decider, caller = Decider(world), await world.caller()
    job = await world.running(caller, 1)
    other = await world.ingested(await world.job(caller), plan_of(1, model="other"))
    await decider.choose()
    await world.store.cancel_job(caller.tenant_id, other.id)
    await world.store.close_job(other.id, 10**12)
    assert await world.store.rest_flow("other", f"tenant:{caller.tenant_id}")
    decider.closed = {"other"}
    choice = await decider.choose()
    assert (jobs_of(choice), choice.skips) == ({job.id}, [])
    await decider.choose()
    assert decider.asked == [MODEL], "it is not asked for again"


async def test_how_fast_models_are_is_asked_for_a_few_at_a_time(world: StoreWorld) -> None:
    decider, caller = Decider(world), await world.caller()
    for number in range(5):
        await world.ingested(await world.job(caller), plan_of(1, model=f"m{number}"))
    await decider.choose()
    assert set(decider.scheduler._paced_at_ms.values()) == {0.0}
    seen = []
    for at_ms in (4_999.0, 5_000.0, 5_001.0, 5_002.0, 5_003.0):
        decider.clock.monotonic = at_ms
        await decider.choose()
        seen.append(sum(at > 0 for at in decider.scheduler._paced_at_ms.values()))
    assert seen == [0, 2, 4, 5, 5]


async def test_work_that_is_due_and_not_leased_is_named_by_model(world: StoreWorld) -> None:
    caller = await world.caller()
    assert await world.store.unleased_models(10) == []
    job = await world.running(caller, 1, 1)
    await world.ingested(await world.job(caller), plan_of(1, model="other"))
    assert await world.store.unleased_models(10) == [MODEL, "other"]
    assert await world.store.unleased_models(1) == [MODEL]
    worker = await world.worker()
    [held] = await world.lease(worker, job, 1)
    assert await world.store.unleased_models(10) == ["other"], "of the other something is out"
    await world.store.release_slice(job.id, held.first, held.token, 5_000)
    assert await world.store.unleased_models(10) == [MODEL, "other"], "its second slice is due"


async def test_work_that_is_paused_or_late_or_rests_is_not_due(world: StoreWorld) -> None:
    caller, store = await world.caller(), world.store
    paused = await world.running(caller, 1)
    assert await store.pause_job(caller.tenant_id, paused.id)
    assert await store.unleased_models(10) == []
    moment = world.clock.now + 1_000
    later = await world.running(caller, 1, controls=JobControls(not_before=moment), window_ms=5_000)
    await world.clock.advance(999)
    assert await store.unleased_models(10) == []
    await world.clock.advance(1)
    assert await store.unleased_models(10) == [MODEL]
    await world.clock.advance(later.created_at + 4_999 - world.clock.now)
    assert await store.unleased_models(10) == [MODEL]
    await world.clock.advance(1)
    assert await store.unleased_models(10) == [], "its time is over"


async def test_work_is_due_where_a_slice_of_the_job_and_of_the_model_is_ready(world: StoreWorld) -> None:
    caller, worker, store = await world.caller(), await world.worker(), world.store
    paused = await world.running(caller, 1)
    assert await store.pause_job(caller.tenant_id, paused.id)
    slices = [*plan_of(1, 1).slices, plan_of(2, 1, model="other").slices[1]]
    job = await world.ingested(await world.job(caller), IngestPlan(3, None, slices, 300, 0, 0))
    done, resting = await world.lease(worker, job)
    await world.answer(await world.log(), job, done.first)
    await store.record_outcomes([], [(job.id, done.first, done.token)], [])
    await store.release_slice(job.id, resting.first, resting.token, 5_000)
    assert await store.unleased_models(10) == ["other"]
    await world.clock.advance(5_000)
    assert await store.unleased_models(10) == [MODEL, "other"]
