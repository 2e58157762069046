"""A question to a deployment with an open circuit: what counts as an answer, and which error the caller gets where there is none."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.ports import HandClock
from tests.upstream.raw_server import RawServer, answers_with, eventually
from tests.upstream.world import RouterWorld, deployment
from tidegate.core.errors import Throttled, Unavailable
from tidegate.upstream.http.transport import TEMPLATES_MAX, AiohttpClient, HttpReply
from tidegate.upstream.routing.deployment_state import FAILING
from tidegate.upstream.routing.health import Breaker, BreakerPolicy
from tidegate.upstream.routing.probe import UNANNOUNCED_EVERY, SideProbes, probe

pytestmark = pytest.mark.anyio


class Control:
    """Answers `GET /models` as a test tells it to, once it lets it."""

    def __init__(self, answer: int | Exception = 200) -> None:
        self.answer = answer
        self.asked = 0
        self.gate = asyncio.Event()
        self.gate.set()

    async def get(self, url: str, timeout_s: float) -> HttpReply:
        self.asked += 1
        await self.gate.wait()
        if isinstance(self.answer, Exception):
            raise self.answer
        return HttpReply(self.answer, {}, b"{}")


def state_of(control: Control, name: str = "one") -> Any:
    counted = iter(range(1, 1_000))
    breaker = Breaker(BreakerPolicy())
    for _ in range(BreakerPolicy().consecutive_failures_max):
        breaker.failed(0)
    return SimpleNamespace(
        count_probe=lambda: next(counted),
        control=control,
        url=lambda endpoint: f"http://one{endpoint}",
        deployment=SimpleNamespace(name=name),
        breaker=breaker,
    )


@pytest.mark.parametrize("status", [200, 404, 429, 499])
async def test_a_server_that_answers_anything_but_an_error_of_its_own_is_there(status: int) -> None:
    control = Control(status)
    await probe(state_of(control))
    assert control.asked == 1


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        (500, FAILING),
        (503, FAILING),
        (Unavailable("cannot connect", code="upstream_unreachable"), "upstream_unreachable"),
        # Another error's code would say of the item what holds of the question alone.
        (Throttled("too many", code="rate_limited"), "upstream_unavailable"),
    ],
)
async def test_a_server_that_is_away_is_reported_with_the_reason(answer: int | Exception, code: str) -> None:
    with pytest.raises(Unavailable) as caught:
        await probe(state_of(Control(answer)))
    assert caught.value.code == code
    assert str(answer) in caught.value.message


async def test_now_and_then_an_item_goes_without_a_question() -> None:
    control = Control(503)
    state = state_of(control)
    for _ in range(2):
        for _ in range(UNANNOUNCED_EVERY - 1):
            with pytest.raises(Unavailable):
                await probe(state)
        await probe(state)
    assert control.asked == 2 * (UNANNOUNCED_EVERY - 1)


async def test_questions_beside_calls_are_asked_once_at_a_time_and_open_the_way_for_a_call() -> None:
    control, clock = Control(), HandClock()
    control.gate.clear()
    state, probes = state_of(control), SideProbes(clock)
    probes.ask(state)
    probes.ask(state)
    await eventually(lambda: control.asked, "the question")
    assert not state.breaker.has_answered
    control.gate.set()
    await eventually(lambda: state.breaker.has_answered, "the answer")
    assert control.asked == 1
    probes.ask(state)
    await eventually(lambda: control.asked == 2, "the second question")
    await probes.close()


async def test_a_question_without_an_answer_is_asked_again_one_interval_later() -> None:
    clock = HandClock()
    state, probes = state_of(Control(503)), SideProbes(clock)
    probes.ask(state)
    await eventually(lambda: state.breaker.ready_at_ms == clock.monotonic_ms() + 5_000, "the next interval")
    assert not state.breaker.has_answered
    assert state.breaker.state == "open"
    await probes.close()


async def test_a_stop_ends_questions_that_are_out() -> None:
    control = Control()
    control.gate.clear()
    state, probes = state_of(control), SideProbes(HandClock())
    probes.ask(state)
    await eventually(lambda: control.asked, "the question")
    async with asyncio.timeout(60):
        await probes.close()
    control.gate.set()
    await asyncio.sleep(0.01)
    assert not state.breaker.has_answered


async def test_names_of_models_that_callers_make_up_are_asked_about_and_not_kept(world: RouterWorld) -> None:
    async with RawServer(answers_with(200, b"{}")) as server, world.router(deployment(server.url)) as router:
        for number in range(TEMPLATES_MAX + 1):
            assert await router.takes_by_name(f"org/{number}", 60.0)
        state = router._states["one"]
        assert isinstance(state.control, AiohttpClient)
        assert len(state.control._ways) < TEMPLATES_MAX
        assert not state._urls
    assert server.requests[0].path == "/v1/models/org%2F0", "a name is one part of the path"
