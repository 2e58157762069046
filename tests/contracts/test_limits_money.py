"""Budgets in money, by the store alone and with Redis beside it: hard, to the billionth, whichever process asks and whatever is lost."""

from __future__ import annotations

import asyncio
import random

import pytest

from tests.contracts.limits_world import LimitsWorld, minute
from tests.contracts.test_store_budgets import spoil
from tidegate.core.budgets.budget import (
    NEVER_MS,
    Budget,
    BudgetRequest,
    Grant,
    Limit,
    LimitBound,
    Period,
    Settlement,
    budgets_of,
)
from tidegate.core.budgets.money import RESERVED_MS
from tidegate.core.errors import LimitsUnavailable
from tidegate.core.ports import Limits

pytestmark = pytest.mark.anyio

HOUR_MS = 3_600_000
Budgets = tuple[Budget, ...]


def budget_client(name: str, period: Period, nano: int, bound: LimitBound = LimitBound.KEY) -> Budgets:
    return budgets_of(bound, name, [Limit(period, nano=nano)])


async def take(process: Limits, budgets: Budgets, nano: int, requests: int = 1) -> Grant:
    [grant] = await process.debit([BudgetRequest(budgets, requests, 0, nano)])
    return grant


async def paid(process: Limits, budgets: Budgets, grant: Grant, nano: int) -> None:
    await process.settle_grants([Settlement(grant.id, budgets, 0, 0, 0, grant.nano, nano)])


async def test_the_most_that_calls_can_cost_never_passes_a_budget(limits: LimitsWorld) -> None:
    """Four processes spend at once, each call settles with less than it set aside: in the end no call fits in what is left."""
    processes = [await limits.process() for _ in range(4)]
    budgets = budget_client("k", Period.LIFETIME, 1_000) + budget_client(
        "acme", Period.MONTH, 100_000, LimitBound.TENANT
    )
    spent = 0

    async def spend(process: Limits) -> None:
        nonlocal spent
        while True:
            grant = await take(process, budgets, 70)
            if not grant.requests:
                assert grant.tightest == "money:key:k"
                if grant.left_nano < 70:
                    assert grant.renews_ms == NEVER_MS
                    return
                assert (grant.wait_ms, grant.spent) == (RESERVED_MS, "money:key:k")
                await asyncio.sleep(0)
                continue
            assert spent + grant.nano <= 1_000
            spent += 30
            await paid(process, budgets, grant, 30)

    await asyncio.gather(*(spend(process) for process in processes))
    assert spent <= 1_000 - 30
    assert spent > 1_000 - 70 - 30
    last = await take(processes[0], budgets, 1_000 - spent)
    assert (last.requests, last.nano) == (1, 1_000 - spent), "what is left can be spent to the billionth"


async def test_money_in_flight_is_not_money_spent(limits: LimitsWorld) -> None:
    process = await limits.process()
    budgets = budget_client("k", Period.DAY, 100)
    first = await take(process, budgets, 100)
    waits = await take(process, budgets, 60)
    assert (waits.requests, waits.wait_ms, waits.left_nano) == (0, RESERVED_MS, 100)
    await paid(process, budgets, first, 50)
    spent = await take(process, budgets, 60)
    assert (spent.requests, spent.left_nano) == (0, 50)
    assert 0 < spent.renews_ms <= 24 * HOUR_MS, "a day renews"
    assert (await take(process, budgets, 50)).requests == 1


async def test_what_was_never_settled_counts_for_good_and_as_in_flight_for_an_hour(limits: LimitsWorld) -> None:
    process = await limits.process()
    budgets = budget_client("k", Period.LIFETIME, 100)
    assert (await take(process, budgets, 80)).requests == 1
    assert (await take(process, budgets, 30)).wait_ms == RESERVED_MS
    await limits.stores.clock.advance(HOUR_MS + 60_000)
    gone = await take(process, budgets, 30)
    assert (gone.requests, gone.left_nano, gone.renews_ms) == (0, 20, NEVER_MS)


@pytest.mark.parametrize("fate", ["lost_before", "lost_after"])
async def test_money_comes_back_that_was_settled_while_the_store_was_away(limits: LimitsWorld, fate: str) -> None:
    process, driver = await limits.faulty_process()
    budgets = budget_client("k", Period.LIFETIME, 100)
    grant = await take(process, budgets, 80)
    setattr(driver, fate, 3)
    with pytest.raises(LimitsUnavailable):
        await paid(process, budgets, grant, 10)
    for _ in range(2):
        with pytest.raises(LimitsUnavailable):
            await process.settle_grants([])
    for _ in range(2):
        await process.settle_grants([])
    assert (await take(process, budgets, 91)).left_nano == 90
    assert (await take(process, budgets, 90)).requests == 1


async def test_what_a_process_had_in_flight_that_is_gone_is_spent_once_its_slices_are_taken_over(
    limits: LimitsWorld,
) -> None:
    """While it may live, and until what it had sent is adopted or sent again, others wait; then the budget is spent for them."""
    world = limits.stores
    mine, lost = await world.worker(10 * HOUR_MS), await world.worker(1_000)
    ours, theirs = await limits.process(holder=mine), await limits.process(holder=lost)
    job = await world.running(await world.caller(), 1)
    await world.lease(lost, job)
    budgets = budget_client("k", Period.LIFETIME, 100)
    late = await take(theirs, budgets, 50)
    living = await take(ours, budgets, 20)
    await world.clock.advance(2_000)
    for _ in range(3):
        waits = await take(ours, budgets, 90)
        assert (waits.requests, waits.wait_ms, waits.left_nano) == (0, RESERVED_MS, 100), "it is late, not gone"
    assert await world.store.declare_gone(lost)
    for _ in range(3):
        assert (await take(ours, budgets, 90)).left_nano == 100, "what it had sent was not adopted yet"
    assert await world.store.reclaim_slices(lost) == 1
    await take(ours, budgets, 90)
    spent = await take(ours, budgets, 90)
    assert (spent.requests, spent.left_nano, spent.renews_ms) == (0, 50, NEVER_MS)
    assert (await take(ours, budgets, 40)).wait_ms == RESERVED_MS, "what a living one has in flight still is"
    # It was only paused: what it set aside and did not use comes back once, and never more than that.
    await paid(theirs, budgets, late, 10)
    await paid(ours, budgets, living, 20)
    assert (await take(ours, budgets, 71)).left_nano == 70
    assert (await take(ours, budgets, 70)).requests == 1


async def test_the_dead_never_let_a_budget_be_passed(limits: LimitsWorld) -> None:
    """Processes take, settle or die in any order: what was granted and not settled for less stays spent."""
    world = limits.stores
    budgets = budget_client("k", Period.LIFETIME, 1_000) + budget_client("acme", Period.MONTH, 2_000, LimitBound.TENANT)
    dice = random.Random(16)
    spent = 0
    for _ in range(40):
        worker = await world.worker(1_000)
        process = await limits.process(holder=worker)
        for _ in range(dice.randrange(4)):
            grant = await take(process, budgets, dice.randrange(1, 60))
            if not grant.requests:
                continue
            assert spent + grant.nano <= 1_000
            spent += grant.nano
            if dice.random() < 0.5:
                used = dice.randrange(grant.nano + 1)
                await paid(process, budgets, grant, used)
                spent -= grant.nano - used
        await world.clock.advance(1_001)
        assert await world.store.declare_gone(worker)
    last = await limits.process(holder=await world.worker())
    await take(last, budgets, 1_000)
    assert (await take(last, budgets, 1_000)).left_nano == 1_000 - spent, "nothing is in flight any more"
    assert (await take(last, budgets, 1_000 - spent)).requests == 1


async def test_a_call_that_cost_more_than_it_could_is_owed(limits: LimitsWorld) -> None:
    process = await limits.process()
    budgets = budget_client("k", Period.LIFETIME, 100)
    await paid(process, budgets, await take(process, budgets, 10), 95)
    assert (await take(process, budgets, 6)).left_nano == 5
    assert (await take(process, budgets, 5)).requests == 1


async def test_a_free_call_passes_a_spent_budget_and_tokens_bind_beside_money(limits: LimitsWorld) -> None:
    process = await limits.process()
    both = budgets_of(LimitBound.KEY, "k", [Limit(Period.LIFETIME, 3, 100, nano=10)])
    assert [one.id for one in both] == ["key:k", "money:key:k"]
    paying = await take(process, both, 10)
    assert (paying.requests, paying.nano) == (1, 10)
    assert (await take(process, both, 1)).spent == "money:key:k"
    assert (await take(process, both, 0)).requests == 1
    [tokens] = await process.debit([BudgetRequest(both, 1, 101, 0)])
    assert (tokens.requests, tokens.spent) == (0, "key:k")
    assert (await take(process, both, 0)).requests == 1
    assert (await take(process, both, 0)).spent == "key:k"


async def test_every_budget_gives_or_none_and_a_longer_period_holds_too(limits: LimitsWorld) -> None:
    process = await limits.process()
    rich = budget_client("acme", Period.LIFETIME, 1_000, LimitBound.TENANT)
    poor = budgets_of(LimitBound.KEY, "k", [Limit(Period.DAY, nano=100), Limit(Period.LIFETIME, nano=150)])
    await paid(process, rich + poor, await take(process, rich + poor, 100), 100)
    assert (await take(process, rich + poor, 60)).requests == 0
    await limits.stores.clock.advance(24 * HOUR_MS)
    assert (await take(process, rich + poor, 60)).tightest == "money:key:k", "the day renewed, the lifetime did not"
    assert (await take(process, rich + poor, 50)).requests == 1
    assert (await take(process, rich, 850)).requests == 1, "what the key could not pay was taken from no budget"


async def test_a_damaged_ledger_is_spent(limits: LimitsWorld) -> None:
    process = await limits.process()
    budgets = budget_client("k", Period.LIFETIME, 100)
    assert (await take(process, budgets, 1)).requests == 1
    await spoil(limits.stores, b"\xff")
    assert (await take(process, budgets, 1)).left_nano == 0


async def test_requests_of_the_same_name_are_another_budget(limits: LimitsWorld) -> None:
    process = await limits.process()
    calls = Budget(LimitBound.KEY, "k", (minute(1),))
    assert [grant.requests for grant in await process.debit([BudgetRequest((calls,), 2, 0)])] == [1]
    assert (await take(process, budget_client("k", Period.LIFETIME, 100), 100)).requests == 1
