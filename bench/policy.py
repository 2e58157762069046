"""What the policy of one item costs: its price bounded and its key's state judged."""

import time
from collections.abc import Callable

from bench.machinery import median, table
from tidegate.core.policy_rules import KeyState, Payer, SpendBudget, judge
from tidegate.core.prices import Price, bound

BUDGET_US = 10.0


def _microseconds(work: Callable[[], object], rounds: int) -> float:
    figures = []
    for _ in range(7):
        began = time.perf_counter()
        for _ in range(rounds):
            work()
        figures.append((time.perf_counter() - began) / rounds * 1e6)
    return median(figures)


def main(*, quick: bool = False) -> None:
    rounds = 2_000 if quick else 50_000
    models = frozenset(f"model-{number}" for number in range(50))
    budgets = tuple(SpendBudget(payer, 10**15, 10**12, 10**9) for payer in Payer)
    key = KeyState("key", models, models, 2**50, budgets=budgets, parallel_max=100, parallel_in_use=3)
    price = Price.of(input=0.05, cached=0.01, output=0.10, batch_factor=0.5)

    def one_item() -> None:
        assert judge(key, "model-7", "model-9", 1, bound(900, 512, price, batch=True)) is None

    figure = _microseconds(one_item, rounds)
    table(
        "policy, per item", [("four budgets, two allowlists, a bound", f"{figure:.2f} µs", f"under {BUDGET_US:.0f} µs")]
    )
