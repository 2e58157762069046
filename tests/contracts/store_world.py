"""A store of any driver with a clock that stands still until a test moves it, and short ways to put things into it.

Blobs are byte strings in a dictionary, so that a test can read a file back through its extents.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import asyncpg
import pytest

from tests.support.ports import EPOCH_MS
from tests.support.store_verbs import lease_slices, start_job
from tidegate.core import ids
from tidegate.core.errors import ApiProblem
from tidegate.core.files import Extent, File, NewFile, Placed, Stamp
from tidegate.core.nouns import (
    Attempts,
    Caller,
    Finished,
    Idempotency,
    IngestPlan,
    Job,
    JobFlush,
    JobRequest,
    JobStart,
    LeasedSlice,
    Quotas,
    Recorded,
    SlicePlan,
    Usage,
)
from tidegate.core.states import JobState, Outcome
from tidegate.store.store import Store

DRIVERS = ("sqlite", "postgresql")
START_MS = EPOCH_MS
LEASE_MS = 30_000
DAY_MS = 24 * 3600 * 1000
MODEL = "llama"
CHAT = "/v1/chat/completions"

FAKE_CLOCK = """
create table test_clock (now bigint not null);
insert into test_clock values (0);
create or replace function now_ms() returns bigint language sql volatile as 'select now from test_clock';
"""
WIPE = """
do $$ declare name text; begin
    -- Without the triggers that keep the audit.
    set local session_replication_role = replica;
    for name in select tablename from pg_tables where schemaname = 'public' and tablename not in ('meta', 'test_clock') loop
        execute 'delete from ' || name;
    end loop;
    -- All but the stamps of the schema.
    delete from meta m where m.name not in ('schema_version', 'compatible_from') and m.name not like 'checksum_%';
end $$
"""


class StoreHandClock:
    """The time that a SQLite store reads."""

    def __init__(self) -> None:
        self.now = START_MS

    def __call__(self) -> int:
        return self.now

    async def advance(self, ms: int) -> None:
        self.now += ms


class DatabaseClock(StoreHandClock):
    """The time that PostgreSQL's now_ms() reads in a test's database."""

    def __init__(self, connection: asyncpg.Connection[Any]) -> None:
        super().__init__()
        self._connection = connection

    async def advance(self, ms: int) -> None:
        """Also by nothing: then the database learns what time it is."""
        await super().advance(ms)
        await self._connection.execute("update test_clock set now = $1", self.now)


@dataclass
class Log:
    """One worker's log of one kind, as the store sees it: a blob that grows."""

    world: StoreWorld
    blob_id: str

    def append(self, lines: Sequence[bytes]) -> Placed:
        data = self.world.blobs.setdefault(self.blob_id, bytearray())
        placed = Placed(self.blob_id, len(data), sum(map(len, lines)))
        data.extend(b"".join(lines))
        return placed


def line(job_id: str, number: int, word: str = "answer") -> bytes:
    """A line whose length depends on its item, so that a place that is off by one line cannot go unnoticed."""
    return f"{job_id} {number} {word}{'.' * (number * 7 % 23)}\n".encode()


@dataclass
class StoreWorld:
    store: Store
    clock: StoreHandClock
    open_another: Callable[[], Awaitable[Store]]
    blobs: dict[str, bytearray] = field(default_factory=dict)
    _numbers: Any = field(default_factory=lambda: itertools.count(1))

    def id(self, kind: str) -> str:
        """Ids in no order, as real ones are, and the same ones every time."""
        seed = hashlib.sha256(f"{kind} {next(self._numbers)}".encode()).digest()
        return ids.make(kind, seed[: ids.RANDOM_BYTES])

    def token(self) -> str:
        return f"token-{next(self._numbers)}"

    async def caller(self, name: str = "acme", user: str | None = None) -> Caller:
        return Caller(await self.store.put_tenant(self.id("tenant"), name), user=user)

    async def worker(self, lease_ms: int = LEASE_MS) -> str:
        worker_id = self.id("worker")
        await self.store.enlist_worker(worker_id, "host", "1", lease_ms)
        return worker_id

    async def log(self, kind: str = "answers", worker_id: str | None = None) -> Log:
        blob_id = self.id("blob")
        await self.store.begin_blob(blob_id, kind, worker_id or await self.worker())
        return Log(self, blob_id)

    async def file(
        self,
        caller: Caller,
        *,
        size_bytes: int = 300,
        line_count: int = 3,
        purpose: str = "batch",
        expires_after_ms: int | None = None,
        idempotency: Idempotency | None = None,
        quotas: Quotas | None = None,
        store: Store | None = None,
    ) -> File:
        """Upload, with a fresh blob and a fresh id."""
        blob = await self.log("upload")
        return await (store or self.store).create_file(
            caller,
            NewFile(
                self.id("file"),
                blob.blob_id,
                Stamp(size_bytes, "ab" * 32),
                purpose,
                "in.jsonl",
                line_count,
                expires_after_ms,
            ),
            idempotency=idempotency,
            quotas=quotas,
        )

    async def job(
        self,
        caller: Caller,
        file: File | None = None,
        *,
        idempotency: Idempotency | None = None,
        quotas: Quotas | None = None,
        job_id: str | None = None,
        **fields: Any,
    ) -> Job:
        """A job that waits for ingest."""
        file = file or await self.file(caller)
        window_ms, share_owner = fields.pop("window_ms", DAY_MS), fields.pop("share_owner", None)
        request = JobRequest("/v1/chat/completions", file.id, window_ms, "24h", **fields)
        return await self.store.create_job(
            caller, job_id or self.id("batch"), request, idempotency=idempotency, quotas=quotas, share_owner=share_owner
        )

    async def ingested(
        self, job: Job, plan: IngestPlan, worker_id: str | None = None, weight_milli: int | None = None
    ) -> Job:
        """Take the step and start the job as ingest does; its flow, if it wakes, is given this weight."""
        worker_id, token, work = worker_id or await self.worker(), self.token(), self.id("blob")
        assert await self.store.take_step(job.id, JobState.VALIDATING, worker_id, token)
        await self.store.begin_blob(work, "work", worker_id)
        await start_job(
            self.store,
            JobStart(job.id, token, plan, work, self.id("file"), self.id("file"), weight_milli),
        )
        return await self.look(job)

    async def running(self, caller: Caller, *counts: int, **fields: Any) -> Job:
        """A job in progress with one slice per count."""
        return await self.ingested(await self.job(caller, **fields), plan_of(*(counts or (4,))))

    async def look(self, job: Job) -> Job:
        found = await self.store.any_job(job.id)
        assert found is not None
        return found

    async def lease(
        self, worker_id: str, job: Job, count_max: int = 100, token: str | None = None
    ) -> list[LeasedSlice]:
        return await lease_slices(self.store, worker_id, job.id, MODEL, count_max, token or self.token())

    async def answer(self, log: Log, job: Job, *numbers: int, word: str = "answer", token: str = "") -> Recorded:
        """Record answers for these items."""
        return await self.record(self.answers(log, job, *numbers, word=word, token=token))

    def answers(self, log: Log, job: Job, *numbers: int, word: str = "answer", token: str = "") -> JobFlush:
        lines = [line(job.id, number, word) for number in numbers]
        return JobFlush(
            job.id, answers=finished(lines, numbers, Outcome.ANSWERED, token), answers_placed=log.append(lines)
        )

    def errors(self, log: Log, job: Job, *numbers: int, token: str, word: str = "error") -> JobFlush:
        lines = [line(job.id, number, word) for number in numbers]
        return JobFlush(job.id, errors=finished(lines, numbers, Outcome.FAILED, token), errors_placed=log.append(lines))

    async def record(self, *flushes: JobFlush) -> Recorded:
        return (await self.store.record_outcomes(list(flushes), [], []))[0]

    async def extents(self, file_id: str | None) -> list[Extent]:
        return await self.store.list_extents(file_id or "", 0, 10_000)

    async def content(self, file_id: str | None) -> bytes:
        """A file as a reader sees it; its extents must follow one another without a gap."""
        parts, at = [], 0
        for extent in await self.extents(file_id):
            assert extent.at == at, "a gap or an overlap between extents"
            piece = bytes(self.blobs[extent.blob_id][extent.blob_at : extent.blob_at + extent.size_bytes])
            assert len(piece) == extent.size_bytes
            parts.append(piece)
            at += extent.size_bytes
        return b"".join(parts)

    async def outcomes(self, job: Job) -> dict[int, tuple[str, int, int]]:
        rows = await self.store.outcomes_page(job.id, 0, 100_000)
        assert [row[0] for row in rows] == sorted({row[0] for row in rows})
        return {number: (outcome, at, size_bytes) for number, outcome, at, size_bytes in rows}

    async def judge(self, job: Job) -> Job:
        """Counters, files and outcomes must agree, line by line. Return the job as it is now."""
        job = await self.look(job)
        output, errors = await self.content(job.output_file_id), await self.content(job.error_file_id)
        counts = dict.fromkeys(Outcome, 0)
        covered = {True: 0, False: 0}
        for number, (outcome, at, size_bytes) in (await self.outcomes(job)).items():
            counts[Outcome(outcome)] += 1
            is_answer = outcome == Outcome.ANSWERED
            text = (output if is_answer else errors)[at : at + size_bytes]
            assert text.startswith(f"{job.id} {number} ".encode()), (number, outcome, at, text)
            assert text.endswith(b"\n")
            assert text.count(b"\n") == 1
            covered[is_answer] += size_bytes
        assert covered == {True: len(output), False: len(errors)}
        assert (job.output_bytes, job.error_bytes) == (len(output), len(errors))
        counted = (job.answered_count, job.failed_count, job.expired_count, job.cancelled_count)
        assert counted == tuple(
            counts[o] for o in (Outcome.ANSWERED, Outcome.FAILED, Outcome.EXPIRED, Outcome.CANCELLED)
        )
        return job


async def refused(call: Awaitable[Any]) -> ApiProblem:
    """Why the store does not do what it is asked for."""
    with pytest.raises(ApiProblem) as problem:
        await call
    return problem.value


def finished(lines: Sequence[bytes], numbers: Sequence[int], outcome: Outcome, token: str) -> list[Finished]:
    usage = Usage(10, 1, 5, 2) if outcome is Outcome.ANSWERED else Usage()
    return [Finished(number, outcome, len(text), 0, token, usage) for number, text in zip(numbers, lines, strict=True)]


def plan_of(*counts: int, model: str = MODEL, endpoint: str = CHAT) -> IngestPlan:
    """What ingest would have found: slices of so many items, each item 100 bytes long."""
    slices, first = [], 0
    for count in counts:
        slices.append(SlicePlan(first, count, model, endpoint, first * 100, count * 100, count * 50))
        first += count
    return IngestPlan(first, model, slices, first * 100, first * 80, first * 20)


def tries(number: int, count: int = 1, wait_ms: int = 1_000, reason: str = "upstream_ambiguous") -> Attempts:
    return Attempts(number, count, wait_ms, reason)
