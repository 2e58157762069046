"""Pause, resume and thresholds with real processes: nothing new is sent, nothing is lost, whoever dies meanwhile."""

from __future__ import annotations

import time

from tests.faults.test_process_cancel import SLACK_S, STOPS_S
from tests.support.tidegate import IN_FLIGHT, Site, behaving, requests


def test_a_paused_batch_survives_a_kill_and_goes_on_where_it_was(site: Site) -> None:
    lines = requests(40, lambda number: behaving("latency=200"))
    worker = site.begin()
    batch_id = site.submit(lines)
    site.until_called(IN_FLIGHT + 1)
    for _ in range(2):
        paused = site.client().post(f"/v1/batches/{batch_id}/pause")
        assert paused.status_code == 200, paused.text
    told_at = time.time()
    assert paused.json()["status"] == "in_progress"
    time.sleep(STOPS_S + SLACK_S)
    site.engine.settle()
    made = len(site.calls())
    assert not [call for call in site.calls() if call["at"] > told_at + STOPS_S + SLACK_S]
    assert made < len(lines)
    worker.kill()
    site.relieve()
    time.sleep(STOPS_S)
    assert len(site.calls()) == made, "whoever comes next leaves it alone too"
    assert site.batch(batch_id)["tidegate"]["paused_at"] is not None
    assert site.client().post(f"/v1/batches/{batch_id}/resume").status_code == 200
    # Everything in flight had ended and was recorded before the kill.
    site.judge(batch_id, lines)
    assert len(site.calls()) == len(lines)


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
