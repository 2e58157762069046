"""DeltaLLM's measured failures: an outage that ends, refusals that use up attempts, a short wait that hides a long one."""

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import pytest

from tests.upstream.limits import MemoryLimits
from tests.upstream.raw_server import CHAT, Peer, RawServer, Request, eventually
from tests.upstream.world import RouterWorld, deployment
from tidegate.core import retry
from tidegate.core.budgets.budget import BudgetRequest, Grant, Limit, Period
from tidegate.core.errors import UpstreamError, Withheld
from tidegate.upstream.http.connections import Connections
from tidegate.upstream.routing.deployment_state import DeploymentPolicy
from tidegate.upstream.routing.slots import Capacity

pytestmark = pytest.mark.anyio

OUTAGE_MS = 150_000


async def test_an_outage_of_150_seconds_ends_by_itself_and_costs_no_item(world: RouterWorld) -> None:
    began = world.clock.monotonic

    async def script(request: Request, peer: Peer) -> None:
        is_away = world.clock.monotonic < began + OUTAGE_MS
        await peer.answer(503 if is_away else 200, b"{}" if is_away else CHAT)

    async with RawServer(script) as server, world.router(deployment(server.url)) as router:
        while world.clock.monotonic < began + OUTAGE_MS:
            ends = await asyncio.gather(*(router.send(world.call()) for _ in range(8)), return_exceptions=True)
            assert all(isinstance(end, UpstreamError) for end in ends)
            world.clock.advance(max(1_000, router.rests_until_ms("m") - world.clock.monotonic))
        # The burst that opened its circuit, and then no item at all: it does not even answer the probe.
        assert len(server.posts) <= 8 + OUTAGE_MS // 5_000 // 12 + 1
        came_back = world.clock.monotonic
        while router.status()[0].state != "closed":
            world.clock.advance(max(0.0, router.rests_until_ms("m") - world.clock.monotonic))
            await asyncio.gather(router.send(world.call()), return_exceptions=True)
        assert world.clock.monotonic - came_back <= 5_000
        answers = await asyncio.gather(*(router.send(world.call()) for _ in range(50)))
        assert len(answers) == 50


async def test_neither_a_429_nor_a_spent_budget_uses_up_an_attempt(world: RouterWorld) -> None:
    refusals = iter([True] * 40)

    async def script(request: Request, peer: Peer) -> None:
        if next(refusals, False):
            await peer.answer(429, b"{}", Retry_After="0.1")
        else:
            await peer.answer()

    limits = MemoryLimits(world.clock)
    policy = retry.RetryPolicy(attempts_max=1)
    met = {"upstream_throttled": 0, "budget_spent": 0}
    async with RawServer(script) as server:
        place = deployment(server.url, limits=(Limit(Period.MINUTE, 7),))
        async with world.router(place, policy=DeploymentPolicy(patience_ms=0), capacity=Capacity(limits)) as router:
            for _ in range(200):
                try:
                    await router.send(world.call(key="same"))
                    break
                except UpstreamError as error:
                    met[error.reason] += 1
                    now_ms = int(world.clock.monotonic)
                    verdict = retry.decide(error, 0, now_ms, now_ms + 10**9, policy, 0.5)
                assert isinstance(verdict, retry.RetryAt)
                assert not verdict.counts
                world.clock.advance(verdict.at_ms - now_ms)
    assert met["upstream_throttled"] == 40
    assert met["budget_spent"] > 0
    assert len(server.posts) == 41


async def test_whatever_the_order_of_refusals_the_longest_rest_stands(world: RouterWorld) -> None:
    dice = random.Random(3)
    waits = [dice.randint(0, 90) for _ in range(30)]
    together = asyncio.Barrier(len(waits))

    async def script(request: Request, peer: Peer) -> None:
        await together.wait()
        await peer.answer(429, b"{}", Retry_After=request.headers["Idempotency-Key"])

    async with RawServer(script) as server, world.router(deployment(server.url)) as router:
        sends = (router.send(world.call(key=str(wait))) for wait in waits)
        await asyncio.gather(*sends, return_exceptions=True)
        assert router.rests_until_ms("m") == world.clock.monotonic + max(waits) * 1_000


class LateLimits(MemoryLimits):
    """Answers when it is let."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.asked, self.answer = asyncio.Event(), asyncio.Event()

    async def debit(self, asks: Sequence[BudgetRequest]) -> list[Grant]:
        grants = await super().debit(asks)
        self.asked.set()
        await self.answer.wait()
        return grants


async def test_a_grant_that_comes_too_late_sends_nothing(world: RouterWorld) -> None:
    limits = LateLimits(world.clock)
    async with RawServer() as server:
        place = deployment(server.url, limits=(Limit(Period.MINUTE, 100),))
        async with world.router(place, capacity=Capacity(limits)) as router:
            call = asyncio.create_task(router.send(world.call()))
            await limits.asked.wait()
            limits.asked.clear()
            world.clock.advance(250)
            limits.answer.set()
            # The first permit had run out when it came; the second is in time.
            await call
            assert len(limits.questions) == 2
    assert len(server.posts) == 1


async def test_a_lease_that_ran_out_while_a_permit_was_waited_for_sends_nothing(world: RouterWorld) -> None:
    limits = LateLimits(world.clock)
    async with RawServer() as server:
        place = deployment(server.url, limits=(Limit(Period.MINUTE, 100),))
        async with world.router(place, capacity=Capacity(limits)) as router:
            begin_by_ms = world.clock.monotonic + 100
            call = asyncio.create_task(router.send(world.call(begin_by_ms=begin_by_ms)))
            await limits.asked.wait()
            world.clock.advance(100)
            limits.answer.set()
            ends = await asyncio.gather(call, return_exceptions=True)
            assert isinstance(ends[0], Withheld)
            assert ends[0].code == "lease_over"
            assert router.status()[0].failures == {}
            await eventually(lambda: limits.used("one") == (0, 0), "its permit to be given back")
    assert server.posts == []


async def test_a_job_that_was_paused_while_a_permit_was_waited_for_sends_nothing(world: RouterWorld) -> None:
    limits, paused = LateLimits(world.clock), asyncio.Event()
    async with RawServer() as server:
        place = deployment(server.url, limits=(Limit(Period.MINUTE, 100),))
        async with world.router(place, capacity=Capacity(limits)) as router:
            call = asyncio.create_task(router.send(world.call(may_begin=lambda: not paused.is_set())))
            await limits.asked.wait()
            paused.set()
            limits.answer.set()
            ends = await asyncio.gather(call, return_exceptions=True)
            assert isinstance(ends[0], Withheld)
            assert ends[0].code == "lease_over"
            assert router.status()[0].failures == {}
            await eventually(lambda: limits.used("one") == (0, 0), "its permit to go back")
    assert server.posts == []


async def test_an_item_in_front_whose_job_was_paused_is_put_off_at_once(world: RouterWorld) -> None:
    """Its slot is still this process's: to choose again would find the same deployment, for as long as the pause lasts."""
    looks = 0

    def may_begin() -> bool:
        nonlocal looks
        looks += 1
        return looks > 20

    async with RawServer() as server, world.router(deployment(server.url)) as router:
        await router.send(world.call())
        with pytest.raises(Withheld) as put_off:
            await router.send_interactive(world.call(may_begin=may_begin), "tenant")
    assert (put_off.value.code, len(server.posts)) == ("lease_over", 1)


async def test_closing_while_calls_wait_for_a_permit_puts_them_off(world: RouterWorld) -> None:
    limits = LateLimits(world.clock)
    async with RawServer() as server:
        place = deployment(server.url, limits=(Limit(Period.MINUTE, 100),))
        async with world.router(place, capacity=Capacity(limits)) as router:
            first = asyncio.create_task(router.send(world.call()))
            await limits.asked.wait()
            second = asyncio.create_task(router.send(world.call()))
            await asyncio.sleep(0)
            closing = asyncio.create_task(router.close())
            ends = await asyncio.gather(second, return_exceptions=True)
            assert isinstance(ends[0], Withheld)
            first.cancel()
            limits.answer.set()
            await asyncio.gather(first, closing, return_exceptions=True)
    assert server.posts == []


@pytest.mark.parametrize("is_limited", [False, True])
@pytest.mark.parametrize("end", ["lease", "window", "pause"])
async def test_nothing_is_sent_when_the_connection_comes_after_the_lease_the_window_or_a_pause(
    world: RouterWorld, monkeypatch: pytest.MonkeyPatch, end: str, is_limited: bool
) -> None:
    opened, moment_ms = Connections.open, world.clock.monotonic + 100

    async def slow(self: Connections, request: Any) -> Any:
        world.clock.advance(150)
        return await opened(self, request)

    monkeypatch.setattr(Connections, "open", slow)
    call = {
        "lease": world.call(begin_by_ms=moment_ms),
        "window": world.call(left_ms=100),
        "pause": world.call(may_begin=lambda: world.clock.monotonic < moment_ms),
    }[end]
    limits = MemoryLimits(world.clock)
    async with RawServer() as server:
        place = deployment(server.url, limits=(Limit(Period.MINUTE, 100),) if is_limited else ())
        async with world.router(place, capacity=Capacity(limits)) as router:
            with pytest.raises(Withheld) as refused:
                await router.send(call)
            is_late = end == "window" and is_limited
            assert refused.value.code == ("deadline_passed" if is_late else "lease_over")
            await eventually(lambda: limits.used("one") == (0, 0), "its permits to go back")
    assert server.posts == []
