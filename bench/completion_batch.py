"""The completion-batch door: a SYNC batch beside a bare loop of calls with as many in flight, and what a create of 100 MB and
a poll with all items add to the serving process.
"""

import asyncio
import json
import statistics
import subprocess
import tempfile
import time
import urllib.request
from pathlib import Path

import aiohttp

from bench.machinery import serving, simulated_engine, table
from bench.memory import Watch

IN_FLIGHT = 64
LATENCY_MS = 50
PLACE = "/v1/completion-batch/default/bench"


def _request(number: int, text_bytes: int = 40) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": f"{number:06} ".ljust(text_bytes, "x")}], "max_tokens": 8}


async def _bare_s(upstream: str, count: int) -> float:
    """The same calls by a loop that does nothing else."""
    free = asyncio.Semaphore(IN_FLIGHT)
    began = time.perf_counter()
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=IN_FLIGHT)) as session:

        async def one(number: int) -> None:
            async with (
                free,
                session.post(f"{upstream}/chat/completions", json={"model": "m", **_request(number)}) as answer,
            ):
                await answer.read()

        await asyncio.gather(*(one(number) for number in range(count)))
    return time.perf_counter() - began


def _sync_s(url: str, count: int) -> float:
    """One SYNC batch, from the create to its last byte."""
    items = [{"resourceId": "m", "request": _request(number)} for number in range(count)]
    body = json.dumps({"type": "SYNC", "items": items}).encode()
    began = time.perf_counter()
    asked = urllib.request.Request(url + PLACE, body, {"Content-Type": "application/json"}, method="POST")
    with urllib.request.urlopen(asked) as answer:
        events = answer.read()
    took_s = time.perf_counter() - began
    assert events.count(b'"action":"item-completed"') == count, "every item was answered"
    assert events.endswith(b"data: [DONE]\n\n")
    return took_s


def _curl(*arguments: str) -> bytes:
    return subprocess.run(["curl", "-sS", *arguments], capture_output=True, check=True).stdout


def _memory_mib(url: str, pid: int, data: Path, count: int, text_bytes: int) -> tuple[float, float]:
    """What a large create adds, and what a poll with all of its items does."""
    body = data / "create.json"
    with body.open("w") as stream:
        stream.write('{"type":"ASYNC","items":[')
        for number in range(count):
            stream.write("," * (number > 0) + json.dumps({"resourceId": "m", "request": _request(number, text_bytes)}))
        stream.write("]}")
    watch = Watch(pid)
    made = _curl("-H", "Content-Type: application/json", "--data-binary", f"@{body}", url + PLACE)
    create_mib = watch.grown()
    batch_id = json.loads(made)["batchId"]
    while json.loads(_curl(f"{url}{PLACE}/{batch_id}?includesItems=false"))["status"] not in ("COMPLETED", "FAILED"):
        time.sleep(0.5)
    watch = Watch(pid)
    _curl("-o", str(data / "poll.json"), f"{url}{PLACE}/{batch_id}")
    poll_mib = watch.grown()
    assert len(json.loads((data / "poll.json").read_bytes())["items"]) == count
    return create_mib, poll_mib


def main(quick: bool = False) -> dict[str, float]:
    count, rounds = (200, 1) if quick else (1_000, 5)
    large, text_bytes = (2_000, 5_000) if quick else (20_000, 5_000)
    with (
        tempfile.TemporaryDirectory() as name,
        simulated_engine("--mode", "fixed", "--latency-ms", str(LATENCY_MS)) as engine,
    ):
        in_flight = {"TIDEGATE_WORKER_IN_FLIGHT_MAX": str(IN_FLIGHT)}
        with serving(Path(name) / "d", engine, **in_flight) as (url, pid):
            _sync_s(url, 20)
            pairs = [(asyncio.run(_bare_s(engine, count)), _sync_s(url, count)) for _ in range(rounds)]
            create_mib, poll_mib = _memory_mib(url, pid, Path(name), large, text_bytes)
    ratio = statistics.median(sync_s / bare_s for bare_s, sync_s in pairs)
    bare_s, sync_s = (statistics.median(one) for one in zip(*pairs, strict=True))
    table(
        f"Completion batches, `tidegate serve`, {count:,} items of {LATENCY_MS} ms, {IN_FLIGHT} in flight",
        [
            ("a bare loop takes", f"{bare_s:.2f} s", ""),
            ("a SYNC batch takes", f"{sync_s:.2f} s", ""),
            ("ratio", f"{ratio:.2f}", "at most 1.2"),
            (f"a create of {large * (text_bytes + 100) // 1_000_000} MB adds", f"{create_mib:.1f} MiB", "under 32 MB"),
            (f"a poll with {large:,} items adds", f"{poll_mib:.1f} MiB", "under 32 MB"),
        ],
    )
    return {"ratio": ratio, "create_mib": create_mib, "poll_mib": poll_mib}
