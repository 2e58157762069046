"""Batches whose callers ask for more than the lines of a file, with real processes: killed at every step, over a database that crashes."""

from __future__ import annotations

import json

import pytest

from tests.support.postgres import PostgresServer
from tests.support.tidegate import IN_FLIGHT, Site, behaving, requests

# Longer than a crash and recovery of the server take.
PATIENT = {"TIDEGATE_WORKER_LEASE_MS": "8000"}


def slow(number: int) -> str:
    return behaving("latency=150")


@pytest.fixture
def shaping(crashing: Site) -> Site:
    # Retries are what is tested, not how many a deployment allows.
    crashing.env["TIDEGATE_RETRY_BUDGET_MIN"] = "1000"
    crashing.env["TIDEGATE_PARAMETERS_DEFAULTS"] = '{"seed": 7, "max_tokens": 4}'
    return crashing


@pytest.mark.soak
def test_parameters_are_sent_though_processes_die_while_the_input_is_read(
    shaping: Site, private_postgres_server: PostgresServer
) -> None:
    lines = requests(40, slow)
    first = shaping.begin("ingest_work_durable=kill", more=PATIENT)
    batch_id = shaping.submit(lines, defaults={"user": "u"}, overrides={"max_tokens": 2})
    first.wait(timeout_s=60)
    second = shaping.worker(more=PATIENT)
    shaping.until_called(IN_FLIGHT + 1)
    private_postgres_server.restart_immediate()
    shaping.until_called(2 * IN_FLIGHT)
    second.kill()
    shaping.relieve(more=PATIENT)
    results = shaping.judge(batch_id, lines, repeats_max=2 * IN_FLIGHT)
    assert {line["response"]["body"]["usage"]["completion_tokens"] for line in results.output} == {2}


def test_a_batchs_own_retries_and_files_survive_kills(shaping: Site, private_postgres_server: PostgresServer) -> None:
    # The default is three tries.
    lines = requests(30, lambda number: behaving("500x4" if number % 15 == 0 else "latency=150"))
    first = shaping.begin(more=PATIENT)
    files = [shaping.upload(part).json()["id"] for part in (lines[:10], lines[10:29], lines[29:])]
    body = {
        "input_file_ids": files,
        "endpoint": "/v1/chat/completions",
        "retry": {"attempts_max": 6, "backoff_ms": 50, "backoff_ms_max": 100},
        "output_file_bytes_max": 4_096,
    }
    batch_id = shaping.client().post("/v1/batches", json=body).json()["id"]
    shaping.until_called(IN_FLIGHT + 1)
    first.kill()
    shaping.relieve(more=PATIENT)
    private_postgres_server.restart_immediate()
    batch = shaping.ended(batch_id).batch
    assert batch["status"] == "completed"
    parts = [shaping.client().get(f"/v1/files/{one}/content").text for one in batch["tidegate"]["output_file_ids"]]
    assert len(parts) > 1
    answered = [json.loads(line)["custom_id"] for line in "".join(parts).splitlines()]
    assert sorted(answered) == sorted(f"c{number}" for number in range(30))
    shaping.verify(batch_id)
