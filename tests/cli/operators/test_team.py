"""A team's operator over PostgreSQL: why a batch waits, from what workers and deployments report, on this machine and from another."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.engine import Engine
from tests.support.processes import Proc, Processes, wait_until
from tests.support.tidegate import TIDEGATE, Site, requests

NOWHERE = "http://127.0.0.1:9/v1"
CONFIG: dict[str, Any] = {
    "tenants": {"small": {"limits": [{"period": "month", "requests": 3}]}},
    "worker": {"grace_ms": 2_000},
}


class Office:
    """One API process, workers, an operator's key and a tenant's, and commands that know nothing but the address."""

    def __init__(self, site: Site, directory: Path, config: dict[str, Any]) -> None:
        self.site = site
        self.elsewhere = directory / "elsewhere"
        self.elsewhere.mkdir()
        site.configure(**config)
        self.operator = self.key("ops", "--scopes", "admin:read,admin:write")
        self.site.api()

    def key(self, org: str, *more: str) -> str:
        made = self.here("keys", "create", "--org", org, *more, "--json")
        return str(json.loads(made.stdout())["key"])

    def here(self, *arguments: str, code: int = 0) -> Proc:
        # No command needs the key of a provider.
        env = {name: value for name, value in self.site.environment().items() if name != "PROVIDER_KEY"}
        proc = self.site.processes.start(self.site.command(*arguments), name=arguments[0], env=env)
        assert proc.wait(60) == code, proc.logs()
        return proc

    def away(self, key: str, *arguments: str, code: int = 0) -> str:
        """Run a command that has the address and a key, and nothing else; return what it printed."""
        env = {"PATH": "", "HOME": str(self.elsewhere), "TIDEGATE_REMOTE_KEY": key}
        command = [TIDEGATE, *arguments, "--server", self.site.url]
        proc = self.site.processes.start(command, name="away", env=env, cwd=self.elsewhere)
        assert proc.wait(60) == code, proc.logs()
        return proc.stdout() + proc.stderr()

    def submit(self, key: str, model: str, count: int = 8) -> str:
        return self.site.as_caller(key).submit(requests(count, model=model))

    def until_explained(self, key: str, batch: str, text: str) -> str:
        def explained() -> str | None:
            found = self.away(key, "explain", batch)
            return found if text in found else None

        return wait_until(explained, 60, f"{text!r} in the explanation of {batch}", poll_s=0.5)


@pytest.fixture
def office(cluster_env: dict[str, str], processes: Processes, tmp_path: Path) -> Office:
    engine = Engine(processes, tmp_path / "engine")
    site = Site("cluster", processes, tmp_path, engine, {**cluster_env, "PROVIDER_KEY": "sk-wrong"})
    places = {
        "m": {"deployments": [{"url": engine.url, "name": "gpu-1"}]},
        "two": {"deployments": [{"url": NOWHERE, "name": "gpu-0"}, {"url": engine.url, "name": "gpu-3", "order": 2}]},
        "away": {"deployments": [{"url": NOWHERE, "name": "gpu-2"}]},
        "cloud": {"deployments": [{"url": engine.url, "name": "provider", "api_key": "env:PROVIDER_KEY"}]},
    }
    return Office(site, tmp_path, CONFIG | {"models": places})


def test_why_a_batch_waits_for_the_operator_and_for_its_owner(office: Office) -> None:
    acme, small = office.key("acme"), office.key("small")
    batch = office.submit(acme, "away")
    # The API process is no worker.
    assert "No worker is alive" in office.away(office.operator, "explain", batch)
    assert "until the operator starts one" in office.away(acme, "explain", batch)
    assert "No worker is alive" in office.here("explain", batch, "--org", "acme").stdout()
    assert "No worker is alive" in office.away(office.operator, "workers")
    worker = office.site.worker()
    explained = office.until_explained(office.operator, batch, "the circuit of deployment gpu-2 has been open for")
    assert "unhealthy" in explained
    owners = office.away(acme, "explain", batch)
    assert "no model server of it takes calls" in owners
    assert "gpu-2" not in owners
    assert "No batch found" in office.away(small, "explain", batch, code=2)
    # The API process calls no model server: what it shows of this one is what the worker reported.
    assert "circuit open" in office.away(office.operator, "deployments", "list")
    overview = json.loads(office.away(office.operator, "top", "--json"))
    assert [(one["model"], one["closed"]) for one in overview["models"]] == [("away", "unhealthy")]
    assert "circuit open" in office.away(office.operator, "top", "--once")
    # A budget is named with its figures, and what is in its way is not hidden by others' work.
    bound = office.submit(small, "m")
    named = "the budget of organization small is used up (3 requests a month)"
    office.until_explained(small, bound, named)
    assert named in office.away(office.operator, "explain", bound)
    office.site.as_caller(acme).until_status(office.submit(acme, "two"), "completed")
    worker.wait_for_line(r"upstream_failover deployment=gpu-0 to=gpu-3 why=upstream_\w+ model=two")
    worker.kill()
    worker.wait()
    gone = office.until_explained(office.operator, batch, "No worker is alive")
    assert "The last one ran on" in gone
    assert "done in about" not in gone
    assert "No worker is alive" in office.away(office.operator, "workers")
    listed = json.loads(office.away(office.operator, "workers", "--all", "--json"))
    assert [(one["state"], one["runs_items"]) for one in listed if one["runs_items"]] == [("lost", True)]
    office.site.worker(name="relief").wait_for_line(r"worker_lost worker=worker_\w+ host=\S+", 60)


def test_a_provider_that_rejects_our_key_is_named(office: Office) -> None:
    acme = office.key("acme")
    batch = office.submit(acme, "cloud")
    office.site.engine.set_faults({"401": 1.0})
    office.site.worker()
    explained = office.until_explained(office.operator, batch, "deployment provider has rejected our key for")
    assert "check its api_key" in explained
    watched = office.site.processes.start(
        office.site.command("batches", "watch", batch, "--org", "acme"), name="watch", env=office.site.environment()
    )
    watched.wait_for_line("waiting: cloud: deployment provider has rejected our key", 60)
    away = office.site.processes.start(
        [TIDEGATE, "batches", "watch", batch, "--server", office.site.url],
        name="watch",
        env={"PATH": "", "HOME": str(office.elsewhere), "TIDEGATE_REMOTE_KEY": acme},
        cwd=office.elsewhere,
    )
    away.wait_for_line("waiting: cloud: no model server of it takes calls", 60)
    for proc in (watched, away):
        proc.terminate()
        proc.wait()
