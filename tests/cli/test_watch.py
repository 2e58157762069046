"""`tidegate batches watch` beside a server and from elsewhere, while the server is killed and started again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.engine import Engine
from tests.support.processes import Proc, Processes, free_port
from tests.support.tidegate import TIDEGATE, Site, behaving, requests

ITEMS = 60


@pytest.fixture
def site(processes: Processes, tmp_path: Path) -> Site:
    engine = Engine(processes, tmp_path / "engine", "--latency-ms", "200", mode="fixed")
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
    told = [json.loads(line) for line in elsewhere.stdout().splitlines()]
    assert told[-1]["event"] == "batch.completed"
    assert told[-1]["request_counts"]["completed"] == ITEMS - 1
    counts = [one["request_counts"]["completed"] for one in told]
    assert counts == sorted(counts)
    # One that has ended is told at once.
    again = watch(site, batch_id, "--server", site.url)
    assert again.wait(30) == 1
    assert f"{batch_id} completed: {ITEMS}/{ITEMS} done, 1 failed" in again.stderr()


def test_a_batch_that_is_not_there(site: Site) -> None:
    site.serve()
    absent = watch(site, "batch_0000000000000000000000", "--server", site.url)
    assert absent.wait(30) != 0
    assert "No batch found" in absent.stderr()
