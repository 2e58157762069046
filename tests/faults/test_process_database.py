"""PostgreSQL crashes, throws everybody out, or falls silent, while a cluster works: nothing is lost, nothing comes twice."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.faults.conftest import PATIENT
from tests.faults.test_process_operations import operator
from tests.support.postgres import PostgresServer
from tests.support.processes import wait_until
from tests.support.proxy import Proxies
from tests.support.tidegate import ASK_S, END_S, IN_FLIGHT, LEASE_MS, Site, behaving, requests


def slow(number: int) -> str:
    return behaving("latency=250")


def test_the_database_crashes_under_load(crashing: Site, private_postgres_server: PostgresServer) -> None:
    lines = requests(60, slow)
    crashing.begin(more=PATIENT)
    crashing.worker(more=PATIENT)
    batch_id = crashing.submit(lines)
    for called in (6, 30):
        crashing.until_called(called)
        private_postgres_server.restart_immediate()
    crashing.judge(batch_id, lines)


@pytest.mark.soak
def test_every_connection_is_ended_again_and_again(crashing: Site, private_postgres_server: PostgresServer) -> None:
    lines = requests(60, slow)
    crashing.begin(more=PATIENT)
    crashing.worker(more=PATIENT)
    batch_id = crashing.submit(lines)
    database = urlsplit(crashing.env["TIDEGATE_STORE_URL"]).path.strip("/")
    ended = 0
    for called in range(8, 60, 8):
        crashing.until_called(called)
        ended += private_postgres_server.terminate_backends(database)
    assert ended > 0
    crashing.judge(batch_id, lines)


def test_nothing_is_acknowledged_while_the_database_is_down(
    crashing: Site, private_postgres_server: PostgresServer
) -> None:
    lines = requests(8)
    crashing.begin(more=PATIENT)
    file_id = crashing.upload(lines).json()["id"]
    private_postgres_server.stop()
    refused = [crashing.upload(lines, key="up"), crashing.create(file_id, key="create")]
    assert [answer.status_code for answer in refused] == [503, 503], [answer.text for answer in refused]
    assert all(int(answer.headers["Retry-After"]) > 0 for answer in refused)
    private_postgres_server.start()
    created = wait_until(lambda: _if_ok(crashing, file_id), END_S, "the API to find the database again", poll_s=ASK_S)
    assert [batch["id"] for batch in crashing.get("/v1/batches")["data"]] == [created]
    assert [file["id"] for file in crashing.get("/v1/files?purpose=batch")["data"]] == [file_id]
    crashing.judge(created, lines)


def _if_ok(site: Site, file_id: str) -> str:
    answer = site.create(file_id, key="create")
    return str(answer.json()["id"]) if answer.status_code == 200 else ""


@pytest.mark.soak
def test_the_database_is_down_while_a_response_falls_due(
    crashing: Site, private_postgres_server: PostgresServer
) -> None:
    """Every slot is taken by a batch; what falls due meanwhile goes like an interactive call once the database is back, once."""
    crashing.begin(more=PATIENT)
    lines = requests(IN_FLIGHT, lambda number: behaving("latency=12000"))
    crashing.submit(lines)
    crashing.until_called(IN_FLIGHT)
    asked = {"model": "m", "input": "soon", "background": True, "interactive_after_seconds": 2}
    made = crashing.client().post("/v1/responses", json=asked)
    assert (made.status_code, made.json()["status"]) == (200, "queued"), made.text
    due_at = time.monotonic() + 2
    private_postgres_server.stop()
    wait_until(lambda: time.monotonic() > due_at, END_S, "the response to fall due")
    private_postgres_server.start()
    path = f"/v1/responses/{made.json()['id']}"

    def answered() -> dict[str, Any] | None:
        answer = crashing.client().get(path)
        return dict(answer.json()) if answer.status_code == 200 and answer.json()["status"] == "completed" else None

    response = wait_until(answered, END_S, "the response", poll_s=ASK_S)
    assert response is not None
    assert response["service_tier"] == "default"
    assert len(crashing.calls_of(path.rpartition("/")[2].replace("resp_", "batch_"))) == 1


@pytest.mark.soak
def test_the_database_is_down_while_a_drain_is_written(
    crashing: Site, private_postgres_server: PostgresServer, tmp_path: Path
) -> None:
    """What was refused was not done; asked again it is done once, and followed."""
    place = {"name": "gpu", "url": crashing.engine.url}
    crashing.configure(models={"m": {"deployments": [place]}})
    worker = crashing.begin(more=PATIENT)
    # More than are called before the deployment is drained.
    batch_id = crashing.submit(requests(600, slow))
    asked = operator(crashing)
    path = "/admin/v1/deployments/gpu"
    private_postgres_server.stop()
    refused = asked.client().post(f"{path}/drain")
    assert refused.status_code == 503, refused.text
    assert int(refused.headers["Retry-After"]) > 0
    private_postgres_server.start()

    def drains() -> list[Any] | None:
        answer = asked.client().get("/admin/v1/audit?target=gpu")
        return list(answer.json()["data"]) if answer.status_code == 200 else None

    assert wait_until(lambda: drains() is not None, END_S, "the database") is True
    assert drains() == []
    done = [asked.client().post(f"{path}/drain").status_code for _ in range(2)]
    assert done == [200, 200]
    assert [one["action"] for one in drains() or ()] == ["deployment.drain"]
    worker.wait_for_line("routing_changed")
    wait_until(lambda: _quiet_since(crashing) > 1.5, END_S, "the calls to end", poll_s=ASK_S)
    assert asked.get(f"/admin/v1/batches/{batch_id}")["status"] == "in_progress"
    called = len(crashing.calls())
    assert asked.client().post(f"{path}/resume").status_code == 200
    crashing.until_called(called + 1)


@pytest.mark.parametrize("waves", [pytest.param(1, marks=pytest.mark.soak), 2])
def test_answers_that_come_while_the_database_is_down_outlive_their_worker(
    crashing: Site, private_postgres_server: PostgresServer, waves: int
) -> None:
    """They lie fsynced in the spool, also those that came while others waited to be committed: the next worker delivers them."""
    lines = requests(waves * IN_FLIGHT, lambda number: behaving(f"latency={2_000 + 1_500 * (number % waves)}"))
    more = {**PATIENT, "TIDEGATE_WORKER_IN_FLIGHT_MAX": str(len(lines))}
    worker = crashing.begin(more=more)
    batch_id = crashing.submit(lines)
    crashing.until_called(len(lines))
    private_postgres_server.stop()
    wait_until(lambda: len(crashing.items_on_disk()) == len(lines), END_S, "the answers on the disk", poll_s=ASK_S)
    worker.kill()
    private_postgres_server.start()
    crashing.worker(more=more)
    crashing.judge(batch_id, lines)


def test_a_silent_database_stops_new_calls_when_the_lease_is_over(
    cluster: Site, postgres_server: PostgresServer, proxies: Proxies
) -> None:
    """The network to the database is lost without a word. What is running ends and is held; nothing begins; later all is there."""
    lines = requests(60, slow)
    proxy = proxies.open(postgres_server.port)
    cluster.api()
    silent = cluster.env["TIDEGATE_STORE_URL"].replace(str(postgres_server.port), str(proxy.port))
    cluster.worker(more={"TIDEGATE_STORE_URL": silent, "TIDEGATE_STORE_STATEMENT_TIMEOUT_MS": "2000"})
    batch_id = cluster.submit(lines)
    cluster.until_called(IN_FLIGHT + 1)
    proxy.blackhole()
    lost_at = time.time() + LEASE_MS / 1000
    wait_until(lambda: time.time() > lost_at and _quiet_since(cluster) > 1.0, END_S, "the calls to end", poll_s=ASK_S)
    # The call that began last may have been on its way to the engine.
    assert not [call for call in cluster.calls() if call["at"] > lost_at + 0.5]
    called = len(cluster.calls())
    assert called < len(lines)
    proxy.heal()
    cluster.judge(batch_id, lines, repeats_max=IN_FLIGHT)


def _quiet_since(site: Site) -> float:
    return time.time() - float(max(call["at"] for call in site.calls()))


@pytest.mark.soak
def test_the_database_restarts_while_many_batches_are_published(
    crashing: Site, private_postgres_server: PostgresServer
) -> None:
    """Each waits between the lines of what never ran and its commit, and finds no database then. The worker lives on and lets go of what it
    could not publish, so each ends once, whole."""
    worker = crashing.begin("publish_rest_durable=sleep:1", more=PATIENT)
    lines = requests(6)
    batches = [crashing.submit(lines, not_before=int(time.time()) + 7200) for _ in range(6)]
    for batch_id in batches:
        crashing.until_status(batch_id, "in_progress")
    for batch_id in batches:
        crashing.cancel(batch_id)

    def ended() -> int:
        answers = [crashing.batch_if_answered(batch_id) for batch_id in batches]
        return sum(one is not None and one["status"] == "cancelled" for one in answers)

    wait_until(lambda: ended() >= 1, END_S, "a batch to end", poll_s=ASK_S)
    assert ended() < len(batches), "the rest is still to be published"
    private_postgres_server.stop()
    worker.wait_for_line(r"worker_loop_postponed.*loop\W+publish\b", END_S)
    private_postgres_server.start()
    for batch_id in batches:
        results = crashing.judge(batch_id, lines, status="cancelled")
        assert results.error_codes() == {"batch_cancelled": len(lines)}
