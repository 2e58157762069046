"""Every metric, declared once, in a registry of its own, with closed sets of labels.

A label has a closed set of values: our rules and reasons, and the models and deployments that an
operator named (`pin`). Any other value counts as `other`, so that no caller can make a series by
inventing a name. No tenant, key, id or error text is ever a label; what one tenant did is in the
store. This module does not know who measures or who reads.
"""

import math
from bisect import bisect_left
from collections import Counter as Tally
from collections.abc import Callable, Iterable, Mapping
from itertools import accumulate, product
from typing import Generic, TypeVar

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.registry import Collector

from tidegate.core import hooks
from tidegate.core.budgets.budget import LimitBound
from tidegate.core.nouns import Job, Usage
from tidegate.core.policy import policy_rules
from tidegate.core.schedule.policy import Mode
from tidegate.core.schedule.snapshot import Why
from tidegate.core.states import JobState

PREFIX = "tidegate_"
OTHER = "other"
PINNED_MAX = 200
REASONS_MAX = 50
CONTENT_TYPE = CONTENT_TYPE_LATEST
REGISTRY = CollectorRegistry()

_NAMED_BY_OPERATORS = ("model", "deployment")
_MOMENTS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
_POLICY_CODES = (*policy_rules.DenialCode, *hooks.CODES)
_WAITS_S = (0.01, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 3600.0)

_CALLS_S = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_JOBS_S = (1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 4 * 3600.0, 24 * 3600.0)
_MODES = tuple(Mode)
_JOB_STATES = ("validating", "in_progress", "cancelling", "finalizing", "completed", "failed", "expired", "cancelled")
_ITEM_STATES = ("pending", "in_progress", "completed", "failed", "expired", "cancelled")
_SIZES = ("xs", "s", "m", "l", "xl")
_SIZE_BOUNDS = (10, 100, 1_000, 10_000)
_GROUPS = ("embeddings", "chat")
_ENDPOINTS = ("chat", "completions", "embeddings", "responses", "messages", "moderations")
_ENDPOINT_OF = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completions",
    "/v1/embeddings": "embeddings",
    "/v1/responses": "responses",
    "/v1/messages": "messages",
    "/v1/moderations": "moderations",
}
_QUEUE: dict[str, Iterable[str]] = {
    "status": ("queued", "in_progress", "paused"),
    "model": (),
    "scope": ("organization", "team", "key", "user"),
    "tier": (),
    "size_class": _SIZES,
}

# The first bucket's index in the counts of items: after input tokens, output tokens and seconds.
_BUCKETS_AT = 3

M = TypeVar("M", bound=MetricWrapperBase)

# The series with the start time of each counter add nothing: a restart shows as a
# counter that begins again.
disable_created_metrics()  # type: ignore[no-untyped-call]


class Declared(msgspec.Struct, frozen=True):
    """The description of one metric. A label without values here gets them from operators' names or
    from our reasons."""

    name: str
    kind: str
    about: str
    labels: tuple[str, ...]


_declared: list[Declared] = []
_pinned: dict[str, set[str]] = {label: set() for label in _NAMED_BY_OPERATORS}


class MetricFamily(Generic[M]):
    """A metric with labels. `of` returns the series to count on; label values may be anything."""

    def __init__(self, made: M, labels: dict[str, frozenset[str]]) -> None:
        self.made = made
        self._labels = labels
        self._reasons: set[str] = set()
        self._children: dict[tuple[str, ...], M] = {}

    def of(self, *values: str) -> M:
        """Return the series with these label values; a value outside its closed set
        becomes `other`."""
        child = self._children.get(values)
        if child is None:
            # A child is kept by the labels of its series, so that invented names take no memory.
            closed = tuple(self._closed(*pair) for pair in zip(self._labels, values, strict=True))
            child = self._children.get(closed)
            if child is None:
                child = self._children[closed] = self.made.labels(*closed)
        return child

    def forget(self) -> None:
        """Drop every series, for gauges of things that may be gone."""
        self._children.clear()
        self.made.clear()

    def _closed(self, label: str, value: str) -> str:
        if label in _pinned:
            return value if value in _pinned[label] else OTHER
        if known := self._labels[label]:
            return value if value in known else OTHER
        if value not in self._reasons:
            # A lone surrogate cannot be encoded, and would make the whole scrape fail.
            if len(self._reasons) >= REASONS_MAX or not value.isprintable():
                return OTHER
            self._reasons.add(value)
        return value


def size_of(count: int) -> str:
    """Return the size class of a job with this number of items."""
    return _SIZES[bisect_left(_SIZE_BOUNDS, count)]


def endpoint_of(path: str) -> str:
    """Return an endpoint as a label."""
    return _ENDPOINT_OF.get(path, OTHER)


def pin(*, models: Iterable[str], deployments: Iterable[str]) -> None:
    """Allow these names, which an operator gave, as labels: only they are shown, at
    most 200 of each kind."""
    for label, names in (("model", models), ("deployment", deployments)):
        _pinned[label].update(list(names)[:PINNED_MAX])
        while len(_pinned[label]) > PINNED_MAX:
            _pinned[label].pop()


def text() -> bytes:
    """Return all metrics in the text format of Prometheus."""
    return generate_latest(REGISTRY)


def counted(metric: Counter | MetricFamily[Counter]) -> dict[str, int]:
    """Return what this process counted so far, by label values; under an empty name if
    there are no labels."""
    made = metric if isinstance(metric, Counter) else metric.made
    samples = [sample for family in made.collect() for sample in family.samples]
    return {",".join(sample.labels.values()): int(sample.value) for sample in samples}


def declared() -> tuple[Declared, ...]:
    return tuple(_declared)


def _named(name: str, kind: str, about: str, labels: Iterable[str] = ()) -> str:
    _declared.append(Declared(PREFIX + name, kind, about, tuple(labels)))
    return PREFIX + name


def _counter(name: str, about: str) -> Counter:
    return Counter(_named(name, "counter", about), about, registry=REGISTRY)


def _counters(name: str, about: str, **labels: Iterable[str]) -> MetricFamily[Counter]:
    """Make a counter. If all its labels are known, each series begins with 0: Prometheus sees no
    increase in one that begins with 1."""
    made = Counter(_named(name, "counter", about, labels), about, list(labels), registry=REGISTRY)
    for values in product(*(tuple(known) for known in labels.values())):
        made.labels(*values)
    return MetricFamily(made, _sets(labels))


def _gauge(name: str, about: str) -> Gauge:
    return Gauge(_named(name, "gauge", about), about, registry=REGISTRY)


def _gauges(name: str, about: str, **labels: Iterable[str]) -> MetricFamily[Gauge]:
    return MetricFamily(
        Gauge(_named(name, "gauge", about, labels), about, list(labels), registry=REGISTRY), _sets(labels)
    )


def _histogram(name: str, about: str, buckets: tuple[float, ...]) -> Histogram:
    return Histogram(_named(name, "histogram", about), about, registry=REGISTRY, buckets=buckets)


def _histograms(name: str, about: str, buckets: tuple[float, ...], **labels: Iterable[str]) -> MetricFamily[Histogram]:
    made = Histogram(_named(name, "histogram", about, labels), about, list(labels), registry=REGISTRY, buckets=buckets)
    return MetricFamily(made, _sets(labels))


def _sets(labels: dict[str, Iterable[str]]) -> dict[str, frozenset[str]]:
    return {label: frozenset(str(value) for value in values) for label, values in labels.items()}


# An item that ended: its model, how it was sent if it is a chat (empty for all else), its seconds,
# and its usage if it was answered.
EndedItem = tuple[str, str, float, Usage | None]
# The most ended items that are noted before they are counted.
ENDED_MAX = 1_000


class ItemCounts(Collector):
    """The counts of this worker's items. Items are counted many at a time and in plain numbers, and
    a scrape makes six metrics of them, because counting each item in six metrics takes 9 µs.

    `allowed` counts the items that policy let pass, by endpoint. `ended` has the items that ended
    since items were last counted.

    Counts are kept by model, mode and whether there was an answer: input tokens, output tokens,
    seconds, and a count for each bucket.
    """

    def __init__(self) -> None:
        self.allowed: Tally[str] = Tally()
        self.ended: list[EndedItem] = []
        self._counts: dict[tuple[str, str, bool], list[float]] = {}
        self._allowances = _named_family("policy_allowed_total", "counter", "Items that policy let pass.", "endpoint")
        self._seconds = _named_family("item_seconds", "histogram", "How long the last call of an item took.", "model")
        self._errors = _named_family("item_errors_total", "counter", "Items that ended without an answer.", "model")
        self._input = _named_family(
            "prompt_tokens_total", "counter", "Prompt tokens of answered items, as usage says.", "model"
        )
        self._output = _named_family(
            "generation_tokens_total", "counter", "Output tokens of answered items, as usage says.", "model"
        )
        self._chat = _named_family(
            "chat_seconds",
            "histogram",
            "How long chat items took, by how they were sent; its count is how many there were.",
            "mode",
            "status",
        )
        REGISTRY.register(self)

    def count_ended(self) -> None:
        """Count the items that are noted."""
        shown = _pinned["model"]
        for model, mode, took_s, usage in self.ended:
            of = (model if model in shown else OTHER, mode, usage is not None)
            counts = self._counts.get(of)
            if counts is None:
                counts = self._counts[of] = [0.0] * (_BUCKETS_AT + len(_CALLS_S) + 1)
            if usage is not None:
                counts[0] += usage.input_tokens
                counts[1] += usage.output_tokens
            counts[2] += took_s
            counts[_BUCKETS_AT + bisect_left(_CALLS_S, took_s)] += 1
        self.ended.clear()

    def collect(self) -> Iterable[Metric]:
        self.count_ended()
        allowed: Tally[tuple[str, ...]] = Tally()
        for endpoint, count in self.allowed.items():
            allowed[endpoint_of(endpoint),] += count
        answered = self._summed(lambda model, mode, is_answered: (model,) if is_answered else None)
        unanswered = self._summed(lambda model, mode, is_answered: None if is_answered else (model,))
        status = ("error", "success")
        chats = self._summed(lambda model, mode, is_answered: (mode, status[is_answered]) if mode else None)
        return (
            _counter_of(self._allowances, allowed),
            _histogram_of(self._seconds, self._summed(lambda model, mode, is_answered: (model,))),
            _counter_of(self._errors, {labels: sum(counts[_BUCKETS_AT:]) for labels, counts in unanswered.items()}),
            _counter_of(self._input, {labels: counts[0] for labels, counts in answered.items()}),
            _counter_of(self._output, {labels: counts[1] for labels, counts in answered.items()}),
            _histogram_of(self._chat, chats),
        )

    def _summed(
        self, labels_of: Callable[[str, str, bool], tuple[str, ...] | None]
    ) -> dict[tuple[str, ...], list[float]]:
        sums: dict[tuple[str, ...], list[float]] = {}
        for of, counts in self._counts.items():
            labels = labels_of(*of)
            if labels is not None:
                sums[labels] = [a + b for a, b in zip(sums.get(labels, [0.0] * len(counts)), counts, strict=True)]
        return sums


def _named_family(name: str, kind: str, about: str, *labels: str) -> Declared:
    _named(name, kind, about, labels)
    return _declared[-1]


def _counter_of(declared: Declared, values: Mapping[tuple[str, ...], float]) -> Metric:
    family = CounterMetricFamily(declared.name, declared.about, labels=declared.labels)
    for labels, value in values.items():
        family.add_metric(labels, value)
    return family


def _histogram_of(declared: Declared, counts: dict[tuple[str, ...], list[float]]) -> Metric:
    family = HistogramMetricFamily(declared.name, declared.about, labels=declared.labels)
    bounds = [*map(str, _CALLS_S), "+Inf"]
    for labels, of in counts.items():
        family.add_metric(labels, list(zip(bounds, accumulate(of[_BUCKETS_AT:]), strict=True)), of[2])
    return family


# ---- the scheduler

scheduler_decision_seconds = _histograms(
    "scheduler_decision_seconds", "How long one decision took, its snapshot included.", _MOMENTS_S, mode=_MODES
)
scheduler_config_info = _gauges(
    "scheduler_config_info",
    "1 for the mode, the shadow mode and the hash of the scheduler's settings that this worker follows.",
    mode=_MODES,
    shadow_mode=("none", *_MODES),
    config_hash=(),
)
scheduler_model_skips = _counters(
    "scheduler_model_skips_total", "Whole models that a decision passed over, by reason.", model=(), reason=()
)
scheduler_flow_skips = _counters(
    "scheduler_flow_skips_total", "Flows and jobs of share owners that a decision passed over, by reason.", reason=()
)
scheduler_picks = _counters("scheduler_picks_total", "Slices that a decision wanted, by the rule.", why=Why)
scheduler_skips = _counters("scheduler_skips_total", "What a decision passed over, by reason.", reason=())
scheduler_fairness_gap_tokens = _gauges(
    "scheduler_fairness_gap_tokens",
    "Weighted tokens between the most and the least served flow of a model that both wait; the bound is in the docs.",
    model=(),
)
scheduler_shadow_decisions = _counter("scheduler_shadow_decisions_total", "Decisions that the shadow mode also made.")
scheduler_shadow_differences = _counter(
    "scheduler_shadow_differences_total", "Decisions in which the shadow mode would have chosen otherwise."
)
ready_unleased_seconds = _gauge(
    "ready_unleased_seconds",
    "For how long the longest waiting model has had work that is due while no worker leased any of it.",
)
deadline_slack_seconds = _gauge(
    "deadline_slack_seconds",
    "Least slack among the jobs that this worker saw waiting; below 0 one is behind, +Inf where none waits.",
)
deadline_slack_seconds.set(math.inf)

# ---- leases

work_lease_attempts = _counters(
    "work_lease_attempts_total",
    "Looks for work: slices were leased, nothing was there to lease, or other workers had it first.",
    result=("leased", "empty", "lost"),
)
slice_reclaims = _counter("slice_reclaims_total", "Slices that were freed because their worker was lost.")
sweep_runs = _counters("sweep_runs_total", "Sweeps for lost workers, by how they ended.", status=("success", "error"))
sweep_rows = _counters(
    "sweep_rows_total",
    "What sweeps did: slices reclaimed, blobs released, lost workers skipped whose logs cannot be read yet, flows refreshed.",
    kind=("reclaimed", "released", "skipped", "refreshed"),
)
sweep_seconds = _histogram("sweep_seconds", "How long a sweep for lost workers took.", _MOMENTS_S)
startup_recovery = _counters(
    "startup_recovery_total",
    "What was recovered of processes that were lost, by the state of its job and what was done.",
    status=("validating", "in_progress", "cancelling", "finalizing", "unknown"),
    action=("re_enqueued", "failed", "finalized", "cancelled", "expired", "cleaned_up", "error"),
)

work_leases = _counters("work_leases_total", "Slices that were leased, by the rule that took them.", why=Why)
work_lease_misses = _counter("work_lease_misses_total", "Slices that a decision wanted and another worker had first.")
work_lease_seconds = _histogram("work_lease_seconds", "How long the store took to lease what was wanted.", _MOMENTS_S)

# ---- jobs and items, over the whole store

jobs = _gauges("jobs", "Jobs in the store, by status.", status=_JOB_STATES)
items = _gauges("items", "Items in the store, by status.", status=_ITEM_STATES)
oldest_item_age_seconds = _gauges(
    "oldest_item_age_seconds",
    "Age of the oldest job of which nothing was begun (pending), and of the oldest with items in flight (in_progress).",
    status=("pending", "in_progress"),
)
queue_jobs = _gauges("queue_jobs", "Open jobs in the scheduler's queue.", **_QUEUE)
queue_work_units = _gauges("queue_work_units", "Work units of open jobs in the scheduler's queue, in tokens.", **_QUEUE)
oldest_job_age_seconds = _gauges("oldest_job_age_seconds", "Age of the oldest open job in the queue.", **_QUEUE)
workers = _gauges(
    "workers", "Processes that beat within their leases, and those of them that hold slices.", state=("alive", "active")
)

# Every process reports these for the whole store, so they must not be summed over processes.
OF_STORE = (jobs, items, oldest_item_age_seconds, queue_jobs, queue_work_units, oldest_job_age_seconds, workers)

# ---- how jobs and items ended here

jobs_processed = _counters(
    "jobs_processed_total",
    "Jobs that came to their end in this process, by how and why; and steps of jobs that wait to be taken again, or were another's.",
    result=("success", "failed", "cancelled", "skipped", "re_enqueued", "expired"),
    reason=(
        "system_error",
        "invalid_input",
        "stopped",
        "guard_shutdown",
        "db_transient",
        "db_inconsistency",
        "not_runnable_state",
        "expired_dequeue",
        "expired_execution",
        "none",
    ),
)
job_seconds = _histograms("job_seconds", "From the creation of a job to its end.", _JOBS_S, status=_JOB_STATES[4:])
job_processing_seconds = _histograms(
    "job_processing_seconds",
    "From when a job was ingested to its end; the ingest itself is in ingest_seconds.",
    _JOBS_S,
    size_bucket=_SIZES,
)
job_queue_wait_seconds = _histogram(
    "job_queue_wait_seconds", "From the creation of a job until it was ingested and could be leased.", _JOBS_S
)
job_cancellations = _counters(
    "job_cancellations_total",
    "Jobs that were cancelled, by how far they had come.",
    phase=("queued", "in_progress", "finalizing"),
)
create_seconds = _histogram("create_seconds", "How long the creation of a batch took.", _MOMENTS_S)
ingest_seconds = _histograms("ingest_seconds", "How long the pass over an input took.", _WAITS_S, size_bucket=_SIZES)
finalize_seconds = _histogram("finalize_seconds", "From the close of a job to its published files.", _WAITS_S)
finalization_retries = _counters(
    "finalization_retries_total",
    "Publications that could not be made and wait, and those that were made after such a wait.",
    result=("postponed", "recovered"),
)
item_counts = ItemCounts()
retry_delay_seconds = _histograms(
    "retry_delay_seconds", "How long a failed item waits until it is tried again.", _WAITS_S, reason=()
)
worker_in_flight = _gauge("worker_in_flight", "Items that this worker has in flight.")
worker_in_flight_max = _gauge("worker_in_flight_max", "Items that this worker may have in flight at once.")
worker_saturation_ratio = _gauge("worker_saturation_ratio", "Items in flight over the most that may be.")
record_failures = _counters(
    "record_failures_total",
    "Flushes of finished items that must be made again: bytes could not be written, a log was collected, or the store was away.",
    reason=("blobs", "log_collected", "store"),
)

# ---- blobs

blob_operations = _counters(
    "blob_operations_total",
    "Operations on blobs; a failure that is tried again counts as retry, another one as exhausted.",
    operation=("store", "retrieve", "delete"),
    component=("processor", "apiserver", "garbage-collector"),
    status=("success", "retry", "exhausted"),
)
blob_failures = _counters(
    "blob_failures_total",
    "Operations on blobs that failed.",
    operation=("store", "retrieve", "delete"),
    backend=("local", "s3", "az"),
)

# ---- shared limits

limits_granted_requests = _counters(
    "limits_granted_requests_total", "Requests that budgets granted, by what they bind.", bound=LimitBound
)
limits_granted_tokens = _counters(
    "limits_granted_tokens_total", "Tokens that budgets granted, by what they bind.", bound=LimitBound
)
limits_spent = _counters(
    "limits_spent_total", "Questions that found a budget spent, by what the budget binds.", bound=LimitBound
)
limits_unavailable = _counter(
    "limits_unavailable_total", "Times that budgets could not be asked, so that nothing was sent."
)
budget_wait_seconds = _histogram("budget_wait_seconds", "How long a call had to wait for a budget.", _WAITS_S)

schema_invalid_answers = _counter(
    "schema_invalid_answers_total", "Answers that did not fit what their batch asks of answers; each was paid for."
)

# ---- policy

preflight_seconds = _histograms(
    "preflight_seconds",
    "How long guardrails and hooks took before an item was sent or refused.",
    _MOMENTS_S,
    endpoint=_ENDPOINTS,
    status=("allowed", "rejected", "retryable"),
)
policy_refusals = _counters(
    "policy_refusals_total",
    "Items and interactive calls that policy refused for good, by the code that they saw.",
    endpoint=_ENDPOINTS,
    reason=_POLICY_CODES,
)
policy_waits = _counters(
    "policy_waits_total",
    "Times that policy let an item or an interactive call wait, by the code.",
    endpoint=_ENDPOINTS,
    reason=_POLICY_CODES,
)

# ---- several items as one call

group_calls = _counters(
    "group_calls_total",
    "Upstream calls that several items shared, by how they ended.",
    kind=_GROUPS,
    deployment=(),
    outcome=("answered", "refused", "failed"),
)
group_items = _histograms(
    "group_items",
    "Items that shared one upstream call.",
    (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0),
    kind=_GROUPS,
)
group_requeues = _counters(
    "group_requeues_total",
    "Shared calls whose items are tried again, by why and whether the next ones are smaller.",
    category=(),
    result=("requeued", "shrunk"),
)
group_singles = _counters(
    "group_singles_total",
    "Items that were sent alone although their deployment takes several in one call, by why.",
    kind=_GROUPS,
    reason=(),
)
group_isolations = _counters(
    "group_isolations_total",
    "Shared calls that were refused or whose answer could not be taken apart, so that each item was sent alone.",
    deployment=(),
    reason=(),
)

# ---- models that rest

model_deferrals = _counters(
    "model_deferrals_total",
    "Times that a whole model was left alone because none of its deployments was healthy.",
    reason=("no_healthy_deployment",),
)
model_deferral_seconds = _histograms(
    "model_deferral_seconds", "For how long a whole model is left alone.", _WAITS_S, reason=()
)
model_deferred_items = _counters(
    "model_deferred_items_total", "Items that went back to the queue to wait, by why.", reason=()
)

# ---- queues of asynchronous deployments

worker_broken = _gauge(
    "worker_broken", "1 while this process's worker ends, or waits to be started again, after an internal error."
)
queue_awaited = _gauge("queue_awaited", "Requests in queues that this process waits for.")
queue_results = _counters(
    "queue_results_total",
    "Results from queues by what they were: answers, unexpected, unreadable, there already, recorded by another process, or gone.",
    outcome=("answered", "too_large", "lost", "recorded", "garbage", "unknown", "duplicate", "late"),
)

# ---- interactive calls

interactive_calls = _counters(
    "interactive_calls_total",
    "Interactive calls by how they ended.",
    model=(),
    outcome=("answered", "refused", "failed", "left"),
)
interactive_first_byte_seconds = _histogram(
    "interactive_first_byte_seconds",
    "How long an interactive call waited for the first byte of its answer, or for all of it where it is not streamed.",
    _WAITS_S,
)

# ---- webhooks

webhook_deliveries = _counters(
    "webhook_deliveries_total",
    "Tries to deliver an event to a webhook endpoint, by what came of them; after `failed` nothing is tried again.",
    outcome=("delivered", "postponed", "failed"),
)

# ---- clients' connections

client_connections = _gauge("client_connections", "Connections that clients have open to this process.")
client_connections_closed = _counters(
    "client_connections_closed_total",
    "Connections of clients that were closed from here: the answer was taken too slowly, there were too many, or the process stopped.",
    why=("slow", "crowded", "stopping"),
)

api_requests = _counters(
    "api_requests_total", "Requests that the API answered.", door=(), status=("1xx", "2xx", "3xx", "4xx", "5xx")
)
api_seconds = _histograms("api_seconds", "From a request's head to the head of its answer.", _WAITS_S, door=())

# ---- this process

build_info = _gauges("build_info", "1 for the version that runs.", version=())
process_resident_bytes = _gauge("process_resident_bytes", "Memory that this process holds.")
process_cpu_seconds = _counter("process_cpu_seconds_total", "CPU time that this process and its ended children used.")
process_descriptors = _gauge("process_descriptors", "Files and sockets that this process has open.")
process_descriptors_max = _gauge("process_descriptors_max", "Files and sockets that it may have open.")
repair_actions = _counters(
    "repair_actions_total",
    "Repairs that operators asked for.",
    action=("abandon", "cancel", "fail", "pause", "requeue", "resume", "retry", "retry_finalization"),
    status=("done", "refused"),
)

# ---- the tide and the deployments

tide_calls_limit = _gauges(
    "tide_calls_limit",
    "Calls that the tide lets this process have in flight at a deployment now, for batch work. Those of several processes together may be "
    "more than tidegate_tide_calls_max, which holds over all of them.",
    deployment=(),
)
tide_calls_max = _gauges(
    "tide_calls_max",
    "The most calls that batch work of all processes may have in flight at a deployment, by its settings.",
    deployment=(),
)
tide_prompt_tokens_limit = _gauges(
    "tide_prompt_tokens_limit",
    "Prompt tokens that batch work may have sent to a deployment and that wait for a first token.",
    deployment=(),
)
tide_handbacks = _counters(
    "tide_handbacks_total", "Calls taken back before their first token, for interactive work.", deployment=()
)
upstream_in_flight = _gauges(
    "upstream_in_flight", "Calls that this process has in flight at a deployment.", deployment=()
)
deployment_state = _gauges(
    "deployment_state",
    "1 for the state of a deployment: closed (its circuit: healthy), resting, open, probing, paused, draining or drained.",
    deployment=(),
    state=(),
)
model_in_flight = _gauges("model_in_flight", "Calls that this process has in flight for a model.", model=())
upstream_connections = _gauge("upstream_connections", "Connections to model servers that are in use.")
upstream_connections_max = _gauge("upstream_connections_max", "Connections to model servers that may be in use.")
upstream_connection_waits = _counters(
    "upstream_connection_waits_total",
    "Calls that had to wait for a free connection, and those of them that waited in vain.",
    outcome=("connected", "timed_out"),
)


# ---- counting an event in several metrics

_RESULT_OF = {
    JobState.COMPLETED: "success",
    JobState.FAILED: "failed",
    JobState.EXPIRED: "expired",
    JobState.CANCELLED: "cancelled",
}


def count_job_end(job: Job | None) -> None:
    """Count a job that ended just now, by the times in the store."""
    if job is None or job.state not in _RESULT_OF:
        return
    ended_at = job.completed_at or job.failed_at or job.expired_at or job.cancelled_at or job.created_at
    jobs_processed.of(_RESULT_OF[job.state], _end_reason(job)).inc()
    job_seconds.of(job.state).observe((ended_at - job.created_at) / 1000)
    if job.state is JobState.CANCELLED:
        job_cancellations.of("in_progress" if job.in_progress_at else "queued").inc()
    if job.in_progress_at:
        size = size_of(job.item_count)
        job_processing_seconds.of(size).observe((ended_at - job.in_progress_at) / 1000)
        job_queue_wait_seconds.observe((job.in_progress_at - job.created_at) / 1000)
    if job.finalizing_at:
        finalize_seconds.observe((ended_at - job.finalizing_at) / 1000)


def _end_reason(job: Job) -> str:
    if job.state is JobState.EXPIRED:
        return "expired_execution" if job.in_progress_at else "expired_dequeue"
    if job.state is not JobState.FAILED:
        return "none"
    if job.in_progress_at is None:
        return "invalid_input"
    return "stopped" if job.stopped_by else "system_error"
