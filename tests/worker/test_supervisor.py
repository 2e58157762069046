"""The services of a worker: one that fails runs again, and one that meets an internal error ends the worker."""

from __future__ import annotations

import asyncio

import pytest

from tidegate import metrics
from tidegate.core.errors import BlobUnavailable, LostRace, StoreUnavailable
from tidegate.worker.supervisor import Supervisor

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidegate.worker.supervisor._RETRY_S", 0)


async def test_a_worker_waits_until_it_is_stopped() -> None:
    supervisor, stop, before = Supervisor(), asyncio.Event(), asyncio.all_tasks()
    waiting = asyncio.create_task(supervisor.wait(stop))
    await asyncio.sleep(0.01)
    assert not waiting.done()
    stop.set()
    async with asyncio.timeout(60):
        await waiting
    assert supervisor.broken is None
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == before


@pytest.mark.parametrize("error", [StoreUnavailable("away"), BlobUnavailable("away"), LostRace("taken")])
async def test_a_service_runs_again_after_a_failure_that_passes(error: Exception) -> None:
    supervisor, again, runs = Supervisor(), asyncio.Event(), []

    async def service() -> None:
        runs.append(error)
        if len(runs) < 3:
            raise error
        again.set()

    supervisor.start("lease", service)
    async with asyncio.timeout(60):
        await again.wait()
    assert supervisor.is_working
    assert supervisor.broken is None
    await supervisor.cancel_services()
    assert len(runs) == 3


async def test_an_internal_error_ends_the_wait_and_names_the_first_service_that_met_it() -> None:
    metrics.worker_broken.set(0)
    supervisor, broken_again = Supervisor(), asyncio.Event()
    runs: list[str] = []

    async def service() -> None:
        runs.append("lease")
        if len(runs) > 2:
            broken_again.set()
        raise KeyError("never foreseen") if len(runs) == 1 else ValueError("and another")

    supervisor.start("lease", service)
    async with asyncio.timeout(60):
        await supervisor.wait(asyncio.Event())
        await broken_again.wait()
    assert supervisor.broken == "KeyError in lease"
    assert metrics.worker_broken._value.get() == 1
    metrics.worker_broken.set(0)
    assert not supervisor.is_working
    await supervisor.cancel_services()


async def test_a_worker_that_stops_takes_nothing_new_while_its_services_go_on() -> None:
    supervisor, ended = Supervisor(), []

    async def service() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append("ended")

    supervisor.start("record", service)
    await asyncio.sleep(0)
    assert supervisor.is_working
    supervisor.stop()
    assert not supervisor.is_working
    await asyncio.sleep(0.01)
    assert ended == []
    await supervisor.cancel_services()
    assert ended == ["ended"]
