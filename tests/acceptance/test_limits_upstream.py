"""Upstreams that refuse or fail for a while, before several workers: nothing is given up for it, and the model comes back by itself."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from tests.acceptance.conftest import MakeCrew
from tests.support.crew import Crew, deployment
from tests.support.processes import wait_until
from tests.support.tidegate import END_S, requests

WORKERS = 2
POLL_S = 0.2
ITEMS = 160
OUTAGE_S_MAX = 160


def _probes(crew: Crew) -> int:
    """How often a worker probed it in vain."""
    return sum(call["path"] == "/v1/models" and call["status"] == 503 for call in crew.site.engine.calls())


def _comes_back(make_crew: MakeCrew, over: Callable[[Crew, float], bool]) -> None:
    crew = make_crew(lambda url: {"models": {"m": deployment(url), "well": deployment(url)}}, latency_ms=20)
    crew.start(WORKERS)
    warm = crew.site.submit(requests(40))
    assert crew.site.ended(warm).batch["request_counts"]["completed"] == 40
    crew.site.engine.set_faults({"503": 1.0})
    began = time.time()
    batch_id = crew.site.submit(requests(ITEMS))
    wait_until(lambda: over(crew, began), OUTAGE_S_MAX, "the outage to have gone on for long enough", poll_s=POLL_S)
    counts = crew.site.batch(batch_id)["request_counts"]
    assert (counts["completed"], counts["failed"]) == (0, 0)
    crew.site.engine.set_faults()
    results = crew.site.ended(batch_id, timeout_s=100)
    assert (len(results.output), results.errors) == (ITEMS, [])
    crew.site.verify(batch_id)


@pytest.mark.soak
def test_a_burst_of_503_ends_and_the_model_comes_back_by_itself(make_crew: MakeCrew) -> None:
    """Measured elsewhere: a short burst blocks a model for ever. Each worker has opened its circuit and probed it in vain twice or more."""
    _comes_back(
        make_crew,
        lambda crew, began: (
            all("upstream_circuit_opened" in worker.stdout() + worker.stderr() for worker in crew.workers)
            and _probes(crew) >= 3
        ),
    )


@pytest.mark.soak
@pytest.mark.timeout(400)
def test_an_outage_of_150_s_ends_and_the_model_comes_back_by_itself(make_crew: MakeCrew) -> None:
    _comes_back(make_crew, lambda crew, began: time.time() >= began + 150)


def test_a_429_never_uses_up_an_attempt(make_crew: MakeCrew) -> None:
    """Measured elsewhere: three refusals, and the item has failed. Here many more than an item has attempts, and none is counted."""
    crew = make_crew(lambda url: {"models": {"m": deployment(url)}}, latency_ms=20)
    crew.start(WORKERS)
    crew.site.engine.set_faults({"429:ra=0": 1.0})
    lines = requests(8)
    batch_id = crew.site.submit(lines)
    most = crew.site.settings.retry.attempts_max
    wait_until(
        lambda: _most_refused(crew) > most, END_S, f"an item to be refused more than {most} times", poll_s=POLL_S
    )
    counted = crew.site.rows("select coalesce(max(count), 0) as most from attempts")[0]["most"]
    crew.site.engine.set_faults()
    assert counted == 0
    assert crew.site.judge(batch_id, lines).errors == []


def _most_refused(crew: Crew) -> int:
    refused = [call["idempotency_key"] for call in crew.calls() if call["status"] == 429]
    return max((refused.count(key) for key in set(refused)), default=0)
