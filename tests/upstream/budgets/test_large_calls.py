"""A call that needs more tokens than a day or a lifetime has left keeps none of the smaller ones from them: waiting would not help it.

Real sockets and the core's own ledgers; the clock is moved by hand, and patience is nought so that nothing waits for it inside.
"""

from __future__ import annotations

import asyncio

import pytest

from tests.upstream.budgets.test_budgets import AT_ONCE, send_all
from tests.upstream.budgets.test_money import LedgerLimits
from tests.upstream.raw_server import RawServer
from tests.upstream.world import RouterWorld, deployment
from tidegate.core.budgets.budget import Budget, Limit, LimitBound, Period
from tidegate.core.errors import Withheld
from tidegate.upstream.budgets.budget_client import BudgetClient
from tidegate.upstream.budgets.spent_budgets import ASK_AGAIN_MS
from tidegate.upstream.routing.slots import Capacity

pytestmark = pytest.mark.anyio

NOT_SLIDING = (Period.DAY, Period.WEEK, Period.MONTH, Period.LIFETIME)


@pytest.fixture
def limits(world: RouterWorld) -> LedgerLimits:
    return LedgerLimits(world.clock)


def tokens_of(count: int, period: Period) -> tuple[Budget, ...]:
    return (Budget(LimitBound.TENANT, "acme", (Limit(period, tokens=count),)),)


@pytest.mark.parametrize("period", NOT_SLIDING)
async def test_small_calls_go_after_one_that_was_too_large(
    world: RouterWorld, limits: LedgerLimits, period: Period
) -> None:
    budgets = tokens_of(100, period)
    async with RawServer() as server:
        async with world.router(deployment(server.url), policy=AT_ONCE, capacity=Capacity(limits)) as router:
            await router.send(world.call(tokens=60, budgets=budgets))
            with pytest.raises(Withheld) as refused:
                await router.send(world.call(tokens=90, budgets=budgets))
            assert (refused.value.code, refused.value.spent) == ("budget_spent", "tenant:acme")
            assert router.spent_until_ms(budgets) <= world.clock.monotonic
            assert (await send_all(router, [world.call(tokens=1, budgets=budgets) for _ in range(5)]))[0] == 5
    assert len(server.posts) == 6


@pytest.mark.parametrize("period", NOT_SLIDING)
async def test_small_calls_go_beside_those_that_are_too_large(
    world: RouterWorld, limits: LedgerLimits, period: Period
) -> None:
    budgets = tokens_of(100, period)
    sizes = [60, 90, 1, 80, 1, 95, 1, 1]
    async with RawServer() as server:
        async with world.router(deployment(server.url), policy=AT_ONCE, capacity=Capacity(limits)) as router:
            sent, withheld = await send_all(router, [world.call(tokens=size, budgets=budgets) for size in sizes])
    assert (sent, len(withheld)) == (5, 3)


async def test_one_that_is_too_large_for_a_deployments_day_goes_to_another(
    world: RouterWorld, limits: LedgerLimits
) -> None:
    async with RawServer() as first, RawServer() as second:
        places = (
            deployment(first.url, "first", limits=(Limit(Period.DAY, tokens=100),)),
            deployment(second.url, "second", limits=(Limit(Period.DAY, tokens=1_000),), order=2),
        )
        async with world.router(*places, policy=AT_ONCE, capacity=Capacity(limits)) as router:
            for size in (60, 90, 1):
                await router.send(world.call(tokens=size))
    assert (len(first.posts), len(second.posts)) == (2, 1)


@pytest.mark.parametrize("period", NOT_SLIDING)
async def test_a_budget_with_nothing_left_is_not_asked_again_for_small_ones(
    world: RouterWorld, limits: LedgerLimits, period: Period
) -> None:
    budgets = tokens_of(100, period)
    async with RawServer() as server:
        async with world.router(deployment(server.url), policy=AT_ONCE, capacity=Capacity(limits)) as router:
            await router.send(world.call(tokens=100, budgets=budgets))
            assert (await send_all(router, [world.call(tokens=1, budgets=budgets)]))[0] == 0
            asked = limits.questions
            assert (await send_all(router, [world.call(tokens=1, budgets=budgets) for _ in range(9)]))[0] == 0
            assert limits.questions == asked


async def test_in_a_minute_small_ones_wait_behind_a_large_one(world: RouterWorld, limits: LedgerLimits) -> None:
    """Its room comes with time there, and many small ones would take it away for ever."""
    budgets = tokens_of(100, Period.MINUTE)
    async with RawServer() as server:
        async with world.router(deployment(server.url), policy=AT_ONCE, capacity=Capacity(limits)) as router:
            await router.send(world.call(tokens=60, budgets=budgets))
            assert (await send_all(router, [world.call(tokens=90, budgets=budgets)]))[0] == 0
            assert (await send_all(router, [world.call(tokens=1, budgets=budgets)]))[0] == 0
            world.clock.advance(61_000)
            await asyncio.gather(router.send(world.call(tokens=90, budgets=budgets)))
    assert len(server.posts) == 2


@pytest.mark.parametrize("period", Period)
async def test_tokens_that_another_process_gives_back_are_used_before_the_period_ends(
    world: RouterWorld, limits: LedgerLimits, period: Period
) -> None:
    """Its calls in flight have all of the tokens set aside and take few of them: only that process knows."""
    here, other = BudgetClient(limits, world.clock), BudgetClient(limits, world.clock)
    terms = here.terms(tokens_of(100, period))
    in_flight = await other.reserve_permit(terms, 100, is_bound=True)
    with pytest.raises(Withheld) as refused:
        await here.reserve_permit(terms, 50, is_bound=True)
    assert refused.value.until_ms > world.clock.monotonic + ASK_AGAIN_MS
    assert here.spent_until_ms(terms.budgets) == refused.value.until_ms
    other.used(in_flight, 1)
    await other.close()
    asked = limits.questions
    with pytest.raises(Withheld):
        await here.reserve_permit(terms, 50, is_bound=True)
    assert limits.questions == asked
    world.clock.advance(ASK_AGAIN_MS)
    assert here.spent_until_ms(terms.budgets) == 0.0
    assert (await here.reserve_permit(terms, 50, is_bound=True)).tokens == 50
    await here.close()


async def test_a_model_whose_deployment_has_no_tokens_rests_no_longer_than_until_it_is_asked_again(
    world: RouterWorld, limits: LedgerLimits
) -> None:
    """What rests longer goes back to the store for as long, and no worker would look at it when the tokens have come back."""
    hour = (Limit(Period.HOUR, tokens=100),)
    async with RawServer() as server:
        place = deployment(server.url, limits=hour)
        async with world.router(place, policy=AT_ONCE, capacity=Capacity(limits)) as router:
            other = BudgetClient(limits, world.clock)
            terms = other.terms((Budget(LimitBound.DEPLOYMENT, router.status()[0].name, hour),))
            in_flight = await other.reserve_permit(terms, 100, is_bound=True)
            with pytest.raises(Withheld):
                await router.send(world.call(tokens=50))
            assert router.rests_until_ms("m") == world.clock.monotonic + ASK_AGAIN_MS
            other.used(in_flight, 1)
            await other.close()
            world.clock.advance(ASK_AGAIN_MS)
            assert router.rests_until_ms("m") == 0
            await router.send(world.call(tokens=50))
    assert len(server.posts) == 1
