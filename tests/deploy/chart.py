"""The Helm chart as helm renders it, for some values each, and the schemas that its manifests are held against.

A run of helm takes seconds where it is emulated (`make helm`), so what it renders for the cases below is kept in `rendered/`, along with a
hash of what it was rendered from. `python -m tests.deploy.chart` writes it again.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema_rs
import yaml

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "deploy/helm/tidegate"
RENDERED = Path(__file__).parent / "rendered"
SCHEMAS = Path(__file__).parent / "crds"

Values = dict[str, Any]
Manifest = dict[str, Any]

_MODELS = {"llama-3-8b": {"deployments": [{"url": "http://vllm:8000/v1", "engine": "vllm", "api_key": "env:VLLM_KEY"}]}}
PLAIN: Values = {"config": {"blobs": {"url": "s3://bucket/tidegate"}, "models": _MODELS}}
_PLACED = {
    "nodeSelector": {"pool": "cpu"},
    "tolerations": [{"key": "batch", "operator": "Exists", "effect": "NoSchedule"}],
    "affinity": {
        "podAntiAffinity": {
            "preferredDuringSchedulingIgnoredDuringExecution": [
                {"weight": 1, "podAffinityTerm": {"topologyKey": "kubernetes.io/hostname", "labelSelector": {}}}
            ]
        }
    },
    "topologySpreadConstraints": [
        {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway", "labelSelector": {}}
    ],
}
_MONITORING = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}
WHOLE: Values = {
    "image": {"repository": "registry.example.com/tidegate", "tag": "abc", "pullSecrets": [{"name": "registry"}]},
    "config": {
        "blobs": {"url": "s3://bucket/tidegate", "region": "eu-central-1"},
        "upstream": {"url": "http://gateway:8000/v1", "api_key": "file:/etc/tidegate-keys/upstream"},
        "server": {"bodies_bytes_max": 134217728, "trusted_proxies": ["10.0.0.0/8"]},
        "worker": {"grace_ms": 45500},
        "redis": {"url": "env:REDIS_URL"},
    },
    "secrets": {"env": ["tidegate", "redis"], "files": [{"name": "keys", "mountPath": "/etc/tidegate-keys"}]},
    "ports": {"api": 8000, "metrics": 9100},
    "serviceAccount": {"annotations": {"cloud.example.com/role": "bucket"}},
    "api": {**_PLACED, "drainSeconds": 15, "hpa": {"enabled": True}},
    "worker": {**_PLACED, "persistence": {"enabled": False}, "hpa": {"enabled": True}},
    "service": {"annotations": {"a": "b"}},
    "ingress": {
        "enabled": True,
        "className": "nginx",
        "host": "batch.example.com",
        "tlsSecret": "tls",
        "annotations": {"nginx.ingress.kubernetes.io/proxy-body-size": "0"},
    },
    "httpRoute": {"enabled": True, "parentRefs": [{"name": "gateway"}], "hostnames": ["batch.example.com"]},
    "networkPolicy": {
        "enabled": True,
        "apiFrom": [{"podSelector": {"matchLabels": {"app": "gateway"}}}],
        "metricsFrom": [_MONITORING],
        "egress": [{"to": [{"ipBlock": {"cidr": "10.0.0.0/8"}}]}],
    },
    "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
    "prometheusRule": {"enabled": True, "labels": {"release": "prometheus"}},
    "dashboard": {"enabled": True},
}
KEDA: Values = {
    **PLAIN,
    "admin": {"enabled": True},
    "worker": {
        "persistence": {"storageClassName": "fast"},
        "podDisruptionBudget": {"enabled": False},
        "keda": {"enabled": True, "tokenSecret": {"name": "tidegate-keda", "key": "token"}},
    },
    "networkPolicy": {
        "enabled": True,
        "adminFrom": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "keda"}}}],
    },
}
CASES = {"plain": PLAIN, "whole": WHOLE, "keda": KEDA}


def render(values: Values) -> subprocess.CompletedProcess[str]:
    return _helm("prod", CHART, "--namespace", "batch", "--values", "-", values=values)


def render_each(every: list[Values], directory: Path) -> list[list[Manifest]]:
    """Render the chart for each of these values in one run of helm: as that many parts of one chart around it."""
    shutil.copytree(CHART, directory / "charts/tidegate")
    names = [f"case-{number}" for number in range(len(every))]
    parts = [{"name": "tidegate", "version": "*", "alias": name} for name in names]
    around = {"apiVersion": "v2", "name": "every", "version": "1.0.0", "dependencies": parts}
    (directory / "Chart.yaml").write_text(yaml.safe_dump(around))
    done = _helm(
        "prod", directory, "--namespace", "batch", "--values", "-", values=dict(zip(names, every, strict=True))
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, list[Manifest]] = {name: [] for name in names}
    for text in done.stdout.split("\n---\n"):
        if (source := re.search(r"^# Source: every/charts/([\w-]+)/", text, re.MULTILINE)) and (one := load(text)):
            found[source[1]].append(one)
    return list(found.values())


def load(text: str) -> Manifest | None:
    manifest: Manifest | None = yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return manifest


def _helm(*arguments: str | Path, values: Values) -> subprocess.CompletedProcess[str]:
    helm = shutil.which("helm", path=os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")]))
    assert helm is not None, "helm is not here: run `make helm`"
    command = [helm, "template", *map(str, arguments)]
    return subprocess.run(command, input=yaml.safe_dump(values), capture_output=True, text=True, check=False)


@cache
def custom_schemas() -> dict[tuple[str, str], jsonschema_rs.Validator]:
    """What the kinds that Kubernetes itself does not know must be, by version and kind; no field that they do not name is allowed."""
    found = {}
    for path in SCHEMAS.glob("*.yaml"):
        kind = (load(path.read_text()) or {})["spec"]
        for version in kind["versions"]:
            schema = _closed(version["schema"]["openAPIV3Schema"])
            found[f"{kind['group']}/{version['name']}", kind["names"]["kind"]] = jsonschema_rs.validator_for(schema)
    return found


def _closed(schema: Any) -> Any:
    """A schema that refuses fields it does not name. A number or a text has its own key there instead of two types."""
    if isinstance(schema, list):
        return [_closed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: _closed(value) for key, value in schema.items()}
    is_open = closed.get("x-kubernetes-preserve-unknown-fields") or "additionalProperties" in closed
    if closed.get("type") == "object" and "properties" in closed and not is_open:
        closed["additionalProperties"] = False
    return closed


def source_hash(values: Values) -> str:
    """What a rendering follows from: the values, and every file of the chart with its name."""
    digest = hashlib.sha256(yaml.safe_dump(values).encode())
    for path in sorted(one for one in CHART.rglob("*") if one.is_file()):
        digest.update(path.relative_to(CHART).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def kept(case: str) -> tuple[str, str]:
    """The hash and the text of a rendering that is kept."""
    first, _, text = (RENDERED / f"{case}.yaml").read_text(encoding="utf-8").partition("\n")
    return first.removeprefix("# rendered from "), text


def main() -> None:
    RENDERED.mkdir(exist_ok=True)
    for case, values in CASES.items():
        done = render(values)
        if done.returncode:
            sys.exit(done.stderr)
        path = RENDERED / f"{case}.yaml"
        path.write_text(f"# rendered from {source_hash(values)}\n{done.stdout}", encoding="utf-8")


if __name__ == "__main__":
    main()
