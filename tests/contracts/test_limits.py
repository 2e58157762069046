"""What shared limits of every kind do: by the store alone, and with Redis in between."""

from __future__ import annotations

import asyncio

import pytest

from tests.contracts.limits_world import LimitsWorld, budget, minute, until_sent
from tests.support.processes import wait_until_async
from tidegate.core.budgets.budget import (
    NEVER_MS,
    Budget,
    BudgetKind,
    BudgetRequest,
    Limit,
    LimitBound,
    Period,
    Settlement,
)
from tidegate.core.errors import LimitsUnavailable
from tidegate.core.ports import Limits
from tidegate.store.store import Store

pytestmark = pytest.mark.anyio


async def test_no_window_holds_more_than_the_limit_and_all_of_it_is_used(limits: LimitsWorld) -> None:
    """Four processes ask all the time, while the clock goes on in steps of every kind: exact, and used to the last request."""
    processes = [await limits.process() for _ in range(4)]
    one = budget("gpu", minute(30))
    await until_sent(limits, processes, one, 30)
    for step_ms in (7, 249, 250, 29_000, 30_493, 1):
        await limits.stores.clock.advance(step_ms)
        await limits.exhaust(processes, one, requests=2)
        limits.judge(30)
    await limits.stores.clock.advance(500)
    await until_sent(limits, processes, one, 60)
    limits.judge(30)


async def test_nine_and_then_thirty_under_ten_a_minute(limits: LimitsWorld) -> None:
    one = budget("connection", minute(10))
    processes = [await limits.process() for _ in range(3)]
    assert (await limits.send(processes[0], one, 9)).requests == 9
    await asyncio.gather(*(limits.send(processes[number % 3], one) for number in range(30)))
    await until_sent(limits, processes, one, 10)
    limits.judge(10)


async def test_every_budget_gives_or_none(limits: LimitsWorld) -> None:
    process = await limits.process()
    tenant, job = budget("acme", minute(100), bound=LimitBound.TENANT), budget("job", minute(2), bound=LimitBound.JOB)
    [closed] = await process.debit([BudgetRequest((tenant, budget("closed", minute(0), bound=LimitBound.KEY)), 5, 0)])
    assert (closed.requests, closed.wait_ms, closed.spent) == (0, NEVER_MS, "key:closed")
    first, second = await process.debit([BudgetRequest((tenant, job), 5, 0), BudgetRequest((tenant,), 99, 0)])
    assert (first.requests, first.spent) == (2, "job:job")
    assert 60_000 <= first.wait_ms <= 60_500
    assert second.requests == 98


async def test_a_part_of_what_was_asked_for_has_enough_tokens(limits: LimitsWorld) -> None:
    """Two of three requests with ten tokens together may have seven: with six of them a limit would be passed."""
    grant = await limits.send(await limits.process(), budget("gpu", minute(2, 1_000)), 3, 10)
    assert grant.requests == 2
    assert grant.tokens * 3 >= 10 * grant.requests


async def test_a_wait_is_known_and_true(limits: LimitsWorld) -> None:
    process = await limits.process()
    one = budget("gpu", minute(3))
    assert (await limits.send(process, one, 3)).requests == 3
    [refused] = await process.debit([BudgetRequest((one,), 1, 0)])
    assert 0 < refused.wait_ms <= 60_500
    await limits.stores.clock.advance(60_500)
    await until_sent(limits, [process], one, 6)
    limits.judge(3)


async def test_every_process_learns_what_a_day_has_left_for_smaller_calls(limits: LimitsWorld) -> None:
    first, second = await limits.process(), await limits.process()
    day = budget("gpu", Limit(Period.DAY, tokens=100), minute(tokens=200))
    assert (await limits.send(first, day, 1, 60)).left_tokens == 0
    for process in (first, second, first, second):
        too_large = await limits.send(process, day, 1, 90)
        assert (too_large.requests, too_large.left_tokens) == (0, 40)
    assert (await limits.send(second, day, 1, 40)).requests == 1
    for process in (first, second):
        nothing_left = await limits.send(process, day, 1, 30)
        assert (nothing_left.requests, nothing_left.left_tokens) == (0, 0)


async def test_tokens_are_settled_with_what_was_used_and_a_debt_is_paid(limits: LimitsWorld) -> None:
    process = await limits.process()
    one = budget("gpu", minute(None, 1_000))
    [first] = await process.debit([BudgetRequest((one,), 4, 1_000)])
    assert (first.requests, first.tokens) == (4, 1_000)
    await process.settle_grants([Settlement(first.id, (one,), 1, 250, 0), Settlement(first.id, (one,), 0, 750, 2_700)])
    other = budget("gpu", minute(None, 1_000), Limit(Period.DAY, requests=1_000))
    for _ in range(2):
        [grant] = await process.debit([BudgetRequest((other,), 1, 10)])
        assert grant.requests == 0, "1,950 too much: nothing for almost two windows"
        await limits.stores.clock.advance(60_500)
    third = budget("gpu", minute(None, 1_000), Limit(Period.WEEK, requests=1_000))
    [grant] = await process.debit([BudgetRequest((third,), 1, 10)])
    assert grant.requests == 1


async def test_what_was_not_sent_comes_back(limits: LimitsWorld) -> None:
    process = await limits.process()
    one = budget("gpu", minute(5, 500))
    [grant] = await process.debit([BudgetRequest((one,), 5, 500)])
    await process.settle_grants([Settlement(grant.id, (one,), 2, 200, 0)])
    again = budget("gpu", minute(5, 500), Limit(Period.DAY))
    [grant] = await process.debit([BudgetRequest((again,), 5, 500)])
    assert (grant.requests, grant.tokens) == (2, 200)


async def test_callers_that_go_away_leave_the_rest_in_order(limits: LimitsWorld) -> None:
    """Whenever a caller is cancelled, the others get their own answer, and nothing is granted twice."""
    process = await limits.process()
    ours = [budget(f"b{number}", minute(3)) for number in range(12)]
    for turns in range(8):
        asked = [
            asyncio.create_task(process.debit([BudgetRequest((one,), 1, number)])) for number, one in enumerate(ours)
        ]
        for _ in range(turns):
            await asyncio.sleep(0)
        for task in asked[::2]:
            task.cancel()
        answers = await asyncio.gather(*asked, return_exceptions=True)
        for number, answer in enumerate(answers[1::2]):
            assert isinstance(answer, list)
            assert answer[0].requests <= 1
            assert answer[0].tokens == (2 * number + 1) * answer[0].requests, "each gets its own answer"
            limits.note(answer[0])
    for one in ours[1::2]:
        [grant] = await process.debit([BudgetRequest((one,), 1, 0)])
        assert grant.requests == 0, "three of eight were granted"
    assert limits.sent == 3 * 6


@pytest.mark.parametrize("fate", ["lost_before", "lost_after"])
async def test_a_debit_whose_fate_is_unknown_takes_nothing_and_mints_none(limits: LimitsWorld, fate: str) -> None:
    process, driver = await limits.faulty_process()
    one = budget("gpu", minute(10, 1_000))
    assert (await limits.send(process, one, 2, 200)).requests == 2
    setattr(driver, fate, 1)
    with pytest.raises(LimitsUnavailable):
        await process.debit([BudgetRequest((one,), 3, 300)])
    sound = await limits.process()
    await until_sent(limits, [sound, process], one, 10)
    await limits.exhaust([sound, process], one)
    assert limits.sent == 10
    limits.judge(10)


@pytest.mark.parametrize("lost", [(1, 0), (1, 2), (2, 0)], ids=["debit", "release before", "release after"])
@pytest.mark.parametrize("kind", [BudgetKind.CALLS, BudgetKind.MONEY])
async def test_a_lifetime_gets_back_what_an_unknown_debit_took(
    limits: LimitsWorld, kind: BudgetKind, lost: tuple[int, int]
) -> None:
    """Once, however often it is released, though nothing else is ever asked, and though the process is another incarnation by then."""
    process, driver = await limits.faulty_process()
    limit = Limit(Period.LIFETIME, nano=1_000) if kind is BudgetKind.MONEY else Limit(Period.LIFETIME, tokens=1_000)
    one = Budget(LimitBound.KEY, "key", (limit,), kind)

    async def fits(amount: int) -> bool:
        """Whether another process would be granted so much; it is given back."""
        [grant] = await sound.debit([BudgetRequest((one,), 1, amount, amount)])
        if grant.requests:
            await sound.settle_grants([Settlement(grant.id, (one,), 1, grant.tokens, 0, grant.nano)])
        return bool(grant.requests)

    sound = await limits.process()
    [grant] = await process.debit([BudgetRequest((one,), 1, 400, 400)])
    assert grant.requests == 1
    driver.lost_after, driver.then_lost_before = lost
    with pytest.raises(LimitsUnavailable):
        await process.debit([BudgetRequest((one,), 1, 500, 500)])
    await wait_until_async(lambda: fits(600), 30, "the debit to be released")
    assert (driver.lost_before, driver.lost_after) == (0, 0)
    await process.debit([BudgetRequest((budget("other", minute(1)),), 1, 0)])
    assert await fits(600)
    await asyncio.sleep(0.3 if limits.redis_url else 0)
    assert not await fits(601), "it came back once"


async def test_an_unknown_debit_is_given_back_before_the_one_that_was_asked_for_meanwhile(limits: LimitsWorld) -> None:
    process, driver = await limits.faulty_process()
    one = Budget(LimitBound.KEY, "key", (Limit(Period.LIFETIME, nano=1_000),), BudgetKind.MONEY)
    [grant] = await process.debit([BudgetRequest((one,), 1, 0, 400)])
    assert grant.requests == 1
    driver.lost_after = 1
    unknown = asyncio.create_task(process.debit([BudgetRequest((one,), 1, 0, 500)]))
    for _ in range(5):
        await asyncio.sleep(0)
    [next_one] = await process.debit([BudgetRequest((one,), 1, 0, 600)])
    assert next_one.requests == 1
    with pytest.raises(LimitsUnavailable):
        await unknown


async def test_what_was_granted_to_a_cancelled_caller_comes_back(limits: LimitsWorld) -> None:
    process, sound = await limits.process(), await limits.process()
    for turns in range(1, 8):
        one = Budget(LimitBound.KEY, f"key {turns}", (Limit(Period.LIFETIME, nano=1_000),), BudgetKind.MONEY)
        gone = asyncio.create_task(process.debit([BudgetRequest((one,), 1, 0, 700)]))
        for _ in range(turns):
            await asyncio.sleep(0)
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        await process.debit([BudgetRequest((budget("other", minute(99)),), 1, 0)])
        await process.settle_grants([])
        [grant] = await sound.debit([BudgetRequest((one,), 1, 0, 1_000)])
        assert grant.requests == 1


@pytest.mark.parametrize("fate", ["lost_before", "lost_after"])
async def test_a_settlement_whose_fate_is_unknown_is_entered_once(limits: LimitsWorld, fate: str) -> None:
    process, driver = await limits.faulty_process()
    one = budget("gpu", minute(None, 1_000))
    [grant] = await process.debit([BudgetRequest((one,), 10, 1_000)])
    setattr(driver, fate, 1)
    with pytest.raises(LimitsUnavailable):
        await process.settle_grants(
            [Settlement(grant.id, (one,), 0, 100, 40), Settlement(grant.id, (one,), 0, 100, 130)]
        )
    await process.settle_grants([])
    await process.settle_grants([])
    # 60 came back and 30 were owed.
    sound = await limits.process()
    for extra, free in ((Limit(Period.DAY), 30), (Limit(Period.WEEK), 0)):
        [more] = await sound.debit([BudgetRequest((budget("gpu", minute(None, 1_000), extra),), 60, 60)])
        assert more.requests == free


async def test_what_is_settled_during_an_outage_is_entered_behind_what_failed_first(limits: LimitsWorld) -> None:
    process, driver = await limits.faulty_process()
    one = budget("gpu", minute(None, 1_000))
    [grant] = await process.debit([BudgetRequest((one,), 1, 100)])
    driver.lost_before, driver.lost_after = 2, 1
    for used in (900, 100, 0):
        with pytest.raises(LimitsUnavailable):
            await process.settle_grants([Settlement(grant.id, (one,), 0, 0, used)])
    await process.settle_grants([])
    await process.settle_grants([])
    sound = await limits.process()
    [more] = await sound.debit([BudgetRequest((budget("gpu", minute(None, 1_200), Limit(Period.DAY)),), 500, 500)])
    assert more.requests == 100, "100 are taken and 1,000 owed, once"


async def test_a_settlement_that_cannot_be_meant_holds_up_no_other(limits: LimitsWorld) -> None:
    process = await limits.process()
    one = budget("gpu", minute(None, 1_000))
    [grant] = await process.debit([BudgetRequest((one,), 10, 1_000)])
    with pytest.raises(TypeError):
        await process.settle_grants([Settlement(grant.id, (one,), 0, "many", 0)])  # type: ignore[arg-type]
    await process.settle_grants([Settlement(grant.id, (one,), 0, 100, 40)])
    [more] = await process.debit([BudgetRequest((budget("gpu", minute(None, 1_000), Limit(Period.DAY)),), 60, 60)])
    assert more.requests == 60


async def test_a_debit_that_cannot_be_released_holds_up_no_other(
    limits: LimitsWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its release fails each time, and not because the store is away."""
    process, driver = await limits.faulty_process()

    async def release(*_: object) -> None:
        raise TypeError("this release cannot be meant")

    monkeypatch.setattr(Store, "release_debit", release)
    one = Budget(LimitBound.KEY, "key", (Limit(Period.LIFETIME, nano=1_000),), BudgetKind.MONEY)
    await process.debit([BudgetRequest((one,), 1, 0, 400)])
    driver.lost_after = 1
    with pytest.raises(LimitsUnavailable):
        await process.debit([BudgetRequest((one,), 1, 0, 400)])
    assert (await limits.send(process, budget("other", minute(10)))).requests == 1
    [grant] = await process.debit([BudgetRequest((one,), 1, 0, 201)])
    assert grant.requests == 0, "what it took stays taken"


async def test_a_process_that_reaches_no_store_raises_limits_unavailable(limits: LimitsWorld) -> None:
    process, driver = await limits.faulty_process()
    driver.lost_before = 3
    for _ in range(2):
        with pytest.raises(LimitsUnavailable):
            await process.debit([BudgetRequest((budget("gpu", minute(1)),), 1, 0)])
    with pytest.raises(LimitsUnavailable):
        await process.share_slots("worker", {"gpu": 1}, {}, {"gpu": 1})
    await asyncio.sleep(0)
    assert driver.lost_before == 0


async def test_an_ask_that_cannot_be_meant_fails_alone(limits: LimitsWorld) -> None:
    process = await limits.process()
    one = budget("gpu", minute(5))
    good, bad = await asyncio.gather(
        process.debit([BudgetRequest((one,), 1, 0)]),
        process.debit([BudgetRequest((one,), 0, 0)]),
        return_exceptions=True,
    )
    assert isinstance(bad, ValueError)
    assert isinstance(good, list)
    assert good[0].requests == 1


async def test_slots_are_shared_under_the_cap(limits: LimitsWorld) -> None:
    first, second = await limits.process(), await limits.process()
    me, other = await limits.stores.worker(), await limits.stores.worker()
    assert await first.share_slots(me, {"gpu": 9}, {}, {"gpu": 6}) == {"gpu": 6}
    assert await second.share_slots(other, {"gpu": 9}, {}, {"gpu": 6}) == {"gpu": 0}
    assert await first.share_slots(me, {"gpu": 9}, {"gpu": 6}, {"gpu": 6}) == {"gpu": 3}
    assert await second.share_slots(other, {"gpu": 9}, {}, {"gpu": 6}) == {"gpu": 0}
    assert await first.share_slots(me, {"gpu": 9}, {"gpu": 3}, {"gpu": 6}) == {"gpu": 3}
    assert await second.share_slots(other, {"gpu": 9}, {}, {"gpu": 6}) == {"gpu": 3}


async def test_nothing_asked_is_nothing_granted(limits: LimitsWorld) -> None:
    process: Limits = await limits.process()
    assert await process.debit([]) == []
    await process.settle_grants([])
