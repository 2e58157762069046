"""How many jobs and bytes those behind them may create, as every store counts it: exact, and nothing for what was refused."""

from __future__ import annotations

import asyncio

import pytest

from tests.contracts.store_world import DAY_MS, StoreWorld, refused
from tidegate.core.budgets.budget import Budget, Limit, LimitBound, Period, creation_budgets
from tidegate.core.errors import ApiProblem
from tidegate.core.nouns import Caller, Job, Quotas

pytestmark = pytest.mark.anyio


def allowed(
    caller: Caller,
    period: Period,
    jobs: int | None = None,
    size_bytes: int | None = None,
    bound: LimitBound = LimitBound.KEY,
) -> tuple[Budget, ...]:
    name = caller.tenant_id if bound is LimitBound.TENANT else f"{caller.tenant_id}/x"
    return creation_budgets(bound, name, [Limit(period, jobs=jobs, bytes=size_bytes)])


async def create(world: StoreWorld, caller: Caller, budgets: tuple[Budget, ...], **fields: object) -> Job:
    return await world.job(caller, await world.file(caller), quotas=Quotas(creation=budgets), **fields)  # type: ignore[arg-type]


async def test_so_many_jobs_in_a_day_and_then_none_until_the_next(world: StoreWorld) -> None:
    caller = await world.caller()
    budgets = allowed(caller, Period.DAY, jobs=2) + allowed(caller, Period.LIFETIME, jobs=3, bound=LimitBound.TENANT)
    for _ in range(2):
        await create(world, caller, budgets)
    problem = await refused(create(world, caller, budgets))
    assert (problem.status, problem.code) == (429, "quota_exceeded")
    assert "2 batches per day" in problem.message
    assert problem.retry_after_s is not None
    assert 0 < problem.retry_after_s <= 86_400
    await world.clock.advance(DAY_MS)
    await create(world, caller, budgets)
    problem = await refused(create(world, caller, budgets))
    assert (problem.retry_after_s, "organization may create 3 batches per lifetime" in problem.message) == (None, True)


async def test_bytes_count_and_an_input_above_the_limit_is_never_taken(world: StoreWorld) -> None:
    caller = await world.caller()
    size_bytes = (await world.file(caller)).size_bytes
    problem = await refused(create(world, caller, allowed(caller, Period.DAY, size_bytes=size_bytes - 1)))
    assert (problem.status, problem.param) == (413, "input_file_id")
    await create(world, caller, allowed(caller, Period.HOUR, size_bytes=size_bytes))
    enough = allowed(caller, Period.DAY, size_bytes=2 * size_bytes)
    await create(world, caller, enough)
    await create(world, caller, enough)
    assert (await refused(create(world, caller, enough))).status == 429


async def test_what_is_refused_or_replayed_counts_nothing(world: StoreWorld) -> None:
    caller = await world.caller()
    roomy, narrow = (
        allowed(caller, Period.LIFETIME, jobs=2),
        allowed(caller, Period.DAY, jobs=1, bound=LimitBound.TENANT),
    )
    job_id = world.id("batch")
    file = await world.file(caller)
    for _ in range(3):
        await world.job(caller, file, job_id=job_id, quotas=Quotas(creation=roomy + narrow))
    await refused(create(world, caller, roomy + narrow))
    await create(world, caller, roomy)
    assert (await refused(create(world, caller, roomy))).status == 429


async def test_many_creations_at_once_pass_no_limit(world: StoreWorld) -> None:
    caller = await world.caller()
    budgets = allowed(caller, Period.LIFETIME, jobs=5)
    made = await asyncio.gather(*(create(world, caller, budgets) for _ in range(12)), return_exceptions=True)
    assert sum(isinstance(one, Job) for one in made) == 5
    assert all(isinstance(one, Job | ApiProblem) for one in made)
