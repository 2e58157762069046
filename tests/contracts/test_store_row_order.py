"""Transactions that need several rows take them in one order: tenants, jobs, files and blobs, each by id.

Logs hold lines of many jobs. So transactions about jobs of different tenants meet at the logs' blobs, and in different orders would wait
for each other."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

import asyncpg
import pytest

from tests.contracts.limits_world import budget, minute
from tests.contracts.store_world import CHAT, Log, StoreWorld, line
from tests.contracts.test_store_races import VERBS, operating, until_a_lock_is_awaited
from tests.contracts.test_store_retries import FAILED, retried
from tidegate.core.budgets.budget import BudgetRequest
from tidegate.core.job_controls import Canary
from tidegate.core.nouns import Caller, IngestPlan, Job, JobEnd, Rewrite, SlicePlan
from tidegate.core.states import JobState
from tidegate.store.database.clock import move_along

pytestmark = pytest.mark.anyio

Verb = Callable[[], Awaitable[Any]]


@pytest.fixture
async def world(postgres_world: StoreWorld) -> StoreWorld:
    return postgres_world


async def takes_in_order(url: str, table: str, ids: Sequence[str | None], verb: Verb, *, column: str = "id") -> None:
    """Run a verb while the first of these rows is held: it waits there, and holds none of the later ones."""
    first, *later = sorted(one for one in ids if one)
    assert later
    other: Any = await asyncpg.connect(url)
    locked = f"select 1 from {table} where {column} = $1 for update"  # noqa: S608 - names of our own
    try:
        async with other.transaction():
            await other.execute(locked, first)
            running = asyncio.ensure_future(verb())
            await until_a_lock_is_awaited(url)
            for one in later:
                await other.execute(f"{locked} nowait", one)
        await running
    finally:
        await other.close()


async def passes(url: str, held: str, row: str, verb: Verb) -> None:
    """Run a verb to its end while another transaction holds a row that it does not need."""
    other: Any = await asyncpg.connect(url)
    try:
        async with other.transaction():
            assert await other.fetch(held, row)
            await verb()
    finally:
        await other.close()


async def logs_in_order(world: StoreWorld, *kinds: str) -> list[Log]:
    """Logs of these kinds, the later ones with higher ids."""
    logs = [await world.log(kinds[0])]
    for kind in kinds[1:]:
        while (log := await world.log(kind)).blob_id < logs[-1].blob_id:
            pass
        logs.append(log)
    return logs


async def finalizing(world: StoreWorld, caller: Caller, answers: Log, errors: Log, **fields: Any) -> tuple[Job, str]:
    """A job of which one item was answered and one failed, and the token that may publish it."""
    job, worker, token = await world.running(caller, 2, **fields), await world.worker(), world.token()
    [held] = await world.lease(worker, job)
    await world.answer(answers, job, 0)
    await world.record(world.errors(errors, job, 1, token=held.token))
    assert await world.store.take_step(job.id, JobState.FINALIZING, worker, token)
    return await world.look(job), token


async def ended(world: StoreWorld, caller: Caller, answers: Log, errors: Log) -> Job:
    job, token = await finalizing(world, caller, answers, errors)
    await world.store.publish_job(job, token, end=JobEnd(None))
    return await world.look(job)


async def test_a_retry_takes_blobs_by_id(world: StoreWorld, shared_database: str) -> None:
    answers, errors = await logs_in_order(world, "answers", "errors")
    job = await ended(world, await world.caller(), answers, errors)
    logs = [answers.blob_id, errors.blob_id]
    await takes_in_order(shared_database, "blobs", logs, lambda: retried(world, job, FAILED))


async def test_a_retry_waits_for_no_blob_of_other_files(world: StoreWorld, shared_database: str) -> None:
    caller = await world.caller()
    job = await ended(world, caller, await world.log(), await world.log("errors"))
    [elsewhere] = await world.extents((await world.file(caller)).id)
    held = "select 1 from blobs where id = $1 for update"
    await passes(shared_database, held, elsewhere.blob_id, lambda: retried(world, job, FAILED))


async def test_a_forgotten_job_lets_go_of_blobs_by_id(world: StoreWorld, shared_database: str) -> None:
    errors, answers = await logs_in_order(world, "errors", "answers")
    job = await ended(world, await world.caller(), answers, errors)
    logs = [answers.blob_id, errors.blob_id]
    await takes_in_order(shared_database, "blobs", logs, lambda: world.store.forget_job(job.id))


async def test_a_forgotten_retry_takes_jobs_by_id(world: StoreWorld, shared_database: str) -> None:
    first = await ended(world, await world.caller(), await world.log(), await world.log("errors"))
    made = await retried(world, first, FAILED)
    while made.id > first.id:
        await world.store.cancel_job(first.tenant_id, made.id)
        assert await world.store.end_unstarted(made.id)
        made = await retried(world, first, FAILED)
    await world.store.cancel_job(first.tenant_id, made.id)
    assert await world.store.end_unstarted(made.id)
    await takes_in_order(shared_database, "jobs", [first.id, made.id], lambda: world.store.forget_job(made.id))


async def test_an_ordered_job_lets_go_of_blobs_by_id(world: StoreWorld, shared_database: str) -> None:
    errors, answers = await logs_in_order(world, "errors", "answers")
    job, token = await finalizing(world, await world.caller(), answers, errors, ordered=True)

    async def rewrite(number: int, word: str) -> Rewrite:
        placed = (await world.log("compacted")).append([line(job.id, number, word)])
        return Rewrite(placed, array("I", [number]), array("q", [0]))

    rewrites = (await rewrite(0, "answer"), await rewrite(1, "error"))
    logs = [answers.blob_id, errors.blob_id]
    await takes_in_order(
        shared_database, "blobs", logs, lambda: world.store.publish_job(job, token, rewrites=rewrites, end=JobEnd(None))
    )


async def test_an_operation_of_retries_takes_tenants_jobs_files_and_blobs_by_id(
    world: StoreWorld, shared_database: str
) -> None:
    """The jobs of an operation come newest first, whichever tenant owns them and wherever their results lie."""
    logs = [(await world.log(), await world.log("errors")) for _ in range(4)]
    callers = [await world.caller(name) for name in ("acme", "bond", "corp", "dome")]
    for kind in ("tenants", "jobs", "files", "blobs"):
        jobs = [await ended(world, caller, *pair) for caller, pair in zip(callers, logs, strict=True)]
        rows: dict[str, list[str | None]] = {
            "tenants": [job.tenant_id for job in jobs],
            "jobs": [job.id for job in jobs],
            "files": [one for job in jobs for one in (job.input_file_id, job.output_file_id, job.error_file_id)],
            "blobs": [log.blob_id for pair in logs for log in pair],
        }

        async def step(jobs: list[Job] = jobs) -> None:
            await (await operating(world, VERBS["retry"], "retry", jobs))

        await takes_in_order(shared_database, kind, rows[kind], step)
        assert [len((await world.look(job)).retried_by) for job in jobs] == [1] * 4


async def test_budgets_are_debited_in_order_of_their_ids(world: StoreWorld, shared_database: str) -> None:
    one, two = budget("a", minute(9)), budget("b", minute(9))
    ask = [BudgetRequest((two, one), 1, 0)]
    await world.store.debit_budgets(ask)
    await takes_in_order(shared_database, "budgets", [one.id, two.id], lambda: world.store.debit_budgets(ask))


async def test_a_clock_that_is_followed_moves_budgets_in_order_of_their_ids(
    world: StoreWorld, shared_database: str
) -> None:
    budgets = [budget(name, minute(9)) for name in "ba"]
    for one in budgets:
        await world.store.debit_budgets([BudgetRequest((one,), 1, 0)])
    ids = [one.id for one in budgets]
    move = partial(world.store._driver.write, lambda tx: move_along(tx, 1_000))
    await takes_in_order(shared_database, "budgets", ids, move)


async def test_slots_are_shared_in_order_of_their_names_and_wait_for_no_other(
    world: StoreWorld, shared_database: str
) -> None:
    worker, names = await world.worker(), ["b", "a"]

    async def share(*names: str) -> None:
        caps = dict.fromkeys(names, 4)
        assert await world.store.share_slots(worker, caps, {}, caps) == caps

    await share("b", "a", "c")
    await takes_in_order(shared_database, "slots", names, lambda: share(*names), column="worker_id = '' and name")
    held = "select 1 from slots where worker_id = '' and name = $1 for update"
    await passes(shared_database, held, "c", lambda: share(*names))


async def test_the_flows_of_a_job_that_goes_on_are_woken_in_order(world: StoreWorld, shared_database: str) -> None:
    caller = await world.caller()
    job = await world.job(caller, canary=Canary(1, 0, "wait"))
    pieces = [SlicePlan(at, 1, model, CHAT, 100 * at, 100, 50) for at, model in enumerate(("b", "a"))]
    await world.ingested(job, IngestPlan(2, None, pieces, 200, 160, 40, sample_count=1))
    go_on = partial(world.store.end_canary, caller.tenant_id, job.id, goes_on=True)
    await takes_in_order(shared_database, "flows", ["b", "a"], go_on, column="model")
