"""What every store does with a job that takes the answers of an earlier one."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from tests.contracts.store_world import StoreWorld, plan_of, refused
from tests.contracts.test_store_publish import closed
from tests.contracts.test_store_retries import ended
from tidegate.core.answer_terms import AnswerTerms
from tidegate.core.input.turns import ingest_bytes
from tidegate.core.job_shape import CopiedItems, JobShape
from tidegate.core.nouns import Caller, Job, JobEnd, PublishTurns
from tidegate.core.states import JobState

pytestmark = pytest.mark.anyio


async def not_reused(world: StoreWorld, caller: Caller, earlier: Job, **more: Any) -> tuple[int, str, str | None]:
    problem = await refused(world.job(caller, shape=JobShape(reuse_from=earlier.id), **more))
    return problem.status, problem.code, problem.param


async def test_answers_of_others_of_open_jobs_and_of_none_are_refused(world: StoreWorld) -> None:
    earlier = await ended(world)
    caller, other_caller = Caller(earlier.tenant_id), await world.caller("another")
    missing = (404, "batch_not_found", "reuse_from")
    assert await not_reused(world, other_caller, earlier) == missing
    assert await not_reused(world, other_caller, replace(earlier, id=world.id("batch"))) == missing
    running = await world.running(caller, 2)
    assert await not_reused(world, caller, running) == (409, "batch_not_ended", "reuse_from")
    terms = AnswerTerms("{}")
    assert await not_reused(world, caller, earlier, answers=terms) == (400, "invalid_parameter", "reuse_from")
    nothing, _, token = await closed(world, answered=0, failed=2, rest=0)
    await world.store.publish_job(nothing, token, end=JobEnd(None))
    assert await not_reused(world, caller, nothing) == (400, "invalid_parameter", "reuse_from")
    await world.store.delete_file(earlier.tenant_id, earlier.output_file_id or "")
    assert await not_reused(world, caller, earlier) == (400, "invalid_parameter", "reuse_from")


async def test_what_is_read_of_the_earlier_job_counts_for_the_turn_of_an_input(world: StoreWorld) -> None:
    earlier = await ended(world)
    caller = Caller(earlier.tenant_id)
    file = await world.file(caller)
    plain, reusing = [await world.job(caller, file, shape=JobShape(reuse_from=one)) for one in ("", earlier.id)]
    own = (0, ingest_bytes(file.size_bytes, file.line_count) + 1)
    assert await world.store.jobs_waiting_ingest(10, own) == [plain.id]
    assert sorted(await world.store.jobs_waiting_ingest(10)) == sorted([plain.id, reusing.id])


async def test_a_job_of_which_nothing_is_run_is_done_when_it_starts(world: StoreWorld) -> None:
    earlier = await ended(world)
    job = await world.job(Caller(earlier.tenant_id), shape=JobShape(reuse_from=earlier.id))
    plan = replace(plan_of(), item_count=2, copied=CopiedItems(0, 2, 0))
    started = await world.ingested(job, plan)
    assert (started.state, started.closing, started.run_count) == (JobState.FINALIZING, JobState.COMPLETED, 0)
    assert await world.store.jobs_to_publish(PublishTurns()) == [job.id]
