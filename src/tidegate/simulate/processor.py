"""A stand-in for llm-d's async processor, to try and test Tidegate without a cluster.

- It takes requests from the sorted sets of its pools, the earliest deadline first, calls a model
  server and pushes the results.
- It uses the real processor's messages: a marker stops a request before it is sent, and a request
  that cannot be sent gets an error code.
- Like the first versions of the real one, it loses the requests that it has taken if it is killed.

This module knows nothing of Tidegate.
"""

import argparse
import asyncio
import json
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
from redis.asyncio import Redis
from redis.exceptions import RedisError

POLL_S = 0.02
AWAY_S = 0.5
CALL_S = 3600.0
TRIES_MAX = 3
AGAIN_S = 0.2
CALLS_MAX = 64


@dataclass(frozen=True, slots=True)
class ProcessorOptions:
    """The Redis of the queues, the pools to serve, and the model server's address (no path)."""

    redis_url: str
    pools: Sequence[str]
    base_url: str
    calls_max: int = CALLS_MAX


class Processor:
    def __init__(self, options: ProcessorOptions) -> None:
        self._options = options
        self._redis = Redis.from_url(options.redis_url, socket_connect_timeout=2.0, socket_timeout=10.0)
        self._calls: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Take requests and call the model server until cancelled."""
        timeout = aiohttp.ClientTimeout(total=CALL_S)
        connector = aiohttp.TCPConnector(limit=self._options.calls_max)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector, trust_env=False) as session:
            try:
                while True:
                    try:
                        taken = [await self._take(session, pool) for pool in self._options.pools]
                    except (RedisError, OSError) as error:
                        sys.stderr.write(f"simulated processor: {type(error).__name__}: {error}\n")
                        await asyncio.sleep(AWAY_S)
                        continue
                    if not any(taken):
                        await asyncio.sleep(POLL_S)
            finally:
                for call in self._calls:
                    call.cancel()
                await asyncio.gather(*self._calls, return_exceptions=True)
                await self._redis.aclose()

    async def _take(self, session: aiohttp.ClientSession, pool: str) -> bool:
        free = self._options.calls_max - len(self._calls)
        if free <= 0:
            return False
        taken: list[tuple[bytes, float]] = await self._redis.zpopmin(f"llm-d-async:requests:{pool}", free)  # type: ignore[assignment]
        for message, _ in taken:
            call = asyncio.create_task(self._handle(session, pool, message))
            self._calls.add(call)
            call.add_done_callback(self._calls.discard)
        return bool(taken)

    async def _handle(self, session: aiohttp.ClientSession, pool: str, message: bytes) -> None:
        try:
            envelope = json.loads(message)
            routing, request = envelope["internal"], envelope["data"]
            request_id, deadline = str(request["id"]), int(request["deadline"])
            results = str(routing.get("result_queue_name") or f"llm-d-async:results:{pool}")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            sys.stderr.write(f"simulated processor: a request that cannot be read was dropped ({error})\n")
            return
        token = str(routing.get("request_token", "")).encode()
        if deadline < time.time():
            result = _error(request_id, "DEADLINE_EXCEEDED", "deadline exceeded before dispatch")
        elif token and await self._redis.get(f"request-cancel:{request_id}") == token:
            result = _error(request_id, "CANCELLED", "request was cancelled")
        else:
            result = await self._call(session, request_id, request)
        # A result must not get lost, so it is pushed until Redis has it.
        while True:
            try:
                await self._redis.lpush(results, json.dumps(result))
                return
            except (RedisError, OSError):
                await asyncio.sleep(AWAY_S)

    async def _call(self, session: aiohttp.ClientSession, request_id: str, request: dict[str, Any]) -> dict[str, Any]:
        url = self._options.base_url.rstrip("/") + str(request.get("endpoint") or "/v1/completions")
        body = json.dumps(request["payload"], ensure_ascii=False).encode()
        headers = {**request.get("headers", {}), "Content-Type": "application/json"}
        for tries_left in reversed(range(TRIES_MAX)):
            try:
                async with session.post(url, data=body, headers=headers) as response:
                    payload = (await response.read()).decode("utf-8", "replace")
                    if not tries_left or (response.status != 429 and response.status < 500):
                        return {"id": request_id, "status_code": response.status, "payload": payload}
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                if not tries_left:
                    return _error(request_id, "INFERENCE_ERROR", f"{type(error).__name__}: {error}")
            await asyncio.sleep(AGAIN_S)
        raise AssertionError("the last try always returns")


def _error(request_id: str, code: str, message: str) -> dict[str, Any]:
    payload = json.dumps({"error": message})
    return {"id": request_id, "payload": payload, "error_code": code, "error_message": message}


async def process(options: ProcessorOptions) -> None:
    """Serve the pools until SIGTERM or SIGINT."""
    running = asyncio.create_task(Processor(options).run())
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, running.cancel)
    sys.stdout.write(f"simulated processor takes from {', '.join(options.pools)}\n")
    sys.stdout.flush()
    await asyncio.gather(running, return_exceptions=True)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tidegate.simulate.processor", description="A stand-in for llm-d's async processor."
    )
    parser.add_argument("--redis", required=True, metavar="URL")
    parser.add_argument("--pool", action="append", required=True)
    parser.add_argument("--upstream", required=True, metavar="URL", help="the model server, with or without /v1")
    parser.add_argument("--calls-max", type=int, default=CALLS_MAX)
    given = parser.parse_args(arguments)
    options = ProcessorOptions(given.redis, given.pool, given.upstream.rstrip("/").removesuffix("/v1"), given.calls_max)
    asyncio.run(process(options))
    return 0


if __name__ == "__main__":
    sys.exit(main())
