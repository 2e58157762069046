"""The disk or Redis goes away under the watch on the settings and under an operation: both go on, and nothing is done twice."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from tests.faults.conftest import PATIENT
from tests.faults.test_process_operations import BATCHES, check_all_paused, operator
from tests.support.processes import wait_until
from tests.support.redis import RedisServer
from tests.support.shims import Shims, preload_env
from tests.support.tidegate import END_S, Site, requests

PAUSE = {"action": "pause", "filter": {}}


class Watched:
    """A site with a file of settings, which is replaced as an editor does."""

    def __init__(self, site: Site, path: Path) -> None:
        self.site = site
        self.path = path
        site.env["TIDEGATE_CONFIG"] = str(path)
        self.serve_as("m")

    def serve_as(self, *models: str) -> None:
        places = {model: {"deployments": [{"name": f"gpu-{model}", "url": self.site.engine.url}]} for model in models}
        new = self.path.with_name("new.json")
        new.write_text(json.dumps({"models": places}))
        new.replace(self.path)

    def until_served(self, *models: str) -> None:
        def served() -> bool:
            return {one["name"] for one in self.site.get("/admin/v1/models")["data"]} == set(models)

        wait_until(served, END_S, f"the models {models}")

    def waiting_batches(self) -> list[str]:
        batches = [self.site.submit(requests(2), not_before=int(time.time()) + 7200) for _ in range(BATCHES)]
        for batch_id in batches:
            self.site.until_status(batch_id, "in_progress")
        return batches


@pytest.mark.parametrize("rule", ["enospc", pytest.param("erofs", marks=pytest.mark.soak)])
def test_the_disk_goes_under_the_watch_and_under_an_operation(
    embedded: Site, shims: Shims, tmp_path: Path, rule: str
) -> None:
    disk = shims.disk(embedded.data)
    watched = Watched(embedded, tmp_path / "watched.json")
    proc = embedded.serve("operation_stepped=sleep:0.2", preload_env(disk, base=PATIENT))
    batches = watched.waiting_batches()
    asked = operator(embedded)
    disk.fail(rule)
    watched.serve_as("m", "another")
    watched.site = asked
    watched.until_served("m", "another")
    refused = asked.client().post("/admin/v1/operations", json=PAUSE)
    assert refused.status_code in (503, 507), refused.text
    disk.heal()
    assert asked.get("/admin/v1/operations")["data"] == []
    # In the middle of an operation.
    made = asked.client().post("/admin/v1/operations", json=PAUSE)
    assert made.status_code == 200, made.text
    disk.fail(rule)
    proc.wait_for_line("worker_loop_postponed")
    [stands] = asked.get("/admin/v1/operations")["data"]
    assert stands["status"] == "running"
    disk.heal()
    check_all_paused(asked, batches)
    assert proc.running


@pytest.mark.soak
def test_redis_goes_under_the_watch_and_under_an_operation(
    cluster: Site, private_redis: RedisServer, tmp_path: Path
) -> None:
    """Redis only makes things early: without it, what polls find is enough."""
    cluster.env["TIDEGATE_REDIS_URL"] = private_redis.url
    watched = Watched(cluster, tmp_path / "watched.json")
    worker = cluster.begin("operation_stepped=sleep:0.2")
    batches = watched.waiting_batches()
    watched.site = asked = operator(cluster)
    private_redis.stop()
    watched.serve_as("m", "another")
    watched.until_served("m", "another")
    worker.wait_for_line("settings_reloaded")
    made = asked.client().post("/admin/v1/operations", json=PAUSE)
    assert made.status_code == 200, made.text
    wait_until(lambda: asked.get("/admin/v1/operations")["data"][0]["done"] > 0, END_S, "the first batch")
    # It comes back in the middle, and forgot everything.
    private_redis.start()
    check_all_paused(asked, batches)
    assert worker.running
