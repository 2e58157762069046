"""Failures that another batch gateway pinned as broken, under the names that it gave them."""

from __future__ import annotations

import httpx2
import pytest

from tests.faults.conftest import CLUSTER_IN_SOAK
from tests.support.processes import wait_until
from tests.support.tidegate import ASK_S, END_S, IN_FLIGHT, UNRECORDED_MAX, Site, behaving, requests, until_stopped


@CLUSTER_IN_SOAK
def test_create_crash_after_store(site: Site) -> None:
    """The API dies when the bytes are stored and no row names them: no caller sees them, and they are collected."""
    lines = requests(4)
    front = site.serve("upload_blob_durable=kill") if site.embedded else site.api("upload_blob_durable=kill")
    with pytest.raises(httpx2.TransportError):
        site.upload(lines, key="once")
    assert front.wait() == -9
    assert len(site.blobs()) == 1
    site.begin()
    assert site.get("/v1/files")["data"] == []
    batch_id = site.submit(lines)
    site.judge(batch_id, lines)
    site.end_all()
    # Until then the dead API could still be writing them.
    wait_until(site.lease_ran_out, END_S, "the lease of the API that died to run out", poll_s=ASK_S)
    site.collect_garbage()
    named = site.named_blobs()
    assert site.blobs() == named, site.rows("select * from blobs")


def test_cancel_event_lost(cluster: Site) -> None:
    """The notice of the cancel is lost, and the API dies at once: the store is the signal."""
    lines = requests(40, lambda number: behaving("latency=300"))
    worker = cluster.begin()
    batch_id = cluster.submit(lines)
    cluster.until_called(IN_FLIGHT + 1)
    worker.stop()
    assert cluster.cancel(batch_id).status_code == 200
    assert cluster.front is not None
    cluster.front.kill()
    worker.cont()
    cluster.api()
    results = cluster.judge(batch_id, lines, "cancelled")
    assert len(results.output) >= IN_FLIGHT
    assert set(results.error_codes()) == {"batch_cancelled"}


@CLUSTER_IN_SOAK
def test_orphaned_blob(site: Site) -> None:
    """The finaliser dies when its file is stored and no row names it: one file is seen, and the orphan is collected."""
    lines = requests(24, lambda number: behaving("latency=200"))
    victim = site.begin("publish_rest_durable=kill")
    batch_id = site.submit(lines)
    site.until_called(IN_FLIGHT + 1)
    assert site.cancel(batch_id).status_code == 200
    assert victim.wait() == -9
    site.relieve()
    results = site.judge(batch_id, lines, "cancelled")
    assert len(site.get("/v1/files")["data"]) == 3, "the input, the output and the errors, each once"
    site.end_all()
    before = site.blobs()
    site.collect_garbage()
    assert site.blobs() == site.named_blobs() < before
    site.relieve() if site.embedded else site.api()
    assert site.ended(batch_id) == results


def test_finalization_strand(site: Site) -> None:
    """A job is left in finalizing by a finaliser that dies each time: it is never stuck, and its files appear once."""
    lines = requests(12)
    victim = site.begin("record_committed=kill" if not site.embedded else "job_closed=kill,record_committed=2*kill")
    batch_id = site.submit(lines)
    assert victim.wait() == -9
    again = site.relieve(more={"TIDEGATE_FAILPOINTS": "publish_committed=kill"})
    assert again.wait() == -9
    site.relieve()
    results = site.judge(batch_id, lines, repeats_max=UNRECORDED_MAX)
    assert len(site.get("/v1/files")["data"]) == 2, "the input and the output, once"
    assert results.batch["error_file_id"] is None


def test_zombie_owner_burns_inference(cluster: Site) -> None:
    """A worker stopped past its lease wakes with items in its hands: it calls nothing, since another has taken them over."""
    lines = requests(24, lambda number: behaving("latency=300"))
    zombie = cluster.begin()
    batch_id = cluster.submit(lines)
    cluster.until_called(IN_FLIGHT + 1)
    zombie.stop()
    until_stopped(zombie)
    cluster.relieve()
    results = cluster.judge(batch_id, lines, repeats_max=2 * IN_FLIGHT)
    calls = cluster.calls()
    zombie.cont()
    zombie.wait_for_line("incarnation_lost")
    wait_until(lambda: cluster.living() == 3, END_S, "the zombie to be enlisted again", poll_s=ASK_S)
    assert cluster.calls() == calls
    assert cluster.ended(batch_id) == results
    cluster.verify(batch_id)
