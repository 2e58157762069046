"""Planted bugs of limits, slots, shares and deadlines."""

from typing import Any

from tests.simulation.world.planting import Mutant, lua, patch, sql
from tidegate.core.budgets.counting import Span
from tidegate.core.schedule import ranking
from tidegate.settings.tenants import TenantPolicy
from tidegate.store.limits import StoreLimits
from tidegate.store.tenants import budgets
from tidegate.upstream.budgets import token_estimator
from tidegate.upstream.budgets.budget_client import BudgetClient
from tidegate.upstream.http.transport import SendPermit
from tidegate.upstream.routing import deployment_state
from tidegate.upstream.routing.routes import NameRoute

_settle = StoreLimits.settle_grants
_budgets = TenantPolicy.budgets


def _begin_whenever(self: SendPermit) -> None:
    self.begun = True


async def _settle_twice(self: StoreLimits, settlements: Any) -> None:
    await _settle(self, settlements)
    await _settle(self, settlements)


def _without_own(self: TenantPolicy, *arguments: Any, **named: Any) -> Any:
    return _budgets(self, *arguments, **named)[:-1]


_used = BudgetClient.used


def _used_for_free(self: BudgetClient, permit: SendPermit, tokens: int, nano: int | None = None) -> None:
    _used(self, permit, tokens, 0)


CAPACITY: dict[str, Mutant] = {
    "money_unreserved": Mutant(
        "money", "almost nothing is set aside for a call", patch(token_estimator, "bound", lambda *_, batch: 1)
    ),
    "money_never_spent": Mutant(
        "money", "what a call cost is not counted", patch(BudgetClient, "used", _used_for_free)
    ),
    "window_ends_early": Mutant(
        "scarce",
        "grants are forgotten while calls under them may still be in the window",
        patch(Span, "leaves_at", lambda self, bucket: self.bucket_ms * (bucket + 1) + self.period_ms - 1_000),
    ),
    "permit_for_ever": Mutant(
        "dealt", "a permit that has run out is used", patch(SendPermit, "begin_send", _begin_whenever)
    ),
    "given_back_though_sent": Mutant(
        "scarce",
        "what was sent is given back as unsent",
        patch(BudgetClient, "used", lambda self, permit, *_: self.release_permit(permit)),
    ),
    "settled_twice": Mutant("tokens", "a settlement is sent twice", patch(StoreLimits, "settle_grants", _settle_twice)),
    "resource_unlimited": Mutant(
        "scarce",
        "a resource's own limits are not asked",
        patch(NameRoute, "budgets", lambda self, state: state.budgets),
    ),
    "last_budget_forgotten": Mutant(
        "scarce",
        "the last of a call's own budgets is not asked",
        patch(TenantPolicy, "budgets", _without_own),
    ),
    "slots_for_all": Mutant(
        "quiet",
        "slots are dealt without regard to who holds them",
        patch(budgets, "next_holding", lambda cap, others_share, fair, in_use: (cap, max(cap, in_use))),
    ),
    "rest_ignored": Mutant(
        "rests",
        "a deployment that asks for a rest gets none",
        patch(deployment_state.DeploymentState, "_rest", lambda self, wait_ms, now_ms: None),
    ),
    "most_served_first": Mutant(
        "shares",
        "the flow that was served most goes next",
        patch(
            ranking,
            "flow_counters",
            lambda flows, ratio, workers: {flow.share_owner: -float(flow.served) for flow in flows},
        ),
    ),
    "woken_with_credit": Mutant(
        "late_comers",
        "a flow that wakes is not lifted",
        sql("flow_wake", "state = 'asleep' and served < :lift", "state = 'asleep' and served > :lift"),
    ),
    "charged_twice": Mutant(
        "shares",
        "a flow is charged twice",
        sql("flow_charge", "served_tokens + :cost", "served_tokens + 2 * :cost"),
    ),
    "done_miscounted": Mutant(
        "quiet",
        "a model's progress counts too much",
        sql("job_models_done", "done_count + :done_count", "done_count + 2 * :done_count"),
    ),
    "never_woken": Mutant(
        "scarce",
        "a flow that rests is not woken in time",
        sql("flows_rested", "wakes_at <= now_ms()", "wakes_at <= now_ms() - 60000"),
    ),
    "grants_rounded_up": Mutant(
        "dealt_tokens",
        "Redis deals out one request more than its tokens pay for",
        lua("take", "math.floor(number(2) / each)", "math.ceil(number(2) / each)"),
    ),
    "no_urgency": Mutant("race", "deadlines make nothing urgent", patch(ranking, "urgent_jobs", lambda *arguments: [])),
}
