"""The shape of a batch's work, as a client asks for it and reads it back."""

from __future__ import annotations

from typing import Any

import httpx2

from tests.web.calls import upload
from tests.web.jobs.test_validation import CHAT, line, validated
from tests.web.server import WebServer


def made(client: httpx2.Client, file_id: str, **more: Any) -> dict[str, Any]:
    answer = client.post("/v1/batches", json={"input_file_id": file_id, "endpoint": CHAT, **more})
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def test_parameters_are_read_back_and_a_batch_without_them_says_so(client: httpx2.Client) -> None:
    asked = {"defaults": {"temperature": 0, "stop": ["x"]}, "overrides": {"max_tokens": 5}}
    file_id = upload(client, line(1))
    batch = made(client, file_id, **asked)
    for shown in (batch, client.get(f"/v1/batches/{batch['id']}").json()):
        assert {name: shown["tidegate"][name] for name in asked} == asked
    plain = made(client, file_id, defaults=None, overrides={})["tidegate"]
    assert (plain["defaults"], plain["overrides"]) == ({}, {})


def test_an_idempotency_key_is_bound_to_the_parameters(client: httpx2.Client) -> None:
    body = {"input_file_id": upload(client, line(1)), "endpoint": CHAT, "defaults": {"seed": 1}}
    key = {"Idempotency-Key": "same"}
    first = client.post("/v1/batches", json=body, headers=key)
    assert client.post("/v1/batches", json=body, headers=key).json()["id"] == first.json()["id"]
    other = client.post("/v1/batches", json={**body, "defaults": {"seed": 2}}, headers=key)
    assert (other.status_code, other.json()["error"]["code"]) == (422, "idempotency_key_reused")


def test_a_validation_counts_with_the_final_bodies(web: WebServer, client: httpx2.Client) -> None:
    data = b"".join(line(number) for number in range(20))
    assert validated(client, data)["tokens"]["output"]["p95"] == 200
    assert validated(client, data, overrides={"max_tokens": 3})["tokens"]["output"]["p95"] == 60
    assert validated(client, data, defaults={"max_tokens": 3})["tokens"]["output"]["p95"] == 200
    assert list(web.context.scratch.iterdir()) == []


def test_an_override_that_makes_lines_invalid_says_so(client: httpx2.Client) -> None:
    many = {f"k{number}": number for number in range(100)}
    said = validated(client, line(1) + line(2, **many), overrides={f"o{number}": 0 for number in range(40)})
    assert (said["request_counts"]["failed"], said["valid"]) == (1, True)
    # What a line says wrongly is replaced before anything looks at it.
    cured = validated(client, line(3, tools=5), overrides={"tools": [{"type": "function"}]})
    assert cured["request_counts"]["failed"] == 0
