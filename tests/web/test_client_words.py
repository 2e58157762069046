"""What clients of OpenAI's API send and match, word for word, where it is not in the SDK's types."""

from __future__ import annotations

import re
from typing import Any

import httpx2
import pytest

from tests.web import stages
from tests.web.calls import LINES, create, is_error, upload
from tests.web.gateway_world import ASK, GatewayWorld
from tests.web.server import WebServer, fresh_id
from tests.web.upstream import answers

ABSENT = ("file-0000000000000000000000", "file_0000000000000000000000", "file-abc123")


@pytest.mark.parametrize("file_id", ABSENT)
def test_a_missing_file_is_reported_in_openais_sentence(client: httpx2.Client, file_id: str) -> None:
    case = {"status": 404, "code": "file_not_found"}
    asked = {"input_file_id": file_id, "endpoint": "/v1/embeddings"}
    for answer in (
        client.get(f"/v1/files/{file_id}"),
        client.delete(f"/v1/files/{file_id}"),
        client.get(f"/v1/files/{file_id}/content"),
        client.post("/v1/batches", json=asked),
    ):
        is_error(answer, case)
        assert answer.json()["error"]["message"].startswith(f"No such File object: {file_id}. ")


def test_a_missing_batch_is_reported_in_openais_sentence(client: httpx2.Client) -> None:
    for batch_id in ("batch_0000000000000000000000", "batch_abc"):
        for answer in (client.get(f"/v1/batches/{batch_id}"), client.post(f"/v1/batches/{batch_id}/cancel")):
            is_error(answer, {"status": 404, "code": "batch_not_found"})
            assert answer.json()["error"]["message"].startswith(f"No batch found with id '{batch_id}'. ")


def test_a_cancel_that_comes_too_late_is_refused_in_openais_sentence(web: WebServer, client: httpx2.Client) -> None:
    batch_id = stages.running(web, client, 1)
    stages.finish(web, batch_id, {0: b"{}\n"})
    for status in ("finalizing", "completed"):
        answer = client.post(f"/v1/batches/{batch_id}/cancel")
        is_error(answer, {"status": 409, "code": "batch_not_cancellable"})
        assert answer.json()["error"]["message"].startswith(f"Cannot cancel a batch with status '{status}'.")
        if status == "finalizing":
            stages.publish(web, batch_id)


def test_an_empty_input_file_id_is_a_bad_request(client: httpx2.Client) -> None:
    answer = client.post("/v1/batches", json={"input_file_id": "", "endpoint": "/v1/embeddings"})
    is_error(answer, {"status": 400, "code": "invalid_parameter", "param": "input_file_id"})


@pytest.mark.parametrize(
    ("name", "disposition"),
    [
        ("in.jsonl", 'attachment; filename="in.jsonl"'),
        ("my file (1).jsonl", 'attachment; filename="my file (1).jsonl"'),
        ("gr\u00fc\u00df.jsonl", "attachment; filename=\"gr__.jsonl\"; filename*=UTF-8''gr%C3%BC%C3%9F.jsonl"),
        ("50%.jsonl", "attachment; filename=\"50_.jsonl\"; filename*=UTF-8''50%25.jsonl"),
    ],
)
def test_a_plain_name_is_sent_plainly(client: httpx2.Client, name: str, disposition: str) -> None:
    answer = client.post("/v1/files", files={"file": (name, LINES)}, data={"purpose": "batch"})
    content = client.get(f"/v1/files/{answer.json()['id']}/content")
    assert content.headers["content-disposition"] == disposition


def test_fields_that_are_not_known_are_ignored(client: httpx2.Client) -> None:
    more: dict[str, Any] = {"custom_llm_provider": "openai", "metadata": "x" * 5_000, "purpose": "batch"}
    more |= {f"field-{number}": "" for number in range(20)}
    answer = client.post("/v1/files", files={"file": ("a", LINES), "other": ("b", b"not this")}, data=more)
    assert answer.status_code == 200, answer.text
    assert client.get(f"/v1/files/{answer.json()['id']}/content").content == LINES
    for value in ("openai", None, {"a": [1]}):
        assert create(client, answer.json()["id"], custom_llm_provider=value)["status"] == "validating"
    refused = client.post("/v1/batches", json={"input_file_id": "x", "endpoint": "/v1/embeddings", "custom_llm": 1})
    is_error(refused, {"status": 400, "code": "unknown_parameter", "param": "custom_llm"})


def test_new_file_ids_are_openais_and_old_ones_stay_readable(web: WebServer, client: httpx2.Client) -> None:
    file_id = upload(client)
    assert re.fullmatch("file-[0-9A-Za-z]{22}", file_id)
    assert fresh_id("batch").startswith("batch_")
    old_id = file_id.replace("-", "_")
    web.rewrite("pragma foreign_keys = off")
    web.rewrite(f"update extents set file_id = '{old_id}' where file_id = '{file_id}'")  # noqa: S608
    web.rewrite(f"update files set id = '{old_id}' where id = '{file_id}'")  # noqa: S608
    assert client.get(f"/v1/files/{old_id}").json()["id"] == old_id
    assert client.get(f"/v1/files/{old_id}/content").content == LINES
    assert old_id in [file["id"] for file in client.get("/v1/files").json()["data"]]
    assert client.get("/v1/files", params={"after": old_id}).status_code == 200
    assert create(client, old_id)["input_file_id"] == old_id
    assert client.get(f"/v1/files/{file_id}").status_code == 404


def test_a_key_with_another_expiry_is_another_request(client: httpx2.Client) -> None:
    def post(seconds: str) -> httpx2.Response:
        fields = {"purpose": "batch", "expires_after[anchor]": "created_at", "expires_after[seconds]": seconds}
        return client.post(
            "/v1/files", files={"file": ("a", LINES)}, data=fields, headers={"Idempotency-Key": "with-expiry"}
        )

    assert post("3600").json()["id"] == post("3600").json()["id"]
    is_error(post("3601"), {"status": 422, "code": "idempotency_key_reused"})


@pytest.mark.parametrize("value", [False, None])
def test_a_response_that_is_not_in_the_background_is_passed_on(world: GatewayWorld, value: object) -> None:
    world.start(answers(b'{"id":"resp_1","output":[]}'))
    asked = {"model": "m", "input": "x", "background": value}
    assert world.client().post("/v1/responses", json=asked).status_code == 200


def test_only_responses_have_a_background(world: GatewayWorld) -> None:
    world.start(answers())
    assert world.client().post("/v1/chat/completions", json={**ASK, "background": True}).status_code == 200
