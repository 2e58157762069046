"""Items per second and CPU per item of the whole durable road, beside a bare aiohttp loop that stores nothing.

Both talk to the same simulated engine in instant mode, with the same bodies and the same number of calls in flight, turn by turn. Beside
it the road to an upstream of which nothing is known but its URL: how many calls it bears is then learned on the way.
"""

import asyncio
import json
import tempfile
import time
from pathlib import Path

import aiohttp
import uvloop

from bench.inputs import MODEL, chat_lines
from bench.machinery import cpu_seconds, median, simulated_engine, table
from tidegate.core import ids
from tidegate.core.nouns import Caller, JobRequest
from tidegate.core.states import JOB_ENDED, JobState
from tidegate.service import Working, working
from tidegate.settings import Settings, load

IN_FLIGHT = 100


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


async def submit(at_work: Working, lines: list[bytes], endpoint: str = "/v1/chat/completions") -> str:
    """Store the lines as a file and create a job; says its id."""
    parts = at_work.parts
    blob_id = ids.make("blob", parts.entropy.token_bytes(16))
    await parts.store.begin_blob(blob_id, "upload", at_work.incarnation.id)
    writer = await parts.blobs.create(blob_id)
    for line in lines:
        await writer.write(line)
    stamp = await writer.finish()
    caller = Caller(parts.tenant_id)
    file_id = ids.make("file", parts.entropy.token_bytes(16))
    await parts.store.create_file(
        caller,
        file_id,
        blob_id,
        stamp,
        purpose="batch",
        filename="bench.jsonl",
        line_count=len(lines),
        expires_after_ms=None,
    )
    job_id = ids.make("batch", parts.entropy.token_bytes(16))
    await parts.store.create_job(caller, job_id, JobRequest(endpoint, file_id, 24 * 3600 * 1000, "24h"))
    return job_id


async def until_ended(at_work: Working, job_id: str) -> None:
    while True:
        job = await at_work.parts.store.any_job(job_id)
        assert job is not None
        if job.state in JOB_ENDED:
            if job.state is not JobState.COMPLETED or job.answered_count != job.item_count:
                raise RuntimeError(f"the job ended as {job.state} with {job.failed_count} failures: {job.errors}")
            return
        await asyncio.sleep(0.05)


def settings_for(url: str, data: Path, *, stated: bool = True, **overrides: object) -> Settings:
    """Everything in this directory. `stated`: a deployment of which is said how many calls it takes, not one whose capacity is learned."""
    said = {"worker.in_flight_max": IN_FLIGHT, **overrides}
    if not stated:
        return load(None, data, {"upstream.url": url, **said}, {}).settings
    config = data / "config.yaml"
    config.write_text(f"models:\n  {MODEL}:\n    deployments:\n      - {{url: '{url}', max_in_flight: {IN_FLIGHT}}}\n")
    return load(config, data, said, {}).settings


async def whole_road(url: str, lines: list[bytes], *, stated: bool = True) -> tuple[float, float]:
    """Seconds from create to completed, and CPU seconds of this process and its ingest child."""
    with tempfile.TemporaryDirectory() as data:
        async with working(settings_for(url, Path(data), stated=stated)) as at_work:
            job_id = await submit(at_work, lines)
            began, cpu_began = time.perf_counter(), cpu_seconds()
            at_work.parts.wake.ring()
            await until_ended(at_work, job_id)
            seconds = time.perf_counter() - began
        return seconds, cpu_seconds() - cpu_began


def main(quick: bool = False) -> dict[str, float]:
    count, rounds = (5_000, 3) if quick else (20_000, 5)
    lines = list(chat_lines(count))
    bodies = [json.dumps(json.loads(line)["body"]).encode() for line in lines]
    ratios, extra_us, rates, learned = [], [], [], []
    with simulated_engine("--mode", "instant") as url:
        for _ in range(rounds):
            bare_s, bare_cpu = uvloop.run(bare_loop(url, bodies))
            road_s, road_cpu = uvloop.run(whole_road(url, lines))
            learned_s, _ = uvloop.run(whole_road(url, lines, stated=False))
            learned.append(bare_s / learned_s)
            ratios.append(bare_s / road_s)
            extra_us.append((road_cpu - bare_cpu) / count * 1e6)
            rates.append(count / road_s)
    found = {
        "ratio": median(ratios),
        "extra_cpu_us": median(extra_us),
        "items_per_s": median(rates),
        "learned_ratio": median(learned),
    }
    table(
        f"Durable, embedded, instant upstream, {count:,} chat items of 1.5 kB, {IN_FLIGHT} in flight, {rounds} rounds (medians)",
        [
            ("items/s", f"{found['items_per_s']:,.0f}", ""),
            ("of the bare loop's", f"{found['ratio']:.2f}", "at least 0.75"),
            ("of it where the capacity is learned", f"{found['learned_ratio']:.2f}", ""),
            ("CPU beyond it, per item", f"{found['extra_cpu_us']:.0f} µs", "at most 100 µs"),
        ],
    )
    return found


if __name__ == "__main__":
    main()
