"""The choice of a deployment is a pure function: what was short of slots is noted by calls that wait or begin, not by looking."""

import pytest

from tests.upstream.limits import MemoryLimits
from tests.upstream.world import World, deployment
from tidegate.core.nouns import Call
from tidegate.upstream.calls.choice import choose
from tidegate.upstream.calls.router import Router
from tidegate.upstream.calls.traffic import Traffic
from tidegate.upstream.calls.translation import Shaped
from tidegate.upstream.routing.slots import Capacity, Slots

pytestmark = pytest.mark.anyio

USER = Traffic(lambda engine: Shaped("/v1/chat/completions", b"{}"), is_stream=False, owner="a tenant")
FLEX = USER._replace(flex_wait_s=60.0)


def slots(router: Router) -> list[Slots]:
    states = router._states.values()
    own = [one for state in states for one in (state.slots, state.background_slots) if one is not None]
    return [*own, *router._model_slots.slots()]


def known(router: Router) -> list[list[object]]:
    """All that is counted and noted of every slot of a router."""
    return [[getattr(one, name) for name in Slots.__slots__] for one in slots(router)]


def look(router: Router, call: Call, traffic: Traffic | None) -> str | None:
    chosen = choose(router._path._view, router._routes.of("m"), call, traffic, (), router._clock.monotonic_ms())
    return None if chosen is None else chosen.deployment.name


@pytest.mark.parametrize("traffic", [None, USER, FLEX], ids=["item", "user", "flex"])
@pytest.mark.parametrize("share", [0, 1, 4])
async def test_a_choice_changes_nothing(traffic: Traffic | None, share: int) -> None:
    world = World()
    places = [deployment("http://127.0.0.1:1/v1", name=name, models=("m",), max_in_flight=4) for name in ("one", "two")]
    caps = {"model_in_flight_max": {"m": 4}, "in_flight_max_global": 8}
    capacity = Capacity(MemoryLimits(world.clock), lambda: "worker", **caps)  # type: ignore[arg-type]
    async with world.router(*places, capacity=capacity) as router:
        for one in slots(router):
            one.grant(share)
        router._available._demand.given_to("worker")
        before = known(router)
        assert look(router, world.call(), traffic) == ("one" if share else None)
        assert known(router) == before
