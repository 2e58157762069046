"""Forecasts for one job in a choice: its share, its slack, and why it waits.

This module decides nothing.
"""

import msgspec

from tidegate.core.schedule import ranking
from tidegate.core.schedule.outlooks import ModelOutlook
from tidegate.core.schedule.policy import Policy
from tidegate.core.schedule.reasons import reason_of
from tidegate.core.schedule.snapshot import Choice, JobView, Snapshot


class FlowForecast(msgspec.Struct, frozen=True):
    """The forecast for one job on one model.

    `rule` is the rule that would take its next slice now; `reason` says why none does. Slack is
    None where the model's rate was not measured. The caller adds when the job will end, and notes
    on the tide and on budgets, as whole sentences.
    """

    model: str
    mode: str
    rule: str | None
    reason: str | None
    share: float
    flows: int
    slack_ms: int | None
    hopeless: bool
    eta_p50_ms: int | None = None
    eta_p95_ms: int | None = None
    notes: tuple[str, ...] = ()


def forecasts(snapshot: Snapshot, choice: Choice, policy: Policy, job_id: str) -> tuple[FlowForecast, ...]:
    """Return one forecast for each model of the job that the snapshot shows."""
    return tuple(_forecast(snapshot, choice, policy, job) for job in snapshot.jobs if job.job_id == job_id)


def forecast_not_ready(outlook: ModelOutlook, policy: Policy) -> FlowForecast:
    """Return the forecast for a model that no snapshot shows: the job's rest is leased or rests."""
    share = ranking.share_of(outlook.weight, outlook.weights)
    return FlowForecast(outlook.model, policy.mode, None, None, share, max(1, outlook.flow_count), None, False)


def _forecast(snapshot: Snapshot, choice: Choice, policy: Policy, job: JobView) -> FlowForecast:
    model = snapshot.models.get(job.model)
    flows = [flow for flow in snapshot.flows if flow.model == job.model]
    weight = next((ranking.weight_of(flow) for flow in flows if flow.share_owner == job.share_owner), 1.0)
    weights = (model.weights if model else 0.0) or sum(ranking.weight_of(flow) for flow in flows)
    share = ranking.share_of(weight, weights)
    rule = next((pick.why for pick in choice.picks if (pick.job_id, pick.model) == (job.job_id, job.model)), None)
    slack: int | None = None
    hopeless = False
    if model is not None and (model.rate or job.rate):
        pace = ranking.deadline_pace(model, share, policy)
        slack = int(max(ranking.slack_ms(job, model, snapshot.now, pace), -1e15))
        hopeless = slack < 0 and ranking.is_hopeless(job, snapshot.now, pace)
    reason = reason_of(choice, job.model, job.share_owner, job.job_id)
    flow_count = max(1, len(flows), model.flow_count if model else 0)
    return FlowForecast(job.model, policy.mode, rule, reason, share, flow_count, slack, hopeless)
