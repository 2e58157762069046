"""Canaries with real processes: nothing but the sample is sent until it has passed, though a worker or the database dies meanwhile."""

from __future__ import annotations

from typing import Any

import pytest

from tests.faults.conftest import CLUSTER_IN_SOAK, PATIENT
from tests.support.postgres import PostgresServer
from tests.support.processes import wait_until
from tests.support.tidegate import ASK_S, END_S, UNRECORDED_MAX, Site, behaving, requests

SAMPLE = 6


def until_state(site: Site, batch_id: str, *states: str) -> dict[str, Any]:
    def there() -> dict[str, Any] | None:
        found = site.batch_if_answered(batch_id)
        return found if found is not None and found["tidegate"]["canary"]["state"] in states else None

    found = wait_until(there, END_S, f"the canary of {batch_id} to be {states}", poll_s=ASK_S)
    assert found is not None
    return found


def say(site: Site, batch_id: str, action: str) -> None:
    def is_taken() -> bool:
        answer = site.client().post(f"/v1/batches/{batch_id}/canary", json={"action": action})
        assert answer.status_code in (200, 503), answer.text
        return answer.status_code == 200

    wait_until(is_taken, END_S, f"{batch_id} to take {action}", poll_s=ASK_S)


@CLUSTER_IN_SOAK
def test_the_sample_runs_alone_and_then_its_caller_decides(site: Site) -> None:
    lines = requests(30)
    site.begin()
    batch_id = site.submit(lines, canary={"items": SAMPLE, "then": "wait"})
    waiting = until_state(site, batch_id, "waiting")
    assert waiting["status"] == "in_progress"
    assert len(site.calls_of(batch_id)) == SAMPLE
    tokens = waiting["usage"]["output_tokens"]
    assert waiting["tidegate"]["canary"]["forecast"]["output_tokens"] == tokens * len(lines) // SAMPLE
    site.verify(batch_id)
    say(site, batch_id, "continue")
    results = site.judge(batch_id, lines)
    assert results.batch["tidegate"]["canary"]["state"] == "passed"


@pytest.mark.parametrize(
    "border",
    ["record_durable", *(pytest.param(one, marks=pytest.mark.soak) for one in ("after_answer", "record_committed"))],
)
def test_a_canary_that_fails_stops_its_batch_though_its_worker_is_killed(embedded: Site, border: str) -> None:
    lines = requests(30, lambda number: behaving("400") + f" {number}" if number % 2 else f"say {number}")
    doomed = embedded.begin(f"{border}=kill")
    batch_id = embedded.submit(lines, canary={"items": SAMPLE, "max_error_share": 0.1})
    doomed.wait(timeout_s=END_S)
    embedded.relieve()
    results = embedded.judge(batch_id, lines, "failed", repeats_max=SAMPLE)
    assert results.batch["tidegate"]["canary"]["state"] == "failed"
    assert results.batch["tidegate"]["stopped_by"] == "canary"
    assert [error["code"] for error in results.batch["errors"]["data"]] == ["canary_failed"]
    assert results.error_codes()["batch_failed"] == len(lines) - SAMPLE


@pytest.mark.soak
def test_a_canary_survives_crashes_of_the_database(crashing: Site, private_postgres_server: PostgresServer) -> None:
    lines = requests(30, lambda number: behaving("latency=200") + f" {number}")
    crashing.begin(more=PATIENT)
    crashing.worker(more=PATIENT)
    batch_id = crashing.submit(lines, canary={"items": SAMPLE, "then": "wait"})
    crashing.until_called(1)
    private_postgres_server.restart_immediate()
    until_state(crashing, batch_id, "waiting")
    assert len({call["idempotency_key"] for call in crashing.calls_of(batch_id)}) == SAMPLE
    private_postgres_server.restart_immediate()
    say(crashing, batch_id, "continue")
    private_postgres_server.restart_immediate()
    crashing.judge(batch_id, lines, repeats_max=UNRECORDED_MAX)
