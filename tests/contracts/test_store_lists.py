"""What every store lists: in which order, and never more than was asked for."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import pytest

from tests.contracts.store_world import MODEL, StoreWorld, plan_of, tries
from tests.contracts.test_store_operated import paid
from tests.contracts.test_store_responses import Ask
from tests.contracts.test_store_usage import TODAY, answers
from tests.support.store_verbs import any_file
from tidegate.core.job_lists import JobFilter, JobSort
from tidegate.core.nouns import Caller, IngestPlan, Job, JobEnd, JobFlush, Usage
from tidegate.core.operations import OperationScope
from tidegate.core.ports import Present, WorkerReport
from tidegate.core.schedule.autoscale import DueWork
from tidegate.core.schedule.outlooks import Backlog
from tidegate.core.schedule.share_owner import tenant_owner
from tidegate.core.states import JobState
from tidegate.core.webhooks import EVENT_TYPES, EndpointShape
from tidegate.store.fleet import fleet, workers
from tidegate.store.operators import operated
from tidegate.store.road import forecasts
from tidegate.store.tenants.keys import KeyRights

pytestmark = pytest.mark.anyio

T = TypeVar("T")
HOUR_MS = 3_600_000


async def lists(verb: Callable[[int], Awaitable[Sequence[T] | None]], expected: Sequence[T]) -> None:
    """The whole list is this one, and its beginning is what fewer are."""
    assert list(await verb(len(expected) + 1) or ()) == list(expected)
    assert list(await verb(len(expected) - 1) or ()) == list(expected[:-1])


def newest_first(made: Sequence[str]) -> list[str]:
    """Of things of which all but the last were made at one moment: those are listed by id."""
    return [made[-1], *sorted(made[:-1], reverse=True)]


async def cancelled(world: StoreWorld, caller: Caller) -> Job:
    job = await world.job(caller)
    await world.store.cancel_job(caller.tenant_id, job.id)
    assert await world.store.end_unstarted(job.id)
    return job


async def test_jobs_that_close_are_found_oldest_first(world: StoreWorld) -> None:
    caller, waiting, running = await world.caller(), list[str](), list[str]()
    for _ in range(3):
        waiting.append((await world.job(caller, window_ms=5_000)).id)
        await world.clock.advance(10)
        running.append((await world.running(caller, 1, window_ms=5_000)).id)
        await world.clock.advance(10)
    assert len(await world.store.jobs_waiting_ingest(2)) == 2
    await world.clock.advance(5_000)
    every = [job_id for pair in zip(waiting, running, strict=True) for job_id in pair]
    await lists(world.store.overdue_jobs, every)
    for job_id in reversed(every):
        assert await world.store.expire_job(job_id)
    await lists(world.store.jobs_closing_unstarted, waiting)
    await lists(partial(world.store.draining_jobs, 60_000), running)


async def test_workers_are_overdue_in_the_order_of_their_leases_and_shown_the_newest_first(
    world: StoreWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = list[str]()
    for host, lease_ms in (("a", 3_000), ("b", 1_000), ("c", 2_000)):
        made.append(world.id("worker"))
        await world.store.enlist_worker(made[-1], host, "1", lease_ms)
        await world.store.report_worker(made[-1], WorkerReport())
        await world.clock.advance(10)
    assert [one.host for one in await world.store.worker_reports()] == ["c", "b", "a"]
    monkeypatch.setattr(workers, "REPORTS_MAX", 2)
    assert [one.host for one in await world.store.worker_reports()] == ["c", "b"]
    await world.clock.advance(5_000)

    async def overdue(count_max: int) -> list[str]:
        return list(await world.store.overdue_workers(count_max))

    await lists(overdue, [made[1], made[2], made[0]])


async def test_flows_wake_in_the_order_in_which_their_rest_ends(world: StoreWorld) -> None:
    worker, owners = await world.worker(), dict[int, str]()
    for wait_ms in (3_000, 1_000, 2_000):
        job = await world.running(await world.caller(f"t{wait_ms}"), 1)
        [held] = await world.lease(worker, job)
        assert await world.store.release_slice(job.id, held.first, held.token, wait_ms)
        assert await world.store.rest_flow(MODEL, job.share_owner)
        owners[wait_ms] = job.share_owner
    await world.clock.advance(3_000)
    assert await world.store.wake_rested(2) == 2
    awake = {flow.share_owner for flow in await world.store.awake_flows(None, 10)}
    assert awake == {owners[1_000], owners[2_000]}


async def test_an_overview_shows_models_by_name_and_what_is_stuck_by_its_deadline(
    world: StoreWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    caller, jobs = await world.caller(), list[str]()
    for model, window_ms in (("b", 400_000), ("a", 500_000), ("c", 300_000)):
        job = await world.job(caller, window_ms=window_ms)
        jobs.append((await world.ingested(job, plan_of(1, model=model))).id)
    seen = await world.store.overview()
    assert [row["model"] for row in seen.models] == ["a", "b", "c"]
    assert [row["id"] for row in seen.stuck] == [jobs[2], jobs[0], jobs[1]]
    monkeypatch.setattr(operated, "MODELS_MAX", 2)
    monkeypatch.setattr(operated, "STUCK_MAX", 2)
    seen = await world.store.overview()
    assert [row["model"] for row in seen.models] == ["a", "b"]
    assert [row["id"] for row in seen.stuck] == [jobs[2], jobs[0]]


async def test_an_overview_counts_the_latest_ends(world: StoreWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    caller = await world.caller()
    late = await world.job(caller, window_ms=5_000)
    await cancelled(world, caller)
    await world.clock.advance(5_000)
    assert await world.store.expire_job(late.id)
    assert await world.store.end_unstarted(late.id)
    assert [row["state"] for row in (await world.store.overview()).ended] == ["cancelled", "expired"]
    monkeypatch.setattr(operated, "ENDED_MAX", 1)
    assert [row["state"] for row in (await world.store.overview()).ended] == ["expired"]


async def test_work_is_due_by_model_the_next_deadline_first(world: StoreWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    caller = await world.caller()
    for model, window_ms in (("b", HOUR_MS), ("a", 3 * HOUR_MS), ("a", 2 * HOUR_MS)):
        await world.ingested(await world.job(caller, window_ms=window_ms), plan_of(1, model=model))
    first, second = DueWork(2 * HOUR_MS, 50), DueWork(3 * HOUR_MS, 50)
    assert (await world.store.due_work()).due == {"a": [first, second], "b": [DueWork(HOUR_MS, 50)]}
    monkeypatch.setattr(operated, "DUE_MAX", 1)
    assert (await world.store.due_work()).due == {"a": [first]}


@pytest.mark.parametrize("order", ["desc", "asc"])
async def test_a_page_of_files_has_no_more_than_was_asked_for(world: StoreWorld, order: str) -> None:
    caller = await world.caller()
    made = sorted([(await world.file(caller)).id for _ in range(3)], reverse=order == "desc")

    async def page(count_max: int) -> list[str]:
        found = await world.store.list_files(caller.tenant_id, after=None, count_max=count_max, order=order)
        return [file.id for file in found or ()]

    await lists(page, made)


async def test_pages_of_webhooks_have_no_more_than_was_asked_for(world: StoreWorld) -> None:
    caller, shape = await world.caller(), EndpointShape("one", "https://hooks.example.com/", EVENT_TYPES)
    made = list[str]()
    for later_ms in (0, 0, 1):
        await world.clock.advance(later_ms)
        made.append((await world.store.create_webhook_endpoint(caller.tenant_id, world.id("whk"), shape, b"s" * 32)).id)

    async def endpoints(count_max: int) -> list[str]:
        found = await world.store.list_webhook_endpoints(caller.tenant_id, None, count_max)
        return [one.id for one in found or ()]

    await lists(endpoints, newest_first(made))
    await cancelled(world, caller)
    await world.clock.advance(1)
    await cancelled(world, caller)

    async def own(count_max: int) -> list[tuple[str, str]]:
        found = await world.store.list_webhook_deliveries(caller.tenant_id, None, None, count_max)
        return [(one.event_id, one.endpoint_id) for one in found or ()]

    async def anyones(count_max: int) -> list[tuple[str, str]]:
        found = await world.store.list_every_delivery(None, None, None, count_max)
        return [(one.event_id, one.endpoint_id) for one, _ in found or ()]

    newest = await world.store.list_webhook_deliveries(caller.tenant_id, None, None, 9) or []
    expected = sorted(newest, key=lambda one: (one.created_at, one.event_id, one.endpoint_id), reverse=True)
    for verb in (own, anyones):
        await lists(verb, [(one.event_id, one.endpoint_id) for one in expected])


async def test_pages_of_keys_tenants_and_operations_have_no_more_than_was_asked_for(world: StoreWorld) -> None:
    store, tenants, operations = world.store, list[str](), list[str]()
    for name in ("k2", "k3", "k1"):
        await world.clock.advance(int(name == "k1"))
        tenants.append((await world.caller(f"of {name}")).tenant_id)
        await store.put_key(Caller(tenants[-1], name), name.encode(), "", KeyRights())
        operations.append((await store.put_operation(world.id("op"), "operator", OperationScope("pause"))).id)

    async def ids(page: Awaitable[Sequence[Any] | None]) -> list[str]:
        return [one["id"] if isinstance(one, dict) else one.id for one in await page or ()]

    await lists(lambda most: ids(store.key_page(None, after=None, count_max=most)), ["k1", "k3", "k2"])
    await lists(lambda most: ids(store.list_orgs(after=None, count_max=most)), newest_first(tenants))
    await lists(lambda most: ids(store.list_operations(after=None, count_max=most)), newest_first(operations))


async def test_the_oldest_operation_is_next(world: StoreWorld) -> None:
    store, made = world.store, list[str]()
    for _ in range(2):
        made.append((await store.put_operation(world.id("op"), "operator", OperationScope("pause"))).id)
        await world.clock.advance(10)
    assert await store.waiting_operation(await world.worker()) == made[0]


async def test_a_sorted_page_begins_with_the_first_of_its_order(world: StoreWorld) -> None:
    caller, made = await world.caller(), list[str]()
    for count, window_ms in ((4, 3 * HOUR_MS), (5, HOUR_MS), (6, 2 * HOUR_MS)):
        job = await world.running(caller, count, window_ms=window_ms)
        [held] = await world.lease(await world.worker(), job)
        await world.record(world.errors(await world.log("errors"), job, 0, token=held.token))
        paid = answers(await world.log(), job, [(1, "a", Usage(1_000 * count, 0, 5, 0))])
        await world.store.record_outcomes([paid], [], [])
        made.append(job.id)
        await world.clock.advance(10)

    async def page(sort: JobSort, count_max: int) -> list[int]:
        found = await world.store.search_every_job(None, JobFilter(), after=None, count_max=count_max, sort=sort)
        return [made.index(job.id) for job, _ in found or ()]

    expected = {JobSort.DEADLINE: [1, 2, 0], JobSort.FAILED: [0, 1, 2]}
    for sort in JobSort:
        await lists(partial(page, sort), expected.get(sort, [2, 1, 0]))


@pytest.mark.parametrize("sort", [JobSort.COST, JobSort.FAILED])
async def test_ended_batches_that_cost_or_failed_are_listed_the_most_first(world: StoreWorld, sort: JobSort) -> None:
    """Those of which nothing failed or that cost nothing are in no such list, and responses are in none."""
    caller, store, made = await world.caller(), world.store, list[str]()

    async def give_up(job: Job) -> None:
        await store.cancel_job(caller.tenant_id, job.id)
        assert await store.close_job(job.id, 0)
        await store.abandon_job(caller.tenant_id, job.id, None)

    for item_count, nano in ((20, 20), (10**6, 1), (20, 20), (10, 30)):
        made.append((job := await world.running(caller, item_count)).id)
        await paid(world, job, (0,), (1,), nano)
        await give_up(job)
    free, worker = await world.running(caller, 2), await world.worker()
    await world.answer(await world.log(), free, 0)
    await give_up(free)
    for answered, failed in (((0,), ()), ((), (0,))):
        response = await Ask(world).accept(world, caller, worker)
        await paid(world, response, answered, failed, 40)
        token = world.token()
        assert await store.take_step(response.id, JobState.FINALIZING, worker, token)
        await store.publish_job(await world.look(response), token, end=JobEnd(None))

    async def page(count_max: int) -> list[str]:
        found = await store.search_every_job(None, JobFilter(), after=None, count_max=count_max, sort=sort)
        return [job.id for job, _ in found or ()]

    first, second, third, fourth = made
    expected = [fourth, *sorted([first, third], reverse=True), second]
    await lists(page, expected)
    assert await page(2) == expected[:2]


async def test_pages_of_batches_that_ended_in_one_way_go_on_behind_the_last_one(world: StoreWorld) -> None:
    caller, store, worker = await world.caller(), world.store, await world.worker()
    late = await world.job(caller, window_ms=5)
    made = [(await cancelled(world, caller)).id for _ in range(3)]
    await world.clock.advance(10)
    assert await store.expire_job(late.id)
    assert await store.end_unstarted(late.id)
    made.append((await cancelled(world, caller)).id)
    response = await Ask(world).accept(world, caller, worker)
    await store.cancel_job(caller.tenant_id, response.id)
    assert await store.close_job(response.id, 0)
    token = world.token()
    assert await store.take_step(response.id, JobState.FINALIZING, worker, token)
    await store.publish_job(await world.look(response), token, end=JobEnd(None))
    assert (await world.look(response)).state is JobState.CANCELLED
    found, own = list[str](), list[str]()
    for number in range(5):
        wanted, after = JobFilter(status="cancelled"), found[-1] if number else None
        page = await store.search_every_job(None, wanted, after=after, count_max=1)
        found += [job.id for job, _ in page or ()]
        own += [job.id for job in await store.search_jobs(caller.tenant_id, wanted, after=after, count_max=1) or ()]
    assert found == own == newest_first(made)


async def test_the_runs_of_a_file_are_shown_the_newest_first(world: StoreWorld) -> None:
    caller = await world.caller()
    file, made = await world.file(caller), list[str]()
    for _ in range(2):
        made += sorted([(await world.job(caller, file)).id for _ in range(2)])
        await world.clock.advance(1)

    async def runs(count_max: int) -> list[str]:
        return [job.id for job in await world.store.runs_of_file(caller.tenant_id, file.id, count_max)]

    await lists(runs, made[::-1])


async def test_items_are_listed_by_number_their_lines_by_place_and_their_models_by_name(world: StoreWorld) -> None:
    store, caller, worker = world.store, await world.caller(), await world.worker()
    slices = [*plan_of(2).slices, *plan_of(2, 2, model="a model").slices[1:]]
    job = await world.ingested(await world.job(caller, door="{}"), IngestPlan(4, None, slices, 400, 320, 80))
    assert await store.models_of_job(job.id) == ["a model", MODEL]
    [held] = await world.lease(worker, job)
    log = await world.log()
    waiting = [(held.token, tries(0, reason="b")), (held.token, tries(1, reason="a"))]
    await store.record_outcomes([JobFlush(job.id, attempts=waiting)], [], [])
    explained = await store.explain_inputs(job.id)
    assert explained is not None
    assert explained.waiting_reasons == (("a", 1), ("b", 1))
    for number in (1, 0):
        await world.clock.advance(5)
        await world.answer(log, job, number, token=held.token)
    assert [one.number for one in await store.item_places(job.id, 0, 4)] == [0, 1]
    assert [one.number for one in await store.outcomes_within(job.id, 0, 1 << 40, is_output=True)] == [1, 0]
    moments = [one.happened_at for one in await store.recorded_moments(job.id)]
    assert moments == sorted(moments)
    assert len(set(moments)) == 2


async def test_leased_items_are_listed_by_number(world: StoreWorld) -> None:
    job, worker = await world.running(await world.caller(), 1, 1, 1), await world.worker()
    await world.lease(worker, job)
    assert await world.store.leased_spans(job.id) == [(0, 1), (1, 1), (2, 1)]


async def test_files_in_most_pieces_come_first_and_files_of_a_blob_by_id(world: StoreWorld) -> None:
    caller, shared, jobs = await world.caller(), await world.log(), list[Job]()
    for count in (2, 4, 3):
        job = await world.running(caller, 9)
        for number in range(count):
            await world.answer(shared if number == 0 else await world.log(), job, number)
        jobs.append(await world.look(job))
    expected = [(jobs[at].output_file_id, count) for at, count in ((1, 4), (2, 3))]
    assert await world.store.crowded_files(2) == expected
    files = sorted(str(job.output_file_id) for job in jobs)
    await lists(partial(world.store.files_of_blob, shared.blob_id), files)


async def test_the_files_that_were_deleted_first_are_forgotten_first(world: StoreWorld) -> None:
    caller = await world.caller()
    files = [await world.file(caller) for _ in range(3)]
    for file in reversed(files):
        assert await world.store.delete_file(caller.tenant_id, file.id)
        await world.clock.advance(10)
    await world.store.prune_files(0, 2)
    assert [await any_file(world.store, file.id) is not None for file in files] == [True, False, False]


@pytest.mark.parametrize("by_job", [False, True])
async def test_usage_is_listed_by_day(world: StoreWorld, by_job: bool) -> None:
    caller, log = await world.caller(), await world.log()
    for _ in range(3):
        job = await world.running(caller, 1)
        await world.store.record_outcomes([answers(log, job, [(0, "a", Usage(1, 0, 1, 0))])], [], [])
        await world.clock.advance(24 * HOUR_MS)

    async def days(count_max: int) -> list[str]:
        found = await world.store.usage(TODAY, TODAY + 9, by_job=by_job, count_max=count_max)
        return [one.day for one in found]

    expected = sorted(await days(9))
    assert len(set(expected)) == 3
    await lists(days, expected)


async def test_so_many_tides_are_shown_at_most(world: StoreWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("b", "c", "a"):
        await world.store.report_to_fleet(world.id("worker"), {name: Present(1, 1, why=f"why {name}")})
    assert await world.store.tides() == [("a", "why a"), ("b", "why b"), ("c", "why c")]
    monkeypatch.setattr(fleet, "_SHOWN_MAX", 2)
    assert await world.store.tides() == [("a", "why a"), ("b", "why b")]


async def test_of_other_flows_the_first_jobs_of_those_served_least_are_looked_at(
    world: StoreWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    small, large = await world.caller("small"), await world.caller("large")
    for count, caller in ((1, small), (2, small), (4, large)):
        job = await world.running(caller, count)
        await world.clock.advance(1)
    await world.answer(await world.log(), job, 0)
    forecast = partial(world.store.forecast, MODEL, tenant_owner("new"), Backlog(500, 5))
    assert (await forecast()).others == ((1.0, Backlog(150, 3)), (1.0, Backlog(150, 3)))
    monkeypatch.setattr(forecasts, "OUTLOOK_JOBS_MAX", 1)
    assert (await forecast()).others == ((1.0, Backlog(50, 1)), (1.0, Backlog(150, 3)))
    monkeypatch.setattr(forecasts, "OUTLOOK_FLOWS_MAX", 1)
    assert (await forecast()).others == ((1.0, Backlog(50, 1)), (1.0, None))
