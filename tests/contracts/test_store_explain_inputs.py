"""How a job stands, and what `tidegate explain` says of it, on every store."""

from tests.contracts.store_world import LEASE_MS, MODEL, StoreWorld, plan_of, tries
from tests.support.store_verbs import lease_slices
from tidegate.core.nouns import JobFlush
from tidegate.core.schedule.explain import explain


async def explanation_of(world: StoreWorld, job_id: str) -> str:
    job, explain_inputs = await world.store.any_job(job_id), await world.store.explain_inputs(job_id)
    assert job is not None
    assert explain_inputs is not None
    return "\n".join(explain(job, explain_inputs))


async def test_an_absent_job_has_no_standing(world: StoreWorld) -> None:
    assert await world.store.explain_inputs(world.id("batch")) is None


async def test_without_a_worker_it_says_how_to_start_one(world: StoreWorld) -> None:
    job = await world.running(await world.caller(), 3)
    await world.clock.advance(10 * LEASE_MS)
    assert "start one with `tidegate serve`" in await explanation_of(world, job.id)


async def test_what_is_ahead_of_a_job_what_runs_and_what_rests(world: StoreWorld) -> None:
    caller, worker = await world.caller(), await world.worker()
    first = await world.running(caller, 2)
    await world.clock.advance(1)
    second = await world.running(caller, 2)
    assert "nothing is ahead of it" in await explanation_of(world, first.id)
    assert "behind 1 older batch that has" in await explanation_of(world, second.id)
    [held] = await lease_slices(world.store, worker, first.id, MODEL, 1, "t")
    assert "workers hold 1 of its slices" in await explanation_of(world, first.id)
    assert "nothing is ahead of it" in await explanation_of(world, second.id)
    await world.store.release_slice(first.id, held.first, held.token, 90_000)
    assert "1 slice is put off for another 1m30s" in await explanation_of(world, first.id)


async def test_older_batches_of_other_models_are_not_ahead(world: StoreWorld) -> None:
    caller = await world.caller()
    await world.running(caller, 2)
    await world.clock.advance(1)
    other = await world.ingested(await world.job(caller), plan_of(2, model="another"))
    assert "nothing is ahead of it" in await explanation_of(world, other.id)


async def test_a_closing_an_ended_and_a_waiting_job(world: StoreWorld) -> None:
    caller, worker = await world.caller(), await world.worker()
    job = await world.running(caller, 2)
    await lease_slices(world.store, worker, job.id, MODEL, 1, "t")
    await world.store.cancel_job(caller.tenant_id, job.id)
    assert "closing as cancelled" in await explanation_of(world, job.id)
    await world.store.close_job(job.id, 0)
    assert "being published" in await explanation_of(world, job.id)


async def test_a_lost_owner_is_a_reason_to_wait(world: StoreWorld) -> None:
    caller, worker = await world.caller(), await world.worker()
    job = await world.running(caller, 2)
    await lease_slices(world.store, worker, job.id, MODEL, 1, "t")
    await world.store.declare_gone(worker, leaving=True)
    await world.store.reclaim_slices(worker)
    assert (
        "2 items were tried and wait to be tried again: the worker that had them was lost (owner_lost)."
        in await explanation_of(world, job.id)
    )
    tried = await world.store.item_tries(job.id, 0, 9)
    assert [(one.number, one.count, one.wait_ms) for one in tried] == [(0, 0, 0), (1, 0, 0)], (
        "it may not have been called"
    )


async def test_what_expired_says_which_time_was_over(world: StoreWorld) -> None:
    caller = await world.caller()
    hasty = await world.job(caller, begin_within_ms=90_000)
    late = await world.job(caller, window_ms=120_000)
    assert await world.store.expire_job(hasty.id) is False
    await world.clock.advance(90_000)
    assert await world.store.expire_job(hasty.id)
    assert await world.store.end_unstarted(hasty.id)
    assert "nothing of it had begun within 1m30s" in await explanation_of(world, hasty.id)
    await world.clock.advance(30_000)
    assert await world.store.expire_job(late.id)
    assert await world.store.end_unstarted(late.id)
    assert f"its window of {late.window_text} was over" in await explanation_of(world, late.id)


async def test_why_items_of_other_jobs_wait_is_not_explained(world: StoreWorld) -> None:
    caller, worker = await world.caller(), await world.worker()
    job, other = await world.running(caller, 2), await world.running(caller, 2)
    for one, reason in ((job, "rate_limited"), (other, "upstream_error")):
        [held] = await world.lease(worker, one)
        await world.record(JobFlush(one.id, attempts=[(held.token, tries(0, reason=reason))]))
    found = await world.store.explain_inputs(job.id)
    assert found is not None
    assert found.waiting_reasons == (("rate_limited", 1),)
