"""Calls that wait for a budget: what a grant has too much goes back, also when calls are cancelled, and the others get theirs."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from tests.support.ports import HandClock
from tests.upstream.limits import LASTS_MS, MemoryLimits
from tidegate import metrics
from tidegate.core.budgets.budget import Budget, BudgetRequest, Grant, Limit, LimitBound, LimitRoom, Period, SideRoom
from tidegate.core.errors import LimitsUnavailable, Withheld
from tidegate.core.usage.prices import CostRange
from tidegate.upstream.budgets import budget_client as budget_client_module
from tidegate.upstream.budgets.budget_client import CONTENDED_ASK_MAX, SPENT_MS_MAX, BudgetClient
from tidegate.upstream.http.transport import SendPermit

pytestmark = pytest.mark.anyio

TENANT = (Budget(LimitBound.TENANT, "acme", (Limit(Period.MINUTE, 10, 1_000),)),)


class GatedLimits(MemoryLimits):
    """Answers a question only when the test lets it."""

    def __init__(self, clock: HandClock) -> None:
        super().__init__(clock)
        self.gate = asyncio.Event()
        self.asked = asyncio.Event()

    async def debit(self, asks: Sequence[BudgetRequest]) -> list[Grant]:
        grants = await super().debit(asks)
        self.asked.set()
        await self.gate.wait()
        return grants


@pytest.fixture
def limits() -> GatedLimits:
    return GatedLimits(HandClock())


@pytest.fixture
def budget_client(limits: GatedLimits) -> BudgetClient:
    return BudgetClient(limits, limits.clock)


def taking(budget_client: BudgetClient, tokens: int = 100) -> asyncio.Task[SendPermit]:
    return asyncio.create_task(budget_client.reserve_permit(budget_client.terms(TENANT), tokens, is_bound=False))


async def test_one_that_is_cancelled_before_the_answer_gives_its_part_back(
    budget_client: BudgetClient, limits: GatedLimits
) -> None:
    kept, gone = taking(budget_client), taking(budget_client)
    await limits.asked.wait()
    gone.cancel()
    await asyncio.gather(gone, return_exceptions=True)
    limits.gate.set()
    assert (await kept).tokens == 100
    await budget_client.close()
    assert limits.used("acme") == (1, 100)


async def test_one_that_is_cancelled_with_the_answer_in_hand_gives_it_back(
    budget_client: BudgetClient, limits: GatedLimits, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The grant is dealt and the call is cancelled before it runs again: no other call could return that grant."""
    kept, gone = taking(budget_client), taking(budget_client)
    deal = budget_client._deal

    def deal_and_cancel(*args: Any) -> None:
        deal(*args)
        gone.cancel()

    monkeypatch.setattr(budget_client, "_deal", deal_and_cancel)
    await limits.asked.wait()
    limits.gate.set()
    assert (await kept).tokens == 100
    assert isinstance((await asyncio.gather(gone, return_exceptions=True))[0], asyncio.CancelledError)
    await budget_client.close()
    assert limits.used("acme") == (1, 100)


class Paying(GatedLimits):
    """Grants all the money that it is asked for."""

    async def debit(self, asks: Sequence[BudgetRequest]) -> list[Grant]:
        return [replace(grant, nano=ask.nano) for ask, grant in zip(asks, await super().debit(asks), strict=True)]


async def test_money_that_was_set_aside_for_a_cancelled_call_goes_back() -> None:
    limits = Paying(HandClock())
    budget_client = BudgetClient(limits, limits.clock)
    terms = budget_client.terms((Budget(LimitBound.TENANT, "acme", (Limit(Period.MINUTE, nano=1_000),)),))
    kept, gone = (
        asyncio.create_task(budget_client.reserve_permit(terms, 0, is_bound=False, cost=CostRange(nano, nano)))
        for nano in (30, 40)
    )
    await limits.asked.wait()
    gone.cancel()
    limits.gate.set()
    assert (await kept).nano == 30
    await budget_client.close()
    assert [(one.unsent_requests, one.reserved_nano, one.used_nano) for one in limits.settlements] == [(1, 40, 0)]


async def test_a_call_that_waits_long_for_money_asks_now_and_then() -> None:
    """An operator may raise the budget before it renews."""

    class Poor(MemoryLimits):
        async def debit(self, asks: Sequence[BudgetRequest]) -> list[Grant]:
            return [
                replace(grant, requests=0, tightest=ask.budgets[0].id, left_nano=0, renews_ms=10 * SPENT_MS_MAX)
                for ask, grant in zip(asks, await super().debit(asks), strict=True)
            ]

    limits = Poor(HandClock())
    budget_client = BudgetClient(limits, limits.clock)
    terms = budget_client.terms((Budget(LimitBound.TENANT, "acme", (Limit(Period.MINUTE, nano=1_000),)),))
    with pytest.raises(Withheld) as put_off:
        await budget_client.reserve_permit(terms, 0, is_bound=False, cost=CostRange(30, 30))
    assert put_off.value.until_ms == limits.clock.monotonic_ms() + SPENT_MS_MAX
    await budget_client.close()


async def test_calls_go_again_as_soon_as_a_late_answer_comes(
    budget_client: BudgetClient, limits: GatedLimits, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as hurried:
        hurried.setattr(budget_client_module, "ANSWER_S_MAX", 0)
        with pytest.raises(Withheld, match="did not answer in time"):
            await taking(budget_client)
        with pytest.raises(Withheld, match="a moment ago"):
            await taking(budget_client)
    limits.gate.set()
    assert budget_client._asking is not None
    await budget_client._asking
    assert (await taking(budget_client)).tokens == 100
    await budget_client.close()
    assert limits.used("acme") == (1, 100), "what was granted too late went back"


async def test_one_that_is_cancelled_before_the_question_is_not_asked_for(
    budget_client: BudgetClient, limits: GatedLimits
) -> None:
    gone, kept = taking(budget_client), taking(budget_client)
    await asyncio.sleep(0)
    gone.cancel()
    limits.gate.set()
    assert (await kept).tokens == 100
    await budget_client.close()
    assert limits.used("acme") == (1, 100)


async def test_a_stop_refuses_those_that_wait_and_nothing_is_asked_for_them(
    budget_client: BudgetClient, limits: GatedLimits
) -> None:
    waiting = taking(budget_client)
    await asyncio.sleep(0)
    limits.gate.set()
    await budget_client.close()
    with pytest.raises(Withheld, match="this process stops"):
        await waiting
    assert limits.used("acme") == (0, 0)


async def test_what_is_granted_and_how_long_a_spent_budget_holds_up_calls_is_counted(
    budget_client: BudgetClient, limits: GatedLimits
) -> None:
    def counted() -> tuple[float, float, float, float]:
        waits = {
            one.name.rpartition("_")[2]: one.value for one in next(iter(metrics.budget_wait_seconds.collect())).samples
        }
        return (
            metrics.counted(metrics.limits_granted_requests)["tenant"],
            metrics.counted(metrics.limits_granted_tokens)["tenant"],
            waits["count"],
            waits["sum"],
        )

    before = counted()
    limits.gate.set()
    await taking(budget_client, 900)
    with pytest.raises(Withheld) as refused:
        await taking(budget_client, 200)
    wait_s = (refused.value.until_ms - limits.clock.monotonic_ms()) / 1000
    assert wait_s > 0
    assert [now - then for now, then in zip(counted(), before, strict=True)] == pytest.approx([1, 900, 1, wait_s])
    await budget_client.close()


async def test_tokens_that_a_grant_has_too_many_go_back_though_each_of_its_requests_is_used(
    limits: GatedLimits,
) -> None:
    """Of two calls of different size one may go, with half of the tokens of both."""
    limits.gate.set()
    budgets = (Budget(LimitBound.TENANT, "acme", (Limit(Period.MINUTE, 1, 1_000),)),)
    budget_client = BudgetClient(limits, limits.clock)
    terms = budget_client.terms(budgets)
    small, large = await asyncio.gather(
        *(budget_client.reserve_permit(terms, tokens, is_bound=False) for tokens in (50, 150)), return_exceptions=True
    )
    assert isinstance(small, SendPermit)
    assert isinstance(large, Withheld)
    await budget_client.close()
    assert limits.used("acme") == (1, 50)


async def test_money_that_a_grant_has_too_much_goes_back_though_each_of_its_requests_is_used() -> None:
    limits = Paying(HandClock())
    limits.gate.set()
    budget_client = BudgetClient(limits, limits.clock)
    terms = budget_client.terms((Budget(LimitBound.TENANT, "acme", (Limit(Period.MINUTE, 1, nano=1_000),)),))
    cheap, dear = await asyncio.gather(
        *(budget_client.reserve_permit(terms, 0, is_bound=False, cost=CostRange(nano, nano)) for nano in (30, 40)),
        return_exceptions=True,
    )
    assert isinstance(cheap, SendPermit)
    assert isinstance(dear, Withheld)
    await budget_client.close()
    assert [(one.unsent_requests, one.reserved_nano) for one in limits.settlements] == [(0, 40)]


@pytest.mark.parametrize(
    ("tokens", "asked"),
    [((50, 150), [(2, 200), (1, 150)]), ((150, 150), [(2, 300), (1, 150), (1, 150)])],
    ids=["one fits", "none fits"],
)
async def test_a_call_that_does_not_fit_into_a_grant_is_asked_for_again(
    tokens: tuple[int, int], asked: list[tuple[int, int]]
) -> None:
    """A keeper may grant every request and fewer tokens: what is too little for one call goes back, and that one goes alone."""

    class Scant(MemoryLimits):
        async def debit(self, asks: Sequence[BudgetRequest]) -> list[Grant]:
            grants = await super().debit(asks)
            return grants if len(self.questions) > 1 else [replace(grant, tokens=120) for grant in grants]

    limits = Scant(HandClock())
    budget_client = BudgetClient(limits, limits.clock)
    permits = await asyncio.gather(*(taking(budget_client, one) for one in tokens))
    assert [permit.tokens for permit in permits] == list(tokens)
    assert [(ask.requests, ask.tokens) for [ask] in limits.questions] == asked
    await asyncio.gather(*(taking(budget_client, 1) for _ in range(2)))
    assert [(ask.requests, ask.tokens) for ask in limits.questions[-1]] == [(2, 2)], "together again"
    await budget_client.close()


async def test_a_permit_runs_out_by_the_moment_at_which_it_was_asked_for(
    budget_client: BudgetClient, limits: GatedLimits
) -> None:
    """How long the answer took is unknown to the store, and must not make the permit last longer."""
    asked_ms, waiting = limits.clock.monotonic, taking(budget_client)
    await limits.asked.wait()
    limits.clock.advance(LASTS_MS - 10)
    limits.gate.set()
    assert (await waiting).dies_ms == asked_ms + LASTS_MS


@pytest.mark.parametrize("wrong", [LimitsUnavailable("away"), ValueError("a defect of ours")])
async def test_no_call_waits_for_a_question_that_failed(wrong: Exception) -> None:
    class FailingLimits(MemoryLimits):
        async def debit(self, asks: Sequence[BudgetRequest]) -> list[Grant]:
            raise wrong

    limits = FailingLimits(HandClock())
    budget_client = BudgetClient(limits, limits.clock)
    for end in await asyncio.gather(taking(budget_client), taking(budget_client), return_exceptions=True):
        assert isinstance(end, Withheld)
        assert (end.code, end.until_ms > limits.clock.monotonic_ms()) == ("limits_unavailable", True)
    await budget_client.close()


async def test_what_was_charged_until_a_moment_is_free_from_then_on(limits: GatedLimits) -> None:
    """The upstream reported that its window begins again: calls need not wait for the whole period here."""
    limits.gate.set()
    budget_client, renews_ms = BudgetClient(limits, limits.clock), 5_000
    budget_client.charge(TENANT[0], 10, 0, limits.clock.monotonic + renews_ms)
    terms = budget_client.terms(TENANT)
    with pytest.raises(Withheld):
        await budget_client.reserve_permit(terms, 1, is_bound=False)
    assert budget_client.spent_until_ms(TENANT) > limits.clock.monotonic + renews_ms
    limits.clock.advance(renews_ms)
    assert budget_client.spent_until_ms(TENANT) == 0.0
    await budget_client.close()
    assert limits.used("acme") == (0, 0)


async def test_nothing_is_granted_where_nothing_keeps_the_budgets_or_after_the_end(limits: GatedLimits) -> None:
    limits.gate.set()
    homeless, ended = BudgetClient(None, limits.clock), BudgetClient(limits, limits.clock)
    await ended.close()
    for budget_client in (homeless, ended):
        with pytest.raises(Withheld) as caught:
            await budget_client.reserve_permit(budget_client.terms(TENANT), 100, is_bound=False)
        assert caught.value.code == "limits_unavailable"
        assert caught.value.until_ms > limits.clock.monotonic_ms()
        budget_client.charge(TENANT[0], 1, 100, limits.clock.monotonic_ms() + 1_000)
    await asyncio.sleep(0)
    assert limits.questions == []


async def test_what_the_limits_have_left_is_known_from_the_last_answer(limits: GatedLimits) -> None:
    room = LimitRoom(TENANT[0], Period.MINUTE, SideRoom(10, 4, 30_000), None)

    class Telling(GatedLimits):
        async def debit(self, asks: Sequence[BudgetRequest]) -> list[Grant]:
            return [replace(grant, rooms=(room,)) for grant in await super().debit(asks)]

    telling = Telling(limits.clock)
    telling.gate.set()
    budget_client = BudgetClient(telling, limits.clock)
    assert budget_client.rooms(TENANT) == []
    await taking(budget_client)
    assert budget_client.rooms(TENANT) == [room.later(0)]
    limits.clock.advance(1_000)
    assert budget_client.rooms(TENANT) == [room.later(1_000)]
    await budget_client.close()


async def test_a_budget_that_was_spent_of_late_is_asked_for_a_little_at_a_time(
    budget_client: BudgetClient, limits: GatedLimits
) -> None:
    wide = (Budget(LimitBound.TENANT, "acme", (Limit(Period.MINUTE, 100, None),)),)
    terms = budget_client.terms(wide)
    limits.gate.set()
    asked: list[int] = []
    debit = limits.debit

    async def counted(asks: Sequence[BudgetRequest]) -> list[Grant]:
        asked.extend(ask.requests for ask in asks)
        return await debit(asks)

    limits.debit = counted  # type: ignore[method-assign]
    first = [asyncio.create_task(budget_client.reserve_permit(terms, 0, is_bound=False)) for _ in range(101)]
    await asyncio.gather(*first, return_exceptions=True)
    assert max(asked) > CONTENDED_ASK_MAX
    asked.clear()
    limits.clock.advance(max(budget_client.spent().values()) - limits.clock.monotonic_ms() + 1)
    later = [
        asyncio.create_task(budget_client.reserve_permit(terms, 0, is_bound=False))
        for _ in range(CONTENDED_ASK_MAX + 1)
    ]
    await asyncio.gather(*later)
    assert asked == [CONTENDED_ASK_MAX, 1]
