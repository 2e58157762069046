"""What Redis may do to shared limits: be flushed, forget scripts, restart, fall silent, be another server.

It can lose budget and never mint it."""

from __future__ import annotations

import asyncio
from itertools import chain
from typing import Any

import pytest
import redis.asyncio

from tests.contracts.conftest import OpenPostgres
from tests.contracts.limits_world import LimitsWorld, budget, minute, until_sent
from tests.contracts.store_world import StoreWorld
from tests.support.processes import wait_until_async
from tests.support.proxy import Proxies
from tests.support.redis import RedisServer
from tidegate.backends.limits_redis import RedisLimits
from tidegate.backends.redis_line import RedisAway, RedisLine
from tidegate.core.budgets.budget import GRANT_MS, BudgetRequest, Grant
from tidegate.core.errors import LimitsUnavailable
from tidegate.core.ports import Limits
from tidegate.store.limits import StoreLimits

pytestmark = pytest.mark.anyio

FOREVER = 9_999_999_999_999
# Of the one block that a server has: others want so many; no process fetches it; what is left of it may not be taken any more.
_WANTED = "return redis.call('HINCRBY', redis.call('KEYS', '*')[1], 'asked', 29)"
_IS_THERE = "return 1 - redis.call('HEXISTS', redis.call('KEYS', '*')[1], 'lender_till')"
_IS_OVER = """
local time = redis.call('TIME')
local block = redis.call('HMGET', redis.call('KEYS', '*')[1], 'requests', 'till')
return (tonumber(block[1]) > 0 and tonumber(block[2]) <= time[1] * 1000 + math.floor(time[2] / 1000)) and 1 or 0
"""


@pytest.fixture
def store_place(open_database: OpenPostgres) -> OpenPostgres:
    return open_database


@pytest.fixture
def limits_place(open_database: OpenPostgres, private_redis: RedisServer) -> tuple[OpenPostgres, str]:
    return open_database, private_redis.url


async def test_what_is_dealt_from_a_block_ends_with_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store counts what it lent from when it lent it: a part that is taken late lasts no longer."""
    limits = RedisLimits("redis://127.0.0.1:1", "t", StoreLimits(Any, "here"))  # type: ignore[arg-type]

    async def run_id() -> str:
        return "run"

    async def call(*_: object, **__: object) -> list[object]:
        return [b"granted", 1, 40, b"grant"]

    monkeypatch.setattr(limits._line, "run_id", run_id)
    monkeypatch.setattr(limits._line, "call", call)
    [grant] = await limits.debit([BudgetRequest((budget("b", minute(10)),), 1, 0)])
    assert (grant.requests, grant.lasts_ms) == (1, 40)
    await limits.close()


async def test_a_block_is_what_others_want_and_lives_no_longer_than_what_the_store_lent(
    world: StoreWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted from before the store was asked, so that no part of it is sent in a later period. A thousand may get lost, no more."""
    limits, put = RedisLimits("redis://127.0.0.1:1", "t", StoreLimits(world.store, "here")), list[tuple[Any, ...]]()
    wanted = iter((5, 50_000))

    async def run_id() -> str:
        return "run"

    async def call(script: str, _: str, *words: object, **__: object) -> list[object]:
        if script == "take":
            return [b"lend", 1_000, next(wanted)]
        put.append(words)
        return [b"", 0, 0]

    monkeypatch.setattr(limits._line, "run_id", run_id)
    monkeypatch.setattr(limits._line, "call", call)
    for asked, spare in ((1, 4), (2, 998)):
        [grant] = await limits.debit([BudgetRequest((budget("b", minute(100_000)),), asked, 7 * asked)])
        await wait_until_async(lambda: bool(put), 10, "the block to be put down")
        assert (grant.requests, grant.tokens) == (asked, 7 * asked), "the rest of the tokens lies in the block"
        assert put.pop()[:4] == (spare, 7 * spare, 1_000, 1_000 + GRANT_MS)
    await limits.close()


async def used_redis(server: RedisServer, world: LimitsWorld, process: Limits, name: str) -> bool:
    """Whether an ask now leaves a trace in this Redis."""
    await process.debit([BudgetRequest((budget(name, minute(1_000_000)),), 1, 0)])
    return server.command("DBSIZE") != ":0"


async def test_a_clock_of_redis_that_was_set_back_keeps_no_process_waiting(redis_url: str) -> None:
    """What was written an hour later than it is now counts for nothing: the store is asked again."""
    line = RedisLine(redis_url, ("take", "deposit"), 20.0)
    run_id = await line.run_id()
    key = f"t-clock:{run_id}:{id(line)}"
    [kind, server_ms, _] = await line.call("take", key, 1, 0, 1, 600_000, run_id=run_id)
    assert kind == b"lend"
    assert await line.call("take", key, 1, 0, 1, 600_000, run_id=run_id) == [b"busy"]
    server = redis.asyncio.from_url(redis_url)
    hour_ms = 3_600_000
    await server.hset(key, mapping={"lender_till": server_ms + hour_ms, "at": server_ms + hour_ms})
    assert (await line.call("take", key, 1, 0, 1, 600_000, run_id=run_id))[0] == b"lend"
    resting = (0, 0, server_ms, server_ms, "1", 200_000, 0, FOREVER, "deployment:gpu", 0)
    await line.call("deposit", key, *resting, run_id=run_id)
    assert (await line.call("take", key, 1, 0, 1, 600_000, run_id=run_id))[0] == b"resting"
    await server.hset(key, mapping={"rest_till": server_ms + hour_ms, "at": server_ms + hour_ms})
    assert (await line.call("take", key, 1, 0, 1, 600_000, run_id=run_id))[0] == b"lend"
    await server.aclose()
    await line.close()


async def test_a_block_is_dealt_out_once_and_what_is_left_goes_back(redis_url: str) -> None:
    line = RedisLine(redis_url, ("take", "deposit"), 20.0)
    run_id = await line.run_id()
    key = f"t-block:{run_id}:{id(line)}"

    async def take(requests: int, each: int) -> list[Any]:
        answer: list[Any] = await line.call("take", key, requests, each, requests, lender_ms, run_id=run_id)
        return answer

    lender_ms = 600_000

    kind, server_ms, demand = await take(4, 10)
    assert (kind, demand) == (b"lend", 4)
    assert await take(3, 10) == [b"busy"]
    words = (6, 60, server_ms, FOREVER, "1234", 0, 10, 0, "", 0)
    assert await line.call("deposit", key, *words, run_id=run_id) == [b"", 0, 0]
    assert (await take(3, 10))[:2] == [b"granted", 3]
    assert (await take(9, 15))[:2] == [b"granted", 2]
    kind, _, demand = await take(5, 15)
    assert (kind, demand) == (b"lend", 3 + 3 + 9 + 5), "one request is left, but no tokens for it"
    rest = (0, 0, server_ms, FOREVER, "1300", 200_000, 15, FOREVER, "deployment:gpu", 0)
    assert await line.call("deposit", key, *rest, run_id=run_id) == [b"1234", 1, 0]
    kind, wait_ms, spent, _ = await take(1, 15)
    assert (kind, spent) == (b"resting", b"deployment:gpu")
    assert wait_ms <= 200_000, "what was left went back, so the moment that the store named is too late"
    kind, _, demand = await take(1, 14)
    assert kind == b"lend", "less than what had no room may have some"
    assert demand == 0, "where there is too little, no process fetches for others"
    late = (7, 70, server_ms, server_ms, "1400", 0, 10, 0, "", 0)
    assert await line.call("deposit", key, *late, run_id=run_id) == [b"1300", 0, 0]
    assert (await take(1, 10))[0] == b"lend", "a block that came too late is not dealt"
    early = (7, 70, FOREVER, FOREVER + 250, "1500", 0, 10, 0, "", 0)
    assert await line.call("deposit", key, *early, run_id=run_id) == [b"1400", 7, 70]
    assert (await take(1, 10))[0] == b"lend", "nor is one whose beginning the server's clock has not seen"
    await line.close()


async def test_the_unused_rest_of_a_block_is_granted_soon_and_not_a_minute_later(
    limits: LimitsWorld, private_redis: RedisServer
) -> None:
    """The store's clock stands still, so nothing frees by itself."""
    first, second = await limits.process(), await limits.process()
    one = budget("gpu", minute(40))
    await limits.send(first, one)

    def says(script: str) -> bool:
        return private_redis.command("EVAL", script, "0") == ":1"

    await wait_until_async(lambda: says(_IS_THERE), 30, "the first block")
    says(_WANTED)
    assert (await limits.send(second, one, 5)).requests == 5
    await wait_until_async(lambda: says(_IS_OVER), 30, "the rest of the second block to be out of date")
    short = await limits.send(first, one, 20)
    assert short.requests < 20
    assert short.wait_ms <= 250
    await until_sent(limits, [first], one, 40)
    limits.judge(40)


@pytest.mark.parametrize("fault", ["FLUSHALL", "SCRIPT FLUSH", "restart"])
async def test_whatever_redis_forgets_nothing_is_minted(
    limits: LimitsWorld, private_redis: RedisServer, fault: str
) -> None:
    processes = [await limits.process() for _ in range(4)]
    one = budget("gpu", minute(60))

    async def disturb() -> None:
        for _ in range(10):
            if fault == "restart":
                await asyncio.to_thread(private_redis.stop)
                await asyncio.to_thread(private_redis.start)
            else:
                await asyncio.to_thread(private_redis.command, *fault.split())

    async def ask(process: Limits) -> None:
        while not disturbing.done():
            await limits.send(process, one, 2)
            await asyncio.sleep(0.005)

    disturbing = asyncio.create_task(disturb())
    await asyncio.gather(disturbing, *(ask(process) for process in processes))
    await limits.exhaust(processes, one)
    limits.judge(60)
    assert limits.sent > 0
    await limits.stores.clock.advance(60_500)
    await until_sent(limits, processes, one, limits.sent + 60)
    limits.judge(60)


async def test_a_script_that_the_server_forgot_is_loaded_again(limits: LimitsWorld, private_redis: RedisServer) -> None:
    process = await limits.process()
    for number in range(4):
        assert private_redis.command("SCRIPT", "FLUSH") == "+OK"
        assert (await limits.send(process, budget(f"b{number}", minute(1)))).requests == 1
    assert private_redis.command("DBSIZE") == ":4", "all of them went through Redis"


async def test_without_redis_the_store_answers_and_redis_is_found_again(
    limits: LimitsWorld, private_redis: RedisServer
) -> None:
    process = await limits.process()
    one = budget("gpu", minute(10))
    assert (await limits.send(process, one, 2)).requests == 2
    private_redis.stop()
    assert (await limits.send(process, one, 3)).requests == 3
    assert (await limits.send(process, one, 9)).requests == 5
    private_redis.start()
    assert private_redis.command("DBSIZE") == ":0"
    await wait_until_async(lambda: used_redis(private_redis, limits, process, "other"), 30, "Redis to be used again")
    assert (await limits.send(process, one)).requests == 0
    limits.judge(10)


async def test_a_redis_that_was_never_there_is_no_hindrance(limits: LimitsWorld, private_redis: RedisServer) -> None:
    private_redis.stop()
    process = await limits.process()
    assert (await limits.send(process, budget("gpu", minute(3)), 5)).requests == 3


async def test_a_silent_redis_costs_a_moment_and_the_next_answer_is_the_right_one(
    limits: LimitsWorld, private_redis: RedisServer
) -> None:
    store = StoreLimits(await limits.stores.open_another(), "theirs")
    process = RedisLimits(private_redis.url, limits.name, store, timeout_s=0.3)
    tokens = {f"b{number}": 10 + number for number in range(6)}

    async def ask(name: str) -> Grant:
        [grant] = await process.debit([BudgetRequest((budget(name, minute(100)),), 1, tokens[name])])
        return grant

    assert (await ask("b0")).requests == 1
    private_redis.pause()
    grants = await asyncio.gather(*(ask(name) for name in tokens))
    assert [(grant.requests, grant.tokens) for grant in grants] == [(1, count) for count in tokens.values()]
    private_redis.resume()
    for _ in range(3):
        grants = await asyncio.gather(*(ask(name) for name in tokens))
        assert [(grant.requests, grant.tokens) for grant in grants] == [(1, count) for count in tokens.values()]
    await process.close()


async def test_a_process_that_reaches_neither_store_nor_redis_sends_nothing(
    limits: LimitsWorld, private_redis: RedisServer
) -> None:
    process, driver = await limits.faulty_process()
    one = budget("gpu", minute(10))
    assert (await limits.send(process, one)).requests == 1
    private_redis.stop()
    driver.lost_before = 1_000
    for _ in range(3):
        with pytest.raises(LimitsUnavailable):
            await process.debit([BudgetRequest((one,), 1, 0)])
    driver.lost_before = 0
    assert (await limits.send(process, one, 99)).requests == 9


async def test_a_reply_that_got_lost_is_a_loss_and_no_gift(
    limits: LimitsWorld, private_redis: RedisServer, proxies: Proxies
) -> None:
    """The connection breaks behind each question, at a place of its own: the answers are lost, the store's count stands."""
    one = budget("gpu", minute(40))
    for cut in (0, 1, 40, 200, 3_000, 3_100):
        proxy = proxies.open(private_redis.port)
        process = await limits.process(redis_url=f"redis://{proxy.address}/0")
        await limits.send(process, one)
        proxy.cut(cut, "down")
        await asyncio.gather(*(limits.send(process, one) for _ in range(5)))
    await limits.exhaust([await limits.process()], one)
    limits.judge(40)
    assert limits.sent > 12


async def test_a_stale_copy_behind_a_failover_is_not_used(
    limits: LimitsWorld, private_redis: RedisServer, redis_server: RedisServer
) -> None:
    """A replica that was promoted holds old blocks with plenty left: they were another server's, so they are not read."""
    one = budget("gpu", minute(10))
    before = await limits.process()
    await limits.send(before, one, 4)
    [copied] = redis_keys(private_redis, f"{limits.name}:*")
    block = {"requests": "100", "tokens": "100", "grant": "1", "from": "0", "till": str(FOREVER)}
    redis_server.command("HSET", copied, *chain.from_iterable(block.items()))
    promoted = await limits.process(redis_url=redis_server.url)
    await limits.send(promoted, one)
    await limits.exhaust([promoted, before], one)
    limits.judge(10)
    assert limits.sent <= 10


def redis_keys(server: RedisServer, pattern: str) -> list[str]:
    """Names of keys, by way of a script that joins them."""
    text = (
        "local keys = redis.call('KEYS', ARGV[1]) table.sort(keys) return redis.status_reply(table.concat(keys, ' '))"
    )
    return server.command("EVAL", text, "0", pattern).removeprefix("+").split()


async def test_a_question_for_another_run_is_not_asked(limits: LimitsWorld, private_redis: RedisServer) -> None:
    line = RedisLine(private_redis.url, ("take",), 20.0)
    with pytest.raises(RedisAway, match="another server"):
        await line.call("take", "key", 1, 0, 1, 100, run_id="somebody else")
    assert (await line.call("take", "key", 1, 0, 1, 100))[0] == b"lend"
    await line.close()


async def test_more_questions_than_go_out_at_once_are_all_answered(redis_url: str) -> None:
    line = RedisLine(redis_url, ("take",), 5.0)
    kinds = await asyncio.gather(*(line.call("take", f"t-many:{id(line)}:{one}", 1, 0, 1, 100) for one in range(300)))
    assert {kind for kind, *_ in kinds} == {b"lend"}
    await line.close()


async def test_two_installations_on_one_redis_do_not_spend_each_others_budget(
    limits: LimitsWorld, private_redis: RedisServer
) -> None:
    one = budget("gpu", minute(1_000))
    theirs = RedisLimits(private_redis.url, "theirs", StoreLimits(await limits.stores.open_another(), "theirs"), 20.0)
    await limits.send(await limits.process(), one)
    await theirs.debit([BudgetRequest((one,), 1, 0)])
    assert sorted(key.split(":")[0] for key in redis_keys(private_redis, "*")) == sorted([limits.name, "theirs"])
    await theirs.close()
