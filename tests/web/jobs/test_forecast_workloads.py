"""Forecasts beside what happens, on five workloads in simulated time: when a batch ends, and that nothing feasible is refused.

The store, ingest's estimate, the ledgers of limits and the forecast are the product's. Only the service is simulated: some slots, calls
that take as long as their tokens, and tenants that are served by turns.
"""

from __future__ import annotations

import heapq
import json
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.worker.world import START_MS, World
from tidegate.core.budgets.budget import Budget, BudgetRequest, Limit, LimitBound, Period, budgets_of
from tidegate.core.nouns import Caller, Job, JobRequest
from tidegate.core.schedule.share_owner import tenant_owner
from tidegate.settings import Tenants, load
from tidegate.store.keys import KeyRights
from tidegate.web.jobs.forecast import Forecaster

pytestmark = pytest.mark.anyio

SLOTS = 8
HOUR_MS = 3_600_000
FOUR = Limit(Period.MINUTE, requests=4)


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    made = World(tmp_path)
    await made.store.migrate()
    yield made
    await made.blobs.close()
    await made.store.close()


def lines(chance: random.Random, count: int, low: int, high: int) -> list[bytes]:
    """Prompts of so many bytes."""
    texts = ["".join(chance.choices("abcdefgh ", k=chance.randint(low, high))) for _ in range(count)]
    return [
        json.dumps(
            {
                "custom_id": f"c{number}",
                "method": "POST",
                "url": "/v1/chat/completions",
                "body": {"model": "m", "messages": [{"role": "user", "content": text}], "max_tokens": 60},
            }
        ).encode()
        for number, text in enumerate(texts)
    ]


@dataclass
class Running:
    """A job and what the simulated service knows of it."""

    job: Job
    items: list[int]
    budgets: tuple[Budget, ...] = ()
    done: int = 0
    served: float = 0.0
    ended_ms: int = 0
    looks: list[tuple[int, Any]] = field(default_factory=list)


class Service:
    """Runs jobs on some slots, and asks for a forecast of each at the quarter and at the half of its items."""

    def __init__(self, world: World, forecaster: Forecaster, seed: int, fixed_ms: int = 0) -> None:
        self.fixed_ms = fixed_ms
        self.world = world
        self.forecaster = forecaster
        self.chance = random.Random(seed)

    async def write(self, sql: str, *values: object) -> None:
        async def body(tx: Any) -> None:
            tx._connection.execute(sql, values)

        await self.world.store._driver.write(body)

    def took_ms(self, prompt_bytes: int) -> int:
        if self.fixed_ms:
            return self.fixed_ms
        return 100 + 8 * self.chance.randint(30, 60) + prompt_bytes // 10

    async def run(self, *jobs: Running) -> None:
        clock, flying = self.world.clock, list[tuple[int, int, int]]()
        for one in jobs:
            await self.write("update jobs set begun_at = ? where id = ?", START_MS + clock.passed_ms, one.job.id)
        waits: dict[int, int] = {}
        while any(one.done < one.job.item_count for one in jobs):
            while len(flying) < SLOTS:
                ready = [
                    number for number, one in enumerate(jobs) if one.items and waits.get(number, 0) <= clock.passed_ms
                ]
                if not ready:
                    break
                number = min(ready, key=lambda number: jobs[number].served)
                one = jobs[number]
                if one.budgets:
                    grant = (await self.world.store.debit_budgets([BudgetRequest(one.budgets, 1, 0)]))[0]
                    if not grant.requests:
                        waits[number] = clock.passed_ms + max(1, grant.wait_ms)
                        continue
                took = self.took_ms(one.items.pop())
                one.served += 1
                heapq.heappush(flying, (clock.passed_ms + took, took, number))
            if not flying:
                clock.passed_ms = min(at for at in waits.values() if at > clock.passed_ms)
                continue
            clock.passed_ms, took, number = heapq.heappop(flying)
            await self.finish(jobs[number], took)

    async def finish(self, one: Running, took: int) -> None:
        one.done += 1
        store, job = self.world.store, one.job
        (units,) = (await self.world.rows("select work_units / item_count from job_models where job_id = ?", job.id))[0]

        async def body(tx: Any) -> None:
            await tx.many("rate_add", [("m", "worker_x", units, units, 1, took, took)])
            await tx.many("job_models_done", [(1, job.id, "m")])
            tx._connection.execute("update jobs set answered_count = answered_count + 1 where id = ?", (job.id,))
            if one.done == job.item_count:
                tx._connection.execute("update job_models set state = 'closed' where job_id = ?", (job.id,))
                sleep = "update flows set state = 'asleep', changed_at = now_ms() where share_owner = ?"
                tx._connection.execute(sleep, (job.share_owner,))

        await store._driver.write(body)
        if one.done == job.item_count:
            one.ended_ms = self.world.clock.passed_ms
        elif one.done in (job.item_count // 4, job.item_count // 2):
            one.looks.append((self.world.clock.passed_ms, await self.forecaster.of_job(await self.world.look(job))))


def forecaster(world: World, tmp_path: Path) -> Forecaster:
    overrides = {"scheduler.admission": "refuse", "worker.in_flight_max": SLOTS}
    settings = load(None, tmp_path, overrides, environ={}).settings
    router = SimpleNamespace(budgets=lambda model: [])
    context: Any = SimpleNamespace(
        store=world.store, blobs=world.blobs, settings=settings, router=router, tenants=lambda: Tenants(settings)
    )
    return Forecaster(context)


async def caller_of(world: World, name: str, *limits: Limit, user: str | None = None) -> Caller:
    tenant_id = await world.store.put_tenant(world.id("tenant"), name)
    key_id = f"key-{name}"
    caller = Caller(tenant_id, key_id, user=user, limits=limits)
    await world.store.put_key(caller, b"", "", KeyRights(limits=limits))
    return caller


async def begun(world: World, caller: Caller, inputs: list[bytes], *limits: Limit) -> Running:
    job = await world.started(inputs, caller=caller, window_ms=10 * HOUR_MS)
    prompts = [len(json.loads(line)["body"]["messages"][0]["content"]) for line in inputs]
    return Running(job, prompts, budgets_of(LimitBound.KEY, caller.key_id or "", limits))


def near(one: Running) -> None:
    """Every forecast was within a quarter of what was left."""
    assert len(one.looks) == 2
    for asked_ms, said in one.looks:
        assert said.eta is not None
        left_ms = one.ended_ms - asked_ms
        told_ms = 1_000 * said.eta.p50 - START_MS - asked_ms
        assert abs(told_ms - left_ms) <= 0.25 * left_ms + 1_000, (asked_ms, left_ms, told_ms)
        assert said.eta.p95 >= said.eta.p50


WORKLOADS = {"short": (300, 20, 20), "long": (200, 1_500, 1_500), "mixed": (240, 10, 4_000)}


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("kind", WORKLOADS)
async def test_a_workload_of_one_tenant(world: World, tmp_path: Path, kind: str, seed: int) -> None:
    service = Service(world, forecaster(world, tmp_path), seed)
    caller = await caller_of(world, "a")
    inputs = lines(service.chance, *WORKLOADS[kind])
    first = await begun(world, caller, inputs)
    begun_ms = world.clock.passed_ms
    await service.run(first)
    near(first)
    # The same again, in half as much time again as it took: also when another minute began, and after a pause.
    took_ms = first.ended_ms - begun_ms
    for pause_ms in (0, 20_000, 200_000):
        world.clock.passed_ms += pause_ms
        wanted = JobRequest("/v1/chat/completions", first.job.input_file_id, int(1.5 * took_ms), "x")
        assert await service.forecaster.admit(caller, wanted, tenant_owner(caller.tenant_id), None) == ()


async def test_twenty_seconds_of_work_are_not_refused_in_a_minute(world: World, tmp_path: Path) -> None:
    """What was measured is one short batch, some calls at a time: it says how long a call takes, not what all slots could do."""
    service = Service(world, forecaster(world, tmp_path), 3)
    caller = await caller_of(world, "a")
    few = await begun(world, caller, lines(service.chance, 3, 20, 20))
    await service.run(few)
    many = await world.job(lines(service.chance, 330, 20, 20), caller=caller)
    wanted = JobRequest("/v1/chat/completions", many.input_file_id, 60_000, "1m")
    assert await service.forecaster.admit(caller, wanted, tenant_owner(caller.tenant_id), None) == ()


@pytest.mark.parametrize("fixed_ms", [0, 1_000])
async def test_one_workload_after_the_other(world: World, tmp_path: Path, fixed_ms: int) -> None:
    """What was measured with other requests says little about these, least of all where a call takes the same time whatever it reads."""
    service = Service(world, forecaster(world, tmp_path), 7, fixed_ms)
    caller = await caller_of(world, "a")
    for kind in ("short", "long", "mixed", "short"):
        inputs = lines(service.chance, *WORKLOADS[kind])
        waiting = await world.job(inputs, caller=caller)
        wanted = JobRequest("/v1/chat/completions", waiting.input_file_id, 75_000, "x")
        assert await service.forecaster.admit(caller, wanted, tenant_owner(caller.tenant_id), None) == ()
        await world.store.cancel_job(caller.tenant_id, waiting.id)
        one = await begun(world, caller, inputs)
        begun_ms = world.clock.passed_ms
        await service.run(one)
        assert one.ended_ms - begun_ms < 60_000
        near(one)


async def test_a_key_of_four_a_minute(world: World, tmp_path: Path) -> None:
    service = Service(world, forecaster(world, tmp_path), 4)
    caller = await caller_of(world, "a", FOUR)
    one = await begun(world, caller, lines(service.chance, 30, 20, 200), FOUR)
    begun_ms = world.clock.passed_ms
    await service.run(one)
    assert one.ended_ms - begun_ms > 7 * 60_000
    near(one)


async def test_two_tenants_of_which_one_has_little(world: World, tmp_path: Path) -> None:
    service = Service(world, forecaster(world, tmp_path), 5)
    large = await begun(world, await caller_of(world, "a"), lines(service.chance, 400, 20, 900))
    small = await begun(world, await caller_of(world, "b"), lines(service.chance, 160, 20, 900))
    await service.run(large, small)
    assert small.ended_ms < large.ended_ms
    near(large)
    near(small)


async def test_a_lifetime_that_is_too_short_promises_no_end(world: World, tmp_path: Path) -> None:
    service = Service(world, forecaster(world, tmp_path), 6)
    total = Limit(Period.LIFETIME, requests=20)
    caller = await caller_of(world, "a", total)
    warm = await begun(world, caller, lines(service.chance, 10, 20, 20), total)
    await service.run(warm)
    assert warm.looks[0][1].eta is not None
    again = await begun(world, caller, lines(service.chance, 11, 20, 20), total)
    assert (await service.forecaster.of_job(await world.look(again.job))).eta is None
    fits = await begun(world, caller, lines(service.chance, 10, 20, 20), total)
    assert (await service.forecaster.of_job(await world.look(fits.job))).eta is not None
