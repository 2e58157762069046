"""`answers` on create: what may be asked of answers, and what is refused before a job is made."""

from __future__ import annotations

from typing import Any

import httpx2
import pytest

from tests.web.calls import create, is_error, upload
from tests.web.server import WebServer, model_at

CHAT = "/v1/chat/completions"
SCHEMA = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}


def test_what_is_asked_of_answers_is_read_back(client: httpx2.Client) -> None:
    made = create(client, upload(client), endpoint=CHAT, answers={"schema": SCHEMA, "tries_max": 0, "feedback": True})[
        "tidegate"
    ]
    assert made["answers"] == {"schema": SCHEMA, "tries_max": 0, "feedback": True, "escalate_to": None}
    assert made["schema_invalid"] == 0
    own = create(client, upload(client), endpoint=CHAT, answers={"schema": "response_format"})["tidegate"]["answers"]
    assert own == {"schema": "response_format", "tries_max": 2, "feedback": False, "escalate_to": None}
    assert create(client, upload(client))["tidegate"]["answers"] is None


@pytest.mark.parametrize(
    ("answers", "param", "code"),
    [
        ({}, "answers.schema", "missing_required_parameter"),
        ({"schema": 3}, "answers.schema", "invalid_parameter"),
        ({"schema": "own"}, "answers.schema", "invalid_parameter"),
        ({"schema": {"type": "objekt"}}, "answers.schema", "invalid_schema"),
        ({"schema": {"propertys": {}}}, "answers.schema", "invalid_schema"),
        ({"schema": {"$ref": "http://169.254.169.254/"}}, "answers.schema", "invalid_schema"),
        ({"schema": {"pattern": "(a{1000}){1000}"}}, "answers.schema", "invalid_schema"),
        ({"schema": {"description": "x" * 70_000}}, "answers.schema", "invalid_schema"),
        ({"schema": SCHEMA, "tries_max": 11}, "answers.tries_max", "invalid_parameter"),
        ({"schema": SCHEMA, "tries": 2}, "answers.tries", "unknown_parameter"),
        ({"schema": SCHEMA, "escalate_to": "absent"}, "answers.escalate_to", "model_not_found"),
        ("response_format", "answers", "invalid_parameter"),
    ],
)
def test_what_cannot_be_asked_is_refused(client: httpx2.Client, answers: Any, param: str, code: str) -> None:
    ask = {"input_file_id": upload(client), "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    refused = client.post("/v1/batches", json=ask | {"answers": answers})
    is_error(refused, {"status": 404 if code == "model_not_found" else 400, "code": code, "param": param})


def test_embeddings_have_no_text_to_check(client: httpx2.Client) -> None:
    ask = {"input_file_id": upload(client), "endpoint": "/v1/embeddings", "completion_window": "24h"}
    refused = client.post("/v1/batches", json=ask | {"answers": {"schema": SCHEMA}})
    is_error(refused, {"status": 400, "code": "invalid_parameter", "param": "answers"})


def test_a_key_must_be_allowed_the_stronger_model(start_web: object) -> None:
    web: WebServer = start_web(models={name: model_at() for name in ("m", "gpt-huge")})  # type: ignore[operator]
    with web.client(web.make_key("ours", models=("m",))) as client:
        ask = {"input_file_id": upload(client), "endpoint": "/v1/chat/completions", "completion_window": "24h"}
        answers = {"schema": SCHEMA, "escalate_to": "gpt-huge"}
        refused = client.post("/v1/batches", json=ask | {"answers": answers})
        is_error(refused, {"status": 404, "code": "model_not_found", "param": "answers.escalate_to"})
        assert "key does not allow" in refused.json()["error"]["message"]
        # A dry run reports what would be refused, too.
        report = client.post("/v1/batches", json=ask | {"answers": answers, "validate_only": True}).json()
        assert any("gpt-huge" in one["message"] for one in report["refused"])
        allowed = client.post("/v1/batches", json=ask | {"answers": answers | {"escalate_to": "m"}})
        assert allowed.status_code == 200, allowed.text
