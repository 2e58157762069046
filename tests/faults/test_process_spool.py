"""Answers that lie durable in a killed worker's spool are not paid for again, although another host's worker sweeps first."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.processes import Proc, wait_until
from tests.support.tidegate import ASK_S, END_S, Loss, Site, requests

LINES = requests(24)
# Long enough for two processes to start on a busy machine.
LONG_LEASE = {"TIDEGATE_WORKER_LEASE_MS": "10000"}


def spooled(data: Path) -> list[Path]:
    return [path for path in (data / "spool").glob("blob_*") if path.read_bytes().endswith(b"\n")]


def killed_with_a_full_spool(site: Site) -> tuple[str, Loss, list[Path]]:
    """A worker with a disk of its own answers items, makes them durable in its spool and dies before they are stored."""
    site.api()
    victim = site.worker("record_durable=2*kill", name="victim")
    batch_id = site.submit(LINES)
    assert victim.wait() == -9
    left = spooled(site.data)
    assert left
    return batch_id, site.loss(), left


def other_host(site: Site, failpoints: str = "") -> Proc:
    return site.worker(failpoints, data=site.directory / "elsewhere", name="elsewhere")


def test_the_worker_that_comes_back_delivers_its_spool_before_others_run_it_again(cluster: Site) -> None:
    cluster.env |= LONG_LEASE
    batch_id, loss, left = killed_with_a_full_spool(cluster)
    other_host(cluster)
    cluster.worker(name="back")
    cluster.judge(batch_id, LINES, repeats_max=None, loss=loss)
    assert not any(path.exists() for path in left)


def test_a_lost_disk_costs_no_more_than_what_lay_on_it(cluster: Site) -> None:
    batch_id, loss, _ = killed_with_a_full_spool(cluster)
    recorded = cluster.batch(batch_id)["request_counts"]["completed"]
    other_host(cluster)
    cluster.judge(batch_id, LINES, repeats_max=len(loss.calls) - recorded)


@pytest.mark.soak
def test_an_owner_that_returns_late_still_delivers_what_has_no_outcome(cluster: Site) -> None:
    """Another host has given the spool up, and its item hangs there: the late answer ends the batch."""
    batch_id, loss, left = killed_with_a_full_spool(cluster)

    def is_given_up() -> bool:
        # The other host begins logs of its own.
        writing = {row["id"] for row in cluster.rows("select id from blobs where state = 'writing'")}
        return writing.isdisjoint(path.name for path in left)

    assert not is_given_up()
    stuck = other_host(cluster, "before_send=sleep:60")
    wait_until(is_given_up, END_S, "the log to be given up", poll_s=ASK_S)
    late = cluster.worker("before_send=sleep:60", name="late")
    cluster.until_done(batch_id, len(loss.durable))
    assert not any(path.exists() for path in left)
    for proc in (stuck, late):
        proc.kill()
        proc.wait()
    cluster.worker(name="last")
    cluster.judge(batch_id, LINES, repeats_max=None, loss=loss)
