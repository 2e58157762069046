"""Where the calls for one name go, and what binds them there; a route that leads elsewhere keeps nothing of where it led before."""

from __future__ import annotations

from collections import Counter
from typing import Any

from tests.upstream.world import RouterWorld, deployment
from tidegate.core.budgets.budget import Budget, Limit, LimitBound, Period
from tidegate.core.deployments import Resource, Serves
from tidegate.core.errors import Ambiguous
from tidegate.upstream.routing.deployment_state import DeploymentPolicy, DeploymentState
from tidegate.upstream.routing.routes import NameRoute, Routes, stick

NO_LINE: Any = None
NOW_MS = 1_000_000.0
MINUTE, HOUR = Limit(Period.MINUTE, 5), Limit(Period.HOUR, 50)


def state_of(name: str, *models: str, **more: Any) -> DeploymentState:
    place = deployment(f"http://{name}/v1", name=name, models=models, **more)
    return DeploymentState(place, NO_LINE, NO_LINE, DeploymentPolicy(), is_alone=True)


def fails(state: DeploymentState, key: str = "key") -> None:
    state.failed(Ambiguous("lost"), key, NOW_MS, 0.0)


def test_a_route_that_is_assigned_again_keeps_nothing_of_its_resource() -> None:
    state = state_of("one", limits=(MINUTE, HOUR))
    route = NameRoute([state], Resource("chat", "m", limits=(MINUTE,), total_timeout_s=7.0))
    assert (route.model, route.total_timeout_s, route.is_plain) == ("m", 7.0, False)
    assert route.body(state, b'{"model":"chat"}') == b'{"model":"m"}'
    own = Budget(LimitBound.RESOURCE, "chat", (MINUTE,))
    assert route.budgets(state) == (Budget(LimitBound.DEPLOYMENT, "one", (HOUR,)), own)
    assert route.budgets(state) is route.budgets(state), "made once"
    state.discover(Limit(Period.MINUTE, 3))
    assert len(route.budgets(state)) == 3, "what the deployment reports of itself binds everyone"
    route.assign([state])
    assert (route.model, route.total_timeout_s, route.is_plain) == ("", None, True)
    assert route.budgets(state) == state.budgets
    route.assign([state], Resource("chat", "m", limits=(Limit(Period.MINUTE, 5, enabled=False),)))
    assert (route.own_budgets, route.budgets(state)) == ((), state.budgets)


def test_a_resource_of_its_models_own_name_renames_nothing_unless_it_is_a_fallback() -> None:
    state, resource = state_of("one"), Resource("m", "m")
    route = NameRoute([state], resource)
    assert route.is_plain
    route.assign([state], resource, is_fallback=True)
    assert (route.is_plain, route.body(state, b'{"model":"chat"}')) == (False, b'{"model":"m"}')


def test_items_and_users_go_to_those_that_take_them() -> None:
    both, batch, users = (
        state_of("both"),
        state_of("batch", serves=Serves.BATCH),
        state_of("u", serves=Serves.INTERACTIVE),
    )
    route = NameRoute([both, batch, users])
    assert (route.states, route.interactive_states) == ([both, batch], [both, users])
    assert (route.items_per_call, NameRoute().items_per_call) == (1, 1)


def test_names_lead_to_their_own_first_and_by_order_to_the_others() -> None:
    one, late, other, anyone = state_of("one", "m"), state_of("late", "m", order=2), state_of("o", "n"), state_of("any")
    routes = Routes()
    lost = routes.assign([one, late, other, anyone], [Resource("chat", "m", fallbacks=("n",))])
    chat = routes["chat"]
    assert (lost, sorted(routes.names())) == ({}, ["chat", "m", "n"])
    assert [way.states for way in chat.ways(frozenset())] == [[one], [late], [other]]
    assert [way.states for way in chat.ways(frozenset({"m"}))] == [[one], [late]], (
        "what a key does not allow is left out"
    )
    assert (chat.is_direct, routes["m"].is_direct, routes["n"].is_direct) == (False, False, True)
    assert (routes.other.states, routes.other.is_direct) == ([anyone], True)
    assert not chat.fallbacks[1].is_plain
    lost = routes.assign([one], [Resource("chat", "n")])
    assert "routes to model 'n', which no deployment serves" in lost["chat"]
    assert (chat.states, chat.fallbacks, routes.other.states) == ([], (), []), "calls that still wait there fail"
    assert [way.states for way in routes["m"].ways(frozenset())] == [[one]]
    assert routes.names() == ["m"]


def test_a_retry_is_what_failed_here_or_may_have() -> None:
    world, routes = RouterWorld(), Routes()
    one, two = state_of("one", "m"), state_of("two", "m")
    routes.assign([one, two], ())
    first, again = world.call(key="key"), world.call(key="key", attempt_count=1)
    fails(one)
    assert [routes.is_retry(one, call, NOW_MS) for call in (first, again)] == [False, True]
    assert not routes.is_retry(two, again, NOW_MS), "a failover is a first attempt"
    # Another process saw this one fail.
    strange = world.call(key="strange", attempt_count=1)
    assert [routes.is_retry(state, strange, NOW_MS) for state in (one, two)] == [True, False]
    routes.assign([two], ())
    assert routes.is_retry(two, strange, NOW_MS), "there is no other that it could have failed at"
    assert routes["m"].has_failed(again) is False
    fails(two)
    assert routes["m"].has_failed(again)
    assert not NameRoute().has_failed(again)
    allowed = 0
    while routes.may_try(two, strange, NOW_MS):
        two.budget.count(NOW_MS, is_retry=True)
        allowed += 1
    assert allowed > 0
    assert routes.may_try(two, first, NOW_MS)


def test_prefixes_stick_by_weight_and_move_on_only_from_one_that_has_too_much() -> None:
    light, heavy = state_of("light"), state_of("heavy", weight=3.0)
    fit = [light, heavy]
    parts = Counter(found.deployment.name for n in range(400) if (found := stick(fit, f"group {n}")) is not None)
    assert 250 < parts["heavy"] < 350
    group = next(f"group {n}" for n in range(400) if stick(fit, f"group {n}") is light)
    assert stick([heavy, light], group) is light
    light.begin_background()
    assert stick(fit, group) is heavy, "of two calls, one in four parts of them is light's"
    for _ in range(3):
        heavy.begin_background()
    assert stick(fit, group) is light, "of five, two"


def test_a_name_takes_whom_its_fallbacks_take_until_they_are_gone() -> None:
    batch, users = state_of("batch", "a", serves=Serves.BATCH), state_of("users", "b", serves=Serves.INTERACTIVE)
    routes = Routes()
    routes.assign([batch, users], [Resource("chat", "a", fallbacks=("b",)), Resource("talk", "b", fallbacks=("a",))])
    chat, talk = routes["chat"], routes["talk"]
    assert [(one.takes_background, one.takes_interactive) for one in (chat, talk)] == [(True, True)] * 2
    assert sorted(routes.names()) == ["a", "b", "chat", "talk"], "items alone or users alone are enough"
    routes.assign([batch, users], [Resource("chat", "a"), Resource("talk", "b")])
    assert [(one.takes_background, one.takes_interactive) for one in (chat, talk)] == [(True, False), (False, True)]
    routes.assign([], [])
    assert [(one.takes_background, one.takes_interactive) for one in (chat, talk)] == [(False, False)] * 2
