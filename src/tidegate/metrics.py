"""Every metric, declared once, in a registry of its own, with closed sets of labels.

A label has a closed set of values: rules and reasons of ours, and the models and deployments that an operator named (`pin`). Anything else
counts as `other`, so that no caller can make a series by inventing a name. No tenant, key, id or text of an error is ever a label; what
one tenant did is in the store. This module knows nothing of who measures or who reads.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics import MetricWrapperBase

from tidegate.core import hooks
from tidegate.core.budgets.budget import LimitBound
from tidegate.core.policy import policy_rules
from tidegate.core.schedule.snapshot import Why

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

M = TypeVar("M", bound=MetricWrapperBase)

# A series more for each counter that says when its process began would tell nothing that its restart does not show.
disable_created_metrics()  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True)
class Declared:
    """One metric as people meet it; a label without values here has those that operators or our reasons give it."""

    name: str
    kind: str
    about: str
    labels: tuple[str, ...]


_declared: list[Declared] = []
_pinned: dict[str, set[str]] = {label: set() for label in _NAMED_BY_OPERATORS}


class MetricFamily(Generic[M]):
    """A metric with labels. `of` gives the one to count on, for values that may be anything."""

    def __init__(self, made: M, labels: dict[str, frozenset[str]]) -> None:
        self.made = made
        self._labels = labels
        self._reasons: set[str] = set()

    def of(self, *values: str) -> M:
        return self.made.labels(*(self._closed(*pair) for pair in zip(self._labels, values, strict=True)))

    def forget(self) -> None:
        """Drop every series: for gauges of things that may be gone."""
        self.made.clear()

    def _closed(self, label: str, value: str) -> str:
        if label in _pinned:
            return value if value in _pinned[label] else OTHER
        if known := self._labels[label]:
            return value if value in known else OTHER
        if value not in self._reasons:
            # A lone surrogate cannot be written out, and would take all other metrics with it.
            if len(self._reasons) >= REASONS_MAX or not value.isprintable():
                return OTHER
            self._reasons.add(value)
        return value


def pin(*, models: Iterable[str], deployments: Iterable[str]) -> None:
    """The names that an operator gave: the only ones that are shown, the first 200 of each kind."""
    for label, names in (("model", models), ("deployment", deployments)):
        _pinned[label].update(list(names)[:PINNED_MAX])
        while len(_pinned[label]) > PINNED_MAX:
            _pinned[label].pop()


def text() -> bytes:
    """Everything as Prometheus reads it."""
    return generate_latest(REGISTRY)


def counted(metric: Counter | MetricFamily[Counter]) -> dict[str, int]:
    """What this process counted so far, by label; without one, under an empty name."""
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
    return MetricFamily(
        Counter(_named(name, "counter", about, labels), about, list(labels), registry=REGISTRY), _sets(labels)
    )


def _gauge(name: str, about: str) -> Gauge:
    return Gauge(_named(name, "gauge", about), about, registry=REGISTRY)


def _gauges(name: str, about: str, **labels: Iterable[str]) -> MetricFamily[Gauge]:
    return MetricFamily(
        Gauge(_named(name, "gauge", about, labels), about, list(labels), registry=REGISTRY), _sets(labels)
    )


def _histogram(name: str, about: str, buckets: tuple[float, ...]) -> Histogram:
    return Histogram(_named(name, "histogram", about), about, registry=REGISTRY, buckets=buckets)


def _sets(labels: dict[str, Iterable[str]]) -> dict[str, frozenset[str]]:
    return {label: frozenset(str(value) for value in values) for label, values in labels.items()}


# ---- the scheduler

scheduler_decision_seconds = _histogram(
    "scheduler_decision_seconds", "How long one decision took, its snapshot included.", _MOMENTS_S
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
    "For how long the longest waiting model has had work that is due while none of it was leased by anybody.",
)
deadline_slack_seconds = _gauge(
    "deadline_slack_seconds", "Least slack among the jobs of the last decision; below 0 one is behind."
)

# ---- leases

work_leases = _counters("work_leases_total", "Slices that were leased, by the rule that took them.", why=Why)
work_lease_misses = _counter("work_lease_misses_total", "Slices that a decision wanted and another worker had first.")
work_lease_seconds = _histogram("work_lease_seconds", "How long the store took to lease what was wanted.", _MOMENTS_S)

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

policy_refusals = _counters(
    "policy_refusals_total",
    "Items and interactive calls that policy refused for good, by the code that they saw.",
    reason=_POLICY_CODES,
)
policy_waits = _counters(
    "policy_waits_total",
    "Times that policy let an item or an interactive call wait, by the code.",
    reason=_POLICY_CODES,
)

# ---- several items as one call

group_calls = _counters(
    "group_calls_total",
    "Upstream calls that several items shared, by how they ended.",
    deployment=(),
    outcome=("answered", "refused", "failed"),
)
group_items = _histogram(
    "group_items", "Items that shared one upstream call.", (2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0)
)
group_singles = _counters(
    "group_singles_total",
    "Items that were sent alone although their deployment takes several in one call, by why.",
    reason=(),
)
group_isolations = _counters(
    "group_isolations_total",
    "Shared calls that were refused or whose answer could not be taken apart, so that each item was sent alone.",
    deployment=(),
    reason=(),
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

# ---- the tide and the deployments

tide_calls_limit = _gauges(
    "tide_calls_limit", "Calls that batch work may have in flight at a deployment now.", deployment=()
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
