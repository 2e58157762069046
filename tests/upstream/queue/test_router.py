"""Slots, budgets, breaker and failover of deployments with a queue: the router treats them as it treats all others."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.support.ports import FairDice, HandClock
from tests.support.redis import RedisServer
from tests.upstream.limits import MemoryLimits
from tests.upstream.queue.test_asynchronous import OK, Processor, deployment
from tests.upstream.raw_server import RawServer
from tests.upstream.world import RouterWorld
from tidegate.backends.queue_redis import RedisQueue
from tidegate.core.budgets.budget import Limit, Period
from tidegate.core.deployments import Deployment, HttpLimits, Queue, Secret
from tidegate.core.errors import Ambiguous, Unavailable, Withheld
from tidegate.upstream.calls.open_router import open_router
from tidegate.upstream.calls.router import Router
from tidegate.upstream.routing.slots import Capacity

pytestmark = pytest.mark.anyio


@contextlib.asynccontextmanager
async def routed(
    clock: HandClock, *deployments: Deployment, owner: str = "one", capacity: Capacity | None = None
) -> AsyncIterator[Router]:
    router = open_router(
        HttpLimits(), clock, FairDice(), capacity=capacity, open_queue=lambda queue: RedisQueue(queue, owner)
    )
    try:
        router.serve(deployments)
        yield router
    finally:
        await router.close()


@pytest.fixture
async def processor(redis_url: str) -> AsyncIterator[Processor]:
    made = Processor(redis_url)
    yield made
    await made.redis.aclose()


async def answered(processor: Processor, **result: Any) -> dict[str, Any]:
    request = await processor.take()
    await processor.push(request["data"]["id"], **(result or OK))
    return request


async def test_a_call_takes_a_slot_for_as_long_as_it_lies_in_the_queue(processor: Processor) -> None:
    world = RouterWorld()
    async with routed(world.clock, deployment(processor.queue, max_in_flight=1)) as router:
        call = asyncio.create_task(router.send(world.call()))
        await processor.until_lies()
        assert router.free_slots("m") == 0
        await answered(processor)
        assert (await call).deployment == "queued"
        assert router.free_slots("m") == 1


async def test_budgets_bind_what_goes_through_a_queue(processor: Processor) -> None:
    world = RouterWorld()
    bound = deployment(processor.queue, limits=(Limit(Period.MINUTE, requests=1),))
    capacity = Capacity(limits=MemoryLimits(world.clock))
    async with routed(world.clock, bound, capacity=capacity) as router:
        call = asyncio.create_task(router.send(world.call()))
        await answered(processor)
        await call
        with pytest.raises(Withheld):
            await router.send(world.call())
    assert await processor.lies() == 0


async def test_failures_from_the_queue_open_the_circuit_and_an_answer_closes_it(processor: Processor) -> None:
    world = RouterWorld()
    async with routed(world.clock, deployment(processor.queue)) as router:
        while router.free_slots("m"):
            call = asyncio.create_task(router.send(world.call()))
            await answered(processor, status_code=500, payload="{}")
            with pytest.raises(Ambiguous):
                await call
        assert router.status()[0].state == "open"
        world.clock.advance(3_600_000)
        call = asyncio.create_task(router.send(world.call()))
        await answered(processor)
        await call
        assert router.status()[0].state == "closed"


async def test_a_queue_that_is_away_leaves_the_call_to_another_deployment(private_redis: RedisServer) -> None:
    world = RouterWorld()
    private_redis.stop()
    away = deployment(Queue(Secret(private_redis.url), "a", "b"))
    async with RawServer() as server, routed(world.clock, away, other(server)) as router:
        assert (await router.send(world.call())).deployment == "other"
    async with routed(world.clock, away) as router:
        with pytest.raises(Unavailable):
            await router.send(world.call())


async def test_a_call_that_lies_in_a_queue_is_sent_to_no_other_deployment(processor: Processor) -> None:
    world = RouterWorld()
    call = world.call()
    queued = deployment(processor.queue)
    async with RawServer() as server:
        gone = open_router(HttpLimits(), world.clock, FairDice(), open_queue=lambda queue: RedisQueue(queue, "gone"))
        gone.serve([queued])
        left = asyncio.create_task(gone.send(call))
        await processor.until_lies()
        async with routed(world.clock, other(server), queued, owner="next") as router:
            adopting = asyncio.create_task(router.send(call))
            await answered(processor)
            assert (await adopting).deployment == "queued"
            assert (await router.send(world.call())).deployment == "other"
        await left
        await gone.close()


def other(server: RawServer) -> Deployment:
    return Deployment(name="other", url=server.url, models=("m",), weight=1_000.0)
