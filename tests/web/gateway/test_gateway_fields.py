"""What callers of interactive calls may not put into a body, at every door; and what of the operator's never comes back in an answer."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.web.gateway_world import ASK, CHAT, MESSAGES, GatewayWorld
from tests.web.server import model_at
from tests.web.upstream import answers, chat_with, chunk, streams
from tidegate.core.deployments import Secret
from tidegate.settings.capacity import ModelDeployment, ModelSettings, ResourceEntry
from tidegate.settings.guards import HookEntry

NOT_ALLOWED = "parameter_not_allowed"
KEPT = {"type": "document", "source": {"type": "file", "file_id": "f"}}
KEY = "sk-canary-0f3kQ2mZ8s1xW7vB4nD9Lc"
IMAGE = {"type": "image_url", "image_url": {"url": "https://images.example.com/cat.png"}}
SOURCE = {"type": "image", "source": {"type": "url", "url": "https://images.example.com/cat.png"}}


def asks(*parts: Any, **more: Any) -> dict[str, Any]:
    return {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": list(parts) or "hi"}], **more}


@pytest.mark.parametrize(
    ("endpoint", "body", "code", "param"),
    [
        (CHAT, asks({"type": "file", "file": {"file_id": "file-1"}}), NOT_ALLOWED, "messages[0].content[0].file.file_id"),
        (CHAT, asks(priority=1), NOT_ALLOWED, "priority"),
        (CHAT, asks(chat_template="{{ 1 }}"), NOT_ALLOWED, "chat_template"),
        (CHAT, asks(Model="dearer"), "duplicate_parameter", "Model"),
        (CHAT, asks(IMAGE), "media_not_allowed", "messages[0].content[0].image_url.url"),
        (MESSAGES, asks(KEPT), NOT_ALLOWED, "messages[0].content[0].source.file_id"),
        (MESSAGES, asks(SOURCE), "media_not_allowed", "messages[0].content[0].source.url"),
        (MESSAGES, asks(container="container_1"), NOT_ALLOWED, "container"),
        ("/v1/responses", {"model": "m", "input": "hi", "previous_response_id": "resp_1"}, NOT_ALLOWED, "previous_response_id"),
        ("/v1/responses", {"model": "m", "input": "hi", "conversation": "conv_1"}, NOT_ALLOWED, "conversation"),
        ("/v1/completions", {"model": "m", "prompt": "hi", "prompt_embeds": "AAAA"}, NOT_ALLOWED, "prompt_embeds"),
        ("/v1/completions", {"model": "m", "prompt": "hi", "kv_transfer_params": {}}, NOT_ALLOWED, "kv_transfer_params"),
        ("/v1/embeddings", {"model": "m", "input": "hi", "priority": 0}, NOT_ALLOWED, "priority"),
        ("/v1/embeddings", asks(IMAGE), "media_not_allowed", "messages[0].content[0].image_url.url"),
        ("/v1/moderations", {"model": "m", "input": [IMAGE]}, "media_not_allowed", "input[0].image_url.url"),
    ],
)  # fmt: skip
def test_nothing_of_it_reaches_a_server(
    world: GatewayWorld, endpoint: str, body: dict[str, Any], code: str, param: str
) -> None:
    world.start()
    for is_stream in (False, True):
        answer = world.client().post(endpoint, json={**body, "stream": is_stream})
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert f"`{param}`" in error["message"]
        if endpoint != MESSAGES:
            assert (error["code"], error["param"]) == (code, param)
    assert world.upstreams[0].posts == []


def test_an_unknown_model_is_refused_before_its_body_is_judged(world: GatewayWorld) -> None:
    world.start()
    assert world.client().post(CHAT, json={**ASK, "model": "nosuch", "priority": 1}).status_code == 404


def test_a_field_of_background_responses_is_the_servers_own_elsewhere(world: GatewayWorld) -> None:
    world.start()
    asked = asks(background=True, interactive_after_seconds="soon")
    assert world.client().post(CHAT, json=asked).status_code == 200
    assert json.loads(world.upstreams[0].posts[0].body) == asked


def test_a_call_that_is_interactive_at_once_may_say_that_it_never_turns_so(world: GatewayWorld) -> None:
    world.start()
    asked = {"model": "m", "input": "Hi"}
    world.client().post("/v1/responses", json={**asked, "interactive_after_seconds": None})
    assert json.loads(world.upstreams[0].posts[0].body) == asked, "a model server does not know this field"


def test_a_large_body_is_judged_too(world: GatewayWorld) -> None:
    world.start()
    inline = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 200_000}}
    client = world.client()
    assert client.post(CHAT, json=asks(inline)).status_code == 200
    assert client.post(CHAT, json=asks(inline, IMAGE)).json()["error"]["code"] == "media_not_allowed"
    assert len(world.upstreams[0].posts) == 1


def test_a_model_allows_what_its_settings_say_and_a_resource_only_what_all_its_models_do(world: GatewayWorld) -> None:
    upstream = world.upstream(answers())
    place = ModelDeployment(url=upstream.url, engine="vllm")
    named = {
        "m": ModelSettings(
            deployments=(place,), allowed_fields=("file_id", "priority"), media_hosts=("Images.Example.com",)
        ),
        "strict": ModelSettings(deployments=(place,)),
        "hosted": model_at(upstream.url, engine="openai"),
    }
    routes = {"alone": ResourceEntry(model="m"), "careful": ResourceEntry(model="m", fallbacks=("strict",))}
    world.start(models=named, resources=routes)
    client = world.client()

    def code_of(model: str, **more: Any) -> str | None:
        error = client.post(CHAT, json={**asks(**more), "model": model}).json().get("error")
        return None if error is None else error["code"]

    file = {"messages": asks({"type": "file", "file": {"file_id": "file-1"}})["messages"]}
    image = {"messages": asks(IMAGE)["messages"]}
    for name in ("m", "alone"):
        assert code_of(name, priority=1, **file) is None
        assert code_of(name, **image) is None
        assert code_of(name, kv_transfer_params={}) == "parameter_not_allowed"
    for name in ("strict", "careful"):
        assert code_of(name, **file) == code_of(name, priority=1) == "parameter_not_allowed"
        assert code_of(name, **image) == "media_not_allowed"
    assert code_of("hosted", priority=1) is None, "it is no field of this engine's, and the provider judges it"
    assert code_of("hosted", **file) == "parameter_not_allowed"


def test_what_a_hook_adds_is_the_operators_own(
    world: GatewayWorld, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hook_of_fields.py").write_text("def first(body, about):\n    return {**body, 'priority': 7}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    world.start(hooks={"first": HookEntry(before="hook_of_fields:first")})
    assert world.client().post(CHAT, json=ASK).status_code == 200
    assert json.loads(world.upstreams[0].posts[0].body)["priority"] == 7
    assert world.client().post(CHAT, json={**ASK, "priority": 1}).status_code == 400
    assert len(world.upstreams[0].posts) == 1


def test_our_key_never_comes_back_in_an_answer(world: GatewayWorld) -> None:
    world.start(answers(chat_with(f"you sent Bearer {KEY}")), options=[{"api_key": Secret(KEY)}])
    answer = world.client().post(CHAT, json=ASK)
    assert answer.json()["choices"][0]["message"]["content"] == "you sent Bearer ***"
    assert world.upstreams[0].posts[0].headers["Authorization"] == f"Bearer {KEY}"


@pytest.mark.parametrize("size", [1, 7, len(KEY), 1_000])
def test_our_key_never_comes_back_in_a_stream_wherever_it_is_cut(world: GatewayWorld, size: int) -> None:
    stream = chunk(f"you sent {KEY}") + chunk("s", finish="stop") + b"data: [DONE]\n\n"
    pieces = [stream[at : at + size] for at in range(0, len(stream), size)]
    world.start(streams(*pieces), options=[{"api_key": Secret(KEY)}])
    asked = {**ASK, "stream": True, "stream_options": {"include_usage": True}}
    answer = world.client().post(CHAT, json=asked)
    assert answer.content == stream.replace(KEY.encode(), b"***")


def test_our_key_never_comes_back_letter_by_letter_and_no_error_in_a_stream_names_the_account(
    world: GatewayWorld,
) -> None:
    error = b'data: {"error": {"message": "limit of organization org-AbCdEf123456", "code": "x"}}\n\n'
    world.start(streams(*map(chunk, KEY), error), options=[{"api_key": Secret(KEY)}])
    answer = world.client().post(CHAT, json={**ASK, "stream": True})
    assert answer.content.count(b"delta") == len(KEY)
    assert b"".join(map(chunk, KEY[6:])) not in answer.content
    assert answer.content.endswith(error.replace(b"AbCdEf123456", b"***"))


def test_a_redirect_to_an_address_with_our_key_does_not_show_it(world: GatewayWorld) -> None:
    world.start(answers(b"", 307, Location=f"https://elsewhere.example/{KEY}/v1"), options=[{"api_key": Secret(KEY)}])
    answer = world.client().post(CHAT, json=ASK)
    assert answer.status_code >= 400
    assert KEY not in f"{dict(answer.headers)} {answer.text}"


def test_a_short_word_for_a_key_changes_no_answer(world: GatewayWorld) -> None:
    body = chat_with("the list is EMPTY")
    world.start(answers(body), options=[{"api_key": Secret("EMPTY")}])
    assert world.client().post(CHAT, json=ASK).content == body


@pytest.mark.parametrize("status", [400, 429])
def test_the_account_that_pays_is_not_named(world: GatewayWorld, status: int) -> None:
    message = f"Rate limit reached for m in organization org-AbCdEf123456 (key {KEY}) on tokens per min"
    body = json.dumps({"error": {"message": message, "type": "tokens", "code": "rate_limit_exceeded"}}).encode()
    headers = {"Openai_Organization": "org-AbCdEf123456", "Retry_After": "1"}
    world.start(answers(body, status, **headers), options=[{"api_key": Secret(KEY)}])
    answer = world.client().post(CHAT, json=ASK)
    assert answer.status_code == status
    assert "org-***" in answer.json()["error"]["message"]
    shown = f"{dict(answer.headers)} {answer.text}"
    assert "AbCdEf123456" not in shown
    assert KEY not in shown
