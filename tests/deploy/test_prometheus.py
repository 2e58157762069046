"""Prometheus itself reads the alerts, the dashboard and what autoscalers ask, over scrapes of a service that runs.

The scrapes of each alert's cause go through promtool, which must find what the evaluator of `make test` finds.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import pytest
import yaml

from tests.deploy.alerts import CAUSES, ROOT, RULES, SELECTOR, Scrapes, holds, scrapes_of
from tests.deploy.chart import Manifest, kept, load
from tests.support.engine import Engine
from tests.support.processes import Processes, free_port, wait_until
from tests.support.prometheus import PrometheusServer, program
from tests.support.tidegate import Site, requests

pytestmark = pytest.mark.soak

# Minutes at which the causes are seen, and for how many minutes the last value stays.
FIRST, AGAIN, LAST = 6, 8, 30
READ = {name for rule in RULES for name, _ in SELECTOR.findall(rule["expr"])}
PANELS: list[dict[str, Any]] = json.loads((ROOT / "deploy/dashboard.json").read_text())["panels"]
DASHBOARD = [target for panel in PANELS for target in panel["targets"]]
WORKERS = ("worker-0", "worker-1")
ANSWER_S = 60


def promtool(*arguments: str | Path) -> None:
    done = subprocess.run([program("promtool"), *map(str, arguments)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


def rendered(case: str, kind: str) -> list[Manifest]:
    every = [load(text) for text in kept(case)[1].split("\n---\n")]
    return [one for one in every if one and one["kind"] == kind]


def test_promtool_takes_the_rules_of_the_repository_and_of_the_chart(tmp_path: Path) -> None:
    [rule] = rendered("whole", "PrometheusRule")
    (tmp_path / "chart.yaml").write_text(yaml.safe_dump(rule["spec"]))
    promtool("check", "rules", "--lint=all", "--lint-fatal", ROOT / "deploy/alerts.yaml", tmp_path / "chart.yaml")


# ---- what the evaluator of `make test` finds, promtool finds


def test_prometheus_fires_each_alert_for_its_cause_and_not_without(processes: Processes, tmp_path: Path) -> None:
    quiet = scrapes_of("pass", processes)
    tests = [_unit_test("none", Scrapes(*([text] for text in quiet)), [(LAST, "", [])])]
    for rule in RULES:
        alert, waits = rule["alert"], int(rule["for"].rstrip("m"))
        texts = scrapes_of(CAUSES[alert], processes)
        scrapes = Scrapes.of_cause(alert, texts)
        held = [one["alert"] for one in RULES if holds(one["expr"], scrapes)]
        assert alert in held
        fires = [(AGAIN + waits + 1, f'alertname="{alert}",alertstate="firing"', [alert])]
        tests.append(_unit_test(alert, scrapes, [(FIRST - 1, "", []), (AGAIN + 1, "", held), *fires]))
        if "increase" in rule["expr"] and rule["expr"].endswith("> 0"):
            once = Scrapes.of_cause(alert, [texts[0], texts[1], texts[1]])
            tests.append(_unit_test(f"{alert} once", once, [(FIRST + waits + 1, 'alertstate="firing"', [alert])]))
    written = {"rule_files": [str(ROOT / "deploy/alerts.yaml")], "evaluation_interval": "1m", "tests": tests}
    (tmp_path / "tests.yaml").write_text(yaml.safe_dump(written))
    promtool("test", "rules", tmp_path / "tests.yaml")


def _unit_test(name: str, scrapes: Scrapes, wanted: list[tuple[int, str, list[str]]]) -> dict[str, Any]:
    """A test as promtool takes it: which alerts there are at which minute, of those that the labels choose."""
    return {
        "name": name,
        "interval": "1m",
        "input_series": [{"series": one, "values": values} for one, values in _history(scrapes)],
        "promql_expr_test": [
            {
                "expr": f"group by (alertname) (ALERTS{{{labels}}})",
                "eval_time": f"{minute}m",
                "exp_samples": [{"labels": f'{{alertname="{alert}"}}', "value": 1} for alert in alerts],
            }
            for minute, labels, alerts in wanted
        ],
    }


def _history(scrapes: Scrapes) -> Iterator[tuple[str, str]]:
    """Each series that a rule reads with its value at every minute; `_` where it was not there."""
    moments = [
        {
            f"{name}{{{','.join(f'{label}={json.dumps(value)}' for label, value in labels.items())}}}": str(value)
            for name in READ
            for labels, value in moment.get(name, [])
        }
        for moment in scrapes.moments
    ]
    for one in sorted({name for moment in moments for name in moment}):
        first, second, last = (moment.get(one, "_") for moment in moments)
        yield one, " ".join([first] * FIRST + [second] * (AGAIN - FIRST) + [last] * (LAST - AGAIN + 1))


# ---- a service under load


@pytest.fixture
def site(cluster_env: dict[str, str], processes: Processes, tmp_path: Path) -> Site:
    """An installation for a cluster whose model server takes its time."""
    engine = Engine(processes, tmp_path / "engine", latency_ms=200)
    places = {"m": "gpu", "drained": "spare"}
    models = {model: {"deployments": [{"name": name, "url": engine.url}]} for model, name in places.items()}
    made = Site("cluster", processes, tmp_path, engine, cluster_env)
    made.configure(models=models)
    return made


def test_prometheus_answers_the_dashboard_the_alerts_and_the_autoscalers(
    site: Site, processes: Processes, tmp_path: Path
) -> None:
    ports = {pod: free_port() for pod in ("api-0", *WORKERS)}
    listens = {pod: {"TIDEGATE_METRICS_PORT": str(port)} for pod, port in ports.items()}
    site.api(more=listens["api-0"])
    for pod in WORKERS:
        site.worker(more=listens[pod], data=tmp_path / pod)
    prometheus = PrometheusServer(processes, tmp_path / "prometheus")
    targets = {f"127.0.0.1:{port}": {"namespace": "batch", "pod": pod} for pod, port in ports.items()}
    prometheus.start(targets, [ROOT / "deploy/alerts.yaml"])

    operator, site = site.keyed("ops", scopes=["admin:write"]), site.keyed()
    assert operator.client().post("/admin/v1/deployments/spare/drain").status_code == 200
    drained = 'tidegate_deployment_state{deployment="spare",state="drained"} == 1'
    wait_until(lambda: len(prometheus.query(drained)) == len(targets), ANSWER_S, "every process to know", poll_s=1)
    ended = site.submit(requests(40))
    site.ended(ended)
    calls = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    assert site.client().post("/v1/chat/completions", json=calls).status_code == 200
    # Nothing of this one begins.
    site.submit(requests(10, model="drained"))
    # More than both workers get done while Prometheus is asked.
    open_batch = site.submit(requests(4_000))
    site.until_done(open_batch, 20)

    for target in DASHBOARD:
        _check_panel(prometheus, target)
    _check_alerts(prometheus)
    _check_scaling(prometheus)
    _check_keda(operator)
    assert site.batch(open_batch)["status"] == "in_progress", "the questions were asked under load"
    assert prometheus.query('max by (status) (tidegate_jobs{status="completed"})') == [({"status": "completed"}, 1)]


def _check_panel(prometheus: PrometheusServer, target: dict[str, Any]) -> None:
    """Something is drawn, and each line of it has the labels that its legend names and no others."""
    expr = target["expr"]
    found = wait_until(lambda: prometheus.query(expr), ANSWER_S, f"an answer to {expr}", poll_s=1)
    legend = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
    assert all(set(labels) == legend for labels, _ in found), (expr, found)


def _check_alerts(prometheus: PrometheusServer) -> None:
    """Every rule is read and evaluated, and a healthy service has none that is about to fire."""

    def evaluated() -> list[dict[str, Any]] | None:
        rules = prometheus.rules()
        return rules if all(rule["health"] != "unknown" for rule in rules) else None

    rules = wait_until(evaluated, ANSWER_S, "every rule to be evaluated", poll_s=1)
    assert [rule["name"] for rule in rules] == list(CAUSES)
    assert {rule["health"] for rule in rules} == {"ok"}, rules
    assert {rule["name"] for rule in rules if rule["state"] != "inactive"} == set()


def _check_scaling(prometheus: PrometheusServer) -> None:
    """What the chart's HPA asks, as the adapter's rules on the page put it to Prometheus, has an answer."""
    page = (ROOT / "docs/kubernetes.md").read_text()
    block = re.search(r"```text\n(  rules:\n.*?)```", page, re.DOTALL)
    assert block is not None
    adapter = yaml.safe_load(block[1])["rules"]
    [asked] = [
        one for one in rendered("whole", "HorizontalPodAutoscaler") if one["metadata"]["name"].endswith("worker")
    ]
    for one in asked["spec"]["metrics"]:
        metric = one[one["type"].lower()]["metric"]
        [rule] = [
            rule
            for rule in adapter["custom" if one["type"] == "Pods" else "external"]
            if rule["seriesQuery"].startswith(f"{metric['name']}{{")
        ]
        assert prometheus.series(rule["seriesQuery"])
        matched = {"namespace": "batch", **metric.get("selector", {}).get("matchLabels", {})}
        expr = rule["metricsQuery"]
        for name, value in {
            "Series": metric["name"],
            "LabelMatchers": ",".join(f'{label}="{wanted}"' for label, wanted in matched.items()),
            "GroupBy": "pod",
        }.items():
            expr = expr.replace(f"<<.{name}>>", value)
        wanted_pods: set[str | None] = set(WORKERS) if one["type"] == "Pods" else {None}
        wait_until(partial(_tells, prometheus, expr, wanted_pods), ANSWER_S, f"an answer to {expr}", poll_s=1)


def _tells(prometheus: PrometheusServer, expr: str, pods: set[str | None]) -> bool:
    """Whether there is a figure above 0 for each of these pods; None stands for one of all pods together."""
    found = {labels.get("pod"): value for labels, value in prometheus.query(expr)}
    return pods <= {pod for pod, value in found.items() if value > 0}


def _check_keda(site: Site) -> None:
    """The address that KEDA asks gives a number where KEDA looks for it."""
    [scaled] = rendered("keda", "ScaledObject")
    [trigger] = scaled["spec"]["triggers"]
    path = httpx2.URL(trigger["metadata"]["url"]).path
    needed = site.get(path)[trigger["metadata"]["valueLocation"]]
    assert needed >= 1
