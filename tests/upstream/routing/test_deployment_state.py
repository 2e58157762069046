"""One deployment's own state: what it counts as in flight, what it learns from refusals, and what it says about itself. Nothing is sent."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import pytest
from msgspec.structs import replace

from tests.upstream.world import deployment
from tidegate.core.errors import KeyRejected, Refused, Throttled, UpstreamError
from tidegate.upstream.routing.deployment_state import DeploymentPolicy, DeploymentState
from tidegate.upstream.routing.slots import ModelSlots, SlotDemand

NOW_MS = 1_000.0
# It is asked for nothing here, so nothing is connected.
NO_LINE: Any = None


def state_of(*, is_alone: bool = True, **more: Any) -> DeploymentState:
    return DeploymentState(deployment("http://one/v1", **more), NO_LINE, NO_LINE, DeploymentPolicy(), is_alone=is_alone)


def change(state: DeploymentState, **more: Any) -> None:
    state.update(replace(state.deployment, **more), NO_LINE, NO_LINE)


def test_a_drained_deployment_is_draining_until_its_last_interactive_call_has_ended() -> None:
    state = state_of()
    state.begin_interactive("user", NOW_MS)
    change(state, is_drained=True)
    assert state.status(NOW_MS).state == "draining"
    state.end_interactive("user")
    assert state.status(NOW_MS).state == "drained"


def test_calls_in_flight_still_count_after_a_change_of_its_settings() -> None:
    state = state_of(max_in_flight=3)
    state.begin_background()
    for _ in range(2):
        state.begin_interactive("user", NOW_MS)
    change(state, weight=2.0)
    assert (state.slots.in_flight, state.takes_interactive("other"), state.free_slots(NOW_MS)) == (3, False, 0)
    # Batch work gets a part of its own while calls of it are in flight.
    change(state, batch_fraction=0.4)
    assert state.background_slots is not None
    assert (state.background_slots.in_flight, state.background_slots.let_go(0)) == (1, 1)
    state.end_background()
    assert (state.slots.in_flight, state.background_slots.in_flight) == (2, 0)


def test_a_process_has_as_much_of_the_tokens_as_of_the_slots() -> None:
    state = state_of(is_alone=False, max_in_flight=8, tokens_in_flight_max=800)
    assert state.background_slots is not None
    for share, tokens in ((2, 200), (8, 800), (0, 1)):
        state.background_slots.grant(share)
        state.has_share()
        assert state.tokens_max == tokens


def test_a_refusal_without_a_time_waits_between_half_and_all_of_the_backoff() -> None:
    for jitter, wait_ms in ((0.0, 500), (0.5, 750), (1.0, 1_000)):
        state = state_of()
        state.failed(Throttled("429", status=429), "key", NOW_MS, jitter)
        assert state.refusals.waits_until_ms("key") == NOW_MS + wait_ms


def test_interactive_calls_in_flight_count_when_refusals_are_weighed() -> None:
    """One refusal among thirty calls is about that call; among none, it is about the deployment."""
    busy, idle = state_of(), state_of()
    for _ in range(30):
        busy.begin_interactive("user", NOW_MS)
    idle.begin_interactive("user", NOW_MS)
    for state in (busy, idle):
        state.failed(Throttled("429", status=429, retry_after_ms=5_000), "key", NOW_MS, 0.0)
    assert [state.rests_until_ms for state in (busy, idle)] == [0.0, NOW_MS + 5_000]


def test_a_second_403_is_about_the_request_only_if_the_key_has_worked_since_the_first() -> None:
    state = state_of()
    state.failed(KeyRejected("403", status=403), "key", NOW_MS, 0.0)
    assert not state.blames_the_request("key")
    state.succeeded()
    assert state.blames_the_request("key")
    assert not state.blames_the_request("other")


def test_slots_that_may_be_taken_for_anothers_are_asked_for_and_not_looked_at() -> None:
    """Those of a life that was declared gone, or is about to be, are no slots that a call saw free."""
    for safe_until_ms, is_asked in ((NOW_MS, True), (NOW_MS + 1, False)):
        state = state_of(is_alone=False)
        state.slots.grant(4)
        demand = SlotDemand(lambda: "me", ModelSlots({}, 0, is_alone=False), partial(float, safe_until_ms))
        demand.given_to("me")
        demand.note_background([state], "m", NOW_MS)
        assert state.slots.is_asked is is_asked


@pytest.mark.anyio
async def test_a_wait_for_what_is_urgent_does_not_end_by_what_is_not() -> None:
    demand = SlotDemand(lambda: "me", ModelSlots({}, 0, is_alone=False))
    demand.hurry()
    await demand.wait(60, is_urgent=False)
    waiting = asyncio.create_task(demand.wait(60, is_urgent=True))
    for _ in range(5):
        await asyncio.sleep(0)
    assert not waiting.done()
    demand.hurry(is_urgent=True)
    await waiting


def test_a_worker_that_would_send_asks_for_slots_under_each_cap_of_its_model() -> None:
    slots = ModelSlots({"m": 4, "other": 4}, 8, is_alone=False)
    slots.ask_for("m")
    assert {one.name: one.wanted() for one in slots.slots()} == {"model:m": 1, "model:other": 0, "global": 1}


@pytest.mark.parametrize("kind", [Throttled, Refused])
def test_an_answer_that_is_no_fault_of_the_server_opens_no_circuit(kind: type[UpstreamError]) -> None:
    state = state_of()
    assert not any(state.failed(kind("no", status=429), f"k{number}", NOW_MS, 0.0) for number in range(50))
    assert state.failures == {kind.reason: 50}
    assert not state.breaker.is_open
