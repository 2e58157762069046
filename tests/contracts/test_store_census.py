"""How much there is of everything."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from tests.contracts.store_world import CHAT, LEASE_MS, MODEL, StoreWorld
from tests.contracts.test_store_publish import closed, publish, rest_of
from tidegate.core.nouns import IngestPlan, SlicePlan
from tidegate.core.states import Outcome

pytestmark = pytest.mark.anyio


async def test_a_census_counts_jobs_items_the_queue_and_workers(world: StoreWorld) -> None:
    caller, worker = await world.caller(), await world.worker()
    waiting, running = await world.running(caller, 3), await world.running(caller, 2)
    await world.job(caller)
    [held] = await world.lease(worker, running)
    await world.clock.advance(500)
    census = await world.store.census()
    assert census.jobs == {"in_progress": 2, "validating": 1}
    assert sum(part.jobs for part in census.queue) == 2
    assert sum(part.items for part in census.queue) == waiting.item_count + running.item_count
    assert {(part.scope, part.size_class) for part in census.queue} == {("organization", "xs")}
    assert sorted((part.status, part.jobs, part.items) for part in census.queue) == [
        ("in_progress", 1, running.item_count),
        ("queued", 1, waiting.item_count),
    ]
    assert max(part.age_ms for part in census.queue) >= 500
    assert (census.leased_items, census.active_workers, census.leased_age_ms) == (held.count, 1, 500)
    assert census.workers >= 1
    await world.answer(await world.log(), running, 0, 1)
    assert (await world.store.census()).outcomes["completed"] == 2


async def test_a_census_counts_a_worker_until_its_lease_is_over(world: StoreWorld) -> None:
    await world.worker()
    await world.clock.advance(LEASE_MS - 1)
    assert (await world.store.census()).workers == 1
    await world.clock.advance(1)
    assert (await world.store.census()).workers == 0


async def test_a_census_counts_what_is_out_of_a_job_of_two_models_once(world: StoreWorld) -> None:
    pieces = [SlicePlan(0, 3, MODEL, CHAT, 0, 300, 150), SlicePlan(3, 4, "other", CHAT, 300, 400, 200)]
    plan = IngestPlan(7, MODEL, pieces, 700, 560, 140)
    job = await world.ingested(await world.job(await world.caller()), plan)
    await world.lease(await world.worker(), job)
    assert (await world.store.census()).leased_items == 3


async def test_a_census_counts_items_by_what_became_of_them(world: StoreWorld) -> None:
    job, _, token = await closed(world, answered=1, failed=2, rest=7)
    rest = await rest_of(world, job, *range(3, 10))
    await publish(world, job, token, rest=replace(rest, outcomes=[Outcome.EXPIRED] * 3 + [Outcome.CANCELLED] * 4))
    await world.running(await world.caller(), 5)
    found = await world.store.census()
    assert found.outcomes == {"completed": 1, "failed": 2, "expired": 3, "cancelled": 4}
    assert found.jobs == {"cancelled": 1, "in_progress": 1}
