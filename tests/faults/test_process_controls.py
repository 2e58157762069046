"""Pause, resume, `not_before` and thresholds with real processes: nothing new is sent, nothing is lost, whatever dies meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.faults.conftest import CLUSTER_IN_SOAK, PATIENT, MakeSite
from tests.faults.test_process_cancel import SLACK_S, STOPS_S
from tests.support.postgres import PostgresServer
from tests.support.processes import wait_until
from tests.support.tidegate import ASK_S, END_S, IN_FLIGHT, UNRECORDED_MAX, Site, behaving, requests


@CLUSTER_IN_SOAK
def test_a_paused_batch_survives_a_kill_and_goes_on_where_it_was(site: Site) -> None:
    lines = requests(40, lambda number: behaving("latency=200"))
    worker = site.begin()
    batch_id = site.submit(lines)
    site.until_called(IN_FLIGHT + 1)
    for _ in range(2):
        paused = site.client().post(f"/v1/batches/{batch_id}/pause")
        assert paused.status_code == 200, paused.text
    paused_at = time.time()
    assert paused.json()["status"] == "in_progress"
    time.sleep(STOPS_S + SLACK_S)
    site.engine.settle()
    made = len(site.calls())
    assert not [call for call in site.calls() if call["at"] > paused_at + STOPS_S + SLACK_S]
    assert made < len(lines)
    worker.kill()
    site.relieve()
    time.sleep(STOPS_S)
    assert len(site.calls()) == made, "the next worker leaves it alone too"
    assert site.batch(batch_id)["tidegate"]["paused_at"] is not None
    assert site.client().post(f"/v1/batches/{batch_id}/resume").status_code == 200
    # Everything in flight had ended and was recorded before the kill.
    site.judge(batch_id, lines)
    assert len(site.calls()) == len(lines)


@CLUSTER_IN_SOAK
def test_too_many_errors_stop_a_batch_though_its_worker_is_killed(site: Site) -> None:
    # Over object storage results are committed after seconds, so there must be more to do than that takes.
    lines = requests(160, lambda number: behaving("400" if number % 2 else "latency=500"))
    worker = site.begin("job_closed=kill")
    batch_id = site.submit(lines, max_errors={"count": 3}, prefix_order=False)
    worker.wait(timeout_s=60)
    site.relieve()
    results = site.judge(batch_id, lines, "failed")
    assert results.batch["tidegate"]["stopped_by"] == "max_errors"
    assert [error["code"] for error in results.batch["errors"]["data"]] == ["max_errors_exceeded"]
    codes = results.error_codes()
    assert codes["batch_failed"] > 0
    assert len(results.output) + sum(codes.values()) == len(lines)


@pytest.mark.parametrize("fault", ["kill", pytest.param("database", marks=pytest.mark.soak)])
def test_controls_outlive_processes_and_the_database(
    make_site: MakeSite, request: pytest.FixtureRequest, fault: str
) -> None:
    """One batch is paused, one may not begin yet, and one stops at its errors, while everything is lost twice."""
    if fault == "kill":
        site = make_site("embedded")
        site.begin()

        def strike() -> None:
            site.workers[-1].kill()
            site.relieve()

    else:
        server: PostgresServer = request.getfixturevalue("private_postgres_server")
        site = request.getfixturevalue("crashing")
        site.begin(more=PATIENT)
        strike = server.restart_immediate
    _check_controls(site, strike)


def _check_controls(site: Site, strike: Callable[[], None]) -> None:
    lines = requests(30, lambda number: behaving("latency=200") + f" {number}")
    faulty = requests(40, lambda number: behaving("400" if number % 2 else "latency=200") + f" {number}")
    later = site.submit(lines, not_before=int(time.time()) + 3_600)
    paused = site.submit(lines)
    site.until_called(IN_FLIGHT + 1)
    _ask(site, f"{paused}/pause")
    strike()
    wait_until(lambda: not _leased(site, paused), END_S, "the paused batch to be given back", poll_s=ASK_S)
    made = len(site.calls_of(paused))
    stopped = site.submit(faulty, max_errors={"count": 2}, prefix_order=False)
    wait_until(lambda: len(site.calls_of(stopped)) >= 2, END_S, "the faulty batch to run", poll_s=ASK_S)
    strike()
    results = site.judge(stopped, faulty, "failed", repeats_max=UNRECORDED_MAX)
    assert results.batch["tidegate"]["stopped_by"] == "max_errors"
    assert (len(site.calls_of(paused)), len(site.calls_of(later))) == (made, 0)
    assert made < len(lines)
    _ask(site, f"{paused}/resume")
    _ask(site, later, not_before=None)
    site.judge(paused, lines, repeats_max=UNRECORDED_MAX)
    site.judge(later, lines)


def _leased(site: Site, batch_id: str) -> bool:
    return any(row["job_id"] == batch_id for row in site.rows("select job_id from slices where state = 'leased'"))


def _ask(site: Site, path: str, **body: Any) -> None:
    def answered() -> bool:
        answer = site.client().post(f"/v1/batches/{path}", json=body)
        assert answer.status_code in (200, 503), answer.text
        return answer.status_code == 200

    wait_until(answered, END_S, f"{path} to be accepted", poll_s=ASK_S)
