"""Crews for the acceptance tests: one API and four workers over PostgreSQL and S3, with a Redis of their own where a test wants one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.crew import Crew
from tests.support.engine import Engine
from tests.support.processes import Processes
from tests.support.redis import RedisServer
from tests.support.shims import Shims
from tests.support.tidegate import Site
from tests.web.conftest import world

MakeCrew = Callable[..., Crew]
# The world of the gateway, for what is tried there too.
__all__ = ["world"]


@pytest.fixture
def make_crew(processes: Processes, tmp_path: Path, shims: Shims, cluster_env: dict[str, str]) -> Iterator[MakeCrew]:
    """Make a crew, not started yet: `config` is given the engine's URL and gives the settings file, `more` are variables."""

    def make(
        config: Callable[[str], dict[str, Any]],
        latency_ms: int = 100,
        redis: RedisServer | None = None,
        more: dict[str, str] | None = None,
    ) -> Crew:
        engine = Engine(processes, tmp_path / "engine", latency_ms=latency_ms)
        site = Site("cluster", processes, tmp_path, engine, cluster_env | (more or {}))
        if redis is not None:
            site.env["TIDEGATE_REDIS_URL"] = redis.url
        site.configure(**config(engine.url))
        return Crew(site, shims.sends())

    yield make
    # Before the database and the bucket go.
    processes.close()
