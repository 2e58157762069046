"""kill -9 at every phase border, on both stores: another process goes on, nothing is lost, nothing comes twice, little is paid twice."""

from __future__ import annotations

import pytest

from tests.support.tidegate import IN_FLIGHT, Site, requests

# Calls in flight, and answers that came in while the last flush was on its way to the disk.
UNRECORDED_MAX = 2 * IN_FLIGHT

# Where it dies, and how many calls that may have been billed are made again because of it.
BORDERS = {
    "ingest_taken=kill": 0,
    "ingest_work_durable=kill": 0,
    "ingest_committed=kill": 0,
    "lease_committed=kill": 0,
    "lease_committed=2*kill": UNRECORDED_MAX,
    "before_send=kill": 0,
    "before_send=9*kill": UNRECORDED_MAX,
    "after_answer=kill": UNRECORDED_MAX,
    "after_answer=9*kill": UNRECORDED_MAX,
    "record_durable=kill": UNRECORDED_MAX,
    "record_durable=2*kill": UNRECORDED_MAX,
    "record_committed=kill": UNRECORDED_MAX,
    "publish_committed=kill": 0,
}


@pytest.mark.parametrize("border", BORDERS)
def test_a_worker_killed_at_a_border(site: Site, border: str) -> None:
    lines = requests(24)
    victim = site.begin(border)
    batch_id = site.submit(lines)
    assert victim.wait() == -9
    kept = site.durable()
    site.relieve()
    site.judge(batch_id, lines, repeats_max=BORDERS[border], kept=kept)


def test_a_worker_killed_after_many_commits(embedded: Site) -> None:
    lines = requests(24)
    victim = embedded.begin("record_committed=3*kill")
    batch_id = embedded.submit(lines)
    assert victim.wait() == -9
    kept = embedded.durable()
    assert len(kept) >= IN_FLIGHT
    embedded.relieve()
    embedded.judge(batch_id, lines, repeats_max=UNRECORDED_MAX, kept=kept)
