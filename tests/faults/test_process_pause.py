"""A worker that stops for longer than its lease and then goes on as if nothing had happened: a zombie can do no harm.

In a cluster another worker takes over, and the zombie must find that out before it calls, records or publishes anything. An embedded
site has one process, which must find itself again.
"""

from __future__ import annotations

import pytest

from tests.support.processes import Proc, wait_until
from tests.support.tidegate import ASK_S, END_S, IN_FLIGHT, UNRECORDED_MAX, Site, behaving, requests, until_stopped

# Where it stops, and how many calls that may have been billed are made again because of it.
BORDERS = {
    "ingest_taken=stop": 0,
    "ingest_work_durable=stop": 0,
    "ingest_committed=stop": 0,
    "lease_committed=stop": 0,
    "before_send=stop": 0,
    "after_answer=stop": UNRECORDED_MAX,
    "record_durable=stop": UNRECORDED_MAX,
    "record_committed=stop": UNRECORDED_MAX,
    "publish_committed=stop": 0,
}
# Where another may have done most meanwhile, and where money is at stake; seeds of the simulation stop anywhere.
QUICK = ("ingest_taken=stop", "before_send=stop", "record_durable=stop")
EVERY_BORDER = [border if border in QUICK else pytest.param(border, marks=pytest.mark.soak) for border in BORDERS]


@pytest.mark.parametrize("border", EVERY_BORDER)
def test_a_zombie_finds_its_work_done_by_another(cluster: Site, border: str) -> None:
    lines = requests(16)
    zombie = cluster.begin(border)
    batch_id = cluster.submit(lines)
    until_stopped(zombie)
    cluster.relieve()
    results = cluster.judge(batch_id, lines, repeats_max=BORDERS[border])
    calls = len(cluster.calls())
    _wakes(cluster, zombie)
    # One call had passed the last look at the lease when it was stopped; nothing begins after it.
    assert len(cluster.calls()) <= calls + (1 if border.startswith("before_send") else 0)
    assert cluster.ended(batch_id) == results
    cluster.verify(batch_id)


def _wakes(site: Site, zombie: Proc) -> None:
    """Let a worker go on after it was declared gone, until it has begun another life."""
    wait_until(lambda: site.is_gone(zombie), END_S, "the worker to be declared gone", poll_s=ASK_S)
    zombie.cont()
    zombie.wait_for_line("incarnation_lost")
    wait_until(lambda: site.living() == 3, END_S, "the zombie to be enlisted again", poll_s=ASK_S)


@pytest.mark.parametrize("border", EVERY_BORDER)
def test_an_embedded_process_wakes_after_its_lease(embedded: Site, border: str) -> None:
    lines = requests(16)
    sleeper = embedded.begin(border)
    batch_id = embedded.submit(lines)
    until_stopped(sleeper)
    wait_until(embedded.lease_ran_out, END_S, "the lease to run out", poll_s=ASK_S)
    sleeper.cont()
    embedded.judge(batch_id, lines, repeats_max=BORDERS[border])


@pytest.mark.parametrize("border", ["job_closed=stop", "publish_rest_durable=stop"])
def test_a_zombie_finds_its_job_closed_by_another(cluster: Site, border: str) -> None:
    lines = requests(16, lambda number: behaving("latency=200"))
    zombie = cluster.begin(border)
    batch_id = cluster.submit(lines)
    cluster.until_called(IN_FLIGHT + 1)
    assert cluster.cancel(batch_id).status_code == 200
    until_stopped(zombie)
    cluster.relieve()
    results = cluster.judge(batch_id, lines, "cancelled")
    calls = len(cluster.calls())
    _wakes(cluster, zombie)
    assert len(cluster.calls()) == calls
    assert cluster.ended(batch_id) == results
    cluster.verify(batch_id)


@pytest.mark.parametrize("border", ["job_closed=stop", "publish_rest_durable=stop"])
def test_an_embedded_process_wakes_in_the_middle_of_closing(embedded: Site, border: str) -> None:
    lines = requests(16, lambda number: behaving("latency=200"))
    sleeper = embedded.begin(border)
    batch_id = embedded.submit(lines)
    embedded.until_called(IN_FLIGHT + 1)
    assert embedded.cancel(batch_id).status_code == 200
    until_stopped(sleeper)
    wait_until(embedded.lease_ran_out, END_S, "the lease to run out", poll_s=ASK_S)
    calls = len(embedded.calls())
    sleeper.cont()
    embedded.judge(batch_id, lines, "cancelled")
    assert len(embedded.calls()) == calls
