"""What a deployment refuses: the refused call waits as long as the server asks, and the whole deployment only when refusals are many."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from bench.capacity import REFUSAL_SLOTS
from bench.capacity_world import Item, RefusingServer, Report, SteadyServer, run
from tests.upstream.raw_server import CHAT, Peer, RawServer, Request
from tests.upstream.world import RouterWorld, deployment
from tidegate.core.deployments import Deployment
from tidegate.core.errors import Throttled, UpstreamError
from tidegate.upstream.routing.health import LAST_CALLS, WAITING_MAX, Refusals

pytestmark = pytest.mark.anyio


class Picky:
    """Refuses calls under these keys, with this status and these headers; answers the others."""

    def __init__(self, *keys: str, status: int = 429, **headers: str) -> None:
        self.keys = set(keys)
        self.status = status
        self.headers = headers or {"Retry_After": "30"}

    async def __call__(self, request: Request, peer: Peer) -> None:
        if request.headers.get("Idempotency-Key") in self.keys:
            await peer.answer(self.status, b"{}", **self.headers)
        else:
            await peer.answer(200, CHAT)


def keys(server: RawServer) -> list[str]:
    return [request.headers["Idempotency-Key"] for request in server.posts]


@pytest.mark.parametrize("status", [429, 503])
async def test_a_refused_call_waits_and_the_others_go_on(world: RouterWorld, status: int) -> None:
    picky = Picky("refused", status=status)
    async with RawServer(picky) as server, world.router(deployment(server.url)) as router:
        for _ in range(40):
            await router.send(world.call())
        with pytest.raises(UpstreamError) as caught:
            await router.send(world.call(key="refused"))
        assert caught.value.retry_after_ms == 30_000
        assert router.rests_until_ms("m") == 0
        picky.keys.clear()
        world.clock.advance(29_999)
        with pytest.raises(Throttled) as waits:
            await router.send(world.call(key="refused"))
        assert waits.value.retry_after_ms == 1
        await router.send(world.call())
        assert keys(server).count("refused") == 1
        world.clock.advance(1)
        await router.send(world.call(key="refused"))
    assert keys(server).count("refused") == 2


async def test_a_refused_call_goes_elsewhere_and_not_back_before_its_time(world: RouterWorld) -> None:
    both = Picky("same"), Picky("same", Retry_After="2")
    async with RawServer(both[0]) as first, RawServer(both[1]) as second:
        places = (deployment(first.url, "first", weight=100.0), deployment(second.url, "second"))
        async with world.router(*places) as router:
            for _ in range(60):
                await router.send(world.call())
            second_before = len(second.posts)
            await asyncio.gather(*(router.send(world.call()) for _ in range(20)))
            with pytest.raises(Throttled) as caught:
                await router.send(world.call(key="same"))
            assert caught.value.retry_after_ms == 2_000, "the first of them that takes it"
            both[0].keys.clear()
            both[1].keys.clear()
            world.clock.advance(2_000)
            assert (await router.send(world.call(key="same"))).deployment == "second"
    assert keys(first).count("same") == 1
    assert len(second.posts) > second_before


async def test_a_shorter_wait_of_the_same_call_never_shortens_a_longer_one() -> None:
    refusals = Refusals()
    refusals.refused("same", 5_000.0, 1)
    refusals.refused("same", 2_000.0, 2)
    assert refusals.waits_until_ms("same") == 5_000.0
    assert refusals.waits_until_ms("other") == 0.0


def test_the_deployment_rests_from_5_of_its_last_100_calls_on() -> None:
    refusals = Refusals()
    for number in range(1, LAST_CALLS, 25):
        refusals.refused(f"{number}", 1.0, number)
    assert not refusals.are_heavy(LAST_CALLS, 0), "4 of 100"
    refusals.refused("next", 1.0, LAST_CALLS + 2)
    assert not refusals.are_heavy(LAST_CALLS + 2, 0), "one of the four has left the last hundred"
    refusals.refused("last", 1.0, LAST_CALLS + 3)
    assert refusals.are_heavy(LAST_CALLS + 3, 0)
    assert not refusals.are_heavy(2 * LAST_CALLS + 3, 0)


def test_calls_in_flight_count_for_refusals_come_first() -> None:
    refusals = Refusals()
    refusals.refused("first", 1.0, 1)
    assert refusals.are_heavy(1, 0)
    assert refusals.are_heavy(1, 19)
    assert not refusals.are_heavy(1, 20)


def test_more_waiting_calls_than_are_remembered_are_a_rest_of_them_all() -> None:
    refusals = Refusals()
    assert not any(refusals.refused(f"{number}", 7_000.0, number) for number in range(1, WAITING_MAX + 1))
    assert refusals.refused("one more", 9_000.0, WAITING_MAX + 1) == 7_000.0


async def test_the_deployment_rests_at_once_when_it_says_that_nothing_is_left(world: RouterWorld) -> None:
    headers: dict[str, Any] = {
        "x_ratelimit_limit_requests": "20",
        "x_ratelimit_remaining_requests": "0",
        "Retry_After": "9",
    }
    async with RawServer(Picky("refused", **headers)) as server, world.router(deployment(server.url)) as router:
        for _ in range(40):
            await router.send(world.call())
        with pytest.raises(Throttled):
            await router.send(world.call(key="refused"))
        assert router.rests_until_ms("m") == world.clock.monotonic + 9_000


def refused_run(share: float, status: int = 429, *, learned: bool = False, deployments: int = 1) -> Report:
    places = [
        Deployment(name, f"http://{name}/v1", max_in_flight=REFUSAL_SLOTS, is_capacity_known=not learned)
        for name in ("one", "two")[:deployments]
    ]
    items = [Item("m", 100, 10)] * (4_000 * deployments)
    return run([(place, lambda: RefusingServer(SteadyServer(), share, status)) for place in places], items)


@pytest.mark.parametrize(
    ("status", "learned", "deployments"), [(429, False, 1), (429, True, 1), (503, False, 1), (429, False, 2)]
)
def test_one_refusal_in_a_hundred_leaves_most_of_the_rate(status: int, learned: bool, deployments: int) -> None:
    alone = refused_run(0.0, learned=learned, deployments=deployments)
    report = refused_run(0.01, status, learned=learned, deployments=deployments)
    assert report.rate / alone.rate >= 0.85
    assert 0.005 <= report.witness.statuses[status] / report.witness.statuses.total() <= 0.015
    assert not report.failed


def test_no_call_is_sent_again_where_it_was_refused_before_its_retry_after() -> None:
    report = refused_run(0.03, deployments=2)
    last: dict[tuple[str, str], float] = {}
    for at_s, place, key, _ in report.witness.sent:
        assert at_s - last.get((place, key), -1.0) >= 1.0
        last[place, key] = at_s
    assert report.witness.statuses[429] > 100
