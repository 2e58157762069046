"""Retries with real processes: what failed runs again, the first batch stays as it is, and a kill or a lost database changes nothing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from tests.faults.conftest import CLUSTER_IN_SOAK, PATIENT
from tests.support.postgres import PostgresServer
from tests.support.processes import wait_until
from tests.support.tidegate import ASK_S, END_S, Results, Site, behaving, requests

CANCELLED = ["cancelled"]


def line_text(number: int) -> str:
    """Every fourth request is refused each time."""
    return f"{behaving('400' if number % 4 == 0 else 'latency=150')} {number}"


def cancelled_batch(site: Site, lines: Sequence[str], **more: Any) -> Results:
    """A batch that was cancelled when something of it was done, and something not."""
    batch_id = site.submit(lines, prefix_order=False, **more)
    site.until_called(9)
    site.cancel(batch_id)
    results = site.judge(batch_id, lines, "cancelled")
    assert results.output
    assert results.error_codes().keys() == {"400", "batch_cancelled"}
    return results


def never_ran(results: Results, lines: Sequence[str]) -> list[str]:
    """The lines of the input that a cancel kept from running."""
    ids = {line["custom_id"] for line in results.errors if line["error"] and line["error"]["code"] == "batch_cancelled"}
    return [line for line in lines if json.loads(line)["custom_id"] in ids]


def retry(site: Site, batch_id: str, **body: Any) -> dict[str, Any]:
    def answered() -> dict[str, Any] | None:
        answer = site.client().post(f"/v1/batches/{batch_id}/retry", json=body, headers={"Idempotency-Key": batch_id})
        assert answer.status_code in (200, 503), answer.text
        return dict(answer.json()) if answer.status_code == 200 else None

    made = wait_until(answered, END_S, f"{batch_id} to be retried", poll_s=ASK_S)
    assert made is not None
    return made


def check_merged(site: Site, *chain: Results) -> None:
    merged = site.content(chain[-1].batch["tidegate"]["merged_output_file_id"])
    assert merged == [line for results in chain for line in results.output]
    assert len({line["custom_id"] for line in merged}) == len(merged)


@CLUSTER_IN_SOAK
def test_what_never_ran_runs_again_and_the_first_stays_as_it_is(site: Site) -> None:
    lines = requests(60, line_text)
    site.begin()
    first = cancelled_batch(site, lines, metadata={"team": "a"})
    batch_id = first.batch["id"]
    made = retry(site, batch_id, outcomes=CANCELLED)
    assert (made["status"], made["tidegate"]["retry_of"]) == ("validating", batch_id)
    assert made["metadata"] == {"team": "a"}
    assert made["tidegate"]["merged_output_file_id"] is None
    again = site.judge(made["id"], never_ran(first, lines))
    check_merged(site, first, again)
    # Without the key too: the same request is the same batch.
    repeated = site.client().post(f"/v1/batches/{batch_id}/retry", json={"outcomes": CANCELLED})
    assert repeated.json()["id"] == made["id"]
    after = site.ended(batch_id)
    assert (after.output, after.errors) == (first.output, first.errors)
    assert after.batch == {**first.batch, "tidegate": {**first.batch["tidegate"], "retried_by": [made["id"]]}}
    site.verify(batch_id)
    # The new batch needs nothing of the first.
    assert site.client().delete(f"/v1/batches/{batch_id}").status_code == 200
    site.end_all()
    site.collect_garbage()
    if site.embedded:
        site.relieve()
    else:
        site.api()
    check_merged(site, first, site.ended(made["id"]))
    site.verify(made["id"])


@pytest.mark.parametrize(
    "border",
    ["record_durable", *(pytest.param(one, marks=pytest.mark.soak) for one in ("ingest_work_durable", "job_closed"))],
)
def test_a_retry_survives_a_kill(embedded: Site, border: str) -> None:
    lines = requests(60, line_text)
    embedded.begin()
    first = cancelled_batch(embedded, lines)
    embedded.end_all()
    doomed = embedded.serve(f"{border}=kill")
    made = retry(embedded, first.batch["id"], outcomes=CANCELLED)
    if border == "job_closed":
        embedded.until_called(len(embedded.calls()) + 8)
        embedded.cancel(made["id"])
    doomed.wait(timeout_s=END_S)
    embedded.relieve()
    status = "cancelled" if border == "job_closed" else "completed"
    again = embedded.judge(made["id"], never_ran(first, lines), status, repeats_max=8)
    check_merged(embedded, first, again)
    assert retry(embedded, first.batch["id"], outcomes=CANCELLED)["id"] == made["id"]


@pytest.mark.soak
def test_a_retry_of_a_retry_survives_crashes_of_the_database(
    crashing: Site, private_postgres_server: PostgresServer
) -> None:
    lines = requests(60, line_text)
    crashing.begin(more=PATIENT)
    first = cancelled_batch(crashing, lines)
    made = retry(crashing, first.batch["id"], outcomes=CANCELLED)
    private_postgres_server.restart_immediate()
    crashing.until_called(len(crashing.calls()) + 8)
    crashing.cancel(made["id"])
    second = crashing.judge(made["id"], never_ran(first, lines), "cancelled", repeats_max=8)
    third = retry(crashing, made["id"], codes=["batch_cancelled"])
    private_postgres_server.restart_immediate()
    last = crashing.judge(third["id"], never_ran(second, lines), repeats_max=8)
    check_merged(crashing, first, second, last)
    answered = {line["custom_id"] for results in (first, second, last) for line in results.output}
    assert len(answered) == 45, "all but those that are refused each time"


def test_a_retry_has_the_shape_of_the_first_and_all_parts_of_its_answers(embedded: Site) -> None:
    embedded.begin()
    lines = requests(40, line_text)
    batch_id = embedded.submit(lines, prefix_order=False, output_file_bytes_max=4_096, defaults={"seed": 7})
    embedded.until_called(20)
    embedded.cancel(batch_id)
    first = embedded.ended(batch_id).batch
    assert len(first["tidegate"]["output_file_ids"]) > 1
    again = embedded.ended(retry(embedded, batch_id, outcomes=CANCELLED)["id"]).batch
    assert (again["tidegate"]["defaults"], again["tidegate"]["output_file_bytes_max"]) == ({"seed": 7}, 4_096)
    answered = [
        line["custom_id"]
        for batch in (first, again)
        for one in batch["tidegate"]["output_file_ids"]
        for line in embedded.content(one)
    ]
    assert [line["custom_id"] for line in embedded.content(again["tidegate"]["merged_output_file_id"])] == answered
    assert len(answered) == 30
    items = embedded.client().get(f"/v1/batches/{batch_id}/items", params={"limit": 100}).json()["data"]
    assert len(items) == 40
    embedded.verify(batch_id)
    embedded.verify(again["id"])
