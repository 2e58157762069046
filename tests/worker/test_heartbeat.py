"""What a heartbeat brings back is obeyed when it is due, and not a heartbeat later."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from tests.worker.world import Script, WorkerWorld, chat_lines, until, working
from tidegate.core.errors import StoreUnavailable
from tidegate.core.nouns import Answer, Call, Holding, LeasedSlice
from tidegate.core.states import JobState
from tidegate.worker.heartbeat import CloseGrace, Heartbeat

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
    async with working(live, script, heartbeat_ms=MINUTES_MS, cancel_grace_ms=300) as run:
        await until(lambda: len(script.calls) == 2, "both calls")
        await live.store.cancel_job(job.tenant_id, job.id)
        run.worker._recorder.job_stopped.set()
        await until(lambda: sorted(cut_off) == [0, 1], "their grace to end")


async def test_the_next_heartbeat_comes_when_the_first_of_several_graces_ends() -> None:
    beats, beat_due = list[int](), asyncio.Event()

    async def beat() -> list[Holding]:
        beats.append(len(beats))
        if len(beats) == 2:
            me.has_left = True
            beat_due.set()
        soon, late = (Holding(name, 0, "t", JobState.CANCELLING, JobState.CANCELLED, 0, False, 0) for name in "ab")
        return [replace(soon, closing_for_ms=MINUTES_MS - 10), late]

    me = SimpleNamespace(has_left=False, safe_until_ms=0.0, asked_ms=0.0, beat=beat)
    leased_work = SimpleNamespace(
        extend_lease=lambda until_ms: None,
        keys=set,
        close_job=lambda job_id: [],
        move_deadlines=lambda *_: None,
        compare=lambda *_: [],
    )
    settler = SimpleNamespace(settle_all=lambda: None)
    grace = CloseGrace(MINUTES_MS, MINUTES_MS)
    ports: Any = (me, SimpleNamespace(pending=set()), leased_work, settler, beat_due, MINUTES_MS, grace)
    async with asyncio.timeout(10):
        await Heartbeat(*ports).run()
    assert beats == [0, 1]


async def test_slices_of_a_lease_whose_answer_was_lost_are_handed_back_and_run(
    live: WorkerWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their owner does not know of them, and as long as it lives no other worker gets them."""
    script, lease_picks, lost = Script(live, "m"), live.store.lease_picks, list[LeasedSlice]()
    job = await live.started(chat_lines(4))

    async def lease_and_vanish(*arguments: Any, **more: Any) -> list[LeasedSlice]:
        lost.extend(await lease_picks(*arguments, **more))
        monkeypatch.setattr(live.store, "lease_picks", lease_picks)
        raise StoreUnavailable("away")

    monkeypatch.setattr(live.store, "lease_picks", lease_and_vanish)
    async with working(live, script):
        await live.completed(job)
    assert [one.count for one in lost] == [4]
