"""A pass of the upkeep lets go of what has outlived its time, and of nothing before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from tests.worker.world import WorkerWorld, chat_lines
from tidegate.core.errors import ApiProblem
from tidegate.core.files import NewFile
from tidegate.core.nouns import Caller, KeepTimes
from tidegate.core.states import JobState
from tidegate.stages.ship import Ship
from tidegate.stages.tend import deadlines, retention

pytestmark = pytest.mark.anyio

DAY_MS = 86_400_000
KEEP = KeepTimes(metadata_ms=3 * DAY_MS, audit_ms=9 * DAY_MS, scan_max=7)


class Noting:
    """A store that notes what it is asked."""

    def __init__(self, world: WorkerWorld) -> None:
        self._inner = world.store
        self.asked: dict[str, tuple[object, ...]] = {}

    def __getattr__(self, name: str) -> Callable[..., Any]:
        verb = getattr(self._inner, name)

        async def note(*values: object) -> Any:
            self.asked[name] = values
            return await verb(*values)

        return note


async def test_a_pass_looks_at_everything_that_is_kept_for_a_time(world: WorkerWorld) -> None:
    store: Any = Noting(world)
    assert await retention.tend(store, KEEP) == 0
    assert store.asked == {
        "look_at_clock": (),
        "expired_files": (7,),
        "overdue_uploads": (7,),
        "deleted_responses": (7,),
        "ended_jobs": (3 * DAY_MS, 7),
        "prune_files": (3 * DAY_MS, 7),
        "prune_uploads": (3 * DAY_MS,),
        "prune_webhooks": (3 * DAY_MS, 7),
        "prune_operations": (3 * DAY_MS,),
        "chain_audit": (7,),
        "prune_audit": (9 * DAY_MS, 7),
        "prune_workers": (DAY_MS,),
        "prune_sessions": (DAY_MS,),
        "prune_budgets": (DAY_MS // 24, 7),
        "prune_usage_writers": (),
        "forget_fleet_reports": (),
    }


async def _file(world: WorkerWorld, caller: Caller, expires_after_ms: int | None) -> str:
    blob_id = world.id("blob")
    await world.store.begin_blob(blob_id, "upload", await world.worker())
    stamp = await (await world.blobs.create(blob_id)).finish()
    new = NewFile(world.id("file"), blob_id, stamp, "batch", "in.jsonl", 0, expires_after_ms)
    return (await world.store.create_file(caller, new)).id


async def test_files_go_when_their_time_is_over_and_one_that_is_read_keeps_no_other(world: WorkerWorld) -> None:
    caller = await world.caller()
    brief = [await _file(world, caller, 1_000) for _ in range(2)]
    kept = [await _file(world, caller, 2_000), await _file(world, caller, None)]

    class Busy(Noting):
        async def delete_file(self, tenant_id: str, file_id: str) -> bool:
            if file_id == busy:
                raise ApiProblem(409, "file_in_use", "a batch reads it")
            return await world.store.delete_file(tenant_id, file_id)

    busy = ""
    store: Any = Busy(world)
    assert await retention.tend(store, KEEP) == 0
    world.clock.advance(1_001)
    busy = (await world.store.expired_files(7))[0][1]
    assert await retention.tend(store, KEEP) == 1
    busy = ""
    assert await retention.tend(store, KEEP) == 1
    page = await world.store.list_files(caller.tenant_id, after=None, count_max=10)
    assert page is not None
    assert {file.id for file in page} == set(kept)
    assert not {file.id for file in page} & set(brief)


async def test_a_jobs_records_go_when_it_ended_long_ago(world: WorkerWorld) -> None:
    ended, running = await world.started(chat_lines(1)), await world.started(chat_lines(1))
    await world.store.cancel_job(ended.tenant_id, ended.id)
    assert await world.store.close_job(ended.id, 0)
    ship = Ship(world.store, world.blobs, world.entropy, world.scratch, replace(KEEP, failed_ms=1_000))
    assert await ship.publish_all(await world.worker()) == 1
    world.clock.advance(3 * DAY_MS)
    assert await world.store.any_job(ended.id) is not None
    await retention.tend(world.store, KEEP)
    assert await world.store.any_job(ended.id) is not None
    world.clock.advance(1_000)
    assert await retention.tend(world.store, KEEP) == 1
    assert await world.store.any_job(ended.id) is None
    assert await world.store.any_job(running.id) is not None


async def test_uploads_whose_time_is_over_are_let_go_of_and_counted(world: WorkerWorld) -> None:
    class Overdue(Noting):
        async def overdue_uploads(self, count_max: int) -> list[tuple[str, str]]:
            return [("tenant_1", "upload_1"), ("tenant_2", "upload_2")]

        async def expire_upload(self, tenant_id: str, upload_id: str) -> bool:
            expired.append((tenant_id, upload_id))
            # One ended otherwise meanwhile.
            return upload_id == "upload_1"

    expired: list[tuple[str, str]] = []
    store: Any = Overdue(world)
    assert await retention.tend(store, KEEP) == 1
    assert expired == [("tenant_1", "upload_1"), ("tenant_2", "upload_2")]


async def test_jobs_expire_when_their_window_has_passed_and_not_before(world: WorkerWorld) -> None:
    jobs = [await world.started(chat_lines(1), window_ms=window_ms) for window_ms in (10_000, 10_000, 60_000)]
    began_ms = int(world.clock.monotonic)
    assert await deadlines.tend(world.store) == 0
    world.clock.advance(began_ms + 10_001)
    assert await deadlines.tend(world.store) == 2
    assert await deadlines.tend(world.store) == 0
    assert [(await world.look(job)).closing for job in jobs] == [JobState.EXPIRED, JobState.EXPIRED, None]


async def test_jobs_that_were_closed_before_they_were_read_end(world: WorkerWorld) -> None:
    cancelled, waiting = await world.job(chat_lines(1)), await world.job(chat_lines(1))
    assert await deadlines.tend(world.store) == 0
    await world.store.cancel_job(cancelled.tenant_id, cancelled.id)
    assert await deadlines.tend(world.store) == 1
    assert [(await world.look(job)).state for job in (cancelled, waiting)] == [JobState.CANCELLED, JobState.VALIDATING]
    assert await deadlines.tend(world.store) == 0
