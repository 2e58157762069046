"""Sentences that say why a job is or is not running now: pure, from its state in the store and the
scheduler's forecasts.

The operator gets all of it; the owner of the job gets no names of deployments, hosts and other
tenants' budgets.
"""

from collections.abc import Mapping
from types import MappingProxyType

import msgspec
from msgspec.structs import replace

from tidegate.core.nouns import Job
from tidegate.core.ports import DeploymentTrouble, ReportedWorker
from tidegate.core.schedule.endings import NONE_FAILED, FailedItems, why_ended
from tidegate.core.schedule.forecast import FlowForecast
from tidegate.core.schedule.ranking import size_class
from tidegate.core.schedule.reasons import Reason
from tidegate.core.schedule.snapshot import Why
from tidegate.core.states import JOB_ENDED, JobState
from tidegate.core.window import spoken
from tidegate.core.wording import in_words


class ExplainInputs(msgspec.Struct, frozen=True):
    """The facts that explain a job: its slices, who could run them, who comes first, and why items
    wait.
    """

    now: int
    workers_alive: int
    slices_ready: int
    slices_resting: int
    rest_ends_in_ms: int
    slices_leased: int
    jobs_ahead: int
    waiting_reasons: tuple[tuple[str, int], ...]
    forecasts: tuple[FlowForecast, ...] = ()
    work_units: int = 0
    """The tokens of all its work, by estimate; 0 while unknown."""
    workers: tuple[ReportedWorker, ...] = ()
    unhealthy: tuple["UnhealthyModel", ...] = ()
    spent: tuple["SpentBudget", ...] = ()
    failed: FailedItems = NONE_FAILED
    """The errors of its items, once the job has ended."""
    step_failures: int = 0
    """How often reading its input, or writing its result files, failed."""
    step_rests_ms: int = 0


class UnhealthyModel(msgspec.Struct, frozen=True):
    """Deployments of a model to which workers send nothing; `is_all`: the model has no other."""

    model: str
    troubles: tuple[DeploymentTrouble, ...]
    is_all: bool


class SpentBudget(msgspec.Struct, frozen=True):
    """A budget that lets nothing of a model through now.

    `figures` are its numbers in words. `wait_ms` is when it has more; None: not by itself.
    `is_owners`: the owner of the job may know of it.
    """

    model: str
    name: str
    figures: str
    wait_ms: int | None
    is_owners: bool


WORKERS_SHOWN_MAX = 3
DEPLOYMENTS_SHOWN_MAX = 5

_REASONS: Mapping[str, str] = MappingProxyType(
    {
        Reason.NO_AVAILABLE_SLOTS: "every slot of it is in use; slices follow as calls end",
        Reason.UNKNOWN_CAPACITY: "no worker knows an upstream for it; name one in the models file, then see `tidegate doctor`",
        Reason.RPM_EXHAUSTED: "its requests for this minute are used up",
        Reason.TPM_EXHAUSTED: "its tokens for this minute are used up",
        Reason.BUDGET_SPENT: "a budget of it is used up; it goes on when the period ends or the limit is raised",
        Reason.RESTING: "its upstreams asked for a pause",
        Reason.DRAINED: "an operator drained every deployment of it; it goes on when one is resumed",
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
# Why items were put off, by the code that their calls failed with.
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
# Why items wait for another try, for codes that do not say when slices are taken.
_TRIED: Mapping[str, str] = MappingProxyType(
    {
        "upstream_ambiguous": "their server failed, or the connection broke, after they were sent",
        "invalid_upstream_response": "their server's answer could not be read",
        "upstream_key_rejected": "their server rejected our key",
        "upstream_pool_timeout": "no connection of this process was free in time",
        "owner_lost": "the worker that had them was lost",
        "handed_back": "interactive calls took their place",
        "schema_invalid": "their answer did not fit the schema",
    }
)
_STEPS: Mapping[JobState, str] = MappingProxyType(
    {JobState.VALIDATING: "Reading its input", JobState.FINALIZING: "Publishing its result files"}
)
_RULES: Mapping[str, str] = MappingProxyType(
    {
        Why.FIFO: "it is the oldest",
        Why.FAIR: "it is its turn",
        Why.URGENT: "its deadline presses",
        Why.LARGE: "it is large and had no slice for a while",
        Why.FAST_LANE: "it is small and takes the fast lane",
        Why.INTERACTIVE: "it has waited until it goes like an interactive call",
    }
)


def explain(job: Job, inputs: ExplainInputs, *, for_owner: bool = False) -> list[str]:
    """Return the sentences that explain a job to an operator or to its owner, most important
    first."""
    if job.state in JOB_ENDED:
        return why_ended(job, inputs.failed, _waited(inputs))
    sentences = [_left(job, inputs)]
    if inputs.work_units:
        size = size_class(inputs.work_units)
        sentences.append(
            f"It is about {in_words(inputs.work_units, 'token')} of work, done ones included: size class {size}."
        )
    sentences.extend(causes(job, inputs, for_owner=for_owner))
    if job.state is JobState.VALIDATING:
        sentences.append(
            "It is being closed and ends without having begun."
            if job.closing
            else "Its input is being checked, or waits for a worker that does it; one input at a time per worker."
        )
    elif job.state is JobState.FINALIZING:
        files = "wait to be" if inputs.step_failures else "are being"
        sentences.append(f"Everything that will run has run; its result files {files} published.")
    elif job.closing:
        sentences.append(
            f"It is closing as {job.closing}: nothing new is sent, and {_slices(inputs.slices_leased)} still out."
        )
    elif _reason_to_hold(job, inputs) is None:
        sentences.extend(_running(job, inputs, for_owner=for_owner))
    elif inputs.slices_leased:
        sentences.append(f"{_slices(inputs.slices_leased)} still out.")
    return sentences


def causes(job: Job, inputs: ExplainInputs, *, for_owner: bool = False) -> list[str]:
    """Return why nothing more of a job is sent now, most important first; empty where nothing is in
    its way but other work.
    """
    if job.state in JOB_ENDED:
        return []
    found = []
    if inputs.workers_alive == 0:
        found.append(_no_worker(inputs, for_owner=for_owner))
    if not for_owner:
        found.extend(_broken_workers(inputs))
    if inputs.step_failures and job.state in _STEPS:
        found.append(_step_failed(job, inputs, for_owner=for_owner))
    if job.state is not JobState.IN_PROGRESS or job.closing:
        return found
    hold = _reason_to_hold(job, inputs)
    if hold is not None:
        return [*found, hold]
    for unhealthy in inputs.unhealthy:
        found.extend(_unhealthy(unhealthy, for_owner=for_owner))
    found.extend(_spent(budget, for_owner=for_owner) for budget in inputs.spent)
    return found


def waits_for(job: Job, inputs: ExplainInputs, *, for_owner: bool = False) -> str:
    """Return the first reason why a job stands still, in one sentence; empty where none is
    known."""
    found = causes(job, inputs, for_owner=for_owner)
    if found or job.state is not JobState.IN_PROGRESS or job.closing:
        return found[0] if found else ""
    forecasts = [_as_put_off(one, inputs) for one in inputs.forecasts]
    return next((_foreseen(one)[0] for one in forecasts if one.rule is None and one.reason is not None), "")


def _step_failed(job: Job, inputs: ExplainInputs, *, for_owner: bool) -> str:
    """Say that the bytes of a job cannot be read or written, when it is tried again, and what finds
    out why.
    """
    times = in_words(inputs.step_failures, "time")
    again = f"tried again in {spoken(inputs.step_rests_ms)}" if inputs.step_rests_ms else "tried again now"
    advice = "" if for_owner else ". `tidegate doctor` says whether bytes can be written, and the log why not"
    return f"{_STEPS[job.state]} failed {times}; it is {again}{advice}."


def _reason_to_hold(job: Job, inputs: ExplainInputs) -> str | None:
    """Return why a job that runs may not go on by its own settings; None where it may."""
    if job.paused_at is not None:
        for_now = spoken(max(0, inputs.now - job.paused_at))
        return (
            f"It is paused, for {for_now} now: nothing new is sent until it is resumed (`tidegate batches resume {job.id}`), and "
            "its deadline runs on."
        )
    if job.canary is not None and job.canary.state == "waiting":
        answered = (
            f"{job.answered_count:,} of its {in_words(job.canary.items, 'request was', 'requests were')} answered"
        )
        done = f"{answered}, {job.failed_count:,} failed"
        return f"Its canary is done ({done}), and it waits for a decision (`tidegate batches canary {job.id} continue`, or `stop`)."
    if job.controls.not_before > inputs.now:
        return (
            f"It may not begin for another {spoken(job.controls.not_before - inputs.now)} (not_before); to begin at once: "
            f"`tidegate batches set {job.id} --not-before 0`."
        )
    return None


def _no_worker(inputs: ExplainInputs, *, for_owner: bool) -> str:
    if for_owner:
        return "No worker is alive, so nothing runs until the operator starts one."
    text = "No worker is alive, so nothing runs: start one with `tidegate serve` or `tidegate worker`."
    if inputs.workers:
        last = min(inputs.workers, key=lambda one: one.silent_ms)
        text += f" The last one ran on {last.host} and was alive {spoken(last.silent_ms)} ago."
    return text


def _broken_workers(inputs: ExplainInputs) -> list[str]:
    """Return what workers report of their own trouble; a worker that ended counts only where no
    other is alive.
    """
    found = []
    for one in inputs.workers:
        if one.report.trouble and one.is_alive:
            found.append(f"The worker on {one.host} takes no new work: {one.report.trouble}.")
        elif one.report.trouble and inputs.workers_alive == 0:
            found.append(f"The worker on {one.host} ended {spoken(one.silent_ms)} ago: {one.report.trouble}.")
    return _few(found, WORKERS_SHOWN_MAX, "more worker is in trouble", "more workers are in trouble")


def _unhealthy(unhealthy: UnhealthyModel, *, for_owner: bool) -> list[str]:
    model = unhealthy.model or "its one model"
    if for_owner:
        since = spoken(min(one.for_ms for one in unhealthy.troubles))
        return [f"{model}: no model server of it takes calls, for {since} now."] if unhealthy.is_all else []
    found = []
    for one in unhealthy.troubles:
        why = f" ({one.why})" if one.why else ""
        if one.is_key_rejected:
            text = f"deployment {one.deployment} has rejected our key for {spoken(one.for_ms)}{why}: check its api_key."
        else:
            text = f"the circuit of deployment {one.deployment} has been open for {spoken(one.for_ms)}{why}."
        found.append(f"{model}: {text}")
    return _few(found, DEPLOYMENTS_SHOWN_MAX, "more deployment is unhealthy", "more deployments are unhealthy")


def _spent(budget: SpentBudget, *, for_owner: bool) -> str:
    when = f"in {spoken(budget.wait_ms)}" if budget.wait_ms is not None else "when it is raised"
    if for_owner and not budget.is_owners:
        return f"{budget.model}: a budget of the server is used up; it allows more {when}."
    return f"{budget.model}: the budget of {budget.name} is used up ({budget.figures}); it allows more {when}."


def _few(sentences: list[str], count_max: int, one: str, several: str) -> list[str]:
    more = len(sentences) - count_max
    return sentences if more <= 0 else [*sentences[:count_max], f"And {in_words(more, one, several)}."]


def _waited(inputs: ExplainInputs) -> list[str]:
    """Say why items waited that a job did not run to their end."""
    return [
        f"{count:,} of those were tried and waited to be tried again: {_put_off(reason)}."
        for reason, count in inputs.waiting_reasons
    ]


def _put_off(reason: str) -> str:
    words = _PUT_OFF[reason][0] if reason in _PUT_OFF else _TRIED.get(reason)
    return f"{words} ({reason})" if words else reason


def _slices(count: int) -> str:
    return in_words(count, "slice is", "slices are")


def _left(job: Job, inputs: ExplainInputs) -> str:
    left_ms = job.expires_at - inputs.now
    time_left = f"{spoken(left_ms)} left" if left_ms > 0 else "its window has passed"
    state = job.state.replace("_", " ")
    return f"It is {state}: {job.done_count:,} of {in_words(job.item_count, 'item')} done, {time_left}."


def _running(job: Job, inputs: ExplainInputs, *, for_owner: bool) -> list[str]:
    sentences = []
    if inputs.slices_leased and inputs.workers_alive:
        sentences.append(f"It is running: workers hold {inputs.slices_leased:,} of its slices.")
    elif inputs.slices_leased:
        sentences.append(f"{_slices(inputs.slices_leased)} held by workers that are gone: the next one takes them.")
    if inputs.slices_ready and inputs.jobs_ahead:
        ahead = in_words(inputs.jobs_ahead, "older batch that has", "older batches that have")
        sentences.append(f"{_slices(inputs.slices_ready)} ready, behind {ahead} slices ready too.")
    elif inputs.slices_ready and (inputs.spent or inputs.unhealthy or inputs.workers_alive == 0):
        sentences.append(f"{_slices(inputs.slices_ready)} ready.")
    elif inputs.slices_ready:
        sentences.append(
            f"{_slices(inputs.slices_ready)} ready and nothing is ahead of it: workers take them as their upstreams have room. "
            "If none do, see `tidegate doctor` for an upstream that is away."
        )
    if inputs.slices_resting:
        sentences.append(
            f"{_slices(inputs.slices_resting)} put off for another {spoken(max(0, inputs.rest_ends_in_ms))}{_rest_cause(inputs)}."
        )
    for reason, count in inputs.waiting_reasons:
        who = in_words(count, "item was tried and waits", "items were tried and wait")
        sentences.append(f"{who} to be tried again: {_put_off(reason)}.")
    # Without a worker nothing is served, so there is nothing to foresee.
    for forecast in inputs.forecasts if inputs.workers_alive else ():
        shown = replace(forecast, notes=()) if for_owner else forecast
        sentences.extend(_foreseen(_as_put_off(shown, inputs)))
    if not sentences:
        sentences.append("Nothing of it is ready or out; the next sweep moves it on.")
    return sentences


def _rest_cause(inputs: ExplainInputs) -> str:
    """Say what may have put slices off, where no other sentence says it."""
    if inputs.spent or inputs.unhealthy or inputs.waiting_reasons:
        return ""
    return ", because an upstream asked for it or failed, or a budget is used up"


def _as_put_off(forecast: FlowForecast, inputs: ExplainInputs) -> FlowForecast:
    """Return the forecast with the workers' own reason when all of them just put this batch off.

    What a worker with room would do says little then.
    """
    if forecast.reason is not None or inputs.slices_leased or not inputs.slices_resting or len(inputs.forecasts) > 1:
        return forecast
    reasons = [_PUT_OFF[reason][1] for reason, _ in inputs.waiting_reasons if reason in _PUT_OFF]
    return replace(forecast, rule=None, reason=reasons[0]) if reasons else forecast


def _foreseen(forecast: FlowForecast) -> list[str]:
    """Return sentences on one model: what the scheduler would do with its slices, its share, its
    deadline and its end.
    """
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
    if forecast.reason == Reason.UNHEALTHY:
        return "it is unknown when it ends, because nothing of it is served now."
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
