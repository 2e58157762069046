"""What the gateway adds to an interactive call: the same calls to the bare engine, through `tidegate serve` and through LiteLLM's proxy,
turn by turn, in one run.

Streamed and not, one at a time and eight at once. The engine answers at once, so that its own time does not hide ours; the figure is the
difference of the medians and of the 99th percentiles. Streams are measured to their first byte and to their end.
"""

import asyncio
import contextlib
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import uvloop

from bench.litellm_proxy import litellm_proxy
from bench.machinery import simulated_engine, table

BUDGET_MEDIAN_MS, BUDGET_P99_MS = 2.0, 10.0
WARM_CALLS = 200
ASK = {"model": "m", "messages": [{"role": "user", "content": "Tell me about the sea. " * 20}], "max_tokens": 64}

Took = tuple[float, float]
# An address, and the headers that it wants.
Place = tuple[str, dict[str, str]]


@contextlib.contextmanager
def gateway(upstream: str) -> Iterator[str]:
    """The address of a server in front of this upstream, while it runs."""
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-m", "tidegate", "serve", "--data", str(Path(directory) / "data"), "--port", "0"]
        with subprocess.Popen([*command, "--upstream", upstream], stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            try:
                for line in process.stdout:
                    if found := re.search(r"(http://127\.0\.0\.1:\d+)", line):
                        yield f"{found.group(1)}/v1"
                        break
                else:
                    raise RuntimeError("the server did not start")
            finally:
                process.terminate()
                process.wait()


async def _one(session: aiohttp.ClientSession, url: str, body: bytes) -> Took:
    """Milliseconds to the first byte of the body, and to its last."""
    began = time.perf_counter()
    async with session.post(f"{url}/chat/completions", data=body) as answer:
        await answer.content.readany()
        first = time.perf_counter()
        await answer.read()
        if answer.status != 200:
            raise RuntimeError(f"{url} answered {answer.status}")
    return (first - began) * 1000, (time.perf_counter() - began) * 1000


async def _calls(session: aiohttp.ClientSession, url: str, body: bytes, count: int, in_flight: int) -> list[Took]:
    left = iter(range(count))

    async def run() -> list[Took]:
        return [await _one(session, url, body) for _ in left]

    return [took for part in await asyncio.gather(*[run() for _ in range(in_flight)]) for took in part]


@contextlib.asynccontextmanager
async def _session(in_flight: int, headers: dict[str, str]) -> AsyncIterator[aiohttp.ClientSession]:
    connector = aiohttp.TCPConnector(limit=in_flight)
    json_headers = {"Content-Type": "application/json", **headers}
    async with aiohttp.ClientSession(connector=connector, headers=json_headers) as session:
        yield session


async def _measure(
    places: list[Place], *, stream: bool, in_flight: int, count: int, rounds: int, slow_count: int
) -> list[list[Took]]:
    """What each call took at each place, in rounds that take turns; the last place gets fewer calls."""
    body = json.dumps({**ASK, "stream": stream}).encode()
    took: list[list[Took]] = [[] for _ in places]
    async with contextlib.AsyncExitStack() as stack:
        sessions = [await stack.enter_async_context(_session(in_flight, headers)) for _, headers in places]
        for session, (url, _) in zip(sessions, places, strict=True):
            await _calls(session, url, body, WARM_CALLS, in_flight)
        for _ in range(rounds):
            for number, (session, (url, _)) in enumerate(zip(sessions, places, strict=True)):
                calls = (slow_count if number == 2 else count) // rounds
                took[number] += await _calls(session, url, body, calls, in_flight)
    return took


def _at(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


def main(quick: bool = False) -> dict[str, float]:
    count, slow_count, rounds = (1_000, 100, 5) if quick else (10_000, 2_000, 20)
    found: dict[str, float] = {}
    rows = []
    with (
        simulated_engine("--mode", "instant") as engine,
        gateway(engine) as ours,
        litellm_proxy(engine) as theirs,
    ):
        places: list[Place] = [(engine, {}), (ours, {}), theirs]
        for stream, part, place in ((False, "whole", 1), (True, "first byte", 0), (True, "stream", 1)):
            for in_flight in (1, 8):
                took = uvloop.run(
                    _measure(
                        places, stream=stream, in_flight=in_flight, count=count, rounds=rounds, slow_count=slow_count
                    )
                )
                bare, through, beside = ([one[place] for one in side] for side in took)
                median, p99 = (_at(through, share) - _at(bare, share) for share in (0.5, 0.99))
                other_median, other_p99 = (_at(beside, share) - _at(bare, share) for share in (0.5, 0.99))
                name = f"{part}, {in_flight} at once"
                found |= {
                    f"{name}, median": median,
                    f"{name}, p99": p99,
                    f"{name}, of LiteLLM's": median / other_median,
                }
                figure = f"{median:.2f} ms median, {p99:.2f} ms p99 (bare {_at(bare, 0.5):.2f}, {_at(bare, 0.99):.2f})"
                budget = f"at most {BUDGET_MEDIAN_MS:g} and {BUDGET_P99_MS:g}" if in_flight == 1 else ""
                rows.append((name, figure, budget))
                rows.append((f"{name}: LiteLLM", f"{other_median:.2f} ms median, {other_p99:.2f} ms p99", ""))
    table(f"Added by the gateway to a call of the bare engine, {count:,} calls each", rows)
    return found


if __name__ == "__main__":
    main("--quick" in sys.argv)
