"""The budgets that are spent, and until when, as the Limits port answered this process.

Each process has its own knowledge, which may be too cautious. This module asks and grants nothing.
"""

import math

from tidegate.core.budgets.budget import Budget
from tidegate.core.ports import Clock

Budgets = tuple[Budget, ...]

# A spent budget is asked again this soon after a part was given back to it.
FREED_MS = 250
# A spent budget of tokens is asked again this soon in any case: other processes do not report the
# tokens that they give back.
ASK_AGAIN_MS = 10_000
# For this long after a budget was spent, processes ask for little at a time: they waited for the
# same moment and must take turns.
CONTENDED_MS = 60_000


class SpentBudgets:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._until_ms: dict[Budget, float] = {}
        # The next moment to ask, for budgets that are asked before the moment that they named.
        self._ask_ms: dict[Budget, float] = {}
        self._contended_until_ms: dict[Budget, float] = {}

    def __bool__(self) -> bool:
        return bool(self._until_ms)

    def until_ms(self, budgets: Budgets) -> float:
        """Return the moment before which these budgets allow no call; 0 if none is known."""
        if not self._until_ms:
            return 0.0
        now_ms = self._clock.monotonic_ms()
        return max((self._bound_until_ms(budget, now_ms) for budget in budgets), default=0.0)

    def opens_at_ms(self, budgets: Budgets, patience_ms: float) -> float:
        """Return the moment from which a call with this patience may be sent, or ask again."""
        return max((self._opens_at_ms(budget, patience_ms) for budget in budgets), default=0.0)

    def _opens_at_ms(self, budget: Budget, patience_ms: float) -> float:
        return min(self._until_ms.get(budget, 0.0) - patience_ms, self._ask_ms.get(budget, math.inf))

    def first(self, budgets: Budgets, now_ms: float) -> tuple[Budget, float] | None:
        """Return the first of these budgets that is spent now, and its end."""
        for budget in budgets:
            until_ms = self._bound_until_ms(budget, now_ms)
            if until_ms > now_ms:
                return budget, until_ms
        return None

    def _bound_until_ms(self, budget: Budget, now_ms: float) -> float:
        """Return the moment at which this budget frees by itself; 0 if it may be asked earlier."""
        return 0.0 if self._ask_ms.get(budget, math.inf) <= now_ms else self._until_ms.get(budget, 0.0)

    def are_contended(self, budgets: Budgets, now_ms: float) -> bool:
        """Return whether a budget is or was spent lately: then other processes wait for it too."""
        return any(self._contended_until_ms.get(budget, 0.0) > now_ms for budget in budgets)

    def by_id(self) -> dict[str, float]:
        """Return the ids of spent budgets, each with its end."""
        self._forget_what_passed(self._clock.monotonic_ms())
        return {budget.id: until_ms for budget, until_ms in self._until_ms.items()}

    def note(self, budget: Budget, until_ms: float) -> None:
        """Note that this budget is spent until this moment.

        A later moment that is known already stays.
        """
        now_ms = self._clock.monotonic_ms()
        self._until_ms[budget] = max(until_ms, self._bound_until_ms(budget, now_ms))
        if any(limit.tokens is not None for limit in budget.limits):
            self._ask_ms[budget] = now_ms + ASK_AGAIN_MS
        self._contended_until_ms[budget] = until_ms + CONTENDED_MS
        self._forget_what_passed(now_ms)

    def renew(self, budget: Budget) -> None:
        """Forget that this budget is spent, because its window began again."""
        self._until_ms.pop(budget, None)
        self._ask_ms.pop(budget, None)

    def free(self, budgets: Budgets) -> None:
        """Note that these budgets got a part back, so that they are asked again soon.

        They are not asked at once, because each of many calls gives back a little.
        """
        soon_ms = self._clock.monotonic_ms() + FREED_MS
        for budget in budgets:
            if self._until_ms.get(budget, 0.0) > soon_ms:
                self._until_ms[budget] = soon_ms

    def _forget_what_passed(self, now_ms: float) -> None:
        for known in (self._until_ms, self._contended_until_ms):
            for budget in [budget for budget, until_ms in known.items() if until_ms <= now_ms]:
                del known[budget]
        for budget in [budget for budget in self._ask_ms if budget not in self._until_ms]:
            del self._ask_ms[budget]
