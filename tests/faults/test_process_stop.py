"""SIGTERM: what was not sent goes back at once, what was is finished and kept; and workers can be replaced one by one under load."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from tests.faults.conftest import CLUSTER_IN_SOAK
from tests.support.processes import wait_until
from tests.support.tidegate import ASK_S, END_S, IN_FLIGHT, Site, behaving, requests


@CLUSTER_IN_SOAK
def test_a_long_enough_grace_repeats_nothing(site: Site) -> None:
    lines = requests(24, lambda number: behaving("latency=300"))
    first = site.begin()
    batch_id = site.submit(lines)
    site.until_called(IN_FLIGHT + 1)
    first.terminate()
    assert first.wait() == 0
    site.relieve()
    site.judge(batch_id, lines)


@CLUSTER_IN_SOAK
def test_a_grace_that_is_too_short_loses_nothing(site: Site) -> None:
    lines = requests(12, lambda number: behaving("latency=1500") if number < IN_FLIGHT else "go on")
    first = site.begin(more={"TIDEGATE_WORKER_GRACE_MS": "100"})
    batch_id = site.submit(lines)
    site.until_called(1)
    first.terminate()
    assert first.wait() == 0
    site.relieve()
    site.judge(batch_id, lines, repeats_max=IN_FLIGHT)


@CLUSTER_IN_SOAK
def test_killed_while_it_stops(site: Site) -> None:
    lines = requests(24, lambda number: behaving("latency=300"))
    first = site.begin("stop_released=kill")
    batch_id = site.submit(lines)
    site.until_called(IN_FLIGHT + 1)
    first.terminate()
    assert first.wait() == -9
    loss = site.loss()
    site.relieve()
    site.judge(batch_id, lines, repeats_max=2 * IN_FLIGHT, loss=loss)


def test_unsent_items_run_elsewhere_while_calls_in_flight_end(cluster: Site) -> None:
    """A slow call holds its worker; everything behind it, in the same slice too, is done by the other long before."""
    lines = requests(20, lambda number: behaving("latency=8000") if number == 0 else "go on")
    first = cluster.begin(more={"TIDEGATE_WORKER_GRACE_MS": "20000", "TIDEGATE_WORKER_IN_FLIGHT_MAX": "1"})
    batch_id = cluster.submit(lines)
    cluster.until_called(1)
    first.terminate()
    cluster.relieve()
    all_but_one = len(lines) - 1
    wait_until(
        lambda: cluster.batch(batch_id)["request_counts"]["completed"] == all_but_one,
        END_S,
        "all but the slow call",
        poll_s=ASK_S,
    )
    assert first.running, "the slow call is still out"
    assert first.wait() == 0
    cluster.judge(batch_id, lines)


@pytest.mark.soak
def test_two_workers_are_replaced_twice_under_load(cluster: Site) -> None:
    lines = requests(96, lambda number: behaving("latency=200"))
    working = [cluster.begin(), cluster.worker()]
    batch_id = cluster.submit(lines)
    for called in (8, 24, 40, 56):
        cluster.until_called(called)
        old = working.pop(0)
        working.append(cluster.worker(name="newer"))
        old.terminate()
        assert old.wait() == 0, old.logs()
    cluster.judge(batch_id, lines)


def test_a_process_that_stops_is_not_ready_and_still_answers(embedded: Site) -> None:
    lines = requests(2, lambda number: behaving("latency=4000"))
    proc = embedded.serve()
    batch_id = embedded.submit(lines)
    embedded.until_called(2)
    proc.terminate()
    ready = embedded.client().get("/readyz")
    assert (ready.status_code, "stopping" in ready.json()["checks"]["process"]) == (503, True)
    assert embedded.client().get("/healthz").status_code == 200
    assert embedded.batch(batch_id)["status"] == "in_progress"
    assert proc.wait() == 0
    embedded.relieve()
    embedded.judge(batch_id, lines)


def test_a_clean_end_still_does_what_was_registered_for_it() -> None:
    registered = "import atexit; atexit.register(print, 'done at the end')"
    code = f"{registered}; from tidegate.cli.terminal.signals import exit_now; exit_now(3)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout) == (3, "done at the end\n")


@pytest.mark.soak
def test_a_stop_with_downloads_that_are_not_read_ends_within_the_grace(embedded: Site) -> None:
    grace_s = 10.0
    proc = embedded.serve(more={"TIDEGATE_WORKER_GRACE_MS": str(int(grace_s * 1000))})
    file = embedded.upload(["x" * 500_000] * 16).json()["id"]
    host, _, port = embedded.url.removeprefix("http://").rpartition(":")
    state = [socket.create_connection((host, int(port))) for _ in range(200)]
    try:
        for one in state:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            one.sendall(f"GET /v1/files/{file}/content HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        for one in state:
            assert one.recv(1024).startswith(b"HTTP/1.1 200")
        proc.terminate()
        assert proc.wait(grace_s) == 0, proc.logs()
    finally:
        for one in state:
            one.close()
