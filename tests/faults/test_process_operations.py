"""An operation whose worker is killed in the middle: another goes on with the next batch, and each is changed, counted and noted once."""

from __future__ import annotations

import contextlib
import json
import subprocess
import time
from typing import Any

import httpx2

from tests.faults.conftest import MakeSite
from tests.support.postgres import PostgresServer
from tests.support.processes import wait_until
from tests.support.tidegate import END_S, Site, requests
from tidegate.stages.operate import STEP_JOBS

# More than one step changes.
BATCHES = STEP_JOBS + 3


def operator(site: Site) -> Site:
    """The site, asked with an operator's key."""
    command = site.command("keys", "create", "--org", "ops", "--scopes", "admin:write", "--json")
    made = subprocess.run(command, env=site.environment(), capture_output=True, check=True, timeout=60)
    return site.as_caller(json.loads(made.stdout)["key"])


def test_an_operation_goes_on_after_a_kill_and_counts_each_batch_once(site: Site) -> None:
    worker = site.begin("operation_stepped=kill")
    batches = [site.submit(requests(2), not_before=int(time.time()) + 7200) for _ in range(BATCHES)]
    for batch_id in batches:
        site.until_status(batch_id, "in_progress")
    asked = operator(site)
    # The process that answers may be the one that dies.
    with contextlib.suppress(httpx2.HTTPError):
        made = asked.client().post("/admin/v1/operations", json={"action": "pause", "filter": {}})
        assert made.status_code == 200, made.text
    worker.wait(timeout_s=60)
    site.relieve()
    asked.url = site.url
    check_all_paused(asked, batches)


def test_an_operation_survives_a_crash_of_the_database(
    make_site: MakeSite, private_postgres_server: PostgresServer
) -> None:
    site = make_site("cluster")
    site.env["TIDEGATE_STORE_URL"] = private_postgres_server.create_database()
    site.begin(more={"TIDEGATE_WORKER_LEASE_MS": "20000"})
    batches = [site.submit(requests(2), not_before=int(time.time()) + 7200) for _ in range(BATCHES)]
    for batch_id in batches:
        site.until_status(batch_id, "in_progress")
    asked = operator(site)
    made = asked.client().post("/admin/v1/operations", json={"action": "pause", "filter": {}})
    private_postgres_server.restart_immediate()
    assert made.status_code == 200, made.text
    check_all_paused(asked, batches)


def check_all_paused(asked: Site, batches: list[str]) -> None:
    """Wait for the end of the one operation: each batch was paused, counted and noted once."""

    def completed() -> dict[str, Any] | None:
        # Right after a crash the database may refuse.
        answer = asked.client().get("/admin/v1/operations")
        if answer.status_code == 503:
            return None
        [one] = answer.json()["data"]
        return dict(one) if one["status"] == "completed" else None

    ended = wait_until(completed, END_S, "the operation to be completed")
    assert ended is not None
    assert (ended["matched"]["jobs"], ended["done"], ended["failed"]) == (BATCHES, BATCHES, 0)
    for batch_id in batches:
        assert asked.get(f"/admin/v1/batches/{batch_id}")["tidegate"]["paused_at"] is not None
        noted = asked.get(f"/admin/v1/audit?target={batch_id}")["data"]
        assert [(one["action"], one["actor"]) for one in noted] == [("batch.pause", f"operation:{ended['id']}")]
