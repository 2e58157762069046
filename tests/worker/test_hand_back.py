"""A worker that is stopped: calls get their grace, answers are committed, and nothing of it is left for others to clear up."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import pytest

from tests.support.store_verbs import lease_slices, slice_counts
from tests.worker.world import BODY, Script, WorkerWorld, chat_lines, until, working
from tidegate.core.nouns import Answer, Call, Usage
from tidegate.stages.record import FlushLimits

pytestmark = pytest.mark.anyio


async def test_calls_that_outlast_the_grace_are_cut_off_and_run_again_by_another_worker(live: WorkerWorld) -> None:
    script, cut_off = Script(live, "m"), list[int]()

    async def answers(call: Call) -> Answer:
        if call.number < 2:
            return Answer(200, BODY, Usage(1, 0, 1, 0), "here")
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cut_off.append(call.number)
            raise
        raise AssertionError("it waits for ever")

    script.answers = answers
    job = await live.started(chat_lines(4))
    async with working(live, script, grace_ms=50):
        await until(lambda: len(script.calls) == 4, "four calls")
    assert sorted(cut_off) == [2, 3]
    assert (await live.look(job)).answered_count == 2
    patient = Script(live, "m")
    async with working(live, patient):
        await until(lambda: len(patient.calls) == 2, "the rest")
    assert sorted(call.number for call in patient.calls) == [2, 3]
    assert (await live.look(job)).answered_count == 4


async def test_answers_are_committed_though_calls_took_the_whole_grace(
    live: WorkerWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are paid for. Without their commit another worker would send these items again."""
    script, record_outcomes = Script(live, "m"), live.store.record_outcomes

    async def answers(call: Call) -> Answer:
        if call.number:
            await asyncio.Event().wait()
        return Answer(200, BODY, Usage(1, 0, 1, 0), "here")

    async def slow(*what: Any) -> Any:
        await asyncio.sleep(0.05)
        return await record_outcomes(*what)

    monkeypatch.setattr(live.store, "record_outcomes", slow)
    script.answers = answers
    job = await live.started(chat_lines(2))
    async with working(live, script, grace_ms=0, flush=FlushLimits(600_000, 256, 1 << 20, 64 << 20)) as run:
        await until(lambda: run.worker._items.leased_work.ended_count == 1, "the first answer")
    assert (await live.look(job)).answered_count == 1


async def test_what_was_not_sent_is_there_for_others_while_calls_have_their_grace(live: WorkerWorld) -> None:
    script, gate = Script(live, "m"), asyncio.Event()

    async def answers(call: Call) -> Answer:
        await gate.wait()
        return Answer(200, BODY, Usage(1, 0, 1, 0), "here")

    async def are(leased: int, ready: int) -> bool:
        return await slice_counts(live.store, job.id) == {"leased": leased, "ready": ready}

    script.answers = answers
    job = await live.started(chat_lines(3), slice_items=1)
    async with working(live, script, in_flight_max=1, grace_ms=600_000) as run:
        await until(partial(are, 2, 1), "a slice in flight and one behind it")
        run.stop.set()
        try:
            await until(partial(are, 1, 2), "the one behind it to be handed back")
        finally:
            gate.set()
    assert [call.number for call in script.calls] == [0]


async def test_of_a_slice_that_is_handed_back_in_part_the_other_part_is_done_with_its_last_call(
    live: WorkerWorld,
) -> None:
    script, gate = Script(live, "m"), asyncio.Event()

    async def answers(call: Call) -> Answer:
        await gate.wait()
        return Answer(200, BODY, Usage(1, 0, 1, 0), "here")

    async def is_cut() -> bool:
        return await slice_counts(live.store, job.id) == {"leased": 1, "ready": 1}

    script.answers = answers
    job = await live.started(chat_lines(3), slice_items=3)
    async with working(live, script, in_flight_max=1, grace_ms=600_000) as run:
        await until(lambda: len(script.calls) == 1, "a call")
        run.stop.set()
        try:
            await until(is_cut, "the unsent part to be handed back")
        finally:
            gate.set()
    assert await slice_counts(live.store, job.id) == {"done": 1, "ready": 1}


async def test_it_does_not_leave_before_its_last_answers_are_committed(
    live: WorkerWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, gate, asked = Script(live, "m"), asyncio.Event(), asyncio.Event()
    record_outcomes = live.store.record_outcomes

    async def slow(*what: Any) -> Any:
        asked.set()
        await gate.wait()
        return await record_outcomes(*what)

    monkeypatch.setattr(live.store, "record_outcomes", slow)
    job = await live.started(chat_lines(4))
    async with working(live, script) as run:
        await until(lambda: asked.is_set() and len(script.calls) == 4, "four answers")
        leaving = asyncio.create_task(run.leave())
        await asyncio.wait([leaving], timeout=0.2)
        had_left = run.me.has_left
        gate.set()
        await leaving
    assert not had_left
    assert (await live.look(job)).answered_count == 4


async def test_it_leaves_no_log_that_counts_as_being_written(live: WorkerWorld) -> None:
    script = Script(live, "m")
    await live.started(chat_lines(4))
    async with working(live, script) as run:
        await until(lambda: len(script.calls) == 4, "four calls")
    kinds = "select kind from blobs where worker_id = ? and state = 'writing'"
    assert await live.rows(kinds, run.me.id) == []


async def test_a_slice_that_the_worker_does_not_know_is_handed_back_when_it_leaves(live: WorkerWorld) -> None:
    """An internal error may have lost it between its lease and the leased work."""
    script = Script(live, "m")
    script.full = {"m"}
    job = await live.started(chat_lines(2))
    async with working(live, script, heartbeat_ms=600_000) as run:
        await until(lambda: run.me.asked_ms > 0, "the first heartbeat")
        assert await lease_slices(live.store, run.me.id, job.id, "m", 1, "t")
        await run.leave()
        rows = await live.rows("select state, lost_count from slices where job_id = ?", job.id)
    assert rows == [("ready", 0)]
