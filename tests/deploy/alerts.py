"""The alert rules, what makes each of them fire, and a small evaluator of the few forms that they are written in.

It reads real scrapes: one before the cause, one after it, and one after it came again. `test_prometheus.py` holds it against Prometheus.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.support.processes import Processes

ROOT = Path(__file__).resolve().parents[2]
RULES: list[dict[str, Any]] = yaml.safe_load((ROOT / "deploy/alerts.yaml").read_text())["groups"][0]["rules"]
SELECTOR = re.compile(r"(tidegate_\w+)(?:\{([^}]*)\})?")
MATCHER = re.compile(r'(\w+)(=~?)"([^"]*)"')

# What makes each alert fire, as the service itself would count it.
CAUSES = {
    "TidegateItemsWaitLong": 'm.oldest_item_age_seconds.of("pending").set(4000)',
    "TidegateModelQueueOld": 'm.oldest_job_age_seconds.of("queued", "llama", "team", "default", "l").set(4000)',
    "TidegateSchedulerConfigDiffers": 'm.scheduler_config_info.of("smart_v1", "none", "b").set(1)',
    "TidegateSchedulerSlow": 'for _ in range(100): m.scheduler_decision_seconds.of("smart_v1").observe(0.4)',
    "TidegateModelSkipped": 'm.scheduler_model_skips.of("llama", "rpm_exhausted").inc(200)',
    "TidegateFlowsSkipped": 'm.scheduler_flow_skips.of("tenant_in_flight_max").inc(2000)',
    "TidegateWorkersIdle": 'm.work_lease_attempts.of("empty").inc(5)',
    "TidegateBlobsFail": 'm.blob_failures.of("store", "s3").inc()',
    "TidegatePolicyRefuses": 'm.policy_refusals.of("chat", "budget_exceeded").inc(20)',
    "TidegatePolicyWaits": 'm.policy_waits.of("chat", "rate_limited").inc(200)',
    "TidegateGroupsIsolated": 'm.group_isolations.of("d", "refused").inc(9)',
    "TidegateGroupsRefused": 'm.group_singles.of("chat", "tools").inc(200)',
    "TidegateModelDeferred": 'm.model_deferrals.of("no_healthy_deployment").inc()',
    "TidegateSweepsFail": 'm.sweep_runs.of("error").inc()',
    "TidegateSlicesReclaimed": "m.slice_reclaims.inc(30)",
    "TidegateBatchesFail": 'm.jobs_processed.of("failed", "system_error").inc()',
    "TidegateFinalizationPostponed": 'm.finalization_retries.of("postponed").inc(9)',
    "TidegateDeadlineAtRisk": "m.deadline_slack_seconds.set(-5)",
    "TidegateReadyUnleased": "m.ready_unleased_seconds.set(900)",
    "TidegateWorkerBroken": "m.worker_broken.set(1)",
}
# How many processes must say so; one where nothing stands here.
TELLERS = {"TidegateWorkersIdle": 2}
PROGRAM = """
import sys
from tidegate import metrics as m
m.pin(models=["llama"], deployments=["d"])
m.scheduler_config_info.of("smart_v1", "none", "a").set(1)
m.scheduler_decision_seconds.of("smart_v1").observe(0.001)
print(m.text().decode())
for _ in range(2):
    print("=====")
    exec(sys.argv[1])
    print(m.text().decode())
"""

Series = list[tuple[dict[str, str], float]]
Groups = dict[tuple[str, ...], float]
AGGREGATES: dict[str, Callable[[list[float]], float]] = {"max": max, "min": min, "sum": sum, "count": len}


class Scrapes:
    """Scrapes in order, each of one process or of several; rates are over the time from the first to the last, which is taken as the rule's
    window."""

    def __init__(self, *moments: Sequence[str]) -> None:
        self.moments = [self._read(texts) for texts in moments]

    @classmethod
    def of_cause(cls, alert: str, texts: Sequence[str]) -> Scrapes:
        """The same scrapes of as many processes as the alert needs."""
        return cls(*([text] * TELLERS.get(alert, 1) for text in texts))

    @staticmethod
    def _read(texts: Sequence[str]) -> dict[str, Series]:
        found: dict[str, Series] = {}
        for number, text in enumerate(texts):
            for family in text_string_to_metric_families(text):
                for sample in family.samples:
                    labels = {**sample.labels, "instance": f"process-{number}"}
                    found.setdefault(sample.name, []).append((labels, sample.value))
        return found

    def instant(self, selector: str) -> Series:
        return self._chosen(self.moments[-1], selector)

    def increase(self, selector: str) -> Series:
        """Since the first scrape that has the series: how it came to that value is not known to Prometheus."""
        first: dict[tuple[tuple[str, str], ...], float] = {}
        for scrape in self.moments:
            for labels, value in self._chosen(scrape, selector):
                first.setdefault(tuple(sorted(labels.items())), value)
        return [(labels, value - first[tuple(sorted(labels.items()))]) for labels, value in self.instant(selector)]

    @staticmethod
    def _chosen(scrape: dict[str, Series], selector: str) -> Series:
        found = SELECTOR.fullmatch(selector)
        assert found is not None, selector
        matchers = MATCHER.findall(found[2] or "")
        return [
            (labels, value)
            for labels, value in scrape.get(found[1], [])
            if all(
                re.fullmatch(want if kind == "=~" else re.escape(want), labels[name]) for name, kind, want in matchers
            )
        ]


def holds(expr: str, scrapes: Scrapes) -> bool:
    """Whether the rule gives any series at the last scrape."""
    return bool(_series(expr, scrapes))


def _series(expr: str, scrapes: Scrapes) -> Groups:
    """The groups of labels that an expression gives, with their values."""
    wanted, *unless = split_outside(expr, " unless ")
    found = _compared(wanted, scrapes)
    for part in unless:
        left_out = _compared(part, scrapes)
        found = {labels: value for labels, value in found.items() if labels not in left_out}
    return found


def _compared(expr: str, scrapes: Scrapes) -> Groups:
    left, operator, right = expr.rsplit(" ", 2)
    bound = float(right)
    return {
        labels: value
        for labels, value in _aggregated(left, scrapes).items()
        if (value > bound if operator == ">" else value < bound)
    }


def split_outside(expr: str, word: str) -> list[str]:
    """Split at a word that stands outside of all brackets."""
    parts = [""]
    for piece in expr.split(word):
        parts[-1] += piece
        if parts[-1].count("(") == parts[-1].count(")"):
            parts.append("")
        else:
            parts[-1] += word
    return parts[:-1]


def _aggregated(expr: str, scrapes: Scrapes) -> Groups:
    if found := re.fullmatch(r"histogram_quantile\(([\d.]+), sum by \(le\) \(rate\((.*)\[10m\]\)\)\)", expr):
        quantile = _quantile(float(found[1]), scrapes.increase(found[2]))
        return {} if quantile is None else {(): quantile}
    found = re.fullmatch(r"(max|min|sum|count)(?: by \(([\w, ]+)\) )?\((.*)\)", expr)
    assert found is not None, expr
    names = found[2].split(", ") if found[2] else []
    values: dict[tuple[str, ...], list[float]] = {}
    for labels, value in _samples(found[3], scrapes):
        values.setdefault(tuple(labels[name] for name in names), []).append(value)
    return {labels: AGGREGATES[found[1]](those) for labels, those in values.items()}


def _samples(expr: str, scrapes: Scrapes) -> Series:
    if found := re.fullmatch(r"increase\((.*)\[10m\]\)", expr):
        return scrapes.increase(found[1])
    if SELECTOR.fullmatch(expr):
        return scrapes.instant(expr)
    # What stands inside `count` is only counted, so its labels need no names.
    given = _series(expr, scrapes) if " unless " in expr else _aggregated(expr, scrapes)
    return [({}, value) for value in given.values()]


def _quantile(share: float, buckets: Series) -> float | None:
    """The upper bound of the bucket in which the quantile lies."""
    sums: dict[float, float] = {}
    for labels, value in buckets:
        sums[float(labels["le"])] = sums.get(float(labels["le"]), 0.0) + value
    total = max(sums.values(), default=0.0)
    return min(bound for bound, count in sums.items() if count >= share * total) if total else None


def scrapes_of(cause: str, processes: Processes) -> list[str]:
    done = processes.completed([sys.executable, "-c", PROGRAM, cause])
    assert done.returncode == 0, done.stderr
    return done.stdout.split("=====\n")
