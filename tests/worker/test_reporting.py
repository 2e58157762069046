"""What a process reports of itself and of its deployments: written while something is wrong, and once when it is over."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import pytest
from msgspec.structs import fields
from structlog.testing import capture_logs

from tests.worker.world import WorkerWorld, until
from tidegate.core.errors import BlobUnavailable
from tidegate.core.ports import DeploymentTrouble, WorkerReport
from tidegate.upstream.routing.deployment_status import DeploymentStatus
from tidegate.worker.registration import Registration
from tidegate.worker.reporting import Reporting

pytestmark = pytest.mark.anyio


class Unwritable:
    """Blobs that refuse every write."""

    async def check(self) -> None:
        raise BlobUnavailable("access denied")


def status(name: str, open_for_ms: int | None = None) -> DeploymentStatus:
    unmoved: Any = dict.fromkeys((one.name for one in fields(DeploymentStatus) if one.required), 0)
    known: dict[str, Any] = {
        "name": name,
        "models": ("m",),
        "failures": {},
        "last_failure": "refused",
        "open_for_ms": open_for_ms,
    }
    return DeploymentStatus(**unmoved | known)


async def registered(live: WorkerWorld) -> Registration:
    me = Registration(live.store, live.clock, live.entropy, host="here", version="0", lease_ms=30_000)
    await me.enlist()
    return me


async def reports(live: WorkerWorld) -> list[WorkerReport]:
    return [one.report for one in await live.store.worker_reports()]


async def test_trouble_is_reported_and_taken_back_also_under_a_new_incarnation(live: WorkerWorld) -> None:
    me, troubles, places = await registered(live), ["ends after an internal error"], [status("a"), status("b", 5_000)]
    reporting = Reporting(live.store, live.blobs, me, lambda: places, lambda: troubles[0] if troubles else None)
    await reporting.report()
    down = (DeploymentTrouble("b", False, 5_000, "refused"),)
    assert await reports(live) == [WorkerReport("ends after an internal error", down)]
    await me.leave()
    await me.enlist()
    troubles.clear()
    await reporting.report()
    assert (await reports(live)).count(WorkerReport("", down)) == 1
    places[1] = status("b")
    await reporting.report()
    assert WorkerReport() in await reports(live)


async def test_a_report_is_written_when_it_changes_and_not_at_each_look(
    live: WorkerWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    written, report_worker = list[str](), live.store.report_worker

    async def noted(worker_id: str, report: WorkerReport) -> None:
        written.append(report.trouble)
        await report_worker(worker_id, report)

    monkeypatch.setattr(live.store, "report_worker", noted)
    trouble = ""
    reporting = Reporting(live.store, live.blobs, await registered(live), lambda: (), lambda: trouble)
    for trouble in ("", "", "broken", "broken", "", ""):  # noqa: B007 - the report reads it
        await reporting.report()
    assert written == ["broken", ""]


async def test_answers_that_cannot_be_kept_are_reported_and_logged_once(live: WorkerWorld) -> None:
    blobs: Any = Unwritable()
    reporting = Reporting(live.store, blobs, await registered(live), lambda: (), lambda: None)

    async def cannot_keep() -> bool:
        return await reports(live) == [WorkerReport("it cannot keep answers: access denied")]

    with capture_logs() as logged:
        running = asyncio.create_task(reporting.run())
        try:
            await until(cannot_keep, "the report")
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
    assert [one["event"] for one in logged] == ["blobs_unwritable"]


async def test_blobs_that_do_not_answer_are_named_before_they_count_as_away(
    live: WorkerWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidegate.worker.reporting.UNANSWERED_S", 0.01)
    monkeypatch.setattr("tidegate.worker.reporting.EVERY_S", 0.01)
    monkeypatch.setattr("tidegate.worker.reporting.CHECK_BLOBS_S", 0.01)
    answers: asyncio.Queue[Exception | None] = asyncio.Queue()

    class Silent:
        async def check(self) -> None:
            if error := await answers.get():
                raise error

    blobs: Any = Silent()
    reporting = Reporting(live.store, blobs, await registered(live), lambda: (), lambda: None)

    async def says(part: str) -> bool:
        return any(part in one.trouble for one in await reports(live))

    async def says_nothing() -> bool:
        return all(not one.trouble for one in await reports(live))

    with capture_logs() as logged:
        running = asyncio.create_task(reporting.run())
        try:
            await until(partial(says, "check blobs.url"), "the report of a silence")
            answers.put_nowait(BlobUnavailable("refused"))
            await until(partial(says, "refused"), "the report of a refusal")
            answers.put_nowait(BlobUnavailable("out of space"))
            await until(partial(says, "out of space"), "the report of another refusal")
            answers.put_nowait(None)
            await until(says_nothing, "the end of it")
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
    assert [one["event"] for one in logged] == ["blobs_unanswered", "blobs_unwritable"]
