"""Settlements reach the budgets that they are for."""

import asyncio
import functools
from collections.abc import Mapping, Sequence

import pytest
import structlog

from tests.support.ports import HandClock
from tests.upstream.raw_server import eventually
from tidegate.core.budgets.budget import Budget, BudgetRequest, Grant, Limit, LimitBound, Period, Settlement
from tidegate.core.errors import LimitsUnavailable
from tidegate.upstream.budgets.settlements import Settlements
from tidegate.upstream.budgets.spent_budgets import FREED_MS, SpentBudgets

pytestmark = pytest.mark.anyio


class Counting:
    """Limits that only write down what they get."""

    def __init__(self) -> None:
        self.settled: list[Settlement] = []

    async def debit(self, asks: Sequence[BudgetRequest]) -> list[Grant]:
        raise AssertionError("nothing is asked for here")

    async def settle_grants(self, settlements: Sequence[Settlement]) -> None:
        self.settled += settlements

    def has(self, count: int) -> bool:
        return len(self.settled) == count

    async def share_slots(
        self, worker_id: str, wanted: Mapping[str, int], in_use: Mapping[str, int], caps: Mapping[str, int]
    ) -> dict[str, int]:
        raise AssertionError("nothing is shared here")


async def test_grants_of_one_question_are_settled_with_their_own_budgets() -> None:
    """They have the same id, the moment of the question: what one did not send must not come back to another's budget."""
    limits = Counting()
    clock = HandClock()
    spent = SpentBudgets(clock)
    settlements = Settlements(limits, spent)
    first, second = (
        (Budget(LimitBound.DEPLOYMENT, name, (Limit(Period.MINUTE, 600, 60_000),)),) for name in ("first", "second")
    )
    until_ms = clock.monotonic_ms() + 60_000
    for budgets in (first, second):
        spent.note(budgets[0], until_ms)
    settlements.add(Settlement("1700000000000", first, 1, 100, 0))
    settlements.add(Settlement("1700000000000", second, 0, 100, 100))
    settlements.add(Settlement("1700000000000", first, 2, 200, 0))
    await settlements.close(5)
    assert sorted(limits.settled, key=lambda one: one.budgets[0].name) == [
        Settlement("1700000000000", first, 3, 300, 0),
        Settlement("1700000000000", second, 0, 100, 100),
    ]
    assert spent.until_ms(first) == clock.monotonic_ms() + FREED_MS
    assert spent.until_ms(second) == until_ms


def _settlement(grant_id: str) -> Settlement:
    budgets = (Budget(LimitBound.DEPLOYMENT, grant_id, (Limit(Period.MINUTE, 600, 60_000),)),)
    return Settlement(grant_id, budgets, 1, 100, 0)


async def test_settlements_that_come_after_others_were_sent_are_sent_too() -> None:
    limits = Counting()
    settlements = Settlements(limits, SpentBudgets(HandClock()))
    for count, grant_id in enumerate(("first", "second", "third"), start=1):
        settlements.add(_settlement(grant_id))
        await eventually(functools.partial(limits.has, count), f"the {grant_id} settlement")
    await settlements.close(5)
    assert [one.grant_id for one in limits.settled] == ["first", "second", "third"]


async def test_what_comes_while_a_stop_settles_is_sent_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class Late(Counting):
        async def settle_grants(self, settlements: Sequence[Settlement]) -> None:
            await super().settle_grants(settlements)
            if len(self.settled) == 1:
                # From here on a pause would outlast the stop.
                monkeypatch.setattr("tidegate.upstream.budgets.settlements.SETTLE_S", 3_600)
                open_settlements.add(_settlement("late"))

    limits = Late()
    open_settlements = Settlements(limits, SpentBudgets(HandClock()))
    open_settlements.add(_settlement("first"))
    await open_settlements.close(5)
    assert [one.grant_id for one in limits.settled] == ["first", "late"]


async def test_a_stop_does_not_wait_for_limits_that_never_answer() -> None:
    class Silent(Counting):
        is_asked = is_cancelled = False

        async def settle_grants(self, settlements: Sequence[Settlement]) -> None:
            self.is_asked = True
            try:
                await asyncio.Event().wait()
            finally:
                self.is_cancelled = True

    limits = Silent()
    settlements = Settlements(limits, SpentBudgets(HandClock()))
    settlements.add(_settlement("first"))
    await eventually(lambda: limits.is_asked, "the question")
    async with asyncio.timeout(60):
        await settlements.close(0.01)
    assert limits.is_cancelled


async def test_a_settlement_that_failed_is_not_sent_again_frees_nothing_and_stops_no_other() -> None:
    class Failing(Counting):
        async def settle_grants(self, settlements: Sequence[Settlement]) -> None:
            await super().settle_grants(settlements)
            if len(self.settled) == 1:
                raise ValueError("it cannot be meant")

    limits, clock = Failing(), HandClock()
    spent = SpentBudgets(clock)
    settlements = Settlements(limits, spent)
    lost, kept = _settlement("lost"), _settlement("kept")
    until_ms = clock.monotonic_ms() + 60_000
    for one in (lost, kept):
        spent.note(one.budgets[0], until_ms)
    settlements.add(lost)
    await eventually(lambda: len(limits.settled) == 1, "the first settlement")
    settlements.add(kept)
    await settlements.close(5)
    assert limits.settled == [lost, kept]
    assert spent.until_ms(lost.budgets) == until_ms
    assert spent.until_ms(kept.budgets) == clock.monotonic_ms() + FREED_MS


async def test_limits_that_are_away_are_asked_until_they_have_entered_what_they_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No later call settles: without being asked again, the money of the last one would stay set aside for ever."""

    is_back = asyncio.Event()

    class Away(Counting):
        tries = 0

        async def settle_grants(self, settlements: Sequence[Settlement]) -> None:
            await super().settle_grants(settlements)
            if self.tries == 3:
                await is_back.wait()
            self.tries += 1
            if self.tries < 4:
                raise LimitsUnavailable("the store is away")

    monkeypatch.setattr("tidegate.upstream.budgets.settlements.AGAIN_S", 0.001)
    limits, clock = Away(), HandClock()
    spent = SpentBudgets(clock)
    settlements = Settlements(limits, spent)
    one = _settlement("one")
    until_ms = clock.monotonic_ms() + 60_000
    spent.note(one.budgets[0], until_ms)
    with structlog.testing.capture_logs() as logged:
        settlements.add(one)
        await eventually(lambda: limits.tries == 3, "the third try")
        assert spent.until_ms(one.budgets) == until_ms
        is_back.set()
        await eventually(lambda: limits.tries == 4, "the try that is answered")
        await settlements.close(5)
    assert limits.settled == [one], "it is handed over once"
    assert limits.tries == 4
    assert spent.until_ms(one.budgets) == clock.monotonic_ms() + FREED_MS
    assert [line["event"] for line in logged] == ["settlement_postponed"], "once for each outage"


async def test_open_settlements_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidegate.upstream.budgets.settlements.SETTLEMENTS_MAX", 2)
    limits = Counting()
    settlements = Settlements(limits, SpentBudgets(HandClock()))
    for grant_id in ("first", "second", "third"):
        settlements.add(_settlement(grant_id))
    await settlements.close(5)
    assert [one.grant_id for one in limits.settled] == ["first", "second"]


async def test_settlements_wait_a_moment_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sent one by one, they would cost the shared budgets a question each."""
    monkeypatch.setattr("tidegate.upstream.budgets.settlements.SETTLE_S", 3_600)
    limits = Counting()
    settlements = Settlements(limits, SpentBudgets(HandClock()))
    settlements.add(_settlement("first"))
    for _ in range(10):
        await asyncio.sleep(0)
    assert limits.settled == []
    await settlements.close(0)
