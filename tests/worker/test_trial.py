"""The item that kills its workers is found in few losses, and workers that are killed from outside fail nothing."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.store_verbs import lease_slices
from tests.worker.workshop import BODY, Script, until, working
from tests.worker.world import World, chat_lines
from tidegate.core.errors import Unavailable
from tidegate.core.nouns import Answer, Call, Job, Usage
from tidegate.core.schedule.snapshot import Suspects
from tidegate.core.states import JobState
from tidegate.store.slices import ALL_SUSPECTS, KEPT_FOR_CHECKS
from tidegate.worker import trial as trials
from tidegate.worker.trial import ALONE_AFTER, Trial

pytestmark = pytest.mark.anyio

_MARK = "select alone_job_id, alone_checked from workers where state = 'alive' and alone_job_id is not null"


def state(lost_count: int = 2, count: int = 4) -> Any:
    leased = SimpleNamespace(lost_count=lost_count, count=count, attempts={})
    return SimpleNamespace(slice=leased, sent_to=1)


def trial() -> Trial:
    nothing: Any = SimpleNamespace(shut=lambda: None)
    return Trial(nothing, nothing, nothing, nothing, nothing)


def hashable(*slices: Any) -> Any:
    """As the worker's own slices are: told apart by what they are, not by what they hold."""
    return [type("Held", (), {"slice": one.slice, "sent_to": one.sent_to})() for one in slices]


async def test_half_of_the_worst_then_the_rest_of_them_then_all() -> None:
    ours = trial()
    assert ours.suspects_max(Suspects(0, 5, 9)) == 5
    group = hashable(state(5), state(5))
    ours.begin_group(group)
    assert ours.hides_suspects
    assert ours.suspects_max(Suspects(0, 5, 4)) == 0, "one group at a time"
    assert not ours.end_slice(group[0])
    assert ours.end_slice(group[1])
    assert ours.suspects_max(Suspects(0, 5, 4)) == 4 - KEPT_FOR_CHECKS
    rest = hashable(state(5))
    ours.begin_group(rest)
    assert ours.end_slice(rest[0])
    assert ours.suspects_max(Suspects(0, 4, 30)) == ALL_SUSPECTS
    assert ours.suspects_max(Suspects(0, 6, 8)) == 4, "worse ones than those that were survived begin anew"


async def test_a_level_that_is_survived_in_one_group_clears_the_lesser_ones() -> None:
    ours = trial()
    assert ours.suspects_max(Suspects(0, 5, 1)) == 1
    [only] = hashable(state(5))
    ours.begin_group([only])
    assert ours.end_slice(only)
    assert ours.suspects_max(Suspects(0, 4, 30)) == ALL_SUSPECTS


async def test_suspects_of_a_model_that_had_no_room_are_halved_when_they_come() -> None:
    """As bad as what was survived, but none of them was in the groups that were."""
    ours = trial()
    assert ours.suspects_max(Suspects(0, 7, 1)) == 1
    [only] = hashable(state(7))
    ours.begin_group([only])
    assert ours.end_slice(only)
    assert ours.suspects_max(Suspects(0, 2, 5)) == ALL_SUSPECTS
    assert ours.suspects_max(Suspects(0, 7, 4)) == 2


async def test_a_group_without_any_of_the_worst_says_nothing_about_them() -> None:
    """A lease is of one model: its own suspects may be lesser ones than those that were counted."""
    ours = trial()
    assert ours.suspects_max(Suspects(0, 4, 3)) == 2
    group = hashable(state(2), state(2))
    ours.begin_group(group)
    assert [ours.end_slice(one) for one in group] == [False, False]
    assert ours.suspects_max(Suspects(0, 4, 3)) == 2


async def test_a_group_that_was_given_back_unsent_has_survived_nothing() -> None:
    ours = trial()
    ours.suspects_max(Suspects(0, 3, 8))
    [unsent] = hashable(state(3))
    unsent.sent_to = 0
    ours.begin_group([unsent])
    assert not ours.end_slice(unsent)
    assert ours.suspects_max(Suspects(0, 3, 8)) == 4


async def test_lesser_suspects_wait_while_another_worker_tries_worse_ones() -> None:
    assert trial().suspects_max(Suspects(4, 3, 8)) == 0
    assert trial().suspects_max(Suspects(3, 3, 8)) == 4
    assert trial().suspects_max(Suspects(3, 3, 2)) == 0, "the last are left for checks"


async def suspected(world: World, job: Job, lost_count: int) -> None:
    """Let the slices of this job have lost so many owners."""
    await world.rows("update slices set lost_count = ? where job_id = ?", lost_count, job.id)


async def test_a_single_suspect_is_the_only_one_in_flight_and_the_store_knows_before(
    live: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trials, "FIRST_REST_S", 0.0)
    script = Script(live, "m")
    company = await live.started(chat_lines(6))
    job = await live.started(chat_lines(1))
    await suspected(live, job, ALONE_AFTER)
    seen: list[tuple[int, list[Any]]] = []

    async def slow(call: Call) -> Answer:
        await asyncio.sleep(0.01)
        if call.job_id == job.id:
            seen.append((script.in_flight, await live.rows(_MARK)))
        return Answer(200, BODY, Usage(), "here")

    script.answers = slow
    async with working(live, script):
        await until(lambda: _ended(live, job, company), "both jobs")
        assert seen == [(1, [(job.id, 0)])]
        assert await live.rows(_MARK) == []


async def test_a_suspect_that_was_never_lost_alone_does_not_stop_a_worker_that_has_just_begun(
    live: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or a machine that keeps dying would stand still for several calls after each start."""
    rest_s, call_s = 0.4, 0.02
    monkeypatch.setattr(trials, "FIRST_REST_S", rest_s)
    script = Script(live, "m")
    company = await live.started(chat_lines(400), slice_items=4)
    job = await live.started(chat_lines(1))
    await suspected(live, job, ALONE_AFTER)
    begun_s: dict[str, float] = {}

    async def slow(call: Call) -> Answer:
        begun_s.setdefault(call.job_id, asyncio.get_running_loop().time())
        await asyncio.sleep(call_s)
        return Answer(200, BODY, Usage(), "here")

    script.answers = slow
    async with working(live, script):
        await until(lambda: _ended(live, job, company), "both jobs")
    assert begun_s[job.id] - begun_s[company.id] >= rest_s * 0.9


async def lost_alone(live: World) -> Job:
    """A job whose only item was lost alone once."""
    job = await live.started(chat_lines(1))
    lost = await live.worker()
    assert await lease_slices(live.store, lost, job.id, "m", 1, "t")
    assert await live.store.run_alone(lost, (job.id, 0))
    assert await live.store.declare_gone(lost, leaving=True)
    assert await live.store.reclaim_slices(lost) == 1
    await suspected(live, job, ALONE_AFTER)
    return job


async def test_an_item_that_no_model_server_answered_is_no_check(live: World) -> None:
    """It was not sent, for a spent budget or a server that is away, so its worker survived nothing."""
    script = Script(live, "m")
    company = await live.started(chat_lines(6))
    job = await lost_alone(live)
    marks: list[Any] = []

    async def away_at_first(call: Call) -> Answer:
        marks.append((call.job_id, *await live.rows(_MARK)))
        if len(marks) == 1:
            raise Unavailable("connection refused")
        return Answer(200, BODY, Usage(), "here")

    script.answers = away_at_first
    async with working(live, script):
        await until(lambda: _ended(live, job, company), "both jobs")
    assert marks[:2] == [(company.id, (company.id, 0)), (job.id, (job.id, 0))]


async def test_another_item_is_run_alone_before_a_suspect_that_was_lost_alone(live: World) -> None:
    script = Script(live, "m")
    company = await live.started(chat_lines(6))
    job = await lost_alone(live)
    marks: list[Any] = []

    async def slow(call: Call) -> Answer:
        marks.append((call.job_id, *await live.rows(_MARK)))
        return Answer(200, BODY, Usage(), "here")

    script.answers = slow
    async with working(live, script):
        await until(lambda: _ended(live, job, company), "both jobs")
    assert marks[:2] == [(company.id, (company.id, 0)), (job.id, (job.id, 1))]


async def test_an_item_that_was_lost_alone_three_times_fails_unsent(live: World) -> None:
    script = Script(live, "m")
    job = await live.started(chat_lines(2))
    for _ in range(3):
        lost = await live.worker()
        assert await lease_slices(live.store, lost, job.id, "m", 9, lost)
        assert await live.store.run_alone(lost, (job.id, 1), is_checked=True)
        assert await live.store.declare_gone(lost, leaving=True)
        await live.store.reclaim_slices(lost)
    async with working(live, script):
        await until(lambda: _ended(live, job), "the job")
    assert [call.number for call in script.calls] == [0]
    assert (await live.look(job)).failed_count == 1


async def _ended(world: World, *jobs: Job) -> bool:
    return all([(await world.look(job)).state is JobState.COMPLETED for job in jobs])
