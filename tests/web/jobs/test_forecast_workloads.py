"""Forecasts beside what happens, on five workloads in simulated time: when a batch ends, and that nothing feasible is refused.

The store, ingest's estimate, the ledgers of limits and the forecast are the product's. Only the service is simulated: some slots, calls
that take as long as their tokens, and tenants that are served by turns.
"""

from __future__ import annotations

import heapq
import json
import random
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.ports import EPOCH_MS
from tests.worker.world import WorkerWorld
from tidegate.core.budgets.budget import Budget, BudgetRequest, Limit, LimitBound, Period, budgets_of
from tidegate.core.nouns import Caller, Job, JobRequest, Usage
from tidegate.core.schedule.share_owner import tenant_owner
from tidegate.core.usage.estimate import prompt_tokens
from tidegate.core.usage.prices import Price, cost, nano_of
from tidegate.settings import Tenants, load
from tidegate.store.road.outcomes import real_cost
from tidegate.store.tenants.keys import KeyRights
from tidegate.web.jobs.forecast import Forecaster
from tidegate.web.jobs.validation import JobValidation

pytestmark = pytest.mark.anyio

SLOTS = 8
HOUR_MS = 3_600_000
FOUR = Limit(Period.MINUTE, requests=4)
PRICE = Price.of("1", None, "3")


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
    tokens_each: int = 0
    done: int = 0
    served: float = 0.0
    ended_ms: float = 0
    usage: Usage = field(default_factory=Usage)
    looks: list[tuple[float, Any]] = field(default_factory=list)


class Service:
    """Runs jobs on some slots, and asks for a forecast of each at the quarter and at the half of its items, or after `looks_after` items.
    A prompt has `token_share` of the tokens that are estimated. A tenant's turn is `slice_items` requests long."""

    def __init__(
        self, world: WorkerWorld, forecaster: Forecaster, seed: int, fixed_ms: int = 0, looks_after: int = 0
    ) -> None:
        self.fixed_ms = fixed_ms
        self.looks_after = looks_after
        self.token_share = 1.0
        self.slice_items = 1
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
        clock, flying = self.world.clock, list[tuple[float, int, int, int]]()
        for one in jobs:
            await self.write("update jobs set begun_at = ? where id = ?", clock.now_ms(), one.job.id)
        waits: dict[int, float] = {}
        turn, turn_left = 0, 0
        while any(one.done < one.job.item_count for one in jobs):
            while len(flying) < SLOTS:
                ready = [
                    number for number, one in enumerate(jobs) if one.items and waits.get(number, 0) <= clock.monotonic
                ]
                if not ready:
                    break
                if not turn_left or turn not in ready:
                    turn, turn_left = min(ready, key=lambda number: jobs[number].served), self.slice_items
                number, turn_left = turn, turn_left - 1
                one = jobs[number]
                if one.budgets:
                    grant = (await self.world.store.debit_budgets([BudgetRequest(one.budgets, 1, one.tokens_each)]))[0]
                    if not grant.requests:
                        waits[number] = clock.monotonic + max(1, grant.wait_ms)
                        continue
                prompt_bytes = one.items.pop()
                took = self.took_ms(prompt_bytes)
                one.served += prompt_tokens(prompt_bytes) + 90
                heapq.heappush(flying, (clock.monotonic + took, took, number, prompt_bytes))
            if not flying:
                clock.monotonic = min(at for at in waits.values() if at > clock.monotonic)
                continue
            clock.monotonic, took, number, prompt_bytes = heapq.heappop(flying)
            await self.finish(jobs[number], took, prompt_bytes)

    def usage(self, took: int, prompt_bytes: int) -> Usage:
        output = 45 if self.fixed_ms else (took - 100 - prompt_bytes // 10) // 8
        return Usage(round(self.token_share * prompt_tokens(prompt_bytes)), 0, output)

    async def finish(self, one: Running, took: int, prompt_bytes: int) -> None:
        one.done += 1
        usage = self.usage(took, prompt_bytes)
        one.usage = Usage.total((one.usage, usage))
        store, job = self.world.store, one.job
        (units,) = (await self.world.rows("select work_units / item_count from job_models where job_id = ?", job.id))[0]

        async def body(tx: Any) -> None:
            tokens = real_cost(usage)
            sums = (units, tokens, 1, took, took, usage.input_tokens, units * units, units * took, units * tokens)
            await tx.many("rate_add", [("m", "worker_x", *sums)])
            await tx.many("job_models_done", [(1, job.id, "m")])
            tx._connection.execute(
                "update jobs set answered_count = answered_count + 1, input_tokens = input_tokens + ?, "
                "output_tokens = output_tokens + ? where id = ?",
                (usage.input_tokens, usage.output_tokens, job.id),
            )
            if one.done == job.item_count:
                tx._connection.execute("update job_models set state = 'closed' where job_id = ?", (job.id,))
                sleep = "update flows set state = 'asleep', changed_at = now_ms() where share_owner = ?"
                tx._connection.execute(sleep, (job.share_owner,))

        await store._driver.write(body)
        if one.done == job.item_count:
            one.ended_ms = self.world.clock.monotonic
        elif one.done in ((self.looks_after,) if self.looks_after else (job.item_count // 4, job.item_count // 2)):
            one.looks.append((self.world.clock.monotonic, await self.forecaster.of_job(await self.world.look(job))))


def context_of(world: WorkerWorld, tmp_path: Path) -> Any:
    overrides = {"scheduler.admission": "refuse", "worker.in_flight_max": SLOTS}
    settings = load(None, tmp_path, overrides, environ={}).settings
    router = SimpleNamespace(budgets=lambda model: [], prices=lambda model: [PRICE], knows=lambda model: True)
    return SimpleNamespace(
        store=world.store,
        blobs=world.blobs,
        settings=settings,
        router=router,
        tenants=lambda: Tenants(settings),
        model_of=dict,
        scratch=world.scratch,
        servers="",
    )


def forecaster(world: WorkerWorld, tmp_path: Path) -> Forecaster:
    return Forecaster(context_of(world, tmp_path))


async def caller_of(world: WorkerWorld, name: str, *limits: Limit, user: str | None = None) -> Caller:
    tenant_id = await world.store.put_tenant(world.id("tenant"), name)
    key_id = f"key-{name}"
    caller = Caller(tenant_id, key_id, user=user, limits=limits)
    await world.store.put_key(caller, b"", "", KeyRights(limits=limits))
    return caller


async def begun(world: WorkerWorld, caller: Caller, inputs: list[bytes], *limits: Limit) -> Running:
    job = await world.started(inputs, caller=caller, window_ms=10 * HOUR_MS)
    prompts = [len(json.loads(line)["body"]["messages"][0]["content"]) for line in inputs]
    return Running(job, prompts, budgets_of(LimitBound.KEY, caller.key_id or "", limits))


def near(one: Running) -> None:
    """Every forecast was within a quarter of what was left."""
    assert len(one.looks) == 2
    for asked_ms, shown in one.looks:
        assert shown.eta is not None
        left_ms = one.ended_ms - asked_ms
        forecast_ms = 1_000 * shown.eta.p50 - EPOCH_MS - asked_ms
        assert abs(forecast_ms - left_ms) <= 0.25 * left_ms + 1_000, (asked_ms, left_ms, forecast_ms)
        assert shown.eta.p95 >= shown.eta.p50


WORKLOADS = {"short": (300, 20, 20), "long": (200, 1_500, 1_500), "mixed": (240, 10, 4_000)}


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("kind", WORKLOADS)
async def test_a_workload_of_one_tenant(world: WorkerWorld, tmp_path: Path, kind: str, seed: int) -> None:
    service = Service(world, forecaster(world, tmp_path), seed)
    caller = await caller_of(world, "a")
    inputs = lines(service.chance, *WORKLOADS[kind])
    first = await begun(world, caller, inputs)
    begun_ms = world.clock.monotonic
    await service.run(first)
    near(first)
    # The same again, in half as much time again as it took: also when another minute began, and after a pause.
    took_ms = first.ended_ms - begun_ms
    for pause_ms in (0, 20_000, 200_000):
        world.clock.advance(pause_ms)
        wanted = JobRequest("/v1/chat/completions", first.job.input_file_id, int(1.5 * took_ms), "x")
        assert await service.forecaster.admit(caller, wanted, tenant_owner(caller.tenant_id), None) == ()


async def test_twenty_seconds_of_work_are_not_refused_in_a_minute(world: WorkerWorld, tmp_path: Path) -> None:
    """What was measured is one short batch, some calls at a time: it says how long a call takes, not what all slots could do."""
    service = Service(world, forecaster(world, tmp_path), 3)
    caller = await caller_of(world, "a")
    few = await begun(world, caller, lines(service.chance, 3, 20, 20))
    await service.run(few)
    many = await world.job(lines(service.chance, 330, 20, 20), caller=caller)
    wanted = JobRequest("/v1/chat/completions", many.input_file_id, 60_000, "1m")
    assert await service.forecaster.admit(caller, wanted, tenant_owner(caller.tenant_id), None) == ()


@pytest.mark.parametrize("fixed_ms", [0, 1_000])
async def test_one_workload_after_the_other(world: WorkerWorld, tmp_path: Path, fixed_ms: int) -> None:
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
        begun_ms = world.clock.monotonic
        await service.run(one)
        assert one.ended_ms - begun_ms < 60_000
        near(one)


async def test_a_key_of_four_a_minute(world: WorkerWorld, tmp_path: Path) -> None:
    service = Service(world, forecaster(world, tmp_path), 4)
    caller = await caller_of(world, "a", FOUR)
    one = await begun(world, caller, lines(service.chance, 30, 20, 200), FOUR)
    begun_ms = world.clock.monotonic
    await service.run(one)
    assert one.ended_ms - begun_ms > 7 * 60_000
    near(one)


async def test_a_key_of_four_hundred_tokens_a_minute(world: WorkerWorld, tmp_path: Path) -> None:
    service = Service(world, forecaster(world, tmp_path), 8, fixed_ms=1_000)
    limit = Limit(Period.MINUTE, tokens=400)
    caller = await caller_of(world, "a", limit)
    one = await begun(world, caller, lines(service.chance, 60, 20, 20), limit)
    used = service.usage(service.fixed_ms, 20)
    one.tokens_each = used.input_tokens + used.output_tokens
    begun_ms = world.clock.monotonic
    await service.run(one)
    assert one.ended_ms - begun_ms > 7 * 60_000
    near(one)


async def test_moments_are_shown_to_the_nearest_second(world: WorkerWorld, tmp_path: Path) -> None:
    service = Service(world, forecaster(world, tmp_path), 10)
    one = await begun(world, await caller_of(world, "a"), lines(service.chance, 1, 20, 20))
    minute = world.clock.now_ms() // 60_000
    columns = "insert into rates (model, minute, worker_id, units, tokens, items) values "
    await service.write(columns + f"('m', {minute}, 'worker_x', 6000, 6000, 60)")
    # At 100 units a second.
    for units, later_s in ((60_040, 600), (60_060, 601)):
        await service.write("update job_models set work_units = ? where job_id = ?", units, one.job.id)
        shown = await service.forecaster.of_job(await world.look(one.job))
        assert shown.eta is not None
        assert shown.eta.p50 == world.clock.now_ms() // 1000 + later_s


async def test_two_tenants_of_which_one_has_little(world: WorkerWorld, tmp_path: Path) -> None:
    service = Service(world, forecaster(world, tmp_path), 5)
    large = await begun(world, await caller_of(world, "a"), lines(service.chance, 400, 20, 900))
    small = await begun(world, await caller_of(world, "b"), lines(service.chance, 160, 20, 900))
    await service.run(large, small)
    assert small.ended_ms < large.ended_ms
    near(large)
    near(small)


@pytest.mark.parametrize("slice_items", [1, 32])
@pytest.mark.parametrize("fixed_ms", [0, 1_000])
@pytest.mark.parametrize("kinds", [("short", "long"), ("long", "short"), ("mixed", "short")])
async def test_two_tenants_with_requests_of_other_lengths(
    world: WorkerWorld, tmp_path: Path, kinds: tuple[str, str], fixed_ms: int, slice_items: int
) -> None:
    """Shares are shares of tokens, so the tenant with short requests has more calls out, and is done sooner. How long a call takes may
    hang on its tokens or not. By slices a tenant with long requests seems to go fast for a while, and then hardly at all."""
    service = Service(world, forecaster(world, tmp_path), 9, fixed_ms)
    service.slice_items = slice_items
    runs = [
        await begun(world, await caller_of(world, name), inputs_of(service, kind))
        for name, kind in zip("ab", kinds, strict=True)
    ]
    await service.run(*runs)
    for one in runs:
        near(one)


async def test_a_lifetime_that_is_too_short_promises_no_end(world: WorkerWorld, tmp_path: Path) -> None:
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


class NoRefusals:
    async def refusals(self, caller: Caller, wanted: JobRequest) -> list[Any]:
        return []


def inputs_of(service: Service, kind: str) -> list[bytes]:
    return lines(service.chance, *{**WORKLOADS, "four": (24, 20, 200), "tenants": (200, 20, 900)}[kind])


async def forecast_run(directory: Path, kind: str, seed: int) -> tuple[bool, float]:
    """Return whether a batch cost what was forecast after other workloads, and the error of its end after a canary."""
    world = WorkerWorld(directory)
    await world.store.migrate()
    try:
        canary = 4 if kind == "four" else 20
        service = Service(world, forecaster(world, directory), seed, looks_after=canary)
        service.token_share = service.chance.uniform(0.9, 1.1)
        validation: Any = JobValidation(context_of(world, directory), NoRefusals())  # type: ignore[arg-type]
        warm = await caller_of(world, "warm")
        for other in service.chance.sample(sorted(WORKLOADS), 2):
            await service.run(await begun(world, warm, inputs_of(service, other)))
        limits = (FOUR,) if kind == "four" else ()
        caller, inputs = await caller_of(world, "a", *limits), inputs_of(service, kind)
        waiting = await world.job(inputs, caller=caller)
        wanted = JobRequest("/v1/chat/completions", waiting.input_file_id, HOUR_MS, "1h")
        dry_run = await validation.validate(caller, wanted)
        await world.store.cancel_job(caller.tenant_id, waiting.id)
        one = await begun(world, caller, inputs, *limits)
        beside = (
            [await begun(world, await caller_of(world, "b"), inputs_of(service, kind))] if kind == "tenants" else []
        )
        await service.run(one, *beside)
        paid = cost(one.usage, PRICE, batch=True).total_nano
        [(asked_ms, looked)] = one.looks
        left_ms = one.ended_ms - asked_ms
        forecast_ms = 1_000 * looked.eta.p50 - EPOCH_MS - asked_ms
        return nano_of(dry_run.cost.p5) <= paid <= nano_of(dry_run.cost.p95), abs(forecast_ms - left_ms) / left_ms
    finally:
        await world.blobs.close()
        await world.store.close()


@pytest.mark.soak
@pytest.mark.timeout(0)
async def test_fifty_runs_cost_what_was_forecast_and_end_when_a_canary_says(tmp_path: Path) -> None:
    """Ten runs of each workload, each behind two others on the same model, and with a tokenizer that is up to a tenth off the estimate."""
    found = {}
    for kind in (*WORKLOADS, "four", "tenants"):
        for seed in range(10):
            directory = tmp_path / f"{kind}-{seed}"
            directory.mkdir()
            found[kind, seed] = await forecast_run(directory, kind, seed)
    within = sum(is_within for is_within, _ in found.values())
    assert within >= 45, found
    assert median(error for _, error in found.values()) <= 0.15, found
    for kind in (*WORKLOADS, "four", "tenants"):
        assert median(error for (one, _), (_, error) in found.items() if one == kind) <= 0.15, (kind, found)
