"""The queue of asynchronous sending, on a real Redis: a request is out once, a result is anyone's to read and nobody's to take away."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator
from typing import Any

import pytest
from redis.asyncio import Redis

from tests.support.redis import RedisServer
from tidegate.backends.queue_redis import DEAD_MAX, RedisQueue
from tidegate.core.deployments import Queue, Secret
from tidegate.core.queues import Found, Put, QueueAway, QueueKind, QueueRequest, Sorted, Withdrawal

pytestmark = pytest.mark.anyio

BYTES_MAX = 1 << 20
# The processor's markers know no queue: what runs beside this has other ids.
ID = f"batch_req_1-{secrets.token_hex(8)}.0"
SOME = QueueRequest(ID, b'{"internal":{"request_token":"t1"},"data":{}}', 1_900_000_000.25, "t1", 60_000)


class Place:
    """One queue, and a door of its own for every process that uses it."""

    def __init__(self, url: str) -> None:
        name = secrets.token_hex(6)
        self.queue = Queue(Secret(url), f"requests:{name}", f"results:{name}")
        self.redis: Any = Redis.from_url(url)
        self.opened: list[RedisQueue] = []

    def process(self) -> RedisQueue:
        self.opened.append(RedisQueue(self.queue, f"worker_{len(self.opened)}"))
        return self.opened[-1]

    async def take(self) -> list[bytes]:
        """As the processor does."""
        return [message for message, _ in await self.redis.zpopmin(self.queue.requests, 100)]

    async def push(self, *messages: bytes) -> None:
        await self.redis.lpush(self.queue.results, *messages)

    async def dead(self) -> list[bytes]:
        return list(await self.redis.lrange(self.queue.results + ":dead", 0, -1))

    async def kept(self) -> int:
        return int(await self.redis.hlen(self.queue.results + ":kept"))


@pytest.fixture
async def place(redis_url: str) -> AsyncIterator[Place]:
    made = Place(redis_url)
    yield made
    for one in made.opened:
        await one.close()
    await made.redis.aclose()


def result(request_id: str = SOME.id, payload: str = "{}") -> bytes:
    return json.dumps({"id": request_id, "status_code": 200, "payload": payload}).encode()


async def look(queue: RedisQueue, *ids: str, lost: bool = False) -> Sorted:
    return await queue.collect(ids or (SOME.id,), BYTES_MAX, look=lost)


async def test_a_request_lies_in_the_set_with_its_deadline_as_score(place: Place) -> None:
    queue = place.process()
    assert await queue.put(SOME) is Put.LAID
    assert await place.redis.zrange(place.queue.requests, 0, -1, withscores=True) == [(SOME.message, SOME.score)]


async def test_a_request_that_is_out_is_not_laid_down_again_by_anyone(place: Place) -> None:
    one, two = place.process(), place.process()
    assert [await one.put(SOME), await one.put(SOME), await two.put(SOME)] == [Put.LAID, Put.OUT, Put.OUT]
    assert await place.take() == [SOME.message]
    assert await two.put(SOME) is Put.OUT
    assert await place.take() == []


async def test_a_result_is_read_by_all_who_wait_and_stays_until_it_is_acknowledged(place: Place) -> None:
    one, two = place.process(), place.process()
    await one.put(SOME)
    await place.push(result())
    expected = (Found(SOME.id, QueueKind.ANSWERED, result()),)
    assert (await look(two)).found == expected
    assert (await look(one)).found == expected
    assert (await look(place.process())).found == expected
    await one.acknowledge([SOME.id])
    assert (await look(one)).found == ()
    assert await place.kept() == 0


async def test_a_result_of_another_is_kept_for_it(place: Place) -> None:
    """llm-d's #644."""
    one, two = place.process(), place.process()
    await one.put(SOME)
    await place.push(result())
    assert (await look(two, "batch_req_2-cd.0")).found == ()
    assert (await look(one)).found == (Found(SOME.id, QueueKind.ANSWERED, result()),)


async def test_a_request_with_an_unread_result_is_out(place: Place) -> None:
    one, two = place.process(), place.process()
    await one.put(SOME)
    await place.take()
    await place.push(result())
    assert await two.put(SOME) is Put.OUT
    assert (await look(two)).found == (Found(SOME.id, QueueKind.ANSWERED, result()),)


async def test_a_request_is_out_from_its_laying_down_until_it_is_recorded(place: Place) -> None:
    one, two = place.process(), place.process()
    seen = [await two.is_out(SOME.id)]
    await one.put(SOME)
    seen.append(await two.is_out(SOME.id))
    await place.take()
    await place.push(result())
    await look(one)
    seen.append(await two.is_out(SOME.id))
    await one.acknowledge([SOME.id])
    seen.append(await two.is_out(SOME.id))
    assert seen == [False, True, True, False]


async def test_what_was_discarded_may_be_laid_down_again_and_what_was_recorded_too(place: Place) -> None:
    queue = place.process()
    for settle in (queue.discard, queue.acknowledge):
        assert await queue.put(SOME) is Put.LAID
        await place.take()
        await place.push(result())
        await look(queue)
        await settle([SOME.id])


async def test_the_same_result_again_is_a_duplicate_before_and_after_it_is_recorded(place: Place) -> None:
    queue = place.process()
    await queue.put(SOME)
    await place.push(result(), result(payload="other"))
    seen = await look(queue)
    assert (seen.duplicate, seen.found) == (1, (Found(SOME.id, QueueKind.ANSWERED, result()),))
    await queue.acknowledge([SOME.id])
    await place.push(result())
    assert (await look(queue)).duplicate == 1
    assert (await place.kept(), await place.dead()) == (0, [])


GARBAGE = [
    b"",
    b"\x00\xff\xfe",
    b"not json",
    b"[]",
    b'{"status_code":200}',
    b'{"id":7}',
    b'{"id":null}',
    b'{"payload":"' + b"x" * 300_000 + b'","id":"late"}',
    b"[" * 100_000,
]


async def test_garbage_is_put_aside_once_and_hides_nothing(place: Place) -> None:
    queue = place.process()
    await queue.put(SOME)
    await place.push(*GARBAGE, result(), *GARBAGE)
    seen = await look(queue)
    assert (seen.garbage, len(seen.found)) == (2 * len(GARBAGE), 1)
    assert sorted(await place.dead()) == sorted(2 * GARBAGE)
    assert (await look(queue)).garbage == 0


async def test_a_result_for_nobody_is_put_aside_whole(place: Place) -> None:
    queue = place.process()
    await place.push(result("batch_req_9-zz.0"))
    assert (await look(queue)).unknown == 1
    assert await place.dead() == [result("batch_req_9-zz.0")]


async def test_dead_letters_do_not_grow_without_end(place: Place) -> None:
    queue = place.process()
    await place.push(*(b"rubbish %d" % number for number in range(DEAD_MAX + 500)))
    while (await look(queue)).has_more:
        pass
    assert len(await place.dead()) == DEAD_MAX


async def test_an_id_that_stands_behind_the_payload_is_found_too(place: Place) -> None:
    queue = place.process()
    await queue.put(SOME)
    message = json.dumps({"payload": "{}", "status_code": 200, "id": SOME.id}).encode()
    await place.push(message)
    assert (await look(queue)).found == (Found(SOME.id, QueueKind.ANSWERED, message),)


async def test_a_result_above_the_bound_is_named_and_not_read(place: Place) -> None:
    queue = place.process()
    await queue.put(SOME)
    await place.push(result(payload="x" * (BYTES_MAX + 1)))
    assert (await look(queue)).found == (Found(SOME.id, QueueKind.TOO_LARGE),)


async def test_what_nobody_has_taken_is_withdrawn_and_may_be_laid_down_again(place: Place) -> None:
    queue = place.process()
    await queue.put(SOME)
    assert await queue.withdraw(SOME.id) is Withdrawal.WITHDRAWN
    assert await place.take() == []
    assert await queue.put(SOME) is Put.LAID


async def test_what_was_taken_is_marked_as_the_processor_reads_it(place: Place) -> None:
    queue = place.process()
    await queue.put(SOME)
    await place.take()
    assert await queue.withdraw(SOME.id) is Withdrawal.TAKEN
    assert await place.redis.get(f"request-cancel:{SOME.id}") == b"t1"
    assert await place.process().put(SOME) is Put.OUT
    assert await place.redis.get(f"request-cancel:{SOME.id}") is None


async def test_who_adopted_a_request_keeps_it_whatever_its_first_owner_does(place: Place) -> None:
    one, two = place.process(), place.process()
    await one.put(SOME)
    await two.put(SOME)
    assert await one.withdraw(SOME.id) is Withdrawal.NOT_OURS
    assert await two.withdraw(SOME.id) is Withdrawal.WITHDRAWN


async def test_a_queue_that_was_emptied_says_that_the_request_is_lost(place: Place) -> None:
    queue = place.process()
    await queue.put(SOME)
    assert (await look(queue, lost=True)).found == ()
    await place.redis.delete(place.queue.requests, f"{place.queue.results}:sent:{SOME.id}")
    assert (await look(queue)).found == ()
    assert (await look(queue, lost=True)).found == (Found(SOME.id, QueueKind.LOST),)


async def test_results_whose_time_is_over_are_put_aside(place: Place) -> None:
    queue = place.process()
    await queue.put(SOME)
    await place.push(result())
    await look(queue)
    assert await queue.sweep() == 0
    await place.redis.delete(f"{place.queue.results}:sent:{SOME.id}")
    assert await queue.sweep() == 1
    assert (await place.kept(), await place.dead()) == (0, [result()])


async def test_many_processes_at_once_lose_no_result(place: Place) -> None:
    processes = [place.process() for _ in range(4)]
    ids = [f"batch_req_{number}-ef.0" for number in range(400)]
    for at, request_id in enumerate(ids):
        message = b'{"internal":{"request_token":"u%d"}}' % at
        await processes[at % 4].put(QueueRequest(request_id, message, SOME.score, f"u{at}", 60_000))
    await place.push(*(result(request_id) for request_id in ids))

    async def gather(mine: list[str], queue: RedisQueue) -> set[str]:
        seen: set[str] = set()
        while len(seen) < len(mine):
            found = (await queue.collect([one for one in mine if one not in seen], BYTES_MAX, look=True)).found
            assert all(one.kind is QueueKind.ANSWERED for one in found)
            seen |= {one.request_id for one in found}
        return seen

    found = await asyncio.gather(*(gather(ids[at::4], processes[at]) for at in range(4)))
    assert set().union(*found) == set(ids)
    assert await place.dead() == []


async def test_how_a_queue_stands(place: Place) -> None:
    queue = place.process()
    await queue.put(SOME)
    await place.push(b"rubbish")
    await look(queue)
    state = await queue.state()
    assert (state.waiting, state.oldest_deadline_s, state.dead, state.unacknowledged) == (1, SOME.score, 1, 0)
    assert not state.is_persistent
    assert not state.evicts


async def test_a_key_of_another_kind_is_an_error_that_notes_nothing(place: Place) -> None:
    queue = place.process()
    await place.redis.set(place.queue.requests, "mine")
    with pytest.raises(QueueAway, match="WRONGTYPE"):
        await queue.put(SOME)
    assert await place.redis.get(f"{place.queue.results}:sent:{SOME.id}") is None


async def test_a_server_that_is_away_or_silent_is_told_apart(private_redis: RedisServer) -> None:
    place = Place(private_redis.url)
    queue = place.process()
    await queue.put(SOME)
    private_redis.pause()
    try:
        with pytest.raises(QueueAway) as silent:
            await queue.put(SOME)
    finally:
        private_redis.resume()
    assert silent.value.is_unsure
    private_redis.stop()
    fresh = place.process()
    with pytest.raises(QueueAway) as away:
        await fresh.reach()
    assert not away.value.is_unsure
    await queue.close()
    await fresh.close()
