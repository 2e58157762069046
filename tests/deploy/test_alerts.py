"""Every alert is shown to fire, and not to fire before; alerts and dashboard name only metrics and labels that exist.

Prometheus itself is not at hand, so a small evaluator reads the few forms that the rules are written in, over real scrapes: one before the
cause, one after it, and one after it came again.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.support.processes import Processes
from tidegate import metrics

ROOT = Path(__file__).resolve().parents[2]
RULES: list[dict[str, Any]] = yaml.safe_load((ROOT / "deploy/alerts.yaml").read_text())["groups"][0]["rules"]
PANELS: list[dict[str, Any]] = json.loads((ROOT / "deploy/dashboard.json").read_text())["panels"]
DECLARED = {one.name: one for one in metrics.declared()}
EXPRESSIONS = [
    *(rule["expr"] for rule in RULES),
    *(target["expr"] for panel in PANELS for target in panel["targets"]),
]
OF_THE_STORE = {family.made._name for family in metrics.OF_STORE}
PARTS = ("_bucket", "_count", "_sum")
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
    "TidegateWorkersIdle": 'm.work_lease_attempts.of("empty").inc(1000)',
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


class Scrapes:
    """Scrapes in order; rates are over the time from the first to the last, which is taken as the rule's window."""

    def __init__(self, *texts: str) -> None:
        self._scrapes = [self._read(text) for text in texts]

    @staticmethod
    def _read(text: str) -> dict[str, Series]:
        found: dict[str, Series] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                found.setdefault(sample.name, []).append((dict(sample.labels), sample.value))
        return found

    def instant(self, selector: str) -> Series:
        return self._chosen(self._scrapes[-1], selector)

    def increase(self, selector: str) -> Series:
        """Since the first scrape that has the series: how it came to that value is not known to Prometheus."""
        first: dict[tuple[tuple[str, str], ...], float] = {}
        for scrape in self._scrapes:
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
    wanted, *unless = expr.split(" unless ")
    return _compares(wanted, scrapes) and not any(_compares(part, scrapes) for part in unless)


def _compares(expr: str, scrapes: Scrapes) -> bool:
    left, operator, right = expr.rsplit(" ", 2)
    value = _value(left, scrapes)
    return value is not None and (value > float(right) if operator == ">" else value < float(right))


def _value(expr: str, scrapes: Scrapes) -> float | None:
    if found := re.fullmatch(r"sum(?: by \(([\w, ]+)\) )?\(increase\((.*)\[10m\]\)\)", expr):
        sums: dict[tuple[str, ...], float] = {}
        for labels, value in scrapes.increase(found[2]):
            group = tuple(labels[name] for name in found[1].split(", ")) if found[1] else ()
            sums[group] = sums.get(group, 0.0) + value
        return max(sums.values(), default=None)
    if found := re.fullmatch(r"count\(count by \(([\w, ]+)\) \((.*)\)\)", expr):
        return len({tuple(labels[name] for name in found[1].split(", ")) for labels, _ in scrapes.instant(found[2])})
    if found := re.fullmatch(r"histogram_quantile\(([\d.]+), sum by \(le\) \(rate\((.*)\[10m\]\)\)\)", expr):
        return _quantile(float(found[1]), scrapes.increase(found[2]))
    found = re.fullmatch(r"(max|min|sum)(?: by \(\w+\) )?\((.*)\)", expr)
    assert found is not None, expr
    values = [value for _, value in scrapes.instant(found[2])]
    if not values:
        return None
    if found[1] == "sum":
        return sum(values)
    return max(values) if found[1] == "max" else min(values)


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


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_an_alert_fires_for_its_cause_and_not_without(rule: dict[str, Any], processes: Processes) -> None:
    assert not holds(rule["expr"], Scrapes(*scrapes_of("pass", processes)))
    scrapes = scrapes_of(CAUSES[rule["alert"]], processes)
    assert holds(rule["expr"], Scrapes(*scrapes))
    if "increase" in rule["expr"] and rule["expr"].endswith("> 0"):
        assert holds(rule["expr"], Scrapes(*scrapes[:2])), "once is enough, in a process that never counted it before"


def test_workers_are_not_idle_while_anything_is_queued(processes: Processes) -> None:
    [rule] = [rule for rule in RULES if rule["alert"] == "TidegateWorkersIdle"]
    queued = 'm.queue_jobs.of("queued", "llama", "team", "default", "l").set(1)'
    assert not holds(rule["expr"], Scrapes(*scrapes_of(f"{CAUSES[rule['alert']]}; {queued}", processes)))


def test_alerts_say_what_is_wrong_and_lead_to_a_runbook() -> None:
    assert [rule["alert"] for rule in RULES] == list(CAUSES)
    headings = re.findall(r"^## (.*)$", (ROOT / "docs/runbooks.md").read_text(), re.MULTILINE)
    anchors = {heading.lower().replace(" ", "-") for heading in headings}
    for rule in RULES:
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
        assert "{{" not in rule["annotations"]["summary"]
        assert rule["annotations"]["description"]
        assert rule["annotations"]["runbook_url"].partition("#")[2] in anchors
        assert int(rule["for"].rstrip("m")) >= 1


def test_an_alert_that_speaks_of_labels_keeps_them() -> None:
    for rule in RULES:
        spoken = re.search(r"[Tt]he labels? ([a-z_]+)(?: and ([a-z_]+))? say", rule["annotations"]["description"])
        kept = re.match(r"\w+ by \(([\w, ]+)\)", rule["expr"])
        named = {name for name in spoken.groups() if name} if spoken else set()
        assert named <= set(kept[1].split(", ") if kept else ()), rule["alert"]


@pytest.mark.parametrize("expr", EXPRESSIONS)
def test_an_expression_names_metrics_and_labels_that_exist(expr: str) -> None:
    for name, matchers in SELECTOR.findall(expr):
        base = name if name in DECLARED else next(name.removesuffix(part) for part in PARTS if name.endswith(part))
        assert base in DECLARED, name
        assert {label for label, _, _ in MATCHER.findall(matchers)} <= set(DECLARED[base].labels)
        grouped = {label for group in re.findall(r" by \(([\w, ]+)\)", expr) for label in group.split(", ")}
        assert grouped <= {*DECLARED[base].labels, "le", "instance"}


@pytest.mark.parametrize("expr", EXPRESSIONS)
def test_what_every_process_tells_of_the_whole_store_is_not_added_up(expr: str) -> None:
    for name, _ in SELECTOR.findall(expr):
        if name in OF_THE_STORE:
            assert re.search(rf"max(?: by \([\w, ]+\) )?\({name}\b", expr), expr
