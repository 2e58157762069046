"""Asynchronous sending behind the transport's port, over a real Redis; the test itself plays the processor."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Coroutine
from typing import Any

import pytest
from redis.asyncio import Redis
from yarl import URL

from tests.support.processes import wait_until_async
from tests.support.redis import RedisServer
from tidegate.backends.queue_redis import TIMEOUT_S, RedisQueue
from tidegate.backends.system import SystemClock, SystemEntropy
from tidegate.core.deployments import Deployment, HttpLimits, Queue, Secret, Serves, TideMode
from tidegate.core.errors import (
    Ambiguous,
    BrokenAnswer,
    RecordedElsewhere,
    Refused,
    SettingsError,
    Throttled,
    Unavailable,
    UpstreamError,
)
from tidegate.core.ids import item_id
from tidegate.upstream.http.transport import (
    AiohttpTransport,
    Client,
    HttpReply,
    PermitExpired,
    SendPermit,
    UpstreamRequest,
)
from tidegate.upstream.queue.asynchronous import Office, QueueTransport

pytestmark = pytest.mark.anyio

JOB = "batch_0123456789ABCDEFabcdef"
# The processor's markers know no queue: what runs beside this has other keys.
KEY = f"{item_id(JOB, 7)}-{secrets.token_hex(8)}"
URL_OF = URL("http://gateway/v1/chat/completions")
BODY = b'{"model":"m","messages":[]}'
LONG_S = 60.0


class Process:
    """One process of Tidegate, as far as its queue goes."""

    def __init__(self, queue: Queue, owner: str) -> None:
        limits = HttpLimits(response_bytes_max=100_000)
        clock, entropy = SystemClock(), SystemEntropy()
        self.office = Office(lambda one: RedisQueue(one, owner), limits, clock, entropy)
        self.transport = QueueTransport(AiohttpTransport(limits), self.office)
        self.deployment = deployment(queue)
        self.line: Client = self.transport.client_for(self.deployment)

    def post(
        self, key: str = KEY, total_s: float = LONG_S, permit: SendPermit | None = None, **more: Any
    ) -> asyncio.Task[HttpReply]:
        request = UpstreamRequest(URL_OF, key, BODY, **more)
        call: Coroutine[Any, Any, HttpReply] = self.line.post(request, total_s, permit)
        return asyncio.create_task(call)


class Processor:
    """The program that takes from the queue."""

    def __init__(self, url: str) -> None:
        name = secrets.token_hex(6)
        self.queue = Queue(Secret(url), f"requests:{name}", f"results:{name}")
        self.redis: Any = Redis.from_url(url)

    async def lies(self) -> int:
        return int(await self.redis.zcard(self.queue.requests))

    async def until_lies(self, count: int = 1) -> None:
        async def there() -> bool:
            return await self.lies() == count

        await wait_until_async(there, LONG_S, f"{count} requests in the queue")

    async def take(self) -> dict[str, Any]:
        await self.until_lies()
        ((message, _),) = await self.redis.zpopmin(self.queue.requests)
        read: dict[str, Any] = json.loads(message)
        return read

    async def push(self, request_id: str, **result: Any) -> None:
        message = json.dumps({"id": request_id, **result})
        await self.redis.lpush(self.queue.results, message)

    async def kept(self) -> list[bytes]:
        return list(await self.redis.hkeys(self.queue.results + ":kept"))

    async def until_kept(self, *ids: str) -> None:
        async def there() -> bool:
            return {one.decode() for one in await self.kept()} == set(ids)

        await wait_until_async(there, LONG_S, f"{ids} to be what is kept")


def deployment(queue: Queue, **more: Any) -> Deployment:
    terms: dict[str, Any] = {"serves": Serves.BATCH, "tide": TideMode.OFF, "models": ("m",), **more}
    return Deployment(name="queued", url="http://gateway/v1", queue=queue, **terms)


@pytest.fixture
async def processor(redis_url: str) -> AsyncIterator[Processor]:
    made = Processor(redis_url)
    yield made
    await made.redis.aclose()


@pytest.fixture
async def pair(processor: Processor) -> AsyncIterator[tuple[Process, Process]]:
    one, two = Process(processor.queue, "one"), Process(processor.queue, "two")
    yield one, two
    await one.transport.close()
    await two.transport.close()


Pair = tuple[Process, Process]
OK = {"status_code": 200, "payload": '{"choices":[{}]}'}


async def failure(call: asyncio.Task[HttpReply]) -> UpstreamError:
    with pytest.raises(UpstreamError) as raised:
        await call
    return raised.value


async def test_a_call_is_laid_down_and_its_answer_is_kept_until_recorded(pair: Pair, processor: Processor) -> None:
    one, _ = pair
    call = one.post(headers=b"X-Hint: 5\r\n")
    request = await processor.take()
    assert request["data"]["endpoint"] == "/v1/chat/completions"
    assert request["data"]["headers"] == {"Idempotency-Key": KEY, "X-Hint": "5"}
    assert request["data"]["payload"] == json.loads(BODY)
    assert request["internal"]["result_queue_name"] == processor.queue.results
    await processor.push(request["data"]["id"], **OK)
    assert await call == HttpReply(200, {}, b'{"choices":[{}]}')
    await processor.until_kept(request["data"]["id"])
    one.transport.recorded([(JOB, 8)])
    await processor.until_kept(request["data"]["id"])
    one.transport.recorded([(JOB, 7)])
    await processor.until_kept()


async def test_who_sends_the_same_try_again_waits_for_the_same_answer(pair: Pair, processor: Processor) -> None:
    one, two = pair
    first = one.post()
    request = await processor.take()
    second, third = two.post(), two.post()
    await processor.push(request["data"]["id"], **OK)
    assert await first == await second == await third
    assert await processor.lies() == 0


async def test_an_answer_that_was_not_recorded_is_found_by_the_next_process(pair: Pair, processor: Processor) -> None:
    one, two = pair
    call = one.post()
    request = await processor.take()
    await processor.push(request["data"]["id"], **OK)
    await call
    await one.transport.close()
    assert (await two.post()).status == 200
    assert await processor.lies() == 0
    two.transport.recorded([(JOB, 7)])
    await processor.until_kept()


async def test_an_answer_that_another_process_recorded_is_not_asked_for_again(pair: Pair, processor: Processor) -> None:
    one, two = pair
    first = one.post()
    request = await processor.take()
    await processor.push(request["data"]["id"], **OK)
    await first
    one.transport.recorded([(JOB, 7)])
    await processor.until_kept()
    # It was on its way to the same item when the outcome was recorded.
    assert isinstance(await failure(two.post()), RecordedElsewhere)
    assert await processor.lies() == 0


async def test_a_process_that_waits_learns_that_another_one_recorded_the_answer(
    pair: Pair, processor: Processor
) -> None:
    one, two = pair
    first = one.post()
    request = await processor.take()
    second = two.post()
    mailbox = two.office.mailbox(processor.queue)
    await wait_until_async(lambda: mailbox.is_awaited(request["data"]["id"]), what="the other to wait")
    await mailbox.queue.acknowledge([request["data"]["id"]])
    assert isinstance(await failure(second), RecordedElsewhere)
    first.cancel()


async def test_of_two_requests_of_one_moment_the_earlier_one_sorts_first(pair: Pair) -> None:
    one, _ = pair
    tokens = [one.office.token() for _ in range(40)]
    assert tokens == sorted(set(tokens))


async def test_another_try_is_another_request(pair: Pair, processor: Processor) -> None:
    one, two = pair
    call = one.post()
    first = await processor.take()
    await processor.push(first["data"]["id"], status_code=500, payload="no")
    assert (await call).status == 500
    again = two.post(attempt=1)
    second = await processor.take()
    assert second["data"]["id"] != first["data"]["id"]
    assert second["data"]["headers"]["Idempotency-Key"] == KEY
    await processor.push(second["data"]["id"], **OK)
    assert (await again).status == 200


@pytest.mark.parametrize("status", [401, 403, 429])
async def test_what_was_not_done_is_not_kept(pair: Pair, processor: Processor, status: int) -> None:
    one, _ = pair
    call = one.post()
    request = await processor.take()
    await processor.push(request["data"]["id"], status_code=status, payload="{}")
    assert (await call).status == status
    await processor.until_kept()
    again = one.post()
    assert (await processor.take())["data"]["id"] == request["data"]["id"]
    again.cancel()


CODES = {"GATE_DROPPED": Throttled, "CANCELLED": Unavailable, "INFERENCE_ERROR": Ambiguous, "INVALID_REQUEST": Refused}


@pytest.mark.parametrize("code", CODES)
async def test_errors_of_the_processor_are_sorted(pair: Pair, processor: Processor, code: str) -> None:
    one, _ = pair
    call = one.post()
    request = await processor.take()
    await processor.push(request["data"]["id"], error_code=code, error_message="so")
    error = await failure(call)
    assert type(error) is CODES[code]
    is_kept = error.billed or isinstance(error, Refused)
    await processor.until_kept(*([request["data"]["id"]] if is_kept else []))


async def test_an_answer_that_is_too_large_is_broken(pair: Pair, processor: Processor) -> None:
    one, _ = pair
    for attempt, size in enumerate((150_000, 3_000_000)):
        call = one.post(attempt=attempt)
        request = await processor.take()
        await processor.push(request["data"]["id"], status_code=200, payload="x" * size)
        assert isinstance(await failure(call), BrokenAnswer)


async def test_a_cancelled_call_is_withdrawn(pair: Pair, processor: Processor) -> None:
    one, _ = pair
    call = one.post()
    await processor.until_lies()
    call.cancel()
    await processor.until_lies(0)
    await asyncio.wait({call})
    assert call.cancelled(), "who cancels a call sees it cancelled"


async def test_a_call_that_was_adopted_is_not_withdrawn_by_who_left_it(pair: Pair, processor: Processor) -> None:
    one, two = pair
    call = one.post()
    await processor.until_lies()
    other = two.post()

    async def adopted() -> bool:
        state = await processor.redis.get(f"{processor.queue.results}:sent:{KEY}.0")
        return bool(state.startswith(b"two"))

    await wait_until_async(adopted, LONG_S, "the request to be adopted")
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    await one.transport.close()
    request = await processor.take()
    await processor.push(request["data"]["id"], **OK)
    assert (await other).status == 200


async def test_a_request_that_was_not_taken_in_time_was_not_sent(pair: Pair, processor: Processor) -> None:
    one, _ = pair
    error = await failure(one.post(total_s=2.0))
    assert (type(error), error.code) == (Unavailable, "queue_not_taken")
    assert await processor.lies() == 0


async def test_a_request_that_was_taken_and_not_answered_may_have_been_paid_for(
    pair: Pair, processor: Processor
) -> None:
    one, _ = pair
    call = one.post(total_s=5.0)
    request = await processor.take()
    assert isinstance(await failure(call), Ambiguous)
    token = await processor.redis.get(f"request-cancel:{request['data']['id']}")
    assert token == request["internal"]["request_token"].encode()


async def test_a_timeout_that_is_not_the_calls_own_is_not_taken_for_it(
    pair: Pair, processor: Processor, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def put(_: object) -> None:
        raise TimeoutError("another's")

    one, _ = pair
    monkeypatch.setattr(one.office.mailbox(processor.queue).queue, "put", put)
    with pytest.raises(TimeoutError, match="another's"):
        await one.post()


async def test_an_emptied_queue_is_noticed(pair: Pair, processor: Processor) -> None:
    one, _ = pair
    call = one.post()
    await processor.until_lies()
    names = [key async for key in processor.redis.scan_iter(f"{processor.queue.results}*")]
    await processor.redis.delete(processor.queue.requests, *names)
    error = await failure(call)
    assert isinstance(error, Ambiguous)
    assert "no longer knows" in error.message


async def test_leave_that_ran_out_lays_nothing_down(pair: Pair, processor: Processor) -> None:
    one, _ = pair
    with pytest.raises(PermitExpired):
        await one.post(permit=SendPermit(SystemClock(), (), "", 0, 0.0))
    assert await processor.lies() == 0


async def test_garbage_beside_an_answer_does_no_harm(pair: Pair, processor: Processor) -> None:
    one, _ = pair
    call = one.post()
    request = await processor.take()
    await processor.redis.lpush(processor.queue.results, b"\x00", b"{", b"[]")
    await processor.push("batch_req_unknown-0.0", **OK)
    await processor.push(request["data"]["id"], **OK)
    await processor.push(request["data"]["id"], **OK)
    assert (await call).status == 200


async def test_the_control_line_says_whether_the_queue_is_there(pair: Pair, private_redis: RedisServer) -> None:
    one, _ = pair
    reply = await one.line.get(URL_OF, 5.0)
    assert (reply.status, json.loads(reply.body)["data"]) == (200, [{"id": "m"}])
    away = Process(Queue(Secret(private_redis.url), "a", "b"), "three")
    private_redis.stop()
    with pytest.raises(Unavailable) as error:
        await away.line.get(URL_OF, 5.0)
    assert error.value.code == "queue_away"
    assert (await failure(away.post())).code == "queue_away"
    await away.transport.close()


async def test_a_server_that_falls_silent_while_it_is_asked_is_asked_again(private_redis: RedisServer) -> None:
    """Whether the request lies there is unknown until it answers; it must not be sent elsewhere meanwhile."""
    processor = Processor(private_redis.url)
    one = Process(processor.queue, "one")
    await one.line.get(URL_OF, 5.0)
    private_redis.pause()
    call = one.post()
    # Longer than Redis may take to answer: by now it was given up once.
    done, _ = await asyncio.wait({call}, timeout=TIMEOUT_S + 1)
    assert not done
    private_redis.resume()
    request = await processor.take()
    await processor.push(request["data"]["id"], **OK)
    assert (await call).status == 200
    await one.transport.close()
    await processor.redis.aclose()


@pytest.mark.parametrize(
    "wrong",
    [
        {"serves": Serves.BOTH},
        {"api_key": Secret("sk-1")},
        {"upstream_max_batch_inputs": 8},
    ],
)
def test_what_does_not_go_with_a_queue_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(SettingsError):
        deployment(Queue(Secret("redis://h/0"), "a", "b"), **wrong)


@pytest.mark.parametrize("url", ["http://h", "h:6379", ""])
def test_a_queue_lies_in_redis(url: str) -> None:
    with pytest.raises(SettingsError, match=r"queue\.url"):
        deployment(Queue(Secret(url), "a", "b"))
