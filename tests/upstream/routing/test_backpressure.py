"""A model without a healthy server is left alone by every process for a while, and never for ever."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

from tests.support.ports import HandClock
from tests.upstream.calls.test_router import always, failure
from tests.upstream.raw_server import RawServer
from tests.upstream.world import CHAT_ENDPOINT, RouterWorld, deployment
from tidegate import metrics
from tidegate.backends.shared_redis import LocalRests
from tidegate.core.deployments import Resource
from tidegate.core.errors import UpstreamError
from tidegate.core.schedule import Reason
from tidegate.upstream.calls.router import Router
from tidegate.upstream.calls.traffic import Traffic
from tidegate.upstream.calls.translation import Shaped
from tidegate.upstream.routing.backpressure import Backpressure
from tidegate.upstream.routing.deployment_state import DeploymentPolicy
from tidegate.upstream.routing.slots import Capacity

pytestmark = pytest.mark.anyio


async def open_the_circuit(router: Router, world: RouterWorld, model: str = "m") -> None:
    for _ in range(5):
        await failure(router, world, model=model)


def take_over_rests(router: Router) -> None:
    """As its loop over the slots does."""
    router.replace([state.deployment for state in router._states.values()], ())


async def test_one_process_says_so_and_the_others_wait_it_out(world: RouterWorld) -> None:
    rests = LocalRests(world.clock)
    async with RawServer(always(503)) as ill, RawServer() as well:
        async with world.router(deployment(ill.url, models=("m",)), capacity=Capacity(rests=rests)) as first:
            await open_the_circuit(first, world)
            assert rests.current()["model:m"] == pytest.approx(world.clock.monotonic + 5_000, abs=10)
        async with world.router(deployment(well.url, models=("m",)), capacity=Capacity(rests=rests)) as second:
            take_over_rests(second)
            assert (second.free_slots("m"), second.closed("m")) == (0, Reason.UNHEALTHY)
            assert second.rests_until_ms("m") == rests.current()["model:m"]
            world.clock.advance(5_001)
            assert second.free_slots("m") > 0
            await second.send(world.call())


@pytest.mark.parametrize("models", [("m",), ()], ids=["named", "any"])
@pytest.mark.parametrize("is_shared", [True, False], ids=["redis", "alone"])
async def test_a_model_of_which_no_server_is_healthy_is_counted_wherever_it_is(
    world: RouterWorld, models: tuple[str, ...], *, is_shared: bool
) -> None:
    """Without Redis, and behind one server for every model, an alert goes by this too."""

    def counted() -> int:
        return metrics.counted(metrics.model_deferrals)["no_healthy_deployment"]

    def timed() -> int:
        samples = next(iter(metrics.model_deferral_seconds.of("no_healthy_deployment").collect())).samples
        return int(next(one.value for one in samples if one.name.endswith("_count")))

    capacity = Capacity(rests=LocalRests(world.clock) if is_shared else None)
    async with RawServer(always(503)) as ill, RawServer() as healthy:
        before, timed_before = counted(), timed()
        async with world.router(
            deployment(ill.url, name="a", models=models),
            deployment(healthy.url, name="b", models=models),
            capacity=capacity,
        ) as router:
            for _ in range(10):
                with contextlib.suppress(UpstreamError):
                    await router.send(world.call())
            assert counted() == before, "one of the two is healthy"
        async with world.router(deployment(ill.url, models=models), capacity=capacity) as router:
            await open_the_circuit(router, world)
            assert counted() > before
            assert timed() - timed_before == counted() - before


async def test_who_obeyed_once_tries_for_itself_before_it_obeys_again(world: RouterWorld) -> None:
    rests = LocalRests(world.clock)
    async with RawServer() as well, RawServer(always(503)) as ill:
        async with world.router(deployment(well.url, models=("m",)), capacity=Capacity(rests=rests)) as router:
            rests.publish("model:m", 5_000)
            take_over_rests(router)
            assert router.free_slots("m") == 0
            world.clock.advance(5_001)
            # The one that cannot reach the servers says so again and again; here it can be reached.
            rests.publish("model:m", 300_000)
            take_over_rests(router)
            assert router.free_slots("m") > 0
            await router.send(world.call())
            take_over_rests(router)
            assert router.free_slots("m") > 0
        async with world.router(deployment(ill.url, models=("m",)), capacity=Capacity(rests=rests)) as router:
            await open_the_circuit(router, world)
            take_over_rests(router)
            assert router.rests_until_ms("m") > world.clock.monotonic + 250_000


async def test_a_process_that_is_answered_obeys_no_report_of_the_model(world: RouterWorld) -> None:
    rests = LocalRests(world.clock)
    async with RawServer() as well:
        async with world.router(deployment(well.url, models=("m",)), capacity=Capacity(rests=rests)) as router:
            await router.send(world.call())
            rests.publish("model:m", 300_000)
            take_over_rests(router)
            assert router.free_slots("m") > 0


def test_a_process_that_was_answered_obeys_the_reports_again_once_a_call_of_its_own_has_failed() -> None:
    clock, server = HandClock(), Server("a")
    rests, states = LocalRests(clock), list[Any]([server])
    pressure = Backpressure(rests, clock, DeploymentPolicy(), states)
    pressure.answered(states[0])
    rests.publish("model:m", 60_000)
    pressure.obey()
    assert server.background_until_ms == 0.0
    server.is_open = False
    pressure.failed(states[0])
    pressure.obey()
    assert server.background_until_ms == clock.monotonic + 60_000


async def test_as_long_as_one_server_is_healthy_the_model_is_not_left_alone(world: RouterWorld) -> None:
    rests = LocalRests(world.clock)
    async with RawServer(always(503)) as ill, RawServer() as well:
        places = deployment(ill.url, "ill", models=("m",)), deployment(well.url, "well", models=("m",))
        async with world.router(*places, capacity=Capacity(rests=rests)) as router:
            for _ in range(20):
                with contextlib.suppress(UpstreamError):
                    await router.send(world.call())
            assert router.status()[0].state == "open"
            assert "model:m" not in rests.current()


async def test_a_throttled_model_is_not_ill_and_a_longer_retry_after_wins(world: RouterWorld) -> None:
    rests = LocalRests(world.clock)
    async with RawServer(always(429, Retry_After="900")) as server:
        async with world.router(deployment(server.url, models=("m",)), capacity=Capacity(rests=rests)) as router:
            await failure(router, world)
            assert rests.current().keys() == {"one"}
            rests.publish("model:m", 5_000)
            take_over_rests(router)
            assert router.rests_until_ms("m") == pytest.approx(world.clock.monotonic + 900_000, abs=10)


async def test_a_user_is_not_kept_waiting_by_the_report_of_another_process(world: RouterWorld) -> None:
    rests = LocalRests(world.clock)
    rests.publish("model:m", 60_000)
    async with RawServer() as server:
        async with world.router(deployment(server.url, models=("m",)), capacity=Capacity(rests=rests)) as router:
            take_over_rests(router)
            assert router.free_slots("m") == 0
            state = router._states["one"]
            assert state.ready_at_ms() <= world.clock.monotonic
            await router.open(world.call(), Traffic(lambda engine: Shaped(CHAT_ENDPOINT, b"{}"), is_stream=False))
            assert router.free_slots("m") > 0, "what answers a user can answer items"


async def test_it_can_be_switched_off_and_has_bounds(world: RouterWorld) -> None:
    async with RawServer(always(401)) as server:
        for most, rests_ms in ((0, {"model:m": 0.0}), (3_000, {"model:m": 3_000.0})):
            rests = LocalRests(world.clock)
            policy = DeploymentPolicy(model_rest_ms_min=1_000, model_rest_ms_max=most)
            place = deployment(server.url, models=("m",))
            async with world.router(place, capacity=Capacity(rests=rests), policy=policy) as router:
                await failure(router, world)
                left_ms = {name: until - world.clock.monotonic for name, until in rests.current().items()}
                assert left_ms.get("model:m", 0.0) == pytest.approx(rests_ms["model:m"], abs=10)


async def test_a_resource_falls_back_while_its_model_is_left_alone(world: RouterWorld) -> None:
    rests = LocalRests(world.clock)
    async with RawServer() as first, RawServer() as second:
        places = [deployment(first.url, "one", models=("a",)), deployment(second.url, "two", models=("b",))]
        named = [Resource("chat", "a", fallbacks=("b",))]
        async with world.router(*places, resources=named, capacity=Capacity(rests=rests)) as router:
            rests.publish("model:a", 5_000)
            router.replace(places, named)
            assert router.free_slots("chat") > 0
            assert (await router.send(world.call("chat"))).deployment == "two"


class Server:
    """What back-pressure asks of one deployment, whose circuit is open."""

    def __init__(self, name: str) -> None:
        self.deployment = deployment("http://h/", name, models=("m",))
        self.breaker = self
        self.is_open = True
        self.until_ms = self.background_until_ms = 0.0

    def rest_ends_ms(self, now_ms: float) -> float:
        return now_ms + 6_000

    def rest_until(self, until_ms: float) -> None:
        self.until_ms = until_ms

    def rest_background_until(self, until_ms: float) -> None:
        self.background_until_ms = until_ms


def test_a_process_obeys_its_own_report_while_one_of_the_servers_is_there_and_not_about_others() -> None:
    clock, servers = HandClock(), [Server("a"), Server("b")]
    states: Any = servers
    pressure = Backpressure(LocalRests(clock), clock, DeploymentPolicy(), states)
    pressure.failed(states[0])
    servers[1] = Server("b")
    pressure.obey()
    assert [one.background_until_ms for one in servers] == [clock.monotonic + 6_000] * 2
    pressure.failed(states[0])
    servers[:] = [Server("a"), Server("b")]
    pressure.obey()
    assert [one.background_until_ms for one in servers] == [0.0, 0.0]


def test_a_process_obeys_the_rest_that_a_server_asked_of_another_one() -> None:
    clock, servers = HandClock(), [Server("a"), Server("b")]
    rests, states = LocalRests(clock), list[Any](servers)
    rests.publish("a", 3_000)
    Backpressure(rests, clock, DeploymentPolicy(), states).obey()
    assert [one.until_ms for one in servers] == [clock.monotonic + 3_000, 0.0]
    assert [one.background_until_ms for one in servers] == [0.0, 0.0], "it says nothing of the model"
