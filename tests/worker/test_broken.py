"""A worker that meets an internal error hands everything back and ends; a process that has callers makes it again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from structlog.testing import capture_logs

from tests.worker.world import BODY, Script, WorkerWorld, chat_lines, options, until, working
from tidegate import metrics
from tidegate.core.errors import WorkerBroken
from tidegate.core.nouns import Answer, Call, Holding, Usage
from tidegate.stages.lease import LeaseStage
from tidegate.worker import kept_worker
from tidegate.worker.kept_worker import KeptWorker
from tidegate.worker.registration import Registration

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """What is logged is not drawn: a traceback with all its values takes seconds."""
    with capture_logs():
        yield


def gauge() -> float:
    return metrics.REGISTRY.get_sample_value("tidegate_worker_broken") or 0.0


async def test_a_broken_worker_finishes_its_calls_hands_back_the_rest_and_ends(
    live: WorkerWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = Script(live, "m", "n")
    resume_timeout = asyncio.Event()

    async def slow(call: Call) -> Answer:
        await resume_timeout.wait()
        return Answer(200, BODY, Usage(), "here")

    script.answers = slow
    job = await live.started(chat_lines(12))
    take = LeaseStage.lease_slices

    async def taken_and_lost(*arguments: Any) -> Any:
        await take(*arguments)
        raise ValueError("a bug behind the lease")

    async def breaks() -> None:
        async with working(live, script, in_flight_max=2) as run:
            await until(lambda: script.in_flight == 2, "two calls")
            monkeypatch.setattr(LeaseStage, "lease_slices", taken_and_lost)
            await live.started(chat_lines(4, "n"))
            await until(lambda: run.worker.broken is not None, "the bug")
            assert run.worker.trouble() == "ends after an internal error: ValueError in leasing"
            assert gauge() == 1
            resume_timeout.set()
            await run.over()

    with pytest.raises(WorkerBroken, match="ValueError in leasing"):
        await breaks()
    assert (await live.look(job)).answered_count == 2, "what was in flight was finished and recorded"
    rows = await live.rows("select distinct state, lost_count from slices where state <> 'done'")
    assert rows == [("ready", 0)], "what was not sent has no owner, and no owner was lost"


async def test_what_record_had_taken_is_put_back_when_it_meets_a_bug(
    live: WorkerWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = Script(live, "m")
    job = await live.started(chat_lines(4))
    record = live.store.record_outcomes
    bugs = 2

    async def buggy(*arguments: Any) -> Any:
        nonlocal bugs
        if bugs and arguments[0]:
            bugs -= 1
            raise ValueError("a bug in record")
        return await record(*arguments)

    monkeypatch.setattr(live.store, "record_outcomes", buggy)

    async def breaks() -> None:
        async with working(live, script) as run:
            await run.over()

    with pytest.raises(WorkerBroken, match="ValueError in record"):
        await breaks()
    assert len(script.calls) == (await live.look(job)).answered_count > 0
    monkeypatch.undo()
    async with working(live, Script(live, "m")):
        await live.completed(job)


class Fragile:
    """A worker that breaks as soon as it runs, or works until it is stopped."""

    def __init__(self, breaks: bool) -> None:
        self._breaks = breaks
        self._reason: str | None = None
        self.in_flight = 0

    def trouble(self) -> str | None:
        return self._reason

    def is_idle_with_room(self, model: str) -> bool:
        return not self._breaks

    async def run(self, stop: asyncio.Event) -> None:
        if self._breaks:
            self._reason = "broken"
            raise WorkerBroken("a bug")
        await stop.wait()


async def test_a_kept_worker_is_made_again_and_its_process_stays_enlisted(
    live: WorkerWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_worker, "RESTART_S", 0.01)
    me = Registration(live.store, live.clock, live.entropy, host="here", version="0", lease_ms=30_000)
    await me.enlist()
    first = me.id
    await me.leave()
    made: list[Fragile] = []

    def make() -> Fragile:
        made.append(Fragile(breaks=len(made) < 2))
        return made[-1]

    kept = KeptWorker(make, me, options(live).heartbeat_ms)
    stop = asyncio.Event()
    running = asyncio.create_task(kept.run(stop))
    await until(lambda: len(made) == 3, "a worker that works")
    assert kept.trouble() is None
    assert me.id != first
    assert await live.rows("select state from workers where id = ?", me.id) == [("alive",)]
    stop.set()
    await running


class Hours:
    """The clock of a loop in which every wait lasts as long as it may, and what a registration did at which second of it."""

    def __init__(self) -> None:
        self.now_s, self.steps = 0.0, list[tuple[str, float]]()

    def time(self) -> float:
        return self.now_s

    @asynccontextmanager
    async def timeout(self, seconds: float) -> AsyncIterator[None]:
        self.now_s += seconds
        raise TimeoutError
        yield

    async def enlist(self) -> None:
        self.steps.append(("enlist", self.now_s))

    async def beat(self) -> list[Holding] | None:
        self.steps.append(("beat", self.now_s))
        return None if self.now_s == 2.0 else []


async def test_a_kept_worker_waits_twice_as_long_after_each_error_and_its_process_stays_alive_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Up to a minute; a worker that went well for longer than that begins with a second again."""
    hours, stop, runs_s = Hours(), asyncio.Event(), iter([*[0.0] * 8, 60.0, 0.0, 60.5, 0.0])
    loop = SimpleNamespace(get_running_loop=lambda: hours, timeout=hours.timeout)
    monkeypatch.setattr(kept_worker, "asyncio", loop)

    class Breaks(Fragile):
        async def run(self, stop: asyncio.Event) -> None:
            if (lasted_s := next(runs_s, None)) is None:
                return
            hours.now_s += lasted_s
            raise WorkerBroken("a bug")

    me: Any = hours
    with capture_logs() as logged:
        await KeptWorker(lambda: Breaks(breaks=True), me, 500).run(stop)
    waits_s = [line["wait_s"] for line in logged]
    assert waits_s == [1, 2, 4, 8, 16, 32, 60, 60, 60, 60, 1, 2]
    assert hours.now_s == sum(waits_s) + 120.5
    assert hours.steps[:7] == [
        ("enlist", 0.0),
        ("beat", 0.5),
        ("enlist", 1.0),
        ("beat", 1.5),
        ("beat", 2.0),
        ("enlist", 2.0),
        ("beat", 2.5),
    ]


async def test_a_kept_worker_that_rests_leaves_when_it_is_stopped(live: WorkerWorld) -> None:
    me = Registration(live.store, live.clock, live.entropy, host="here", version="0", lease_ms=30_000)
    kept = KeptWorker(lambda: Fragile(breaks=True), me, 100)
    stop = asyncio.Event()
    running = asyncio.create_task(kept.run(stop))
    await until(lambda: bool(me.id), "a new incarnation")
    assert kept.trouble() == "broken"
    stop.set()
    await running
    assert await live.rows("select state from workers where id = ?", me.id) == [("gone",)]
