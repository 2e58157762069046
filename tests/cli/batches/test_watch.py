"""`tidegate batches watch` beside a server and from elsewhere, while the server is killed and started again."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.support.engine import Engine
from tests.support.processes import Proc, Processes, free_port
from tests.support.tidegate import TIDEGATE, Site, behaving, requests
from tests.upstream.raw_server import Peer, Request
from tests.web.upstream import Upstream

ITEMS = 60


@pytest.fixture
def site(processes: Processes, tmp_path: Path) -> Site:
    engine = Engine(processes, tmp_path / "engine", latency_ms=200)
    # A server that comes back does so at the same address.
    port = {"TIDEGATE_SERVER_PORT": str(free_port())}
    return Site("embedded", processes, tmp_path, engine, port)


def watch(site: Site, batch_id: str, *more: str) -> Proc:
    return site.processes.start([TIDEGATE, "batches", "watch", batch_id, *more], name="watch", env=site.environment())


def test_watching_goes_on_over_a_restart(site: Site) -> None:
    server = site.serve()
    lines = requests(ITEMS, lambda number: behaving("400") if number == 7 else f"say {number}")
    batch_id = site.submit(lines)
    here = watch(site, batch_id, "--data", str(site.data))
    elsewhere = watch(site, batch_id, "--server", f"{site.url}/v1", "--json")
    elsewhere.wait_for_line("batch.progress")
    server.kill()
    server.wait()
    site.serve()
    assert (here.wait(90), elsewhere.wait(90)) == (1, 1)
    assert f"{batch_id} completed: {ITEMS}/{ITEMS} done, 1 failed" in here.stderr()
    events = [json.loads(line) for line in elsewhere.stdout().splitlines()]
    assert events[-1]["event"] == "batch.completed"
    assert events[-1]["request_counts"]["completed"] == ITEMS - 1
    counts = [one["request_counts"]["completed"] for one in events]
    assert counts == sorted(counts)
    # One that has ended is shown at once.
    again = watch(site, batch_id, "--server", site.url)
    assert again.wait(30) == 1
    assert f"{batch_id} completed: {ITEMS}/{ITEMS} done, 1 failed" in again.stderr()


def test_a_batch_that_is_not_there(site: Site) -> None:
    site.serve()
    absent = watch(site, "batch_0000000000000000000000", "--server", site.url)
    assert absent.wait(30) != 0
    assert "No batch found" in absent.stderr()


RESTING = {"id": "b", "request_counts": {"total": 3, "completed": 0, "failed": 0}, "usage": {}}


def event_text(kind: str, event_id: str, **fields: object) -> str:
    named = f"id: {event_id}\n" if event_id else ""
    return f"event: {kind}\n{named}data: {json.dumps({**RESTING, **fields})}\n\n"


def test_watching_goes_on_where_a_reset_says(processes: Processes, tmp_path: Path) -> None:
    """A reset that names an event means: go on behind it. One that names none means: from the start, on this connection and the next."""
    streams = [
        event_text("batch.in_progress", "1", status="in_progress") + event_text("batch.progress", "2") + event_text("reset", "1"),
        event_text("batch.progress", "2") + event_text("reset", "") + event_text("batch.validating", "", status="validating"),
        event_text("batch.completed", "9", status="completed", request_counts={"total": 3, "completed": 3, "failed": 0}),
    ]  # fmt: skip
    asked_from = []

    async def send_events(request: Request, peer: Peer) -> None:
        """A stream that ends: with `reset` where a reader was slow, or in the middle of one."""
        asked_from.append(request.headers.get("Last-Event-ID"))
        await peer.send(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n" + streams.pop(0).encode())
        peer.close()

    with Upstream(send_events) as server:
        command = [TIDEGATE, "batches", "watch", "batch_0000000000000000000000", "--server", server.url, "--json"]
        watching = processes.start(command, name="watch", env={**os.environ, "HOME": str(tmp_path)})
        assert watching.wait(60) == 0
    assert asked_from == [None, "1", None]
    events = [json.loads(line)["event"] for line in watching.stdout().splitlines()]
    assert events == ["batch.in_progress", "batch.progress", "batch.progress", "batch.validating", "batch.completed"]
