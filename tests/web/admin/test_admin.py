"""The admin API: who may use it, what of every tenant it shows, what it repairs, and the audit of each change."""

from __future__ import annotations

import json
from typing import Any

import httpx2
import pytest
import structlog

from tests.web import stages
from tests.web.admin.conftest import AdminDesk
from tests.web.calls import is_error
from tests.web.server import OPERATOR, model_at
from tidegate import metrics
from tidegate.core import ids, keys
from tidegate.core.errors import StoreUnavailable
from tidegate.core.nouns import PublishTurns
from tidegate.core.ports import Present
from tidegate.core.schedule import Reason
from tidegate.web.doors import SCOPES

ABSENT = "batch_" + 22 * "0"


def test_an_admin_key_is_a_kind_of_its_own(desk: AdminDesk) -> None:
    """No scope given never means an admin's; an admin's key opens nothing of a tenant's, and one that looks changes nothing."""
    assert desk.ours.get("/admin/v1/batches").status_code == 403
    for admin in (desk.reader, desk.writer):
        assert admin.get("/admin/v1/batches").status_code == 200
        assert admin.get("/v1/files").status_code == 403
        assert admin.get(f"/v1/batches/{desk.our_batch}").status_code == 403
    before = desk.web.job(desk.our_batch)
    for verb in ("cancel", "fail", "abandon", "requeue", "retry_finalization", "pause", "resume"):
        refused = desk.reader.post(f"/admin/v1/batches/{desk.our_batch}/{verb}")
        is_error(refused, {"status": 403, "code": "insufficient_scope"})
    assert desk.reader.post("/admin/v1/keys", json={"org": "x"}).status_code == 403
    assert desk.web.job(desk.our_batch) == before
    mixed = desk.writer.post("/admin/v1/keys", json={"org": "x", "scopes": ["admin:read", "files:read"]})
    is_error(mixed, {"status": 400, "param": "scopes"})
    plain = desk.writer.post("/admin/v1/keys", json={"org": "x"}).json()
    row = desk.web.run(desk.web.store.get_key(plain["id"]))
    assert row is not None
    assert keys.scopes_from(row["scopes"]) == frozenset(SCOPES.tenant)


def test_batches_of_every_tenant_are_listed_and_found(desk: AdminDesk) -> None:
    def listed(**query: str) -> list[tuple[str, str]]:
        page = desk.reader.get("/admin/v1/batches", params=query)
        assert page.status_code == 200, page.text
        return [(one["id"], one["org"]) for one in page.json()["data"]]

    ours, theirs = (desk.our_batch, "ours"), (desk.their_batch, "theirs")
    assert sorted(listed()) == sorted([ours, theirs])
    assert listed(org="ours") == [ours]
    assert listed(org="none of them") == []
    assert listed(q=desk.their_batch) == [theirs]
    assert listed(status="completed") == []
    first = desk.reader.get("/admin/v1/batches", params={"limit": "1"}).json()
    assert first["has_more"]
    assert listed(after=first["last_id"]) != listed(limit="1")
    assert desk.reader.get(f"/admin/v1/batches/{desk.our_batch}").json()["org"] == "ours"
    for query in ({"mood": "x"}, {"org": ""}, {"org": "\0"}, {"limit": "0"}, {"after": "x"}, {"status": "asleep"}):
        assert desk.reader.get("/admin/v1/batches", params=query).status_code == 400, query
    for batch_id in (ABSENT, "x", "batch_", "%ff", "A" * 300, "'; drop table jobs; --"):
        for path in ("", "/timeline"):
            assert desk.reader.get(f"/admin/v1/batches/{batch_id}{path}").status_code == 404
        assert desk.writer.post(f"/admin/v1/batches/{batch_id}/cancel").status_code == 404


@pytest.mark.parametrize(
    ("path", "count_max"),
    [
        *(
            (f"/admin/v1/{name}", 100)
            for name in ("audit", "batches", "budgets", "deliveries", "keys", "operations", "orgs")
        ),
        ("/admin/v1/flows", 1_000),
        ("/v1/batches", 100),
        ("/v1/files", 10_000),
        ("/v1/webhook_deliveries", 100),
    ],
)
def test_a_page_of_a_list_has_a_bound(desk: AdminDesk, path: str, count_max: int) -> None:
    caller = desk.reader if path.startswith("/admin") else desk.ours
    assert caller.get(path, params={"limit": count_max}).status_code == 200
    refused = caller.get(path, params={"limit": count_max + 1})
    is_error(refused, {"status": 400, "code": "invalid_parameter", "param": "limit"})
    assert f"from 1 to {count_max:,}" in refused.text


@pytest.mark.parametrize("name", ["audit", "batches", "budgets", "deliveries", "keys", "operations", "orgs"])
def test_a_page_begins_behind_something_that_is_there(desk: AdminDesk, name: str) -> None:
    for after in ("x", ABSENT, "org_" + 22 * "0", "4611686018427387904"):
        refused = desk.reader.get(f"/admin/v1/{name}", params={"after": after})
        is_error(refused, {"status": 400, "code": "invalid_parameter", "param": "after"})


def test_each_change_is_noted_with_who_and_what(desk: AdminDesk) -> None:
    assert desk.audit() == []
    path = f"/admin/v1/batches/{desk.our_batch}"
    assert desk.writer.post(f"{path}/pause").status_code == 200
    assert desk.writer.post(f"{path}/pause").status_code == 200
    [noted] = desk.audit(target=desk.our_batch)
    writer_id = keys.public_id_of(desk.writer.headers["Authorization"].split()[1])
    assert (noted["action"], noted["actor"], noted["kind"]) == ("batch.pause", f"key:{writer_id}", "batch")
    assert noted["address"] == "127.0.0.1"
    assert noted["before"] == {"paused_at": None}
    assert noted["after"]["paused_at"] > 0
    assert desk.web.client().post(f"{path}/cancel", headers=OPERATOR).json()["status"] == "cancelling"
    assert [one["action"] for one in desk.audit(actor="operator")] == ["batch.cancel"]
    timeline = desk.reader.get(f"{path}/timeline").json()["data"]
    assert [one["event"] for one in timeline if one["actor"]] == ["batch.pause", "batch.cancel"]
    assert timeline[0]["event"] == "created"
    refused = desk.writer.post(f"{path}/pause")
    is_error(refused, {"status": 409, "code": "batch_not_pausable"})
    assert len(desk.audit()) == 2, "what was refused changed nothing"


def test_a_key_has_so_many_calls_at_once_at_most(desk: AdminDesk) -> None:
    made = desk.writer.post("/admin/v1/keys", json={"org": "acme", "parallel_max": 1_000_000}).json()
    for path, wanted in (("/admin/v1/keys", {"org": "acme"}), (f"/admin/v1/keys/{made['id']}/change", {})):
        for count in (-1, 1_000_001):
            refused = desk.writer.post(path, json={**wanted, "parallel_max": count})
            is_error(refused, {"status": 400, "param": "parallel_max"})


def test_the_audit_holds_no_secret(desk: AdminDesk) -> None:
    made = desk.writer.post("/admin/v1/keys", json={"org": "acme", "label": "ci"}).json()
    rotated = desk.writer.post(f"/admin/v1/keys/{made['id']}/rotate", json={}).json()
    desk.writer.post(f"/admin/v1/keys/{made['id']}/change", json={"models": ["m"]})
    desk.writer.post(f"/admin/v1/keys/{made['id']}/revoke", json={})
    desk.writer.post(f"/admin/v1/keys/{made['id']}/revoke", json={})
    desk.writer.post("/admin/v1/keys/delete", json={"org": "acme"})
    desk.writer.post("/admin/v1/scheduler", json={"mode": "fifo_v1"})
    noted = desk.audit()
    actions = ["key.create", "key.rotate", "key.change", "key.revoke", "org.delete_keys", "scheduler.mode"]
    assert [one["action"] for one in reversed(noted)] == actions
    text = json.dumps(noted)
    for secret in (made["key"], rotated["key"]):
        assert secret not in text
        assert secret[16:40] not in text
    assert noted[-1]["after"]["org"] == "acme"
    assert noted[1]["before"] == {"keys": [made["id"]]}
    for query in ({"actor": ""}, {"target": "\0"}, {"after": "x"}, {"mood": "x"}, {"limit": "101"}):
        assert desk.reader.get("/admin/v1/audit", params=query).status_code == 400, query
    assert len(desk.audit(limit="2")) == 2
    listed = desk.reader.get("/admin/v1/keys").json()["data"]
    assert made["id"] not in [one["id"] for one in listed]
    assert "hash" not in json.dumps(listed)


def test_times_of_a_key_are_shown_in_seconds(desk: AdminDesk) -> None:
    made = desk.writer.post("/admin/v1/keys", json={"org": "acme", "expires_after_ms": 90_000}).json()
    desk.writer.post(f"/admin/v1/keys/{made['id']}/revoke", json={})
    shown = next(one for one in desk.reader.get("/admin/v1/keys").json()["data"] if one["id"] == made["id"])
    assert {len(str(shown[name])) for name in ("created_at", "expires_at", "revoked_at")} == {10}
    assert shown["expires_at"] >= shown["created_at"] + 90


def test_why_batch_work_has_no_room_is_shown_in_the_words_of_each_process(start_web: Any) -> None:
    desk = AdminDesk(start_web(models={stages.MODEL: model_at(name="one")}))
    web, path = desk.web, f"/admin/v1/batches/{desk.our_batch}/explain"
    stages.start(web, desk.our_batch, 3)

    def shown_after(**whys: str) -> tuple[list[str], dict[str, Any]]:
        for worker, why in whys.items():
            web.run(web.store.report_to_fleet(worker, {"one": Present(1, 1, why=why)}))
        [deployment] = desk.reader.get("/admin/v1/overview").json()["deployments"]
        return deployment["tide"], desk.reader.get(path).raise_for_status().json()

    whys, explained = shown_after(first="half of it", second="rising")
    assert whys == ["half of it", "rising"]
    assert Reason.TIDE_CLOSED not in " ".join(explained["why"])
    whys, explained = shown_after(first=f"nothing ({Reason.TIDE_CLOSED})")
    assert whys == [f"nothing ({Reason.TIDE_CLOSED})", "rising"]
    assert f"interactive calls need all of it now ({Reason.TIDE_CLOSED})" in explained["waits_for"]


def test_errors_of_a_running_batch_are_counted_as_they_come(desk: AdminDesk) -> None:
    stages.start(desk.web, desk.our_batch, 2)
    line = b'{"id": "x", "custom_id": "b", "response": null, "error": {"code": "bad", "message": "no"}}\n'
    for number in range(2):
        stages.finish(desk.web, desk.our_batch, {}, {number: line})
        [kind] = desk.reader.get(f"/admin/v1/batches/{desk.our_batch}/errors").json()["data"]
        assert (kind["code"], kind["requests"]) == ("bad", number + 1)


def test_a_message_that_may_quote_a_request_is_not_in_the_list_of_items(desk: AdminDesk) -> None:
    stages.start(desk.web, desk.our_batch, 1)
    error = {"code": "bad", "message": "You wrote: a secret"}
    line = json.dumps({"id": "x", "custom_id": "b", "response": None, "error": error}).encode() + b"\n"
    stages.finish(desk.web, desk.our_batch, {}, {0: line})
    [item] = desk.reader.get(f"/admin/v1/batches/{desk.our_batch}/items").json()["data"]
    assert item["error"] == {"code": "bad", "message": ""}


def test_what_is_stuck_is_repaired(desk: AdminDesk) -> None:
    web, path = desk.web, f"/admin/v1/batches/{desk.our_batch}"
    before, rung = metrics.counted(metrics.repair_actions), web.bell.rung
    is_error(desk.writer.post(f"{path}/retry_finalization"), {"status": 409, "code": "batch_not_finalizing"})
    assert web.bell.rung == rung
    assert desk.writer.post(f"{path}/requeue").status_code == 200
    assert web.bell.rung == rung + 2, "those who read inputs and those who wait for the batch look again"
    after = metrics.counted(metrics.repair_actions)
    for name in ("retry_finalization,refused", "requeue,done"):
        assert after[name] == before.get(name, 0) + 1
    stages.start(web, desk.our_batch, 1)
    stages.finish(web, desk.our_batch, {0: b"{}\n"})
    web.run(web.store.close_job(desk.our_batch, 0))
    web.rewrite("update jobs set step_not_before = 9999999999999, step_failures = 4 where state = 'finalizing'")
    assert web.run(web.store.jobs_to_publish(PublishTurns())) == []
    assert desk.writer.post(f"{path}/retry_finalization").status_code == 200
    assert web.run(web.store.jobs_to_publish(PublishTurns())) == [desk.our_batch]
    is_error(desk.writer.post(f"{path}/fail"), {"status": 409, "code": "batch_not_failable"})
    assert desk.writer.post(f"/admin/v1/batches/{desk.their_batch}/fail").status_code == 200
    assert web.run(web.store.jobs_closing_unstarted(10)) == [desk.their_batch]
    assert web.run(web.store.end_unstarted(desk.their_batch))
    failed = desk.theirs.get(f"/v1/batches/{desk.their_batch}").json()
    assert (failed["status"], failed["errors"]["data"][0]["code"]) == ("failed", "failed_by_operator")
    again = desk.writer.post(f"/admin/v1/batches/{desk.their_batch}/fail")
    assert again.status_code == 200


def test_a_batch_whose_files_cannot_be_published_says_so_and_its_end_is_logged(desk: AdminDesk) -> None:
    web, path = desk.web, f"/admin/v1/batches/{desk.our_batch}"
    stages.start(web, desk.our_batch, 2)
    stages.finish(web, desk.our_batch, {0: b"{}\n"})
    desk.writer.post(f"{path}/cancel").raise_for_status()
    web.run(web.store.close_job(desk.our_batch, 0))
    web.rewrite("update jobs set step_not_before = 9999999999999, step_failures = 4 where state = 'finalizing'")
    explained = " ".join(desk.reader.get(f"{path}/explain").json()["why"])
    for_owner = " ".join(desk.ours.get(f"/v1/batches/{desk.our_batch}/explain").json()["why"])
    for sentences in (explained, for_owner):
        assert "Publishing its result files failed 4 times; it is tried again in" in sentences
    assert ("tidegate doctor" in explained, "tidegate doctor" in for_owner) == (True, False), (
        "that is the operator's to do"
    )
    with structlog.testing.capture_logs() as logged:
        for _ in range(2):
            assert desk.writer.post(f"{path}/abandon").json()["status"] == "failed"
    [ended] = [line for line in logged if line["event"] == "job_failed"]
    assert (ended["job"], ended["completed"], ended["failed"]) == (desk.our_batch, 1, 1)
    assert ended["log_level"] == "warning"
    assert ended["why"].startswith("An operator gave up publishing this batch")


def test_what_runs_and_waits_over_all_tenants(desk: AdminDesk) -> None:
    def got(path: str) -> Any:
        answer = desk.reader.get(f"/admin/v1/{path}")
        assert answer.status_code == 200, answer.text
        return answer.json()

    stages.start(desk.web, desk.our_batch, 3)
    overview = got("overview")
    assert {one["status"]: one["batches"] for one in overview["batches"]} == {"validating": 1, "in_progress": 1}
    [waiting] = overview["models"]
    assert (waiting["model"], waiting["batches"], waiting["requests"]) == (stages.MODEL, 1, 3)
    assert overview["workers_alive"] == 1
    assert [one["id"] for one in got("workers")["data"]] == [desk.web.worker_id]
    assert {one["name"]: one["open_batches"] for one in got("orgs")["data"]} == {"ours": 1, "theirs": 1, "ops": 0}
    [flow] = got("flows")["data"]
    assert (flow["model"], flow["org"], flow["state"], flow["weight"]) == (stages.MODEL, "ours", "awake", 1.0)
    assert got("flows?model=other")["data"] == []
    assert desk.writer.post("/admin/v1/flows/refresh").json() == {"refreshed": 0}
    assert got("model_capacity")["object"] == "list"
    for path in (
        "overview?x=1",
        "workers?x=1",
        "flows?limit=0",
        "orgs?after=x",
        "model_capacity?x=1",
        "deliveries?status=x",
    ):
        assert desk.reader.get(f"/admin/v1/{path}").status_code == 400, path


def test_a_process_whose_heartbeat_is_overdue_is_shown_as_lost(desk: AdminDesk) -> None:
    silent = ids.make("worker", bytes(ids.RANDOM_BYTES))
    desk.web.run(desk.web.store.enlist_worker(silent, "host", "1", lease_ms=0))
    shown = {one["id"]: one["state"] for one in desk.reader.get("/admin/v1/workers").json()["data"]}
    assert shown == {desk.web.worker_id: "alive", silent: "lost"}


def test_an_autoscaler_learns_how_many_are_needed(desk: AdminDesk) -> None:
    def got(path: str) -> Any:
        answer = desk.reader.get(f"/admin/v1/autoscale{path}")
        assert answer.status_code == 200, answer.text
        return answer.json()

    assert got("/workers") == {
        "replicas_needed": 1,
        "why": "Inputs, ended batches, operations or deliveries wait for a worker.",
    }
    stages.start(desk.web, desk.our_batch, 3)
    needed = got("")
    assert needed["models"][stages.MODEL]["replicas_needed"] == 1
    assert got(f"/models/{stages.MODEL}") == needed["models"][stages.MODEL]
    assert needed["workers"]["replicas_needed"] == 1
    assert got("/models/absent/or%20not") == {"replicas_needed": 0, "why": "Nothing waits.", "scale_by": 0.0}
    assert desk.reader.get("/admin/v1/autoscale?x=1").status_code == 400


def test_a_delivery_of_any_tenant_is_sent_again(desk: AdminDesk) -> None:
    endpoint = {"name": "one", "url": "https://hooks.example.com/", "event_types": ["batch.cancelled"]}
    assert desk.ours.post("/v1/webhook_endpoints", json=endpoint).status_code == 200
    desk.ours.post(f"/v1/batches/{desk.our_batch}/cancel")
    assert desk.web.run(desk.web.store.end_unstarted(desk.our_batch))
    [delivery] = desk.reader.get("/admin/v1/deliveries").json()["data"]
    assert (delivery["org"], delivery["batch_id"], delivery["status"]) == ("ours", desk.our_batch, "pending")
    desk.web.rewrite("update webhook_deliveries set state = 'failed', attempt_count = 10")
    path = f"/admin/v1/deliveries/{delivery['id']}/replay"
    assert desk.reader.post(path).status_code == 403
    assert desk.writer.post(path).json()["status"] == "pending"
    assert [one["action"] for one in desk.audit(target=delivery["id"])] == ["delivery.replay"]
    for other in ("x", "evt_x.whk_x", delivery["id"][:-1] + "-", delivery["id"].replace("evt_", "evt_0")):
        assert desk.writer.post(f"/admin/v1/deliveries/{other}/replay").status_code == 404
    assert desk.reader.get("/admin/v1/deliveries", params={"after": "x"}).status_code == 400
    assert desk.reader.get("/admin/v1/deliveries", params={"after": delivery["id"]}).json()["data"] == []


def test_what_is_asked_while_the_store_is_gone_is_refused_for_now(
    desk: AdminDesk, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def gone(body: Any) -> Any:
        raise StoreUnavailable("the database is away")

    for way in ("read", "write"):
        monkeypatch.setattr(desk.web.store._driver, way, gone)
    for client, method, path in (
        (desk.reader, "GET", "/admin/v1/batches"),
        (desk.reader, "GET", "/admin/v1/audit"),
        (desk.writer, "POST", f"/admin/v1/batches/{desk.our_batch}/cancel"),
    ):
        answer: httpx2.Response = client.request(method, path)
        assert answer.status_code == 503, answer.text


def test_a_deployment_is_drained_resumed_and_refreshed(start_web: Any) -> None:
    """Of the settings' own, and of those added; each change is noted once, and one who only looks may do none of it."""
    desk = AdminDesk(start_web(models={"m": model_at(name="steady/1")}))
    path = "/admin/v1/deployments/steady/1"

    def shown() -> dict[str, Any]:
        found: dict[str, Any] = desk.reader.get("/admin/v1/deployments").json()["data"][0]
        return found

    for verb in ("drain", "resume", "refresh"):
        is_error(desk.reader.post(f"{path}/{verb}"), {"status": 403, "code": "insufficient_scope"})
        is_error(desk.ours.post(f"{path}/{verb}"), {"status": 403, "code": "insufficient_scope"})
        absent = desk.writer.post(f"/admin/v1/deployments/<b>/{verb}")
        is_error(absent, {"status": 404, "code": "entry_not_found"})
    first = desk.writer.post(f"{path}/drain").json()
    assert (shown()["is_drained"], first["name"]) == (True, "steady/1")
    assert desk.writer.post(f"{path}/drain").json() == first, "twice is fine"
    desk.writer.post(f"{path}/refresh").raise_for_status()
    assert shown()["is_drained"] is True, "it is tried again, and gets no calls"
    assert desk.writer.post(f"{path}/resume").json()["revision"] > first["revision"]
    assert shown()["is_drained"] is False
    asked = desk.writer.post(f"{path}/refresh").json()
    assert (asked["reachable"], asked["status"], asked["models"]) == (False, 0, [])
    assert asked["message"]
    noted = [(one["action"], one["target"]) for one in desk.audit(target="steady/1")]
    assert noted == [(f"deployment.{verb}", "steady/1") for verb in ("refresh", "resume", "refresh", "drain")]
    assert desk.audit(target="steady/1")[-1]["actor"].startswith("key:")
