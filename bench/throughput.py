"""Items per second and CPU per item of the whole durable road, beside a bare aiohttp loop that stores nothing.

Both talk to the same simulated engine in instant mode, with the same bodies and the same number of calls in flight, turn by turn. What has
the budget is the road that `tidegate run --upstream URL` takes: nothing is known of the upstream but its URL, so how many calls it takes is
learned on the way. Beside it the road with a stated capacity. CPU per item is that of this process and its children: reading the input,
calling, recording and the store; the engine's is not in it.
"""

import asyncio
import json
import tempfile
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import aiohttp
import uvloop

from bench.inputs import MODEL, chat_lines
from bench.machinery import cpu_seconds, median, simulated_engine, table
from tidegate.core import ids
from tidegate.core.answer_terms import AnswerTerms
from tidegate.core.files import NewFile
from tidegate.core.nouns import Caller, JobRequest
from tidegate.core.states import JOB_ENDED, JobState
from tidegate.service import Working, working
from tidegate.settings import Settings, load

IN_FLIGHT = 100
SHARE_MIN = 0.80
CPU_US_MAX = 130


async def bare_loop(url: str, bodies: list[bytes]) -> tuple[float, float]:
    """Seconds and CPU seconds of sending these bodies and reading the answers, nothing more."""
    left = iter(bodies)
    connector = aiohttp.TCPConnector(limit=IN_FLIGHT)
    async with aiohttp.ClientSession(connector=connector, headers={"Content-Type": "application/json"}) as session:

        async def send() -> None:
            for body in left:
                async with session.post(f"{url}/chat/completions", data=body) as answer:
                    await answer.read()

        began, cpu_began = time.perf_counter(), cpu_seconds()
        await asyncio.gather(*[send() for _ in range(IN_FLIGHT)])
        return time.perf_counter() - began, cpu_seconds() - cpu_began


async def submit(
    process: Working, lines: list[bytes], endpoint: str = "/v1/chat/completions", answers: AnswerTerms | None = None
) -> str:
    """Store the lines as a file and create a job; says its id."""
    parts = process.parts
    blob_id = ids.make("blob", parts.entropy.token_bytes(16))
    await parts.store.begin_blob(blob_id, "upload", process.incarnation.id)
    writer = await parts.blobs.create(blob_id)
    for line in lines:
        await writer.write(line)
    stamp = await writer.finish()
    caller = Caller(parts.tenant_id)
    file_id = ids.make("file", parts.entropy.token_bytes(16))
    await parts.store.create_file(caller, NewFile(file_id, blob_id, stamp, "batch", "bench.jsonl", len(lines), None))
    job_id = ids.make("batch", parts.entropy.token_bytes(16))
    wanted = JobRequest(endpoint, file_id, 24 * 3600 * 1000, "24h", answers=answers)
    await parts.store.create_job(caller, job_id, wanted)
    return job_id


async def until_ended(process: Working, job_id: str) -> None:
    while True:
        job = await process.parts.store.any_job(job_id)
        assert job is not None
        if job.state in JOB_ENDED:
            if job.state is not JobState.COMPLETED or job.answered_count != job.item_count:
                raise RuntimeError(f"the job ended as {job.state} with {job.failed_count} failures: {job.errors}")
            return
        await asyncio.sleep(0.05)


def settings_for(url: str, data: Path, *, stated: bool = True, **overrides: object) -> Settings:
    """Everything in this directory. `stated`: a deployment whose slots are in its settings, not one whose capacity is learned."""
    given = {"worker.in_flight_max": IN_FLIGHT, **overrides}
    if not stated:
        return load(None, data, {"upstream.url": url, **given}, {}).settings
    config = data / "config.yaml"
    config.write_text(f"models:\n  {MODEL}:\n    deployments:\n      - {{url: '{url}', max_in_flight: {IN_FLIGHT}}}\n")
    return load(config, data, given, {}).settings


async def whole_road(url: str, lines: list[bytes], *, stated: bool = True) -> tuple[float, float]:
    """Seconds from create to completed, and CPU seconds of this process and its ingest child."""
    with tempfile.TemporaryDirectory() as data:
        async with working(settings_for(url, Path(data), stated=stated)) as process, process.running():
            job_id = await submit(process, lines)
            began, cpu_began = time.perf_counter(), cpu_seconds()
            process.parts.wakes.inputs.notify()
            await until_ended(process, job_id)
            seconds = time.perf_counter() - began
        return seconds, cpu_seconds() - cpu_began


def main(quick: bool = False) -> dict[str, float]:
    count, rounds = (5_000, 3) if quick else (20_000, 5)
    lines = list(chat_lines(count))
    bodies = [json.dumps(json.loads(line)["body"]).encode() for line in lines]
    ways: dict[str, Callable[[str], Coroutine[Any, Any, tuple[float, float]]]] = {
        "bare": lambda url: bare_loop(url, bodies),
        "learned": lambda url: whole_road(url, lines, stated=False),
        "stated": lambda url: whole_road(url, lines),
    }
    took: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    with simulated_engine("--mode", "instant") as url:
        for _ in range(rounds):
            for name, way in ways.items():
                took[name].append(uvloop.run(way(url)))
    found: dict[str, float] = {}
    rows = []
    titles = {"bare": "the bare loop", "learned": "capacity learned, as `run --upstream`", "stated": "capacity stated"}
    for name, title in titles.items():
        rates = [count / seconds for seconds, _ in took[name]]
        cpus = [cpu / count * 1e6 for _, cpu in took[name]]
        found |= {f"{name}_items_per_s": median(rates), f"{name}_cpu_us": median(cpus)}
        rows.append((f"{title}: items/s", f"{median(rates):,.0f}", ""))
        if name != "bare":
            ratios = [bare / ours for (bare, _), (ours, _) in zip(took["bare"], took[name], strict=True)]
            found[f"{name}_ratio"] = median(ratios)
            figure = f"{median(ratios):.2f} (" + ", ".join(f"{ratio:.2f}" for ratio in ratios) + ")"
            rows.append((f"{title}: of the bare loop's", figure, f"at least {SHARE_MIN:.2f}"))
        figure = f"{median(cpus):.0f} µs ({min(cpus):.0f} to {max(cpus):.0f})"
        rows.append(
            (f"{title}: CPU per item, everything", figure, "" if name == "bare" else f"at most {CPU_US_MAX} µs")
        )
    table(
        f"Durable, embedded, instant upstream, {count:,} chat items of 1.5 kB, {IN_FLIGHT} in flight, {rounds} rounds (medians)",
        rows,
    )
    return found


if __name__ == "__main__":
    main()
