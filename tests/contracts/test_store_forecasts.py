"""What every store says of a job that is not there yet."""

from __future__ import annotations

import pytest

from tests.contracts.store_world import DAY_MS, LEASE_MS, MODEL, StoreWorld, line
from tidegate.core.budgets.ahead import CallsAhead
from tidegate.core.budgets.budget import Budget, BudgetRequest, Limit, LimitBound, Period
from tidegate.core.job_controls import JobControls
from tidegate.core.nouns import Finished, Idempotency, JobFlush, Usage, WorkerDuty
from tidegate.core.schedule.autoscale import DueWork
from tidegate.core.schedule.outlooks import Backlog
from tidegate.core.schedule.share_owner import tenant_owner
from tidegate.core.states import Outcome
from tidegate.store.road import forecasts

pytestmark = pytest.mark.anyio


async def test_a_new_tenant_is_first_in_line(world: StoreWorld) -> None:
    found = await world.store.forecast(MODEL, tenant_owner("unknown"), Backlog(500))
    assert (found.model, found.left, found.ahead) == (MODEL, (500, 0), (0, 0))
    assert (found.weight, found.weights, found.flow_count, found.minutes) == (1.0, 1.0, 1, ())


async def test_what_a_flow_has_is_ahead_of_what_it_gets(world: StoreWorld) -> None:
    caller, other = await world.caller("one"), await world.caller("other")
    job = await world.running(caller, 4)
    outlook = await world.store.outlook(job.id)
    assert outlook is not None
    mine = await world.store.forecast(MODEL, job.share_owner, Backlog(500))
    assert mine.ahead == outlook.models[0].left
    assert (mine.flow_count, mine.weights) == (1, 1.0)
    theirs = await world.store.forecast(MODEL, tenant_owner(other.tenant_id), Backlog(500))
    assert theirs.ahead == (0, 0)
    assert (theirs.flow_count, theirs.weights) == (2, 2.0)


async def test_a_model_was_busy_for_as_long_as_its_longest_call_whichever_server_answered_it(world: StoreWorld) -> None:
    caller, log = await world.caller(), await world.log()
    job = await world.running(caller, 2)
    await world.clock.advance(110_000 - world.clock.now % 60_000)
    lines = [line(job.id, number) for number in range(2)]
    answers = [
        Finished(number, Outcome.ANSWERED, len(lines[number]), 0, "", Usage(), 0, MODEL, 50, server, took_ms=took_ms)
        for number, (server, took_ms) in enumerate((("slow", 40_000), ("quick", 1_000)))
    ]
    await world.record(JobFlush(job.id, answers=answers, answers_placed=log.append(lines)))
    [minute] = (await world.store.forecast(MODEL, job.share_owner, Backlog(500))).minutes
    assert (minute.busy_ms, minute.call_ms) == (40_000, 41_000)


async def test_of_more_jobs_than_are_looked_at_the_first_are_ahead(
    world: StoreWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    caller = await world.caller()
    for count in (1, 2, 4):
        job = await world.running(caller, count)
        await world.clock.advance(1)
    for jobs_max, ahead in ((1, (50, 1)), (2, (150, 3)), (3, (350, 7)), (4, (350, 7))):
        monkeypatch.setattr(forecasts, "OUTLOOK_JOBS_MAX", jobs_max)
        assert (await world.store.forecast(MODEL, job.share_owner, Backlog(500))).ahead == ahead


async def test_of_more_jobs_than_are_looked_at_those_of_higher_priority_are_ahead(
    world: StoreWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    caller = await world.caller()
    for count, priority in ((1, 0), (2, 5)):
        job = await world.running(caller, count, controls=JobControls(priority=priority))
        await world.clock.advance(1)
    last = await world.running(caller, 4)
    monkeypatch.setattr(forecasts, "OUTLOOK_JOBS_MAX", 1)
    assert (await world.store.forecast(MODEL, job.share_owner, Backlog(500))).ahead == (100, 2)
    assert (await world.store.forecast(MODEL, tenant_owner("new"), Backlog(500))).others == ((1.0, (100, 2)),)
    outlook = await world.store.outlook(last.id)
    assert outlook is not None
    assert outlook.models[0].ahead == (100, 2)


async def test_jobs_of_one_moment_are_ahead_of_one_another_in_order_of_their_ids(world: StoreWorld) -> None:
    caller = await world.caller()
    jobs = sorted([await world.running(caller, 2) for _ in range(3)], key=lambda job: job.id)
    outlooks = [await world.store.outlook(job.id) for job in jobs]
    assert [one and one.models[0].ahead for one in outlooks] == [(0, 0), (100, 2), (200, 4)]


async def test_other_flows_count_by_what_they_have(world: StoreWorld) -> None:
    caller, other = await world.caller("one"), await world.caller("other")
    job, theirs = await world.running(caller, 4), await world.running(other, 2, 2)
    outlook, their_outlook = await world.store.outlook(job.id), await world.store.outlook(theirs.id)
    assert outlook is not None
    assert their_outlook is not None
    assert outlook.models[0].others == ((1.0, their_outlook.models[0].left),)
    new_tenant = await world.store.forecast(MODEL, tenant_owner("unknown"), Backlog(500))
    assert sorted(backlog or Backlog() for _, backlog in new_tenant.others) == sorted(
        one.models[0].left for one in (outlook, their_outlook)
    )


async def test_another_flow_whose_jobs_are_all_paused_has_nothing(world: StoreWorld) -> None:
    other = await world.caller("other")
    job = await world.running(other, 4)
    assert await world.store.pause_job(other.tenant_id, job.id)
    new_tenant = await world.store.forecast(MODEL, tenant_owner("unknown"), Backlog(500))
    assert (new_tenant.flow_count, new_tenant.others) == (2, ((1.0, (0, 0)),))


async def test_a_minute_knows_how_long_there_was_work(world: StoreWorld) -> None:
    """Calls that overlap count once, a pause does not count, and the calls' own times are added up."""
    job, log = await world.running(await world.caller(), 8), await world.log()
    await world.clock.advance(60_000 - await world.store.now_ms() % 60_000 + 20_000)
    for number, (later_ms, took_ms) in enumerate([(0, 2_000), (1_000, 3_000), (10_000, 500), (500, 500)]):
        await world.clock.advance(later_ms)
        text = [line(job.id, number)]
        entry = Finished(number, Outcome.ANSWERED, len(text[0]), 0, "", Usage(), 0, MODEL, 5, took_ms=took_ms)
        await world.record(JobFlush(job.id, answers=[entry], answers_placed=log.append(text)))
    outlook = await world.store.outlook(job.id)
    assert outlook is not None
    (minute,) = outlook.models[0].minutes
    assert (minute.units, minute.items, minute.call_ms) == (20, 4, 6_000)
    assert minute.busy_ms == 2_000 + 1_000 + 500 + 500


async def test_a_minute_was_busy_at_most_since_it_began(world: StoreWorld) -> None:
    job, log = await world.running(await world.caller(), 8), await world.log()
    await world.clock.advance(60_000 - await world.store.now_ms() % 60_000 + 20_000)
    text = [line(job.id, 0)]
    entry = Finished(0, Outcome.ANSWERED, len(text[0]), 0, "", Usage(), 0, MODEL, 5, took_ms=90_000)
    await world.record(JobFlush(job.id, answers=[entry], answers_placed=log.append(text)))
    [minute] = (await world.store.forecast(MODEL, job.share_owner, Backlog(500))).minutes
    assert (minute.busy_ms, minute.call_ms) == (20_000, 90_000)


async def test_a_minute_knows_how_what_requests_take_hangs_on_their_units(world: StoreWorld) -> None:
    """Its sums over requests are those of all workers. A request without usage counts as many tokens as units."""
    job = await world.running(await world.caller(), 8)
    for worker, requests in enumerate([[(5, 2_000, Usage(7, 0, 1)), (11, 3_000, Usage())], [(20, 1_000, Usage(1))]]):
        log = await world.log(worker_id=await world.worker())
        texts = [line(job.id, 4 * worker + number) for number in range(len(requests))]
        entries = [
            Finished(4 * worker + n, Outcome.ANSWERED, len(texts[n]), 0, "", usage, 0, MODEL, units, took_ms=took_ms)
            for n, (units, took_ms, usage) in enumerate(requests)
        ]
        await world.record(JobFlush(job.id, answers=entries, answers_placed=log.append(texts)))
    [minute] = (await world.store.forecast(MODEL, job.share_owner, Backlog(500))).minutes
    assert (minute.items, minute.units, minute.tokens, minute.call_ms) == (3, 36, 9 + 11 + 1, 6_000)
    assert minute.unit_squares == 25 + 121 + 400
    assert minute.unit_ms == 5 * 2_000 + 11 * 3_000 + 20 * 1_000
    assert minute.unit_tokens == 5 * 9 + 11 * 11 + 20 * 1


async def test_the_longest_requests_that_there_may_be_are_summed_too(world: StoreWorld) -> None:
    """Their products are more than a database's integer holds."""
    job, log = await world.running(await world.caller(), 8), await world.log()
    texts, units, took_ms = [line(job.id, number) for number in range(2)], 10**15, 10**10
    entries = [
        Finished(number, Outcome.ANSWERED, len(text), 0, "", Usage(), 0, MODEL, units, took_ms=took_ms)
        for number, text in enumerate(texts)
    ]
    await world.record(JobFlush(job.id, answers=entries, answers_placed=log.append(texts)))
    [minute] = (await world.store.forecast(MODEL, job.share_owner, Backlog(500))).minutes
    assert (minute.units, minute.call_ms) == (2 * units, 2 * took_ms)
    assert minute.unit_squares == minute.unit_tokens == pytest.approx(2 * units**2)
    assert minute.unit_ms == pytest.approx(2 * units * took_ms)


async def test_calls_recorded_together_keep_a_worker_busy_as_long_as_the_longest(world: StoreWorld) -> None:
    job, log = await world.running(await world.caller(), 8), await world.log()
    await world.clock.advance(60_000 - await world.store.now_ms() % 60_000 + 20_000)
    texts = [line(job.id, number) for number in range(3)]
    entries = [
        Finished(number, Outcome.ANSWERED, len(texts[number]), 0, "", Usage(), 0, MODEL, 5, took_ms=took_ms)
        for number, took_ms in enumerate((2_000, 3_000, 1_000))
    ]
    await world.record(JobFlush(job.id, answers=entries, answers_placed=log.append(texts)))
    [minute] = (await world.store.forecast(MODEL, job.share_owner, Backlog(500))).minutes
    assert (minute.busy_ms, minute.call_ms) == (3_000, 6_000)


async def test_a_run_is_forecast_from_what_its_own_model_servers_did(world: StoreWorld) -> None:
    job, here, there = await world.running(await world.caller(), 8), world.id("worker"), world.id("worker")
    for number, (worker_id, servers) in enumerate([(here, "a"), (there, "b")]):
        await world.store.enlist_worker(worker_id, "host", "1", 60_000, WorkerDuty(servers=servers))
        text, units = [line(job.id, number)], 5 + number
        entry = Finished(number, Outcome.ANSWERED, len(text[0]), 0, "", Usage(), 0, MODEL, units, took_ms=10)
        log = await world.log(worker_id=worker_id)
        await world.record(JobFlush(job.id, answers=[entry], answers_placed=log.append(text)))
    for servers, measured in (("a", [5]), ("b", [6]), ("c", []), ("", [11])):
        found = await world.store.forecast(MODEL, job.share_owner, Backlog(500), servers)
        assert [minute.units for minute in found.minutes] == measured


async def test_calls_take_as_long_as_what_was_counted_before_lets_them(world: StoreWorld) -> None:
    four = Budget(LimitBound.KEY, "k", (Limit(Period.MINUTE, requests=4),))
    assert await world.store.calls_take_ms([(four,)], CallsAhead(4)) == 0
    assert await world.store.calls_take_ms([], CallsAhead(1_000)) == 0
    assert (await world.store.debit_budgets([BudgetRequest((four,), 4, 0)]))[0].requests == 4
    taken = await world.store.calls_take_ms([(four,)], CallsAhead(5))
    assert taken is not None
    assert 120_000 <= taken <= 125_000
    total = Budget(LimitBound.KEY, "total", (Limit(Period.LIFETIME, requests=4),))
    assert await world.store.calls_take_ms([(total,)], CallsAhead(5)) is None


async def test_processes_that_are_alive_are_counted(world: StoreWorld) -> None:
    assert await world.store.workers_alive() == 1
    for _ in range(3):
        await world.worker()
    assert await world.store.workers_alive() == 3


async def test_a_key_stands_for_what_it_made_for_a_day(world: StoreWorld) -> None:
    caller = await world.caller()
    assert not await world.store.was_made(caller.tenant_id, "batches", "k")
    await world.job(caller, idempotency=Idempotency("k", "hash"))
    assert await world.store.was_made(caller.tenant_id, "batches", "k")
    assert not await world.store.was_made(caller.tenant_id, "files", "k")
    await world.clock.advance(24 * 3600 * 1000 + 1)
    assert not await world.store.was_made(caller.tenant_id, "batches", "k")


async def test_workers_that_run_items_count_while_they_live_and_one_at_the_least(world: StoreWorld) -> None:
    assert await world.store.workers_alive() == 1
    workers = [await world.worker() for _ in range(3)]
    await world.store.enlist_worker(world.id("worker"), "host", "1", LEASE_MS, WorkerDuty(runs_items=False))
    assert await world.store.workers_alive() == 3
    assert await world.store.declare_gone(workers[0], leaving=True)
    assert await world.store.workers_alive() == 2
    await world.clock.advance(LEASE_MS)
    assert await world.store.workers_alive() == 1


async def test_a_flow_that_sleeps_will_share_its_model_with_what_it_gets(world: StoreWorld) -> None:
    caller, other = await world.caller("one"), await world.caller("other")
    job, theirs = await world.running(caller, 4), await world.running(other, 4)
    await world.store.pause_job(caller.tenant_id, job.id)
    assert await world.store.rest_flow(MODEL, job.share_owner)
    found = await world.store.forecast(MODEL, job.share_owner, Backlog(500))
    assert (found.flow_count, found.weights) == (2, 2.0)
    found = await world.store.forecast(MODEL, theirs.share_owner, Backlog(500))
    assert (found.flow_count, found.weights) == (1, 1.0)


async def test_a_job_alone_shares_its_model_since_ever_and_what_is_done_of_it_is_not_due(world: StoreWorld) -> None:
    job = await world.running(await world.caller(), 4)
    await world.answer(await world.log(), job, 0)
    outlook = await world.store.outlook(job.id)
    assert outlook is not None
    assert outlook.models[0].shared_since == 0
    assert (await world.store.due_work()).due == {MODEL: [DueWork(DAY_MS, 150)]}
