"""Whether the deployments of a name take batch work now, how much, and why not: what the engine asks before it leases and sends."""

from __future__ import annotations

from typing import Any, cast

import pytest

from tests.upstream.limits import MemoryLimits
from tests.upstream.world import RouterWorld, deployment
from tidegate.core.budgets.budget import Budget, Limit, LimitBound, Period
from tidegate.core.deployments import Resource, Serves
from tidegate.core.errors import Ambiguous
from tidegate.core.schedule import Reason
from tidegate.upstream.calls.availability import PROBE_ANSWER_MS
from tidegate.upstream.calls.router import Router
from tidegate.upstream.routing.deployment_state import DeploymentState
from tidegate.upstream.routing.slots import Capacity
from tidegate.upstream.tide.tides import READY_MAX

pytestmark = pytest.mark.anyio

MINUTE = Limit(Period.MINUTE, 1)


def place(name: str, model: str = "m", **more: Any) -> Any:
    return deployment("http://127.0.0.1:1/v1", name=name, models=(model,), **{"max_in_flight": 4, **more})


def opens_circuit(state: DeploymentState, now_ms: float) -> None:
    while not state.breaker.is_open:
        state.failed(Ambiguous("lost"), "key", now_ms, 0.0)


async def test_fallbacks_count_while_their_own_rest_and_not_while_they_are_merely_full() -> None:
    world = RouterWorld()
    places = [place("one", "a"), place("two", "b", max_in_flight=2), place("three", "c", max_in_flight=3)]
    async with world.router(*places, resources=[Resource("chat", "a", fallbacks=("b", "c"))]) as router:
        one, two, three = (router._states[name] for name in ("one", "two", "three"))
        now_ms = world.clock.monotonic
        assert router.free_slots("chat") == 4
        for _ in range(4):
            one.begin_background()
        assert router.free_slots("chat") == 0, "a slot is waited for"
        assert router.closed("chat") == Reason.NO_AVAILABLE_SLOTS
        one.rest_until(now_ms + 1)
        assert router.free_slots("chat") == 2
        assert router.rests_until_ms("chat") == 0.0, "a fallback takes them"
        two.rest_until(now_ms + 9)
        assert router.free_slots("chat") == 3
        three.rest_until(now_ms + 9)
        assert router.free_slots("chat") == 0
        assert (router.rests_until_ms("chat"), router.closed("chat")) == (now_ms + 1, Reason.RESTING)
        world.clock.advance(1)
        two.rests_until_ms = 0.0
        assert (router.rests_until_ms("chat"), router.free_slots("chat")) == (0.0, 0), "its own are merely full again"
        assert router.closed("chat") == Reason.NO_AVAILABLE_SLOTS


async def test_calls_that_wait_take_their_part_of_what_is_free_beyond_those_that_stand_ready() -> None:
    world = RouterWorld()
    async with world.router(place("one", max_in_flight=40)) as router:
        [state] = router._states.values()
        for waiting, free in ((READY_MAX, 40), (READY_MAX + 1, 39), (READY_MAX + 60, 0)):
            state.waiting = waiting
            assert router.free_slots("m") == free


async def test_a_cap_of_the_model_and_one_over_all_bound_what_is_free() -> None:
    world = RouterWorld()
    async with world.router(place("one"), capacity=Capacity(model_in_flight_max={"m": 3})) as router:
        assert router.free_slots("m") == 3
        for left in (2, 1, 0):
            router._model_slots.take_model_slot("m")
            assert router.free_slots("m") == left


async def test_a_process_that_finds_nothing_free_asks_for_slots_at_once() -> None:
    world = RouterWorld()
    safe_until_ms = world.clock.monotonic
    capacity = Capacity(MemoryLimits(world.clock), lambda: "me", safe_until_ms=lambda: safe_until_ms)
    async with world.router(place("one"), capacity=capacity) as router:
        demand, [state] = router._available._demand, list(router._states.values())
        demand.given_to("me")
        demand.clear()
        for one in state.own_slots(safe_until_ms):
            one.grant(4)
        assert router.free_slots("m") == 0, "the slots may be another's"
        assert (demand._hurry.is_set(), state.slots.is_asked) == (True, True)
        demand.clear()
        safe_until_ms += 1
        state.slots.is_asked = state.slots.is_seen = False
        assert (router.free_slots("m"), demand._hurry.is_set()) == (4, False)
        assert (state.slots.is_asked, state.slots.is_seen) == (True, True)
        call = world.call()
        view, route = router._path._view, router._routes["m"]
        assert view.has_model_slots(route, call, safe_until_ms - 1)
        assert not view.has_model_slots(route, call, safe_until_ms)
        assert view.has_slot_for_user(state, "user", safe_until_ms - 1)
        assert not view.has_slot_for_user(state, "user", safe_until_ms)


def spend(router: Router, until_ms: float) -> None:
    """Let all budgets be spent until this moment."""
    budget_client = cast(Any, router._path._view)._budgets
    budget_client.spent_until_ms = lambda budgets: until_ms if budgets else 0.0
    budget_client.opens_at_ms = lambda budgets, patience_ms: until_ms - patience_ms if budgets else 0.0


async def test_why_nothing_may_be_sent() -> None:
    world = RouterWorld()
    async with world.router(place("one", limits=(MINUTE,)), place("two", limits=(MINUTE,))) as router:
        one, two = router._states.values()
        now_ms = world.clock.monotonic
        assert (router.closed("m"), router.closed("unknown")) == ("", "")
        patience_ms = 2_000
        spend(router, now_ms + patience_ms)
        assert router.closed("m") == "", "a moment is waited for"
        spend(router, now_ms + patience_ms + 1)
        assert (router.closed("m"), router.free_slots("m")) == (Reason.BUDGET_SPENT, 0)
        assert router.rests_until_ms("m") == now_ms + 1
        budget = Budget(LimitBound.JOB, "job", (MINUTE,))
        assert router.spent_until_ms((budget,)) == now_ms + 1
        spend(router, now_ms + patience_ms)
        assert router.spent_until_ms((budget,)) == 0.0
        assert len(router.budgets("m")) == 2
        spend(router, 0.0)
        for state in (one, two):
            state.tide = cast(Any, Still())
        assert router.closed("m") == Reason.TIDE_CLOSED
        for state in (one, two):
            for _ in range(3):
                state.begin_background()
        assert router.closed("m") == Reason.TIDE_CLOSED, "a slot is free"
        for state in (one, two):
            state.begin_background()
        assert router.closed("m") == Reason.NO_AVAILABLE_SLOTS
        spend(router, now_ms + patience_ms)
        assert router.closed("m") == Reason.NO_AVAILABLE_SLOTS
        for state in (one, two):
            state.rest_until(now_ms + 5)
            state.rest_background_until(now_ms)
        assert router.closed("m") == Reason.RESTING
        two.rests_until_ms = 0.0
        two.rest_background_until(now_ms + 5)
        assert router.closed("m") == Reason.RESTING
        opens_circuit(one, now_ms)
        assert router.closed("m") == Reason.UNHEALTHY
        world.clock.advance(10_000)
        for state in (one, two):
            state.rest_until(world.clock.monotonic + 60_000)
        assert router.rests_until_ms("m") == world.clock.monotonic + 60_000
        one.rests_until_ms = 0.0
        one.breaker.begin_probe(world.clock.monotonic)
        assert router.rests_until_ms("m") == world.clock.monotonic + PROBE_ANSWER_MS
        one.tide = two.tide = None
        router.replace([place("one", is_drained=True), place("two", is_drained=True)], ())
        assert router.closed("m") == Reason.DRAINED


class Still:
    """A tide that lets nothing in."""

    calls = 0


async def test_a_group_goes_where_its_tokens_fit_beside_those_in_flight_and_under_its_budgets() -> None:
    world = RouterWorld()
    async with world.router(place("one", tokens_in_flight_max=100)) as router:
        view, route, [state] = router._path._view, router._routes["m"], list(router._states.values())
        call = world.call(body=b'{"max_tokens":10}')
        tokens = view._estimator.tokens(call, state.deployment.estimate)
        assert 0 < tokens <= 50
        state.add_tokens(100 - tokens)
        assert view.can_take(route, state, call)
        state.add_tokens(1)
        assert not view.can_take(route, state, call)
        assert view.takes_item(state, call, world.clock.monotonic) is False
        state.add_tokens(-1)
        assert view.takes_item(state, call, world.clock.monotonic)
        state.refusals.refused(call.idempotency_key, world.clock.monotonic + 1, 1)
        assert not view.takes_item(state, call, world.clock.monotonic)
        assert view.takes_item(state, call, world.clock.monotonic + 1)
        assert view.wait_ms(route, world.clock.monotonic, call) == 1
        assert view.wait_ms(route, world.clock.monotonic + 1, call) is None


class Choosy:
    """A tide that lets in only what it likes."""

    calls = 9

    def can_take(self, key: str, body: bytes) -> bool:
        return key == "liked"


async def test_an_item_needs_a_slot_a_try_and_the_tide() -> None:
    world = RouterWorld()
    async with world.router(place("one"), capacity=Capacity(model_in_flight_max={"m": 3})) as router:
        view, route, [state] = router._path._view, router._routes["m"], list(router._states.values())
        now_ms, call = world.clock.monotonic, world.call()
        for room in (True, True, True, False):
            assert view.has_model_slots(route, call, now_ms) is room
            assert view.takes_item(state, call, now_ms), "slots of the model are another's question"
            router._model_slots.take_model_slot("m")
            state.begin_background()
        assert not view.takes_item(state, call, now_ms)
        state.end_background()
        retry = world.call(attempt_count=1)
        assert view.takes_item(state, retry, now_ms)
        while view.may_try(state, retry, now_ms):
            state.budget.count(now_ms, is_retry=True)
        assert (view.takes_item(state, retry, now_ms), view.takes_item(state, call, now_ms)) == (False, True)
        state.tide = cast(Any, Choosy())
        for key, is_liked in (("liked", True), ("other", False)):
            assert view.takes_item(state, world.call(key=key), now_ms) is is_liked
            assert view.can_take(route, state, world.call(key=key)) is is_liked
        state.tide = None


async def test_a_group_fits_under_the_tokens_of_its_budgets_and_who_serves_users_alone_has_a_moment_too() -> None:
    world = RouterWorld()
    async with world.router(
        place("one", limits=(Limit(Period.MINUTE, None, 40),)), place("two", "n", serves=Serves.INTERACTIVE)
    ) as router:
        view, route, state = router._path._view, router._routes["m"], router._states["one"]
        small = world.call(body=b'{"max_tokens":4}')
        tokens = view._estimator.tokens(small, state.deployment.estimate)
        for most, fits in ((tokens, True), (tokens - 1, False)):
            state.budgets = (Budget(LimitBound.DEPLOYMENT, f"of {most}", (Limit(Period.MINUTE, None, most),)),)
            assert view.can_take(route, state, small) is fits
        now_ms = world.clock.monotonic
        router._states["two"].rest_until(now_ms + 70)
        assert view.wait_ms(router._routes["n"], now_ms, world.call("n")) == 70
        cast(Any, view)._budgets.unreachable_until_ms = now_ms
        assert (view.are_limits_away(now_ms - 1), view.are_limits_away(now_ms)) == (True, False)
