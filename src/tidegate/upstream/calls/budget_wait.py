"""The next step of a call that its budgets put off: another deployment, or a short wait here.

A call waits here only for a budget that frees within a moment, and only a few background calls wait
for each budget. This module sends and spends nothing.
"""

import asyncio
import math
from collections import Counter
from collections.abc import Sequence

from tidegate.core.errors import Withheld
from tidegate.core.nouns import Call
from tidegate.core.ports import Clock
from tidegate.upstream.calls.admission import View, choose
from tidegate.upstream.calls.slot_queue import SlotQueue
from tidegate.upstream.calls.traffic import Traffic
from tidegate.upstream.routing.deployment_state import DeploymentState
from tidegate.upstream.routing.routes import NameRoute

# Calls of one tenant that wait for its budget must not take the places of all others.
BUDGET_WAITING_MAX = 16


class BudgetWait:
    def __init__(self, view: View, slot_queue: SlotQueue, clock: Clock, patience_ms: float) -> None:
        self._view = view
        self._slot_queue = slot_queue
        self._clock = clock
        self._patience_ms = patience_ms
        self._waiting: Counter[str] = Counter()

    async def next_state(
        self,
        route: NameRoute,
        put_off: Sequence[DeploymentState],
        call: Call,
        traffic: Traffic | None,
        error: Withheld,
        give_up_ms: float,
    ) -> DeploymentState:
        """Return the deployment for a call that was put off: another one, or the same after a wait.

        Raise the error if neither is possible soon.
        """
        now_ms = self._clock.monotonic_ms()
        is_wanted = call.may_begin is None or call.may_begin()
        if traffic is not None and error.code == "lease_over" and is_wanted:
            # Another process may have taken this one for dead and given its slot away, so the call
            # asks for a slot again.
            return choose(self._view, route, call, traffic, (), now_ms) or await self._slot_queue.wait(
                route, call, traffic
            )
        state = put_off[-1]
        is_spent = error.code in Withheld.BRIEF
        is_own_budget = self._view.budgets_spent_until_ms(route, state) > now_ms or (
            error.code == "budget_spent" and self._view.is_budget_of(route, state, error.spent)
        )
        if is_own_budget or not is_spent:
            other = choose(self._view, route, call, traffic, put_off, now_ms)
            if other is not None and self._view.budgets_spent_until_ms(route, other) <= now_ms:
                return other
        too_many = traffic is None and not is_own_budget and self._waiting[error.spent] >= BUDGET_WAITING_MAX
        wait_ms = max(error.until_ms - now_ms, 1.0)
        if error.until_ms > give_up_ms or not is_spent or too_many:
            # An item may come back `patience_ms` early and wait here for the rest; a user is asked
            # to come when the call may be sent.
            early_ms = self._patience_ms if traffic is None and wait_ms > self._patience_ms else 0
            error.put_off(math.ceil(wait_ms - early_ms))
            raise error
        if is_own_budget and traffic is None:
            state.begin_expecting()
        self._waiting[error.spent] += 1
        try:
            await asyncio.sleep(wait_ms / 1000)
        finally:
            self._waiting[error.spent] -= 1
            if not self._waiting[error.spent]:
                del self._waiting[error.spent]
            if is_own_budget and traffic is None:
                state.end_expecting()
        chosen = choose(self._view, route, call, traffic, (), self._clock.monotonic_ms())
        return chosen or await self._slot_queue.wait(route, call, traffic)
