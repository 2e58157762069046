"""What the gateway adds to an interactive call: the same calls to the bare engine, through `tidegate serve` and through LiteLLM's proxy,
turn by turn, in one run.

Streamed and not, one at a time and eight at once; both gateways ask for a key. The engine answers at once, so that its own time does not
hide ours; the figure is the difference of the medians and of the 99th percentiles. Streams are measured to their first byte and to their
end. Calls a second are those that the client here makes of a place, so they can be no more than the client can do: the bare engine's say
how many that is.
"""

import asyncio
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import uvloop

from bench.litellm_proxy import litellm_proxy
from bench.machinery import repository, simulated_engine, table

# Calls at once; and the median and the p99 that the gateway may add to each.
BUDGETS_MS = {1: (1, 3), 8: (3, 8)}
IN_FLIGHT = tuple(BUDGETS_MS)
BUDGET_PER_S = 4_000
WARM_CALLS = 200
ASK = {"model": "m", "messages": [{"role": "user", "content": "Tell me about the sea. " * 20}], "max_tokens": 64}

Took = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Place:
    """Where calls go, the headers that it wants, the process that serves them, and the options of commands beside it."""

    url: str
    headers: dict[str, str]
    pid: int = 0
    options: tuple[str, ...] = ()


@contextlib.contextmanager
def gateway(upstream: str, tree: Path | None = None, settings: Mapping[str, object] | None = None) -> Iterator[Place]:
    """`tidegate serve` of this or another tree in front of this upstream, with a key, while it runs."""
    source = (tree or repository()) / "src"
    environment = {**os.environ, "PYTHONPATH": str(source)}
    with tempfile.TemporaryDirectory() as directory:
        config = Path(directory) / "tidegate.yaml"
        config.write_text(json.dumps(settings or {}))
        command, common = [sys.executable, "-m", "tidegate"], ["--data", f"{directory}/data", "--config", str(config)]
        make_key = [*command, "keys", "create", "--org", "acme", "--json", *common]
        made = subprocess.run(make_key, env=environment, check=True, stdout=subprocess.PIPE)
        headers = {"Authorization": f"Bearer {json.loads(made.stdout)['key']}"}
        serve = [*command, "serve", "--port", "0", "--upstream", upstream, *common]
        quiet: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
        with subprocess.Popen(serve, env=environment, **quiet) as process:
            try:
                for line in process.stdout or ():
                    if found := re.search(r"(http://127\.0\.0\.1:\d+)", line):
                        yield Place(f"{found.group(1)}/v1", headers, process.pid, tuple(common))
                        break
                else:
                    raise RuntimeError(f"the gateway of {source} did not start")
            finally:
                process.terminate()
                process.wait()


async def _one(client: aiohttp.ClientSession, url: str, body: bytes) -> Took:
    """Milliseconds to the first byte of the body, and to its last."""
    began = time.perf_counter()
    async with client.post(f"{url}/chat/completions", data=body) as answer:
        beginning = await answer.content.readany()
        first = time.perf_counter()
        await answer.read()
        if answer.status != 200:
            raise RuntimeError(f"{url} answered {answer.status}: {beginning[:200]!r}")
    return (first - began) * 1000, (time.perf_counter() - began) * 1000


async def make_calls(client: aiohttp.ClientSession, url: str, body: bytes, count: int, in_flight: int) -> list[Took]:
    left = iter(range(count))

    async def run() -> list[Took]:
        return [await _one(client, url, body) for _ in left]

    return [took for part in await asyncio.gather(*[run() for _ in range(in_flight)]) for took in part]


@contextlib.asynccontextmanager
async def open_session(in_flight: int, headers: dict[str, str]) -> AsyncIterator[aiohttp.ClientSession]:
    connector = aiohttp.TCPConnector(limit=in_flight)
    json_headers = {"Content-Type": "application/json", **headers}
    async with aiohttp.ClientSession(connector=connector, headers=json_headers) as client:
        yield client


@dataclass(slots=True)
class Measured:
    """What each call took, and how many seconds all of them together."""

    took: list[Took] = field(default_factory=list)
    seconds: float = 0.0

    def at(self, part: int, share: float) -> float:
        """Milliseconds to the first byte (0) or to the last (1), below which this share of the calls lies."""
        values = sorted(took[part] for took in self.took)
        return values[min(len(values) - 1, int(len(values) * share))]

    def per_second(self) -> float:
        return len(self.took) / self.seconds


async def _measure(
    places: list[Place], counts: list[int], rounds: int, *, stream: bool, in_flight: int
) -> list[Measured]:
    """So many calls at each place, in rounds that take turns."""
    body = json.dumps({**ASK, "stream": stream}).encode()
    measured = [Measured() for _ in places]
    async with contextlib.AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(open_session(in_flight, place.headers)) for place in places]
        for client, place in zip(clients, places, strict=True):
            await make_calls(client, place.url, body, WARM_CALLS, in_flight)
        for _ in range(rounds):
            for client, place, count, into in zip(clients, places, counts, measured, strict=True):
                began = time.perf_counter()
                into.took += await make_calls(client, place.url, body, count // rounds, in_flight)
                into.seconds += time.perf_counter() - began
    return measured


def _rows(
    stream: bool, in_flight: int, measured: list[Measured], found: dict[str, float]
) -> list[tuple[str, str, str]]:
    bare, ours, theirs = measured
    kind = "streamed" if stream else "whole"
    rows = []
    for part, title in ((0, "to the first byte"), (1, "to the end")) if stream else ((1, "to the end"),):
        for side, name in ((ours, ""), (theirs, ": LiteLLM")):
            added = [side.at(part, share) - bare.at(part, share) for share in (0.5, 0.99)]
            figure = f"{added[0]:.2f} ms median, {added[1]:.2f} ms p99"
            budget = "at most {} and {}".format(*BUDGETS_MS[in_flight]) if side is ours else ""
            rows.append((f"{kind}, {in_flight} at once, {title}{name}", figure, budget))
            found |= {f"{rows[-1][0]}, median": added[0], f"{rows[-1][0]}, p99": added[1]}
    rates = [side.per_second() for side in measured]
    figure = f"{rates[1]:,.0f}; LiteLLM {rates[2]:,.0f}; the bare engine {rates[0]:,.0f}"
    budget = f"at least {BUDGET_PER_S:,}" if in_flight == max(IN_FLIGHT) and not stream else ""
    rows.append((f"{kind}, {in_flight} at once, calls a second", figure, budget))
    found[rows[-1][0]] = rates[1]
    return rows


def main(quick: bool = False) -> dict[str, float]:
    count, slow_count, rounds = (1_000, 100, 5) if quick else (10_000, 1_000, 20)
    found: dict[str, float] = {}
    rows = []
    with (
        simulated_engine("--mode", "instant") as engine,
        gateway(engine) as ours,
        litellm_proxy(engine) as (url, headers),
    ):
        places = [Place(engine, {}), ours, Place(url, headers)]
        for stream in (False, True):
            for in_flight in IN_FLIGHT:
                counts = [count, count, slow_count]
                measured = uvloop.run(_measure(places, counts, rounds, stream=stream, in_flight=in_flight))
                rows += _rows(stream, in_flight, measured, found)
    table(
        f"Added to a call of the bare engine, a key on both sides, {count:,} calls each ({slow_count:,} of LiteLLM)",
        rows,
    )
    return found


if __name__ == "__main__":
    main("--quick" in sys.argv)
