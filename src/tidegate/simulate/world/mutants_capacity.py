"""Planted bugs of limits, slots, shares and deadlines."""

from typing import Any

from tidegate.core.budgets_window import Span
from tidegate.core.schedule import deadline, fair
from tidegate.settings.tenants import TenantPolicy
from tidegate.simulate.world.planting import Planting, patch, sql
from tidegate.store import budgets
from tidegate.store.limits import StoreLimits
from tidegate.upstream import lane
from tidegate.upstream.purse import Leave, Purse
from tidegate.upstream.routes import Route

_settle = StoreLimits.settle
_budgets = TenantPolicy.budgets


def _begin_whenever(self: Leave) -> None:
    self.begun = True


async def _settle_twice(self: StoreLimits, settlements: Any) -> None:
    await _settle(self, settlements)
    await _settle(self, settlements)


def _without_own(self: TenantPolicy, *arguments: Any, **named: Any) -> Any:
    return _budgets(self, *arguments, **named)[:-1]


CAPACITY: dict[str, tuple[str, Planting]] = {
    "window_ends_early": (
        "grants are forgotten while calls under them may still be in the window",
        patch(Span, "leaves_at", lambda self, bucket: self.bucket_ms * (bucket + 1) + self.period_ms - 1_000),
    ),
    "leave_for_ever": ("leave that has run out is used", patch(Leave, "begin", _begin_whenever)),
    "given_back_though_sent": (
        "what was sent is given back as unsent",
        patch(Purse, "used", lambda self, leave, _: self.give_back(leave)),
    ),
    "settled_twice": ("a settlement is said twice", patch(StoreLimits, "settle", _settle_twice)),
    "resource_unlimited": (
        "a resource's own limits are not asked",
        patch(Route, "budgets", lambda self, one: one.budgets),
    ),
    "last_budget_forgotten": (
        "the last of a call's own budgets is not asked",
        patch(TenantPolicy, "budgets", _without_own),
    ),
    "slots_for_all": (
        "slots are dealt without regard to who holds them",
        patch(budgets, "next_holding", lambda cap, held_by_others, fair, in_use: (cap, max(cap, in_use))),
    ),
    "rest_ignored": (
        "a deployment that asks for a rest gets none",
        patch(lane.Lane, "_rest", lambda self, wait_ms, now_ms: None),
    ),
    "most_served_first": (
        "the flow that was served most goes next",
        patch(fair, "counters", lambda flows, ratio, workers: {flow.scope: -float(flow.served) for flow in flows}),
    ),
    "woken_with_credit": (
        "a flow that wakes is not lifted",
        sql("flow_wake", "state = 'asleep' and served < :lift", "state = 'asleep' and served > :lift"),
    ),
    "charged_twice": (
        "a flow is charged twice",
        sql("flow_charge", "served_tokens + :cost", "served_tokens + 2 * :cost"),
    ),
    "done_miscounted": (
        "a model's progress counts too much",
        sql("job_models_done", "done_count + :done_count", "done_count + 2 * :done_count"),
    ),
    "never_woken": (
        "a flow that rests is not woken in time",
        sql("flows_rested", "wakes_at <= now_ms()", "wakes_at <= now_ms() - 60000"),
    ),
    "no_urgency": ("deadlines make nothing urgent", patch(deadline, "urgent", lambda *arguments: [])),
}
