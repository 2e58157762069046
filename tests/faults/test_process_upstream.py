"""An upstream that throttles, fails or refuses our key for a while: no item is given up for it, and all complete when it ends."""

from __future__ import annotations

import pytest

from tests.support.tidegate import IN_FLIGHT, Site, requests

OPENS_AFTER = 5


@pytest.mark.parametrize("fault", ["429:ra=1", pytest.param("429", marks=pytest.mark.soak)])
def test_a_storm_of_429_uses_up_no_attempt(embedded: Site, fault: str) -> None:
    lines = requests(24)
    embedded.begin()
    embedded.engine.set_faults({fault: 1.0})
    batch_id = embedded.submit(lines)
    embedded.until_called(8)
    assert embedded.batch(batch_id)["request_counts"]["failed"] == 0
    embedded.engine.set_faults()
    results = embedded.judge(batch_id, lines)
    assert results.errors == []
    assert embedded.rows("select max(count) as most from attempts")[0]["most"] in (None, 0)


@pytest.mark.parametrize("fault", ["503", pytest.param("500", marks=pytest.mark.soak)])
def test_a_burst_of_5xx_opens_the_circuit_until_a_probe_is_answered(embedded: Site, fault: str) -> None:
    # Retries may be a tenth of first calls: so many that all of them have room within a minute.
    lines = requests(160)
    proc = embedded.begin()
    embedded.engine.set_faults({fault: 1.0})
    batch_id = embedded.submit(lines)
    proc.wait_for_line("upstream_circuit_opened")
    embedded.engine.set_faults()
    proc.wait_for_line("upstream_recovered")
    # A deployment with an open circuit is not called: only what was in flight when it opened failed too.
    results = embedded.judge(batch_id, lines, repeats_max=OPENS_AFTER + IN_FLIGHT)
    assert results.errors == []


def test_a_rejected_key_pauses_the_deployment_and_fails_nothing(embedded: Site) -> None:
    lines = requests(24)
    proc = embedded.begin()
    embedded.engine.set_faults({"401": 1.0})
    batch_id = embedded.submit(lines)
    proc.wait_for_line("upstream_key_rejected")
    assert len(embedded.calls()) <= IN_FLIGHT + 1, "a paused deployment is not called"
    assert embedded.batch(batch_id)["status"] == "in_progress"
    assert embedded.batch(batch_id)["request_counts"]["failed"] == 0
    embedded.cancel(batch_id)
    results = embedded.judge(batch_id, lines, "cancelled")
    assert results.error_codes() == {"batch_cancelled": 24}


@pytest.mark.soak
@pytest.mark.timeout(200)
def test_a_key_that_is_accepted_again_is_found_by_a_probe(embedded: Site) -> None:
    lines = requests(24)
    proc = embedded.begin()
    embedded.engine.set_faults({"401": 1.0})
    batch_id = embedded.submit(lines)
    proc.wait_for_line("upstream_key_rejected")
    embedded.engine.set_faults()
    proc.wait_for_line("upstream_recovered", 90)
    assert embedded.judge(batch_id, lines).errors == []
