"""What every store keeps of usage and cost: it adds up exactly, whatever is replayed and however it is summed."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.contracts.store_world import START_MS, StoreWorld, line
from tests.contracts.test_store_budgets import rows
from tidegate.core.nouns import Caller, Finished, JobFlush, Usage
from tidegate.core.states import Outcome
from tidegate.core.usage.prices import Price, Spend, cost
from tidegate.core.usage.spending import DIMENSIONS, SpendEntry, sum_by
from tidegate.store.tenants.keys import KeyRights

pytestmark = pytest.mark.anyio

DAY_MS = 86_400_000
TODAY = START_MS // DAY_MS
PRICES = {"a": Price.of("0.05", "0.01", "0.1", "0.5"), "b": Price.of("3", None, "15"), "": Price()}


def answers(log: Any, job: Any, items: list[tuple[int, str, Usage]]) -> JobFlush:
    lines = [line(job.id, number, "answer") for number, _, _ in items]
    entries = []
    for text, (number, deployment, usage) in zip(lines, items, strict=True):
        paid = cost(usage, PRICES[deployment], batch=True)
        nano = (paid.input_nano, paid.cached_nano, paid.output_nano)
        entries.append(Finished(number, Outcome.ANSWERED, len(text), 0, "", usage, 0, "m", 5, deployment, nano))
    return JobFlush(job.id, answers=entries, answers_placed=log.append(lines))


async def test_sums_are_exact_and_a_replay_adds_nothing(world: StoreWorld) -> None:
    """Two tenants, three keys, two days, answers that come twice and flushes that are replayed: to the token and the billionth."""
    chance = random.Random(5)
    jobs = []
    for tenant, key_id, team, user in (
        ("acme", "k1", "red", "ann"),
        ("acme", "k2", "blue", None),
        ("b", "k3", None, None),
    ):
        tenant_id = await world.store.put_tenant(world.id("tenant"), tenant)
        caller = Caller(tenant_id, key_id, team, user)
        await world.store.put_key(caller, b"hash", "", KeyRights())
        for _ in range(2):
            jobs.append(await world.running(caller, 40))
    log = await world.log("answers")
    real: list[Finished] = []
    for round_number in range(4):
        flushes = []
        for job in jobs:
            numbers = range(round_number * 10, round_number * 10 + 10)
            usages = [Usage(chance.randrange(2, 9_999), 1, chance.randrange(9, 5_000), number) for number in range(10)]
            items = [(n, chance.choice(["a", "b", ""]), u) for n, u in zip(numbers, usages, strict=True)]
            flushes.append(answers(log, job, items))
            real += flushes[-1].answers
            if round_number:
                # Someone else's answer to an item that has one.
                flushes.append(answers(log, job, [(0, "b", Usage(7, 0, 7, 0))]))
        for _ in range(2):
            await world.store.record_outcomes(flushes, [], [])
        if round_number == 1:
            await world.clock.advance(DAY_MS)
    want_cost = [sum(entry.cost_nano[part] for entry in real) for part in range(3)]
    want_usage = Usage.total(entry.usage for entry in real)
    for by_job in (False, True):
        entries = await world.store.usage(TODAY, TODAY + 2, by_job=by_job)
        for by in ([], ["day"], ["organization", "team"], ["key", "model", "deployment"], list(DIMENSIONS)):
            total = Spend.total(entry.spend for entry in sum_by(entries, by))
            assert (total.calls, total.usage) == (len(real), want_usage)
            assert [total.cost.input_nano, total.cost.cached_nano, total.cost.output_nano] == want_cost
    whose = {(one.organization, one.team, one.user, one.key) for one in entries}
    assert whose == {("acme", "red", "ann", "k1"), ("acme", "blue", "", "k2"), ("b", "", "", "k3")}
    assert {one.job for one in entries} == {job.id for job in jobs}
    assert len({one.day for one in entries}) == 2
    for job in jobs:
        of_job = Spend.total(one.spend for one in entries if one.job == job.id)
        assert of_job.usage == (await world.look(job)).usage, "a job's own totals say the same"


async def test_usage_is_asked_for_by_day_and_tenant(world: StoreWorld) -> None:
    ids = {name: await world.store.put_tenant(world.id("tenant"), name) for name in ("acme", "other")}
    log = await world.log("answers")
    for tenant_id in ids.values():
        job = await world.running(Caller(tenant_id), 4)
        await world.store.record_outcomes([answers(log, job, [(0, "a", Usage(1, 0, 1, 0))])], [], [])
    for by_job in (False, True):
        assert await world.store.usage(TODAY - 9, TODAY, by_job=by_job) == []
        assert await world.store.usage(TODAY + 1, TODAY + 9, by_job=by_job) == []
        assert len(await world.store.usage(TODAY, TODAY + 1, by_job=by_job)) == 2
        [mine] = await world.store.usage(TODAY, TODAY + 1, tenant_id=ids["acme"], by_job=by_job)
        assert (mine.organization, mine.spend.calls) == ("acme", 1)
        assert len(await world.store.usage(TODAY, TODAY + 1, count_max=1, by_job=by_job)) == 1


async def test_what_failed_or_came_too_late_is_not_charged(world: StoreWorld) -> None:
    tenant_id = await world.store.put_tenant(world.id("tenant"), "acme")
    job = await world.running(Caller(tenant_id), 2)
    worker = await world.worker()
    [piece] = await world.lease(worker, job)
    log, errors = await world.log("answers"), await world.log("errors")
    await world.store.record_outcomes([world.errors(errors, job, 0, token=piece.token)], [], [])
    assert await world.store.usage(TODAY, TODAY + 1) == []
    await world.store.record_outcomes([answers(log, job, [(0, "a", Usage(9, 0, 9, 0))])], [], [])
    assert await world.store.usage(TODAY, TODAY + 1) == [], "the item had failed before its answer came"


async def test_an_answer_that_was_not_let_through_is_charged_once(world: StoreWorld) -> None:
    """A guardrail refused it: the item failed, and its tokens were paid for."""
    tenant_id = await world.store.put_tenant(world.id("tenant"), "acme")
    job = await world.running(Caller(tenant_id), 2)
    [piece] = await world.lease(await world.worker(), job)
    errors = await world.log("errors")
    text = line(job.id, 0, "guardrail_pattern")
    usage, paid = Usage(9, 1, 4, 0), (1_000, 20, 300)
    failed = Finished(0, Outcome.FAILED, len(text), 0, piece.token, usage, 0, "m", 5, "a", paid)
    flush = JobFlush(job.id, errors=[failed], errors_placed=errors.append([text]))
    for _ in range(2):
        await world.store.record_outcomes([flush], [], [])
    [entry] = await world.store.usage(TODAY, TODAY + 1, by_job=True)
    assert (entry.spend.calls, entry.spend.usage, entry.spend.cost.total_nano) == (1, usage, sum(paid))
    seen = await world.look(job)
    assert (seen.failed_count, seen.answered_count, seen.usage, seen.cost_nano) == (1, 0, usage, sum(paid))


def interactive(tenant_id: str, deployment: str, usage: Usage, key_id: str = "k1") -> SpendEntry:
    return SpendEntry(
        Spend(1, usage, cost(usage, PRICES[deployment], batch=False)),
        organization=tenant_id,
        team="red",
        user="ann",
        key=key_id,
        model="m",
        deployment=deployment,
    )


async def test_interactive_calls_count_once_and_add_up_with_those_of_jobs(world: StoreWorld) -> None:
    tenant_id = await world.store.put_tenant(world.id("tenant"), "acme")
    job = await world.running(Caller(tenant_id, "k1"), 4)
    log = await world.log("answers")
    await world.store.record_outcomes([answers(log, job, [(0, "a", Usage(10, 5, 3, 1))])], [], [])
    flush = [interactive(tenant_id, "a", Usage(7, 2, 1, 0)), interactive(tenant_id, "b", Usage(1, 0, 1, 0), "k2")]
    for _ in range(3):
        # A commit whose answer got lost is sent again, and counts once.
        await world.store.add_interactive("w1", 1, flush)
    await world.store.add_interactive("w1", 2, flush[:1])
    await world.store.add_interactive("w2", 1, flush[:1])
    await world.store.prune_usage_writers()
    await world.store.add_interactive("w1", 2, flush[:1])
    for by_job in (False, True):
        entries = await world.store.usage(TODAY, TODAY + 1, by_job=by_job)
        total = Spend.total(one.spend for one in entries)
        assert (total.calls, total.usage) == (5, Usage(32, 11, 7, 1))
        of_jobs = Spend.total(one.spend for one in entries if one.job)
        assert of_jobs.calls == (1 if by_job else 0)
        assert {(one.organization, one.key) for one in entries} == {("acme", "k1"), ("acme", "k2")}
    paid = sum(one.cost.total_nano for one in (Spend.total([entry.spend]) for entry in flush[:1])) * 3
    paid += flush[1].spend.cost.total_nano + (await world.look(job)).cost_nano
    assert total.cost.total_nano == paid, "the job's own cost and every call's make the day's"


async def test_a_process_that_wrote_lately_is_remembered_however_long_ago_it_began(world: StoreWorld) -> None:
    tenant_id = await world.store.put_tenant(world.id("tenant"), "acme")
    flush = [interactive(tenant_id, "a", Usage(7, 2, 1, 0))]
    for number in (1, 2):
        await world.store.add_interactive("w1", number, flush)
        await world.clock.advance(6 * DAY_MS)
    await world.store.prune_usage_writers()
    await world.store.add_interactive("w1", 2, flush)
    entries = await world.store.usage(TODAY, TODAY + 30, by_job=False)
    assert Spend.total(one.spend for one in entries).calls == 2


async def test_a_process_that_wrote_nothing_for_more_than_a_week_is_forgotten(world: StoreWorld) -> None:
    flush = [interactive(await world.store.put_tenant(world.id("tenant"), "acme"), "a", Usage(7, 2, 1, 0))]
    await world.store.add_interactive("w1", 1, flush)
    await world.clock.advance(7 * DAY_MS)
    await world.store.prune_usage_writers()
    assert await rows(world, "select id from usage_writers") == ["w1"]
    await world.clock.advance(1)
    await world.store.prune_usage_writers()
    assert await rows(world, "select id from usage_writers") == []
