"""The chart's manifests are valid, hang together, and start processes with settings that exist; image and compose file likewise."""

from __future__ import annotations

import itertools
import json
import re
import tomllib
from pathlib import Path
from typing import Any

import jsonschema_rs
import kubernetes_validate
import pytest
import yaml
from typer.main import get_command

from tests.deploy import chart
from tests.deploy.chart import Manifest
from tests.docs.pages import blocks, page
from tidegate import metrics, settings
from tidegate.cli.app import app
from tidegate.web.openapi.operations import OPERATIONS

NEWEST = kubernetes_validate.latest_version()
every_case = pytest.mark.parametrize("case", chart.CASES)


class Manifests:
    """What was rendered, by kind and name."""

    def __init__(self, text: str) -> None:
        self.all: list[Manifest] = [one for one in yaml.safe_load_all(text) if one]

    @classmethod
    def kept(cls, case: str) -> Manifests:
        return cls(chart.kept(case)[1])

    def of(self, kind: str) -> list[Manifest]:
        return [one for one in self.all if one["kind"] == kind]

    def one(self, kind: str, name: str) -> Manifest:
        return next(one for one in self.of(kind) if one["metadata"]["name"] == name)

    def pods(self) -> dict[str, Manifest]:
        """Templates of pods by role."""
        found = [one["spec"]["template"] for one in (*self.of("Deployment"), *self.of("StatefulSet"))]
        return {one["spec"]["containers"][0]["name"]: one for one in found}

    def selected(self, labels: dict[str, str]) -> list[Manifest]:
        return [one for one in self.pods().values() if labels.items() <= one["metadata"]["labels"].items()]

    def settings(self, folder: Path) -> settings.Loaded:
        """What a process reads, with every variable set that the file names."""
        text = self.one("ConfigMap", "prod-tidegate")["data"]["tidegate.yaml"]
        (folder / "tidegate.yaml").write_text(text)
        given = {name: f"secret-{name}" for name in re.findall(r"env:(\w+)", text)}
        given |= {"DATABASE_URL": "postgresql://u:p@db:5432/tidegate"}
        given |= {"REDIS_URL": "redis://redis:6379/0"} if "REDIS_URL" in given else {}
        (folder / "key").write_text("key")
        (folder / "tidegate.yaml").write_text(text.replace("/etc/tidegate-keys/upstream", str(folder / "key")))
        return settings.load(folder / "tidegate.yaml", environ=given)


def ports(pod: Manifest) -> dict[str, int]:
    return {one["name"]: one["containerPort"] for one in pod["spec"]["containers"][0]["ports"]}


def check(manifest: Manifest) -> None:
    """Hold a manifest against the schema of its kind."""
    custom = chart.custom_schemas().get((manifest["apiVersion"], manifest["kind"]))
    if custom is not None:
        custom.validate(manifest)
    else:
        kubernetes_validate.validate(manifest, NEWEST, strict=True)


def check_names(manifests: list[Manifest]) -> None:
    names = [(one["kind"], one["metadata"]["name"]) for one in manifests]
    assert len(set(names)) == len(names)
    assert all(len(name) <= 63 for _, name in names)


@every_case
def test_what_is_kept_is_what_the_chart_gives(case: str) -> None:
    came_from, text = chart.kept(case)
    assert came_from == chart.source_hash(chart.CASES[case]), "the chart changed: run `python -m tests.deploy.chart`"
    assert chart.render(chart.CASES[case]).stdout == text


@every_case
def test_manifests_are_valid(case: str) -> None:
    manifests = Manifests.kept(case)
    check_names(manifests.all)
    for one in manifests.all:
        check(one)


@pytest.mark.parametrize(
    ("case", "kind", "path"),
    [
        ("plain", "Deployment", "spec.template.spec"),
        ("whole", "HTTPRoute", "spec.rules.0.backendRefs.0"),
        ("whole", "PrometheusRule", "spec.groups.0.rules.0"),
        ("whole", "ServiceMonitor", "spec.endpoints.0"),
        ("keda", "ScaledObject", "spec.triggers.0"),
        ("keda", "TriggerAuthentication", "spec.secretTargetRef.0"),
    ],
)
def test_a_field_that_a_kind_does_not_have_is_refused(case: str, kind: str, path: str) -> None:
    manifest = Manifests.kept(case).of(kind)[0]
    at: Any = manifest
    for part in path.split("."):
        at = at[int(part)] if part.isdigit() else at[part]
    at["misspelt"] = "x"
    with pytest.raises((kubernetes_validate.ValidationError, jsonschema_rs.ValidationError)):
        check(manifest)


@pytest.mark.timeout(600)
def test_options_are_valid_together(tmp_path: Path) -> None:
    """Any two options meet with each of their values. Where helm is emulated, each set of values takes a second of it."""
    whole = chart.WHOLE
    routes = {key: whole[key] for key in ("ingress", "httpRoute")}
    watched = {key: whole[key] for key in ("networkPolicy", "serviceMonitor", "prometheusRule", "dashboard")}
    keda = {"keda": chart.KEDA["worker"]["keda"]}
    options: tuple[tuple[Any, ...], ...] = (
        ({}, routes), ({}, watched), (True, False), ({}, {"hpa": {"enabled": True}}, keda),
    )  # fmt: skip
    chosen = ((0, 0, 0, 0), (1, 1, 1, 0), (0, 1, 1, 1), (1, 0, 0, 1), (1, 0, 1, 2), (0, 1, 0, 2))
    for left, right in itertools.combinations(range(len(options)), 2):
        met = {(row[left], row[right]) for row in chosen}
        assert met == set(itertools.product(range(len(options[left])), range(len(options[right]))))
    every = []
    for row in chosen:
        routed, policy, disk, scaled = (values[number] for values, number in zip(options, row, strict=True))
        worker = {**scaled, "persistence": {"enabled": disk}}
        every.append({**chart.PLAIN, **routed, **policy, "admin": {"enabled": scaled is keda}, "worker": worker})
    # Most of them share most of their manifests.
    distinct: dict[str, Manifest] = {}
    for manifests in chart.render_each(every, tmp_path):
        check_names(manifests)
        distinct |= {json.dumps(one, sort_keys=True): one for one in manifests}
    for one in distinct.values():
        check(one)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({}, ["config.blobs.url"]),
        ({"config": {"blobs": {"url": "file:///data"}}}, ["config.blobs.url", "pods share no disk"]),
        ({"config": {**chart.PLAIN["config"], "store": {"url": "sqlite:///data/t.db"}}}, ["config.store.url"]),
        ({**chart.PLAIN, "ports": {"api": 9090}}, ["must differ"]),
        ({**chart.KEDA, "admin": {"enabled": False}}, ["admin.enabled"]),
        ({**chart.KEDA, "worker": {**chart.KEDA["worker"], "hpa": {"enabled": True}}}, ["enable one"]),
        ({**chart.PLAIN, "ingress": {"enabled": True}}, ["ingress.host"]),
        # What the schema refuses is named all at once.
        (
            {
                "config": {**chart.PLAIN["config"], "worker": {"grace_ms": "30s"}},
                "image": {"digest": "latest"},
                "api": {"replica": 3, "hpa": None},
                "ports": {"metrics": 0},
                "worker": None,
            },
            [
                "config.worker.grace_ms",
                "image.digest",
                "replica is not allowed",
                "hpa is required",
                "ports.metrics",
                "worker is required",
            ],
        ),
    ],
)
def test_values_that_cannot_work_are_refused(values: chart.Values, named: list[str]) -> None:
    done = chart.render(values)
    assert done.returncode != 0
    assert [one for one in named if one not in done.stderr] == []
    assert "nil pointer" not in done.stderr


def test_an_image_is_named_by_its_digest() -> None:
    digest = "sha256:" + 64 * "0"
    manifests = Manifests(chart.render({**chart.PLAIN, "image": {"repository": "r/t", "digest": digest}}).stdout)
    assert {pod["spec"]["containers"][0]["image"] for pod in manifests.pods().values()} == {f"r/t@{digest}"}


@every_case
def test_processes_start_with_settings_that_exist(case: str, tmp_path: Path) -> None:
    manifests = Manifests.kept(case)
    loaded = manifests.settings(tmp_path)
    assert loaded.warnings == ()
    now = loaded.settings
    assert now.store.is_postgresql
    assert now.blobs.is_object_store
    commands = get_command(app).commands  # type: ignore[attr-defined]
    for role, pod in manifests.pods().items():
        container = pod["spec"]["containers"][0]
        assert container["args"] == [role, "--config", "/etc/tidegate/tidegate.yaml"]
        assert {f"--{one.name}" for one in commands[role].params} >= {"--config"}
        mounts = {one["mountPath"]: one["name"] for one in container["volumeMounts"]}
        assert {"/etc/tidegate", "/tmp", str(now.data_dir)} <= mounts.keys()
        named = ports(pod)
        assert named["metrics"] == now.metrics.port
        assert named.get("api") == (now.server.port if role == "api" else None)
        assert named.get("admin") == (now.admin.port or None if role == "api" else None)
        assert {container[f"{kind}Probe"]["httpGet"]["port"] for kind in ("startup", "liveness", "readiness")} == {
            "metrics"
        }
        assert container["livenessProbe"]["httpGet"]["path"] == "/healthz"
        assert container["readinessProbe"]["httpGet"]["path"] == "/readyz"


def test_what_the_page_has_people_type_fits_the_chart(tmp_path: Path) -> None:
    text = page("docs/kubernetes.md")
    shown = [block.text for block in blocks(text)]
    [values] = [yaml.safe_load(one) for one in shown if one.startswith("image:")]
    [job] = [yaml.safe_load(one) for one in shown if one.startswith("apiVersion:")]
    defaults = yaml.safe_load((chart.CHART / "values.yaml").read_text())
    assert values.keys() <= defaults.keys()
    config = yaml.safe_dump({**defaults["config"], **values["config"]})
    secret = set(re.findall(r"--from-literal=(\w+)=", text))
    assert set(re.findall(r"env:(\w+)", config)) == secret
    (tmp_path / "tidegate.yaml").write_text(config)
    environment = dict.fromkeys(secret, "s" * 40) | {"DATABASE_URL": "postgresql://u:p@db:5432/tidegate"}
    assert settings.load(tmp_path / "tidegate.yaml", environ=environment).warnings == ()
    # The page's release is named like the chart, so its manifests are without the name of the release before it.
    manifests = Manifests.kept("plain")
    for kind, name in re.findall(r"(deployment|service)/([\w-]+)", "".join(shown)):
        assert manifests.one(kind.capitalize(), f"prod-{name}")
    check(job)
    ours, theirs = job["spec"]["template"]["spec"], manifests.pods()["worker"]["spec"]
    container = ours["containers"][0]
    assert container["args"] == ["migrate", *theirs["containers"][0]["args"][1:]]
    assert container["envFrom"] == theirs["containers"][0]["envFrom"]
    assert container["volumeMounts"][0] in theirs["containers"][0]["volumeMounts"]
    assert f"prod-{ours['volumes'][0]['configMap']['name']}" == theirs["volumes"][0]["configMap"]["name"]


@every_case
def test_a_pod_has_the_grace_and_ten_seconds_to_stop(case: str, tmp_path: Path) -> None:
    manifests = Manifests.kept(case)
    grace_s = manifests.settings(tmp_path).settings.worker.grace_ms / 1000
    for role, pod in manifests.pods().items():
        before = pod["spec"]["containers"][0].get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command")
        assert (before is None) == (role == "worker")
        spare_s = pod["spec"]["terminationGracePeriodSeconds"] - int(before[1] if before else 0) - grace_s
        assert 10 <= spare_s < 11


@every_case
def test_pods_are_confined(case: str) -> None:
    manifests = Manifests.kept(case)
    for pod in manifests.pods().values():
        spec, container = pod["spec"], pod["spec"]["containers"][0]
        assert spec["securityContext"]["runAsUser"] == 65532
        assert spec["securityContext"]["runAsNonRoot"]
        assert spec["automountServiceAccountToken"] is False
        assert spec["enableServiceLinks"] is False
        assert container["securityContext"]["readOnlyRootFilesystem"]
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert "env" not in container
    assert manifests.of("Secret") == []


@every_case
def test_what_refers_to_another_finds_it(case: str) -> None:
    manifests = Manifests.kept(case)
    for one in manifests.of("Service"):
        [pod] = manifests.selected(one["spec"]["selector"])
        assert {port["targetPort"] for port in one["spec"]["ports"]} <= ports(pod).keys()
    for one in (*manifests.of("PodDisruptionBudget"), *manifests.of("NetworkPolicy")):
        selector = one["spec"].get("selector") or one["spec"]["podSelector"]
        [pod] = manifests.selected(selector["matchLabels"])
        allowed = {port["port"] for rule in one["spec"].get("ingress", ()) for port in rule["ports"]}
        assert allowed <= ports(pod).keys()
    for one in (*manifests.of("HorizontalPodAutoscaler"), *manifests.of("ScaledObject")):
        target = one["spec"]["scaleTargetRef"]
        assert "replicas" not in manifests.one(target["kind"], target["name"])["spec"]
    for one in manifests.of("StatefulSet"):
        assert manifests.one("Service", one["spec"]["serviceName"])["spec"]["clusterIP"] == "None"
        claims = {claim["metadata"]["name"] for claim in one["spec"].get("volumeClaimTemplates", ())}
        spec = one["spec"]["template"]["spec"]
        volumes = [volume["name"] for volume in spec["volumes"]] + sorted(claims)
        assert sorted(volumes) == sorted(mount["name"] for mount in spec["containers"][0]["volumeMounts"])
    for one in manifests.of("ServiceMonitor"):
        chosen = one["spec"]["selector"]["matchLabels"].items()
        found = [each for each in manifests.of("Service") if chosen <= each["metadata"]["labels"].items()]
        assert [each["metadata"]["name"] for each in found] == [
            "prod-tidegate-api-metrics",
            "prod-tidegate-worker-metrics",
        ]


def test_routes_lead_to_the_api() -> None:
    manifests = Manifests.kept("whole")
    [rule] = manifests.one("Ingress", "prod-tidegate")["spec"]["rules"]
    backend = rule["http"]["paths"][0]["backend"]["service"]
    [route] = manifests.one("HTTPRoute", "prod-tidegate")["spec"]["rules"]
    [served] = manifests.one("Service", backend["name"])["spec"]["ports"]
    assert (backend["name"], backend["port"]["name"]) == ("prod-tidegate-api", served["name"])
    assert route["backendRefs"] == [{"name": "prod-tidegate-api", "port": served["port"]}]
    assert route["timeouts"] == {"request": "0s"}, "streams and uploads may take long"


def test_alerts_and_dashboard_are_those_of_the_repository() -> None:
    manifests = Manifests.kept("whole")
    rules = yaml.safe_load((chart.ROOT / "deploy/alerts.yaml").read_text())
    assert manifests.one("PrometheusRule", "prod-tidegate")["spec"] == rules
    shown = manifests.one("ConfigMap", "prod-tidegate-dashboard")["data"]["tidegate.json"]
    assert json.loads(shown) == json.loads((chart.ROOT / "deploy/dashboard.json").read_text())


def test_scaling_asks_for_what_is_there() -> None:
    declared = {one.name: one for one in metrics.declared()}
    [_, scaler] = Manifests.kept("whole").of("HorizontalPodAutoscaler")
    for one in scaler["spec"]["metrics"]:
        asked = one[one["type"].lower()]["metric"]
        labels = asked.get("selector", {}).get("matchLabels", {})
        assert set(labels) <= set(declared[asked["name"]].labels)
    manifests = Manifests.kept("keda")
    [scaled] = manifests.of("ScaledObject")
    url = scaled["spec"]["triggers"][0]["metadata"]["url"]
    found = re.fullmatch(r"http://([\w-]+)\.batch\.svc:(\d+)(/.+)", url)
    assert found is not None
    [served] = manifests.one("Service", found[1])["spec"]["ports"]
    assert served["port"] == int(found[2])
    gives = OPERATIONS["GET", found[3]].gives
    assert scaled["spec"]["triggers"][0]["metadata"]["valueLocation"] in gives.__struct_fields__


def test_the_image_is_made_of_what_is_here_and_runs_without_root() -> None:
    steps = (chart.ROOT / "deploy/Dockerfile").read_text().splitlines()
    copied = [one.split()[1:-1] for one in steps if one.startswith("COPY") and "--from" not in one]
    assert all((chart.ROOT / name).exists() for names in copied for name in names)
    assert [one for one in steps if one.startswith("FROM")] == ["FROM ${BASE} AS build", "FROM ${BASE}"]
    assert steps.index("USER 65532:65532") > steps.index("FROM ${BASE}")
    assert 'ENTRYPOINT ["tidegate"]' in steps
    project = tomllib.loads((chart.ROOT / "pyproject.toml").read_text())["project"]
    assert "tidegate" in project["scripts"]
    versions = yaml.safe_load((chart.CHART / "Chart.yaml").read_text())
    assert versions["version"] == versions["appVersion"] == project["version"]


def test_the_compose_file_starts_what_exists() -> None:
    text = (chart.ROOT / "deploy/compose.yaml").read_text()
    services = yaml.safe_load(re.sub(r"\$\{(\w+):[-?]([^}]*)\}", r"\2", text))["services"]
    for one in services.values():
        command = get_command(app).commands[one["command"][0]]  # type: ignore[attr-defined]
        known = {option for parameter in command.params for option in parameter.opts}
        assert {word for word in one["command"] if word.startswith("--")} <= known
        assert one["read_only"]
    loaded = settings.load(environ=services["gateway"]["environment"])
    assert loaded.warnings == ()
    ports = (loaded.settings.server.port, loaded.settings.admin.port)
    assert services["gateway"]["ports"] == [f"127.0.0.1:{port}:{port}" for port in ports]
    assert int(services["gateway"]["stop_grace_period"].removesuffix("s")) * 1000 >= (
        loaded.settings.worker.grace_ms + 10_000
    )
