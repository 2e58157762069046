"""What a heartbeat brings back is obeyed when it is due, and not a heartbeat later."""

from __future__ import annotations

import asyncio

import pytest

from tests.worker.world import Script, WorkerWorld, chat_lines, until, working
from tidegate.core.nouns import Answer, Call

pytestmark = pytest.mark.anyio

MINUTES_MS = 600_000


async def test_calls_of_a_cancelled_job_are_cut_off_when_their_grace_ends_however_far_the_next_heartbeat_is(
    live: WorkerWorld,
) -> None:
    script, cut_off = Script(live, "m"), list[int]()

    async def hangs(call: Call) -> Answer:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cut_off.append(call.number)
            raise
        raise AssertionError("it waits for ever")

    script.answers = hangs
    job = await live.started(chat_lines(2))
    async with working(live, script, heartbeat_ms=MINUTES_MS, cancel_grace_ms=300) as bench:
        await until(lambda: len(script.calls) == 2, "both calls")
        await live.store.cancel_job(job.tenant_id, job.id)
        bench.worker._recorder.job_stopped.set()
        await until(lambda: sorted(cut_off) == [0, 1], "their grace to end")
