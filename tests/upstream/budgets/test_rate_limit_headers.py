"""Limits that upstreams tell in headers: every form that is in use, hostile ones, and what the router makes of them."""

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.upstream.limits import MemoryLimits
from tests.upstream.raw_server import CHAT, Peer, RawServer, Request, eventually
from tests.upstream.world import RouterWorld, deployment
from tidegate.core.budgets.budget import Budget, BudgetRequest, Grant, Limit, LimitBound, Period
from tidegate.core.deployments import EngineKind
from tidegate.core.errors import Throttled, Withheld
from tidegate.core.nouns import Answer
from tidegate.upstream.budgets.quota import Quota
from tidegate.upstream.budgets.rate_limit_headers import (
    NUMBER_MAX,
    RESET_MS_MAX,
    QuotaLeft,
    RateLimitHeaders,
    read_rate_limits,
    read_rest_left,
)
from tidegate.upstream.calls.router import Router
from tidegate.upstream.routing.deployment_state import DeploymentPolicy
from tidegate.upstream.routing.slots import Capacity

pytestmark = pytest.mark.anyio

NOW_MS = 1_700_000_000_000
AT_ONCE = DeploymentPolicy(patience_ms=0)
MESSAGE = b'{"type":"message","role":"assistant","content":[{"type":"text","text":"hi"}]}'

OPENAI = {
    "x-ratelimit-limit-requests": "60",
    "x-ratelimit-limit-tokens": "150000",
    "x-ratelimit-remaining-requests": "59",
    "x-ratelimit-remaining-tokens": "149984",
    "x-ratelimit-reset-requests": "1s",
    "x-ratelimit-reset-tokens": "6m0s",
}


def test_what_openai_says() -> None:
    assert read_rate_limits(OPENAI, NOW_MS) == RateLimitHeaders(60, 150_000, 0)


@pytest.mark.parametrize(
    ("reset", "wait_ms"),
    [
        ("1s", 1_000),
        ("6m0s", 360_000),
        ("20ms", 20),
        ("1h2m3.5s", 3_723_500),
        ("59.72s", 59_720),
        ("0.4ms", 1),
        ("20000us", 20),
        ("20000µs", 20),
        ("20000000ns", 20),
        ("12", 12_000),
        ("1d", 86_400_000),
        ("0s", 0),
        ("400d", RESET_MS_MAX),
        ("-1s", 0),
        ("soon", 0),
        ("1s and more", 0),
        ("s", 0),
        ("1e9s", 0),
        ("", 0),
        ("9" * 39 + "d", RESET_MS_MAX),
        ("9" * 400 + "d", 0),
    ],
)
def test_nothing_left_is_a_rest_until_the_reset(reset: str, wait_ms: int) -> None:
    found = read_rate_limits({**OPENAI, "x-ratelimit-remaining-tokens": "0", "x-ratelimit-reset-tokens": reset}, NOW_MS)
    assert found == RateLimitHeaders(60, 150_000, wait_ms)


@pytest.mark.parametrize(
    "reset",
    ["1700000030", "1700000030.0", "1700000030000", "2023-11-14T22:13:50Z", "2023-11-14T23:13:50+01:00"],
)
def test_a_reset_may_be_a_moment(reset: str) -> None:
    headers = {**OPENAI, "x-ratelimit-remaining-tokens": "0", "x-ratelimit-reset-tokens": reset}
    assert read_rate_limits(headers, NOW_MS) == RateLimitHeaders(60, 150_000, 30_000)
    assert read_rest_left(headers, NOW_MS).tokens_renew_ms == 30_000
    # By the upstream's own clock where it tells it.
    late = {**headers, "Date": "Tue, 14 Nov 2023 22:13:45 GMT"}
    assert read_rate_limits(late, NOW_MS) == RateLimitHeaders(60, 150_000, 5_000)
    assert read_rest_left(late, NOW_MS).tokens_renew_ms == 5_000


@pytest.mark.parametrize("reset", ["1600000000", "1600000000000", "2020-01-01T00:00:00Z"])
def test_a_reset_in_the_past_is_no_rest(reset: str) -> None:
    headers = {**OPENAI, "x-ratelimit-remaining-tokens": "0", "x-ratelimit-reset-tokens": reset}
    assert read_rate_limits(headers, NOW_MS) == RateLimitHeaders(60, 150_000, 0)


@pytest.mark.parametrize(
    ("reset", "wait_ms"), [("20240101", RESET_MS_MAX), ("999999999", RESET_MS_MAX), ("86400", 86_400_000)]
)
def test_smaller_numbers_are_seconds(reset: str, wait_ms: int) -> None:
    headers = {**OPENAI, "x-ratelimit-remaining-tokens": "0", "x-ratelimit-reset-tokens": reset}
    assert read_rate_limits(headers, NOW_MS) == RateLimitHeaders(60, 150_000, wait_ms)


def test_what_anthropic_says() -> None:
    headers = {
        "anthropic-ratelimit-requests-limit": "50",
        "anthropic-ratelimit-requests-remaining": "0",
        "anthropic-ratelimit-requests-reset": "2023-11-14T22:13:50Z",
        "anthropic-ratelimit-input-tokens-limit": "40000",
        "anthropic-ratelimit-output-tokens-limit": "8000",
        "anthropic-ratelimit-output-tokens-remaining": "0",
        "anthropic-ratelimit-output-tokens-reset": "2023-11-14T22:13:40Z",
    }
    assert read_rate_limits(headers, NOW_MS) == RateLimitHeaders(50, 48_000, 30_000)
    assert read_rate_limits({**headers, "anthropic-ratelimit-tokens-limit": "45000"}, NOW_MS) == RateLimitHeaders(
        50, 45_000, 30_000
    )
    # By the upstream's own clock where it tells it.
    late = {**headers, "Date": "Tue, 14 Nov 2023 22:13:45 GMT"}
    assert read_rate_limits(late, NOW_MS) == RateLimitHeaders(50, 48_000, 5_000)
    for garbage in ("tomorrow", "9999-99-99T00:00:00Z", "2023-11-14T22:13:50" + "0" * 60, "1970-01-01T00:00:00Z"):
        only = {**headers, "anthropic-ratelimit-requests-reset": garbage}
        only["anthropic-ratelimit-output-tokens-remaining"] = "1"
        assert read_rate_limits(only, NOW_MS) == RateLimitHeaders(50, 48_000, 0)


@pytest.mark.parametrize(("kind", "left"), [("requests", QuotaLeft(requests=0)), ("tokens", QuotaLeft(tokens=0))])
def test_one_limit_of_anthropics_tells_that_the_headers_are_its_own(kind: str, left: QuotaLeft) -> None:
    headers = {f"anthropic-ratelimit-{kind}-limit": "50", f"anthropic-ratelimit-{kind}-remaining": "0"}
    assert read_rest_left({**headers, "x-ratelimit-remaining-requests": "9"}, NOW_MS) == left


@pytest.mark.parametrize("count", ["0", "-5", "1.5", "ten", "", "١٢", str(NUMBER_MAX + 1), "9" * 5_000, " "])
def test_a_limit_that_cannot_be_meant_says_nothing(count: str) -> None:
    headers = {"x-ratelimit-limit-requests": count, "x-ratelimit-limit-tokens": count}
    assert read_rate_limits(headers, NOW_MS) is None


_names = st.sampled_from(
    [
        *OPENAI,
        "Date",
        *(
            f"anthropic-ratelimit-{kind}-{what}"
            for kind in ("requests", "tokens", "input-tokens")
            for what in ("limit", "remaining", "reset")
        ),
    ]
)
_words = st.text(max_size=60) | st.sampled_from(
    ["0", "1", "6m0s", "20ms", "2023-11-14T22:13:50Z", "9999-12-31T23:59:59-23:59"]
)


@given(st.dictionaries(_names, _words), st.integers(0, 2**48))
@example({"anthropic-ratelimit-requests-limit": "1", "anthropic-ratelimit-requests-remaining": "0",
          "anthropic-ratelimit-requests-reset": "0001-01-01T00:00:00+23:59"}, 0)  # fmt: skip
def test_no_header_does_harm(headers: dict[str, str], now_ms: int) -> None:
    found = read_rate_limits(headers, now_ms)
    if found is not None:
        assert found.requests is None or 0 < found.requests <= NUMBER_MAX
        assert found.tokens is None or 0 < found.tokens <= 2 * NUMBER_MAX
        assert 0 <= found.empty_for_ms <= RESET_MS_MAX
    rest = read_rest_left(headers, now_ms)
    assert rest.requests is None or 0 <= rest.requests <= NUMBER_MAX
    assert rest.tokens is None or 0 <= rest.tokens <= 2 * NUMBER_MAX
    assert 0 < rest.requests_renew_ms <= RESET_MS_MAX
    assert 0 < rest.tokens_renew_ms <= RESET_MS_MAX


async def test_a_limit_in_the_headers_tightens_and_is_kept_for_other_processes() -> None:
    world = RouterWorld()
    limits = MemoryLimits(world.clock)

    async def script(request: Request, peer: Peer) -> None:
        await peer.answer(200, CHAT, x_ratelimit_limit_requests="3")

    async with RawServer(script) as server:
        place = deployment(server.url, limits=(Limit(Period.MINUTE, 1_000),))
        async with world.router(place, policy=AT_ONCE, capacity=Capacity(limits, discovered=limits)) as router:
            await router.send(world.call())
            assert router.status()[0].discovered == Limit(Period.MINUTE, 3, None)
            ends = await asyncio.gather(*(router.send(world.call()) for _ in range(9)), return_exceptions=True)
            assert sum(isinstance(end, Withheld) for end in ends) == 7, "the first call is inside the window"
            assert {end.spent for end in ends if isinstance(end, Withheld)} == {"deployment:one/discovered"}
            assert router.rests_until_ms("m") > world.clock.monotonic
            await eventually(lambda: limits.reported == {"one": Limit(Period.MINUTE, 3)}, "it to be kept")
        # The next start knows it before the first answer.
        async with world.router(place, policy=AT_ONCE, capacity=Capacity(limits, discovered=limits)) as router:
            await eventually(lambda: router.status()[0].discovered is not None, "it to be read")


async def test_nothing_left_rests_the_deployment_and_a_longer_retry_after_wins() -> None:
    world = RouterWorld()
    answers = iter([(200, {"Retry_After": "1"}), (429, {"Retry_After": "100"}), (200, {})])
    reset = datetime.fromtimestamp(world.clock.now_ms() / 1000 + 30, UTC)

    async def script(request: Request, peer: Peer) -> None:
        status, more = next(answers)
        headers = {
            "anthropic-ratelimit-requests-limit": "9",
            "anthropic-ratelimit-requests-remaining": "0",
            "anthropic-ratelimit-requests-reset": f"{reset:%Y-%m-%dT%H:%M:%SZ}",
            **more,
        }
        await peer.answer(status, MESSAGE, **headers)

    async with RawServer(script) as server:
        place = deployment(server.url, engine=EngineKind.ANTHROPIC)
        async with world.router(place, capacity=Capacity(MemoryLimits(world.clock))) as router:
            await router.send(world.call(endpoint="/v1/messages"))
            assert router.rests_until_ms("m") == world.clock.monotonic + 30_000
            world.clock.advance(30_000)
            with pytest.raises(Throttled):
                await router.send(world.call(endpoint="/v1/messages"))
            assert router.rests_until_ms("m") == world.clock.monotonic + 100_000
            assert router.status()[0].state == "resting"
    assert len(server.posts) == 2


class Metered:
    """A server that allows so many requests a minute, of which some were used by others before, and tells what is left."""

    def __init__(self, world: RouterWorld, limit: int, used: int, renews_in_ms: int = 60_000) -> None:
        self.world = world
        self.limit, self.used = limit, used
        self.renews_ms = world.clock.monotonic + renews_in_ms
        self.refused = 0

    async def __call__(self, request: Request, peer: Peer) -> None:
        now_ms = self.world.clock.monotonic
        if now_ms >= self.renews_ms:
            self.used, self.renews_ms = 0, now_ms + 60_000
        is_over = self.used >= self.limit
        self.refused += is_over
        self.used += not is_over
        headers: dict[str, Any] = {
            "x-ratelimit-limit-requests": f"{self.limit}",
            "x-ratelimit-remaining-requests": f"{self.limit - self.used}",
            "x-ratelimit-reset-requests": f"{(self.renews_ms - now_ms) / 1000:g}s",
        }
        await peer.answer(*((429, b"{}") if is_over else (200, CHAT)), **headers)


async def all_sent(router: Router, world: RouterWorld, count: int) -> int:
    """How many of so many calls are answered now."""
    ends = await asyncio.gather(*(router.send(world.call()) for _ in range(count)), return_exceptions=True)
    return sum(isinstance(end, Answer) for end in ends)


@pytest.mark.parametrize("renews_in_ms", [60_000, 20_000])
async def test_what_is_left_counts_from_the_first_answer_until_it_renews(renews_in_ms: int) -> None:
    world = RouterWorld()
    limits = MemoryLimits(world.clock)
    metered = Metered(world, 20, 14, renews_in_ms)
    async with RawServer(metered) as server:
        capacity = Capacity(limits, discovered=limits)
        async with world.router(deployment(server.url), policy=AT_ONCE, capacity=capacity) as router:
            assert await all_sent(router, world, 1) == 1
            assert await all_sent(router, world, 40) == 5
            world.clock.advance(renews_in_ms - 1)
            assert await all_sent(router, world, 40) == 0
            assert router.rests_until_ms("m") > world.clock.monotonic
            world.clock.advance(61_000)
            assert await all_sent(router, world, 40) == 20
    assert metered.refused == 0


async def test_another_process_that_has_not_asked_yet_knows_what_is_spent() -> None:
    world = RouterWorld()
    limits = MemoryLimits(world.clock)
    metered = Metered(world, 20, 14)
    async with RawServer(metered) as server:
        capacity = Capacity(limits, discovered=limits)
        async with world.router(deployment(server.url), policy=AT_ONCE, capacity=capacity) as first:
            assert await all_sent(first, world, 1) == 1
            await eventually(lambda: "one" in limits.reported, "it to be kept")
            async with world.router(deployment(server.url), policy=AT_ONCE, capacity=capacity) as second:
                await eventually(lambda: second.status()[0].discovered is not None, "it to be read")
                sent = await asyncio.gather(all_sent(first, world, 20), all_sent(second, world, 20))
    assert sum(sent) == 5
    assert metered.refused == 0


async def test_tokens_that_are_left_count_likewise() -> None:
    world = RouterWorld()
    limits = MemoryLimits(world.clock)
    body = b'{"choices":[{}],"usage":{"prompt_tokens":50,"completion_tokens":50}}'

    async def script(request: Request, peer: Peer) -> None:
        headers = {
            "x-ratelimit-limit-tokens": "1000",
            "x-ratelimit-remaining-tokens": f"{max(0, 300 - 100 * len(server.posts))}",
        }
        await peer.answer(200, body, **headers, **{"x-ratelimit-reset-tokens": "30s"})

    async with RawServer(script) as server:
        capacity = Capacity(limits, discovered=limits)
        async with world.router(deployment(server.url), policy=AT_ONCE, capacity=capacity) as router:
            for _ in range(10):
                await all_sent(router, world, 1)
            assert len(server.posts) <= 3
            world.clock.advance(61_000)
            assert await all_sent(router, world, 1) == 1


def test_what_is_left_is_kept_for_requests_and_for_tokens_apart() -> None:
    limit = Limit(Period.MINUTE, requests=10, tokens=1_000)
    quota = Quota()
    assert (quota.spent_of(limit, 3, 50), quota.opens_at_ms(10**9)) == ((3, 150), 0.0)
    assert quota.spent_of(Limit(Period.MINUTE, requests=10), 3, 50) == (3, 0)
    assert quota.spent_of(Limit(Period.MINUTE, tokens=100), 3, 50) == (0, 100)
    quota.note(QuotaLeft(), 0, 100, 0.0)
    assert quota.spent_of(limit, 3, 50) == (3, 150), "an answer that says nothing changes nothing"
    quota.note(QuotaLeft(tokens=300, tokens_renew_ms=700), 0, 100, 50.0)
    assert [quota.opens_at_ms(tokens) for tokens in (300, 301)] == [0.0, 750.0]
    quota.count(100)
    assert [quota.opens_at_ms(tokens) for tokens in (200, 201)] == [0.0, 750.0]
    assert quota.spent_of(limit, 3, 50) == (3, 800)
    # Two are on their way that this figure does not know of, one of them after the call that brought it.
    quota.count(100)
    quota.count(100)
    quota.note(QuotaLeft(requests=1, requests_renew_ms=900, tokens=400, tokens_renew_ms=700), 1, 100, 100.0)
    assert quota.spent_of(limit, 3, 50) == (10, 700)
    assert [quota.opens_at_ms(tokens) for tokens in (1, 301)] == [1_000.0, 1_000.0]
    quota.note(QuotaLeft(requests=5), 0, 100, 200.0)
    assert [quota.opens_at_ms(tokens) for tokens in (300, 301)] == [0.0, 800.0]
    assert quota.spent_of(limit, 3, 50) == (5, 700)
    quota.note(QuotaLeft(requests=10, tokens=5_000), 0, 100, 300.0)
    assert quota.spent_of(limit, 3, 50) == (0, 0), "more may be left than we know of"


async def test_nothing_goes_out_when_its_server_reports_nothing_left_while_it_waits_for_its_permit() -> None:
    world = RouterWorld()
    asked, go_on = asyncio.Event(), asyncio.Event()

    class SlowLimits(MemoryLimits):
        async def debit(self, asks: Sequence[BudgetRequest]) -> list[Grant]:
            asked.set()
            await go_on.wait()
            return await super().debit(asks)

    async def script(request: Request, peer: Peer) -> None:
        await peer.answer(200, CHAT, **{"x-ratelimit-limit-requests": "5", "x-ratelimit-remaining-requests": "0"})

    tenant = (Budget(LimitBound.TENANT, "acme", (Limit(Period.MINUTE, 100),)),)
    async with RawServer(script) as server:
        capacity = Capacity(SlowLimits(world.clock))
        async with world.router(deployment(server.url), policy=AT_ONCE, capacity=capacity) as router:
            waits = asyncio.ensure_future(router.send(world.call(budgets=tenant)))
            await asked.wait()
            await router.send(world.call())
            go_on.set()
            with pytest.raises(Withheld) as caught:
                await waits
    assert (caught.value.code, len(server.posts)) == ("upstream_rests", 1)
