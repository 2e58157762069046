"""Batches whose callers ask for more than the lines of a file, with real processes: killed at every step, over a database that crashes."""

from __future__ import annotations

import json

import pytest

from tests.faults.conftest import MakeSite
from tests.support.postgres import PostgresServer
from tests.support.tidegate import IN_FLIGHT, Site, behaving, requests

# Longer than a crash and recovery of the server take.
PATIENT = {"TIDEGATE_WORKER_LEASE_MS": "8000"}


def slow(number: int) -> str:
    return behaving("latency=150")


def cluster(make_site: MakeSite, server: PostgresServer) -> Site:
    site = make_site("cluster")
    site.env["TIDEGATE_STORE_URL"] = server.create_database()
    # Retries are what is tested, not how many a deployment bears.
    site.env["TIDEGATE_RETRY_BUDGET_MIN"] = "1000"
    site.env["TIDEGATE_PARAMETERS_DEFAULTS"] = '{"seed": 7, "max_tokens": 4}'
    return site


@pytest.mark.soak
def test_parameters_are_sent_though_processes_die_while_the_input_is_read(
    make_site: MakeSite, private_postgres_server: PostgresServer
) -> None:
    site = cluster(make_site, private_postgres_server)
    lines = requests(40, slow)
    first = site.begin("ingest_work_durable=kill", more=PATIENT)
    batch_id = site.submit(lines, defaults={"user": "u"}, overrides={"max_tokens": 2})
    first.wait(timeout_s=60)
    second = site.worker(more=PATIENT)
    site.until_called(IN_FLIGHT + 1)
    private_postgres_server.restart_immediate()
    site.until_called(2 * IN_FLIGHT)
    second.kill()
    site.relieve(more=PATIENT)
    results = site.judge(batch_id, lines, repeats_max=2 * IN_FLIGHT)
    assert {line["response"]["body"]["usage"]["completion_tokens"] for line in results.output} == {2}


def test_a_batchs_own_retries_and_files_survive_kills(
    make_site: MakeSite, private_postgres_server: PostgresServer
) -> None:
    site = cluster(make_site, private_postgres_server)
    # The default is three tries.
    lines = requests(30, lambda number: behaving("500x4" if number % 15 == 0 else "latency=150"))
    first = site.begin(more=PATIENT)
    files = [site.upload(part).json()["id"] for part in (lines[:10], lines[10:29], lines[29:])]
    body = {
        "input_file_ids": files,
        "endpoint": "/v1/chat/completions",
        "retry": {"attempts_max": 6, "backoff_ms": 50, "backoff_ms_max": 100},
        "output_file_bytes_max": 4_096,
    }
    batch_id = site.client().post("/v1/batches", json=body).json()["id"]
    site.until_called(IN_FLIGHT + 1)
    first.kill()
    site.relieve(more=PATIENT)
    private_postgres_server.restart_immediate()
    batch = site.ended(batch_id).batch
    assert batch["status"] == "completed"
    parts = [site.client().get(f"/v1/files/{one}/content").text for one in batch["tidegate"]["output_file_ids"]]
    assert len(parts) > 1
    answered = [json.loads(line)["custom_id"] for line in "".join(parts).splitlines()]
    assert sorted(answered) == sorted(f"c{number}" for number in range(30))
    site.verify(batch_id)
