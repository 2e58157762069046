"""Hooks, guardrails and allowlists at the interactive door: what reaches the model server, what reaches the client, and what neither."""

from __future__ import annotations

import json
from typing import Any

import pytest
import structlog

from tests.conftest import OwnModule
from tests.support.processes import wait_until
from tests.support.sdks import openai
from tests.web.gateway_world import ASK, CHAT, MESSAGES, GatewayWorld
from tests.web.server import model_at
from tests.web.upstream import answers, chat_with, chunk, streams
from tidegate import metrics
from tidegate.core import keys
from tidegate.settings.capacity import LimitEntry, ResourceEntry, TenantEntry
from tidegate.settings.guards import GuardrailEntry, HookEntry
from tidegate.store.tenants.keys import KeyRights

CANARY = "canary-9b1d"
OWN = """
import threading
from tidegate.core.hooks import Later, Refuse
never = threading.Event()
def shout(body, about):
    body["messages"][-1]["content"] = body["messages"][-1]["content"].upper() + f"!{about.tenant}/{about.user}"
    return body
async def sign(body, about): return {**body, "signed": about.endpoint, "usage": None}
def refuses(body, about): raise Refuse("Ask politely.")
def later(body, about): raise Later(6.2, "Not now.")
def breaks(body, about): raise ValueError(str(body))
def away(body, about): raise ConnectionError(str(body))
def hangs(body, about): never.wait()
"""


@pytest.fixture
def own(own_module: OwnModule) -> str:
    return own_module(OWN)


def saying(text: Any, **more: Any) -> dict[str, Any]:
    return {**ASK, "messages": [{"role": "user", "content": text}], **more}


def sent(world: GatewayWorld) -> list[str]:
    return [json.loads(post.body)["messages"][-1]["content"] for post in world.upstreams[0].posts]


def test_what_is_redacted_reaches_neither_side(world: GatewayWorld) -> None:
    entry = GuardrailEntry(patterns=(r"\d{3}-\d{4}",), action="redact", replacement="[number]")
    world.start(answers(chat_with("call 555-1234")), guardrails={"numbers": entry})
    answer = world.client().post(CHAT, json=saying("my number is 555-9876"))
    assert answer.json()["choices"][0]["message"]["content"] == "call [number]"
    assert sent(world) == ["my number is [number]"]


def test_what_is_not_changed_is_passed_on_byte_for_byte(world: GatewayWorld, own: str) -> None:
    chat = json.dumps(json.loads(chat_with("hi \u00fc")), indent=2).encode() + b"\n"
    world.start(answers(chat), guardrails={"words": GuardrailEntry(patterns=("forbidden",))})
    body = json.dumps(saying("odd \u00fc", odd=[1.0, 1e3])).encode() + b"\n "
    answer = world.client().post(CHAT, content=body, headers={"Content-Type": "application/json"})
    assert answer.content == chat
    assert world.upstreams[0].posts[0].body == body


@pytest.mark.parametrize(
    ("entry", "code", "calls"),
    [
        ({"patterns": (CANARY,), "applies_to": "requests"}, "guardrail_pattern", 0),
        ({"prompt_bytes_max": 20}, "guardrail_length", 0),
        ({"patterns": ("answered",), "applies_to": "answers"}, "guardrail_pattern", 1),
        ({"answer_bytes_max": 20}, "guardrail_length", 1),
        ({"schema": {"type": "object"}}, "guardrail_schema", 1),
    ],
)
@pytest.mark.parametrize("endpoint", [CHAT, MESSAGES])
def test_a_refusal_says_why_and_repeats_nothing(
    world: GatewayWorld, endpoint: str, entry: dict[str, Any], code: str, calls: int
) -> None:
    world.start(answers(chat_with(f"answered {CANARY}")), guardrails={"house": GuardrailEntry(**entry)})
    counter = f"{metrics.endpoint_of(endpoint)},{code}"
    counted = metrics.counted(metrics.policy_refusals).get(counter, 0)
    with structlog.testing.capture_logs() as logged:
        answer = world.client().post(endpoint, json=saying(CANARY, max_tokens=9))
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == code
    assert answer.json().get("type") == ("error" if endpoint == MESSAGES else None)
    assert CANARY not in answer.text + str(logged)
    assert len(world.upstreams[0].posts) == calls
    assert metrics.counted(metrics.policy_refusals)[counter] == counted + 1
    assert world.interactive() == (0, 0)


def test_a_refused_answer_counts_against_the_budgets(world: GatewayWorld) -> None:
    """It was paid for: with a limit of tokens, the next call finds it spent."""
    world.start(
        answers(chat_with("no", prompt_tokens=100_000, completion_tokens=100_000)),
        guardrails={"house": GuardrailEntry(patterns=("no",), applies_to="answers")},
        tenants={"ours": TenantEntry(limits=(LimitEntry(period="hour", tokens=100_000),))},
    )
    client = world.client(world.web.make_key("ours"))
    assert client.post(CHAT, json=saying("hi", max_tokens=10)).json()["error"]["code"] == "guardrail_pattern"
    # What the request reserved would last for thousands of calls; what it used is settled a moment later.
    wait_until(
        lambda: client.post(CHAT, json=saying("hi", max_tokens=10)).json()["error"]["code"] == "budget_spent",
        timeout_s=20,
        what="the budget to be spent",
    )
    assert len(world.upstreams[0].posts) < 1_000


def test_a_stream_is_refused_where_its_answer_must_be_judged(world: GatewayWorld) -> None:
    world.start(streams(chunk("forbidden")), guardrails={"house": GuardrailEntry(patterns=("forbidden",))})
    answer = world.client().post(CHAT, json=saying("hi", stream=True))
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "stream_not_allowed")
    assert answer.json()["error"]["param"] == "stream"
    assert world.upstreams[0].posts == []


@pytest.mark.parametrize("entry", [{"streams": "pass"}, {"applies_to": "requests"}])
def test_a_stream_passes_where_the_operator_says_so_and_its_request_is_judged(
    world: GatewayWorld, entry: dict[str, Any]
) -> None:
    world.start(streams(chunk("forbidden")), guardrails={"house": GuardrailEntry(patterns=("forbidden",), **entry)})
    answer = world.client().post(CHAT, json=saying("hi", stream=True))
    assert answer.content == chunk("forbidden")
    refused = world.client().post(CHAT, json=saying("forbidden", stream=True))
    assert refused.json()["error"]["code"] == "guardrail_pattern"
    assert sent(world) == ["hi"]


def test_a_hook_changes_the_request_and_the_answer_but_not_what_was_paid(world: GatewayWorld, own: str) -> None:
    world.start(answers(chat_with("hi")), hooks={"house": HookEntry(before=f"{own}:shout", after=f"{own}:sign")})
    answer = world.client(world.web.make_key("ours", user="ann")).post(CHAT, json=saying("hello"))
    assert sent(world) == ["HELLO!ours/ann"]
    assert answer.json()["signed"] == CHAT
    assert answer.json()["usage"]["prompt_tokens"] == 3


@pytest.mark.parametrize(
    ("name", "status", "code", "wait_s", "says"),
    [
        ("refuses", 400, "hook_refused", None, "Ask politely."),
        ("later", 429, "hook_deferred", "7", "Not now."),
        ("breaks", 500, "hook_failed", None, "ValueError"),
        ("away", 503, "hook_unavailable", "9", "ConnectionError"),
        ("hangs", 503, "hook_unavailable", "9", "did not answer in time"),
    ],
)
def test_a_hook_that_says_no_or_breaks_is_an_answer_of_its_own(
    world: GatewayWorld, own: str, name: str, status: int, code: str, wait_s: str | None, says: str
) -> None:
    world.start(hooks={"house": HookEntry(before=f"{own}:{name}", timeout_ms=50, retry_ms=9_000)})
    family = metrics.policy_waits if wait_s else metrics.policy_refusals
    counted = metrics.counted(family).get(f"chat,{code}", 0)
    with structlog.testing.capture_logs() as logged:
        answer = world.client().post(CHAT, json=saying(CANARY))
    assert metrics.counted(family)[f"chat,{code}"] == counted + 1
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    assert answer.headers.get("retry-after") == wait_s
    assert says in answer.json()["error"]["message"]
    assert answer.headers.get("x-should-retry") == ("false" if code == "hook_failed" else None)
    assert CANARY not in answer.text + str(logged)
    assert world.upstreams[0].posts == []


def test_a_hook_that_breaks_on_an_answer_is_not_paid_for_again_by_the_sdk(world: GatewayWorld, own: str) -> None:
    world.start(answers(chat_with("hi")), hooks={"house": HookEntry(after=f"{own}:breaks")})
    client = world.openai(max_retries=3)
    with client, pytest.raises(openai.InternalServerError) as failed:
        client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])
    assert failed.value.code == "hook_failed"
    assert len(world.upstreams[0].posts) == 1


def test_rules_bind_by_organization_key_and_model(world: GatewayWorld) -> None:
    deny: dict[str, Any] = {"patterns": ("x",), "applies_to": "requests"}
    world.start(
        resources={"support": ResourceEntry(model="m")},
        guardrails={
            "one": GuardrailEntry(tenants=("strict",), **deny),
            "two": GuardrailEntry(models=("support",), **deny),
        },
    )
    strict, free = world.client(world.web.make_key("strict")), world.client(world.web.make_key("free"))
    assert strict.post(CHAT, json=saying("x")).status_code == 400
    assert free.post(CHAT, json=saying("x")).status_code == 200
    assert free.post(CHAT, json=saying("x", model="support")).status_code == 400


@pytest.mark.parametrize(
    ("models", "resources", "allowed"),
    [
        ([], [], {"m", "support", "other"}),
        (["m"], [], {"m", "support", "other"}),
        ([], ["support"], {"support"}),
        (["m"], ["support", "other"], {"support", "other"}),
        (["support"], [], set()),
    ],
)
def test_a_keys_allowlists_hold_at_the_door(
    world: GatewayWorld, models: list[str], resources: list[str], allowed: set[str]
) -> None:
    """By the model behind a resource and by the resource's own name, as they do for the items of a batch."""
    world.start(
        resources={"support": ResourceEntry(model="m"), "other": ResourceEntry(model="m")},
    )
    text = world.web.make_key("ours", models=models)
    public_id = keys.public_id_of(text)
    assert public_id is not None
    assert world.web.run(world.web.store.change_key(public_id, KeyRights(resources=keys.models_text(resources))))
    world.web.clock.ahead_ms += 2_001
    client = world.client(text)
    statuses = {}
    for name in ("m", "support", "other"):
        answer = client.post(CHAT, json=saying("hi", model=name))
        statuses[name] = answer.status_code
        assert answer.status_code == 200 or answer.json()["error"]["code"] == "model_not_found"
    assert {name for name, status in statuses.items() if status == 200} == allowed
    assert {one["id"] for one in client.get("/v1/models").json()["data"]} == allowed


KEY = "AKIA" + "Q" * 16
EVERYWHERE = [
    (CHAT, saying(KEY)),
    (CHAT, saying("hi", tools=[{"type": "function", "function": {"name": "f", "parameters": {"properties": {KEY: {}}}}}])),
    (CHAT, {**ASK, "messages": [{"role": "user", "content": [{"type": "text", "text": KEY[:7]}, {"type": "text", "text": KEY[7:]}]}]}),
    (MESSAGES, saying([{"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": KEY}}], max_tokens=9)),
    ("/v1/completions", {"model": "m", "prompt": ["x", KEY]}),
    ("/v1/embeddings", {"model": "m", "input": ["x", KEY]}),
    ("/v1/responses", {"model": "m", "input": [{"role": "user", "content": [{"type": "input_text", "text": KEY}]}]}),
    ("/v1/moderations", {"model": "m", "input": [{"type": "text", "text": KEY}]}),
]  # fmt: skip


@pytest.mark.parametrize(("endpoint", "body"), EVERYWHERE)
def test_nothing_passes_by_at_any_door(world: GatewayWorld, endpoint: str, body: dict[str, Any]) -> None:
    world.start(guardrails={"keys": GuardrailEntry(patterns=("AKIA[0-9A-Z]{16}",), streams="pass")})
    for more in ({}, {"stream": True}):
        answer = world.client().post(endpoint, json={**body, **more})
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "guardrail_pattern")
        assert KEY not in answer.text
    assert world.upstreams[0].posts == []


@pytest.mark.parametrize("endpoint", ["/v1/completions", "/v1/embeddings"])
def test_token_ids_are_refused_unless_the_operator_lets_them_pass(world: GatewayWorld, endpoint: str) -> None:
    named = {"prompt": [5, 6]} if endpoint == "/v1/completions" else {"input": [[5, 6]]}
    entry = GuardrailEntry(patterns=("AKIA[0-9A-Z]{16}",), applies_to="requests")
    world.start(guardrails={"keys": entry})
    answer = world.client().post(endpoint, json={"model": "m", **named})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "guardrail_unseen")
    assert world.upstreams[0].posts == []


def test_a_rule_for_a_fallbacks_model_binds_the_call(world: GatewayWorld) -> None:
    """Also while the first model answers: no rule is looked at again when a call goes on to the next."""
    world.start(
        models={name: model_at(world.upstream(answers()).url, name=f"of-{name}") for name in ("first", "second")},
        resources={"chat": ResourceEntry(model="first", fallbacks=("second",))},
        guardrails={"keys": GuardrailEntry(patterns=(KEY,), models=("second",))},
    )
    for model, status in (("chat", 400), ("second", 400), ("first", 200)):
        assert world.client().post(CHAT, json=saying(KEY, model=model)).status_code == status, model
    assert [len(one.posts) for one in world.upstreams] == [1, 0]


def test_a_pattern_that_once_stopped_the_process_holds_up_no_call(world: GatewayWorld) -> None:
    """With Python's engine this body of 300 bytes took longer than anyone would wait."""
    pattern = "(?:[A-Za-z0-9]{1,64}[._-]?){1,10}@corp[.]example"
    world.start(guardrails={"mail": GuardrailEntry(patterns=(pattern, "(?:a|aa){40}b", "(?x)(a+) +b"))})
    assert world.client().post(CHAT, json=saying("a" * 300)).status_code == 200
    assert world.client().post(CHAT, json=saying("a" * 300_000)).status_code == 200
    assert world.client().post(CHAT, json=saying("a" * 300 + "@corp.example")).status_code == 400
    assert world.client().get("/healthz").status_code == 200
