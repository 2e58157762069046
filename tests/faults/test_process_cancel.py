"""Cancel and expiry: nothing new is sent, what is finished stays, and every batch ends, with or without the worker that began it."""

from __future__ import annotations

import time

from tests.faults.conftest import CLUSTER_IN_SOAK
from tests.support.tidegate import END_S, ENDED, IN_FLIGHT, Site, behaving, requests

# After this long no new call may start; the rest is for the clocks of two processes on a busy machine.
STOPS_S = 2.0
SLACK_S = 0.5


def test_cancel_stops_sending_and_keeps_what_is_done(site: Site) -> None:
    lines = requests(60, lambda number: behaving("latency=300"))
    site.begin()
    batch_id = site.submit(lines)
    site.until_called(IN_FLIGHT + 1)
    assert site.cancel(batch_id).json()["status"] == "cancelling"
    cancelled_at = time.time()
    again = site.cancel(batch_id)
    assert again.status_code == 200, again.text
    results = site.judge(batch_id, lines, "cancelled")
    assert not [call for call in site.calls() if call["at"] > cancelled_at + STOPS_S + SLACK_S]
    assert len(results.output) == len(site.calls()), "every answer that was paid for is kept"
    assert set(results.error_codes()) == {"batch_cancelled"}
    assert site.cancel(batch_id).status_code < 500
    assert site.ended(batch_id) == results


@CLUSTER_IN_SOAK
def test_cancel_aborts_calls_that_outlast_the_grace(site: Site) -> None:
    lines = requests(12, lambda number: behaving("hang"))
    site.begin(more={"TIDEGATE_WORKER_GRACE_MS": "500"})
    batch_id = site.submit(lines)
    site.until_called(1)
    assert site.cancel(batch_id).status_code == 200
    results = site.judge(batch_id, lines, "cancelled")
    assert results.output == []
    assert results.error_codes() == {"batch_cancelled": 12}


@CLUSTER_IN_SOAK
def test_cancel_aborts_calls_at_once_where_the_operator_says_so(site: Site) -> None:
    lines = requests(12, lambda number: behaving("hang"))
    site.begin(more={"TIDEGATE_WORKER_CANCEL_GRACE_MS": "0"})
    batch_id = site.submit(lines)
    site.until_called(1)
    cancelled_at = time.time()
    assert site.cancel(batch_id).status_code == 200
    results = site.judge(batch_id, lines, "cancelled")
    assert results.error_codes() == {"batch_cancelled": 12}
    # The grace of every other end is half a minute.
    assert time.time() < cancelled_at + 25


@CLUSTER_IN_SOAK
def test_cancel_races_completion(site: Site) -> None:
    site.begin()
    batches: list[tuple[str, list[str]]] = []
    for _ in range(6):
        lines = requests(3)
        batch_id = site.submit(lines)
        site.until_status(batch_id, "in_progress", "finalizing", *ENDED)
        site.until_called(3 * len(batches) + 1)
        assert site.cancel(batch_id).status_code < 500
        batches.append((batch_id, lines))
    for batch_id, lines in batches:
        ended = site.until_status(batch_id, *ENDED, timeout_s=END_S)
        assert ended["status"] in ("completed", "cancelled")
        site.judge(batch_id, lines, ended["status"])


def test_cancel_before_any_worker_lives(cluster: Site) -> None:
    """No worker is there to notice it; the first that starts ends it, without a call."""
    cluster.api()
    batch_id = cluster.submit(requests(8))
    assert cluster.cancel(batch_id).status_code == 200
    cluster.worker()
    results = cluster.ended(batch_id)
    assert results.batch["status"] == "cancelled"
    assert (results.output, results.errors, cluster.calls()) == ([], [], [])
    cluster.verify(batch_id)


def test_cancel_when_the_only_worker_is_dead(cluster: Site) -> None:
    lines = requests(8)
    victim = cluster.begin("lease_committed=kill")
    batch_id = cluster.submit(lines)
    assert victim.wait() == -9
    assert cluster.cancel(batch_id).json()["status"] == "cancelling"
    cluster.relieve()
    results = cluster.judge(batch_id, lines, "cancelled")
    assert results.error_codes() == {"batch_cancelled": 8}
    assert cluster.calls() == []


@CLUSTER_IN_SOAK
def test_expiry_with_slow_calls(site: Site) -> None:
    """Nothing is sent after the window; what was sent before has the grace to end, and every answer is kept."""
    lines = requests(40, lambda number: behaving("latency=700"))
    site.env["TIDEGATE_LIMITS_WINDOW_MIN_S"] = "1"
    site.begin()
    batch_id = site.submit(lines, completion_window="3s")
    results = site.judge(batch_id, lines, "expired")
    assert set(results.error_codes()) == {"batch_expired"}
    assert len(results.output) == len(site.calls()) >= IN_FLIGHT
    # The wire shows whole seconds, cut off.
    assert not [call for call in site.calls() if call["at"] > results.batch["expires_at"] + 1 + SLACK_S]


@CLUSTER_IN_SOAK
def test_expiry_aborts_calls_that_outlast_the_grace(site: Site) -> None:
    lines = requests(8, lambda number: behaving("hang"))
    site.env["TIDEGATE_LIMITS_WINDOW_MIN_S"] = "1"
    site.begin(more={"TIDEGATE_WORKER_GRACE_MS": "500"})
    batch_id = site.submit(lines, completion_window="2s")
    results = site.judge(batch_id, lines, "expired")
    assert results.error_codes() == {"batch_expired": 8}
    assert len(site.calls()) <= IN_FLIGHT
