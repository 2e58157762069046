"""CPU per call on the event loop's thread: a bare aiohttp loop, the transport, and the router on top of it.

All send the same bodies to the same simulated engine in instant mode, turn by turn, with 64 and with 100 calls in flight.
"""

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable

import aiohttp
import uvloop
from yarl import URL

from bench.inputs import chat_lines
from bench.machinery import median, simulated_engine, table
from tidegate.backends.system import SystemClock, SystemEntropy
from tidegate.core.deployments import Deployment, HttpLimits
from tidegate.core.nouns import Call
from tidegate.upstream.calls.open_router import open_router
from tidegate.upstream.http.transport import AiohttpTransport, UpstreamRequest

BUDGETS = {"bare": "", "transport": "at most 0.50", "router": "at most 0.75"}
ENDPOINT = "/v1/chat/completions"
IN_FLIGHT = (64, 100)

Send = Callable[[int, bytes], Awaitable[object]]


async def _cpu_us(send: Send, bodies: list[bytes], in_flight: int) -> float:
    """CPU microseconds of this thread per call."""
    left = iter(enumerate(bodies))

    async def one() -> None:
        for number, body in left:
            await send(number, body)

    began = time.thread_time()
    await asyncio.gather(*[one() for _ in range(in_flight)])
    return (time.thread_time() - began) / len(bodies) * 1e6


async def _bare(url: str, bodies: list[bytes], in_flight: int) -> float:
    connector = aiohttp.TCPConnector(limit=in_flight)
    async with aiohttp.ClientSession(connector=connector, headers={"Content-Type": "application/json"}) as session:

        async def send(number: int, body: bytes) -> None:
            async with session.post(f"{url}/chat/completions", data=body) as answer:
                await answer.read()

        return await _cpu_us(send, bodies, in_flight)


async def _transport(url: str, bodies: list[bytes], in_flight: int) -> float:
    transport = AiohttpTransport(HttpLimits())
    place = Deployment("one", url)
    line, to = transport.client_for(place), URL(place.url_of(ENDPOINT))
    try:
        return await _cpu_us(
            lambda number, body: line.post(UpstreamRequest(to, f"k:{number}", body), 60), bodies, in_flight
        )
    finally:
        await transport.close()


async def _router(url: str, bodies: list[bytes], in_flight: int) -> float:
    clock = SystemClock()
    place = Deployment("one", url, max_in_flight=in_flight)
    router = open_router(HttpLimits(), clock, SystemEntropy())
    router.serve([place])
    deadline_ms = clock.monotonic_ms() + 600_000

    def send(number: int, body: bytes) -> Awaitable[object]:
        return router.send(Call("batch_1", number, ENDPOINT, "m", body, f"k:{number}", deadline_ms))

    try:
        return await _cpu_us(send, bodies, in_flight)
    finally:
        await router.close()


def main(quick: bool = False) -> dict[str, float]:
    count, rounds = (2_000, 3) if quick else (10_000, 7)
    bodies = [json.dumps(json.loads(line)["body"]).encode() for line in chat_lines(count)]
    ways = {"bare": _bare, "transport": _transport, "router": _router}
    found: dict[str, float] = {}
    rows = []
    with simulated_engine("--mode", "instant") as url:
        for in_flight in IN_FLIGHT:
            spent: dict[str, list[float]] = {name: [] for name in ways}
            for _ in range(rounds):
                for name, way in ways.items():
                    spent[name].append(uvloop.run(way(url, bodies, in_flight)))
            for name in ways:
                share = median([ours / bare for ours, bare in zip(spent[name], spent["bare"], strict=True)])
                found[f"{name}_us_{in_flight}"] = median(spent[name])
                found[f"{name}_share_{in_flight}"] = share
                figure = f"{median(spent[name]):.0f} µs, {share:.2f} of the bare loop's"
                rows.append((f"{name}, {in_flight} in flight", figure, BUDGETS[name]))
    table(
        f"CPU per call on the loop's thread, instant upstream, {count:,} calls of 1.5 kB, {rounds} rounds (medians)",
        rows,
    )
    return found


if __name__ == "__main__":
    main("--quick" in sys.argv)
