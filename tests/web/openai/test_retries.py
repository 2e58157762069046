"""Retries as a client sees them: what is refused, what the new batch says, and that garbage changes nothing."""

from __future__ import annotations

from typing import Any

import httpx2
import pytest

from tests.web import stages
from tests.web.calls import create, is_error, upload
from tests.web.server import WebServer
from tidegate import tracing
from tidegate.core.states import Outcome


def ended(web: WebServer, client: httpx2.Client, **more: Any) -> str:
    """A batch with an answer, an error and a request that never ran."""
    batch_id = stages.running(web, client, 3, **more)
    stages.finish(web, batch_id, {0: b"{0}\n"}, {1: b"{1}\n"})
    client.post(f"/v1/batches/{batch_id}/cancel")
    stages.publish(web, batch_id, {2: b"{2}\n"}, Outcome.CANCELLED)
    return batch_id


def test_a_retry_is_a_new_batch_with_the_answers_of_both(web: WebServer, client: httpx2.Client) -> None:
    batch_id = ended(web, client, metadata={"k": "v"}, max_errors={"count": 7}, priority=3)
    rung = web.bell.rung
    made = client.post(f"/v1/batches/{batch_id}/retry").json()
    assert web.bell.rung > rung
    assert (made["status"], made["metadata"], made["tidegate"]["priority"]) == ("validating", {"k": "v"}, 3)
    assert made["tidegate"]["max_errors"]["count"] == 7
    assert made["tidegate"]["retry_of"] == batch_id
    first = client.get(f"/v1/batches/{batch_id}").json()
    assert first["tidegate"]["retried_by"] == [made["id"]]
    listed = client.get("/v1/batches", params={"limit": 1}).json()["data"][0]
    assert (listed["id"], listed["tidegate"]["retry_of"]) == (made["id"], batch_id)
    stages.start(web, made["id"], 1)
    assert client.get(f"/v1/batches/{made['id']}").json()["tidegate"]["merged_output_file_id"] is None
    stages.finish(web, made["id"], {0: b"{again}\n"})
    stages.publish(web, made["id"])
    merged = client.get(f"/v1/batches/{made['id']}").json()["tidegate"]["merged_output_file_id"]
    assert client.get(f"/v1/files/{merged}/content").content == b"{0}\n{again}\n"
    assert merged in [one["id"] for one in client.get("/v1/files", params={"purpose": "batch_output"}).json()["data"]]


def test_a_retry_is_traced_like_a_batch(web: WebServer, client: httpx2.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    batch_id = ended(web, client)
    tracing.start("0")
    try:
        made = client.post(f"/v1/batches/{batch_id}/retry").json()
    finally:
        tracing.stop(0)
    assert web.job(batch_id).traceparent is None
    assert len(web.job(made["id"]).traceparent or "") == 55


def test_a_webhook_of_the_retry_has_a_secret_of_its_own(start_web: Any) -> None:
    web: WebServer = start_web(callbacks={"allow_http": True, "allow_hosts": ["localhost"]})
    with web.client() as client:
        batch_id = ended(web, client, webhook={"url": "http://localhost:9/h"})
        made = client.post(f"/v1/batches/{batch_id}/retry", json={}).json()
        assert made["tidegate"]["webhook"]["signing_secret"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"codes": "x"}, "codes"),
        ({"codes": [""]}, "codes[0]"),
        ({"codes": ["x" * 129]}, "codes[0]"),
        ({"codes": ["x"] * 101}, "codes"),
        ({"codes": [1]}, "codes[0]"),
        ({"outcomes": []}, "outcomes"),
        ({"outcomes": ["answered"]}, "outcomes[0]"),
        ({"outcomes": {"failed": True}}, "outcomes"),
    ],
)
def test_a_bad_choice_of_lines_is_refused(web: WebServer, client: httpx2.Client, body: Any, param: str) -> None:
    answer = client.post("/v1/batches/batch_0000000000000000000000/retry", json=body)
    is_error(answer, {"status": 400, "code": "invalid_parameter", "param": param})
    assert "must be a list of" in answer.json()["error"]["message"]


def test_an_unknown_field_and_no_json_are_refused(client: httpx2.Client) -> None:
    path = "/v1/batches/batch_0000000000000000000000/retry"
    is_error(client.post(path, json={"code": "x"}), {"status": 400, "code": "unknown_parameter", "param": "code"})
    is_error(client.post(path, content=b"{"), {"status": 415, "code": "unsupported_media_type"})
    is_error(
        client.post(path, content=b"{", headers={"Content-Type": "application/json"}),
        {"status": 400, "code": "invalid_json"},
    )
    is_error(client.post(path, json={}), {"status": 404, "code": "batch_not_found"})


def test_what_has_not_ended_or_has_nothing_to_run_is_refused(web: WebServer, client: httpx2.Client) -> None:
    batch_id = create(client, upload(client))["id"]
    path = f"/v1/batches/{batch_id}/retry"
    is_error(client.post(path), {"status": 409, "code": "batch_not_ended"})
    stages.start(web, batch_id, 1)
    is_error(client.post(path), {"status": 409, "code": "batch_not_ended"})
    stages.finish(web, batch_id, {0: b"{0}\n"})
    stages.publish(web, batch_id)
    is_error(client.post(path), {"status": 409, "code": "batch_not_retryable"})
    other = f"/v1/batches/{ended(web, client)}/retry"
    answer = client.post(other, json={"outcomes": ["expired"]})
    is_error(answer, {"status": 409, "code": "batch_not_retryable"})
    assert "1 failed, 1 cancelled" in answer.json()["error"]["message"]
