"""Our Lua scripts on a real server, at exact moments: how they round, when what they keep ends, and what they never give out.

Only the server's clock is replaced, in the text that is sent; everything else is the script as it is shipped. The simulated Redis runs
the same scripts and must answer and remember the same.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest
import redis.asyncio

from tests.simulation.world.redis_scripts import Keys
from tidegate.backends.redis_line import script_text

pytestmark = pytest.mark.anyio

NOW_MS = 1_800_000_000_123
KEEP_MS = 120_000
TIGHT_MS = 90_000
FAR_MS = NOW_MS + 10**9
LENDER_MS = 100
LARGE = 2**53 - 1
_CLOCK = "redis.call('TIME')"


@dataclass
class Scripts:
    """One key of a real server, and the same key of a simulated one."""

    server: redis.asyncio.Redis
    key: str
    simulated: Keys

    async def run(self, name: str, *arguments: str | int, now_ms: int = NOW_MS) -> Any:
        text = script_text(name)
        assert text.count(_CLOCK) == 1
        text = text.replace(_CLOCK, f"{{'{now_ms // 1000}', '{now_ms % 1000}999'}}")
        answer = await self.server.eval(text, 1, self.key, *arguments)
        if name in ("take", "deposit"):
            assert self.simulated.run_script(text, self.key, arguments) == answer
            assert self.simulated.hashes[self.key.encode()].fields == await self.server.hgetall(self.key)
        return answer

    async def take(self, asked: int, each: int, *, fresh: int = 0, now_ms: int = NOW_MS) -> list[Any]:
        answer: list[Any] = await self.run("take", asked, each, fresh, LENDER_MS, now_ms=now_ms)
        return answer

    async def deposit(
        self,
        requests: int,
        tokens: int,
        *,
        start: int = NOW_MS,
        till: int = FAR_MS,
        rest_ms: int = 0,
        rest_each: int = 0,
        wait_till: int = 0,
        left_tokens: int = 0,
        now_ms: int = NOW_MS,
    ) -> list[Any]:
        words = (requests, tokens, start, till, "grant", rest_ms, rest_each, wait_till, "tenant:a", left_tokens)
        answer: list[Any] = await self.run("deposit", *words, now_ms=now_ms)
        return answer

    async def left(self) -> tuple[int, int]:
        """Requests and tokens that the block still has."""
        requests, tokens = await self.server.hmget(self.key, "requests", "tokens")
        assert requests is not None
        assert tokens is not None
        return int(requests), int(tokens)


@pytest.fixture
async def scripts(redis_url: str) -> AsyncIterator[Scripts]:
    server = redis.asyncio.from_url(redis_url)
    try:
        yield Scripts(server, f"t-lua:{secrets.token_hex(8)}", Keys(lambda: NOW_MS))
    finally:
        await server.aclose()


@pytest.mark.parametrize(
    ("tokens", "each", "asked", "granted"),
    [
        (29, 10, 5, 2),
        (30, 10, 5, 3),
        (31, 10, 5, 3),
        (19, 10, 5, 1),
        (1, 1, 5, 1),
        (100, 7, 3, 3),
        (100, 0, 5, 5),
        (0, 0, 9, 7),
        (LARGE, LARGE, 2, 1),
        (LARGE, 1, 7, 7),
    ],
)
async def test_a_grant_is_rounded_down_to_what_the_tokens_pay_for(
    scripts: Scripts, tokens: int, each: int, asked: int, granted: int
) -> None:
    await scripts.deposit(7, tokens)
    assert await scripts.take(asked, each) == [b"granted", granted, FAR_MS - NOW_MS, b"grant"]
    assert await scripts.left() == (7 - granted, tokens - granted * each), "to the unit, however large"


@pytest.mark.parametrize(("tokens", "each"), [(9, 10), (0, 1), (LARGE - 1, LARGE)])
async def test_what_does_not_pay_for_one_request_grants_none(scripts: Scripts, tokens: int, each: int) -> None:
    await scripts.deposit(7, tokens)
    assert (await scripts.take(1, each))[0] == b"lend"
    assert await scripts.left() == (7, tokens), "and nothing is taken for it"


async def test_no_more_is_granted_than_was_put_down(scripts: Scripts) -> None:
    await scripts.deposit(5, 47)
    granted = 0
    while (answer := await scripts.take(2, 9))[0] == b"granted":
        granted += answer[1]
    assert (granted, await scripts.left()) == (5, (0, 2))


@pytest.mark.parametrize(
    ("now_ms", "kind"),
    [
        (NOW_MS - 1, b"lend"),
        (NOW_MS, b"granted"),
        (NOW_MS + 249, b"granted"),
        (NOW_MS + 250, b"lend"),
        (NOW_MS + 251, b"lend"),
    ],
)
async def test_a_block_is_dealt_from_its_first_ms_to_before_its_last(
    scripts: Scripts, now_ms: int, kind: bytes
) -> None:
    await scripts.deposit(3, 30, till=NOW_MS + 250, now_ms=NOW_MS - 1)
    answer = await scripts.take(1, 10, now_ms=now_ms)
    assert answer[0] == kind
    if kind == b"granted":
        assert answer[2] == NOW_MS + 250 - now_ms


@pytest.mark.parametrize(
    ("now_ms", "each", "kind"),
    [
        (NOW_MS + 199, 10, b"resting"),
        (NOW_MS + 199, 11, b"resting"),
        (NOW_MS + 199, 9, b"lend"),
        (NOW_MS + 200, 10, b"lend"),
    ],
)
async def test_a_rest_ends_on_its_ms_and_holds_back_requests_that_want_as_much(
    scripts: Scripts, now_ms: int, each: int, kind: bytes
) -> None:
    await scripts.deposit(0, 0, rest_ms=200, rest_each=10, wait_till=NOW_MS + 5_000, left_tokens=7)
    answer = await scripts.take(1, each, now_ms=now_ms)
    assert answer[0] == kind
    if kind == b"resting":
        assert answer[1:] == [NOW_MS + 5_000 - now_ms, b"tenant:a", 7]


@pytest.mark.parametrize(("now_ms", "kind"), [(NOW_MS + LENDER_MS - 1, b"busy"), (NOW_MS + LENDER_MS, b"lend")])
async def test_a_lender_has_its_time_and_no_longer(scripts: Scripts, now_ms: int, kind: bytes) -> None:
    assert await scripts.take(1, 0) == [b"lend", NOW_MS, 0]
    assert (await scripts.take(1, 0, now_ms=now_ms))[0] == kind


async def test_a_deposit_ends_the_lenders_time(scripts: Scripts) -> None:
    await scripts.take(1, 0)
    await scripts.deposit(0, 0)
    assert (await scripts.take(1, 0))[0] == b"lend"


@pytest.mark.parametrize(
    ("now_ms", "demand"), [(NOW_MS + TIGHT_MS - 1, 0), (NOW_MS + TIGHT_MS, 7), (NOW_MS + TIGHT_MS + 1, 7)]
)
async def test_others_are_fetched_for_only_a_while_after_the_store_had_too_little(
    scripts: Scripts, now_ms: int, demand: int
) -> None:
    await scripts.deposit(0, 0, rest_ms=1)
    assert await scripts.take(4, 0, fresh=4) == [b"resting", 0 - NOW_MS, b"tenant:a", 0]
    assert await scripts.take(3, 0, fresh=3, now_ms=now_ms) == [b"lend", now_ms, demand]
    assert await scripts.take(1, 0, fresh=0, now_ms=now_ms) == [b"busy"]


async def test_a_deposit_hands_back_what_was_left_and_shortens_the_wait(scripts: Scripts) -> None:
    assert await scripts.deposit(5, 50) == [b"", 0, 0]
    await scripts.take(2, 10)
    assert await scripts.deposit(0, 0, rest_ms=200, wait_till=NOW_MS + 9_000) == [b"grant", 3, 30]
    assert await scripts.take(1, 0) == [b"resting", 200, b"tenant:a", 0]
    assert await scripts.deposit(0, 0, rest_ms=200, wait_till=NOW_MS + 9_000) == [b"grant", 0, 0]
    assert await scripts.take(1, 0) == [b"resting", 9_000, b"tenant:a", 0]


async def test_what_was_written_before_a_clock_was_set_back_counts_for_nothing(scripts: Scripts) -> None:
    await scripts.deposit(5, 50, start=NOW_MS - 10_000)
    assert (await scripts.take(1, 10, now_ms=NOW_MS - 1))[0] == b"lend"
    assert b"requests" not in await scripts.server.hgetall(scripts.key)


@pytest.mark.parametrize("name", ["take", "deposit"])
async def test_a_block_is_forgotten_two_minutes_after_it_was_last_used(scripts: Scripts, name: str) -> None:
    await scripts.deposit(5, 50)
    await scripts.server.pexpire(scripts.key, 500_000)
    await (scripts.take(1, 10) if name == "take" else scripts.deposit(1, 10))
    assert 0 < await scripts.server.pttl(scripts.key) <= KEEP_MS
    await scripts.server.pexpire(scripts.key, 1_000)
    await (scripts.take(1, 10) if name == "take" else scripts.deposit(1, 10))
    assert KEEP_MS - 60_000 < await scripts.server.pttl(scripts.key) <= KEEP_MS


async def test_the_longest_rest_of_a_deployment_counts_and_one_that_is_over_is_forgotten(scripts: Scripts) -> None:
    for rest_ms in (300, 200):
        await scripts.run("rest", "gpu", rest_ms, "t-lua")
    await scripts.run("rest", "cpu", 250, "t-lua")
    assert await scripts.run("rests", now_ms=NOW_MS + 249) == [b"gpu", 51, b"cpu", 1]
    assert await scripts.run("rests", now_ms=NOW_MS + 250) == [b"gpu", 50]
    assert await scripts.server.hkeys(scripts.key) == [b"gpu"]
    assert await scripts.run("rests", now_ms=NOW_MS + 300) == []


async def test_rests_with_an_unreadable_end_are_over(scripts: Scripts) -> None:
    await scripts.server.hset(scripts.key, mapping={"gpu": "soon", "cpu": FAR_MS})
    assert await scripts.run("rests") == [b"cpu", FAR_MS - NOW_MS]
