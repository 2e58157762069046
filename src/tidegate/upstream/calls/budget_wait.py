"""A call that its budgets put off: where it goes instead, or for how long it waits here.

Only a budget that frees within a moment is waited for, and only by a few calls per budget. It sends nothing and spends nothing.
"""

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Collection, Sequence

from tidegate.core.errors import Withheld
from tidegate.core.nouns import Call
from tidegate.core.ports import Clock
from tidegate.upstream.budgets.budget_client import BudgetClient
from tidegate.upstream.calls.slot_queue import SlotQueue
from tidegate.upstream.routing.deployment_state import DeploymentState
from tidegate.upstream.routing.routes import NameRoute

# Calls of one tenant that wait for its budget must not take the place of everyone else's.
BUDGET_WAITERS_MAX = 16


class BudgetWait:
    def __init__(
        self,
        budget_client: BudgetClient,
        clock: Clock,
        patience_ms: float,
        choose: Callable[[NameRoute, Call, Collection[DeploymentState], float], DeploymentState | None],
        waiters: SlotQueue,
    ) -> None:
        self._budgets = budget_client
        self._clock = clock
        self._patience_ms = patience_ms
        self._choose = choose
        self._slot_queue = waiters
        self._waiting: Counter[str] = Counter()

    async def next_state(
        self, route: NameRoute, put_off: Sequence[DeploymentState], call: Call, error: Withheld, give_up_ms: float
    ) -> DeploymentState:
        """Where this call goes instead of where it was put off, or goes again when its budget frees in a moment; raises the error when
        neither."""
        now_ms = self._clock.monotonic_ms()
        state = put_off[-1]
        is_spent = error.code in Withheld.BRIEF
        is_own_budget = self._budgets.spent_until_ms(route.budgets(state)) > now_ms
        if len(route.states) > 1 and (is_own_budget or not is_spent):
            other = self._choose(route, call, put_off, now_ms)
            if other is not None and self._budgets.spent_until_ms(route.budgets(other)) <= now_ms:
                return other
        too_many = not is_own_budget and self._waiting[error.spent] >= BUDGET_WAITERS_MAX
        wait_ms = max(error.until_ms - now_ms, 1.0)
        if error.until_ms > give_up_ms or not is_spent or too_many:
            # From so long before the moment on, the call would be let in to wait here.
            early_ms = self._patience_ms if wait_ms > self._patience_ms else 0
            error.retry_after_ms = math.ceil(wait_ms - early_ms)
            raise error
        if is_own_budget:
            state.expecting += 1
        self._waiting[error.spent] += 1
        try:
            await asyncio.sleep(wait_ms / 1000)
        finally:
            self._waiting[error.spent] -= 1
            if not self._waiting[error.spent]:
                del self._waiting[error.spent]
            if is_own_budget:
                state.expecting -= 1
        return self._choose(route, call, (), self._clock.monotonic_ms()) or await self._slot_queue.wait(route, call)
