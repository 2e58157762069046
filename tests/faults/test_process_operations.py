"""What operators do to batches while a worker is killed or the database goes away: each is changed, counted and noted once."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import httpx2
import pytest

from tests.faults.conftest import CLUSTER_IN_SOAK, PATIENT
from tests.support.postgres import PostgresServer
from tests.support.processes import wait_until
from tests.support.tidegate import ASK_S, END_S, Site, behaving, requests
from tidegate.stages.operate import STEP_JOBS

# More than one step changes.
BATCHES = STEP_JOBS + 3


def operator(site: Site) -> Site:
    """The site, asked with an operator's key."""
    return site.keyed("ops", scopes=["admin:write"])


@CLUSTER_IN_SOAK
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


def test_an_operation_goes_on_when_the_database_comes_back(
    crashing: Site, private_postgres_server: PostgresServer
) -> None:
    """It goes away between two steps, so that the next one fails."""
    crashing.env |= PATIENT
    crashing.begin("operation_stepped=sleep:2")
    batches = [crashing.submit(requests(2), not_before=int(time.time()) + 7200) for _ in range(BATCHES)]
    for batch_id in batches:
        crashing.until_status(batch_id, "in_progress")
    asked = operator(crashing)
    made = asked.client().post("/admin/v1/operations", json={"action": "pause", "filter": {}}).json()
    path = f"/admin/v1/operations/{made['id']}"
    wait_until(lambda: asked.get(path)["done"] > 0, END_S, "the first step", poll_s=ASK_S)
    private_postgres_server.stop()
    refused = [asked.client().get(path), asked.client().post(f"{path}/cancel")]
    assert [answer.status_code for answer in refused] == [503, 503], "a cancel that is not written is not done"
    private_postgres_server.start()
    check_all_paused(asked, batches)


@pytest.mark.soak
def test_the_retry_of_one_kind_of_error_outlives_the_database(
    crashing: Site, private_postgres_server: PostgresServer
) -> None:
    """What was refused was not done; asked again it is one batch, which has the lines of that kind alone."""
    kinds = ("400", "422", "latency=150", "latency=150")
    lines = requests(40, lambda number: f"{behaving(kinds[number % 4])} {number}")
    crashing.env |= PATIENT
    crashing.begin()
    owner, asked = crashing.keyed(), operator(crashing)
    batch_id = owner.submit(lines)
    first = owner.ended(batch_id)
    path = f"/admin/v1/batches/{batch_id}"
    groups = {group["status"]: group for group in asked.get(f"{path}/errors")["data"]}
    assert {status: group["requests"] for status, group in groups.items()} == {400: 10, 422: 10}
    private_postgres_server.stop()
    wanted = {"kinds": [groups[422]["id"]]}
    assert asked.client().post(f"{path}/retry", json=wanted).status_code == 503
    private_postgres_server.start()

    def retried() -> str:
        answer = asked.client().post(f"{path}/retry", json=wanted)
        assert answer.status_code in (200, 503), answer.text
        return str(answer.json()["id"]) if answer.status_code == 200 else ""

    made = wait_until(retried, END_S, "the retry", poll_s=ASK_S)
    private_postgres_server.restart_immediate()
    assert wait_until(retried, END_S, "the same retry", poll_s=ASK_S) == made
    again = owner.ended(made)
    assert {line["custom_id"] for line in again.errors} == {f"c{number}" for number in range(1, 40, 4)}
    assert again.output == []
    assert owner.batch(batch_id)["tidegate"]["retried_by"] == [made]
    assert owner.ended(batch_id).errors == first.errors
    assert [one["action"] for one in asked.get(f"/admin/v1/audit?target={batch_id}")["data"]] == ["batch.retry"]
    for one in (batch_id, made):
        crashing.verify(one)


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
