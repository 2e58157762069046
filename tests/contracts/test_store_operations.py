"""What every store does with operations: the changes of a step, their audit rows and the operation's place are one transaction."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from tests.contracts.store_world import DAY_MS, LEASE_MS, StoreWorld
from tests.contracts.test_store_controls import HOUR_MS, flush
from tests.contracts.test_store_retries import FAILED, ended, retried
from tests.support.ports import FairDice
from tidegate.core.errors import ApiProblem, LostRace
from tidegate.core.job_lists import JobFilter
from tidegate.core.nouns import Job
from tidegate.core.operations import JobOperation, OperationScope
from tidegate.core.states import OperationState
from tidegate.stages.operate import FAILED_ITEMS, retry
from tidegate.store.operators.audit import AuditFilter
from tidegate.store.operators.changeable_jobs import ChangeableJobs
from tidegate.store.operators.operations import JobVerb, OperationStep

pytestmark = pytest.mark.anyio

PAUSE = OperationScope("pause")


async def paused(store: ChangeableJobs, job: Job) -> Job | None:
    return await store.pause_job(job.tenant_id, job.id)


async def pause(world: StoreWorld, operation: JobOperation, worker_id: str, *jobs: Job, verb: JobVerb = paused) -> None:
    """A step of an operation that pauses."""
    noted = [(job, world.id("aud")) for job in jobs]
    await world.store.step_operation(OperationStep(operation, worker_id, verb, noted))


async def jobs_of(world: StoreWorld, count: int) -> list[Job]:
    """Running jobs of one tenant, newest first."""
    caller = await world.caller("one")
    jobs = []
    for _ in range(count):
        jobs.append(await world.running(caller, 4))
        await world.clock.advance(5)
    return jobs[::-1]


async def test_an_operation_comes_to_each_job_once(world: StoreWorld) -> None:
    store = world.store
    jobs = await jobs_of(world, 4)
    impact = await store.impact_of(PAUSE)
    assert (impact.jobs, impact.items, impact.tokens, impact.due_soon) == (4, 16, 800, 0)
    assert impact.first_deadline == jobs[-1].expires_at
    made = await store.put_operation(world.id("op"), "operator", PAUSE)
    assert (made.state, made.impact, made.done, made.failed) == (OperationState.RUNNING, impact, 0, 0)
    await jobs_of(world, 1)
    worker_id = await world.worker()
    assert await store.waiting_operation(worker_id) == made.id
    assert await store.take_operation(made.id, worker_id) == made
    assert [job.id for job in await store.operation_jobs(made, 2)] == [job.id for job in jobs[:2]]

    await pause(world, made, worker_id, jobs[0])
    with pytest.raises(LostRace):
        await pause(world, made, worker_id, jobs[0])

    async def paused_but_one(inside: ChangeableJobs, job: Job) -> Job | None:
        changed = await paused(inside, job)
        if job.id == jobs[1].id:
            raise ApiProblem(409, "c", "m")
        return changed

    await pause(world, made, worker_id, jobs[1], jobs[2], verb=paused_but_one)
    now = await store.get_operation(made.id)
    assert now is not None
    assert (now.done, now.failed) == (2, 1)
    assert now.last_failure is not None
    assert (now.last_failure.job_id, now.last_failure.code) == (jobs[1].id, "c")
    assert [job.id for job in await store.operation_jobs(now, 9)] == [jobs[3].id]
    await pause(world, made, worker_id, jobs[3])
    now = await store.get_operation(made.id)
    assert now is not None
    assert now.last_failure is not None, "what went well after it hides no failure"
    # What a job wrote before it refused is undone; the others of its step stay changed.
    assert [(await world.look(job)).paused_at is not None for job in jobs] == [True, False, True, True]
    assert await store.end_operation(made.id, worker_id)
    assert not await store.end_operation(made.id, worker_id)
    assert await store.waiting_operation(worker_id) is None
    assert await store.take_operation(made.id, worker_id) is None
    noted = await store.list_audit(AuditFilter(actor=f"operation:{made.id}"), after=None, count_max=9)
    assert sorted(one.target for one in noted or ()) == sorted(job.id for job in (jobs[0], jobs[2], jobs[3]))
    with pytest.raises(ApiProblem, match="completed"):
        await store.cancel_operation(made.id)


async def test_a_cancelled_or_lost_operation_changes_nothing_more(world: StoreWorld) -> None:
    store = world.store
    newer, older = await jobs_of(world, 2)
    made = await store.put_operation(world.id("op"), "operator", PAUSE)
    first, second = await world.worker(), await world.worker(lease_ms=DAY_MS)
    assert await store.take_operation(made.id, first) is not None
    assert await store.take_operation(made.id, second) is None
    assert await store.waiting_operation(second) is None
    assert not await store.end_operation(made.id, second), "only its owner may end it"
    await world.clock.advance(LEASE_MS + 1)
    assert await store.waiting_operation(second) == made.id
    assert await store.take_operation(made.id, second) is not None
    with pytest.raises(LostRace):
        await pause(world, made, first, newer, older)
    assert [(await world.look(job)).paused_at for job in (newer, older)] == [None, None]
    await pause(world, made, second, newer)
    for _ in range(2):
        cancelled = await store.cancel_operation(made.id)
        assert cancelled is not None
        assert (cancelled.state, cancelled.done) == (OperationState.CANCELLED, 1)
    with pytest.raises(LostRace):
        await pause(world, made, second, older)
    assert (await world.look(older)).paused_at is None
    assert await store.cancel_operation(world.id("op")) is None
    await world.clock.advance(DAY_MS)
    await store.prune_operations(DAY_MS)
    assert await store.get_operation(made.id) is not None, "its time counts from its end"
    running = await store.put_operation(world.id("op"), "operator", PAUSE)
    await world.clock.advance(DAY_MS + 1)
    await store.prune_operations(DAY_MS)
    assert await store.get_operation(made.id) is None
    assert await store.get_operation(running.id) is not None


async def test_only_what_an_action_can_change_is_matched(world: StoreWorld) -> None:
    store = world.store
    newer, older = await jobs_of(world, 2)
    theirs = await world.running(await world.caller("two"), 4)
    await store.pause_job(older.tenant_id, older.id)

    async def count(action: str, org: str | None = None, wanted: JobFilter | None = None) -> int:
        return (await store.impact_of(OperationScope(action, org, wanted or JobFilter()))).jobs

    assert [await count(action) for action in ("pause", "resume", "cancel", "fail", "requeue")] == [2, 1, 3, 3, 3]
    assert [await count(action) for action in ("retry", "abandon", "retry_finalization")] == [0, 0, 0]
    assert await count("pause", "two") == 1
    assert await count("pause", "three") == 0
    assert await count("cancel", None, JobFilter(words=theirs.id)) == 1
    assert await count("cancel", None, JobFilter(to_ms=newer.created_at)) == 1
    await store.cancel_job(theirs.tenant_id, theirs.id)
    assert await store.close_job(theirs.id, 0)
    of_finalizing = [await count(action, "two") for action in ("pause", "cancel", "fail", "requeue", "abandon")]
    assert of_finalizing == [0, 0, 0, 1, 1]
    first = await store.put_operation(world.id("op"), "operator", PAUSE)
    await world.clock.advance(5)
    second = await store.put_operation(world.id("op"), "operator", OperationScope("retry", "one", JobFilter(model="m")))
    listed = await store.list_operations(after=None, count_max=9)
    assert listed == [second, first]
    assert await store.list_operations(after=second.id, count_max=9) == [first]
    assert await store.list_operations(after=world.id("op"), count_max=9) is None


async def test_an_impact_says_what_is_due_soon_and_what_the_rest_will_cost(world: StoreWorld) -> None:
    caller = await world.caller("one")
    soon = await world.running(caller, 5, window_ms=HOUR_MS - 1)
    await world.running(caller, 3, window_ms=HOUR_MS)
    await world.lease(await world.worker(), soon, token=soon.id)
    await flush(world, soon, (0, 1), (2,), nano=50)
    impact = await world.store.impact_of(PAUSE)
    # Each item was planned with 50 tokens, and those that failed are done too.
    assert (impact.jobs, impact.items, impact.tokens, impact.cost_nano) == (2, 2 + 3, (2 + 3) * 50, 2 * 50)
    assert (impact.first_deadline, impact.due_soon) == (soon.expires_at, 1)


async def test_a_retry_comes_to_jobs_with_failures_that_were_not_run_again(world: StoreWorld) -> None:
    """Those of a door that names its items are left out, and those in which nothing failed."""
    wanted = await ended(world)
    again = await retried(world, await ended(world), FAILED)
    await ended(world, door="{}")
    await ended(world, answered=3, failed=0, rest=2)
    impact = await world.store.impact_of(OperationScope("retry"))
    assert (impact.jobs, impact.items, impact.first_deadline) == (1, 1, None)
    await world.caller("another")
    for org, count in (("acme", 1), ("another", 0)):
        assert (await world.store.impact_of(OperationScope("retry", org))).jobs == count
    await world.clock.advance(5)
    made = await world.store.put_operation(world.id("op"), "operator", OperationScope("retry"))
    assert [job.id for job in await world.store.operation_jobs(made, 9)] == [wanted.id]
    await world.store.cancel_job(again.tenant_id, again.id)
    assert await world.store.end_unstarted(again.id)
    await world.store.forget_job(again.id)
    assert (await world.store.impact_of(OperationScope("retry"))).jobs == 2, "a retry that is gone ran nothing again"


async def test_a_job_that_is_gone_counts_as_a_failure(world: StoreWorld) -> None:
    [job] = await jobs_of(world, 1)
    made, worker_id = await world.store.put_operation(world.id("op"), "operator", PAUSE), await world.worker()
    assert await world.store.take_operation(made.id, worker_id) is not None
    await pause(world, made, worker_id, replace(job, id=world.id("batch")))
    now = await world.store.get_operation(made.id)
    assert now is not None
    assert (now.done, now.failed) == (0, 1)
    assert now.last_failure is not None
    assert now.last_failure.code == "batch_not_found"


async def test_an_operators_retry_counts_as_the_same_share(world: StoreWorld) -> None:
    first = await ended(world, share_owner="key:k")
    made = await retry(world.store, FairDice(), first, FAILED_ITEMS)
    assert made is not None
    assert (made.retry_of, made.share_owner) == (first.id, "key:k")


async def test_a_page_goes_on_behind_an_operation_that_was_pruned_meanwhile(world: StoreWorld) -> None:
    store, made = world.store, []
    for _ in range(4):
        made.append((await store.put_operation(world.id("op"), "operator", PAUSE)).id)
        await world.clock.advance(1_000)
    await store.cancel_operation(made[2])
    await world.clock.advance(1_000)
    await store.prune_operations(500)
    assert await store.get_operation(made[2]) is None
    rest = await store.list_operations(after=made[2], count_max=9)
    assert [one.id for one in rest or ()] == [made[1], made[0]]
    assert await store.list_operations(after=world.id("op"), count_max=9) is None
    # A place is kept for a while, and no longer.
    for passed_ms, is_known in ((2 * DAY_MS, True), (1, False)):
        await world.clock.advance(passed_ms)
        await store.prune_files(0, 10)
        assert (await store.list_operations(after=made[2], count_max=9) is not None) is is_known


@pytest.mark.parametrize("action", ["pause", "retry"])
async def test_an_operation_that_comes_to_no_job_has_no_impact(world: StoreWorld, action: str) -> None:
    impact = await world.store.impact_of(OperationScope(action))
    assert (impact.jobs, impact.items, impact.tokens, impact.cost_nano) == (0, 0, 0, 0)
    assert (impact.first_deadline, impact.due_soon) == (None, 0)


async def test_operations_of_one_moment_are_each_listed_once_page_by_page(world: StoreWorld) -> None:
    made = [(await world.store.put_operation(world.id("op"), "operator", PAUSE)).id for _ in range(3)]
    found = list[str]()
    while page := await world.store.list_operations(after=found[-1] if found else None, count_max=1):
        found += [one.id for one in page]
    assert found == sorted(made, reverse=True)
