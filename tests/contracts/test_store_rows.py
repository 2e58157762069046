"""What single statements of every store leave in their rows, and which rows they leave alone."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tests.contracts.store_world import LEASE_MS, MODEL, START_MS, StoreWorld, plan_of, tries
from tests.contracts.test_store_publish import closed
from tests.contracts.test_store_slices import lost_before
from tests.contracts.test_store_usage import TODAY
from tests.support.store_verbs import run_statement
from tidegate.core.nouns import Job, JobEnd, JobFlush, WorkerDuty
from tidegate.core.schedule.share_owner import tenant_owner
from tidegate.core.schedule.snapshot import Pick, Why
from tidegate.core.states import JobState
from tidegate.core.webhooks import EVENT_TYPES, EndpointShape
from tidegate.store.database.driver import Tx

pytestmark = pytest.mark.anyio

AMOUNTS = {
    "calls": 1,
    "input_tokens": 2,
    "cached_tokens": 3,
    "output_tokens": 4,
    "reasoning_tokens": 5,
    "input_nano": 6,
    "cached_nano": 7,
    "output_nano": 8,
}
EVERYTHING = {"from_day": TODAY, "to_day": TODAY + 1, "tenant_id": "", "count_max": 100}


async def row_of(world: StoreWorld, job: Job) -> dict[str, Any]:
    """A job as it lies in its table."""

    async def read(tx: Tx) -> dict[str, Any]:
        return dict((await tx.dicts("job_any", id=job.id))[0])

    return await world.store._driver.read(read)


@pytest.mark.parametrize("statement", ["usage_by_job", "usage_by_day"])
async def test_interactive_usage_adds_up_and_is_listed_by_what_it_is_counted_for(
    world: StoreWorld, statement: str
) -> None:
    places = list(itertools.product(("t1", "t2"), ("k1", "k2"), ("m1", "m2"), ("d1", "d2")))
    for _ in range(2):
        for tenant, key, model, deployment in reversed(places):
            place = {"tenant_id": tenant, "key_id": key, "model": model, "deployment": deployment}
            await run_statement(world.store, "usage_interactive_add", team="", user_name="", **place, **AMOUNTS)
    assert await run_statement(world.store, statement, **EVERYTHING) == [
        (TODAY, tenant, "", "", key, "", model, deployment, *(2 * amount for amount in AMOUNTS.values()))
        for tenant, key, model, deployment in places
    ]


async def test_usage_by_day_is_listed_by_team_and_user_before_keys(world: StoreWorld) -> None:
    for team, user, key in (("b", "y", "k1"), ("b", "x", "k2"), ("a", "z", "k3")):
        place = {"tenant_id": "t", "key_id": key, "model": "m", "deployment": "d"}
        await run_statement(world.store, "usage_interactive_add", team=team, user_name=user, **place, **AMOUNTS)
    assert [row[4] for row in await run_statement(world.store, "usage_by_day", **EVERYTHING)] == ["k3", "k2", "k1"]


async def test_a_forecast_is_made_of_one_flow_of_one_model(world: StoreWorld) -> None:
    first, second, third = [await world.caller(name) for name in "abc"]
    jobs = [await world.ingested(await world.job(first), plan_of(4), weight_milli=2_000) for _ in range(2)]
    for caller, model in ((second, MODEL), (third, MODEL), (first, "x"), (first, "y")):
        await world.ingested(await world.job(caller), plan_of(1, model=model))
    await world.answer(await world.log(), jobs[0], 0)
    flow = {"model": MODEL, "share_owner": tenant_owner(first.tenant_id)}
    assert await run_statement(world.store, "forecast_flow", jobs_max=9, **flow) == [(2_000, 1, 350, 7)]
    assert (await run_statement(world.store, "forecast_flow", jobs_max=1, **flow))[0][2] in (150, 200)
    assert await run_statement(world.store, "forecast_flow", jobs_max=9, model=MODEL, share_owner="x") == [
        (1_000, 0, 0, 0)
    ]


async def test_a_census_tells_models_apart_and_counts_nothing_where_nothing_is_out(world: StoreWorld) -> None:
    caller = await world.caller()
    for model in ("x", "y"):
        await world.ingested(await world.job(caller), plan_of(2, model=model))
    assert sorted(row[1] for row in await run_statement(world.store, "census_queue")) == ["x", "y"]
    assert await run_statement(world.store, "census_leased") == [(0, 0, 0)]


async def test_a_job_that_was_not_asked_to_close_does_not_end(world: StoreWorld) -> None:
    job = await world.job(await world.caller())
    assert not await world.store.end_unstarted(job.id)
    assert (await world.look(job)).state is JobState.VALIDATING


async def test_a_file_that_is_shown_is_not_shown_again(world: StoreWorld) -> None:
    file = await world.file(await world.caller())
    shape = {"size_bytes": 1, "line_count": 1, "expires_after_ms": None}
    assert await run_statement(world.store, "file_show", id=file.id, **shape) == []


async def test_a_job_that_runs_is_not_resumed_and_one_that_is_paused_is_once(world: StoreWorld) -> None:
    caller = await world.caller()
    name = {"tenant_id": caller.tenant_id, "id": (await world.running(caller, 1)).id}
    for statement, done in (("job_resume", 0), ("job_pause", 1), ("job_pause", 0), ("job_resume", 1)):
        assert len(await run_statement(world.store, statement, **name)) == done


async def test_every_control_of_a_job_is_changed(world: StoreWorld) -> None:
    job = await world.running(await world.caller(), 1)
    controls = {
        "priority": 1,
        "not_before": 2,
        "window_text": "3",
        "expires_at": 4,
        "max_cost_nano": 5,
        "max_errors_count": 6,
        "max_errors_ppm": 7,
        "max_errors_after": 8,
    }
    assert await run_statement(world.store, "job_change", id=job.id, **controls)
    row = await row_of(world, job)
    assert {name: row[name] for name in controls} == controls


@pytest.mark.parametrize("is_abandoned", [False, True])
async def test_the_step_of_a_job_ends_with_the_job(world: StoreWorld, is_abandoned: bool) -> None:
    job, _, token = await closed(world, answered=1, failed=1, rest=1 if is_abandoned else 0)
    assert (await row_of(world, job))["step_token"] == token
    if is_abandoned:
        await world.store.abandon_job(job.tenant_id, job.id, None)
    else:
        await world.store.publish_job(await world.look(job), token, end=JobEnd(None))
    row = await row_of(world, job)
    assert (row["step_token"], row["step_worker_id"]) == (None, None)
    assert row["closing"] == ("failed" if is_abandoned else "completed")
    assert row["final_failed_ppm"] == (333_333 if is_abandoned else 500_000)


async def test_publishing_that_is_asked_for_again_has_not_failed_yet(world: StoreWorld) -> None:
    job, _, token = await closed(world, answered=1, failed=0, rest=0)
    await world.store.drop_step(job.id, token, 1_000)
    assert (await row_of(world, job))["step_failures"] == 1
    assert await run_statement(world.store, "job_retry_finalization", id=job.id)
    row = await row_of(world, job)
    assert (row["step_failures"], row["step_not_before"]) == (0, 0)


async def test_a_report_replaces_the_one_before_it(world: StoreWorld) -> None:
    worker, lately = await world.worker(), {"lately_ms": 1_000, "count_max": 9}
    names = ("workers", "calls", "interactive", "interactive_awaiting", "has_gateway", "tide")
    for number in (0, 1):
        report = dict.fromkeys(names, number)
        await run_statement(
            world.store, "fleet_report_put", deployment="d", worker_id=worker, why=f"why {number}", **report
        )
        await world.clock.advance(10)
    assert await run_statement(world.store, "fleet_report_others", worker_id="x", **lately) == [
        ("d", worker, 1, 1, 1, 1, 1, 10)
    ]
    assert await run_statement(world.store, "fleet_report_learned", worker_id=worker, **lately) == [("d", 1)]
    assert await run_statement(world.store, "fleet_report_list", **lately) == [("d", "why 1")]


async def test_a_new_secret_is_a_change_of_its_endpoint(world: StoreWorld) -> None:
    caller, shape = await world.caller(), EndpointShape("one", "https://hooks.example.com/", EVENT_TYPES)
    made = await world.store.create_webhook_endpoint(caller.tenant_id, world.id("whk"), shape, b"1" * 32)
    await world.clock.advance(5)
    rotated = await world.store.rotate_webhook_secret(caller.tenant_id, made.id, b"2" * 32, 0)
    assert rotated is not None
    assert (rotated.created_at, rotated.updated_at) == (START_MS, START_MS + 5)


async def test_a_delivery_of_a_worker_that_is_gone_is_due_though_others_live(world: StoreWorld) -> None:
    caller, shape = await world.caller(), EndpointShape("one", "https://hooks.example.com/", EVENT_TYPES)
    await world.store.create_webhook_endpoint(caller.tenant_id, world.id("whk"), shape, b"1" * 32)
    job = await world.job(caller)
    await world.store.cancel_job(caller.tenant_id, job.id)
    assert await world.store.end_unstarted(job.id)
    lost, _ = await world.worker(), await world.worker(10 * LEASE_MS)
    assert await world.store.lease_webhooks(lost, world.token(), count_max=1, tenant_max=1)
    assert not await world.store.any_webhook_due()
    assert await world.store.declare_gone(lost, leaving=True)
    assert await world.store.any_webhook_due()


async def test_only_suspects_that_this_worker_can_run_are_counted(world: StoreWorld) -> None:
    """The more owners a slice lost, the worse it is; those that lost fewer than the worst do not count."""
    caller, ours = await world.caller(), await world.worker()
    mine: dict[str, Any] = {"share_owner": "owner:ours"}
    suspect, milder, paused, theirs = [
        await world.running(caller, 1, 1, **mine),
        await world.running(caller, 1, **mine),
        await world.running(caller, 1, **mine),
        await world.running(caller, 1),
    ]
    for job, count in ((theirs, 5), (paused, 4), (suspect, 3), (milder, 2)):
        await lost_before(world, job, count)
    await world.store.pause_job(caller.tenant_id, paused.id)
    worker_id = world.id("worker")
    await world.store.enlist_worker(worker_id, "host", "1", LEASE_MS, WorkerDuty(share_owner="owner:ours"))
    [ours_seen] = await run_statement(world.store, "snapshot_now", search_max=9, worker_id=worker_id)
    [all_seen] = await run_statement(world.store, "snapshot_now", search_max=9, worker_id=ours)
    assert (ours_seen[2:4], all_seen[2:4]) == ((3, 2), (5, 1))


async def test_slices_that_lost_an_owner_lately_are_searched(world: StoreWorld) -> None:
    job, worker = await world.running(await world.caller(), 1, 1), await world.worker()

    async def recent(search_max: int) -> int:
        [seen] = await run_statement(world.store, "snapshot_now", search_max=search_max, worker_id=worker)
        return int(seen[4])

    await lost_before(world, job, 2)
    assert [await recent(search_max) for search_max in (1, 2)] == [0, 2]
    await world.clock.advance(9_999)
    assert await recent(2) == 2
    await world.clock.advance(1)
    assert await recent(2) == 0


async def test_a_slice_in_the_middle_of_a_job_is_cut_at_an_item(world: StoreWorld) -> None:
    worker, job = await world.worker(), await world.running(await world.caller(), 3, 5)
    _, held = await world.lease(worker, job)
    assert await world.store.release_tail(job.id, 3, held.token, 5)
    rows = await run_statement(world.store, "slices_unfinished", job_id=job.id)
    assert [row[:2] for row in rows] == [(0, 3), (3, 2), (5, 3)]


async def test_a_step_that_fails_rests_twice_as_long_each_time_up_to_32_times(world: StoreWorld) -> None:
    job, worker = await world.job(await world.caller()), await world.worker(10**9)
    rests = []
    for _ in range(8):
        token = world.token()
        assert await world.store.take_step(job.id, JobState.VALIDATING, worker, token)
        await world.store.drop_step(job.id, token, 10)
        rests.append((await row_of(world, job))["step_not_before"] - world.clock.now)
        await world.clock.advance(rests[-1])
    assert rests == [10, 20, 40, 80, 160, 320, 320, 320]


async def test_items_that_wait_are_counted_by_reason_and_those_that_are_done_are_not(world: StoreWorld) -> None:
    job, worker = await world.running(await world.caller(), 4), await world.worker()
    [held] = await world.lease(worker, job)
    waiting = [tries(0, reason="a"), tries(1, reason="b"), tries(2, reason="b"), tries(3, reason="a")]
    await world.record(JobFlush(job.id, attempts=[(held.token, one) for one in waiting]))
    await world.answer(await world.log(), job, 3, token=held.token)
    assert await run_statement(world.store, "attempts_waiting", job_id=job.id) == [("a", 1), ("b", 2)]


async def test_lines_within_a_range_begin_in_it_and_are_of_one_file(world: StoreWorld) -> None:
    job, worker = await world.running(await world.caller(), 4), await world.worker()
    [held] = await world.lease(worker, job)
    await world.answer(await world.log(), job, 0, 1, 2, token=held.token)
    await world.record(world.errors(await world.log("errors"), job, 3, token=held.token))
    places = {number: at for number, (_, at, _) in (await world.outcomes(job)).items()}

    async def within(start: int, end_at: int, is_output: int = 1) -> list[int]:
        span = {"start": start, "end_at": end_at, "is_output": is_output}
        return [row[0] for row in await run_statement(world.store, "outcomes_within", job_id=job.id, **span)]

    assert await within(places[1], places[2]) == [1]
    assert await within(0, places[2] + 1) == [0, 1, 2]
    assert await within(0, 10**6, is_output=0) == [3]


async def test_usage_is_of_the_days_that_are_asked_for(world: StoreWorld) -> None:
    place = {"tenant_id": "t", "key_id": "k", "model": "m", "deployment": "d", "team": "", "user_name": ""}
    await run_statement(world.store, "usage_interactive_add", **place, **AMOUNTS)
    for statement in ("usage_by_job", "usage_by_day"):
        for from_day, to_day, count in ((TODAY, TODAY + 1, 1), (TODAY - 1, TODAY, 0), (TODAY + 1, TODAY + 2, 0)):
            span = EVERYTHING | {"from_day": from_day, "to_day": to_day}
            assert len(await run_statement(world.store, statement, **span)) == count


async def test_when_flows_of_a_model_changed_says_nothing_of_other_models_and_of_ones_own(world: StoreWorld) -> None:
    first, second = await world.caller("a"), await world.caller("b")
    await world.running(first, 1)
    mine = {"model": MODEL, "share_owner": tenant_owner(second.tenant_id)}
    await world.clock.advance(5)
    await world.running(second, 1)
    await world.ingested(await world.job(first), plan_of(1, model="other"))
    assert await run_statement(world.store, "flows_changed", **mine) == [(START_MS,)]
    assert await run_statement(world.store, "flows_changed", model="none", share_owner="x") == [(0,)]


async def test_a_new_job_has_counted_nothing(world: StoreWorld) -> None:
    row = await row_of(world, await world.job(await world.caller()))
    counts = ("item", "answered", "failed", "expired", "cancelled", "unused")
    tokens, sizes = ("input", "cached", "output", "reasoning"), ("output", "error", "work", "prompt", "shared_prefix")
    names = [f"{one}_count" for one in counts] + [f"{one}_tokens" for one in tokens] + [f"{one}_bytes" for one in sizes]
    assert {name: row[name] for name in (*names, "step_not_before", "step_failures")} == dict.fromkeys(
        (*names, "step_not_before", "step_failures"), 0
    )


async def test_a_model_of_which_nothing_is_left_is_not_opened_by_a_pause(world: StoreWorld) -> None:
    job = await world.running(await world.caller(), 1)
    await run_statement(world.store, "job_models_close", job_id=job.id)
    await run_statement(world.store, "job_models_hold", job_id=job.id)
    assert await run_statement(world.store, "job_models_resume", job_id=job.id) == []


async def test_a_job_of_one_item_that_failed_has_failed_as_a_whole(world: StoreWorld) -> None:
    job, _, token = await closed(world, answered=0, failed=1, rest=0)
    await world.store.publish_job(await world.look(job), token, end=JobEnd(None))
    assert (await row_of(world, job))["final_failed_ppm"] == 1_000_000


async def test_a_job_that_was_paused_before_it_began_is_not_leased(world: StoreWorld) -> None:
    caller, worker = await world.caller(), await world.worker()
    job = await world.running(caller, 1)
    await world.store.pause_job(caller.tenant_id, job.id)
    assert await world.lease(worker, job) == []
    await world.store.resume_job(caller.tenant_id, job.id)
    assert len(await world.lease(worker, job)) == 1


async def test_the_last_slices_of_a_job_are_kept_while_a_culprit_is_searched_for(world: StoreWorld) -> None:
    job = await world.running(await world.caller(), *([1] * 6))
    await lost_before(world, job, 1, slice_count=1)
    taken = await world.store.lease_picks(
        await world.worker(), [(Pick(job.id, MODEL, 9, Why.FAIR), "t")], keeps_rest=True
    )
    assert [piece.first for piece in taken] == [0, 1, 2, 3]
