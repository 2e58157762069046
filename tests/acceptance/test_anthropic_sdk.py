"""The official `anthropic` SDK's message batches, unchanged, against `tidegate serve`: its own types are the judge."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.engine import Engine
from tests.support.processes import Processes, wait_until
from tests.support.receiver import Receiver
from tests.support.sdks import anthropic
from tests.support.server import Server
from tests.support.tidegate import write_config

# One model for each shape that a server behind may speak.
MODELS = ("openai-shaped", "anthropic-shaped")
# Served by a witness that keeps the headers of each call, and refuses it.
WITNESSED = ("witness-anthropic", "witness-openai")


@pytest.fixture(scope="module")
def witness() -> Iterator[Receiver]:
    with Receiver(lambda _: 400) as made:
        yield made


@pytest.fixture(scope="module")
def server(module_processes: Processes, module_directory: Path, witness: Receiver) -> Server:
    """A server with two models over one engine that speaks both shapes."""
    engine = Engine(module_processes, module_directory / "engine")
    places = {MODELS[0]: {"url": engine.url}, MODELS[1]: {"url": engine.url, "engine": "anthropic"}}
    places |= {name: {"url": witness.url, "engine": name.split("-")[1]} for name in WITNESSED}
    config = {"models": {name: {"deployments": [one]} for name, one in places.items()}}
    made = Server(module_processes, module_directory, "serve", "--config", write_config(module_directory, config))
    made.start().close()
    return made


@pytest.fixture(scope="module")
def key(server: Server) -> str:
    return server.key()


@pytest.fixture
def client(server: Server, key: str) -> Iterator[Any]:
    with server.anthropic(key) as opened:
        yield opened


def request(custom_id: str, model: str, **more: Any) -> Any:
    messages = [{"role": "user", "content": f"Say {custom_id}."}]
    return {"custom_id": custom_id, "params": {"model": model, "max_tokens": 16, "messages": messages, **more}}


def ended(batches: Any, batch_id: str) -> Any:
    def look() -> Any:
        batch = batches.retrieve(batch_id)
        return batch if batch.processing_status == "ended" else None

    return wait_until(look, timeout_s=60, what=f"{batch_id} to end")


@pytest.mark.parametrize("door", ["messages", "beta"])
def test_every_call_of_the_sdk(client: Any, door: str) -> None:
    batches = client.messages.batches if door == "messages" else client.beta.messages.batches
    good = [request(f"{model}-{number}", model) for model in MODELS for number in range(20)]
    bad = [
        request("streams", MODELS[0], stream=True),
        request("no-tokens", MODELS[0], max_tokens=0),
        request("no-model", "absent"),
        {"custom_id": "empty", "params": {}},
    ]
    batch = batches.create(requests=[*good, *bad])
    type(batch).model_validate(batch.model_dump(), strict=True)
    assert batch.type == "message_batch"
    assert batch.request_counts.processing == 44
    assert (batch.expires_at - batch.created_at).total_seconds() == 86_400
    over = ended(batches, batch.id)
    counts = over.request_counts
    assert (counts.processing, counts.succeeded, counts.errored, counts.canceled, counts.expired) == (
        0,
        40,
        4,
        0,
        0,
    )
    assert over.ended_at >= over.created_at
    found = {one.custom_id: one.result for one in batches.results(batch.id)}
    assert found.keys() == {one["custom_id"] for one in [*good, *bad]}
    for one in good:
        result = found[one["custom_id"]]
        assert result.type == "succeeded", result
        assert (result.message.type, result.message.role) == ("message", "assistant")
        assert result.message.content[0].type == "text"
        assert result.message.usage.output_tokens > 0
    kinds = {one["custom_id"]: found[one["custom_id"]].error.error.type for one in bad}
    assert kinds == {
        "streams": "invalid_request_error",
        "no-tokens": "invalid_request_error",
        "no-model": "not_found_error",
        "empty": "invalid_request_error",
    }
    assert batch.id in [one.id for one in batches.list(limit=1)]
    with pytest.raises(anthropic.ConflictError):
        batches.cancel(batch.id)
    assert batches.delete(batch.id).type == "message_batch_deleted"
    with pytest.raises(anthropic.NotFoundError):
        batches.retrieve(batch.id)


def test_betas_go_with_the_requests_of_a_batch(client: Any, witness: Receiver) -> None:
    batches = client.beta.messages.batches
    wanted = [request(model, model) for model in WITNESSED]
    batch = batches.create(requests=wanted, betas=["context-1m-2025-08-07", "files-api-2025-04-14"])
    ended(batches, batch.id)
    seen = {json.loads(one.body)["model"]: one.headers.get("anthropic-beta") for one in witness.got}
    # The beta of the batches themselves, which the SDK names too, is ours to know, and OpenAI's servers know none.
    assert seen == {WITNESSED[0]: "context-1m-2025-08-07,files-api-2025-04-14", WITNESSED[1]: None}


def test_both_doors_show_one_job(client: Any, server: Server, key: str) -> None:
    with server.openai(key) as other:
        batch = client.messages.batches.create(requests=[request("a", MODELS[0]), request("b", "absent")])
        ended(client.messages.batches, batch.id)
        seen = other.batches.retrieve(batch.id.removeprefix("msg"))
        assert (seen.status, seen.endpoint) == ("completed", "/v1/messages")
        assert seen.request_counts is not None
        assert (seen.request_counts.completed, seen.request_counts.failed) == (1, 1)
        (line,) = other.files.content(str(seen.output_file_id)).text.splitlines()
        (result,) = [one for one in client.messages.batches.results(batch.id) if one.custom_id == "a"]
        assert json.loads(line)["response"]["body"]["id"] == result.result.message.id


def test_pages_and_refusals(client: Any, server: Server) -> None:
    ids = [client.messages.batches.create(requests=[request("a", MODELS[1])]).id for _ in range(5)]
    listed = [one.id for one in client.messages.batches.list(limit=2)]
    assert listed[:5] == ids[::-1]
    newer = [one.id for one in client.messages.batches.list(limit=2, before_id=ids[0])]
    assert sorted(newer) == sorted(ids[1:])
    with pytest.raises(anthropic.BadRequestError) as refused:
        client.messages.batches.create(requests=[request("a", "m"), request("a", "m")])
    assert refused.value.response.json()["error"]["type"] == "invalid_request_error"
    assert "requests.1.custom_id" in refused.value.message
    with pytest.raises(anthropic.NotFoundError):
        client.messages.batches.results("msgbatch_0000000000000000000000")
    wrong = server.anthropic("wrong")
    with pytest.raises(anthropic.AuthenticationError):
        wrong.messages.batches.list()
