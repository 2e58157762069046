"""What a call takes of its deployment, and that it gives all of it back once, however it ends; every user is reported to the tide."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest

from tests.upstream.limits import MemoryLimits
from tests.upstream.world import CHAT_ENDPOINT, RouterWorld, deployment
from tidegate.core.errors import Ambiguous, Throttled, Unavailable
from tidegate.upstream.calls import admission as admissions
from tidegate.upstream.calls.admission import Admission
from tidegate.upstream.calls.traffic import Traffic
from tidegate.upstream.calls.translation import Shaped
from tidegate.upstream.routing.deployment_state import DeploymentState
from tidegate.upstream.routing.health import BreakerState
from tidegate.upstream.routing.slots import Capacity

pytestmark = pytest.mark.anyio

WHOLE = Traffic(lambda engine: Shaped(CHAT_ENDPOINT, b"{}"), is_stream=False, owner="a tenant")
STREAM = WHOLE._replace(is_stream=True)
FLEX = WHOLE._replace(flex_wait_s=60.0)


class NotedTide:
    """The tide of a deployment and the loop over all of them; notes what is reported to them."""

    yields = True

    def __init__(self, state: DeploymentState) -> None:
        self._state = state
        self.users: list[tuple[int, int]] = []
        self.flights: list[Any] = []
        self.announced = 0
        self.calls = 64

    def users_changed(self) -> None:
        self.users.append(self._state.users)

    def announce(self, name: str) -> None:
        assert name == "one"
        self.announced += 1

    def begin_flight(self, *what: Any) -> str:
        self.flights.append(("begins", *what))
        return "flight"

    def first_token(self, flight: str) -> None:
        self.flights.append(("has its first token", flight))

    def end_flight(self, flight: str, tokens: int | None, *, refused: bool) -> None:
        self.flights.append(("ends", flight, tokens, refused))

    def stands(self, *what: Any) -> None:
        self.flights.append(("stands", *what))

    def leaves(self, key: str) -> None:
        self.flights.append(("leaves", key))


class Gate:
    def __init__(self, world: RouterWorld, router: Any) -> None:
        self.world, self.router = world, router
        self.state, self.route = router._states["one"], router._routes["m"]
        self.admissions = router._path._admissions
        self.noted_tide = NotedTide(self.state)
        self.state.tide = cast(Any, self.noted_tide)
        self.admissions._tides = cast(Any, self.noted_tide)

    def begin(self, traffic: Traffic | None = None, **call: Any) -> Admission:
        asked = self.world.call(**call)
        begun: Admission = self.admissions.begin_call(
            self.route, self.state, asked, traffic, self.world.clock.monotonic
        )
        return begun

    def taken(self) -> tuple[int, int, int, int]:
        state = self.state
        return state.in_flight, state.interactive_in_flight, state.interactive_awaiting, state.slots_in_use


@asynccontextmanager
async def gate(capacity: Capacity | None = None) -> AsyncIterator[Gate]:
    world = RouterWorld()
    place = deployment("http://127.0.0.1:1/v1", models=("m",), max_in_flight=4)
    async with world.router(place, capacity=capacity) as router:
        yield Gate(world, router)


async def test_a_user_is_known_to_wait_until_the_first_token_comes_or_the_call_ends() -> None:
    async with gate() as one:
        first, second = one.begin(STREAM), one.begin(STREAM)
        assert one.taken() == (0, 2, 2, 2)
        one.admissions.first_token(first)
        one.admissions.first_token(first)
        one.admissions.end_call(second)
        one.admissions.first_token(second)
        one.admissions.end_call(first, answer_tokens=3)
        assert one.noted_tide.users == [(1, 1), (2, 2), (2, 1), (1, 0), (0, 0)]
        assert one.noted_tide.announced == 5
        assert (one.taken(), one.noted_tide.flights) == ((0, 0, 0, 0), [])
        assert one.state.answered == 1


async def test_the_first_token_of_an_answer_that_is_not_streamed_is_taken_to_come_after_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(admissions, "UNSEEN_FIRST_TOKEN_S", 0.0)
    async with gate() as one:
        whole, other, streamed = one.begin(WHOLE), one.begin(WHOLE), one.begin(STREAM)
        one.admissions.end_call(other)
        assert other.timer is not None
        assert other.timer.cancelled()
        timer = whole.timer
        one.admissions.expect_first_token(whole)
        assert whole.timer is timer, "it is waited for once"
        await asyncio.sleep(0.001)
        assert one.taken() == (0, 2, 1, 2), "that of a stream is seen"
        # The server answers one who asked for a stream in one piece.
        one.admissions.expect_first_token(streamed)
        await asyncio.sleep(0.001)
        assert one.taken() == (0, 2, 0, 2)
        for ended in (whole, streamed):
            one.admissions.end_call(ended)
        assert (one.taken(), one.noted_tide.users[-1]) == ((0, 0, 0, 0), (0, 0))


async def test_flights_of_batch_work_are_reported_to_the_tide_with_their_tokens_and_flex_calls_without() -> None:
    async with gate() as one:
        item = one.begin(key="item", body=b"item", hand_backs=2)
        flex = one.begin(FLEX, key="flex", body=b"flex")
        assert one.taken() == (2, 0, 0, 2)
        assert one.admissions.out == {"m": 2}
        one.admissions.first_token(item)
        one.admissions.end_call(item, answer_tokens=7)
        one.admissions.end_call(flex, answer_tokens=7)
        for error in (Throttled("busy", status=429), Unavailable("away", status=503), Ambiguous("lost", status=500)):
            one.admissions.end_call(one.begin(key="item", body=b"item"), error)
        assert [flight for flight in one.noted_tide.flights if flight[0] != "begins"] == [
            ("has its first token", "flight"),
            ("ends", "flight", 7, False),
            ("ends", "flight", None, False),
            ("ends", "flight", None, True),
            ("ends", "flight", None, True),
            ("ends", "flight", None, False),
        ]
        assert one.noted_tide.flights[:2] == [
            ("begins", "item", b"item", one.world.clock.monotonic, 2, ("m", CHAT_ENDPOINT)),
            ("begins", "flex", b"flex", one.world.clock.monotonic),
        ]
        assert (one.taken(), one.noted_tide.users, one.admissions.out) == ((0, 0, 0, 0), [], {})
        for at_begin, at_end in ((one.noted_tide, None), (None, one.noted_tide)):
            # Its tide was switched off or on meanwhile.
            one.state.tide = cast(Any, at_begin)
            changed, count = one.begin(), len(one.noted_tide.flights)
            one.state.tide = cast(Any, at_end)
            one.admissions.end_call(changed)
            assert len(one.noted_tide.flights) == count


async def test_a_call_of_an_open_circuit_is_its_probe_and_waiting_calls_look_again_when_it_ends() -> None:
    async with gate() as one:
        now_ms = one.world.clock.monotonic
        assert not one.begin().is_probe
        assert one.state.breaker.ready_at_ms == 0.0
        while not one.state.breaker.is_open:
            one.state.failed(Ambiguous("lost"), "key", now_ms, 0.5)
        turn = one.admissions._room.line.join()
        probe = one.begin()
        assert (probe.is_probe, one.state.breaker.state) == (True, BreakerState.PROBING)
        assert one.state.breaker.ready_at_ms > now_ms
        one.admissions.end_call(probe)
        assert (one.state.breaker.state, turn.done()) == (BreakerState.OPEN, True)


async def test_only_what_failed_here_before_is_a_retry() -> None:
    async with gate() as one:
        one.state.failed(Ambiguous("lost"), "failed", one.world.clock.monotonic, 0.5)
        again = [one.begin(key=key, attempt_count=count).attempt for key, count in (("failed", 1), ("failed", 0))]
        assert [is_retry for _, is_retry in again] == [True, False]


@pytest.mark.parametrize(("traffic", "by_ms"), [(WHOLE, 500.0), (FLEX, 500.0), (None, 900.0)])
async def test_a_call_begins_while_its_slot_is_surely_this_processes(traffic: Traffic | None, by_ms: float) -> None:
    """An item's own moment is that of its lease."""
    limits = MemoryLimits(RouterWorld().clock)
    async with gate(Capacity(limits, lambda: "worker", safe_until_ms=lambda: 500.0)) as one:
        one.admissions._demand.given_to("worker")
        assert one.begin(traffic, begin_by_ms=900.0).begin_by_ms == by_ms
        assert one.begin(traffic, begin_by_ms=400.0).begin_by_ms == 400.0


@pytest.mark.parametrize("traffic", [WHOLE, FLEX, None], ids=["user", "flex", "item"])
async def test_calls_that_find_no_slot_or_take_the_last_one_are_noted_for_the_next_share(
    traffic: Traffic | None,
) -> None:
    async with gate(Capacity(MemoryLimits(RouterWorld().clock), lambda: "worker")) as one:
        one.admissions._demand.given_to("worker")
        call, now_ms = one.world.call(), one.world.clock.monotonic
        one.state.slots.grant(0)
        one.admissions.note_demand(one.route, call, traffic, now_ms)
        assert one.state.slots.is_short
        one.state.slots.grant(0)
        one.begin(traffic)
        assert one.state.slots.is_short is (traffic is WHOLE), "a worker notes what its items need when it asks"


@pytest.mark.parametrize("traffic", [WHOLE, FLEX, None], ids=["user", "flex", "item"])
async def test_calls_that_begin_or_stop_waiting_for_a_slot_are_reported_to_the_tide(traffic: Traffic | None) -> None:
    async with gate() as one:
        call = one.world.call(key="key", body=b"body")
        one.admissions.begin_wait([one.state], call, traffic)
        waits = (one.state.waiting, one.state.interactive_waiting.total())
        one.admissions.end_wait([one.state], call, traffic)
        one.admissions.begin_wait([one.state], call, traffic)
        one.admissions.end_wait([one.state], call, traffic, one.state)
        assert (one.state.waiting, one.state.interactive_waiting.total()) == (0, 0)
        if traffic is WHOLE:
            assert (waits, one.noted_tide.users) == ((0, 1), [(1, 1), (0, 0), (1, 1)]), "at the chosen one it begins"
        else:
            assert (waits, one.noted_tide.flights) == ((1, 0), 2 * [("stands", "key", b"body"), ("leaves", "key")])
