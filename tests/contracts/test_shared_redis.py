"""Wake-ups and rests: in one process, and through Redis between several. What is lost costs a poll, never more."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from tests.support.ports import HandClock
from tests.support.processes import wait_until_async
from tests.support.redis import RedisServer
from tidegate.backends import shared_redis
from tidegate.backends.redis_line import ended
from tidegate.backends.shared_redis import LocalRests, RedisShared
from tidegate.backends.system import LocalWake, SystemClock, SystemEntropy
from tidegate.core.ports import Listener, Rests, Wake
from tidegate.settings import Settings, load
from tidegate.storage import opened

pytestmark = pytest.mark.anyio

LONG_S = 60.0


@pytest.fixture
async def shared(redis_url: str) -> AsyncIterator[Callable[[], Awaitable[RedisShared]]]:
    """Makes one more process that shares through Redis."""
    name = f"t-{secrets.token_hex(8)}"
    opened: list[RedisShared] = []

    async def another() -> RedisShared:
        opened.append(RedisShared(redis_url, name, SystemClock(), SystemEntropy()))
        opened[-1].start()
        return opened[-1]

    yield another
    for one in opened:
        await one.close()


async def was_notified(listener: Listener) -> bool:
    """Whether there was a ring since the last look."""
    waiting = asyncio.create_task(listener.wait(LONG_S))
    for _ in range(3):
        await asyncio.sleep(0)
    was_rung = waiting.done()
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    return was_rung


@pytest.mark.parametrize("kind", ["local", "redis"])
async def test_a_ring_reaches_every_loop_of_this_process_once(kind: str, redis_url: str) -> None:
    wake: Wake = LocalWake() if kind == "local" else RedisShared(redis_url, "t-quiet", SystemClock(), SystemEntropy())
    one, two = wake.listen(), wake.listen()
    wake.notify()
    assert (await was_notified(one), await was_notified(two)) == (True, True)
    assert (await was_notified(one), await was_notified(two)) == (False, False)


async def test_a_ring_wakes_other_processes(shared: Callable[[], Awaitable[RedisShared]]) -> None:
    ringing, hearing = await shared(), await shared()
    listener = hearing.listen()
    # Once it listens, its own first ring is over; every ring from then on comes from the other.
    await listener.wait(LONG_S)

    async def rung() -> bool:
        ringing.notify()
        return await was_notified(listener)

    await wait_until_async(rung, LONG_S, "a ring to arrive")


@pytest.mark.parametrize("kind", ["local", "redis"])
async def test_a_longer_rest_always_wins(kind: str, redis_url: str) -> None:
    clock = HandClock(1_000.0)
    rests: Rests = LocalRests(clock) if kind == "local" else RedisShared(redis_url, "t-quiet", clock, SystemEntropy())
    rests.publish("gpu", 30_000)
    rests.publish("gpu", 2_000)
    rests.publish("other", 0)
    assert rests.current() == {"gpu": 31_000.0}
    rests.publish("gpu", 60_000)
    clock.advance(59_999)
    assert rests.current() == {"gpu": 61_000.0}
    rests.publish("gpu", 1)
    clock.advance(1)
    assert rests.current() == {}


async def test_no_rest_is_longer_than_a_day() -> None:
    """A server that names a moment in another century is asked again tomorrow."""
    rests = LocalRests(HandClock(1_000.0))
    rests.publish("gpu", 10**13)
    assert rests.current() == {"gpu": 1_000.0 + 24 * 3_600_000}


async def test_a_rest_is_known_to_other_processes_and_a_shorter_one_changes_nothing(
    shared: Callable[[], Awaitable[RedisShared]],
) -> None:
    one, two = await shared(), await shared()
    one.publish("gpu", 3_600_000)
    await wait_until_async(lambda: "gpu" in two.current(), LONG_S, "the rest to arrive")
    until_ms = two.current()["gpu"]
    third = await shared()
    third.publish("gpu", 1_000)
    third.publish("other", 3_600_000)
    await wait_until_async(lambda: "other" in two.current(), LONG_S, "the other rest")
    await wait_until_async(lambda: third.current()["gpu"] > until_ms - 60_000, LONG_S, "the longer rest to win")
    assert two.current()["gpu"] >= until_ms


@pytest.mark.parametrize("by", ["its subscription", "its poll"])
async def test_a_rest_whose_message_was_lost_is_learned(
    redis_url: str, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    monkeypatch.setattr(shared_redis, "_POLL_S", 0.01)
    name = f"t-{secrets.token_hex(8)}"
    one, two = (RedisShared(redis_url, name, SystemClock(), SystemEntropy()) for _ in range(2))
    one.publish("gpu", 3_600_000)
    await one._tell_rests()
    listener = two.listen()
    learning = asyncio.create_task(two._listen_once() if by == "its subscription" else two._tell())
    await wait_until_async(lambda: "gpu" in two.current(), LONG_S, "the rest to be learned")
    assert await was_notified(listener) == (by == "its subscription"), "a ring may have been lost, too"
    await ended(learning)
    await one.close()
    await two.close()


async def test_rests_of_another_installation_on_the_same_redis_are_not_ours(
    shared: Callable[[], Awaitable[RedisShared]], redis_url: str
) -> None:
    one, two = await shared(), await shared()
    one.publish("gpu", 3_600_000)
    await wait_until_async(lambda: "gpu" in two.current(), LONG_S, "the rest to arrive")
    theirs = RedisShared(redis_url, f"t-{secrets.token_hex(8)}", SystemClock(), SystemEntropy())
    await theirs._ask_rests()
    assert theirs.current() == {}
    await theirs.close()


async def test_without_redis_everything_goes_on_in_this_process(private_redis: RedisServer) -> None:
    one = RedisShared(private_redis.url, "t", SystemClock(), SystemEntropy())
    two = RedisShared(private_redis.url, "t", SystemClock(), SystemEntropy())
    private_redis.stop()
    one.start()
    two.start()
    try:
        listener = one.listen()
        one.notify()
        one.publish("gpu", 3_600_000)
        assert await was_notified(listener)
        assert "gpu" in one.current()
        private_redis.start()
        await wait_until_async(lambda: "gpu" in two.current(), LONG_S, "what was published while Redis was away")
    finally:
        # The client library may swallow the cancellation of what is left open, and a failure would pass for a time-out.
        await one.close()
        await two.close()


async def test_it_closes_at_any_moment_of_its_start(redis_url: str) -> None:
    """The client library now and then swallows a cancellation that comes while it connects."""
    for number in range(60):
        shared = RedisShared(redis_url, f"t-{secrets.token_hex(8)}", SystemClock(), SystemEntropy())
        shared.start()
        await asyncio.sleep(number % 5 / 1000)
        await shared.close()


async def test_a_notice_that_cannot_be_sent_is_lost_without_an_error() -> None:
    away = RedisShared("redis://127.0.0.1:1/0", "t-away", SystemClock(), SystemEntropy())
    await away.send_notice("lost")
    await away.close()


async def test_open_processes_of_one_store_share_rests_and_rings_and_no_others_do(
    redis_url: str, tmp_path: Path
) -> None:
    """As a command opens its parts: all of them have the same name in Redis here, and one has another store."""

    def settings(place: str) -> Settings:
        return load(None, tmp_path / place, {}, {"TIDEGATE_REDIS_URL": redis_url}).settings

    async with opened(settings("a")) as one, opened(settings("a")) as two, opened(settings("b")) as other:
        ours, theirs, others = one.shared, two.shared, other.shared
        assert ours is not None
        assert theirs is not None
        assert others is not None
        listener = two.wakes.inputs.listen()
        ours.publish("gpu", 3_600_000)
        await wait_until_async(lambda: "gpu" in theirs.current(), LONG_S, "the rest to arrive")
        await others._ask_rests()
        assert others.current() == {}
        # It listens, so its own first ring is over.
        await was_notified(listener)

        async def rung() -> bool:
            one.wakes.inputs.notify()
            return await was_notified(listener)

        await wait_until_async(rung, LONG_S, "a ring to arrive")
