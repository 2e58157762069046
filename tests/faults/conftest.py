"""Sites for the fault tests: the same test on both stores."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.engine import Engine
from tests.support.postgres import PostgresServer
from tests.support.processes import Processes
from tests.support.tidegate import Site

LATENCY_MS = 100
# Longer than a crash and recovery of the database or of a disk takes: what is tested is the outage, not the lease.
PATIENT = {"TIDEGATE_WORKER_LEASE_MS": "20000"}

MakeSite = Callable[[str], Site]

# For a test of `site` whose faults meet no code of one store alone: contracts, and kills at every border, hold both stores to the same.
CLUSTER_IN_SOAK = pytest.mark.parametrize(
    "site", ["embedded", pytest.param("cluster", marks=pytest.mark.soak)], indirect=True
)


@pytest.fixture
def slow_engine(processes: Processes, tmp_path: Path) -> Engine:
    """An engine whose every answer takes a little, so that something is always in flight."""
    return Engine(processes, tmp_path / "engine", latency_ms=LATENCY_MS)


@pytest.fixture
def make_site(
    request: pytest.FixtureRequest, processes: Processes, tmp_path: Path, slow_engine: Engine
) -> Iterator[MakeSite]:
    """Make a site of a kind; its database and bucket are fetched only when it has some, and outlive its processes."""
    sites: list[Site] = []

    def make(kind: str) -> Site:
        env = request.getfixturevalue("cluster_env") if kind == "cluster" else {}
        sites.append(Site(kind, processes, tmp_path, slow_engine, env))
        return sites[-1]

    yield make
    for site in sites:
        site.processes.close()


@pytest.fixture(params=["embedded", "cluster"])
def site(request: pytest.FixtureRequest, make_site: MakeSite) -> Site:
    """The same test on both stores."""
    return make_site(request.param)


@pytest.fixture
def embedded(make_site: MakeSite) -> Site:
    return make_site("embedded")


@pytest.fixture
def cluster(make_site: MakeSite) -> Site:
    return make_site("cluster")


@pytest.fixture
def crashing(cluster: Site, private_postgres_server: PostgresServer) -> Site:
    """A cluster over a PostgreSQL of its own."""
    cluster.env["TIDEGATE_STORE_URL"] = private_postgres_server.create_database()
    return cluster
