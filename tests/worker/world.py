"""The world of tests of workers and of their stages.

Real: the store (SQLite in memory), blobs on the disk, ingest, and whole workers where a test runs them.
Not real: the clock, which stands still until a test moves it (`live` has the machine's), chance, which comes from a seed, the processes
that ingest would start, and the upstream, which a test scripts.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Self

from msgspec.structs import replace

from tests.support.ports import FairDice, HandClock
from tests.support.processes import wait_until_async
from tidegate.backends.blobs_local import LocalBlobs
from tidegate.backends.system import LocalWake
from tidegate.core import ids
from tidegate.core.body_rules.caller_fields import FieldRules
from tidegate.core.budgets.budget import Budget
from tidegate.core.errors import Unavailable
from tidegate.core.files import NewFile
from tidegate.core.hooks import PolicyRule
from tidegate.core.input.lines import LineRules
from tidegate.core.input.turns import IngestLane
from tidegate.core.nouns import Answer, Call, Caller, IngestPlan, Job, JobRequest, KeepTimes, LeasedSlice, Usage
from tidegate.core.policies import FixedTerms, Policies, TenantTerms
from tidegate.core.ports import Wakes
from tidegate.core.retry import RetryPolicy
from tidegate.core.schedule import Policy, Reason
from tidegate.core.schedule.policy import ModeOverride
from tidegate.core.states import JOB_ENDED, JobState
from tidegate.core.usage.prices import Price
from tidegate.settings.policy import switched
from tidegate.stages.ingest.ingest import IngestStage, RunPass
from tidegate.stages.ingest.ingest_file import ingest_file
from tidegate.stages.record import FlushLimits
from tidegate.store.database.sqlite import SqliteDriver
from tidegate.store.store import Store
from tidegate.store.tenants.keys import KeyRights
from tidegate.worker.options import WorkerOptions
from tidegate.worker.registration import Registration
from tidegate.worker.worker import Worker, WorkerPorts

LEASE_MS = 30_000
HOUR_MS = 3_600_000
BODY = b'{"choices":[{}]}'
# Only a worker that hangs meets it, also on a machine that is busy with other things.
DEADLINE_S = 90.0
QUICK = RetryPolicy(backoff_ms=1, backoff_ms_max=1, deferral_ms=1)


def chat_lines(count: int, model: str = "m", first: int = 0) -> list[bytes]:
    return [
        json.dumps(
            {
                "custom_id": f"c{number}",
                "body": {"model": model, "messages": [{"role": "user", "content": f"{number}"}]},
            }
        ).encode()
        for number in range(first, first + count)
    ]


async def here(input_path: Path, work_path: Path, rules: LineRules, lane: IngestLane = IngestLane.SMALL) -> IngestPlan:
    return ingest_file(input_path, work_path, rules)


class SmallSlices(Policies):
    def __init__(self, slice_items: int) -> None:
        self._slice_items = slice_items

    def line_rules(self, job: Job) -> LineRules:
        return replace(super().line_rules(job), slice_count_max=self._slice_items)


class WorkerWorld:
    """One store, its blobs and a clock; short ways to put jobs into them, to wait for jobs and to read what came of them."""

    def __init__(self, directory: Path, clock: Any = None) -> None:
        self.clock: Any = clock or HandClock(0.0)
        self.entropy = FairDice(7)
        self.scratch = directory / "scratch"
        self.scratch.mkdir(parents=True)
        self.store = Store(SqliteDriver(None, self.clock.now_ms))
        self.blobs = LocalBlobs(directory / "blobs")

    async def __aenter__(self) -> Self:
        await self.store.migrate()
        return self

    async def __aexit__(self, *wrong: object) -> None:
        await self.blobs.close()
        await self.store.close()

    def id(self, kind: str) -> str:
        return ids.make(kind, self.entropy.token_bytes(16))

    async def worker(self, lease_ms: int = LEASE_MS) -> str:
        worker_id = self.id("worker")
        await self.store.enlist_worker(worker_id, "here", "test", lease_ms)
        return worker_id

    async def caller(self, name: str = "acme") -> Caller:
        return Caller(await self.store.put_tenant(self.id("tenant"), name))

    async def key(self, *, team: str | None = None, user: str | None = None, **rights: Any) -> Caller:
        """Who asks with the key `k1` of a tenant."""
        tenant_id = (await self.caller()).tenant_id
        owner = Caller(tenant_id, "k1", team, user)
        await self.store.put_key(owner, b"hash", "", KeyRights(**{"models": "[]"} | rights))
        return Caller(tenant_id, "k1")

    async def job(
        self, lines: list[bytes], *, window_ms: int = HOUR_MS, caller: Caller | None = None, **ask: Any
    ) -> Job:
        """A job that waits for its ingest."""
        caller = caller or await self.caller()
        owner = await self.worker(10 * HOUR_MS)
        blob_id = self.id("blob")
        await self.store.begin_blob(blob_id, "upload", owner)
        writer = await self.blobs.create(blob_id)
        await writer.write(b"".join(line + b"\n" for line in lines))
        file = await self.store.create_file(
            caller, NewFile(self.id("file"), blob_id, await writer.finish(), "batch", "in.jsonl", len(lines), None)
        )
        request = JobRequest("/v1/chat/completions", file.id, window_ms, "1h", **ask)
        return await self.store.create_job(caller, self.id("batch"), request)

    def ingest(self, run_pass: RunPass = here, policies: Policies | None = None) -> IngestStage:
        return IngestStage(self.store, self.blobs, self.entropy, self.scratch, policies or Policies(), run_pass)

    async def started(self, lines: list[bytes], *, slice_items: int = 64, **ask: Any) -> Job:
        """A job that was ingested."""
        job = await self.job(lines, **ask)
        worker = await self.worker()
        policies = SmallSlices(slice_items)
        while (await self.look(job)).state == "validating":
            assert await self.ingest(policies=policies).next(worker)
        return await self.look(job)

    async def look(self, job: Job) -> Job:
        found = await self.store.any_job(job.id)
        assert found is not None
        return found

    async def reaches(self, job: Job, *states: JobState) -> Job:
        """Wait until a job is in one of these states."""

        async def is_there() -> bool:
            return (await self.look(job)).state in states

        await until(is_there, f"{job.id} to be {' or '.join(states)}")
        return await self.look(job)

    async def ended(self, job: Job) -> Job:
        return await self.reaches(job, *JOB_ENDED)

    async def completed(self, job: Job) -> Job:
        return await self.reaches(job, JobState.COMPLETED)

    async def rows(self, sql: str, *values: object) -> list[Any]:
        """Ask the database directly, past the Store."""

        async def body(tx: Any) -> list[Any]:
            return list(tx._connection.execute(sql, values))

        return await self.store._driver.read(body)

    async def file_bytes(self, file_id: str | None) -> bytes:
        if file_id is None:
            return b""
        data = b""
        for extent in await self.store.list_extents(file_id, 0, 10_000):
            data += await self.blobs.read(extent.blob_id, extent.blob_at, extent.size_bytes)
        return data

    async def file_lines(self, file_id: str | None) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (await self.file_bytes(file_id)).splitlines()]


class Script:
    """An upstream of known models. One whose circuit is open has no slot and is probed every five seconds, as by a router."""

    def __init__(self, world: WorkerWorld, *models: str) -> None:
        self._world = world
        self.models = set(models)
        self.open_circuits: set[str] = set()
        # Those that the tide leaves no slot.
        self.full: set[str] = set()
        self.calls: list[Call] = []
        self.interactive_calls: list[tuple[Call, str]] = []
        self.in_flight = 0
        self.spent_until = 0.0
        self.prices: Mapping[str, Price] = {}
        self.answers: Callable[[Call], Awaitable[Answer]] = self._answer

    async def _answer(self, call: Call) -> Answer:
        return Answer(200, BODY, Usage(1, 0, 1, 0), "here")

    async def send(self, call: Call) -> Answer:
        if call.model in self.open_circuits:
            raise Unavailable("circuit open", retry_after_ms=5_000)
        self.calls.append(call)
        self.in_flight += 1
        try:
            return await self.answers(call)
        finally:
            self.in_flight -= 1

    async def send_interactive(self, call: Call, owner: str) -> Answer:
        self.interactive_calls.append((call, owner))
        return await self.answers(call)

    def takes_interactive(self, model: str) -> bool:
        return model in self.models

    def free_slots(self, model: str) -> int:
        return 0 if model in self.open_circuits or model in self.full else 64

    def items_per_call(self, model: str | None = None) -> int:
        return 1

    def rests_until_ms(self, model: str) -> float:
        return self._world.clock.monotonic_ms() + 4_000 if model in self.open_circuits else 0.0

    def on_room(self, tell: Callable[[], None]) -> None:
        """It always has room, or never."""

    def recorded(self, items: Iterable[tuple[str, int]]) -> None:
        """It keeps no answers."""

    def closed(self, model: str) -> str:
        return Reason.UNHEALTHY if model in self.open_circuits else ""

    def spent_until_ms(self, budgets: tuple[Budget, ...]) -> float:
        return self.spent_until if budgets else 0.0

    def knows(self, model: str) -> bool:
        return model in self.models

    def price_of(self, name: str) -> Price | None:
        return self.prices.get(name)


def options(world: WorkerWorld, **changes: Any) -> WorkerOptions:
    usual = WorkerOptions(
        in_flight_max=4,
        slice_count_max=8,
        slice_items=4,
        heartbeat_ms=100,
        poll_ms=20,
        sweep_ms=100,
        grace_ms=2_000,
        cancel_grace_ms=2_000,
        flush=FlushLimits(5, 256, 1 << 20, 64 << 20),
        scratch=world.scratch,
        keep=KeepTimes(orphan_ms=86_400_000),
    )
    return replace(usual, **changes)


BOUND = FixedTerms(bind_calls=True)


@dataclass(frozen=True)
class Decisions(Policies):
    """What a test decides in the operator's place; everything else binds nothing."""

    model_of: Mapping[str, str] = field(default_factory=dict)
    reached_by: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    fields_of: Mapping[str, FieldRules] = field(default_factory=dict)
    rules: tuple[PolicyRule, ...] = ()
    retries: RetryPolicy = QUICK
    scheduling: Policy = field(default_factory=Policy)
    tenants: TenantTerms = BOUND
    job_budgets: Mapping[str, tuple[Budget, ...]] = field(default_factory=dict)

    def schedule_policy(self, override: ModeOverride) -> Policy:
        return switched(self.scheduling, override)

    def budgets(self, leased: LeasedSlice) -> tuple[Budget, ...]:
        return self.job_budgets.get(leased.job_id, ())

    def retry(self, model: str) -> RetryPolicy:
        return self.retries


DECIDED = {one.name for one in fields(Decisions)}


class WorkerRun:
    """A worker that runs, and the switch that makes it leave."""

    def __init__(self, worker: Worker, me: Registration) -> None:
        self.worker = worker
        self.me = me
        self.stop = asyncio.Event()
        self.task: asyncio.Task[None] | None = None

    async def over(self) -> None:
        """Wait until the worker has ended by itself."""
        assert self.task is not None
        await asyncio.wait([self.task], timeout=DEADLINE_S)

    async def leave(self) -> None:
        self.stop.set()
        assert self.task is not None
        async with asyncio.timeout(DEADLINE_S):
            await self.task


@asynccontextmanager
async def working(world: WorkerWorld, script: Script, blobs: Any = None, **changes: Any) -> AsyncIterator[WorkerRun]:
    """A worker that runs. `changes` are of its options, or what `Decisions` has."""
    me = Registration(world.store, world.clock, world.entropy, host="here", version="0", lease_ms=30_000)
    await me.enlist()

    policies = Decisions(**{name: changes.pop(name) for name in DECIDED & changes.keys()})
    ports = WorkerPorts(
        world.store,
        blobs or world.blobs,
        script,
        world.clock,
        world.entropy,
        Wakes(LocalWake(), LocalWake(), LocalWake()),
    )
    worker = Worker(ports, me, options(world, **changes), policies, here)
    run = WorkerRun(worker, me)
    run.task = asyncio.create_task(worker.run(run.stop))
    try:
        yield run
    finally:
        await run.leave()


async def until(condition: Callable[[], Awaitable[bool]] | Callable[[], bool], what: str) -> None:
    """Wait until it holds, for as long as only a worker that hangs needs."""
    await wait_until_async(condition, DEADLINE_S, what)
