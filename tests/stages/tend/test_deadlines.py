"""Jobs that close before they were read."""

from __future__ import annotations

import pytest

from tests.worker.world import WorkerWorld, chat_lines
from tidegate import metrics
from tidegate.core.states import JobState
from tidegate.stages.tend import deadlines

pytestmark = pytest.mark.anyio


async def test_a_job_that_is_cancelled_before_it_is_read_ends_and_is_counted_once(world: WorkerWorld) -> None:
    job = await world.job(chat_lines(1))
    await world.store.cancel_job(job.tenant_id, job.id)
    before = metrics.counted(metrics.job_cancellations).get("queued", 0)
    assert [await deadlines.tend(world.store) for _ in range(2)] == [1, 0]
    assert (await world.look(job)).state is JobState.CANCELLED
    assert metrics.counted(metrics.job_cancellations)["queued"] == before + 1
