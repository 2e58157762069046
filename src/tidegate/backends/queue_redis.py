"""A queue in Redis for llm-d's async processor: requests in a sorted set, results in a list.

Each step is one script, so it happens completely or not at all. Beside the two keys of the
processor there are ours, named after the list of results:

- `:sent:ID` names the process that waits for a request, and the token and score of the request.
- `:kept` holds results until their outcomes are recorded.
- `:dead` holds results that no process waits for.

Several processes and installations may share a queue. The content of messages is not known here.
"""

import asyncio
import math
from collections.abc import Sequence
from typing import Any

from tidegate.backends.redis_client import Redis, RedisError
from tidegate.backends.redis_line import CONNECT_TIMEOUT_S, RedisAway, RedisLine, RedisUnsure, script_text
from tidegate.core.deployments import Queue
from tidegate.core.queues import Found, Put, QueueAway, QueueKind, QueueRequest, QueueState, Sorted, Withdrawal

TIMEOUT_S = 5.0

# The bounds of one step, because other users of Redis wait meanwhile.
SORTED_MAX = 256
READ_BYTES_MAX = 32 << 20
SWEPT_MAX = 100

# Dead letters are kept for a look at them, but not for ever.
DEAD_MAX = 1_000
DEAD_MS = 7 * 24 * 3600 * 1000
# A processor that delivers a result twice does so within minutes.
REMEMBERED_MS = 600_000

_SCRIPTS = ("queue_put", "queue_out", "queue_collect", "queue_withdraw", "queue_done", "queue_sweep")


class RedisQueue:
    """One queue in Redis. `owner` is the unique name of this process."""

    def __init__(self, queue: Queue, owner: str) -> None:
        self._queue = queue
        self._owner = owner
        self._line = RedisLine(
            queue.url.reveal(),
            _SCRIPTS,
            TIMEOUT_S,
            "asynchronous requests wait until it is back, and lie there meanwhile",
        )

    async def reach(self) -> None:
        try:
            await self._line.run_id()
        except RedisAway as away:
            raise _away(away) from None

    async def put(self, request: QueueRequest) -> Put:
        words = (request.id, self._queue.requests, request.message, repr(request.score), request.token, self._owner)
        return Put(_text(await self._ask("queue_put", *words, request.keep_ms)))

    async def is_out(self, request_id: str) -> bool:
        return bool(await self._ask("queue_out", request_id))

    async def collect(self, ids: Sequence[str], result_bytes_max: int, *, look: bool) -> Sorted:
        terms = (SORTED_MAX, result_bytes_max, READ_BYTES_MAX, int(look), DEAD_MAX, DEAD_MS)
        garbage, unknown, duplicate, left, *news = await self._ask("queue_collect", *terms, *ids)
        found = [Found(_text(request_id), QueueKind(_text(kind)), message) for request_id, kind, message in news]
        return Sorted(tuple(found), garbage, unknown, duplicate, left > 0)

    async def withdraw(self, request_id: str) -> Withdrawal:
        return Withdrawal(_text(await self._ask("queue_withdraw", request_id, self._queue.requests, self._owner)))

    async def acknowledge(self, ids: Sequence[str]) -> None:
        await self._ask("queue_done", REMEMBERED_MS, *ids)

    async def discard(self, ids: Sequence[str]) -> None:
        await self._ask("queue_done", 0, *ids)

    async def sweep(self) -> int:
        return int(await self._ask("queue_sweep", SWEPT_MAX, DEAD_MAX, DEAD_MS))

    async def state(self) -> QueueState:
        # Operators ask seldom, so this uses its own connection.
        url, wait_s = self._queue.url.reveal(), CONNECT_TIMEOUT_S
        try:
            client = Redis.from_url(url, socket_connect_timeout=wait_s, socket_timeout=TIMEOUT_S)
        except ValueError as error:
            raise QueueAway(f"its url cannot be read: {error}", is_unsure=False) from None
        try:
            look = script_text("queue_look")
            counts: Any = await client.eval(look, 1, self._queue.results, self._queue.requests)
            memory, disk = await client.info("memory"), await client.info("persistence")
        except (RedisError, OSError, TimeoutError) as error:
            raise QueueAway(str(error) or type(error).__name__, is_unsure=False) from None
        finally:
            await asyncio.shield(client.aclose())
        waiting, oldest, results, kept, dead = counts
        policy = str(memory.get("maxmemory_policy", "noeviction"))
        return QueueState(
            waiting=int(waiting),
            oldest_deadline_s=float(oldest) if math.isfinite(float(oldest)) else 0.0,
            results=int(results),
            unacknowledged=int(kept),
            dead=int(dead),
            evicts=bool(memory.get("maxmemory", 0)) and policy != "noeviction",
            is_persistent=bool(disk.get("aof_enabled", 0)),
        )

    async def close(self) -> None:
        await self._line.close()

    async def _ask(self, script: str, *words: str | bytes | int) -> Any:
        try:
            return await self._line.call(script, self._queue.results, *words)
        except RedisAway as away:
            raise _away(away) from None


def _away(away: RedisAway) -> QueueAway:
    return QueueAway(str(away), is_unsure=isinstance(away, RedisUnsure))


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value
