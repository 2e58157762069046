"""Small real worlds to judge: real jobs, run to some point by the real worker against the simulated engine.

A world on SQLite and a directory can be copied, and a copy can be damaged without harming the others.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import apsw

from tests.support.engine import Engine
from tests.support.processes import wait_until_async
from tests.support.s3 import S3Server
from tidegate import judge, service
from tidegate.backends.blobs_local import LocalBlobs
from tidegate.core import ids
from tidegate.core.files import NewFile
from tidegate.core.follow_up import FollowUp
from tidegate.core.job_controls import Canary, RetryChoice
from tidegate.core.job_shape import JobShape
from tidegate.core.nouns import Caller, Job, JobRequest
from tidegate.core.states import JOB_ENDED
from tidegate.settings import Settings, load

ENDPOINT = "/v1/chat/completions"
DAY_MS = 24 * 3600 * 1000


def line(custom_id: str, behave: str = "", model: str = "m") -> bytes:
    """One request; `behave` sets what the simulated engine does with it."""
    text = json.dumps({"behave": behave}) if behave else "hello"
    body = {"model": model, "messages": [{"role": "user", "content": f"{text} {custom_id}"}], "max_tokens": 5}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": ENDPOINT, "body": body}).encode() + b"\n"


def settings(directory: Path, engine: Engine, **more: object) -> Settings:
    quick: dict[str, object] = {
        "upstream.url": engine.url,
        "worker.in_flight_max": 8,
        "worker.heartbeat_ms": 200,
        "worker.poll_ms": 50,
        "ingest.slice_count_max": 4,
        "retry.backoff_ms": 50,
    }
    return load(None, directory, {**quick, **more}, {}).settings


def on_postgres_and_s3(directory: Path, engine: Engine, postgres_url: str, s3: S3Server, bucket: str) -> Settings:
    return settings(
        directory,
        engine,
        **{
            "store.url": postgres_url,
            "blobs.url": f"s3://{bucket}/judged",
            "blobs.endpoint": s3.endpoint,
            "blobs.region": s3.region,
            "blobs.access_key_id": s3.access_key,
            "blobs.secret_access_key": s3.secret_key,
            "blobs.allow_http": True,
        },
    )


async def create(working: service.Working, data: bytes, *, window_ms: int = DAY_MS, **asked: Any) -> Job:
    """Upload an input and create a job on it."""
    parts = working.parts
    blob_id = ids.make("blob", parts.entropy.token_bytes(16))
    await parts.store.begin_blob(blob_id, "upload", working.incarnation.id)
    writer = await parts.blobs.create(blob_id)
    await writer.write(data)
    caller = Caller(parts.tenant_id)
    file = await parts.store.create_file(
        caller,
        NewFile(
            ids.make("file", parts.entropy.token_bytes(16)),
            blob_id,
            await writer.finish(),
            "batch",
            "in.jsonl",
            data.count(b"\n"),
            None,
        ),
    )
    request = JobRequest(ENDPOINT, file.id, window_ms, "24h", **asked)
    job = await parts.store.create_job(caller, ids.make("batch", parts.entropy.token_bytes(16)), request)
    parts.wakes.inputs.notify()
    return job


async def retry(working: service.Working, job: Job) -> Job:
    """A job that runs again what a cancel left of another."""
    parts = working.parts
    job_id, lines, merged = (ids.make(kind, parts.entropy.token_bytes(16)) for kind in ("batch", "file", "file"))
    wanted = FollowUp(job.id, RetryChoice(("cancelled",)), job_id, lines, merged, b"")
    made = await parts.store.retry_job(Caller(parts.tenant_id), wanted)
    assert made is not None
    parts.wakes.inputs.notify()
    return made


async def until(working: service.Working, job: Job, reached: Callable[[Job], bool]) -> Job:
    async def look() -> Job | None:
        seen = await working.parts.store.any_job(job.id)
        return seen if seen is not None and reached(seen) else None

    found = await wait_until_async(look, 60, f"{job.id} to get there")
    assert found is not None
    return found


def has_ended(job: Job) -> bool:
    return job.state in JOB_ENDED


async def run_to_end(working: service.Working, data: bytes, **asked: Any) -> Job:
    return await until(working, await create(working, data, **asked), has_ended)


def slow_lines(latency_ms: int) -> bytes:
    return b"".join(line(f"s{n}", f"latency={latency_ms}") for n in range(60))


async def expire(working: service.Working) -> Job:
    """A job whose window passes when some of it is done. On a busy machine that takes a longer window and slower answers."""
    window_ms = 1_500
    while True:
        job = await run_to_end(working, slow_lines(window_ms // 2), window_ms=window_ms)
        if job.answered_count:
            return job
        window_ms *= 2


MIXED = [line(f"a{n}", model="m" if n % 2 else "other") for n in range(20)]
MIXED += [line("bad-1", "400"), line("again-1", "500x1"), line("again-2", "503x1"), line("busy-1", "429:ra=0x1")]
MIXED += [line("half-1", "halfx1"), line("html-1", "html"), line("ünïcode-é", "")]


def same_lines() -> bytes:
    """Requests of which some are the same: a good one thrice, a refused one twice, one that chance may answer otherwise twice."""
    made = []
    for number, (text, temperature) in enumerate(
        [("a", 0), ("b", 0), ("a", 0), ("400", 0), ("c", 1), ("400", 0), ("a", 0), ("c", 1)]
    ):
        asked = json.dumps({"behave": text}) if text.isdigit() else text
        body = {
            "model": "m",
            "messages": [{"role": "user", "content": asked}],
            "max_tokens": 5,
            "temperature": temperature,
        }
        made.append(
            json.dumps({"custom_id": f"d{number}", "method": "POST", "url": ENDPOINT, "body": body}).encode() + b"\n"
        )
    return b"".join(made)


SHAPE = JobShape(defaults={"seed": 1, "user": "x"}, overrides={"top_p": 1}, output_file_bytes_max=1_024)
# Bound to models of their own, so that the other jobs meet none of them.
GUARDRAILS = {
    "words": {"patterns": ["forbidden"], "models": ["guarded"], "applies_to": "requests"},
    "redacted": {"patterns": ["hello"], "action": "redact", "models": ["guarded"], "applies_to": "requests"},
    "short": {"answer_bytes_max": 10, "models": ["paid-in-vain"]},
}
GUARDED = [line("g1", model="guarded"), line("forbidden", model="guarded"), line("g2", model="paid-in-vain")]


@dataclass
class JudgedWorld:
    """Where everything lies, and the job of each name."""

    directory: Path
    witness: Path
    jobs: dict[str, str] = field(default_factory=dict)

    @property
    def store(self) -> Path:
        return self.directory / "tidegate.db"

    @property
    def blobs(self) -> Path:
        return self.directory / "blobs"

    def copy(self, target: Path) -> JudgedWorld:
        shutil.copytree(self.directory, target)
        witness = target / "calls.jsonl"
        shutil.copy(self.witness, witness)
        return JudgedWorld(target, witness, self.jobs)

    def sql(self, text: str, params: tuple[object, ...] = ()) -> list[tuple[Any, ...]]:
        """Change or ask the store behind the product's back."""
        connection = apsw.Connection(str(self.store))
        try:
            connection.execute("pragma synchronous = off")
            rows = list(connection.execute(text, params))
            assert connection.total_changes() or not text.startswith(("update", "delete", "insert")), (
                "nothing was damaged"
            )
            return rows
        finally:
            connection.close()

    def one(self, text: str, params: tuple[object, ...] = ()) -> Any:
        return self.sql(text, params)[0][0]

    def blob_path(self, blob_id: str) -> Path:
        return self.blobs / blob_id[5:7] / blob_id

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[tuple[judge.Records, LocalBlobs]]:
        blobs = LocalBlobs(self.blobs)
        try:
            async with judge.sqlite_records(self.store) as records:
                yield records, blobs
        finally:
            await blobs.close()

    async def judged(self, name: str, *, witness: bool = False, **allowed: Any) -> judge.Report:
        async with self.opened() as (records, blobs):
            path = self.witness if witness else None
            return await judge.judge(records, blobs, self.jobs[name], path, judge.Allowance(**allowed))

    def judged_now(self, name: str, *, witness: bool = False, **allowed: Any) -> judge.Report:
        return asyncio.run(self.judged(name, witness=witness, **allowed))


async def build(directory: Path, engine: Engine) -> JudgedWorld:
    """One job of every kind that a judge may meet."""
    chosen = settings(directory, engine, guardrails=GUARDRAILS)
    world = JudgedWorld(directory, engine.calls_log)
    slow = slow_lines(400)
    lenient = b"".join([line("x1"), b"not json\n", b"\n", line("x2"), line("x1"), b'{"custom_id":"x3"}\n', b"[1]\n"])
    async with service.working(chosen) as working, working.running():
        parts = working.parts
        jobs = {
            "plain": await run_to_end(working, b"".join(line(f"p{n}") for n in range(25))),
            "mixed": await run_to_end(working, b"".join(MIXED)),
            "ordered": await run_to_end(working, b"".join(MIXED[10:22]), ordered=True, shape=SHAPE),
            "lenient": await run_to_end(working, lenient, invalid_lines="error_file"),
            "refused": await run_to_end(working, b"not json\n" + line("ok")),
            "expired": await expire(working),
            "canary": await run_to_end(working, b"".join(line(f"p{n}") for n in range(9)), canary=Canary(3, 0, "stop")),
            "deduplicated": await run_to_end(working, same_lines(), shape=JobShape(dedupe=True)),
            "guarded": await run_to_end(working, b"".join(GUARDED)),
        }
        edited = b"".join([*(line(f"p{n}") for n in range(20)), line("p20", "latency=1"), line("new")])
        jobs["reused"] = await run_to_end(working, edited, shape=JobShape(reuse_from=jobs["plain"].id))
        job = await until(working, await create(working, slow), lambda job: job.answered_count >= 5)
        await parts.store.cancel_job(parts.tenant_id, job.id)
        jobs["cancelled"] = await until(working, job, has_ended)
        jobs["retried"] = await until(working, await retry(working, jobs["cancelled"]), has_ended)
        jobs["running"] = await until(working, await create(working, slow), lambda job: job.answered_count >= 5)
        jobs["early"] = await create(working, slow)
        await parts.store.cancel_job(parts.tenant_id, jobs["early"].id)
        jobs["early"] = await until(working, jobs["early"], lambda job: job.state != "validating" or has_ended(job))
    world.jobs = {name: job.id for name, job in jobs.items()}
    return world
