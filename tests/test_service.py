"""How the parts of one process are put together: what the settings say reaches the part that it is for."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from tidegate import service
from tidegate.backends.limits_redis import RedisLimits
from tidegate.core.deployments import HttpLimits
from tidegate.settings import load
from tidegate.upstream.calls.open_router import open_router
from tidegate.upstream.routing.slots import Capacity

pytestmark = pytest.mark.anyio

CONFIG = """\
models: {m: {in_flight_max: 3, deployments: [{url: "http://127.0.0.1:9/v1"}]}}
worker: {in_flight_max: 5, in_flight_max_global: 7}
http: {connections_max: 9, kept_alive_max: 9}
"""


@pytest.mark.parametrize("is_shared", [False, True], ids=["embedded", "postgresql"])
async def test_the_router_gets_every_limit_and_channel_that_processes_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, migrated_postgres_url: str, redis_url: str, is_shared: bool
) -> None:
    made: list[Capacity] = []

    def noted(limits: Any, clock: Any, entropy: Any, policy: Any, capacity: Capacity, *rest: Any) -> Any:
        made.append(capacity)
        return open_router(limits, clock, entropy, policy, capacity, *rest)

    roomy: list[HttpLimits] = []
    monkeypatch.setattr(service, "open_router", noted)
    monkeypatch.setattr(service, "make_room_for_connections", roomy.append)
    config = tmp_path / "c.yaml"
    config.write_text(CONFIG)
    store = {"store.url": migrated_postgres_url} if is_shared else {}
    settings = load(config, tmp_path / "data", {"redis.url": redis_url, **store}, {}).settings
    async with service.working(settings) as working:
        [capacity] = made
        assert [one.connections_max for one in roomy] == [9], "this process may open as many files"
        assert isinstance(capacity.limits, RedisLimits)
        assert (capacity.worker_id and capacity.worker_id()) == (working.incarnation.id if is_shared else None)
        assert capacity.discovered is working.parts.store
        assert capacity.fleet is working.parts.store
        assert capacity.rests is working.parts.shared
        assert capacity.notices is working.parts.shared
        assert capacity.rests is not None
        assert (dict(capacity.model_in_flight_max), capacity.in_flight_max_global, capacity.in_flight_max) == (
            {"m": 3},
            7,
            5,
        )
        assert capacity.runs_items
        assert capacity.safe_until_ms() == working.incarnation.safe_until_ms < math.inf
        assert working.router.names() == ["m"]
