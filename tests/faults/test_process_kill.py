"""kill -9 at every phase border, on both stores: another process goes on, nothing is lost, nothing comes twice, little is paid twice."""

from __future__ import annotations

import pytest

from tests.faults.conftest import CLUSTER_IN_SOAK
from tests.support.tidegate import IN_FLIGHT, Site, behaving, requests

# Where it dies, and how many calls that may have been billed are made again because of it, at most. Which ones may be is exact: those that
# had been called and are not durable. Where answers wait for a flush, that is the whole bound.
BORDERS: dict[str, int | None] = {
    "ingest_taken=kill": 0,
    "ingest_work_durable=kill": 0,
    "ingest_committed=kill": 0,
    "lease_committed=kill": 0,
    "before_send=kill": 0,
    "after_answer=kill": IN_FLIGHT,
    "record_durable=kill": None,
    "record_committed=kill": None,
    "publish_committed=kill": 0,
}
# The first border of each stage: on PostgreSQL the others run in the soak, because contracts hold both stores to the same.
QUICK = ("ingest_taken=kill", "before_send=kill", "record_durable=kill", "publish_committed=kill")
LATER = ["lease_committed=2*kill", "before_send=9*kill", "after_answer=9*kill", "record_durable=2*kill"]


def _killed_at(site: Site, border: str, repeats_max: int | None) -> None:
    lines = requests(24)
    victim = site.begin(border)
    batch_id = site.submit(lines)
    assert victim.wait() == -9
    loss = site.loss()
    # At a later pass, answers of earlier calls may be durable too.
    if "*" not in border:
        assert bool(loss.durable) == border.startswith(("record_", "publish_"))
    site.relieve()
    site.judge(batch_id, lines, repeats_max=repeats_max, loss=loss)


@pytest.mark.parametrize(
    ("site", "border"),
    [
        pytest.param(kind, border, marks=[pytest.mark.soak] if kind == "cluster" and border not in QUICK else [])
        for kind in ("embedded", "cluster")
        for border in BORDERS
    ],
    indirect=["site"],
)
def test_a_worker_killed_at_a_border(site: Site, border: str) -> None:
    _killed_at(site, border, BORDERS[border])


@pytest.mark.soak
@pytest.mark.parametrize("border", LATER)
def test_a_worker_killed_at_a_later_pass(site: Site, border: str) -> None:
    _killed_at(site, border, None)


def test_a_worker_killed_after_many_commits(embedded: Site) -> None:
    lines = requests(24)
    victim = embedded.begin("record_committed=3*kill")
    batch_id = embedded.submit(lines)
    assert victim.wait() == -9
    loss = embedded.loss()
    assert len(loss.durable) >= IN_FLIGHT
    embedded.relieve()
    embedded.judge(batch_id, lines, repeats_max=None, loss=loss)


@CLUSTER_IN_SOAK
@pytest.mark.parametrize("border", ["job_closed=kill", "publish_rest_durable=kill"])
def test_a_worker_killed_while_it_closes_a_job(site: Site, border: str) -> None:
    lines = requests(24, lambda number: behaving("latency=200"))
    victim = site.begin(border)
    batch_id = site.submit(lines)
    site.until_called(IN_FLIGHT + 1)
    assert site.cancel(batch_id).status_code == 200
    assert victim.wait() == -9
    site.relieve()
    results = site.judge(batch_id, lines, "cancelled")
    assert len(results.output) >= IN_FLIGHT
    assert set(results.error_codes()) == {"batch_cancelled"}


def test_both_workers_killed_in_turn_under_load(cluster: Site) -> None:
    lines = requests(48)
    first = cluster.begin("after_answer=5*kill")
    second = cluster.worker("record_durable=1*kill", name="second")
    batch_id = cluster.submit(lines)
    assert first.wait() == -9
    assert second.wait() == -9
    loss = cluster.loss()
    assert loss.durable
    cluster.relieve()
    cluster.judge(batch_id, lines, repeats_max=None, loss=loss)
