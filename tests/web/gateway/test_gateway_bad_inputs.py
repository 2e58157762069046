"""The corpus of hostile calls against every interactive door: each refused in the door's shape, and nothing is sent upstream."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from tests.web.calls import is_error
from tests.web.corpus import cases
from tests.web.gateway_world import GatewayWorld
from tests.web.test_bad_inputs import body_of
from tests.web.upstream import answers
from tidegate.core.json_limits import NODES_MAX
from tidegate.web.gateway.gateway import ENDPOINTS

OPENAI = [endpoint for endpoint in ENDPOINTS if endpoint != "/v1/messages"]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayWorld]:
    made = GatewayWorld(tmp_path_factory.mktemp("gateway") / "web")
    made.start(answers(), gateway={"body_bytes_max": 1 << 20})
    yield made
    assert made.upstreams[0].posts == [], "nothing of it was sent to anyone"
    made.close()


@pytest.fixture(scope="module")
def client(world: GatewayWorld) -> httpx2.Client:
    return world.client()


def call(client: httpx2.Client, endpoint: str, case: dict[str, Any]) -> httpx2.Response:
    headers = {}
    if content_type := case.get("content_type", "application/json"):
        headers["Content-Type"] = content_type
    return client.post(endpoint, content=body_of(case, {}), headers=headers)


@pytest.mark.parametrize("case", cases("calls"))
def test_openai_doors(client: httpx2.Client, case: dict[str, Any]) -> None:
    for endpoint in OPENAI:
        if endpoint == "/v1/moderations" and case["name"] == "no model":
            # There the model may be left out; the usual one is not served here.
            case = {**case, "status": 404, "code": "model_not_found"}
        is_error(call(client, endpoint, case), case)


@pytest.mark.parametrize("case", cases("calls"))
def test_anthropics_door(client: httpx2.Client, case: dict[str, Any]) -> None:
    answer = call(client, "/v1/messages", case)
    assert answer.status_code == case["status"], answer.text
    body = answer.json()
    assert set(body) == {"type", "error", "request_id"}
    assert body["type"] == "error"
    assert body["request_id"] == answer.headers["x-request-id"]
    assert body["error"].get("code") == case.get("code", body["error"].get("code"))


def test_what_cannot_be_translated_is_named(client: httpx2.Client) -> None:
    ask = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": [{"type": "odd"}]}]}
    answer = client.post("/v1/messages", content=json.dumps(ask), headers={"Content-Type": "application/json"})
    assert answer.status_code == 400
    assert "messages[0].content[0]" in answer.json()["error"]["message"]


@pytest.mark.parametrize("name", ["odd", "metadata"])
def test_a_body_of_countless_objects_is_turned_away_unparsed(client: httpx2.Client, name: str) -> None:
    """Parsed, thirty megabytes of them silenced the process for a quarter of a minute and took a gigabyte."""
    body = b'{"model":"m","max_tokens":1,"messages":[],"%b":[%b{}]}' % (name.encode(), b"{}," * NODES_MAX)
    for endpoint in ENDPOINTS:
        answer = client.post(endpoint, content=body, headers={"Content-Type": "application/json"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_request")


def test_two_keys_are_refused(client: httpx2.Client) -> None:
    headers = [("x-api-key", "a"), ("x-api-key", "b"), ("Content-Type", "application/json")]
    answer = client.post("/v1/messages", content=b"{}", headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "duplicate_header")


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "PATCH"])
def test_other_methods(client: httpx2.Client, method: str) -> None:
    for endpoint in ENDPOINTS:
        answer = client.request(method, endpoint)
        assert answer.status_code == 405
        assert answer.json()["error"]["message"]


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_a_compressed_body_is_refused_by_its_header(client: httpx2.Client, endpoint: str) -> None:
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    refused = client.post(endpoint, content=gzip.compress(b'{"model": "m"}'), headers=headers)
    assert (refused.status_code, refused.json()["error"]["code"]) == (415, "unsupported_media_type")
    assert refused.json()["error"]["param"] == "Content-Encoding"
