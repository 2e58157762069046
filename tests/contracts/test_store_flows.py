"""What every store knows of flows: who is awake, what each was charged, and where one begins that wakes."""

from __future__ import annotations

import pytest

from tests.contracts.store_world import LEASE_MS, MODEL, StoreWorld, line, plan_of
from tests.contracts.test_store_budgets import rows
from tests.support.store_verbs import lease_slices
from tidegate.core.nouns import AwakeFlow, Caller, Finished, IngestPlan, Job, JobFlush, LineError, Usage
from tidegate.core.policies import Policies
from tidegate.core.schedule.outlooks import Backlog
from tidegate.core.schedule.share_owner import tenant_owner
from tidegate.core.schedule.snapshot import FlowView, ModelRoom, Why
from tidegate.core.states import Outcome
from tidegate.stages.tend.flows import FlowUpkeep

pytestmark = pytest.mark.anyio

HOUR_MS = 3_600_000


async def flows(world: StoreWorld, model: str = MODEL) -> dict[str, FlowView]:
    """The flows of a model that have anything ready or out, by scope."""
    look = await world.store.snapshot("unknown", {model: ModelRoom(100)}, slice_items=64, slices_max=8)
    return {flow.share_owner: flow for flow in look.flows}


async def awake(world: StoreWorld) -> dict[str, AwakeFlow]:
    return {flow.share_owner: flow for flow in await world.store.awake_flows(None, 1_000)}


async def answered(world: StoreWorld, job: Job, *numbers: int, usage: Usage, **known: object) -> JobFlush:
    """A flush of answers that cost this much each."""
    log = await world.log()
    lines = [line(job.id, number) for number in numbers]
    entries = [
        Finished(number, Outcome.ANSWERED, len(text), 0, "", usage, **known)  # type: ignore[arg-type]
        for number, text in zip(numbers, lines, strict=True)
    ]
    return JobFlush(job.id, answers=entries, answers_placed=log.append(lines))


async def charge(world: StoreWorld, job: Job, number: int, tokens: int) -> None:
    await world.record(await answered(world, job, number, usage=Usage(input_tokens=tokens)))


async def served(world: StoreWorld, caller: Caller) -> float:
    found = (await awake(world)).get(tenant_owner(caller.tenant_id))
    assert found is not None, "the flow sleeps"
    return found.served


# ---- charging


async def test_what_was_answered_is_charged_once_by_its_real_usage(world: StoreWorld) -> None:
    caller = await world.caller()
    job = await world.running(caller, 4)
    assert await served(world, caller) == 0
    flush = await answered(world, job, 0, 1, usage=Usage(100, 50, 30, 10), model=MODEL, units=50)
    for _ in range(3):
        await world.store.record_outcomes([flush], [], [])
    assert await served(world, caller) == 2 * (100 + 2 * 30)
    second = await answered(world, job, 1, 2, usage=Usage(100, 50, 30, 10), model=MODEL, units=50)
    await world.record(second)
    assert await served(world, caller) == 3 * 160, "an answer that came second was not new"
    [pace] = (await world.store.paces([MODEL])).values()
    assert pace.ratio == 3 * 160 / (3 * 50)


async def test_an_answer_without_usage_costs_its_share_of_the_slice(world: StoreWorld) -> None:
    caller = await world.caller()
    job = await world.running(caller, 4)
    await world.record(await answered(world, job, 0, usage=Usage(), model=MODEL, units=70))
    assert await served(world, caller) == 70
    await world.record(await answered(world, job, 1, usage=Usage()))
    assert await served(world, caller) == 70 + 50, "what a dead worker's log does not say, the slice does"
    assert (await world.store.paces([MODEL]))[MODEL].ratio == 1.0


async def test_failing_is_not_free_and_says_nothing_about_the_rate(world: StoreWorld) -> None:
    caller, worker, log = await world.caller(), await world.worker(), await world.log("errors")
    job = await world.running(caller, 4)
    [held] = await world.lease(worker, job)
    flush = world.errors(log, job, 0, 1, token=held.token)
    for _ in range(2):
        await world.record(flush)
    assert await served(world, caller) == 100
    assert (await world.store.paces([MODEL]))[MODEL].rate is None


async def test_what_a_closed_job_gets_is_not_charged(world: StoreWorld) -> None:
    caller = await world.caller()
    job, other = await world.running(caller, 4), await world.running(caller, 4)
    await world.store.cancel_job(caller.tenant_id, job.id)
    await world.store.close_job(job.id, -1)
    await charge(world, job, 0, 1_000)
    await charge(world, other, 0, 10)
    assert await served(world, caller) == 10


async def test_weight_divides_what_is_charged_and_never_to_nothing(world: StoreWorld) -> None:
    light, heavy = await world.caller("light"), await world.caller("heavy")
    jobs = [
        await world.running(light, 4),
        await world.ingested(await world.job(heavy), plan_of(4), weight_milli=4_000),
    ]
    for job in jobs:
        await charge(world, job, 0, 1_000)
    assert [await served(world, caller) for caller in (light, heavy)] == [1_000, 250]
    await charge(world, jobs[1], 1, 1)
    assert await served(world, heavy) == 251
    await world.store.set_weight(MODEL, tenant_owner(heavy.tenant_id), 500)
    await charge(world, jobs[1], 2, 100)
    assert await served(world, heavy) == 251 + 200, "a new weight counts from now on"
    await world.running(heavy, 1)
    assert (await awake(world))[tenant_owner(heavy.tenant_id)].weight_milli == 500, "without a weight it keeps its own"
    pace = (await world.store.paces([MODEL]))[MODEL]
    assert (pace.flow_count, pace.weights) == (2, 1.5)


async def test_what_is_charged_is_rounded_up(world: StoreWorld) -> None:
    caller = await world.caller()
    job = await world.ingested(await world.job(caller), plan_of(4), weight_milli=999)
    await charge(world, job, 0, 1)
    assert await served(world, caller) == 2
    await charge(world, job, 1, 999)
    assert await served(world, caller) == 1_002


async def test_models_and_scopes_are_charged_apart(world: StoreWorld) -> None:
    caller = await world.caller()
    plan = IngestPlan(2, None, [*plan_of(1).slices, plan_of(1, 1, model="other").slices[1]], 200, 0, 0)
    job = await world.ingested(await world.job(caller), plan)
    await world.record(await answered(world, job, 0, 1, usage=Usage(7)))
    assert await world.store.awake_models(10) == [MODEL, "other"]
    assert {flow.model: flow.served for flow in await world.store.awake_flows(None, 10)} == {MODEL: 7, "other": 7}


# ---- waking and sleeping


async def test_a_flow_that_wakes_begins_at_the_least_awake_one(world: StoreWorld) -> None:
    """An idle flow saves nothing up: one that comes late gets no arrears. One that was alone is not punished: it is not behind."""
    early, late = await world.caller("early"), await world.caller("late")
    job = await world.running(early, 9)
    await charge(world, job, 0, 5_000)
    last = await world.running(late, 3)
    assert await served(world, late) == 5_000
    assert await served(world, early) == 5_000
    await charge(world, last, 0, 1_000)
    await world.running(third := await world.caller("third"), 1)
    assert await served(world, third) == 5_000


async def test_the_clock_of_the_model_outlives_the_last_flow(world: StoreWorld) -> None:
    alone, next_one, sweep = (
        await world.caller("alone"),
        await world.caller("next"),
        FlowUpkeep(world.store, Policies()),
    )
    job = await world.running(alone, 2)
    await charge(world, job, 0, 700)
    await charge(world, job, 1, 100)
    assert await world.store.awake_flows(None, 10) != [], "it is awake until a sweep finds that it has nothing to do"
    await sweep.tend()
    assert await world.store.awake_flows(None, 10) == []
    assert await world.store.awake_models(10) == []
    await world.running(next_one, 2)
    assert await served(world, next_one) == 800
    await world.running(alone, 2)
    assert await served(world, alone) == 800


async def test_a_flow_keeps_what_it_was_served_beyond_the_others(world: StoreWorld) -> None:
    greedy, modest, sweep = (
        await world.caller("greedy"),
        await world.caller("modest"),
        FlowUpkeep(world.store, Policies()),
    )
    first, second = await world.running(greedy, 1), await world.running(modest, 9)
    await charge(world, first, 0, 9_000)
    await charge(world, second, 0, 10)
    await sweep.tend()
    assert set(await awake(world)) == {tenant_owner(modest.tenant_id)}
    await world.running(greedy, 1)
    assert await served(world, greedy) == 9_000, "a short sleep forgives nothing"


async def test_the_clock_of_a_model_does_not_go_back_when_one_that_had_less_goes_to_sleep(world: StoreWorld) -> None:
    greedy, modest = await world.caller("greedy"), await world.caller("modest")
    jobs = [await world.running(one, 1) for one in (greedy, modest)]
    for job, tokens in zip(jobs, (9_000, 10), strict=True):
        await charge(world, job, 0, tokens)
        assert await world.store.rest_flow(MODEL, job.share_owner)
    new_tenant = await world.caller("new")
    await world.running(new_tenant, 1)
    assert await served(world, new_tenant) == 9_000


@pytest.mark.parametrize("end", ["cancel", "fail", "expire", "complete"])
async def test_a_job_that_closes_leaves_its_flow_to_sleep(world: StoreWorld, end: str) -> None:
    caller = await world.caller()
    job = await world.running(caller, 2, window_ms=HOUR_MS)
    if end == "cancel":
        await world.store.cancel_job(caller.tenant_id, job.id)
    elif end == "fail":
        await world.store.fail_job(job.id, LineError("stopped", "by hand"))
    elif end == "expire":
        await world.clock.advance(HOUR_MS)
        assert await world.store.expire_job(job.id)
    else:
        await world.record(await answered(world, job, 0, 1, usage=Usage(1)))
    assert await flows(world) == {}
    await FlowUpkeep(world.store, Policies()).tend()
    assert await awake(world) == {}


async def test_a_model_that_is_done_is_left_while_the_job_goes_on(world: StoreWorld) -> None:
    caller, worker = await world.caller(), await world.worker()
    plan = IngestPlan(2, None, [*plan_of(1).slices, plan_of(1, 1, model="other").slices[1]], 200, 0, 0)
    job = await world.ingested(await world.job(caller), plan)
    [held] = await lease_slices(world.store, worker, job.id, "other", 1, "t")
    await FlowUpkeep(world.store, Policies()).tend()
    assert await world.store.awake_models(10) == [MODEL, "other"], "what is out is not done"
    await world.store.record_outcomes(
        [await answered(world, job, 1, usage=Usage(5))], [(job.id, held.first, held.token)], []
    )
    await FlowUpkeep(world.store, Policies()).tend()
    assert await world.store.awake_models(10) == [MODEL]
    assert set(await flows(world, "other")) == set()
    assert [row["model"] for row in (await world.store.overview()).models] == [MODEL]


async def test_a_flow_that_rests_saves_nothing_up(world: StoreWorld) -> None:
    resting, busy, worker = await world.caller("resting"), await world.caller("busy"), await world.worker()
    rests, goes = await world.running(resting, 1), await world.running(busy, 9)
    [held] = await world.lease(worker, rests)
    sweep = FlowUpkeep(world.store, Policies())
    await sweep.tend()
    assert len(await awake(world)) == 2, "what is out keeps a flow awake"
    await world.store.release_slice(rests.id, 0, held.token, 60_000)
    await sweep.tend()
    assert set(await awake(world)) == {tenant_owner(busy.tenant_id)}
    await charge(world, goes, 0, 4_000)
    await world.clock.advance(59_999)
    await sweep.tend()
    assert len(await awake(world)) == 1
    await world.clock.advance(1)
    await sweep.tend()
    assert await served(world, resting) == 4_000
    assert tenant_owner(resting.tenant_id) in await flows(world)


async def test_a_flow_with_work_is_neither_closed_nor_put_to_sleep(world: StoreWorld) -> None:
    caller = await world.caller()
    await world.running(caller, 1)
    share_owner = tenant_owner(caller.tenant_id)
    await world.store.close_spent(MODEL, share_owner)
    assert not await world.store.rest_flow(MODEL, share_owner)
    assert not await world.store.rest_flow("unknown", share_owner)
    assert await world.store.wake_rested(10) == 0
    assert set(await flows(world)) == set(await awake(world)) == {share_owner}


async def test_a_slice_that_is_given_back_is_offered_again_though_nothing_else_was_left(world: StoreWorld) -> None:
    caller = await world.caller()
    job = await world.running(caller, 1)
    [held] = await world.lease(await world.worker(), job)
    await world.store.close_spent(MODEL, job.share_owner)
    assert await world.store.release_slice(job.id, held.first, held.token, 0)
    assert set(await flows(world)) == {job.share_owner}


WEIGHTS = {"gold": 3.5, "silver": 2.0, "dust": 0.0001}


class Weighed(Policies):
    def weight(self, tenant: str) -> float:
        return WEIGHTS[tenant]


async def test_the_sweep_brings_weights_up_to_date_one_pass_after_another(world: StoreWorld) -> None:
    for name in WEIGHTS:
        await world.running(await world.caller(name), 1)
    sweep = FlowUpkeep(world.store, Weighed(), pass_max=1)
    for _ in WEIGHTS:
        await sweep.tend()
    weights = {flow.tenant: flow.weight_milli for flow in (await awake(world)).values()}
    assert weights == {"gold": 3_500, "silver": 2_000, "dust": 1}, "no flow weighs nothing"


async def test_the_sweep_goes_through_more_flows_than_one_pass_holds(world: StoreWorld) -> None:
    callers = [await world.caller(f"tenant {number}") for number in range(5)]
    for caller in callers:
        job = await world.running(caller, 1)
        await world.store.cancel_job(caller.tenant_id, job.id)
    sweep = FlowUpkeep(world.store, Policies(), pass_max=2)
    for left in (3, 1, 0):
        await sweep.tend()
        assert len(await awake(world)) == left
    await sweep.tend()


async def test_long_idle_flows_and_old_rates_are_forgotten(world: StoreWorld) -> None:
    caller = await world.caller()
    job = await world.running(caller, 1)
    await charge(world, job, 0, 100)
    await FlowUpkeep(world.store, Policies()).tend()
    await world.clock.advance(2 * HOUR_MS)
    await world.store.prune_flows(HOUR_MS)
    assert (await world.store.paces([MODEL]))[MODEL].rate is None
    await world.running(caller, 1)
    assert await served(world, caller) == 100, "the model's clock remembers where everyone is"
    await world.store.prune_flows(-1)
    assert len(await awake(world)) == 1, "which flows are awake is not forgotten"


async def test_a_flow_that_sleeps_for_a_while_is_not_forgotten_and_has_no_weight(world: StoreWorld) -> None:
    ours, theirs = await world.caller("ours"), await world.caller("theirs")
    job, other = await world.running(ours, 4), await world.running(theirs, 4)
    await charge(world, job, 0, 100)
    assert (await world.store.paces([MODEL]))[MODEL].flow_count == 2
    shown = await world.store.list_flows(MODEL, 10)
    assert {row["org"] for row in shown} == {"ours", "theirs"}
    assert await world.store.list_flows("other", 10) == []
    outlook = await world.store.outlook(other.id)
    assert outlook is not None
    assert outlook.models[0].others == ((1.0, Backlog(150, 3)),), "one item of four is done"
    await world.store.pause_job(ours.tenant_id, job.id)
    assert await world.store.rest_flow(MODEL, job.share_owner)
    pace = (await world.store.paces([MODEL]))[MODEL]
    assert (pace.flow_count, pace.weights) == (1, 1.0)
    await world.clock.advance(HOUR_MS)
    await world.store.prune_flows(HOUR_MS)
    await world.store.resume_job(ours.tenant_id, job.id)
    assert await served(world, ours) == 100


async def test_a_flow_all_of_whose_slices_rest_is_not_shown(world: StoreWorld) -> None:
    job, worker = await world.running(await world.caller(), 2), await world.worker()
    [held] = await world.lease(worker, job)
    assert await world.store.release_slice(job.id, held.first, held.token, 60_000)
    assert await flows(world) == {}
    await world.clock.advance(60_000)
    assert set(await flows(world)) == {job.share_owner}


async def test_a_flow_is_active_while_something_of_it_is_out_or_ready(world: StoreWorld) -> None:
    job, worker = await world.running(await world.caller(), 2, 2), await world.worker()

    async def is_active() -> bool:
        return (await awake(world))[job.share_owner].is_active

    assert await is_active()
    first, second = await world.lease(worker, job)
    await world.store.release_slice(job.id, first.first, first.token, 60_000)
    assert await is_active(), "the second is out"
    await world.store.release_slice(job.id, second.first, second.token, 60_000)
    assert not await is_active()
    await world.clock.advance(60_000)
    assert await is_active()


async def test_a_flow_whose_only_job_is_paused_is_neither_active_nor_spent(world: StoreWorld) -> None:
    caller, worker = await world.caller(), await world.worker()
    job = await world.running(caller, 2)
    await world.lease(worker, job)
    await world.store.pause_job(caller.tenant_id, job.id)
    found = (await awake(world))[job.share_owner]
    assert (found.is_active, found.has_spent) == (False, False)
    await world.answer(await world.log(), job, 0, 1)
    found = (await awake(world))[job.share_owner]
    assert (found.is_active, found.has_spent) == (False, False)


async def test_flows_are_shown_by_model_the_awake_and_least_served_first_and_so_many_at_most(world: StoreWorld) -> None:
    callers = {name: await world.caller(name) for name in ("served", "sleeps", "fresh")}
    jobs = {name: await world.running(caller, 2) for name, caller in callers.items()}
    await world.store.pause_job(callers["sleeps"].tenant_id, jobs["sleeps"].id)
    assert await world.store.rest_flow(MODEL, jobs["sleeps"].share_owner)
    await world.record(await answered(world, jobs["served"], 0, usage=Usage(10, 0, 5, 0)))
    await world.ingested(await world.job(callers["fresh"]), plan_of(1, model="another"))
    shown = [(row["model"], row["org"], row["state"]) for row in await world.store.list_flows(None, 9)]
    assert shown == [
        ("another", "fresh", "awake"),
        (MODEL, "fresh", "awake"),
        (MODEL, "served", "awake"),
        (MODEL, "sleeps", "asleep"),
    ]
    assert [row["org"] for row in await world.store.list_flows(MODEL, 2)] == ["fresh", "served"]


async def test_rates_are_summed_over_workers_and_minutes(world: StoreWorld) -> None:
    caller = await world.caller()
    job = await world.running(caller, 9)
    start = world.clock.now - world.clock.now % 60_000 + 60_000
    await world.clock.advance(start - world.clock.now)
    await world.record(await answered(world, job, 0, 1, usage=Usage(300), model=MODEL, units=100))
    await world.clock.advance(60_000)
    await world.record(await answered(world, job, 2, usage=Usage(150), model=MODEL, units=100))
    await world.clock.advance(40_000)
    pace = (await world.store.paces([MODEL, "other"]))[MODEL]
    assert pace.rate == pytest.approx(300 / 100)
    assert pace.ratio == pytest.approx(750 / 300)
    outlook = await world.store.outlook(job.id)
    assert outlook is not None
    assert [(m.units, m.tokens, m.items) for m in outlook.models[0].minutes] == [(200, 600, 2), (100, 150, 1)]
    now_ms, counts = await world.store.minute_counts()
    assert (now_ms, counts) == (world.clock.now, {start // 60_000: (2, 600), start // 60_000 + 1: (1, 150)})
    await world.clock.advance(20 * 60_000)
    assert (await world.store.paces([MODEL]))[MODEL].rate is None


async def test_rates_are_shown_and_kept_for_an_hour(world: StoreWorld) -> None:
    job = await world.running(await world.caller(), 3)
    minute = world.clock.now // 60_000
    for number in range(2):
        await world.record(await answered(world, job, number, usage=Usage(300), model=MODEL, units=100))
        await world.clock.advance(60_000)
    await world.clock.advance(58 * 60_000)
    await world.store.prune_flows(HOUR_MS)
    assert list((await world.store.minute_counts())[1]) == [minute, minute + 1]
    await world.clock.advance(60_000)
    assert list((await world.store.minute_counts())[1]) == [minute + 1]
    await world.store.prune_flows(HOUR_MS)
    assert await rows(world, "select minute from rates") == [str(minute + 1)]


# ---- outlook


async def test_an_outlook_says_when_another_flow_last_began_or_ended_to_share_its_model(world: StoreWorld) -> None:
    job, other = [await world.running(await world.caller(name), 2) for name in ("mine", "theirs")]

    async def shared_for_ms() -> int:
        outlook = await world.store.outlook(job.id)
        assert outlook is not None
        return world.clock.now - outlook.models[0].shared_since

    await world.clock.advance(1_000)
    await world.store.pause_job(other.tenant_id, other.id)
    await world.store.resume_job(other.tenant_id, other.id)
    assert await shared_for_ms() == 1_000, "it was awake all the time"
    await world.store.pause_job(other.tenant_id, other.id)
    assert await world.store.rest_flow(MODEL, other.share_owner)
    assert await shared_for_ms() == 0
    await world.clock.advance(1_000)
    await world.store.resume_job(other.tenant_id, other.id)
    await world.clock.advance(10)
    assert await shared_for_ms() == 10


async def test_an_outlook_says_what_stands_before_a_job(world: StoreWorld) -> None:
    caller, other, worker = await world.caller(), await world.caller("other"), await world.worker()
    first = await world.running(caller, 4, 4)
    await world.clock.advance(1)
    mine = await world.running(caller, 2, 2)
    await world.running(other, 9)
    await lease_slices(world.store, worker, mine.id, MODEL, 1, "t", Why.FAIR)
    await charge(world, first, 0, 10)
    await charge(world, mine, 0, 10)
    outlook = await world.store.outlook(mine.id)
    assert outlook is not None
    [model] = outlook.models
    assert (model.model, model.total, model.left, model.in_flight_units) == (MODEL, (200, 4), (150, 3), 100)
    assert model.ahead == (350, 7)
    assert (model.weight, model.weights, model.flow_count) == (1.0, 2.0, 2)
    assert (outlook.now, outlook.expires_at, outlook.begun_at) == (world.clock.now, mine.expires_at, world.clock.now)
    assert await world.store.outlook(world.id("batch")) is None
    waiting = await world.store.outlook((await world.job(caller)).id)
    assert waiting is not None
    assert waiting.models == ()


async def test_an_outlook_names_the_models_of_a_job_in_order(world: StoreWorld) -> None:
    slices = [*plan_of(1, model="b").slices, plan_of(1, 1, model="a").slices[1]]
    job = await world.ingested(await world.job(await world.caller()), IngestPlan(2, None, slices, 200, 0, 0))
    outlook = await world.store.outlook(job.id)
    assert outlook is not None
    assert [one.model for one in outlook.models] == ["a", "b"]


async def test_a_scope_of_its_own_is_a_flow_of_its_own(world: StoreWorld) -> None:
    caller = await world.caller()
    file = await world.file(caller)
    job = await world.job(caller, file, queue="nightly")
    assert (job.share_owner, job.queue) == (tenant_owner(caller.tenant_id), "nightly")
    other = await world.job(caller, file, share_owner=f"user:{caller.tenant_id}/ann")
    assert other.share_owner == f"user:{caller.tenant_id}/ann"
    for one in (job, other):
        await world.ingested(one, plan_of(2))
    assert set(await flows(world)) == {job.share_owner, other.share_owner}


async def test_a_lost_worker_leaves_an_exact_look(world: StoreWorld) -> None:
    caller, worker = await world.caller(), await world.worker()
    job = await world.running(caller, 3, 3, 3)
    await lease_slices(world.store, worker, job.id, MODEL, 2, "t", Why.URGENT)
    share_owner = tenant_owner(caller.tenant_id)
    assert (await flows(world))[share_owner].in_flight_units == 300
    await world.clock.advance(LEASE_MS + 1)
    await world.store.declare_gone(worker)
    await world.store.reclaim_slices(worker)
    look = await world.store.snapshot("unknown", {MODEL: ModelRoom(9)}, slice_items=64, slices_max=8)
    assert look.models[MODEL].in_flight_units == 0
    assert look.flows[0].in_flight_units == 0
    assert look.owner_in_flight_units == {}


async def test_a_flow_sleeps_though_another_one_has_slices_out(world: StoreWorld) -> None:
    worker = await world.worker()
    ours = await world.running(await world.caller("one"), 1)
    theirs = await world.running(await world.caller("two"), 1)
    await world.lease(worker, theirs)
    [resting] = await world.lease(worker, ours)
    assert not await world.store.rest_flow(MODEL, ours.share_owner), "its own is out"
    assert await world.store.release_slice(ours.id, resting.first, resting.token, 60_000)
    assert await world.store.rest_flow(MODEL, ours.share_owner)
