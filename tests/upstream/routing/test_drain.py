"""Deployments that an operator drains, resumes and refreshes, over real sockets."""

from __future__ import annotations

import asyncio

import pytest
from msgspec.structs import replace

from tests.upstream.calls.test_router import Gate, always, failure
from tests.upstream.raw_server import Peer, RawServer, Request, eventually
from tests.upstream.world import CHAT_ENDPOINT, RouterWorld, deployment
from tidegate.core.deployments import Resource
from tidegate.core.errors import Throttled
from tidegate.core.schedule import Reason
from tidegate.upstream.calls.traffic import Traffic
from tidegate.upstream.calls.translation import Shaped
from tidegate.upstream.routing.deployment_state import DRAINED_WAIT_MS

pytestmark = pytest.mark.anyio


async def test_calls_in_flight_end_and_new_ones_go_elsewhere_until_it_is_resumed(world: RouterWorld) -> None:
    gate = Gate()
    async with RawServer(gate) as first, RawServer() as second:
        one = deployment(first.url, "one", models=("m",), max_in_flight=4)
        two = deployment(second.url, "two", models=("m",), weight=0.001)
        async with world.router(one, two) as router:
            flying = [asyncio.create_task(router.send(world.call())) for _ in range(3)]
            await eventually(lambda: len(first.posts) == 3, "3 calls there")
            assert router.replace([replace(one, is_drained=True), two], ()) == {}
            assert (router.status()[0].state, router.status()[0].in_flight) == ("draining", 3)
            later = [await router.send(world.call()) for _ in range(4)]
            assert {answer.deployment for answer in later} == {"two"}
            gate.opened.set()
            assert {answer.deployment for answer in await asyncio.gather(*flying)} == {"one"}
            assert (router.status()[0].state, len(first.posts)) == ("drained", 3)
            router.replace([one, two], ())
            assert (await router.send(world.call())).deployment == "one"
            assert router.status()[0].state == "closed"


async def test_work_waits_while_every_deployment_is_drained(world: RouterWorld) -> None:
    """No call fails for it as if the model were unknown, and each wait has an end: it may be resumed at any moment."""
    async with RawServer() as server:
        limited = deployment(server.url, models=("m",), is_drained=True)
        async with world.router(limited) as router:
            assert (router.knows("m"), router.takes_interactive("m"), router.free_slots("m")) == (True, True, 0)
            assert router.closed("m") == Reason.DRAINED
            assert router.rests_until_ms("m") == world.clock.monotonic + DRAINED_WAIT_MS
            with pytest.raises(Throttled, match="is drained") as refused:
                await router.send(world.call())
            assert refused.value.retry_after_ms == DRAINED_WAIT_MS
            with pytest.raises(Throttled, match="is drained") as refused:
                await router.open(world.call(), Traffic(lambda engine: Shaped(CHAT_ENDPOINT, b"{}"), is_stream=False))
            assert refused.value.retry_after_ms == DRAINED_WAIT_MS
            assert router.status()[0].rests_for_ms == 0
            # What the server asks for meanwhile is no reason to think that it takes calls again.
            router.replace([replace(limited, weight=2.0)], ())
            world.clock.monotonic += 10 * DRAINED_WAIT_MS
            assert router.free_slots("m") == 0
            router.replace([replace(limited, is_drained=False)], ())
            await router.send(world.call())
    assert len(server.posts) == 1


async def test_a_drained_deployment_hands_over_to_fallbacks_and_who_waits_for_its_slot_looks_again(
    world: RouterWorld,
) -> None:
    gate = Gate()
    async with RawServer(gate) as first, RawServer() as second:
        one = deployment(first.url, "one", models=("m",), max_in_flight=1)
        two = deployment(second.url, "two", models=("spare",))
        route = Resource("chat", "m", fallbacks=("spare",))
        async with world.router(one, two, resources=[route]) as router:
            flying = asyncio.create_task(router.send(world.call("chat")))
            await eventually(lambda: len(first.posts) == 1, "a call there")
            waiting = asyncio.create_task(router.send(world.call("chat")))
            await asyncio.sleep(0)
            router.replace([replace(one, is_drained=True), two], [route])
            assert (await waiting).deployment == "two"
            gate.opened.set()
            await flying
    assert len(first.posts) == 1


async def test_a_refresh_tries_at_once_what_rests_or_has_an_open_circuit(world: RouterWorld) -> None:
    healthy = False

    async def script(request: Request, peer: Peer) -> None:
        if healthy:
            await peer.answer()
        else:
            await peer.answer(429, b"{}", Retry_After="3000", x_ratelimit_remaining_requests="0")

    async with RawServer(script) as busy, RawServer(always(503)) as ill:
        one = deployment(busy.url, "one", models=("m",))
        two = deployment(ill.url, "two", models=("n",))
        async with world.router(one, two) as router:
            for _ in range(3):
                await failure(router, world)
            for _ in range(5):
                with pytest.raises(Exception, match="503"):
                    await router.send(world.call("n"))
            assert (router.free_slots("m"), router.free_slots("n")) == (0, 0)
            healthy = True
            router.replace([replace(one, refresh_count=1), replace(two, refresh_count=1)], ())
            # The circuit stays open: one call may try it.
            assert (router.free_slots("m") > 1, router.free_slots("n")) == (True, 1)
            await router.send(world.call("m", key="another"))
