"""Two deployments of one model, one of them ill: no call is lost, no limit is passed on the other's account, and the ill one comes back.

The first tests are DeltaLLM's reports #245 (saturated deployments: retries that stay on the one that failed, failures counted twice, rests
that never end) and #248 (a fallback that is given more calls at once than it takes).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest

from tests.upstream.limits import MemoryLimits
from tests.upstream.raw_server import CHAT, Peer, RawServer, Request, answers_with, eventually
from tests.upstream.world import CHAT_ENDPOINT, RouterWorld, deployment
from tidegate.core import retry
from tidegate.core.budgets.budget import Limit, Period
from tidegate.core.deployments import HttpLimits, Resource
from tidegate.core.errors import UpstreamError
from tidegate.core.nouns import Answer, Call
from tidegate.upstream.calls.router import Router
from tidegate.upstream.calls.traffic import Traffic
from tidegate.upstream.calls.translation import Shaped
from tidegate.upstream.routing.deployment_state import DeploymentPolicy, RetryBudgetPolicy
from tidegate.upstream.routing.health import BreakerPolicy
from tidegate.upstream.routing.slots import Capacity

pytestmark = pytest.mark.anyio

Way = Callable[[Request, Peer], Awaitable[None]]
QUICK = HttpLimits(
    connect_timeout_s=1, read_timeout_s=0.2, body_rate_min_bytes_per_s=10_000, body_rate_grace_s=0.1, pool_timeout_s=0.1
)
MINUTE_MS = 60_000
CALLS = range(20)
AT_ONCE = 8


async def test_a_fallback_is_never_given_more_calls_at_once_than_it_takes(world: RouterWorld) -> None:
    """#248: eight calls were turned away together, and all of them met the other deployment, which takes one at a time."""
    turned_away = asyncio.Barrier(8)
    at_once = most = 0

    async def refuses(request: Request, peer: Peer) -> None:
        await turned_away.wait()
        await peer.answer(429, b"{}", Retry_After="600")

    async def takes_one(request: Request, peer: Peer) -> None:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        await asyncio.sleep(0.01)
        at_once -= 1
        await peer.answer()

    async with RawServer(refuses) as first, RawServer(takes_one) as second:
        places = (deployment(first.url, "first", weight=100.0), deployment(second.url, "second", max_in_flight=1))
        async with world.router(*places) as router:
            answers = await until_answered(router, world, [world.call() for _ in range(8)])
            status = {one.name: one for one in router.status()}
    assert {answer.deployment for answer in answers} == {"second"}
    assert most == 1
    assert (len(first.posts), len(second.posts)) == (8, 8)
    assert all(one.in_flight == 0 for one in status.values()), "every slot was given back"


async def test_a_retry_goes_to_the_deployment_that_has_not_failed_it(world: RouterWorld) -> None:
    """#245: the tries of one call went A, A, A, B."""

    async def fails(request: Request, peer: Peer) -> None:
        await peer.answer(500, b"{}")

    async with RawServer(fails) as first, RawServer() as second:
        places = (deployment(first.url, "first", weight=100.0), deployment(second.url, "second"))
        async with world.router(*places) as router:
            with pytest.raises(UpstreamError):
                await router.send(world.call(key="same"))
            answer = await router.send(world.call(key="same", attempt_count=1))
            assert answer.deployment == "second"
            assert (await asyncio.gather(router.send(world.call()), return_exceptions=True))[0] != answer
    assert (len(first.posts), len(second.posts)) == (2, 1), (
        "a new call still finds the first one, whose circuit is closed"
    )


async def test_beside_a_users_call_a_deployment_with_an_open_circuit_is_probed(world: RouterWorld) -> None:
    """The call itself goes to the healthy one."""

    async def fails(request: Request, peer: Peer) -> None:
        await peer.answer(500 if request.body else 200, b"{}")

    policy = DeploymentPolicy(breaker=BreakerPolicy(consecutive_failures_max=1, probe_interval_ms=1_000))
    async with RawServer(fails) as first, RawServer() as second:
        places = (deployment(first.url, "first", weight=100.0), deployment(second.url, "second"))
        async with world.router(*places, policy=policy) as router:
            with pytest.raises(UpstreamError):
                await router.send(world.call())
            traffic = Traffic(lambda engine: Shaped(CHAT_ENDPOINT, b"user"), False)
            assert (await router.open(world.call(), traffic)).deployment == "second"
            assert first.requests == first.posts, "no probe is due"
            world.clock.advance(1_000)
            assert (await router.open(world.call(), traffic)).deployment == "second"
            await eventually(lambda: len(first.requests) == len(first.posts) + 1, "the probe")


async def test_where_all_have_failed_a_call_it_is_tried_again_all_the_same(world: RouterWorld) -> None:
    async def fails(request: Request, peer: Peer) -> None:
        await peer.answer(500, b"{}")

    async with RawServer(fails) as first, RawServer(fails) as second:
        async with world.router(deployment(first.url, "first"), deployment(second.url, "second")) as router:
            for attempts in range(3):
                with pytest.raises(UpstreamError):
                    await router.send(world.call(key="same", attempt_count=attempts))
    assert sorted([len(first.posts), len(second.posts)]) == [1, 2]


async def test_one_failure_counts_once(world: RouterWorld) -> None:
    """#245: one 503 was counted twice, so that a circuit opened after half the failures."""

    async def fails(request: Request, peer: Peer) -> None:
        await peer.answer(503, b"{}")

    async with RawServer(fails) as first, RawServer(fails) as second:
        async with world.router(deployment(first.url, "first"), deployment(second.url, "second")) as router:
            for number in range(1, 9):
                with pytest.raises(UpstreamError):
                    await router.send(world.call())
                states = [(status.state, sum(status.failures.values())) for status in router.status()]
                assert sum(count for _, count in states) == number
                assert all(state == "closed" for state, count in states if count < 5)


async def test_a_rest_that_is_over_needs_no_probe_to_end(world: RouterWorld) -> None:
    """#245: the cooldown ran out, and the deployment stayed unroutable until a background check found it."""

    async def refuses(request: Request, peer: Peer) -> None:
        await peer.answer(429, b"{}", Retry_After="1")

    async with RawServer(refuses) as first, RawServer() as second:
        places = (deployment(first.url, "first", weight=100.0), deployment(second.url, "second"))
        async with world.router(*places) as router:
            assert (await router.send(world.call())).deployment == "second"
            first.script = _well
            world.clock.advance(1_000)
            assert (await router.send(world.call())).deployment == "first"
    assert [request.line.split()[0] for request in first.requests] == ["POST", "POST"]


async def _well(request: Request, peer: Peer) -> None:
    await peer.answer()


async def _closes(request: Request, peer: Peer) -> None:
    peer.close()


async def _resets(request: Request, peer: Peer) -> None:
    peer.reset()


async def _half(request: Request, peer: Peer) -> None:
    await peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(CHAT) + CHAT[:20])
    peer.close()


_html = answers_with(200, b"<html>")
_no_choices = answers_with(200, b'{"choices":[]}')

WAYS: dict[str, Way] = {
    "closes": _closes,
    "resets": _resets,
    "half": _half,
    "500": answers_with(500),
    "503": answers_with(503, Retry_After="30"),
    "429": answers_with(429, Retry_After="30"),
    "401": answers_with(401),
    "html": _html,
    "no choices": _no_choices,
}


async def until_answered(router: Router, world: RouterWorld, calls: list[Call]) -> list[Answer]:
    """Items as the engine runs them: put off while they must wait, tried again as often as they may be; none may be given up."""
    waiting: list[tuple[float, Call]] = [(0.0, call) for call in calls]
    answers: list[Answer] = []
    while waiting:
        waiting.sort(key=lambda one: one[0])
        world.clock.advance(max(0.0, waiting[0][0] - world.clock.monotonic))
        due, waiting = [call for _, call in waiting[:AT_ONCE]], waiting[AT_ONCE:]
        ends = await asyncio.gather(*(router.send(call) for call in due), return_exceptions=True)
        now_ms = int(world.clock.monotonic)
        for call, end in zip(due, ends, strict=True):
            if isinstance(end, Answer):
                answers.append(end)
                continue
            assert isinstance(end, UpstreamError), repr(end)
            verdict = retry.decide(end, call.attempt_count, now_ms, now_ms + 10**9, retry.RetryPolicy(), 0.5)
            assert isinstance(verdict, retry.RetryAt), verdict
            attempts = call.attempt_count + int(verdict.counts)
            waiting.append((verdict.at_ms, msgspec.structs.replace(call, attempt_count=attempts)))
    return answers


@pytest.mark.parametrize("way", WAYS)
async def test_one_is_ill_and_no_call_is_lost_no_limit_passed_and_it_comes_back(world: RouterWorld, way: str) -> None:
    # What is no answer is tried only once more: where the other could not be asked at all, that try may meet the ill one again.
    per_minute = len(CALLS) + 1 if WAYS[way] in (_html, _no_choices) else len(CALLS) // 2
    sent: list[float] = []

    async def counts(request: Request, peer: Peer) -> None:
        sent.append(world.clock.monotonic)
        await peer.answer()

    calls = [world.call(left_ms=1e9) for _ in CALLS]
    async with RawServer(WAYS[way]) as ill, RawServer(counts) as well:
        places = (
            deployment(ill.url, "ill", weight=10.0, max_in_flight=2),
            deployment(well.url, "well", max_in_flight=3, limits=(Limit(Period.MINUTE, per_minute),)),
        )
        limits = MemoryLimits(world.clock)
        async with world.router(
            *places, limits=QUICK, policy=DeploymentPolicy(patience_ms=0), capacity=Capacity(limits)
        ) as router:
            answers = await until_answered(router, world, calls)
            assert [answer.deployment for answer in answers] == ["well"] * len(calls)
            ill.script = _well
            healed_ms = world.clock.monotonic
            while not any(status.answered for status in router.status() if status.name == "ill"):
                await until_answered(router, world, [world.call(left_ms=1e9)])
                assert world.clock.monotonic - healed_ms <= 2 * MINUTE_MS, "it did not come back"
                world.clock.advance(1_000)
    assert well.open_count_highest <= 3
    fullest = max(sum(at <= other < at + MINUTE_MS for other in sent) for at in sent)
    assert fullest <= per_minute


STANDBYS: dict[str, tuple[tuple[dict[str, Any], dict[str, Any]], tuple[Resource, ...]]] = {
    "beside it": (({"weight": 100.0}, {}), ()),
    "of a later order": (({}, {"order": 2}), ()),
    "of a fallback": (({"models": ("m",)}, {"models": ("other",)}), (Resource("m", "m", fallbacks=("other",)),)),
}


@pytest.mark.parametrize("standby", STANDBYS)
async def test_a_failover_to_a_healthy_deployment_is_not_charged_to_any_retry_budget(
    world: RouterWorld, standby: str
) -> None:
    terms, resources = STANDBYS[standby]
    policy = DeploymentPolicy(retry_budget=RetryBudgetPolicy(share=0.0, retries_min=0))
    async with RawServer(answers_with(503)) as ill, RawServer() as well:
        places = (
            deployment(ill.url, "ill", max_in_flight=AT_ONCE, **terms[0]),
            deployment(well.url, "well", max_in_flight=AT_ONCE, **terms[1]),
        )
        began_ms = world.clock.monotonic
        async with world.router(*places, policy=policy, resources=resources) as router:
            answers = await until_answered(router, world, [world.call(left_ms=1e9) for _ in range(100)])
        took_ms = world.clock.monotonic - began_ms
    assert [answer.deployment for answer in answers] == ["well"] * 100
    # No item waits for a budget: only for the backoff of its one failed try.
    assert took_ms < 2_000
    assert len(ill.posts) <= AT_ONCE + 1, "its circuit opened after the first calls"
    assert len(well.posts) == 100


@pytest.mark.parametrize("standby", STANDBYS)
async def test_a_retry_goes_to_a_deployment_that_has_not_failed_it_however_few_calls_there_are(
    world: RouterWorld, standby: str
) -> None:
    """Too few failures to open its circuit, and budget for three tries: the item would fail though the other server is healthy."""
    terms, resources = STANDBYS[standby]
    async with RawServer(answers_with(500)) as ill, RawServer() as well:
        places = (deployment(ill.url, "ill", **terms[0]), deployment(well.url, "well", **terms[1]))
        async with world.router(*places, resources=resources) as router:
            answers = await until_answered(router, world, [world.call(left_ms=1e9) for _ in range(2)])
    assert [answer.deployment for answer in answers] == ["well"] * 2
    assert len(ill.posts) == 2


async def test_a_retry_that_another_process_left_is_charged_where_calls_failed_lately(world: RouterWorld) -> None:
    """This process does not know which deployment failed it: the one that fails others too is likely to be the one."""

    async def fails(request: Request, peer: Peer) -> None:
        await peer.answer(500, b"{}")

    policy = DeploymentPolicy(retry_budget=RetryBudgetPolicy(retries_min=0))
    async with RawServer(fails) as ill, RawServer() as well:
        places = (deployment(ill.url, "ill", weight=100.0), deployment(well.url, "well"))
        async with world.router(*places, policy=policy) as router:
            with pytest.raises(UpstreamError):
                await router.send(world.call())
            for _ in range(30):
                assert (await router.send(world.call(attempt_count=1))).deployment == "well"
    assert len(ill.posts) == 1
