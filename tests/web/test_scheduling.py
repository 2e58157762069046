"""What a caller and an operator see of scheduling: queues, limits of a batch, the switch of modes, and metrics."""

from __future__ import annotations

from typing import Any

import httpx2
import pytest

from tests.web.calls import create, is_error, raw, upload
from tests.web.server import OPERATOR, WebServer
from tidegate import metrics
from tidegate.core.budgets.budget import Limit, Period
from tidegate.core.schedule.policy import ModeOverride


def test_a_batch_keeps_its_queue_and_its_limits(start_web: Any) -> None:
    web: WebServer = start_web(scheduler={"queues": ("default", "express")})
    with web.client() as client:
        limits = [{"period": "MINUTE", "requests": 10}, {"period": "lifetime", "tokens": 5_000, "enabled": False}]
        made = create(client, upload(client), queue="express", limits=limits)
        job = web.job(made["id"])
        assert job.queue == "express"
        assert job.limits == (Limit(Period.MINUTE, 10), Limit(Period.LIFETIME, None, 5_000, enabled=False))
        shown = client.get(f"/v1/batches/{made['id']}").json()["tidegate"]
        assert shown["queue"] == "express"
        assert shown["limits"] == [
            {"period": "minute", "requests": 10, "tokens": None, "enabled": True, "cost": None},
            {"period": "lifetime", "requests": None, "tokens": 5_000, "enabled": False, "cost": None},
        ]
        plain = create(client, upload(client), queue=None, limits=None)
        assert (plain["tidegate"]["queue"], plain["tidegate"]["limits"]) == ("default", [])


def test_an_idempotency_key_is_bound_to_limits_and_queue(client: httpx2.Client) -> None:
    file_id = upload(client)
    headers = {"Idempotency-Key": "limits"}
    body = {"input_file_id": file_id, "endpoint": "/v1/embeddings", "limits": [{"period": "minute", "requests": 1}]}
    made = client.post("/v1/batches", json=body, headers=headers).json()
    spelled = {**body, "limits": [{"period": "Minute", "requests": 1, "enabled": True}]}
    assert client.post("/v1/batches", json=spelled, headers=headers).json()["id"] == made["id"]
    other = {**body, "limits": [{"period": "minute", "requests": 2}]}
    is_error(client.post("/v1/batches", json=other, headers=headers), {"status": 422, "code": "idempotency_key_reused"})


@pytest.mark.parametrize(
    ("preference", "share_owner"),
    [
        (("organization", "team"), "tenant:"),
        (("team", "organization"), "team:"),
        (("key",), "key:"),
        (("user", "key"), "user:"),
    ],
)
def test_a_batch_counts_as_whom_the_operator_prefers(
    start_web: Any, preference: tuple[str, ...], share_owner: str
) -> None:
    web: WebServer = start_web(scheduler={"scope_preference": preference})
    key = web.make_key("acme", team="red", user="ann")
    with web.client(key) as client:
        made = create(client, upload(client))
        assert web.job(made["id"]).share_owner.startswith(share_owner)


# ---- the switch


def test_an_operator_switches_the_mode_for_every_process(start_web: Any) -> None:
    web: WebServer = start_web(scheduler={"mode": "fair_share_v1"})
    with web.client() as client:
        shown = client.get("/admin/v1/scheduler", headers=OPERATOR).json()
        assert (shown["mode"], shown["shadow_mode"], shown["mode_switched"]) == ("fair_share_v1", "none", False)
        answer = client.post(
            "/admin/v1/scheduler", json={"mode": "smart_v1", "shadow_mode": "fifo_v1"}, headers=OPERATOR
        )
        assert (answer.json()["mode"], answer.json()["shadow_mode"], answer.json()["mode_switched"]) == (
            "smart_v1",
            "fifo_v1",
            True,
        )
        assert web.run(web.store.mode_override()) == ModeOverride("smart_v1", "fifo_v1")
        client.post("/admin/v1/scheduler", json={"shadow_mode": "none"}, headers=OPERATOR)
        assert web.run(web.store.mode_override()) == ModeOverride("smart_v1", "none")
        back = client.post("/admin/v1/scheduler", json={"mode": "configured"}, headers=OPERATOR).json()
        assert (back["mode"], back["mode_switched"], back["shadow_mode"]) == ("fair_share_v1", False, "none")


def test_a_switch_of_another_version_changes_nothing(web: WebServer, client: httpx2.Client) -> None:
    for value in ('{"mode":"smart_v99","shadow_mode":"x"}', "[]", "not json", '{"mode":5}'):
        web.rewrite("insert or replace into meta (name, value) values ('mode_override', '$')".replace("$", value))
        shown = client.get("/admin/v1/scheduler", headers=OPERATOR).json()
        assert (shown["mode"], shown["shadow_mode"]) == ("smart_v1", "none")


@pytest.mark.parametrize("body", [{"mode": "smart"}, {"mode": 5}, {"shadow_mode": ""}, {"mod": "fifo_v1"}, [], "x"])
def test_a_wrong_switch_is_refused(web: WebServer, client: httpx2.Client, body: Any) -> None:
    before = web.run(web.store.mode_override())
    answer = client.post("/admin/v1/scheduler", json=body, headers=OPERATOR)
    assert answer.status_code == 400, answer.text
    assert web.run(web.store.mode_override()) == before


def test_the_switch_is_the_operator_s_alone(client: httpx2.Client) -> None:
    """Without keys, a program on this machine may look; to switch it needs the operator's token or a key with the scope."""
    assert client.get("/admin/v1/scheduler").status_code == 200
    assert client.post("/admin/v1/scheduler", json={"mode": "fifo_v1"}).status_code == 403
    assert client.get("/admin/v1/scheduler", headers={"X-Tidegate-Control": "guess"}).status_code == 401


# ---- metrics


def test_metrics_are_shown_to_this_machine_alone(web: WebServer, client: httpx2.Client) -> None:
    metrics.scheduler_decision_seconds.of("smart_v1").observe(0.003)
    shown = client.get("/metrics")
    assert shown.status_code == 200
    assert shown.headers["content-type"].startswith("text/plain")
    assert "tidegate_scheduler_decision_seconds_bucket" in shown.text
    for header in ("X-Forwarded-For: 9.9.9.9", "Forwarded: for=9.9.9.9", "X-Real-IP: 9.9.9.9"):
        request = f"GET /metrics HTTP/1.1\r\nHost: localhost\r\n{header}\r\nConnection: close\r\n\r\n".encode()
        assert raw(web, request).startswith(b"HTTP/1.1 404 ")
