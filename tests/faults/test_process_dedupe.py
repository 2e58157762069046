"""Batches whose identical requests are run once, with real processes that are killed at every step."""

from __future__ import annotations

import json

import pytest

from tests.faults.conftest import CLUSTER_IN_SOAK, PATIENT, MakeSite
from tests.support.postgres import PostgresServer
from tests.support.tidegate import IN_FLIGHT, UNRECORDED_MAX, Site, behaving


def lines(count: int, kinds: int) -> list[str]:
    """Requests of so many kinds, each of them often; every fifth kind is refused."""
    made = []
    for number in range(count):
        kind = number % kinds
        text = behaving("400" if kind % 5 == 4 else "latency=150") + f" {kind}"
        body = {"model": "m", "messages": [{"role": "user", "content": text}], "max_tokens": 4, "temperature": 0}
        line = {"custom_id": f"c{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}
        made.append(json.dumps(line))
    return made


@CLUSTER_IN_SOAK
def test_identical_requests_are_run_once_though_processes_die(site: Site) -> None:
    """A worker dies while it calls, the next one when the copies are durable and named by no file."""
    asked = lines(60, 20)
    first = site.begin()
    batch_id = site.submit(asked, dedupe=True)
    site.until_called(IN_FLIGHT + 1)
    first.kill()
    loss = site.loss()
    second = site.serve("publish_rest_durable=kill") if site.embedded else site.worker("publish_rest_durable=kill")
    second.wait(timeout_s=60)
    site.relieve()
    results = site.judge(batch_id, asked, repeats_max=None, loss=loss)
    batch = results.batch
    assert (batch["tidegate"]["dedupe"], batch["tidegate"]["deduplicated"]) == (True, 40)
    assert batch["request_counts"] == {"total": 60, "completed": 48, "failed": 12, "cancelled": 0, "in_progress": 0}
    assert len({call["idempotency_key"] for call in site.calls_of(batch_id)}) == 20
    assert batch["usage"]["output_tokens"] == 16 * 4


@pytest.mark.soak
def test_a_changed_file_runs_its_changed_lines_though_processes_die(make_site: MakeSite) -> None:
    site = make_site("cluster")
    asked = lines(40, 40)
    site.begin()
    earlier = site.submit(asked)
    site.judge(earlier, asked)
    site.end_all()
    edited = [*asked[:30], *(line.replace('"max_tokens": 4', '"max_tokens": 3') for line in asked[30:])]
    first = site.begin("ingest_work_durable=kill")
    batch_id = site.submit(edited, reuse_from=earlier)
    first.wait(timeout_s=60)
    second = site.worker("publish_rest_durable=kill")
    second.wait(timeout_s=60)
    site.relieve()
    results = site.judge(batch_id, edited)
    # Those that were refused have no answer, so they are run again.
    assert results.batch["tidegate"]["reused"] == 24
    assert len(site.calls_of(batch_id)) == 16


@pytest.mark.soak
def test_copies_survive_crashes_of_the_database(crashing: Site, private_postgres_server: PostgresServer) -> None:
    """It crashes while requests run, and again when a batch that reuses their answers was just accepted."""
    asked = lines(60, 20)
    crashing.begin(more=PATIENT)
    earlier = crashing.submit(asked, dedupe=True)
    crashing.until_called(IN_FLIGHT + 1)
    private_postgres_server.restart_immediate()
    results = crashing.judge(earlier, asked, repeats_max=UNRECORDED_MAX)
    assert results.batch["tidegate"]["deduplicated"] == 40
    batch_id = crashing.submit(asked, reuse_from=earlier)
    private_postgres_server.restart_immediate()
    results = crashing.judge(batch_id, asked, repeats_max=UNRECORDED_MAX)
    # Those that were refused have no answer, so they are run again.
    assert results.batch["tidegate"]["reused"] == 48
    assert len({call["idempotency_key"] for call in crashing.calls_of(batch_id)}) == 12


def test_a_cancel_leaves_the_copies_of_what_was_answered(make_site: MakeSite) -> None:
    site = make_site("embedded")
    asked = lines(80, 40)
    site.begin()
    batch_id = site.submit(asked, dedupe=True, ordered=True)
    site.until_called(3 * IN_FLIGHT)
    site.cancel(batch_id)
    results = site.judge(batch_id, asked, "cancelled")
    answered = {int(line["custom_id"][1:]) for line in results.output}
    assert answered
    assert {(number + 40) % 80 for number in answered} == answered, "a request and its copy end alike"
    order = [int(line["custom_id"][1:]) for line in results.output]
    assert order == sorted(order)
