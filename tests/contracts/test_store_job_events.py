"""What every store remembers of single items, for jobs whose door wants events of them: numbers without gaps, written with what they are
about, and the places where requests and results lie."""

from __future__ import annotations

import pytest

from tests.contracts.store_world import MODEL, StoreWorld, tries
from tests.support.store_verbs import lease_slices
from tidegate.core.callback_targets import CallbackReply
from tidegate.core.nouns import JobEnd, JobFlush, JobWebhook
from tidegate.core.states import DeliveryState, JobState
from tidegate.store.jobs.job_events import JobEventRow

pytestmark = pytest.mark.anyio


async def test_a_job_that_wants_no_events_has_none(world: StoreWorld) -> None:
    job, worker = await world.running(await world.caller(), 2), await world.worker()
    await world.lease(worker, job)
    assert await world.store.job_event_total(job.id) == 0
    assert await world.store.job_events(job.id, 0, 10) == []


async def test_events_are_numbered_in_the_order_of_what_happened(world: StoreWorld) -> None:
    store, caller, worker = world.store, await world.caller(), await world.worker()
    job = await world.running(caller, 2, 3, door="{}")
    assert job.door == "{}"
    assert await store.job_event_total(job.id) == 1, "its creation"
    [first] = await world.lease(worker, job, 1)
    assert await lease_slices(store, worker, job.id, MODEL, 1, first.token) == [first], "a replay"
    log = await world.log()
    await world.answer(log, job, 1, token=first.token)
    assert await store.release_slice(job.id, 0, first.token, 0)
    both = await world.lease(worker, job)
    assert [piece.first for piece in both] == [0, 3 - 1]
    rows = await store.job_events(job.id, 0, 10)
    size = (await world.look(job)).output_bytes
    now = world.clock.now
    assert rows == [
        JobEventRow(2, 2, "running", 0, 0, 0, 0, 0, now),
        JobEventRow(4, 1, "recorded", 0, 0, size, 0, 0, now),
        JobEventRow(5, 3, "running", 2, 0, 0, 0, 0, now),
    ], "what comes back began before, and is not listed again"
    assert await store.job_event_total(job.id) == 7
    assert await store.job_events(job.id, 2, 1) == rows[:1]
    assert await store.job_events(job.id, 3, 1) == rows[1:2]
    assert await store.job_events(job.id, 7, 1) == []
    [moment] = await store.recorded_moments(job.id)
    assert (moment.output_to, moment.error_to, moment.happened_at) == (size, 0, now)


async def test_where_items_stand_and_lie(world: StoreWorld) -> None:
    store, caller, worker = world.store, await world.caller(), await world.worker()
    job = await world.running(caller, 2, 2, door="{}")
    [held] = await world.lease(worker, job, 1)
    found = await store.job_progress(caller.tenant_id, job.id)
    assert found is not None
    assert (found[0].id, found[1]) == (job.id, 2)
    assert await store.job_progress("tenant_of_another", job.id) is None
    assert await store.leased_spans(job.id) == [(0, 2)]
    spans = await store.work_spans(job.id, 1, 2)
    assert [(one.first, one.count, one.work_at, one.work_bytes) for one in spans] == [(0, 2, 0, 200), (2, 2, 200, 200)]
    assert [await store.work_spans(job.id, first, 2) for first in (0, 2)] == [spans[:1], spans[1:]]
    waiting = JobFlush(job.id, attempts=[(held.token, tries(0, count=2, wait_ms=5_000))])
    await store.record_outcomes([waiting], [], [])
    found = await store.job_progress(caller.tenant_id, job.id)
    assert found is not None
    assert found[1] == 1, "one that waits to be tried again does not run"
    [tried] = await store.item_tries(job.id, 0, 4)
    assert (tried.number, tried.count, tried.wait_ms) == (0, 2, 5_000)
    look = await store.job_look(caller.tenant_id, job.id)
    assert look is not None
    assert (look.job.id, look.running, look.leased, look.tries) == (job.id, 1, [(0, 2)], [tried])
    assert await store.job_look("tenant_of_another", job.id) is None
    await world.answer(await world.log(), job, 1, token=held.token)
    [place] = await store.item_places(job.id, 0, 4)
    assert (place.number, place.outcome, place.at) == (1, "answered", 0)
    assert [await store.item_places(job.id, first, 1) for first in (0, 1, 2)] == [[], [place], []]
    assert await store.item_places(world.id("batch"), 0, 4) == []
    assert await store.outcomes_within(job.id, 0, 1, is_output=True) == [place]
    assert await store.outcomes_within(job.id, 0, 1, is_output=False) == []
    assert await store.outcomes_within(job.id, 1, 1 << 40, is_output=True) == []
    found = await store.job_progress(caller.tenant_id, job.id)
    assert found is not None
    assert found[1] == 0


async def test_an_item_that_is_answered_while_its_next_try_waits_is_left_out_once(world: StoreWorld) -> None:
    store, caller, worker = world.store, await world.caller(), await world.worker()
    job = await world.running(caller, 3, door="{}")
    [held] = await world.lease(worker, job)
    waiting = JobFlush(job.id, attempts=[(held.token, tries(0, wait_ms=5_000))])
    await store.record_outcomes([waiting], [], [])
    await world.answer(await world.log(), job, 0, token=held.token)
    found = await store.job_progress(caller.tenant_id, job.id)
    assert found is not None
    assert found[1] == 2, "the other two run"


async def test_a_callback_gets_what_it_wants_of_each_item(world: StoreWorld) -> None:
    store, caller, worker = world.store, await world.caller(), await world.worker()
    wanted = ("item.running", "item.completed", "batch.completed")
    webhook = JobWebhook("https://hooks.example.com/", wanted, b"s" * 32, "some-door", {"X-A": "b"})
    job = await world.running(caller, 3, door="{}", webhook=webhook)
    [held] = await world.lease(worker, job)
    await world.answer(await world.log(), job, 0, token=held.token)
    await world.record(world.errors(await world.log("errors"), job, 2, token=held.token))
    leased = await store.lease_webhooks(worker, "t", count_max=10, tenant_max=10)
    assert sorted((one.event_type, one.item) for one in leased) == [
        ("item.completed", 0),
        ("item.running", 0),
        ("item.running", 1),
        ("item.running", 2),
    ]
    assert len({one.event_id for one in leased}) == 4
    assert {(one.door, *one.headers.items()) for one in leased} == {("some-door", ("X-A", "b"))}
    listed = await store.list_webhook_deliveries(caller.tenant_id, None, None, 10)
    assert {(one.state, one.ended_at, one.failure) for one in listed or ()} == {(DeliveryState.PENDING, None, None)}
    # What a receiver that is gone misses is listed as failed.
    assert await store.record_webhook(leased[0], CallbackReply(410), None) is DeliveryState.FAILED
    await world.clock.advance(5)
    await world.answer(await world.log(), job, 1, token=held.token)
    failed = await store.list_webhook_deliveries(caller.tenant_id, DeliveryState.FAILED, None, 10)
    [missed] = [one for one in failed or () if one.created_at == world.clock.now]
    assert (missed.ended_at, missed.failure) == (world.clock.now, "endpoint_disabled")


async def test_what_is_remembered_of_items_goes_with_their_own_job(world: StoreWorld) -> None:
    store, caller, worker = world.store, await world.caller(), await world.worker()
    gone, kept = [await world.running(caller, 2, door="{}") for _ in range(2)]
    for job in (gone, kept):
        [held] = await world.lease(worker, job)
        await store.record_outcomes([JobFlush(job.id, attempts=[(held.token, tries(0, wait_ms=5_000))])], [], [])
    events, total = await store.job_events(kept.id, 0, 10), await store.job_event_total(kept.id)
    await store.cancel_job(caller.tenant_id, gone.id)
    await store.close_job(gone.id, 0)
    token = world.token()
    assert await store.take_step(gone.id, JobState.FINALIZING, worker, token)
    await store.publish_job(await world.look(gone), token, end=JobEnd(None))
    await store.forget_job(gone.id)
    assert await store.any_job(gone.id) is None
    assert (await store.job_events(gone.id, 0, 10), await store.item_tries(gone.id, 0, 4)) == ([], [])
    assert await store.job_event_total(gone.id) == 0
    assert events
    assert await store.job_events(kept.id, 0, 10) == events
    assert await store.job_event_total(kept.id) == total > 0
    assert [one.number for one in await store.item_tries(kept.id, 0, 4)] == [0]
    outlook = await store.outlook(kept.id)
    assert outlook is not None
    assert [one.model for one in outlook.models] == [MODEL]
