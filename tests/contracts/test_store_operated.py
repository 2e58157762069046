"""What every store shows operators of all tenants, and how it repairs what is stuck."""

from __future__ import annotations

from typing import Any, TypeVar

import pytest
from msgspec.structs import replace

from tests.contracts.store_world import DAY_MS, MODEL, StoreWorld, plan_of
from tests.contracts.test_store_controls import flush
from tests.contracts.test_store_publish import closed, publish
from tidegate.core.errors import ApiProblem
from tidegate.core.job_controls import JobControls
from tidegate.core.job_lists import JobFilter, JobSort
from tidegate.core.nouns import Job, JobEnd, LineError, PublishTurns
from tidegate.core.operations import OperationScope
from tidegate.core.states import DeliveryState, JobState
from tidegate.core.webhooks import EVENT_TYPES, EndpointShape
from tidegate.store.database.driver import TransactionBody, Tx
from tidegate.store.jobs import sorted_jobs
from tidegate.store.operators.operated import WaitingWork
from tidegate.store.tenants.keys import KeyRights

pytestmark = pytest.mark.anyio

T = TypeVar("T")


async def test_jobs_of_every_tenant(world: StoreWorld) -> None:
    one, two = await world.caller("one"), await world.caller("two")
    first = await world.job(one)
    await world.clock.advance(5)
    second = await world.job(two)
    store = world.store
    every = await store.search_every_job(None, JobFilter(), after=None, count_max=10)
    assert every is not None
    assert [(job.id, org) for job, org in every] == [(second.id, "two"), (first.id, "one")]
    assert await store.search_every_job(None, JobFilter(), after=second.id, count_max=10) == every[1:]
    assert await store.search_every_job("one", JobFilter(), after=None, count_max=10) == every[1:]
    assert await store.search_every_job(None, JobFilter(), after=world.id("batch"), count_max=10) is None
    assert await store.job_of_anyone(first.id) == every[1]
    assert await store.job_of_anyone(world.id("batch")) is None
    assert [job.id for job in await store.runs_of_file(one.tenant_id, first.input_file_id)] == [first.id]
    assert await store.runs_of_file(two.tenant_id, first.input_file_id) == []
    orgs = await store.list_orgs(after=None, count_max=10)
    assert orgs is not None
    assert sorted((row["name"], row["open_count"], row["key_count"]) for row in orgs) == [("one", 1, 0), ("two", 1, 0)]
    assert await store.list_orgs(after=world.id("tenant"), count_max=10) is None
    overview = await store.overview()
    assert [(row["state"], row["jobs"]) for row in overview.jobs] == [("validating", 2)]


async def test_tenants_of_one_moment_are_each_listed_once_page_by_page(world: StoreWorld) -> None:
    made, found = [(await world.caller(name)).tenant_id for name in ("one", "two", "three")], list[str]()
    await world.clock.advance(1)
    made.append((await world.caller("younger")).tenant_id)
    while page := await world.store.list_orgs(after=found[-1] if found else None, count_max=1):
        found += [row["id"] for row in page]
    assert found == [made[3], *sorted(made[:3], reverse=True)]


async def test_jobs_of_one_tenant_by_status(world: StoreWorld) -> None:
    found = dict[tuple[str, JobState], list[str]]()
    for name in ("one", "two"):
        caller = await world.caller(name)
        waiting, ended = await world.job(caller), await world.job(caller)
        await world.store.cancel_job(caller.tenant_id, ended.id)
        assert await world.store.end_unstarted(ended.id)
        found |= {(name, JobState.VALIDATING): [waiting.id], (name, JobState.CANCELLED): [ended.id]}
    for (name, status), ids in found.items():
        page = await world.store.search_every_job(name, JobFilter(status=status), after=None, count_max=10)
        assert [(job.id, org) for job, org in page or ()] == [(ids[0], name)]


async def paid(world: StoreWorld, job: Job, answered: tuple[int, ...], failed: tuple[int, ...], nano: int) -> None:
    """Record these outcomes of a job; each answer costs so much."""
    await world.lease(await world.worker(), job, token=job.id)
    await flush(world, job, answered, failed, nano)


async def test_an_overview_tells_what_is_open_what_ended_in_the_last_hour_and_what_is_nearly_late(
    world: StoreWorld,
) -> None:
    store, caller, hour_ms = world.store, await world.caller("one"), 3_600_000
    await world.clock.advance(120_000 - world.clock.now % 120_000)
    done = await world.running(caller, 2)
    await paid(world, done, (0,), (1,), nano=5)
    token = world.token()
    assert await store.take_step(done.id, JobState.FINALIZING, await world.worker(), token)
    await store.publish_job(await world.look(done), token, added=(None, None), rewrites=(None, None), end=JobEnd(None))
    open_one = await world.running(caller, 4, window_ms=hour_ms + 600_000)
    await world.clock.advance(hour_ms - 1)
    await paid(world, open_one, (0,), (1,), nano=5)
    seen = await store.overview()
    assert [tuple(row.values()) for row in seen.jobs] == [("in_progress", 1, 4, 1, 1, 0)]
    assert [tuple(row.values()) for row in seen.ended] == [("completed", 1, 2, 1)]
    assert [tuple(row.values()) for row in seen.models] == [(MODEL, 1, 2, 100, hour_ms - 1, 600_001)]
    assert set(seen.rates) == {MODEL}
    assert seen.rates[MODEL] == pytest.approx((1 / 359.999, 20 / 359.999))
    assert seen.stuck == []
    await world.clock.advance(1)
    assert (await store.overview()).ended == []
    assert (await store.overview()).stuck == []
    await world.clock.advance(1)
    [late] = (await store.overview()).stuck
    assert (late["id"], late["org"], late["step_failures"], late["left_ms"]) == (open_one.id, "one", 0, 599_999)
    await world.clock.advance(4 * 60_000)
    assert set((await store.overview()).rates) == {MODEL}, "of five whole minutes and this one"
    await world.clock.advance(60_000)
    assert set((await store.overview()).rates) == set(), "of six minutes at most"


@pytest.mark.parametrize("is_ended", [False, True])
async def test_jobs_that_sort_alike_are_each_listed_once_however_the_pages_fall(
    world: StoreWorld, is_ended: bool
) -> None:
    store, caller, jobs = world.store, await world.caller("one"), list[str]()
    for _ in range(3):
        job = await world.running(caller, 2 if is_ended else 3)
        await paid(world, job, (0,), (1,), nano=5)
        if is_ended:
            token = world.token()
            assert await store.take_step(job.id, JobState.FINALIZING, await world.worker(), token)
            await store.publish_job(await world.look(job), token, end=JobEnd(None))
        jobs.append(job.id)
    for sort in (JobSort.CREATED, JobSort.SIZE, JobSort.FAILED, JobSort.COST):
        found, theirs = list[str](), list[str]()
        for number in range(3):
            after, their_after = (some[-1] if number else None for some in (found, theirs))
            page = await store.search_every_job(None, JobFilter(), after=after, count_max=1, sort=sort)
            found += [job.id for job, _ in page or ()]
            own = await store.search_jobs(caller.tenant_id, JobFilter(), after=their_after, count_max=1, sort=sort)
            theirs += [job.id for job in own or ()]
        assert sorted(found) == sorted(theirs) == sorted(jobs), sort


@pytest.mark.parametrize("few_max", [1, sorted_jobs.FEW_MAX])
async def test_jobs_are_sorted_page_by_page(world: StoreWorld, few_max: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few that match are sorted when all of them are found; more are read in the order of an index."""
    monkeypatch.setattr(sorted_jobs, "FEW_MAX", few_max)
    store, one, two = world.store, await world.caller("one"), await world.caller("two")
    part = await world.running(one, 4, window_ms=2 * DAY_MS)
    await paid(world, part, (0, 1), (2,), nano=5)
    idle = await world.running(two, 8)
    done = await world.running(two, 2)
    await paid(world, done, (0,), (1,), nano=30)
    token = world.token()
    assert await store.take_step(done.id, JobState.FINALIZING, await world.worker(), token)
    await store.publish_job(await world.look(done), token, added=(None, None), rewrites=(None, None), end=JobEnd(None))

    async def listed(sort: JobSort, org: str | None = None, words: str | None = None) -> list[str]:
        found: list[str] = []
        while page := await store.search_every_job(
            org, JobFilter(words=words), after=found[-1] if found else None, count_max=1, sort=sort
        ):
            found.append(page[0][0].id)
        return found

    wanted = {
        JobSort.DEADLINE: [idle, part],
        JobSort.SIZE: [idle, part, done],
        JobSort.FAILED: [done, part],
        JobSort.COST: [done, part],
    }
    for sort, jobs in wanted.items():
        assert await listed(sort) == [job.id for job in jobs], sort
        assert await listed(sort, words="chat") == [job.id for job in jobs], sort
        assert await listed(sort, "one") == [part.id], sort
    failed = JobFilter(status=JobState.FAILED)
    assert await store.search_every_job(None, failed, after=None, count_max=9, sort=JobSort.SIZE) == []
    old = JobFilter(to_ms=part.created_at)
    assert await store.search_every_job(None, old, after=None, count_max=9, sort=JobSort.COST) == []


@pytest.mark.parametrize("sort", list(JobSort))
async def test_pages_of_a_list_go_on_while_its_jobs_are_deleted(world: StoreWorld, sort: JobSort) -> None:
    store, caller, other_caller = world.store, await world.caller(), await world.caller("another")
    ours, wanted = caller.tenant_id, JobFilter()
    for count, nano in ((3, 20), (2, 10), (2, 10), (4, 30)):
        job = await world.running(caller, *([1] * count), window_ms=DAY_MS - nano)
        await paid(world, job, (0,), tuple(range(1, count)), nano)
    listed = await store.search_jobs(ours, wanted, count_max=10, sort=sort)
    assert listed is not None
    seen: list[str] = []
    while page := await store.search_jobs(ours, wanted, after=seen[-1] if seen else None, count_max=1, sort=sort):
        [gone] = page
        seen.append(gone.id)
        token = world.token()
        assert await store.take_step(gone.id, JobState.FINALIZING, await world.worker(), token)
        await store.publish_job(gone, token, added=(None, None), rewrites=(None, None), end=JobEnd(None))
        await store.forget_job(gone.id)
        every = await store.search_every_job(None, wanted, after=gone.id, count_max=10, sort=sort)
        assert [job.id for job, _ in every or []] == [job.id for job in listed[len(seen) :]]
        assert await store.search_jobs(other_caller.tenant_id, wanted, after=gone.id, count_max=1, sort=sort) is None
    assert seen == [job.id for job in listed]
    assert len(seen) == 4


@pytest.mark.parametrize("words", ["chat", "nowhere"])
async def test_few_jobs_that_match_are_not_looked_for_in_the_order_of_the_list(
    world: StoreWorld, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In that order PostgreSQL goes from one end of the table to the other for each job: over 100,000 of them it took 135 ms."""
    [await world.running(await world.caller("one"), 4) for _ in range(3)]
    asked: list[str] = []

    async def read(body: TransactionBody[T]) -> T:
        async def noted(tx: Tx) -> T:
            for name in ("all", "dicts"):
                ask = getattr(tx, name)

                async def noting(query: str, /, *, ask: Any = ask, **parameters: Any) -> Any:
                    asked.append(query)
                    return await ask(query, **parameters)

                setattr(tx, name, noting)
            return await body(tx)

        return await plain(noted)

    plain = world.store._driver.read
    monkeypatch.setattr(world.store._driver, "read", read)
    for sort in (JobSort.SIZE, JobSort.COST, JobSort.FAILED):
        page = await world.store.search_every_job(None, JobFilter(words=words), after=None, count_max=9, sort=sort)
        assert len(page or ()) == (3 if words == "chat" and sort is JobSort.SIZE else 0)
    assert asked
    assert not [query for query in asked if query.startswith("jobs_by_")]


async def test_what_is_queued_again_wakes_no_flow_of_another_job(world: StoreWorld) -> None:
    moment = JobControls(not_before=world.clock.now + 3_600_000)
    ours = await world.running(await world.caller("one"), 2)
    theirs = await world.running(await world.caller("two"), 2, controls=moment)
    assert await world.store.rest_flow(MODEL, theirs.share_owner)
    assert await world.store.requeue_job(ours.id) is not None
    assert await world.store.wake_rested(10) == 0
    assert await world.store.requeue_job(theirs.id) is not None
    assert await world.store.wake_rested(10) == 1


async def test_a_job_that_is_being_cancelled_is_not_ended_as_failed(world: StoreWorld) -> None:
    caller = await world.caller()
    job = await world.job(caller)
    await world.store.cancel_job(caller.tenant_id, job.id)
    with pytest.raises(ApiProblem, match="ended as failed"):
        await world.store.end_as_failed(job.id)
    assert (await world.look(job)).closing is JobState.CANCELLED


@pytest.mark.parametrize("few_max", [1, sorted_jobs.FEW_MAX])
async def test_jobs_without_items_are_the_smallest(
    world: StoreWorld, few_max: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sorted_jobs, "FEW_MAX", few_max)
    caller = await world.caller()
    waiting, large, small = await world.job(caller), await world.running(caller, 4), await world.running(caller, 1)
    page = await world.store.search_every_job(None, JobFilter(), after=None, count_max=10, sort=JobSort.SIZE)
    assert [job.id for job, _ in page or ()] == [large.id, small.id, waiting.id]


async def test_a_list_by_failures_goes_on_behind_a_job_of_one_item_and_behind_a_deleted_one(world: StoreWorld) -> None:
    store, caller = world.store, await world.caller()
    jobs = list[Job]()
    for count, failed in ((1, (0,)), (3, (1, 2)), (2, (1,))):
        job = await world.running(caller, *([1] * count))
        await paid(world, job, (0,) if count > 1 else (), failed, nano=5)
        jobs.append(job)

    async def behind(job: Job) -> list[str]:
        page = await store.search_jobs(caller.tenant_id, JobFilter(), after=job.id, count_max=10, sort=JobSort.FAILED)
        return [one.id for one in page or ()]

    assert await behind(jobs[0]) == [jobs[1].id, jobs[2].id]
    token = world.token()
    assert await store.take_step(jobs[2].id, JobState.FINALIZING, await world.worker(), token)
    await store.publish_job(await world.look(jobs[2]), token, end=JobEnd(None))
    await store.forget_job(jobs[2].id)
    assert await behind(jobs[2]) == []


async def test_a_job_whose_input_was_refused_has_failed_as_an_operator_asks(world: StoreWorld) -> None:
    job, token = await world.job(await world.caller()), world.token()
    assert await world.store.take_step(job.id, JobState.VALIDATING, await world.worker(), token)
    await world.store.refuse_job(job.id, token, [LineError("bad", "no")])
    refused = await world.look(job)
    assert (refused.state, refused.closing) == (JobState.FAILED, None)
    assert await world.store.end_as_failed(job.id) == refused


async def test_an_operator_ends_a_job_that_waits(world: StoreWorld) -> None:
    job = await world.job(await world.caller("one"))
    store = world.store
    assert await store.requeue_job(job.id) is not None
    for _ in range(2):
        ended = await store.end_as_failed(job.id)
        assert ended is not None
        assert ended.closing is JobState.FAILED
    assert await store.jobs_closing_unstarted(10) == [job.id]
    assert await store.end_unstarted(job.id)
    after = await store.any_job(job.id)
    assert after is not None
    assert (after.state, after.failed_at is not None) == (JobState.FAILED, True)
    with pytest.raises(ApiProblem, match="finalized again"):
        await store.retry_finalization(job.id)
    with pytest.raises(ApiProblem, match="queued again"):
        await store.requeue_job(job.id)
    assert await store.end_as_failed(world.id("batch")) is None
    assert await store.retry_finalization(world.id("batch")) is None
    assert await store.requeue_job(world.id("batch")) is None
    assert await store.refresh_flows() == 0
    assert await store.list_flows(None, 10) == []


@pytest.mark.parametrize("verb", ["retry_finalization", "requeue_job"])
async def test_a_job_that_rests_after_failures_is_published_at_once_when_an_operator_asks(
    world: StoreWorld, verb: str
) -> None:
    job, _, token = await closed(world, answered=1, failed=0, rest=0)
    await world.store.drop_step(job.id, token, DAY_MS)
    assert await world.store.jobs_to_publish(PublishTurns()) == []
    assert await getattr(world.store, verb)(job.id) is not None
    assert await world.store.jobs_to_publish(PublishTurns()) == [job.id]


async def test_keys_and_deliveries_of_every_tenant(world: StoreWorld) -> None:
    one, two = await world.caller("one"), await world.caller("two")
    store = world.store
    for key_id, caller in (("aaaaaaaa", one), ("bbbbbbbb", two)):
        await store.put_key(replace(caller, key_id=key_id), b"hash", "", KeyRights())
        await world.clock.advance(5)
    page = await store.key_page(None, after=None, count_max=10)
    assert page is not None
    assert [(row["id"], row["tenant"]) for row in page] == [("bbbbbbbb", "two"), ("aaaaaaaa", "one")]
    assert await store.key_page(None, after="bbbbbbbb", count_max=10) == page[1:]
    assert await store.key_page("two", after=None, count_max=10) == page[:1]
    assert await store.key_page(None, after="cccccccc", count_max=10) is None

    shape = EndpointShape("hook", "https://hooks.example.com/a", EVENT_TYPES)
    for caller in (one, two):
        await store.create_webhook_endpoint(caller.tenant_id, world.id("whk"), shape, b"1" * 32)
        job = await world.job(caller)
        await store.cancel_job(caller.tenant_id, job.id)
        assert await store.end_unstarted(job.id)
        await world.clock.advance(5)
    every = await store.list_every_delivery(None, None, None, 10)
    assert every is not None
    assert [org for _, org in every] == ["two", "one"]
    newest = (every[0][0].event_id, every[0][0].endpoint_id)
    assert await store.list_every_delivery(None, None, newest, 10) == every[1:]
    assert await store.list_every_delivery("one", DeliveryState.PENDING, None, 10) == every[1:]
    assert await store.list_every_delivery(None, DeliveryState.FAILED, None, 10) == []
    assert await store.list_every_delivery(None, None, ("evt", "whk"), 10) is None
    assert await store.tenant_of_delivery(*newest) == two.tenant_id
    assert await store.tenant_of_delivery("evt", "whk") is None


async def test_what_is_due_when(world: StoreWorld) -> None:
    caller, store = await world.caller(), world.store
    assert await store.due_work() == WaitingWork({}, False)
    job = await world.job(caller)
    assert await store.due_work() == WaitingWork({}, True)
    await world.ingested(job, plan_of(3))
    waiting = await store.due_work()
    [(model, [due])] = waiting.due.items()
    assert (model, due.due_in_ms, waiting.has_steps) == (MODEL, DAY_MS, False)
    assert due.units > 0


async def test_a_worker_is_wanted_for_what_is_not_an_item(world: StoreWorld) -> None:
    """A job to publish, an operation, a delivery, and a deadline that passed while the job was paused."""
    store, none, some = world.store, WaitingWork({}, False), WaitingWork({}, True)
    job, _, token = await closed(world, answered=3, failed=0, rest=0)
    assert await store.due_work() == some
    await publish(world, job, token)
    assert await store.due_work() == none

    made = await store.put_operation(world.id("op"), "operator", OperationScope("pause"))
    assert await store.due_work() == some
    await store.cancel_operation(made.id)
    assert await store.due_work() == none

    caller = await world.caller()
    paused = await world.running(caller, 2)
    await store.pause_job(caller.tenant_id, paused.id)
    assert await store.due_work() == none, "what is paused waits for its owner"
    await world.clock.advance(DAY_MS + 1)
    assert await store.due_work() == some, "it has to expire"


async def test_a_worker_is_wanted_for_a_delivery(world: StoreWorld) -> None:
    caller, store = await world.caller(), world.store
    shape = EndpointShape("hook", "https://hooks.example.com/a", EVENT_TYPES)
    await store.create_webhook_endpoint(caller.tenant_id, world.id("whk"), shape, b"1" * 32)
    job = await world.job(caller)
    await store.cancel_job(caller.tenant_id, job.id)
    assert await store.end_unstarted(job.id)
    assert await store.due_work() == WaitingWork({}, True)
