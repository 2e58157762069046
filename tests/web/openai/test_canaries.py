"""Canaries as a client sees them: what is refused, and that garbage changes nothing."""

from __future__ import annotations

from typing import Any

import httpx2
import pytest

from tests.web import stages
from tests.web.calls import create, is_error, upload
from tests.web.server import WebServer

NO_BATCH = "/v1/batches/batch_0000000000000000000000/canary"


@pytest.mark.parametrize(
    ("canary", "code", "param"),
    [
        (5, "invalid_parameter", "canary"),
        ([], "invalid_parameter", "canary"),
        ({}, "missing_required_parameter", "canary.items"),
        ({"items": 0}, "invalid_parameter", "canary.items"),
        ({"items": -1}, "invalid_parameter", "canary.items"),
        ({"items": 1.5}, "invalid_parameter", "canary.items"),
        ({"items": "5"}, "invalid_parameter", "canary.items"),
        ({"items": True}, "invalid_parameter", "canary.items"),
        ({"items": 10**30}, "invalid_parameter", "canary.items"),
        ({"items": 5, "max_error_share": 1.01}, "invalid_parameter", "canary.max_error_share"),
        ({"items": 5, "max_error_share": -0.1}, "invalid_parameter", "canary.max_error_share"),
        ({"items": 5, "max_error_share": "0.1"}, "invalid_parameter", "canary.max_error_share"),
        ({"items": 5, "then": "hope"}, "invalid_parameter", "canary.then"),
        ({"items": 5, "then": None}, "invalid_parameter", "canary.then"),
        ({"items": 5, "share": 1}, "unknown_parameter", "canary.share"),
    ],
)
def test_a_bad_canary_is_refused(client: httpx2.Client, canary: Any, code: str, param: str) -> None:
    asked = {"input_file_id": upload(client), "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    answer = client.post("/v1/batches", json={**asked, "canary": canary})
    is_error(answer, {"status": 400, "code": code, "param": param})
    assert "input_file_id" not in answer.json()["error"]["message"]
    assert client.get("/v1/batches").json()["data"] == []


def test_a_bad_word_is_refused(client: httpx2.Client) -> None:
    made = create(client, upload(client), canary={"items": 1})
    path = f"/v1/batches/{made['id']}/canary"
    for body, code, param in (
        ({}, "missing_required_parameter", "action"),
        ({"action": "hope"}, "invalid_parameter", "action"),
        ({"action": None}, "invalid_parameter", "action"),
        ({"action": ["stop"]}, "invalid_parameter", "action"),
        ({"action": "stop", "then": "wait"}, "unknown_parameter", "then"),
    ):
        is_error(client.post(path, json=body), {"status": 400, "code": code, "param": param})
    is_error(client.post(path, content=b"stop"), {"status": 415, "code": "unsupported_media_type"})
    garbage = client.post(path, content=b"{", headers={"Content-Type": "application/json"})
    is_error(garbage, {"status": 400, "code": "invalid_json"})
    assert client.get(f"/v1/batches/{made['id']}").json() == made
    is_error(client.post(NO_BATCH, json={"action": "stop"}), {"status": 404, "code": "batch_not_found"})


def test_a_word_that_has_nothing_to_follow_is_refused(web: WebServer, client: httpx2.Client) -> None:
    plain = create(client, upload(client))["id"]
    for action in ("continue", "stop"):
        answer = client.post(f"/v1/batches/{plain}/canary", json={"action": action})
        is_error(answer, {"status": 409, "code": "batch_not_changeable"})
    made = create(client, upload(client), canary={"items": 1, "then": "wait"})
    path = f"/v1/batches/{made['id']}/canary"
    assert made["tidegate"]["canary"]["state"] == "running"
    # It has not begun: there is nothing to stop but the batch itself.
    is_error(client.post(path, json={"action": "stop"}), {"status": 409, "code": "batch_not_changeable"})
    for _ in range(2):
        passed = client.post(path, json={"action": "continue"})
        assert passed.json()["tidegate"]["canary"]["state"] == "passed"
    stages.start(web, made["id"], 3)
    is_error(client.post(path, json={"action": "stop"}), {"status": 409, "code": "batch_not_changeable"})
    client.post(f"/v1/batches/{made['id']}/cancel")
    is_error(client.post(path, json={"action": "continue"}), {"status": 409, "code": "batch_not_changeable"})
