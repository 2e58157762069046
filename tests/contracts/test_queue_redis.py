"""The queue of asynchronous sending, on a real Redis: a request is out once, any process may read a result and none may take it away."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from redis.asyncio import Redis

from tests.support.redis import RedisServer
from tidegate.backends.queue_redis import (
    DEAD_MAX,
    DEAD_MS,
    REMEMBERED_MS,
    SORTED_MAX,
    SWEPT_MAX,
    RedisQueue,
)
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

    async def markers(self) -> tuple[bytes | None, bytes | None]:
        """What the processor reads of a request: that it is wanted, and that it is not."""
        return await self.redis.get(f"request-active:{ID}"), await self.redis.get(f"request-cancel:{ID}")

    async def ends_within(self, key: str, ms: int) -> bool:
        """Whether a key is forgotten after so long, give or take the time that a busy machine needs."""
        return bool(ms - 60_000 < await self.redis.pttl(key) <= ms)

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


async def test_no_process_puts_a_request_again_that_is_out(place: Place) -> None:
    one, two = place.process(), place.process()
    assert [await one.put(SOME), await one.put(SOME), await two.put(SOME)] == [Put.LAID, Put.OUT, Put.OUT]
    assert await place.take() == [SOME.message]
    assert await two.put(SOME) is Put.OUT
    assert await place.take() == []


async def test_a_result_is_read_by_every_process_that_waits_and_stays_until_it_is_acknowledged(place: Place) -> None:
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


async def test_a_result_for_an_unknown_request_is_put_aside_whole(place: Place) -> None:
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
    for payload, is_found in (("{}", True), ("x" * (262_144 - len(_id_last(""))), True), ("x" * 262_144, False)):
        message = _id_last(payload)
        await place.push(message)
        assert (await look(queue)).found == ((Found(SOME.id, QueueKind.ANSWERED, message),) if is_found else ())
        await queue.discard([SOME.id])
        await queue.put(SOME)


def _id_last(payload: str) -> bytes:
    return json.dumps({"payload": payload, "status_code": 200, "id": SOME.id}).encode()


async def test_a_result_above_the_bound_is_named_and_not_read(place: Place) -> None:
    queue = place.process()
    await queue.put(SOME)
    await place.push(result(payload="x" * (BYTES_MAX + 1)))
    assert (await look(queue)).found == (Found(SOME.id, QueueKind.TOO_LARGE),)


async def test_a_request_not_yet_taken_is_withdrawn_and_may_be_put_again(place: Place) -> None:
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


async def test_a_request_is_marked_as_wanted_from_its_laying_down_until_it_is_over(place: Place) -> None:
    queue = place.process()
    ends: list[Callable[[], Awaitable[object]]] = [
        lambda: queue.discard([ID]),
        lambda: queue.withdraw(ID),
        lambda: queue.acknowledge([ID]),
    ]
    for end in ends:
        await place.redis.set(f"request-cancel:{ID}", "t1")
        assert await queue.put(SOME) is Put.LAID
        assert await place.markers() == (b"t1", None), "it was stopped once, and is wanted again"
        for key in (f"request-active:{ID}", f"{place.queue.results}:sent:{ID}"):
            assert 0 < await place.redis.pttl(key) <= SOME.keep_ms
        await end()
        assert await place.markers() == (None, None)


async def test_a_request_that_is_over_is_not_marked_as_stopped_either(place: Place) -> None:
    queue = place.process()
    for settle in (queue.discard, queue.acknowledge):
        await queue.put(SOME)
        await place.take()
        assert await queue.withdraw(ID) is Withdrawal.TAKEN
        assert await place.markers() == (b"t1", b"t1")
        await settle([ID])
        assert await place.markers() == (None, None)


async def test_adopting_a_request_does_not_make_it_last_longer(place: Place) -> None:
    one, two, sent = place.process(), place.process(), f"{place.queue.results}:sent:{ID}"
    await one.put(SOME)
    await place.redis.pexpire(sent, 30_000)
    await two.put(SOME)
    assert 0 < await place.redis.pttl(sent) <= 30_000
    await place.take()
    await two.withdraw(ID)
    assert 0 < await place.redis.pttl(f"request-cancel:{ID}") <= 30_000, "the mark ends with the request"


async def test_a_request_whose_result_is_there_is_not_marked_as_stopped(place: Place) -> None:
    queue = place.process()
    await queue.put(SOME)
    await place.take()
    await place.push(result())
    await look(queue)
    assert await queue.withdraw(ID) is Withdrawal.TAKEN
    assert await place.markers() == (b"t1", None)


async def test_a_request_is_withdrawn_and_no_other_of_the_same_deadline(place: Place) -> None:
    queue = place.process()
    other = QueueRequest(f"other-{ID}", b'{"internal":{"request_token":"t2"}}', SOME.score, "t2", 60_000)
    await queue.put(other)
    await queue.put(SOME)
    assert await queue.withdraw(other.id) is Withdrawal.WITHDRAWN
    assert await place.take() == [SOME.message], "which comes first among those of one deadline"


async def test_a_request_that_was_recorded_is_known_for_a_while_and_not_laid_down_again(place: Place) -> None:
    one, two = place.process(), place.process()
    await one.put(SOME)
    await one.acknowledge([ID])
    assert await place.ends_within(f"{place.queue.results}:sent:{ID}", REMEMBERED_MS)
    await place.take()
    assert await two.put(SOME) is Put.RECORDED
    assert await place.take() == []
    assert (await look(two)).found == ()
    assert (await look(two, lost=True)).found == (Found(ID, QueueKind.RECORDED),)


async def test_results_are_read_a_bounded_number_of_bytes_at_a_time_and_at_least_one(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidegate.backends.queue_redis.READ_BYTES_MAX", 1_000)
    queue = place.process()
    ids = [f"{number}-{ID}" for number in range(4)]
    sizes = [1_001, 500, 500, 200]
    for request_id, size in zip(ids, sizes, strict=True):
        await queue.put(QueueRequest(request_id, b"{}", SOME.score, "t", 60_000))
        await place.push(result(request_id, "x" * (size - len(result(request_id, "")))))

    async def read(*wanted: str) -> list[str]:
        return [one.request_id for one in (await queue.collect(wanted, BYTES_MAX, look=False)).found]

    assert await read(*ids) == ids[:1], "one too large for a read is read alone"
    assert await read(*ids[1:]) == ids[1:3], "both fit to the last byte"
    assert await read(*ids[3:]) == ids[3:]
    await queue.discard(ids)


async def test_results_are_sorted_a_bounded_number_at_a_time(place: Place) -> None:
    queue = place.process()
    await place.push(*(b"rubbish" for _ in range(SORTED_MAX + 1)))
    assert [((seen := await look(queue)).garbage, seen.has_more) for _ in range(2)] == [(SORTED_MAX, True), (1, False)]


async def test_dead_letters_are_kept_for_days_however_they_became_such(place: Place) -> None:
    queue, dead = place.process(), f"{place.queue.results}:dead"
    await place.push(b"rubbish")
    await look(queue)
    assert await place.ends_within(dead, DEAD_MS)
    await place.redis.lpush(dead, *(b"older" for _ in range(DEAD_MAX)))
    await place.redis.persist(dead)
    await place.redis.hset(f"{place.queue.results}:kept", "late", "a result")
    assert await queue.sweep() == 1
    assert await place.ends_within(dead, DEAD_MS)
    kept = await place.dead()
    assert (len(kept), kept[0], kept[1]) == (DEAD_MAX, b"a result", b"older")


async def test_a_sweep_looks_at_a_bounded_number_of_results(place: Place) -> None:
    queue = place.process()
    await place.redis.hset(
        f"{place.queue.results}:kept", mapping={str(number): "late" for number in range(SWEPT_MAX + 1)}
    )
    assert [await queue.sweep() for _ in range(3)] == [SWEPT_MAX, 1, 0]


async def test_a_process_that_adopted_a_request_keeps_it_whatever_its_first_owner_does(place: Place) -> None:
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


async def test_the_state_of_a_queue_counts_what_waits_and_what_is_dead(place: Place) -> None:
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


async def test_a_server_that_is_away_differs_from_one_that_is_silent(private_redis: RedisServer) -> None:
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
