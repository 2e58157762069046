"""Operations through the admin API: the impact before, the progress after, who may ask, and what is refused."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

from tests.support.ports import FairDice
from tests.web import stages
from tests.web.admin.conftest import AdminDesk
from tests.web.calls import is_error
from tidegate.core.errors import StoreUnavailable
from tidegate.stages.operate import OperateStage, job_verbs
from tidegate.store.operators.operations import OperationStep

OPERATIONS = "/admin/v1/operations"


def carry_out(desk: AdminDesk) -> None:
    """What a worker does until nothing waits."""
    web = desk.web
    stage = OperateStage(web.store, FairDice(), web.context.wakes, job_verbs(FairDice(), 1000))
    while web.run(stage.next_step(web.worker_id)):
        pass


def test_a_store_that_is_too_slow_for_a_step_is_given_a_smaller_one(
    desk: AdminDesk, monkeypatch: pytest.MonkeyPatch
) -> None:
    for batch in (desk.our_batch, desk.their_batch):
        stages.start(desk.web, batch, 3)
    made = desk.writer.post(OPERATIONS, json={"action": "pause", "filter": {}}).json()
    web, take = desk.web, desk.web.store.step_operation
    stage = OperateStage(web.store, FairDice(), web.context.wakes, job_verbs(FairDice(), 1000))
    sizes: list[int] = []

    async def slow(step: OperationStep) -> None:
        sizes.append(len(step.jobs))
        if len(step.jobs) > 1:
            raise StoreUnavailable("the transaction took too long")
        await take(step)

    monkeypatch.setattr(web.store, "step_operation", slow)
    for _ in range(10):
        with contextlib.suppress(StoreUnavailable):
            if not web.run(stage.next_step(web.worker_id)):
                break
    assert desk.writer.get(f"{OPERATIONS}/{made['id']}").json()["done"] == 2
    assert sizes[0] == 2
    assert sizes.count(1) == 2


def test_the_impact_is_shown_before_and_the_progress_after(desk: AdminDesk) -> None:
    for batch in (desk.our_batch, desk.their_batch):
        stages.start(desk.web, batch, 3)
    wanted: dict[str, Any] = {"action": "pause", "filter": {"org": "ours"}}
    seen = desk.writer.post(OPERATIONS, json={**wanted, "dry_run": True}).json()
    assert (seen["id"], seen["status"], seen["filter"]) == (None, "dry_run", {"org": "ours"})
    assert (seen["matched"]["jobs"], seen["matched"]["items"], seen["matched"]["cost"]) == (1, 3, "0")
    assert seen["matched"]["first_deadline"] == desk.web.job(desk.our_batch).expires_at // 1000
    assert desk.audit() == []
    rung = desk.web.bell.rung
    made = desk.writer.post(OPERATIONS, json=wanted).json()
    assert desk.web.bell.rung == rung + 1, "a worker begins at once"
    assert (made["status"], made["done"], made["matched"]) == ("running", 0, seen["matched"])
    carry_out(desk)
    now = desk.reader.get(f"{OPERATIONS}/{made['id']}").json()
    assert (now["status"], now["done"], now["failed"]) == ("completed", 1, 0)
    assert made["created_at"] <= now["ended_at"] <= made["created_at"] + 600
    assert desk.web.job(desk.our_batch).paused_at is not None
    assert desk.web.job(desk.their_batch).paused_at is None
    [noted] = desk.audit(target=desk.our_batch)
    assert (noted["action"], noted["actor"]) == ("batch.pause", f"operation:{made['id']}")
    assert [one["action"] for one in desk.audit(target=made["id"])] == ["operation.create"]
    is_error(desk.writer.post(f"{OPERATIONS}/{made['id']}/cancel"), {"status": 409, "code": "operation_ended"})
    assert [one["id"] for one in desk.reader.get(OPERATIONS).json()["data"]] == [made["id"]]


def test_failed_requests_of_every_batch_run_again_once(desk: AdminDesk) -> None:
    ids = []
    for client in (desk.ours, desk.theirs):
        batch = stages.running(desk.web, client, 2)
        line = b'{"id": "x", "custom_id": "b", "response": null, "error": {"code": "bad", "message": "no"}}\n'
        stages.finish(desk.web, batch, {0: b"{}\n"}, {1: line})
        stages.publish(desk.web, batch)
        ids.append(batch)
    wanted = {"action": "retry", "filter": {}}
    seen = desk.writer.post(OPERATIONS, json={**wanted, "dry_run": True}).json()["matched"]
    assert (seen["jobs"], seen["items"], seen["tokens"], seen["first_deadline"]) == (2, 2, 30, None)
    made = desk.writer.post(OPERATIONS, json=wanted).json()
    carry_out(desk)
    assert desk.reader.get(f"{OPERATIONS}/{made['id']}").json()["done"] == 2
    for batch in ids:
        [retry] = desk.web.job(batch).retried_by
        assert desk.web.job(retry).retry_of == batch
        assert [one["action"] for one in desk.audit(target=batch)] == ["batch.retry"]
    assert desk.writer.post(OPERATIONS, json={**wanted, "dry_run": True}).json()["matched"]["jobs"] == 0
    again = desk.writer.post(f"/admin/v1/batches/{ids[0]}/retry").json()
    assert again["id"] == desk.web.job(ids[0]).retried_by[0], "the same retry is made once"


def test_an_operation_that_is_cancelled_while_it_is_carried_out_stops_there(
    desk: AdminDesk, monkeypatch: pytest.MonkeyPatch
) -> None:
    for batch in (desk.our_batch, desk.their_batch):
        stages.start(desk.web, batch, 3)
    made = desk.writer.post(OPERATIONS, json={"action": "pause", "filter": {}}).json()
    web, take = desk.web, desk.web.store.step_operation
    stage = OperateStage(web.store, FairDice(), web.context.wakes, job_verbs(FairDice(), 1000))

    async def late(step: OperationStep) -> None:
        await web.store.cancel_operation(made["id"])
        await take(step)

    monkeypatch.setattr(web.store, "step_operation", late)
    assert web.run(stage.next_step(web.worker_id))
    assert [web.job(batch).paused_at for batch in (desk.our_batch, desk.their_batch)] == [None, None]
    now = desk.reader.get(f"{OPERATIONS}/{made['id']}").json()
    assert (now["status"], now["done"], now["failed"]) == ("cancelled", 0, 0)


def test_a_cancelled_operation_changes_nothing(desk: AdminDesk) -> None:
    made = desk.writer.post(OPERATIONS, json={"action": "cancel", "filter": {}}).json()
    for _ in range(2):
        assert desk.writer.post(f"{OPERATIONS}/{made['id']}/cancel").json()["status"] == "cancelled"
    carry_out(desk)
    assert desk.web.job(desk.our_batch).closing is None
    assert [one["action"] for one in desk.audit(target=made["id"])] == ["operation.cancel", "operation.create"]


def test_what_no_operation_is_is_refused(desk: AdminDesk) -> None:
    good: dict[str, Any] = {"action": "cancel", "filter": {}}
    filters: list[Any] = [
        None,
        [],
        {"mood": "x"},
        {"status": "asleep"},
        {"org": ""},
        {"org": "\0"},
        {"q": "x" * 600},
        {"model": "\0"},
        {"created_after": -1},
        {"created_after": 1e30},
        {"created_before": "x"},
        {"metadata": {str(n): "x" for n in range(9)}},
        {"metadata": {"x" * 65: "x"}},
        {"metadata": {"a": 1}},
        {"metadata": {"\0": "x"}},
    ]
    changes: list[dict[str, Any]] = [
        {},
        {"action": "cancel"},
        {"filter": {}},
        {**good, "action": "explode"},
        {**good, "action": "'; drop table jobs; --"},
        {**good, "mood": 1},
        {**good, "dry_run": "yes"},
    ]
    for wrong in (*changes, *({**good, "filter": bad} for bad in filters)):
        for dry_run in (True, False):
            refused = desk.writer.post(OPERATIONS, json={"dry_run": dry_run, **wrong})
            assert refused.status_code == 400, (wrong, refused.text)
    for odd in ({"q": "' or 1=1 --"}, {"q": "%_\\"}, {"metadata": {'"]': '"}'}}, {"org": "<script>"}):
        seen = desk.writer.post(OPERATIONS, json={**good, "filter": odd, "dry_run": True})
        assert (seen.status_code, seen.json()["matched"]["jobs"]) == (200, 0), odd
        assert seen.json()["filter"] == odd
    for operation_id in ("x", "op_" + 22 * "0", "%ff", "A" * 300):
        assert desk.reader.get(f"{OPERATIONS}/{operation_id}").status_code == 404
        assert desk.writer.post(f"{OPERATIONS}/{operation_id}/cancel").status_code == 404
    for query in ({"mood": "x"}, {"after": "x"}, {"after": "op_" + 22 * "0"}, {"limit": "0"}):
        assert desk.reader.get(OPERATIONS, params=query).status_code == 400, query
    is_error(desk.reader.post(OPERATIONS, json=good), {"status": 403, "code": "insufficient_scope"})
    assert desk.ours.post(OPERATIONS, json=good).status_code == 403
    assert desk.web.client().post(OPERATIONS, json=good).status_code == 401
    assert desk.audit() == []
    assert desk.reader.get(OPERATIONS).json()["data"] == []
