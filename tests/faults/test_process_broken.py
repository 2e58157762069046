"""A worker process that meets an internal error hands back what it holds and exits with 70; its health can be asked for meanwhile."""

from __future__ import annotations

import httpx2

from tests.support.processes import free_port, wait_until
from tests.support.tidegate import ASK_S, END_S, Site, behaving, requests


def test_a_broken_worker_process_drains_not_ready_and_exits_70(cluster: Site) -> None:
    lines = requests(24, lambda number: behaving("latency=1500"))
    port = free_port()
    cluster.api()
    victim = cluster.worker("lease_committed=1*raise", {"TIDEGATE_METRICS_PORT": str(port)})
    with httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=30, trust_env=False) as health:
        assert health.get("/healthz").status_code == 200
        assert health.get("/readyz").status_code == 200
        batch_id = cluster.submit(lines)
        wait_until(lambda: health.get("/readyz").status_code == 503, END_S, "the worker to be broken", poll_s=ASK_S)
        assert health.get("/healthz").status_code == 200
        assert "tidegate_worker_broken 1.0" in health.get("/metrics").text
    assert victim.wait() == 70
    assert "worker_broken" in victim.stderr()
    assert not cluster.rows("select first from slices where state = 'leased' or lost_count > 0")
    cluster.relieve()
    cluster.judge(batch_id, lines)


def test_serve_restarts_its_worker_and_goes_on(embedded: Site) -> None:
    lines = requests(24)
    proc = embedded.serve("ingest_taken=raise")
    batch_id = embedded.submit(lines)
    wait_until(lambda: proc.stderr().count("worker_restarting") >= 2, END_S, "two restarts", poll_s=ASK_S)
    assert embedded.client().get("/healthz").status_code == 200
    assert embedded.client().get("/readyz").status_code == 503
    assert embedded.batch(batch_id)["status"] == "validating"
    proc.kill()
    proc.wait()
    embedded.relieve()
    alive = embedded.rows("select id from workers where state = 'alive' and runs_items = 1")
    assert len(alive) == 1, "the lease of the one that was killed need not be waited for"
    embedded.judge(batch_id, lines)
