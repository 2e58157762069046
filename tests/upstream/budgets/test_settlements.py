"""Settlements reach the budgets that they are for."""

from collections.abc import Mapping, Sequence

import pytest

from tests.support.ports import HandClock
from tidegate.core.budgets.budget import Budget, BudgetRequest, Grant, Limit, LimitBound, Period, Settlement
from tidegate.upstream.budgets.settlements import Settlements
from tidegate.upstream.budgets.spent_budgets import FREED_MS, SpentBudgets

pytestmark = pytest.mark.anyio


class Counting:
    """Limits that only write down what they get."""

    def __init__(self) -> None:
        self.settled: list[Settlement] = []

    async def debit(self, asks: Sequence[BudgetRequest]) -> list[Grant]:
        raise AssertionError("nothing is asked for here")

    async def settle(self, settlements: Sequence[Settlement]) -> None:
        self.settled += settlements

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
