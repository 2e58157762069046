"""The choice of a deployment is a pure function: what was short of slots is noted by calls that wait or begin, not by looking."""

from collections.abc import AsyncIterator
from typing import Any, cast

import pytest

from tests.upstream.limits import MemoryLimits
from tests.upstream.world import RouterWorld, deployment
from tidegate.core.budgets.budget import Budget, Limit, LimitBound, Period
from tidegate.core.errors import Ambiguous
from tidegate.core.nouns import Call
from tidegate.upstream.calls.admission import View, choose, open_circuit_beside
from tidegate.upstream.calls.router import Router
from tidegate.upstream.calls.traffic import Traffic
from tidegate.upstream.calls.translation import Shaped
from tidegate.upstream.routing.deployment_state import DeploymentState
from tidegate.upstream.routing.routes import NameRoute, stick
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
    chosen = choose(router._path._view, router._routes["m"], call, traffic, (), router._clock.monotonic_ms())
    return None if chosen is None else chosen.deployment.name


@pytest.mark.parametrize("traffic", [None, USER, FLEX], ids=["item", "user", "flex"])
@pytest.mark.parametrize("share", [0, 1, 4])
async def test_a_choice_changes_nothing(traffic: Traffic | None, share: int) -> None:
    world = RouterWorld()
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


class Known:
    """What is known of deployments by their names, as a test says; times are from now on."""

    def __init__(self) -> None:
        self.model_has_slots = True
        self.full: set[str] = set()
        self.opens_in_ms: dict[str, float] = {}
        self.spent_for_ms: dict[str, float] = {}
        self.ready_in_ms: dict[str, float] = {}

    def has_model_slots(self, route: NameRoute, call: Call, now_ms: float) -> bool:
        return self.model_has_slots

    def has_slot_for_user(self, state: DeploymentState, owner: str, now_ms: float) -> bool:
        assert owner == USER.owner
        return state.deployment.name not in self.full

    def takes_item(self, state: DeploymentState, call: Call, now_ms: float) -> bool:
        return state.deployment.name not in self.full

    def opens_at_ms(self, route: NameRoute, state: DeploymentState) -> float:
        return NOW_MS + self.opens_in_ms[state.deployment.name]

    def budgets_spent_until_ms(self, route: NameRoute, state: DeploymentState) -> float:
        return NOW_MS + self.spent_for_ms[state.deployment.name]

    def ready_at_ms(self, route: NameRoute, state: DeploymentState) -> float:
        return NOW_MS + self.ready_in_ms.get(state.deployment.name, 0.0)


NOW_MS = 1_000_000.0


class Pair:
    """Two deployments of one model, and the choice between them."""

    def __init__(self, world: RouterWorld, router: Router) -> None:
        self.world = world
        self.one, self.two = (router._states[name] for name in ("one", "two"))
        self.route = router._routes["m"]
        self.known = Known()
        self.tried: list[DeploymentState] = []

    def chooses(self, traffic: Traffic | None = None, **call: Any) -> str | None:
        view, asked = cast(View, cast(Any, self.known)), self.world.call(**call)
        chosen = choose(view, self.route, asked, traffic, self.tried, NOW_MS)
        return None if chosen is None else chosen.deployment.name

    def fails(self, state: DeploymentState, key: str = "key") -> None:
        state.failed(Ambiguous("lost"), key, NOW_MS, 0.5)

    def opens_circuit(self, state: DeploymentState) -> None:
        while not state.breaker.is_open:
            self.fails(state, "another")
        state.breaker.try_at_once()


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    world = RouterWorld()
    limited: dict[str, Any] = {"models": ("m",), "max_in_flight": 4, "limits": (Limit(Period.MINUTE, 9),)}
    places = [deployment("http://127.0.0.1:1/v1", name=name, **limited) for name in ("one", "two")]
    async with world.router(*places) as router:
        made = Pair(world, router)
        made.known.opens_in_ms = {"one": 0.0, "two": 0.0}
        made.known.spent_for_ms = {"one": 0.0, "two": 0.0}
        yield made


@pytest.mark.parametrize("traffic", [None, USER, FLEX], ids=["item", "user", "flex"])
async def test_the_least_loaded_goes_first_and_those_that_are_full_or_were_tried_not_at_all(
    pair: Pair, traffic: Traffic | None
) -> None:
    assert pair.chooses(traffic) == "one"
    pair.one.begin_background()
    assert pair.chooses(traffic) == "two"
    pair.tried = [pair.two]
    assert pair.chooses(traffic) == "one"
    pair.known.full = {"one"}
    assert pair.chooses(traffic) is None
    pair.tried, pair.known.full = [], {"one"}
    assert pair.chooses(traffic) == "two"
    pair.known.full = set()
    pair.known.model_has_slots = False
    assert pair.chooses(traffic) == ("two" if traffic is USER else None), "caps of models hold batch work"
    pair.known.model_has_slots = True
    pair.route.interactive_states = [pair.one]
    assert pair.chooses(traffic) == ("one" if traffic is USER else "two")


async def test_a_spent_budget_makes_a_deployment_the_last_but_one_and_a_long_wait_keeps_items_away(pair: Pair) -> None:
    pair.known.spent_for_ms["one"] = 1.0
    assert pair.chooses() == pair.chooses(USER) == "two"
    pair.tried = [pair.two]
    assert pair.chooses() == pair.chooses(USER) == "one", "a moment is waited for"
    pair.known.opens_in_ms["one"] = 1.0
    assert (pair.chooses(), pair.chooses(FLEX), pair.chooses(USER)) == (None, None, "one")
    pair.tried = []
    pair.fails(pair.two)
    pair.known.opens_in_ms["one"] = 0.0
    assert pair.chooses(attempt_count=1, key="key") == "one", "rather than where it failed"


async def test_where_nothing_is_bound_no_budget_is_asked_for(pair: Pair) -> None:
    pair.known.spent_for_ms = pair.known.opens_in_ms = {}
    for state in (pair.one, pair.two):
        state.budgets = ()
    assert pair.chooses() == "one"
    pair.route.own_budgets = (Budget(LimitBound.RESOURCE, "r", ()),)
    pair.known.opens_in_ms, pair.known.spent_for_ms = {"one": 1.0, "two": 0.0}, {"two": 0.0}
    assert pair.chooses() == "two"


async def test_a_call_goes_again_where_it_failed_only_if_no_other_is_healthy(pair: Pair) -> None:
    pair.fails(pair.one)
    again: dict[str, Any] = {"attempt_count": 1, "key": "key"}
    assert pair.chooses(key="key") == "one", "it is a first attempt: the count is of another life"
    assert (pair.chooses(**again), pair.chooses(attempt_count=1)) == ("two", "one")
    pair.known.full = {"two"}
    assert pair.chooses(**again) is None, "the other lacks only room"
    pair.two.slots.grant(1)
    assert pair.chooses(**again) is None
    pair.known.ready_in_ms["two"] = 1.0
    assert pair.chooses(**again) == "one", "the other rests"
    pair.known.ready_in_ms["two"] = 0.0
    pair.tried = [pair.two]
    assert pair.chooses(**again) == "one", "the other had its try"
    pair.tried = []
    pair.two.refusals.refused("key", NOW_MS + 1, 1)
    assert pair.chooses(**again) == "one", "the other asked this call to wait"
    assert pair.chooses(attempt_count=1, key="none") == "one"
    pair.two.slots.grant(0)
    pair.fails(pair.two)
    assert pair.chooses(**again) == "one", "the other failed it too"


async def test_without_a_share_of_the_other_a_call_does_not_wait_for_it(pair: Pair) -> None:
    pair.fails(pair.one)
    pair.known.full = {"two"}
    pair.two.slots.grant(0)
    assert pair.chooses(attempt_count=1, key="key") == "one"


async def test_an_open_circuit_is_probed_by_items_and_by_users_only_once_it_answered_or_is_all_there_is(
    pair: Pair,
) -> None:
    pair.opens_circuit(pair.two)
    assert (pair.chooses(), pair.chooses(FLEX), pair.chooses(USER)) == ("two", "two", "one")
    assert open_circuit_beside(pair.route, pair.one, NOW_MS) is pair.two
    assert open_circuit_beside(pair.route, pair.two, NOW_MS) is None
    pair.two.breaker.probe_answered()
    assert pair.chooses(USER) == "two"
    pair.two.breaker.has_answered = False
    pair.tried = [pair.one]
    assert pair.chooses(USER) == "two"
    pair.two.breaker.begin_probe(NOW_MS)
    assert pair.chooses(USER) is None, "it is not due"
    assert open_circuit_beside(pair.route, pair.one, NOW_MS) is None
    pair.two.rest_until(NOW_MS)
    pair.two.breaker.ready_at_ms = NOW_MS
    assert pair.chooses(USER) == "two"
    assert open_circuit_beside(pair.route, pair.one, NOW_MS) is pair.two


async def test_a_prefix_sticks_to_one_deployment_whatever_its_load_while_there_are_several(pair: Pair) -> None:
    sticky: dict[str, Any] = {"prefix_salt": b"salt"}
    there = stick([pair.one, pair.two], pair.world.call(**sticky).prefix_group)
    assert there is not None
    there.begin_background()
    other = pair.two if there is pair.one else pair.one
    assert pair.chooses(**sticky) == there.deployment.name
    assert pair.chooses() == other.deployment.name
    pair.tried = [there]
    assert pair.chooses(**sticky) == other.deployment.name
