"""The harvest with real processes: `tidegate serve`, and `tidegate api` beside `tidegate worker`, in front of the modelled engine in real
time, over PostgreSQL. And how long a notice takes from one process to another.

Interactive chats come steadily, four a second with short answers, so that the engine is empty about half of the time; a batch of the
harvest's items is under way all the time. Both shapes take turns, each with a fresh database and the same chats. On a machine with few
cores the engine, the client and all of Tidegate share them: one shape beside the other counts, not the figures themselves.
"""

import asyncio
import contextlib
import itertools
import json
import multiprocessing
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import aiohttp
import uvloop

from bench.harvest import percentile
from bench.harvest_traces import Ask, batch
from bench.machinery import median, simulated_engine, table
from tests.support.postgres import PostgresServer
from tidegate.simulate.engine.kv_cache import TOKEN_BYTES
from tidegate.store.database.postgres_notices import PostgresNotices

SHAPES = ("one process", "apart")
CALLS_PER_S = 4.0
ITEMS = 4_000
WARM_S = 6.0
SLOTS, IN_FLIGHT = 256, 32
NOTICES_PER_S = 50.0
FRAME_TOKENS = 12
BUDGET = 1.05


def chat(number: str, ask: Ask, **more: Any) -> dict[str, Any]:
    """A request whose prompt and answer have so many tokens; its beginning is like no other's."""
    size = max(8, (ask.prompt_tokens - FRAME_TOKENS) * TOKEN_BYTES - len(number))
    message = {"role": "user", "content": f"{number} {'x' * size}"}
    output = {"max_tokens": ask.output_tokens, "min_tokens": ask.output_tokens}
    return {"model": "m", "messages": [message], **output, **more}


def lines() -> bytes:
    rows = []
    for number, ask in enumerate(itertools.islice(batch(), ITEMS)):
        body = chat(f"batch {number}", ask)
        rows.append({"custom_id": f"c{number}", "method": "POST", "url": "/v1/chat/completions", "body": body})
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def chats(seconds: float, seed: int) -> list[tuple[float, Ask]]:
    chance = random.Random(f"processes {seed}")
    arrivals: list[tuple[float, Ask]] = []
    at_s = 0.0
    while (at_s := at_s + chance.expovariate(CALLS_PER_S)) < seconds:
        prompt = min(2_048, max(16, round(chance.lognormvariate(0.0, 0.8) * 250)))
        arrivals.append((at_s, Ask(prompt, min(80, max(4, round(chance.lognormvariate(0.0, 0.5) * 20))))))
    return arrivals


@contextlib.contextmanager
def tidegate(role: str, directory: Path, environment: dict[str, str], pattern: str) -> Iterator[str]:
    """One process of Tidegate; gives the part of its output that the pattern captures, once it is up."""
    command = [sys.executable, "-m", "tidegate", role, "--data", str(directory / role)]
    env = {**os.environ, **environment}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=env) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if found := re.search(pattern, line):
                    yield found.group(1)
                    break
            else:
                raise RuntimeError(f"tidegate {role} did not start")
        finally:
            process.terminate()
            process.wait()


@contextlib.contextmanager
def installed(shape: str, engine: str, store_url: str) -> Iterator[str]:
    """The address of an installation in one shape."""
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        directory = Path(name)
        place = {"url": engine, "engine": "vllm", "max_in_flight": SLOTS}
        config = directory / "tidegate.yaml"
        config.write_text(json.dumps({"models": {"m": {"deployments": [place]}}}))
        environment = {
            "TIDEGATE_CONFIG": str(config),
            "TIDEGATE_STORE_URL": store_url,
            "TIDEGATE_BLOBS_URL": f"file://{directory / 'blobs'}",
            "TIDEGATE_SERVER_PORT": "0",
            "TIDEGATE_WORKER_IN_FLIGHT_MAX": str(IN_FLIGHT),
        }
        listening = r"tidegate listening on (http://\S+)"
        if shape == "one process":
            yield stack.enter_context(tidegate("serve", directory, environment, listening))
            return
        url = stack.enter_context(tidegate("api", directory, environment, listening))
        stack.enter_context(tidegate("worker", directory, environment, r"tidegate (worker_\w+) running"))
        yield url


async def _first_token(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> float:
    """Milliseconds from the call to the first byte of its answer."""
    began = time.perf_counter()
    async with session.post(f"{url}/v1/chat/completions", json=body) as answer:
        await answer.content.readany()
        first = time.perf_counter()
        await answer.read()
        if answer.status != 200:
            raise RuntimeError(f"an interactive call was answered with {answer.status}")
    return (first - began) * 1000


async def _users(url: str, seconds: float, seed: int, has_batch: bool) -> tuple[float, float]:
    """Chats beside a batch, or alone: p99 time to first token, and how many items a second were done meanwhile."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as session:

        async def done() -> int:
            async with session.get(f"{url}/v1/batches/{batch_id}") as answer:
                return int((await answer.json())["request_counts"]["completed"])

        batch_id = ""
        if has_batch:
            form = aiohttp.FormData({"purpose": "batch"})
            form.add_field("file", lines(), filename="in.jsonl")
            async with session.post(f"{url}/v1/files", data=form) as answer:
                file_id = (await answer.json())["id"]
            asked = {"input_file_id": file_id, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
            async with session.post(f"{url}/v1/batches", json=asked) as answer:
                batch_id = (await answer.json())["id"]
        tasks = []
        before = 0
        began = time.perf_counter()
        # The first chats are for the tide to learn from.
        for number, (at_s, ask) in enumerate(chats(WARM_S + seconds, seed)):
            await asyncio.sleep(began + at_s - time.perf_counter())
            if has_batch and not before and at_s >= WARM_S:
                before = await done()
            body = chat(f"user {seed} {number}", ask, stream=True)
            tasks.append((at_s, asyncio.create_task(_first_token(session, url, body))))
        firsts = [await task for at_s, task in tasks if at_s >= WARM_S]
        items = (await done() - before) / seconds if has_batch else 0.0
        return percentile(firsts, 0.99), items


def _sender(url: str, count: int) -> None:
    async def send() -> None:
        notices = PostgresNotices(url, "bench", 5.0)
        notices.start()
        for _ in range(count):
            await asyncio.sleep(1 / NOTICES_PER_S)
            await notices.send_notice(str(time.monotonic_ns()))
        await notices.close()

    uvloop.run(send())


def _listener(url: str, seconds: float, results: Connection) -> None:
    async def listen() -> list[float]:
        took_ms: list[float] = []
        notices = PostgresNotices(url, "bench", 5.0)
        notices.on_notice(lambda text: took_ms.append((time.monotonic_ns() - int(text)) / 1e6))
        notices.start()
        await asyncio.sleep(seconds)
        await notices.close()
        return took_ms

    results.send(uvloop.run(listen()))


def notice_delays_ms(url: str, count: int) -> list[float]:
    """How long notices took from one process to another, on the clock that both share."""
    spawned = multiprocessing.get_context("spawn")
    receiver, sender = spawned.Pipe(duplex=False)
    both = [
        spawned.Process(target=_listener, args=(url, count / NOTICES_PER_S + 5.0, sender)),
        spawned.Process(target=_sender, args=(url, count)),
    ]
    for one in both:
        one.start()
    took_ms: list[float] = receiver.recv()
    for one in both:
        one.join()
    return took_ms


def main(quick: bool = False) -> dict[str, float]:
    seconds, rounds, notices = (15.0, 1, 200) if quick else (25.0, 5, 1_000)
    found: dict[str, list[tuple[float, float]]] = {shape: [] for shape in ("alone", *SHAPES)}
    limits = ("--mode", "modelled", "--prefill-chunk-tokens", "512")
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        server = PostgresServer(Path(name) / "postgres")
        server.start()
        try:
            delays_ms = notice_delays_ms(server.create_database(), notices)
            for seed in range(rounds):
                for shape in found:
                    with (
                        simulated_engine(*limits) as engine,
                        installed(shape if shape in SHAPES else SHAPES[0], engine, server.create_database()) as url,
                    ):
                        found[shape].append(uvloop.run(_users(url, seconds, seed, has_batch=shape in SHAPES)))
        finally:
            server.stop()
    alone_ms, one_ms, apart_ms = (median([p99_ms for p99_ms, _ in listed]) for listed in found.values())
    ratios = [apart / one for (one, _), (apart, _) in zip(found[SHAPES[0]], found[SHAPES[1]], strict=True)]
    items = [median([rate for _, rate in found[shape]]) for shape in SHAPES]
    p50, p90, p99 = (percentile(delays_ms, share) for share in (0.5, 0.9, 0.99))
    every = ", ".join(f"{percentile(delays_ms, (one + 0.5) / 20):.1f}" for one in range(20))
    rows = [
        ("every twentieth of the notices' delays, ms", every, ""),
        ("a notice between two processes, p50, p90 and p99", f"{p50:.1f}, {p90:.1f}, {p99:.1f} ms", ""),
        ("p99 first token, alone", f"{alone_ms:.0f} ms", ""),
        ("  one process, times alone's", f"{one_ms / alone_ms:.2f}", ""),
        ("  API and worker apart, times alone's", f"{apart_ms / alone_ms:.2f}", ""),
        ("  apart, times one process's", f"{apart_ms / one_ms:.2f}", f"at most {BUDGET}"),
        ("  the same run by run", ", ".join(f"{one:.2f}" for one in ratios), ""),
        ("items a second beside users, one process and apart", f"{items[0]:.1f}, {items[1]:.1f}", ""),
    ]  # fmt: skip
    table(f"The harvest with real processes, {rounds} runs of {seconds:.0f} s each, in turns (medians)", rows)
    return {"apart, times one process's": apart_ms / one_ms, "notice p50 ms": p50, "notice p99 ms": p99}


if __name__ == "__main__":
    main("--quick" in sys.argv)
