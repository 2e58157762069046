"""Every alert is shown to fire, and not to fire before; alerts and dashboard name only metrics and labels that exist.

Here a small evaluator reads the rules. In `make soak` Prometheus itself does, over the same scrapes: `test_prometheus.py`.
"""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.deploy.alerts import CAUSES, MATCHER, ROOT, RULES, SELECTOR, Scrapes, holds, scrapes_of
from tests.support.processes import Processes
from tidegate import metrics

PANELS: list[dict[str, Any]] = json.loads((ROOT / "deploy/dashboard.json").read_text())["panels"]
DECLARED = {one.name: one for one in metrics.declared()}
EXPRESSIONS = [
    *(rule["expr"] for rule in RULES),
    *(target["expr"] for panel in PANELS for target in panel["targets"]),
]
OF_THE_STORE = {family.made._name for family in metrics.OF_STORE}
PARTS = ("_bucket", "_count", "_sum")

IDLE = "TidegateWorkersIdle"
LOOKS = 'm.work_lease_attempts.of("empty").inc({})'


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_an_alert_fires_for_its_cause_and_not_without(rule: dict[str, Any], processes: Processes) -> None:
    alert, expr = rule["alert"], rule["expr"]
    assert not holds(expr, Scrapes.of_cause(alert, scrapes_of("pass", processes)))
    scrapes = scrapes_of(CAUSES[alert], processes)
    assert holds(expr, Scrapes.of_cause(alert, scrapes))
    if "increase" in expr and expr.endswith("> 0"):
        once = Scrapes.of_cause(alert, scrapes[:2])
        assert holds(expr, once), "once is enough, in a process that never counted it before"


@pytest.mark.parametrize("looks", [5, 30_000], ids=["poll_ms 60000", "poll_ms 10"])
def test_workers_are_idle_by_their_number_however_often_they_look(looks: int, processes: Processes) -> None:
    [rule] = [rule for rule in RULES if rule["alert"] == IDLE]
    idle = scrapes_of(LOOKS.format(looks), processes)
    busy = scrapes_of(f'{LOOKS.format(looks)}; m.work_lease_attempts.of("leased").inc()', processes)
    assert not holds(rule["expr"], Scrapes(*([text] for text in idle))), (
        "one worker must look: there is none less to have"
    )
    assert not holds(rule["expr"], Scrapes(*zip(idle, busy, strict=True))), "the other worker had something to do"
    assert holds(rule["expr"], Scrapes(*zip(idle, idle, busy, strict=True)))


def test_workers_are_not_idle_while_anything_is_queued(processes: Processes) -> None:
    [rule] = [rule for rule in RULES if rule["alert"] == IDLE]
    queued = 'm.queue_jobs.of("queued", "llama", "team", "default", "l").set(1)'
    scrapes = scrapes_of(f"{CAUSES[IDLE]}; {queued}", processes)
    assert not holds(rule["expr"], Scrapes.of_cause(IDLE, scrapes))


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


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_a_line_of_the_dashboard_is_named_by_its_labels(panel: dict[str, Any]) -> None:
    for target in panel["targets"]:
        grouped = re.match(r"\w+ by \(([\w, ]+)\)", target["expr"])
        assert re.findall(r"{{(\w+)}}", target["legendFormat"]) == (grouped[1].split(", ") if grouped else [])
        assert target["legendFormat"]
