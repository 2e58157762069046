"""Why a job is or is not running now, in sentences: a pure reading of how it stands in the store and of what the scheduler would do."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from tidegate.core.nouns import Job
from tidegate.core.schedule.forecast import FlowForecast
from tidegate.core.schedule.reasons import Reason
from tidegate.core.schedule.size import size_class
from tidegate.core.schedule.snapshot import Why
from tidegate.core.states import JOB_ENDED, JobState
from tidegate.core.window import spoken


@dataclass(frozen=True, slots=True)
class ExplainInputs:
    """How a job stands: its slices, who could run them, who comes first, and why items wait."""

    now: int
    workers_alive: int
    slices_ready: int
    slices_resting: int
    rest_ends_in_ms: int
    slices_leased: int
    jobs_ahead: int
    waiting_reasons: tuple[tuple[str, int], ...]
    forecasts: tuple[FlowForecast, ...] = ()
    notes: tuple[str, ...] = ()
    """Whole sentences of those who know more, such as which budget is used up and until when."""
    work_units: int = 0
    """How much work all of it is, in tokens by estimate; 0 while it is unknown."""


_REASONS: Mapping[str, str] = MappingProxyType(
    {
        Reason.NO_AVAILABLE_SLOTS: "every slot of it is in use; slices follow as calls end",
        Reason.UNKNOWN_CAPACITY: "no worker knows an upstream for it; name one in the models file, then see `tidegate doctor`",
        Reason.RPM_EXHAUSTED: "its requests for this minute are used up",
        Reason.TPM_EXHAUSTED: "its tokens for this minute are used up",
        Reason.BUDGET_SPENT: "a budget of it is used up; it goes on when the period ends or the limit is raised",
        Reason.RESTING: "its upstreams asked for a pause",
        Reason.TIDE_CLOSED: "interactive calls need all of it now",
        Reason.UNHEALTHY: "no upstream of it is healthy; see `tidegate doctor`",
        Reason.RETRY_BUDGET_SPENT: (
            "its retries wait for the retry budget of the deployment that failed them (retry.budget_share, retry.budget_min)"
        ),
        Reason.WORKER_FULL: "the workers hold as many slices as they may (worker.slice_count_max)",
        Reason.TENANT_IN_FLIGHT_MAX: "its tenant has as much in flight as it may (scheduler.in_flight_units_max)",
        Reason.FAIR_SHARE: "other tenants were served less so far and go first",
        Reason.BEHIND_IN_FLOW: "other batches of the same tenant go first",
        Reason.BEHIND_OTHER_JOBS: "other batches go first",
    }
)
# Why items were put off, in the words that calls fail with.
_PUT_OFF: Mapping[str, tuple[str, Reason]] = MappingProxyType(
    {
        "budget_spent": ("a budget of theirs is used up", Reason.BUDGET_SPENT),
        "upstream_throttled": ("their upstream asked for a pause", Reason.RESTING),
        "retry_budget_spent": (
            "the retry budget of their deployment is used up (retry.budget_share, retry.budget_min)",
            Reason.RETRY_BUDGET_SPENT,
        ),
        "upstream_unavailable": ("their upstream was away", Reason.UNHEALTHY),
    }
)
_RULES: Mapping[str, str] = MappingProxyType(
    {
        Why.FIFO: "it is the oldest",
        Why.FAIR: "it is its turn",
        Why.URGENT: "its deadline presses",
        Why.LARGE: "it is large and had no slice for a while",
        Why.FAST_LANE: "it is small and takes the fast lane",
    }
)


def explain(job: Job, inputs: ExplainInputs) -> list[str]:
    """Return the sentences that explain a job to an operator, most important first."""
    if job.state in JOB_ENDED:
        return [_ended(job), *(f"{error.code}: {error.message}" for error in job.errors[:3])]
    sentences = [_left(job, inputs)]
    if inputs.work_units:
        size = size_class(inputs.work_units)
        sentences.append(f"It is about {inputs.work_units:,} tokens of work, done ones included: size class {size}.")
    if inputs.workers_alive == 0:
        sentences.append("No worker is alive, so nothing runs: start one with `tidegate serve` or `tidegate worker`.")
    if job.state is JobState.VALIDATING:
        sentences.append(
            "It is being closed and ends without having begun."
            if job.closing
            else "Its input is being checked, or waits for a worker that does it; one input at a time per worker."
        )
    elif job.state is JobState.FINALIZING:
        sentences.append("Everything that will run has run; its result files are being published.")
    elif job.closing:
        sentences.append(
            f"It is closing as {job.closing}: nothing new is sent, and {_slices(inputs.slices_leased)} still out."
        )
    elif job.paused_at is not None:
        sentences.append(
            f"It is paused: nothing new is sent until it is resumed (`tidegate batches resume {job.id}`), and its "
            "deadline runs on."
        )
        if inputs.slices_leased:
            sentences.append(f"{_slices(inputs.slices_leased)} still out.")
    elif job.canary is not None and job.canary.state == "waiting":
        sentences.append(
            f"Its canary is done, and it waits to be told what follows (`tidegate batches canary {job.id} continue`, or `stop`)."
        )
    elif job.controls.not_before > inputs.now:
        sentences.append(f"It may not begin for another {spoken(job.controls.not_before - inputs.now)} (not_before).")
    else:
        sentences.extend(_running(job, inputs))
    return sentences


def _ended(job: Job) -> str:
    if job.state is not JobState.EXPIRED:
        return f"It ended as {job.state}."
    if job.begin_by is not None and job.expired_at is not None and job.expired_at < job.expires_at:
        return f"It expired, for nothing of it had begun within {spoken(job.begin_by - job.created_at)}."
    return f"It expired: its window of {job.window_text} was over before all of it had run."


def _slices(count: int) -> str:
    return "1 slice is" if count == 1 else f"{count:,} slices are"


def _left(job: Job, inputs: ExplainInputs) -> str:
    left_ms = job.expires_at - inputs.now
    time_left = f"{spoken(left_ms)} left" if left_ms > 0 else "its window has passed"
    return f"It is {job.state}: {job.done_count:,} of {job.item_count:,} items done, {time_left}."


def _running(job: Job, inputs: ExplainInputs) -> list[str]:
    sentences = []
    if inputs.slices_leased:
        sentences.append(f"It is running: workers hold {inputs.slices_leased} of its slices.")
    if inputs.slices_ready and inputs.jobs_ahead:
        sentences.append(
            f"{_slices(inputs.slices_ready)} ready, behind {inputs.jobs_ahead} older batches that have slices ready too."
        )
    elif inputs.slices_ready and inputs.notes:
        sentences.append(f"{_slices(inputs.slices_ready)} ready.")
    elif inputs.slices_ready:
        sentences.append(
            f"{_slices(inputs.slices_ready)} ready and nothing is ahead of it: workers take them as their upstreams have room. "
            "If none do, see `tidegate doctor` for an upstream that is away."
        )
    if inputs.slices_resting:
        sentences.append(
            f"{_slices(inputs.slices_resting)} put off for another {spoken(max(0, inputs.rest_ends_in_ms))}, "
            "because an upstream asked for it or failed, or a budget is used up."
        )
    for reason, count in inputs.waiting_reasons:
        words = f"{_PUT_OFF[reason][0]} ({reason})" if reason in _PUT_OFF else reason
        sentences.append(f"{count:,} items were tried and wait to be tried again: {words}.")
    sentences.extend(inputs.notes)
    for forecast in inputs.forecasts:
        sentences.extend(_foreseen(_as_put_off(forecast, inputs)))
    if not sentences:
        sentences.append("Nothing of it is ready or out; the next sweep moves it on.")
    return sentences


def _as_put_off(forecast: FlowForecast, inputs: ExplainInputs) -> FlowForecast:
    """What a worker with room would do tells little when all workers just put this batch off: then their reason does."""
    if forecast.reason is not None or inputs.slices_leased or not inputs.slices_resting or len(inputs.forecasts) > 1:
        return forecast
    reasons = [_PUT_OFF[reason][1] for reason, _ in inputs.waiting_reasons if reason in _PUT_OFF]
    return replace(forecast, rule=None, reason=reasons[0]) if reasons else forecast


def _foreseen(forecast: FlowForecast) -> list[str]:
    """What the scheduler would do with its slices of one model, its share, its deadline and its end."""
    model = forecast.model or "its one model"
    if forecast.rule is not None:
        sentences = [
            f"{model}: a worker with room takes its next slice now, because {_RULES[forecast.rule]} ({forecast.mode})."
        ]
    elif forecast.reason is not None:
        sentences = [
            f"{model}: it waits, because {_REASONS.get(forecast.reason, forecast.reason)} ({forecast.reason})."
        ]
    else:
        sentences = [f"{model}: nothing more of it can be taken now: all that is left is out or put off."]
    others = f"{forecast.flows} tenants have" if forecast.flows > 1 else "no other tenant has"
    sentences.append(f"{model}: {others} work for it; its tenant can count on {forecast.share:.0%} of what is served.")
    sentences.extend(f"{model}: {note}" for note in forecast.notes)
    sentences.append(f"{model}: {_ending(forecast)}")
    return sentences


def _ending(forecast: FlowForecast) -> str:
    parts = []
    if forecast.eta_p50_ms is not None and forecast.eta_p95_ms is not None:
        parts.append(
            f"done in about {spoken(forecast.eta_p50_ms)}, in {spoken(forecast.eta_p95_ms)} with 95 % confidence"
        )
    if forecast.slack_ms is None:
        parts.append("what it serves was not measured yet, so it is unknown whether the deadline will be met")
    elif forecast.hopeless:
        parts.append(
            "the deadline cannot be met any more, so it has no precedence; give it a longer window or more capacity"
        )
    elif forecast.slack_ms < 0:
        parts.append(f"{spoken(-forecast.slack_ms)} short of its deadline, so it goes first within the urgent share")
    else:
        parts.append(f"{spoken(forecast.slack_ms)} to spare before its deadline")
    return "; ".join(parts) + "."
