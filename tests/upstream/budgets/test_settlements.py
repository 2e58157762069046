"""Bills reach the budgets that they are for."""

from collections.abc import Mapping, Sequence

import pytest

from tidegate.core.budgets.budget import Budget, BudgetRequest, Grant, Limit, LimitBound, Period, Settlement
from tidegate.upstream.budgets.settlements import Settlements

pytestmark = pytest.mark.anyio


class Counting:
    """Limits that only write down what they are told."""

    def __init__(self) -> None:
        self.told: list[Settlement] = []

    async def debit(self, asks: Sequence[BudgetRequest]) -> list[Grant]:
        raise AssertionError("nothing is asked for here")

    async def settle(self, settlements: Sequence[Settlement]) -> None:
        self.told += settlements

    async def share_slots(
        self, worker_id: str, wanted: Mapping[str, int], in_use: Mapping[str, int], caps: Mapping[str, int]
    ) -> dict[str, int]:
        raise AssertionError("nothing is shared here")


async def test_grants_of_one_question_are_settled_with_their_own_budgets() -> None:
    """They have the same id, the moment of the question: what one did not send must not come back to another's budget."""
    limits = Counting()
    freed: list[tuple[Budget, ...]] = []
    bills = Settlements(limits, freed.append)
    first, second = (
        (Budget(LimitBound.DEPLOYMENT, name, (Limit(Period.MINUTE, 600, 60_000),)),) for name in ("first", "second")
    )
    bills.add("1700000000000", first, unsent=1, reserved=100, used=0)
    bills.add("1700000000000", second, unsent=0, reserved=100, used=100)
    bills.add("1700000000000", first, unsent=2, reserved=200, used=0)
    await bills.close(5)
    assert sorted(limits.told, key=lambda one: one.budgets[0].name) == [
        Settlement("1700000000000", first, 3, 300, 0),
        Settlement("1700000000000", second, 0, 100, 100),
    ]
    assert freed == [first]
