"""What every store does with webhook endpoints and deliveries: the outbox is written with the end of a job, and nothing in it is lost."""

from __future__ import annotations

import asyncio
from typing import Any

import asyncpg
import pytest
from msgspec.structs import replace

from tests.contracts.store_world import LEASE_MS, START_MS, StoreWorld
from tests.support.processes import wait_until_async
from tidegate.core.callback_targets import CallbackReply
from tidegate.core.errors import ApiProblem
from tidegate.core.nouns import Caller, Job, JobWebhook, LineError
from tidegate.core.states import DeliveryState, JobState
from tidegate.core.webhooks import (
    DISABLED_AFTER_MS,
    EVENT_TYPES,
    EndpointShape,
    LeasedDelivery,
    WebhookDelivery,
    WebhookEndpoint,
)
from tidegate.store.jobs import jobs
from tidegate.store.tenants import webhooks
from tidegate.store.tenants.webhooks import ENDPOINTS_MAX

pytestmark = pytest.mark.anyio

URL = "https://hooks.example.com/a"
OK, BROKEN, GONE = CallbackReply(200), CallbackReply(500), CallbackReply(410)
FIRST, SECOND = b"1" * 32, b"2" * 32
HOUR_MS = 3_600_000


async def endpoint(
    world: StoreWorld, caller: Caller, *types: str, secret: bytes = FIRST, name: str = "one"
) -> WebhookEndpoint:
    shape = EndpointShape(name, URL, types or EVENT_TYPES)
    return await world.store.create_webhook_endpoint(caller.tenant_id, world.id("whk"), shape, secret)


async def cancelled(world: StoreWorld, caller: Caller, **fields: Any) -> Job:
    """A job that ends before it was ingested."""
    job = await world.job(caller, **fields)
    await world.store.cancel_job(caller.tenant_id, job.id)
    assert await world.store.end_unstarted(job.id)
    return await world.look(job)


async def lease(
    world: StoreWorld, worker_id: str, count_max: int = 100, tenant_max: int = 20, token: str = ""
) -> list[LeasedDelivery]:
    return await world.store.lease_webhooks(
        worker_id, token or world.token(), count_max=count_max, tenant_max=tenant_max
    )


async def deliveries(world: StoreWorld, caller: Caller, state: DeliveryState | None = None) -> list[Any]:
    return await world.store.list_webhook_deliveries(caller.tenant_id, state, None, 1_000) or []


async def test_an_endpoint_is_kept_listed_changed_and_deleted(world: StoreWorld) -> None:
    caller, store = await world.caller(), world.store
    made = await endpoint(world, caller, "batch.failed", "batch.completed")
    assert (made.name, made.url, made.event_types) == ("one", URL, ("batch.failed", "batch.completed"))
    assert (made.created_at, made.updated_at, made.disabled_at) == (START_MS, START_MS, None)
    assert made.secret.reveal() not in repr(made)
    assert made.secret.reveal().endswith(made.secret_hint[-4:])
    assert await store.webhook_endpoint(caller.tenant_id, made.id) == made
    # A creation whose commit was unknown is made again.
    shape = EndpointShape("other", "https://x.example.com/", EVENT_TYPES)
    assert await store.create_webhook_endpoint(caller.tenant_id, made.id, shape, SECOND) == made
    await world.clock.advance(5_000)
    same = await store.change_webhook_endpoint(caller.tenant_id, made.id, EndpointShape(name="one"))
    assert same == made
    changed = await store.change_webhook_endpoint(caller.tenant_id, made.id, EndpointShape(event_types=EVENT_TYPES))
    assert changed is not None
    assert (changed.event_types, changed.url, changed.updated_at) == (EVENT_TYPES, URL, START_MS + 5_000)
    second = await endpoint(world, caller)
    listed = await store.list_webhook_endpoints(caller.tenant_id, None, 10)
    assert listed == [second, changed]
    assert await store.list_webhook_endpoints(caller.tenant_id, second.id, 10) == [changed]
    assert await store.list_webhook_endpoints(caller.tenant_id, world.id("whk"), 10) is None
    assert await store.delete_webhook_endpoint(caller.tenant_id, second.id)
    assert await store.list_webhook_endpoints(caller.tenant_id, second.id, 10) == [changed], "it marks its place"
    assert await store.delete_webhook_endpoint(caller.tenant_id, made.id)
    assert not await store.delete_webhook_endpoint(caller.tenant_id, made.id)
    assert await store.webhook_endpoint(caller.tenant_id, made.id) is None


async def test_nothing_of_another_tenant_is_found_or_changed(world: StoreWorld) -> None:
    ours, theirs, store = await world.caller("ours"), (await world.caller("theirs")).tenant_id, world.store
    made = await endpoint(world, ours)
    await cancelled(world, ours)
    [delivery] = await deliveries(world, ours)
    assert await store.webhook_endpoint(theirs, made.id) is None
    assert await store.change_webhook_endpoint(theirs, made.id, EndpointShape(name="x")) is None
    assert await store.rotate_webhook_secret(theirs, made.id, SECOND, 0) is None
    assert not await store.delete_webhook_endpoint(theirs, made.id)
    assert await store.list_webhook_endpoints(theirs, None, 10) == []
    assert await store.list_webhook_endpoints(theirs, made.id, 10) is None
    assert await store.list_webhook_deliveries(theirs, None, None, 10) == []
    assert await store.list_webhook_deliveries(theirs, None, (delivery.event_id, made.id), 10) is None
    assert await store.replay_webhook(theirs, delivery.event_id, made.id) is None
    assert await store.tenant_of_delivery(delivery.event_id, made.id) == ours.tenant_id
    assert await store.tenant_of_delivery(delivery.event_id, world.id("whk")) is None
    assert await store.webhook_endpoint(ours.tenant_id, made.id) == made
    # A job of theirs tells nothing to an endpoint of ours.
    await cancelled(world, await world.caller("theirs"))
    assert await deliveries(world, ours) == [delivery]


async def test_a_tenant_has_a_bounded_number_of_endpoints(world: StoreWorld) -> None:
    caller = await world.caller()
    await world.job(caller, webhook=JobWebhook(URL, EVENT_TYPES, FIRST))
    for _ in range(ENDPOINTS_MAX):
        await endpoint(world, caller)
    with pytest.raises(ApiProblem, match="Delete one"):
        await endpoint(world, caller)
    await endpoint(world, await world.caller("another"))


async def test_every_end_of_a_job_writes_its_event(world: StoreWorld) -> None:
    caller, store = await world.caller(), world.store
    made = await endpoint(world, caller)
    worker_id, token = await world.worker(), world.token()
    refused = await world.job(caller)
    assert await store.take_step(refused.id, JobState.VALIDATING, worker_id, token)
    assert await store.refuse_job(refused.id, token, [LineError("x", "y")])
    stopped = await cancelled(world, caller)
    late = await world.job(caller, window_ms=1_000)
    await world.clock.advance(2_000)
    assert await store.expire_job(late.id)
    assert await store.end_unstarted(late.id)
    abandoned = await world.running(caller, 1)
    log = await world.log()
    await world.answer(log, abandoned, 0)
    await store.abandon_job(caller.tenant_id, abandoned.id, None)
    found = {one.job_id: one for one in await deliveries(world, caller)}
    assert {job_id: one.event_type for job_id, one in found.items()} == {
        refused.id: "batch.failed",
        stopped.id: "batch.cancelled",
        late.id: "batch.expired",
        abandoned.id: "batch.failed",
    }
    for job_id, one in found.items():
        assert one.event_id == "evt_" + job_id.removeprefix("batch_")
        assert (one.endpoint_id, one.state, one.attempt_count) == (made.id, DeliveryState.PENDING, 0)
    assert found[stopped.id].created_at == stopped.cancelled_at


async def test_an_endpoint_gets_the_events_that_it_wants(world: StoreWorld) -> None:
    caller = await world.caller()
    await endpoint(world, caller, "batch.completed", "batch.failed", "batch.expired")
    wanted = [await endpoint(world, caller, *types) for types in (("batch.cancelled",), EVENT_TYPES)]
    await cancelled(world, caller)
    assert {one.endpoint_id for one in await deliveries(world, caller)} == {one.id for one in wanted}


async def test_a_job_may_bring_an_endpoint_of_its_own(world: StoreWorld) -> None:
    caller, store = await world.caller(), world.store
    wanted = JobWebhook("https://own.example.com/", ("batch.cancelled",), FIRST)
    job = await cancelled(world, caller, webhook=wanted)
    assert job.webhook == JobWebhook(wanted.url, wanted.events)
    await cancelled(world, caller)
    own = await store.webhook_endpoint_of_job(caller.tenant_id, job.id)
    assert own is not None
    assert (own.url, own.event_types, own.job_id) == (wanted.url, wanted.events, job.id)
    [one] = await deliveries(world, caller)
    assert (one.job_id, one.endpoint_id, one.url) == (job.id, own.id, wanted.url)
    # It is managed with its job, and no other tenant sees it.
    assert await store.webhook_endpoint(caller.tenant_id, own.id) is None
    assert await store.list_webhook_endpoints(caller.tenant_id, None, 10) == []
    assert not await store.delete_webhook_endpoint(caller.tenant_id, own.id)
    assert await store.webhook_endpoint_of_job((await world.caller("theirs")).tenant_id, job.id) is None
    unwanted = await cancelled(world, caller, webhook=JobWebhook(wanted.url, ("batch.completed",), FIRST))
    assert unwanted.id not in {one.job_id for one in await deliveries(world, caller)}


async def test_a_delivery_is_leased_once_and_recorded(world: StoreWorld) -> None:
    caller, store = await world.caller(), world.store
    made = await endpoint(world, caller)
    assert not await store.any_webhook_due()
    job = await cancelled(world, caller)
    assert await store.any_webhook_due()
    worker_id = await world.worker()
    [leased] = await lease(world, worker_id)
    assert (leased.endpoint_id, leased.job_id, leased.url) == (made.id, job.id, URL)
    assert (leased.sent_at, [one.reveal() for one in leased.secrets]) == (START_MS, [made.secret.reveal()])
    assert not await store.any_webhook_due()
    assert await lease(world, await world.worker()) == []
    assert await store.record_webhook(leased, OK, None) is DeliveryState.DELIVERED
    [one] = await deliveries(world, caller, DeliveryState.DELIVERED)
    assert (one.attempt_count, one.status, one.failure, one.ended_at) == (1, 200, None, START_MS)
    # A record whose commit was unknown is made again, and changes nothing.
    assert await store.record_webhook(leased, BROKEN, None) is None
    assert await deliveries(world, caller) == [one]
    assert not await store.any_webhook_due()


async def test_a_lease_whose_commit_was_unknown_is_taken_again(world: StoreWorld) -> None:
    caller, worker_id, token = await world.caller(), await world.worker(), world.token()
    await endpoint(world, caller)
    await cancelled(world, caller)
    first = await lease(world, worker_id, token=token)
    assert len(first) == 1
    assert await lease(world, worker_id, token=token) == first


async def test_what_a_dead_worker_was_sending_is_sent_again(world: StoreWorld) -> None:
    caller, store = await world.caller(), world.store
    await endpoint(world, caller)
    await cancelled(world, caller)
    dead = await world.worker()
    [lost] = await lease(world, dead)
    await store.declare_gone(dead, leaving=True)
    assert await lease(world, dead) == []
    [again] = await lease(world, await world.worker(), tenant_max=1)
    assert again.event_id == lost.event_id
    # The dead worker's last word comes too late.
    assert await store.record_webhook(lost, BROKEN, 5_000) is None
    assert await store.record_webhook(again, OK, None) is DeliveryState.DELIVERED


async def test_many_processes_share_the_outbox(world: StoreWorld) -> None:
    caller = await world.caller()
    await endpoint(world, caller)
    for _ in range(12):
        await cancelled(world, caller)
    workers = [await world.worker() for _ in range(4)]
    others = [await world.open_another() for _ in workers]
    taken = await asyncio.gather(
        *(
            store.lease_webhooks(worker_id, world.token(), count_max=5, tenant_max=20)
            for store, worker_id in zip(others, workers, strict=True)
        )
    )
    names = [one.event_id for some in taken for one in some]
    assert len(names) == len(set(names))
    for store in others:
        await store.close()


async def test_a_failed_try_waits_and_the_last_is_listed(world: StoreWorld) -> None:
    caller, store, worker_id = await world.caller(), world.store, await world.worker(DISABLED_AFTER_MS)
    await endpoint(world, caller)
    await cancelled(world, caller)
    [leased] = await lease(world, worker_id)
    assert await store.record_webhook(leased, BROKEN, 5_000) is DeliveryState.PENDING
    [one] = await deliveries(world, caller)
    assert (one.attempt_count, one.status, one.failure, one.due_at) == (1, 500, "http_5xx", START_MS + 5_000)
    assert await lease(world, worker_id) == []
    await world.clock.advance(5_000)
    [leased] = await lease(world, worker_id)
    assert leased.attempt_count == 1
    assert await store.record_webhook(leased, CallbackReply(failure="timed_out"), None) is DeliveryState.FAILED
    [one] = await deliveries(world, caller, DeliveryState.FAILED)
    assert (one.attempt_count, one.status, one.failure, one.ended_at) == (2, None, "timed_out", START_MS + 5_000)
    assert not await store.any_webhook_due()


async def test_a_receiver_that_is_gone_disables_its_endpoint(world: StoreWorld) -> None:
    caller, store, worker_id = await world.caller(), world.store, await world.worker()
    made, other = await endpoint(world, caller), await endpoint(world, caller)
    for _ in range(3):
        await cancelled(world, caller)
    taken = await lease(world, worker_id, count_max=4)
    leased, others = ([one for one in taken if one.endpoint_id == some.id] for some in (made, other))
    rest = leased[1:]
    assert await store.record_webhook(others[0], BROKEN, 5_000) is DeliveryState.PENDING
    assert await store.record_webhook(leased[0], GONE, None) is DeliveryState.FAILED
    disabled = await store.webhook_endpoint(caller.tenant_id, made.id)
    assert disabled is not None
    assert (disabled.disabled_at, disabled.disabled_why) == (START_MS, "gone")
    # What was being sent to it is not tried again; what waited for it, and what comes, is listed as failed.
    for one in rest:
        assert await store.record_webhook(one, BROKEN, 5_000) is DeliveryState.FAILED
    missed = await cancelled(world, caller)
    found = [one for one in await deliveries(world, caller) if one.endpoint_id == made.id]
    assert len(found) == 4
    by_endpoint = {one.endpoint_id: one for one in await deliveries(world, caller) if one.job_id == missed.id}
    assert (by_endpoint[made.id].failure, by_endpoint[made.id].ended_at) == ("endpoint_disabled", START_MS)
    assert (by_endpoint[other.id].failure, by_endpoint[other.id].ended_at) == (None, None)
    assert {one.state for one in found} == {DeliveryState.FAILED}
    assert found[0].failure == "endpoint_disabled"
    assert all(
        one.state is DeliveryState.PENDING for one in await deliveries(world, caller) if one.endpoint_id == other.id
    )
    failing = await store.webhook_endpoint(caller.tenant_id, other.id)
    assert failing is not None
    assert failing.disabled_at is None, "one that fails is not gone"
    # Its owner enables it by a change, whatever it is.
    enabled = await store.change_webhook_endpoint(caller.tenant_id, made.id, EndpointShape())
    assert enabled is not None
    assert (enabled.disabled_at, enabled.disabled_why) == (None, None)


async def test_a_try_that_ends_while_another_process_disables_its_endpoint_is_the_last(
    postgres_world: StoreWorld, shared_database: str
) -> None:
    world = postgres_world
    caller, store, worker_id = await world.caller(), world.store, await world.worker()
    await endpoint(world, caller)
    await cancelled(world, caller)
    [leased] = await lease(world, worker_id)
    other = await asyncpg.connect(shared_database)
    disabling = other.transaction()
    await disabling.start()
    await other.execute("update webhook_endpoints set disabled_at = 1, disabled_why = 'gone'")
    recording = asyncio.create_task(store.record_webhook(leased, BROKEN, 5_000))
    waits = "select count(*) from pg_locks where not granted and pid <> pg_backend_pid()"
    await wait_until_async(lambda: other.fetchval(waits), 30, "the try to wait for its endpoint")
    await disabling.commit()
    await other.close()
    assert await recording is DeliveryState.FAILED
    assert not await store.any_webhook_due()


async def test_an_endpoint_that_fails_for_days_is_disabled(world: StoreWorld) -> None:
    caller, store, worker_id = await world.caller(), world.store, await world.worker(10 * DISABLED_AFTER_MS)
    made = await endpoint(world, caller)
    await cancelled(world, caller)

    async def fail() -> Any:
        [leased] = await lease(world, worker_id)
        await store.record_webhook(leased, BROKEN, HOUR_MS)
        return await store.webhook_endpoint(caller.tenant_id, made.id)

    assert (await fail()).disabled_at is None
    await world.clock.advance(DISABLED_AFTER_MS - 1)
    assert (await fail()).disabled_at is None
    # One success, of whatever event, begins the days again.
    await cancelled(world, caller)
    [leased] = await lease(world, worker_id)
    await store.record_webhook(leased, OK, None)
    await world.clock.advance(HOUR_MS)
    assert (await fail()).disabled_at is None
    # So does a change by its owner.
    await world.clock.advance(DISABLED_AFTER_MS)
    await store.change_webhook_endpoint(caller.tenant_id, made.id, EndpointShape())
    assert (await fail()).disabled_at is None
    await world.clock.advance(DISABLED_AFTER_MS)
    disabled = await fail()
    assert disabled.disabled_why == "failing"
    [failed] = await deliveries(world, caller, DeliveryState.FAILED)
    assert failed.failure == "endpoint_disabled"


async def test_a_delivery_can_be_replayed_and_a_success_enables_its_endpoint(world: StoreWorld) -> None:
    caller, store, worker_id = await world.caller(), world.store, await world.worker()
    made = await endpoint(world, caller)
    await cancelled(world, caller)
    [leased] = await lease(world, worker_id)
    await store.record_webhook(leased, GONE, None)
    again = await store.replay_webhook(caller.tenant_id, leased.event_id, made.id)
    assert again is not None
    assert (again.state, again.attempt_count, again.failure) == (DeliveryState.PENDING, 0, None)
    await world.clock.advance(7)
    assert await store.replay_webhook(caller.tenant_id, leased.event_id, made.id) == again, "it waits already"
    assert await store.replay_webhook(caller.tenant_id, world.id("evt"), made.id) is None
    [leased] = await lease(world, worker_id)
    assert await store.record_webhook(leased, OK, None) is DeliveryState.DELIVERED
    enabled = await store.webhook_endpoint(caller.tenant_id, made.id)
    assert enabled is not None
    assert enabled.disabled_at is None
    # What arrived may be asked for again, too.
    once_more = await store.replay_webhook(caller.tenant_id, leased.event_id, made.id)
    assert once_more == replace(again, due_at=again.due_at + 7)


async def test_two_secrets_sign_while_one_is_replaced(world: StoreWorld) -> None:
    caller, store, worker_id = await world.caller(), world.store, await world.worker(10 * DISABLED_AFTER_MS)
    made = await endpoint(world, caller, secret=FIRST)
    day_ms = 24 * HOUR_MS
    rotated = await store.rotate_webhook_secret(caller.tenant_id, made.id, SECOND, day_ms)
    assert rotated is not None
    # Asked again after an unknown commit, the old secret is not lost.
    assert await store.rotate_webhook_secret(caller.tenant_id, made.id, SECOND, day_ms) == rotated
    await cancelled(world, caller)
    [leased] = await lease(world, worker_id)
    assert [one.reveal() for one in leased.secrets] == [rotated.secret.reveal(), made.secret.reveal()]
    await store.record_webhook(leased, BROKEN, day_ms)
    await world.clock.advance(day_ms)
    [leased] = await lease(world, worker_id)
    assert [one.reveal() for one in leased.secrets] == [rotated.secret.reveal()]
    await store.record_webhook(leased, OK, None)
    at_once = await store.rotate_webhook_secret(caller.tenant_id, made.id, FIRST, 0)
    assert at_once is not None
    await store.replay_webhook(caller.tenant_id, leased.event_id, made.id)
    [leased] = await lease(world, worker_id)
    assert [one.reveal() for one in leased.secrets] == [at_once.secret.reveal()]


async def test_tenants_take_turns(world: StoreWorld) -> None:
    """One tenant's many deliveries, or its slow receivers, do not hold up another's."""
    busy, calm, worker_id = await world.caller("busy"), await world.caller("calm"), await world.worker()
    for caller in (busy, calm):
        await endpoint(world, caller)
    for _ in range(6):
        await cancelled(world, busy)
    await world.clock.advance(1_000)
    await cancelled(world, calm)
    first = await lease(world, worker_id, count_max=2)
    assert {one.tenant_id for one in first} == {busy.tenant_id, calm.tenant_id}
    more = await lease(world, worker_id, count_max=10, tenant_max=3)
    assert [one.tenant_id for one in more] == [busy.tenant_id] * 2
    for tenant_max in (3, 2):
        assert await lease(world, worker_id, count_max=10, tenant_max=tenant_max) == []
    await cancelled(world, calm)
    assert [one.tenant_id for one in await lease(world, worker_id, count_max=10, tenant_max=3)] == [calm.tenant_id]


async def test_a_tenant_that_has_as_many_out_as_it_may_leaves_its_turns_to_others(world: StoreWorld) -> None:
    full, other, worker_id = await world.caller("full"), await world.caller("other"), await world.worker()
    for caller in (full, other):
        await endpoint(world, caller)
    for _ in range(3):
        await cancelled(world, full)
    assert len(await lease(world, worker_id, tenant_max=2)) == 2
    for _ in range(2):
        await cancelled(world, other)
    taken = await lease(world, worker_id, count_max=2, tenant_max=2)
    assert [one.tenant_id for one in taken] == [other.tenant_id] * 2


async def test_a_tenant_gets_no_more_than_its_turns_whatever_plan_the_database_makes(
    postgres_world: StoreWorld, shared_database: str
) -> None:
    """A database that counted an outbox of one may look again for each of many rows."""
    world = postgres_world
    busy, worker_id = await world.caller("busy"), await world.worker()
    await endpoint(world, busy)
    await cancelled(world, busy)
    connection = await asyncpg.connect(shared_database)
    await connection.execute("vacuum analyze webhook_deliveries")
    await connection.execute("vacuum analyze workers")
    await connection.close()
    for _ in range(5):
        await cancelled(world, busy)
    assert [len(await lease(world, worker_id, count_max=2, tenant_max=5)) for _ in range(3)] == [2, 2, 1]


async def test_endpoints_of_a_tenant_take_turns(world: StoreWorld) -> None:
    """A receiver that hangs has many events behind it, all of them due before the one for another receiver."""
    caller, store, worker_id = await world.caller(), world.store, await world.worker()
    hanging = await endpoint(world, caller, name="hanging")
    for _ in range(6):
        await cancelled(world, caller)
    await world.clock.advance(1_000)

    async def leased(count_max: int, endpoint_max: int = 3) -> list[str]:
        taken = await store.lease_webhooks(
            worker_id, world.token(), count_max=count_max, tenant_max=4, endpoint_max=endpoint_max
        )
        return [one.endpoint_id for one in taken]

    assert await leased(2) == [hanging.id] * 2
    assert await leased(10, endpoint_max=1) == [], "it has more out than it may have now"
    quick = await endpoint(world, caller, name="quick")
    await cancelled(world, caller)
    assert await leased(1) == [quick.id], "it has fewest out"
    assert await leased(10) == [hanging.id]
    assert await leased(10) == [], "its tenant has as many out as it may"
    assert await leased(10, endpoint_max=4) == []
    late = await world.caller("late")
    await endpoint(world, late)
    for _ in range(4):
        await cancelled(world, late)
    assert len(await leased(10)) == 3, "one turn of a tenant is never its only endpoint's"
    await endpoint(world, late, name="another")
    for _ in range(3):
        await cancelled(world, late)
    assert len(await leased(10)) == 1, "all endpoints of a tenant have no more out than the tenant may"


async def test_the_tenant_with_the_fewest_deliveries_out_is_next_and_no_turn_is_left_unused(world: StoreWorld) -> None:
    busy, calm, worker_id = await world.caller("busy"), await world.caller("calm"), await world.worker()
    for caller in (busy, calm):
        await endpoint(world, caller)
    for _ in range(6):
        await cancelled(world, busy)
    await world.clock.advance(1_000)
    for _ in range(2):
        await cancelled(world, calm)
    # The older first; then the one with none out, though the other's have waited longer.
    for tenant_id in (busy.tenant_id, calm.tenant_id):
        assert [one.tenant_id for one in await lease(world, worker_id, count_max=1)] == [tenant_id]
    assert len(await lease(world, worker_id, count_max=3)) == 3


async def test_deliveries_come_in_pages(world: StoreWorld) -> None:
    caller, store = await world.caller(), world.store
    for _ in range(2):
        await endpoint(world, caller)
    for _ in range(3):
        await cancelled(world, caller)
    every = await deliveries(world, caller)
    assert len(every) == 6
    paged: list[Any] = []
    while page := await store.list_webhook_deliveries(
        caller.tenant_id, None, (paged[-1].event_id, paged[-1].endpoint_id) if paged else None, 4
    ):
        paged += page
    assert paged == every


async def test_pages_of_deliveries_go_on_while_endpoints_and_jobs_are_deleted(world: StoreWorld) -> None:
    caller, other_caller, store, worker_id = (
        await world.caller(),
        await world.caller("another"),
        world.store,
        await world.worker(),
    )
    first, second = await endpoint(world, caller), await endpoint(world, caller)
    for _ in range(3):
        await cancelled(world, caller)
        await world.clock.advance(1)
    for leased in await lease(world, worker_id):
        assert await store.record_webhook(leased, OK, None)
    every = await deliveries(world, caller)
    assert len(every) == 6

    async def behind(one: WebhookDelivery, whose: Caller = caller) -> list[WebhookDelivery] | None:
        return await store.list_webhook_deliveries(whose.tenant_id, None, (one.event_id, one.endpoint_id), 10)

    await store.forget_job(every[0].job_id)
    assert await behind(every[1]) == every[2:]
    assert await store.delete_webhook_endpoint(caller.tenant_id, second.id)
    left = [one for one in every[2:] if one.endpoint_id == first.id]
    assert len(left) == 2
    for at, one in enumerate(every):
        assert await behind(one) == [other for other in left if other in every[at + 1 :]]
        assert await behind(one, other_caller) is None
        shown = await store.list_every_delivery(None, None, (one.event_id, one.endpoint_id), 10)
        assert [other for other, _ in shown or []] == await behind(one)


async def test_the_place_of_a_delivery_that_outlived_its_job_is_known(world: StoreWorld) -> None:
    caller, store, worker_id = await world.caller(), world.store, await world.worker()
    await endpoint(world, caller)
    jobs = [await cancelled(world, caller) for _ in range(2)]
    newer, older = await deliveries(world, caller)
    assert {newer.job_id, older.job_id} == {job.id for job in jobs}
    await store.forget_job(newer.job_id)
    assert await deliveries(world, caller) == [newer, older], "it is still to be delivered"
    for leased in await lease(world, worker_id):
        if leased.event_id == newer.event_id:
            assert await store.record_webhook(leased, OK, None)
    page = await store.list_webhook_deliveries(caller.tenant_id, None, (newer.event_id, newer.endpoint_id), 10)
    assert [one.event_id for one in page or []] == [older.event_id]


async def test_a_forgotten_job_takes_its_own_endpoint_and_secret_along(world: StoreWorld) -> None:
    caller, webhook = await world.caller(), JobWebhook(URL, EVENT_TYPES, b"s" * 32)
    job = await cancelled(world, caller, webhook=webhook)
    [leased] = await lease(world, await world.worker())
    await world.store.record_webhook(leased, OK, None)
    assert await world.store.webhook_endpoint_of_job(caller.tenant_id, job.id) is not None
    await world.store.forget_job(job.id)
    assert await world.store.webhook_endpoint_of_job(caller.tenant_id, job.id) is None


async def test_a_deleted_endpoint_takes_its_deliveries_along(world: StoreWorld) -> None:
    caller, store, worker_id = await world.caller(), world.store, await world.worker()
    made = await endpoint(world, caller)
    for _ in range(2):
        await cancelled(world, caller)
    [leased] = await lease(world, worker_id, count_max=1)
    assert await store.delete_webhook_endpoint(caller.tenant_id, made.id)
    assert await store.record_webhook(leased, BROKEN, 5_000) is None
    assert not await store.any_webhook_due()
    assert await deliveries(world, caller) == []


async def test_a_job_is_forgotten_with_its_events_but_not_before_they_are_out(world: StoreWorld) -> None:
    caller, store, worker_id = await world.caller(), world.store, await world.worker(10 * LEASE_MS)
    job = await cancelled(world, caller, webhook=JobWebhook(URL, EVENT_TYPES, FIRST))
    await world.clock.advance(LEASE_MS)
    assert await store.ended_jobs(1_000, 10) == []
    [leased] = await lease(world, worker_id)
    await store.record_webhook(leased, BROKEN, None)
    assert await store.ended_jobs(1_000, 10) == [job.id]
    await store.forget_job(job.id)
    await store.prune_webhooks(1_000, 10)
    assert await deliveries(world, caller) == []
    assert await store.webhook_endpoint_of_job(caller.tenant_id, job.id) is None


async def test_what_a_deleted_job_left_to_deliver_is_delivered_and_then_forgotten(world: StoreWorld) -> None:
    caller, store, worker_id = await world.caller(), world.store, await world.worker(10 * LEASE_MS)
    shared = await endpoint(world, caller)
    job = await cancelled(world, caller, webhook=JobWebhook(URL, EVENT_TYPES, FIRST))
    before = await deliveries(world, caller)
    for _ in range(2):
        await store.forget_job(job.id)
    assert await store.any_job(job.id) is None
    assert await deliveries(world, caller) == before
    first = await lease(world, worker_id)
    assert len(first) == 2
    for one in first:
        assert await store.record_webhook(one, BROKEN, 5_000) is DeliveryState.PENDING
    await world.clock.advance(5_000)
    again = await lease(world, worker_id)
    sent = [
        {(one.event_id, one.endpoint_id, one.event_type, one.url, one.secrets) for one in made}
        for made in (first, again)
    ]
    assert sent[0] == sent[1]
    own, tenants = sorted(again, key=lambda one: one.endpoint_id == shared.id)
    assert await store.record_webhook(tenants, OK, None) is DeliveryState.DELIVERED
    assert await store.webhook_endpoint_of_job(caller.tenant_id, job.id) is not None
    assert [one.endpoint_id for one in await deliveries(world, caller)] == [own.endpoint_id]
    assert await store.record_webhook(own, OK, None) is DeliveryState.DELIVERED
    assert await store.record_webhook(own, OK, None) is None
    assert await deliveries(world, caller) == []
    assert await store.webhook_endpoint_of_job(caller.tenant_id, job.id) is None
    assert await store.webhook_endpoint(caller.tenant_id, shared.id) is not None


async def test_what_waits_for_one_receiver_of_a_gone_job_outlasts_what_failed_at_another(world: StoreWorld) -> None:
    caller, store, worker_id = await world.caller(), world.store, await world.worker()
    for name in ("one", "other"):
        await endpoint(world, caller, name=name)
    job = await cancelled(world, caller)
    failed, waiting = await lease(world, worker_id)
    assert await store.record_webhook(failed, BROKEN, None) is DeliveryState.FAILED
    assert await store.record_webhook(waiting, BROKEN, HOUR_MS) is DeliveryState.PENDING
    await store.forget_job(job.id)
    await world.clock.advance(1_000)
    await store.prune_webhooks(999, 10)
    assert [one.endpoint_id for one in await deliveries(world, caller)] == [waiting.endpoint_id]


async def test_what_could_not_be_delivered_of_a_deleted_job_is_listed_as_long_as_a_job_is_kept(
    world: StoreWorld,
) -> None:
    caller, store, worker_id = await world.caller(), world.store, await world.worker(10 * LEASE_MS)
    jobs = [await cancelled(world, caller, webhook=JobWebhook(URL, EVENT_TYPES, FIRST)) for _ in range(4)]
    kept, replayed, failed, waiting = jobs
    events = {one.job_id: one for one in await lease(world, worker_id)}
    for job in (kept, replayed, failed):
        assert await store.record_webhook(events[job.id], BROKEN, None) is DeliveryState.FAILED
    before = await deliveries(world, caller)
    for job in (replayed, failed, waiting):
        await store.forget_job(job.id)
    await world.clock.advance(1_000)
    await store.prune_webhooks(1_000, 10)
    await store.prune_webhooks(999, 0)
    assert await deliveries(world, caller) == before
    await store.replay_webhook(caller.tenant_id, events[replayed.id].event_id, events[replayed.id].endpoint_id)
    await store.prune_webhooks(999, 10)
    assert {one.job_id for one in await deliveries(world, caller)} == {kept.id, replayed.id, waiting.id}
    assert await store.webhook_endpoint_of_job(caller.tenant_id, failed.id) is None
    [again] = await lease(world, worker_id)
    assert again.event_id == events[replayed.id].event_id
    for one in (again, events[waiting.id]):
        assert await store.record_webhook(one, OK, None) is DeliveryState.DELIVERED
    assert [one.job_id for one in await deliveries(world, caller)] == [kept.id]
    assert await store.webhook_endpoint_of_job(caller.tenant_id, kept.id) is not None


async def delivered(
    world: StoreWorld, caller: Caller, worker_id: str, jobs: int, endpoints: int
) -> list[WebhookDelivery]:
    """Deliveries that arrived, newest first: one of each job at each endpoint."""
    for number in range(endpoints):
        await endpoint(world, caller, name=f"e{number}")
    for _ in range(jobs):
        await cancelled(world, caller)
        await world.clock.advance(1)
    for one in await lease(world, worker_id):
        assert await world.store.record_webhook(one, OK, None) is DeliveryState.DELIVERED
    found = await deliveries(world, caller)
    assert len(found) == jobs * endpoints
    return found


def pieces(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many deliveries each transaction deletes from now on; two are one piece."""
    sizes: list[int] = []
    mark = webhooks._mark_places

    async def watched(tx: Any, gone: Any) -> int:
        sizes.append(len(gone))
        return await mark(tx, gone)

    monkeypatch.setattr(webhooks, "DELETED_AT_ONCE", 2)
    monkeypatch.setattr(webhooks, "_mark_places", watched)
    return sizes


async def test_deliveries_of_a_deleted_job_go_in_pieces(world: StoreWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    caller, worker_id = await world.caller(), await world.worker(10 * LEASE_MS)
    first, *_ = every = await delivered(world, caller, worker_id, jobs=1, endpoints=5)
    sizes = pieces(monkeypatch)
    await world.store.forget_job(first.job_id)
    assert await deliveries(world, caller) == []
    assert (sum(sizes), max(sizes)) == (5, 2)
    for one in every:
        place = (one.event_id, one.endpoint_id)
        assert await world.store.list_webhook_deliveries(caller.tenant_id, None, place, 10) == []


async def test_deliveries_of_a_running_job_stay(world: StoreWorld) -> None:
    caller, worker_id = await world.caller(), await world.worker(10 * LEASE_MS)
    job = await world.running(caller, 2, door="{}", webhook=JobWebhook(URL, ("item.completed",), FIRST))
    await world.answer(await world.log(), job, 0)
    [one] = await lease(world, worker_id)
    assert await world.store.record_webhook(one, OK, None) is DeliveryState.DELIVERED
    before = await deliveries(world, caller)
    assert [one.job_id for one in before] == [job.id]
    await world.store.forget_job(job.id)
    assert await world.store.any_job(job.id) is not None
    assert await deliveries(world, caller) == before


async def test_deliveries_of_a_deleted_endpoint_go_in_pieces(
    world: StoreWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    caller, worker_id = await world.caller(), await world.worker(10 * LEASE_MS)
    every = await delivered(world, caller, worker_id, jobs=5, endpoints=1)
    for _ in range(5):
        await cancelled(world, caller)
    sizes = pieces(monkeypatch)
    endpoint_id = every[0].endpoint_id
    other_caller = await world.caller("another")
    assert not await world.store.delete_webhook_endpoint(other_caller.tenant_id, endpoint_id)
    assert len(await deliveries(world, caller)) == 10
    assert await world.store.delete_webhook_endpoint(caller.tenant_id, endpoint_id)
    assert await deliveries(world, caller) == []
    assert (sum(sizes), max(sizes)) == (10, 2)
    for one in every:
        place = (one.event_id, one.endpoint_id)
        assert await world.store.list_webhook_deliveries(caller.tenant_id, None, place, 10) == []


async def test_what_waits_for_a_receiver_that_is_gone_fails_in_pieces(
    world: StoreWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    caller, worker_id = await world.caller(), await world.worker(10 * LEASE_MS)
    await endpoint(world, caller)
    for _ in range(8):
        await cancelled(world, caller)
        await world.clock.advance(1)
    first, second = await lease(world, worker_id, count_max=2)
    monkeypatch.setattr(webhooks, "DELETED_AT_ONCE", 2)
    assert await world.store.record_webhook(first, GONE, None) is DeliveryState.FAILED
    assert len(await deliveries(world, caller, DeliveryState.FAILED)) == 7
    [left] = await deliveries(world, caller, DeliveryState.PENDING)
    assert left.event_id == second.event_id, "what is being sent ends by itself"
    assert await world.store.record_webhook(second, BROKEN, 5_000) is DeliveryState.FAILED


async def test_what_gone_jobs_left_is_pruned_in_pieces(world: StoreWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    caller, store, worker_id = await world.caller(), world.store, await world.worker(10 * LEASE_MS)
    for number in range(5):
        await endpoint(world, caller, name=f"e{number}")
    job = await cancelled(world, caller)
    for one in await lease(world, worker_id):
        assert await store.record_webhook(one, BROKEN, None) is DeliveryState.FAILED
    await store.forget_job(job.id)
    assert len(await deliveries(world, caller)) == 5
    await world.clock.advance(1_000)
    sizes = pieces(monkeypatch)
    await store.prune_webhooks(999, 1)
    assert await deliveries(world, caller) == []
    assert (sum(sizes), max(sizes)) == (5, 2)


async def test_a_job_that_ends_while_its_endpoint_is_deleted_leaves_no_delivery(
    postgres_world: StoreWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An embedded store writes one transaction at a time."""
    world = postgres_world
    caller, store = await world.caller(), world.store
    made = await endpoint(world, caller)
    job = await world.job(caller)
    await store.cancel_job(caller.tenant_id, job.id)
    written, may_commit = asyncio.Event(), asyncio.Event()
    put_events = webhooks.put_events

    async def put_and_wait(*given: Any, **more: Any) -> None:
        await put_events(*given, **more)
        written.set()
        await may_commit.wait()

    monkeypatch.setattr(jobs, "put_events", put_and_wait)
    ending = asyncio.create_task(store.end_unstarted(job.id))
    await written.wait()
    deleting = asyncio.create_task(store.delete_webhook_endpoint(caller.tenant_id, made.id))
    # The other transaction has its endpoint, so it waits; if it does not, it is done by then.
    await asyncio.wait({deleting}, timeout=0.5)
    may_commit.set()
    assert await ending
    assert await deleting
    assert not await store.any_webhook_due()
