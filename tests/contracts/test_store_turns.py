"""Whose turn every store says it is, where a verb would look again before it acts: a row that must not count takes the turn of no other.

Each test has one row for every reason not to count, beside those that do."""

from __future__ import annotations

from typing import Any

import pytest

from tests.contracts.store_world import LEASE_MS, MODEL, StoreWorld, plan_of
from tests.support.store_verbs import run_statement
from tidegate.core.input.turns import LINE_BYTES, IngestLane
from tidegate.core.job_controls import JobControls
from tidegate.core.nouns import Caller, Job, JobWebhook, WorkerDuty
from tidegate.core.schedule.share_owner import tenant_owner
from tidegate.core.states import JobState
from tidegate.core.webhooks import EVENT_TYPES

pytestmark = pytest.mark.anyio

OWNER = "owner:ours"
BYTES_MIN, BYTES_MAX = 20_000, 90_000


class Outbox:
    """Deliveries, each to an endpoint of its own."""

    def __init__(self, world: StoreWorld) -> None:
        self.world = world

    async def due(self, caller: Caller, wait_ms: int = 10) -> str:
        """The endpoint of a delivery that is due from now on; then so much time passes."""
        store = self.world.store
        job = await self.world.job(caller, webhook=JobWebhook("https://hooks.example.com/", EVENT_TYPES, b"1" * 32))
        await store.cancel_job(caller.tenant_id, job.id)
        assert await store.end_unstarted(job.id)
        await self.world.clock.advance(wait_ms)
        own = await store.webhook_endpoint_of_job(caller.tenant_id, job.id)
        assert own is not None
        return own.id

    async def held(self, caller: Caller, worker_id: str) -> tuple[str, dict[str, Any]]:
        """The endpoint of a delivery that a worker makes, and by what it is named."""
        endpoint_id, token = await self.due(caller), self.world.token()
        name = {"tenant_id": caller.tenant_id, "endpoint_id": endpoint_id}
        lease = {"worker_id": worker_id, "token": token, "count_max": 1}
        [(event_id,)] = await run_statement(self.world.store, "webhook_deliveries_lease", **name, **lease)
        return endpoint_id, {"event_id": event_id, "endpoint_id": endpoint_id, "token": token}

    async def delivered(self, caller: Caller, worker_id: str) -> str:
        endpoint_id, name = await self.held(caller, worker_id)
        assert await run_statement(self.world.store, "webhook_delivered", status=200, **name)
        return endpoint_id

    async def postponed(self, caller: Caller, worker_id: str) -> str:
        endpoint_id, name = await self.held(caller, worker_id)
        assert await run_statement(
            self.world.store, "webhook_postponed", status=500, failure="x", wait_ms=1_000_000, **name
        )
        return endpoint_id


async def test_tenants_with_a_delivery_that_is_due_and_free_come_by_what_they_have_out(world: StoreWorld) -> None:
    outbox, sender, lost = Outbox(world), await world.worker(10 * LEASE_MS), await world.worker()
    first, busy, second, full, waiting, held, orphan = [await world.caller(str(number)) for number in range(7)]
    await outbox.held(orphan, lost)
    assert await world.store.declare_gone(lost, leaving=True)
    await outbox.due(first)
    await outbox.due(busy)
    await outbox.due(second)
    await outbox.due(first)
    await outbox.held(busy, sender)
    for _ in range(2):
        await outbox.held(full, sender)
    await outbox.due(full)
    await outbox.delivered(waiting, sender)
    await outbox.postponed(waiting, sender)
    await outbox.held(held, sender)
    expected = [(orphan.tenant_id, 0), (first.tenant_id, 0), (second.tenant_id, 0), (busy.tenant_id, 1)]
    for count_max in (3, 4, 9):
        found = await run_statement(world.store, "webhook_tenants_due", tenant_max=2, count_max=count_max)
        assert found == expected[:count_max]


async def test_endpoints_with_a_delivery_that_is_due_and_free_come_by_what_they_have_out(world: StoreWorld) -> None:
    caller, outbox = await world.caller(), Outbox(world)
    sender, lost = await world.worker(10 * LEASE_MS), await world.worker()
    orphan, _ = await outbox.held(caller, lost)
    assert await world.store.declare_gone(lost, leaving=True)
    first, second, third = [await outbox.due(caller) for _ in range(3)]
    await outbox.delivered(caller, sender)
    await outbox.postponed(caller, sender)
    await outbox.held(caller, sender)
    await outbox.due(await world.caller("another"))
    expected = [(orphan, 0), (first, 0), (second, 0), (third, 0)]
    for count_max in (3, 4, 9):
        found = await run_statement(
            world.store, "webhook_endpoints_due", tenant_id=caller.tenant_id, endpoint_max=1, count_max=count_max
        )
        assert found == expected[:count_max]


async def input_of(world: StoreWorld, caller: Caller, ingest_bytes: int, owner: str = OWNER) -> Job:
    """A job whose ingest costs so many bytes."""
    file = await world.file(caller, size_bytes=ingest_bytes - LINE_BYTES, line_count=1)
    return await world.job(caller, file, share_owner=owner)


async def rest(world: StoreWorld, job: Job, delay_ms: int) -> None:
    """Let the ingest of a job fail."""
    token = world.token()
    assert await world.store.take_step(job.id, JobState.VALIDATING, await world.worker(), token)
    assert await world.store.drop_step(job.id, token, delay_ms)


async def not_ready(world: StoreWorld, *callers: Caller) -> None:
    """Inputs that wait for no worker of ours, one for each reason, one after the other for these tenants."""
    turns = iter(callers)
    await input_of(world, next(turns), BYTES_MIN - 1)
    await input_of(world, next(turns), BYTES_MAX + 1)
    await input_of(world, next(turns), BYTES_MIN, "owner:theirs")
    taken = await input_of(world, next(turns), BYTES_MIN)
    assert await world.store.take_step(taken.id, JobState.VALIDATING, await world.worker(10 * LEASE_MS), world.token())
    cancelled = await input_of(world, caller := next(turns), BYTES_MIN)
    await world.store.cancel_job(caller.tenant_id, cancelled.id)
    caller = next(turns)
    await rest(world, await input_of(world, caller, BYTES_MIN), 1_000_000)
    await world.ingested(await input_of(world, caller, BYTES_MIN), plan_of(1))


async def our_worker(world: StoreWorld) -> dict[str, Any]:
    worker_id = world.id("worker")
    await world.store.enlist_worker(worker_id, "host", "1", 10 * LEASE_MS, WorkerDuty(share_owner=OWNER))
    return {"worker_id": worker_id, "bytes_min": BYTES_MIN, "bytes_max": BYTES_MAX}


async def test_tenants_with_an_input_that_waits_come_by_the_clock_and_then_by_its_rank(world: StoreWorld) -> None:
    """An input that waits gains 100 bytes a millisecond."""
    await not_ready(world, *[await world.caller(f"not ready {number}") for number in range(6)])
    level = [await world.caller(f"level {number}") for number in range(7)]
    ahead, passed = await world.caller("ahead"), await world.caller("passed")
    await input_of(world, level[0], BYTES_MIN)
    await input_of(world, level[3], 66_000)
    await input_of(world, level[5], 75_000)
    await input_of(world, level[6], BYTES_MAX)
    # Of two inputs of a tenant the one of the lower rank counts: here the older one, there the smaller one.
    await input_of(world, level[1], 30_000)
    await input_of(world, level[4], 80_000)
    for caller in (ahead, passed):
        await input_of(world, caller, BYTES_MIN + 1)
    await rest(world, await input_of(world, level[2], 35_000), 300)
    await world.clock.advance(300)
    await input_of(world, level[1], BYTES_MIN)
    await input_of(world, level[4], 40_000)
    for caller, place in ((ahead, 501), (passed, 499)):
        await run_statement(
            world.store, "ingest_place_put", lane=IngestLane.LARGE, tenant_id=caller.tenant_id, place=place
        )
    await run_statement(world.store, "ingest_place_put", lane=IngestLane.SMALL, tenant_id=level[0].tenant_id, place=900)
    found = await run_statement(
        world.store, "ingest_tenants", lane=IngestLane.LARGE, clock=500, tenants_max=9, **await our_worker(world)
    )
    names = {caller.tenant_id: number for number, caller in enumerate(level)}
    assert {tenant_id: place for tenant_id, place in found if place} == {ahead.tenant_id: 501, passed.tenant_id: 499}
    assert found[-1][0] == ahead.tenant_id
    assert [names[tenant_id] for tenant_id, place in found if not place] == [0, 1, 2, 3, 4, 5, 6]
    fewer = await run_statement(
        world.store, "ingest_tenants", lane=IngestLane.LARGE, clock=500, tenants_max=8, **await our_worker(world)
    )
    assert fewer == found[:8]


async def test_the_inputs_of_a_tenant_that_wait_come_by_rank_and_then_by_id(world: StoreWorld) -> None:
    caller = await world.caller()
    await not_ready(world, *[caller] * 6)
    await input_of(world, await world.caller("another"), BYTES_MIN)
    alike = sorted([(await input_of(world, caller, BYTES_MIN)).id for _ in range(3)])
    largest, rested = await input_of(world, caller, BYTES_MAX), await input_of(world, caller, 65_000)
    start = world.clock.now
    await rest(world, rested, 300)
    await world.clock.advance(300)
    young = await input_of(world, caller, 30_000)
    expected = [
        *((job_id, BYTES_MIN, BYTES_MIN + 100 * start) for job_id in alike),
        (young.id, 30_000, 30_000 + 100 * (start + 300)),
        (rested.id, 65_000, 65_000 + 100 * start),
        (largest.id, BYTES_MAX, BYTES_MAX + 100 * start),
    ]
    for count_max in (1, 2, 5, 9):
        found = await run_statement(
            world.store,
            "ingest_candidates",
            tenant_id=caller.tenant_id,
            count_max=count_max,
            **await our_worker(world),
        )
        assert found == expected[:count_max]


LOOK = {"lost_below": 100, "is_searching": 0, "search_max": 5, "kept": 2}


@pytest.mark.parametrize("look", ["snapshot_oldest", "snapshot_smallest", "snapshot_due"])
async def test_only_jobs_that_this_worker_can_start_are_looked_at(world: StoreWorld, look: str) -> None:
    caller, worker_id = await world.caller(), (await our_worker(world))["worker_id"]
    mine: dict[str, Any] = {"share_owner": OWNER, "window_ms": 100_000}
    first, last = [await world.running(caller, 1, **mine) for _ in range(2)]
    rested, resting, closed, out = [await world.running(caller, 1, **mine) for _ in range(4)]
    await world.running(caller, 1, window_ms=5_000, share_owner=OWNER)
    await world.running(caller, 1, window_ms=100_000)
    await world.ingested(await world.job(caller, **mine), plan_of(1, model="another"))
    await world.store.rest_job(rested.id, MODEL, 5_000)
    await world.store.rest_job(resting.id, MODEL, 5_001)
    await world.store.cancel_job(caller.tenant_id, closed.id)
    await world.lease(await world.worker(), out)
    await world.clock.advance(5_000)
    whose = {"worker_id": worker_id} if look == "snapshot_due" else {"share_owner": OWNER}
    bound = "due_max" if look == "snapshot_due" else "jobs_max"
    startable = sorted([first.id, last.id, rested.id])
    for count_max in (9, 2):
        bounds = {bound: count_max, "now": world.clock.now}
        found = await run_statement(world.store, look, model=MODEL, **bounds, **whose, **LOOK)
        assert sorted(row[2] for row in found) == startable[:count_max], "they are alike, so those of the lowest ids"


async def test_the_smallest_jobs_of_the_highest_priority_come_first(world: StoreWorld) -> None:
    caller, made = await world.caller(), list[str]()
    for count, priority in ((1, 0), (3, 1), (2, 1), (4, 2)):
        made.append((await world.running(caller, count, controls=JobControls(priority=priority))).id)
        await world.clock.advance(1)
    flow = {"model": MODEL, "share_owner": tenant_owner(caller.tenant_id)}
    found = await run_statement(world.store, "snapshot_smallest", now=world.clock.now, jobs_max=9, **flow, **LOOK)
    assert [made.index(row[2]) for row in found] == [3, 2, 1, 0]
