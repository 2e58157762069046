"""The health that an API process shows of a deployment which only workers call."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from tidegate.core.ports import DeploymentTrouble, ReportedWorker, WorkerReport
from tidegate.upstream.routing.deployment_status import DeploymentStatus
from tidegate.web.jobs.reported_health import reported_status, reported_troubles

CLOSED = DeploymentStatus("gpu", "http://gpu/v1", ("m",), "closed", 0, 0, 8, 0, 0, {}, "")
DOWN = DeploymentTrouble("gpu", False, 90_000, "connection refused")
REJECTED = DeploymentTrouble("cloud", True, 5_000, "status 401")


def worker(*troubles: DeploymentTrouble, is_alive: bool = True) -> ReportedWorker:
    return ReportedWorker("host", is_alive, 0, WorkerReport("", troubles))


def test_the_longest_trouble_that_a_living_worker_reports_counts() -> None:
    brief = replace(DOWN, for_ms=10)
    workers = [
        worker(brief),
        worker(DOWN, REJECTED),
        worker(brief),
        worker(replace(DOWN, for_ms=10**9), is_alive=False),
    ]
    assert reported_troubles(workers) == {"gpu": DOWN, "cloud": REJECTED}
    assert reported_troubles([worker(), worker(DOWN, is_alive=False)]) == {}


@pytest.mark.parametrize("own", [CLOSED, replace(CLOSED, open_for_ms=7), replace(CLOSED, is_drained=True)])
def test_what_this_process_knows_itself_stays(own: DeploymentStatus) -> None:
    assert reported_status(own, None) is own
    assert (reported_status(own, DOWN) is own) is (own is not CLOSED)


@pytest.mark.parametrize(("trouble", "state"), [(DOWN, "open"), (REJECTED, "paused")])
def test_a_workers_report_is_shown_as_if_it_were_this_processes(trouble: DeploymentTrouble, state: str) -> None:
    found = reported_status(CLOSED, trouble)
    assert (found.state, found.last_failure, found.open_for_ms) == (state, trouble.why, trouble.for_ms)
    assert found.is_key_rejected is trouble.is_key_rejected
    assert replace(found, state="closed", last_failure="", open_for_ms=None, is_key_rejected=False) == CLOSED
