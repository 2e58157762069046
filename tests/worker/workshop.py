"""A whole worker over a small world, against an upstream that a test scripts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, fields
from typing import Any

from msgspec.structs import replace

from tests.worker.world import World, here
from tidegate.backends.system import LocalWake
from tidegate.core.body_rules.caller_fields import FieldRules
from tidegate.core.budgets.budget import Budget
from tidegate.core.errors import Unavailable
from tidegate.core.hooks import PolicyRule
from tidegate.core.nouns import Answer, Call, KeepTimes, LeasedSlice, Usage
from tidegate.core.policies import Policies
from tidegate.core.ports import Wakes
from tidegate.core.retry import RetryPolicy
from tidegate.core.schedule import Policy, Reason
from tidegate.core.schedule.policy import ModeOverride
from tidegate.core.usage.prices import Price
from tidegate.stages.record import FlushLimits
from tidegate.worker.options import WorkerOptions
from tidegate.worker.registration import Registration
from tidegate.worker.worker import Worker, WorkerPorts

BODY = b'{"choices":[{}]}'
# Only a worker that hangs meets it, also on a machine that is busy with other things.
DEADLINE_S = 90.0
QUICK = RetryPolicy(backoff_ms=1, backoff_ms_max=1, deferral_ms=1)


class Script:
    """An upstream of known models. A shut one has no slot and is probed every five seconds, as a router's open breaker is."""

    def __init__(self, world: World, *models: str) -> None:
        self._world = world
        self.models = set(models)
        self.shut: set[str] = set()
        # Those that the tide leaves no slot.
        self.full: set[str] = set()
        self.calls: list[Call] = []
        self.interactive_calls: list[tuple[Call, str]] = []
        self.in_flight = 0
        self.spent_until = 0.0
        self.answers: Callable[[Call], Awaitable[Answer]] = self._answer

    async def _answer(self, call: Call) -> Answer:
        return Answer(200, BODY, Usage(1, 0, 1, 0), "here")

    async def send(self, call: Call) -> Answer:
        if call.model in self.shut:
            raise Unavailable("shut", retry_after_ms=5_000)
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
        return 0 if model in self.shut or model in self.full else 64

    def items_per_call(self, model: str | None = None) -> int:
        return 1

    def rests_until_ms(self, model: str) -> float:
        return self._world.clock.monotonic_ms() + 4_000 if model in self.shut else 0.0

    def on_room(self, tell: Callable[[], None]) -> None:
        """It always has room, or never."""

    def recorded(self, items: Iterable[tuple[str, int]]) -> None:
        """It keeps no answers."""

    def closed(self, model: str) -> str:
        return Reason.UNHEALTHY if model in self.shut else ""

    def spent_until_ms(self, budgets: tuple[Budget, ...]) -> float:
        return self.spent_until if budgets else 0.0

    def knows(self, model: str) -> bool:
        return model in self.models


def options(world: World, **changes: Any) -> WorkerOptions:
    usual = WorkerOptions(
        in_flight_max=4,
        slice_count_max=8,
        slice_items=4,
        heartbeat_ms=100,
        poll_ms=20,
        sweep_ms=100,
        grace_ms=2_000,
        flush=FlushLimits(5, 256, 1 << 20, 64 << 20),
        scratch=world.scratch,
        keep=KeepTimes(orphan_ms=86_400_000),
    )
    return replace(usual, **changes)


@dataclass(frozen=True)
class Decisions(Policies):
    """What a test decides in the operator's place; everything else binds nothing."""

    model_of: Mapping[str, str] = field(default_factory=dict)
    reached_by: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    fields_of: Mapping[str, FieldRules] = field(default_factory=dict)
    rules: tuple[PolicyRule, ...] = ()
    retries: RetryPolicy = QUICK
    prices: Mapping[str, Price] = field(default_factory=dict)
    scheduling: Policy = field(default_factory=Policy)
    job_budgets: Mapping[str, tuple[Budget, ...]] = field(default_factory=dict)

    def schedule_policy(self, override: ModeOverride) -> Policy:
        return self.scheduling

    def budgets(self, leased: LeasedSlice) -> tuple[Budget, ...]:
        return self.job_budgets.get(leased.job_id, ())

    def price(self, deployment: str) -> Price | None:
        return self.prices.get(deployment)

    def retry(self, model: str) -> RetryPolicy:
        return self.retries


DECIDED = {one.name for one in fields(Decisions)}


class Bench:
    """A worker at work, and the switch that tells it to leave."""

    def __init__(self, worker: Worker, me: Registration) -> None:
        self.worker = worker
        self.me = me
        self.stop = asyncio.Event()
        self.running: asyncio.Task[None] | None = None

    async def over(self) -> None:
        """Wait until the worker has ended by itself."""
        assert self.running is not None
        await asyncio.wait([self.running], timeout=DEADLINE_S)

    async def leave(self) -> None:
        self.stop.set()
        assert self.running is not None
        async with asyncio.timeout(DEADLINE_S):
            await self.running


@asynccontextmanager
async def working(world: World, script: Script, blobs: Any = None, **changes: Any) -> AsyncIterator[Bench]:
    """A worker at work. `changes` are of its options, or what `Decisions` has."""
    me = Registration(world.store, world.clock, world.entropy, host="here", version="0", lease_ms=30_000)
    await me.begin()

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
    bench = Bench(worker, me)
    bench.running = asyncio.create_task(worker.run(bench.stop))
    try:
        yield bench
    finally:
        await bench.leave()


async def until(condition: Callable[[], Awaitable[bool]], what: str) -> None:
    """Poll until it holds."""
    try:
        async with asyncio.timeout(DEADLINE_S):
            while not await condition():  # noqa: ASYNC110 - what is waited for is in a database
                await asyncio.sleep(0.005)
    except TimeoutError:
        raise AssertionError(f"{what}: not within {DEADLINE_S:g} s") from None
