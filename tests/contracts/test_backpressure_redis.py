"""Back-pressure of a model between two processes' routers through a real Redis, and by oneself where there is none."""

from __future__ import annotations

import secrets

import pytest
from msgspec.structs import replace

from tests.support.processes import free_port, wait_until_async
from tests.upstream.raw_server import RawServer
from tests.upstream.world import RouterWorld
from tidegate.backends.shared_redis import RedisShared
from tidegate.backends.system import SystemClock, SystemEntropy
from tidegate.core.deployments import Deployment, HttpLimits
from tidegate.core.errors import UpstreamError
from tidegate.core.schedule import Reason
from tidegate.upstream.calls.open_router import open_router
from tidegate.upstream.calls.router import Router
from tidegate.upstream.routing.deployment_state import DeploymentPolicy
from tidegate.upstream.routing.slots import Capacity

pytestmark = pytest.mark.anyio

LONG_S = 60.0
AWAY = Deployment(name="d", url="http://127.0.0.1:1/v1", models=("m",))


def router(place: Deployment, shared: RedisShared) -> Router:
    policy = DeploymentPolicy(model_rest_ms_min=120_000)
    made = open_router(HttpLimits(), SystemClock(), SystemEntropy(), policy, Capacity(rests=shared))
    made.serve([place])
    return made


async def open_circuit(sick: Router) -> None:
    world = RouterWorld()
    while sick.status()[0].state != "open":
        world.clock.monotonic = SystemClock().monotonic_ms()
        with pytest.raises(UpstreamError):
            await sick.send(world.call())


async def test_an_open_circuit_of_one_process_closes_the_deployment_in_the_other(redis_url: str) -> None:
    name = f"t-{secrets.token_hex(8)}"
    one, two = (RedisShared(redis_url, name, SystemClock(), SystemEntropy()) for _ in range(2))
    one.start()
    two.start()
    async with RawServer() as server:
        healthy = replace(AWAY, url=server.url)
        first, second = router(AWAY, one), router(healthy, two)
        try:
            await open_circuit(first)
            await wait_until_async(lambda: "model:m" in two.current(), LONG_S, "the word to come")
            # Every process looks again when it asks for its slots; here, when its deployments are replaced.
            second.replace([healthy], ())
            assert (second.free_slots("m"), second.closed("m")) == (0, Reason.UNHEALTHY)
        finally:
            await first.close()
            await second.close()
            await one.close()
            await two.close()
    assert server.posts == []


async def test_without_redis_a_process_knows_its_own_open_circuits() -> None:
    alone = RedisShared(f"redis://127.0.0.1:{free_port()}/0", "t", SystemClock(), SystemEntropy())
    alone.start()
    sick = router(AWAY, alone)
    try:
        await open_circuit(sick)
        assert "model:m" in alone.current()
    finally:
        await sick.close()
        await alone.close()
