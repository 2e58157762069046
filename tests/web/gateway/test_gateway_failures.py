"""What clients read of calls that came to nothing: the server's own words, the cause, and the exceptions of both official SDKs."""

from __future__ import annotations

import json
import secrets
from typing import Any

import pytest
from msgspec.structs import replace

from tests.support.sdks import anthropic, openai
from tests.upstream.raw_server import Peer, Request
from tests.web.gateway_world import ASK, CHAT, MESSAGES, GatewayWorld
from tests.web.server import model_at
from tests.web.upstream import answers, chat_with
from tidegate.core.budgets.budget import Limit, Period
from tidegate.core.deployments import Secret
from tidegate.core.usage.prices import NANO
from tidegate.settings.capacity import DeploymentPrice, DeploymentQueue, ModelDeployment, ModelSettings

WORDS = "the engine has 900 requests in its queue"
OPENAI_ERROR = json.dumps({"error": {"message": WORDS, "type": "server_error", "param": None, "code": "busy"}}).encode()
ANTHROPIC_ERROR = json.dumps({"type": "error", "error": {"type": "overloaded_error", "message": WORDS}}).encode()
BODIES: dict[str, Any] = {
    CHAT: ASK,
    "/v1/completions": {"model": "m", "prompt": "hi"},
    "/v1/embeddings": {"model": "m", "input": "hi"},
    "/v1/responses": {"model": "m", "input": "hi"},
    "/v1/moderations": {"model": "m", "input": "hi"},
    MESSAGES: {**ASK, "max_tokens": 5},
}


@pytest.mark.parametrize("status", [500, 502, 503, 504, 529])
def test_a_failure_that_says_why_is_passed_on_with_its_status_and_words(world: GatewayWorld, status: int) -> None:
    world.start(answers(OPENAI_ERROR, status))
    client = world.client()
    for number, (endpoint, body) in enumerate(BODIES.items()):
        if number % 4 == 0:
            # A good answer in between keeps the deployment open.
            world.upstreams[0].becomes(answers(chat_with("hi")))
            assert client.post(CHAT, json=ASK).status_code == 200
            world.upstreams[0].becomes(answers(OPENAI_ERROR, status))
        answer = client.post(endpoint, json=body)
        assert answer.status_code == status, answer.text
        assert answer.json()["error"]["message"] == WORDS
        if endpoint == MESSAGES:
            kind = "overloaded_error" if status in (503, 529) else "timeout_error" if status == 504 else "api_error"
            assert (answer.json()["type"], answer.json()["error"]["type"]) == ("error", kind)
        else:
            assert answer.content == OPENAI_ERROR


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("engine", ["generic", "anthropic"])
def test_both_sdks_read_an_overloaded_engines_words(world: GatewayWorld, engine: str, stream: bool) -> None:
    body = ANTHROPIC_ERROR if engine == "anthropic" else OPENAI_ERROR
    world.start(answers(body, 529), options=[{"engine": engine}])
    with world.openai() as ours, pytest.raises(openai.InternalServerError, match=WORDS) as failed:
        ours.chat.completions.create(**ASK, stream=stream)
    assert (failed.value.status_code, failed.value.type) == (529, "server_error")
    with world.anthropic() as theirs, pytest.raises(anthropic.InternalServerError, match=WORDS) as refused:
        theirs.messages.create(**ASK, max_tokens=5, stream=stream)
    assert refused.value.status_code == 529
    assert isinstance(refused.value.body, dict)
    assert refused.value.body["error"]["type"] == "overloaded_error"


@pytest.mark.parametrize(
    ("status", "body", "shown", "code"),
    [
        (503, b"", 503, "upstream_overloaded"),
        (503, b"<h1>10.0.0.5 is away</h1>", 503, "upstream_overloaded"),
        (529, b"overloaded at 10.0.0.5", 529, "upstream_overloaded"),
        (504, b"<h1>10.0.0.5</h1>", 504, "upstream_ambiguous"),
        (500, b"<h1>10.0.0.5</h1>", 502, "upstream_ambiguous"),
        (520, b"", 502, "upstream_ambiguous"),
    ],
)
def test_a_failure_without_words_is_reported_in_ours_without_addresses(
    world: GatewayWorld, status: int, body: bytes, shown: int, code: str
) -> None:
    world.start(answers(body, status))
    answer = world.client().post(CHAT, json=ASK)
    assert (answer.status_code, answer.json()["error"]["code"]) == (shown, code)
    assert str(status) in answer.json()["error"]["message"]
    assert "10.0.0.5" not in answer.text


def test_a_model_whose_servers_are_all_drained_is_not_called_busy(world: GatewayWorld) -> None:
    world.start(answers(b"{}", 200))
    for state in world.web.router._states.values():
        state.update(replace(state.deployment, is_drained=True), state.client, state.control)
    answer = world.client().post(CHAT, json=ASK)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "upstream_drained")
    assert "An operator has taken this model's servers out of use" in answer.json()["error"]["message"]
    assert answer.headers["retry-after"]
    assert not world.upstreams[0].posts


def test_words_of_a_failing_server_never_show_our_key(world: GatewayWorld) -> None:
    body = json.dumps({"error": {"message": "sk-ours is over its rate"}}).encode()
    world.start(answers(body, 503), options=[{"api_key": Secret("sk-ours")}])
    answer = world.client().post(CHAT, json=ASK)
    assert (answer.status_code, answer.json()["error"]["message"]) == (503, "*** is over its rate")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"object": "error", "message": "too long", "type": "BadRequestError", "param": None, "code": 400}, "too long"),
        ({"detail": "no such route"}, "no such route"),
        ({"detail": [{"loc": ["body"], "msg": "one"}, {"loc": ["body"], "msg": "two"}]}, "one; two"),
        ({"error": "plain words"}, "plain words"),
    ],
)
def test_errors_of_other_shapes_reach_the_client_in_its_own(world: GatewayWorld, body: Any, words: str) -> None:
    world.start(answers(json.dumps(body).encode(), 400))
    with world.openai() as ours, pytest.raises(openai.BadRequestError) as refused:
        ours.chat.completions.create(**ASK)
    assert isinstance(refused.value.body, dict)
    assert (refused.value.body["message"], refused.value.type) == (words, "invalid_request_error")


@pytest.mark.parametrize("tier", [None, "flex"])
def test_after_a_rejected_key_every_caller_reads_that(world: GatewayWorld, tier: str | None) -> None:
    world.start(answers(b"{}", 401), gateway={"flex_wait_s": 0.2})
    client = world.client()
    for _ in range(3):
        answer = client.post(CHAT, json={**ASK, "service_tier": tier})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "upstream_key_rejected")
        assert "does not accept the gateway's own key" in answer.json()["error"]["message"]
    messages = client.post(MESSAGES, json=BODIES[MESSAGES])
    assert messages.json()["error"]["code"] == "upstream_key_rejected"
    assert len(world.upstreams[0].posts) == 1
    assert world.states() == ["paused"]


def test_a_server_that_answers_with_errors_is_not_reported_as_away(world: GatewayWorld) -> None:
    world.start(answers(OPENAI_ERROR, 503))
    client = world.client()
    seen = [client.post(CHAT, json=ASK).json()["error"] for _ in range(7)]
    assert [error["code"] for error in seen] == ["busy"] * 5 + ["upstream_failing"] * 2
    assert "answered the last calls with errors" in seen[-1]["message"]


@pytest.mark.parametrize("status", [503, 529])
@pytest.mark.parametrize("other", [{"order": 2}, {"weight": 0.001}])
def test_a_call_goes_on_from_a_server_that_is_too_busy(world: GatewayWorld, status: int, other: dict[str, Any]) -> None:
    world.start(answers(OPENAI_ERROR, status), answers(), options=[{}, other])
    is_stream = status == 529
    answer = world.client().post(CHAT, json={**ASK, "stream": is_stream})
    assert answer.status_code == 200, answer.text
    assert [len(upstream.posts) for upstream in world.upstreams] == [1, 1]


@pytest.mark.parametrize("status", [500, 504])
def test_a_call_that_may_have_been_done_is_not_sent_elsewhere(world: GatewayWorld, status: int) -> None:
    world.start(answers(OPENAI_ERROR, status), answers(), options=[{"order": 1}, {"order": 2}])
    assert world.client().post(CHAT, json=ASK).status_code == status
    assert [len(upstream.posts) for upstream in world.upstreams] == [1, 0]


def test_a_server_that_cannot_be_reached_is_reported_as_away(world: GatewayWorld) -> None:
    world.start(models={"m": model_at("http://127.0.0.1:1/v1")})
    client = world.client()
    for _ in range(7):
        answer = client.post(CHAT, json=ASK)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "upstream_unavailable")


def test_a_model_for_batches_only_is_listed_and_says_so(world: GatewayWorld) -> None:
    world.start(answers(), options=[{"serves": "batch"}])
    client = world.client()
    assert [one["id"] for one in client.get("/v1/models").json()["data"]] == ["m"]
    assert client.get("/v1/models/m").status_code == 200
    for endpoint, body in BODIES.items():
        answer = client.post(endpoint, json=body)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (400, "model_batch_only")
        assert "batches only" in error["message"]
    assert client.post(CHAT, json={**ASK, "service_tier": "flex"}).status_code == 200


def test_a_model_for_interactive_calls_only_says_so_to_a_flex_call(world: GatewayWorld) -> None:
    world.start(answers(), options=[{"serves": "interactive"}])
    answer = world.client().post(CHAT, json={**ASK, "service_tier": "flex"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "model_interactive_only")


def queued(redis_url: str) -> dict[str, Any]:
    place = DeploymentQueue(Secret(redis_url), pool=secrets.token_hex(6))
    return {"queue": place, "max_in_flight": 4}


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_flex_call_never_lies_in_a_queue(world: GatewayWorld, redis_url: str, is_stream: bool) -> None:
    """Its caller would wait for a consumer of the queue. With a direct deployment beside it, it goes there, however little is queued."""
    world.start(answers(), answers(), options=[queued(redis_url), {"batch_fraction": 0.5}])
    client, ask = world.client(), {**ASK, "service_tier": "flex", "stream": is_stream}
    for _ in range(3):
        answer = client.post(CHAT, json=ask)
        assert answer.status_code == 200, answer.text
    assert [len(upstream.posts) for upstream in world.upstreams] == [0, 3]


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_flex_call_for_a_model_behind_a_queue_alone_is_refused(
    world: GatewayWorld, redis_url: str, is_stream: bool
) -> None:
    world.start(answers(), options=[queued(redis_url)])
    client = world.client()
    for tier in ({"service_tier": "flex"}, {}):
        answer = client.post(CHAT, json={**ASK, **tier, "stream": is_stream})
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (400, "model_batch_only", "model"), answer.text
        assert error["message"] == "This model is served through a queue, to batches only: send a batch."
    # A background response is a job, whose items may lie there.
    background = client.post("/v1/responses", json={"model": "m", "input": "hi", "background": True})
    assert background.status_code == 200, background.text


def test_a_flex_call_for_a_model_with_a_queue_and_a_place_for_users_is_refused_and_pointed_there(
    world: GatewayWorld, redis_url: str
) -> None:
    world.start(answers(), answers(), options=[queued(redis_url), {"serves": "interactive"}])
    answer = world.client().post(CHAT, json={**ASK, "service_tier": "flex"})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "model_interactive_only", "service_tier")
    assert "but through a queue" in error["message"]


def test_a_moderation_without_a_model_goes_to_the_usual_one_or_its_refusal_names_that(world: GatewayWorld) -> None:
    verdict = b'{"id":"modr-1","model":"x","results":[{"flagged":false}]}'
    world.start(answers(verdict))
    place = ModelDeployment(url=world.upstreams[0].url)
    missing = world.client().post("/v1/moderations", json={"input": "a"})
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")
    assert "omni-moderation-latest" in missing.json()["error"]["message"]
    other = GatewayWorld(world._directory.parent / "other")
    other.start(models={"omni-moderation-latest": ModelSettings(deployments=(place,))})
    try:
        assert other.client().post("/v1/moderations", json={"input": "a"}).status_code == 200
    finally:
        other.close()
    assert world.upstreams[0].posts[0].body == b'{"input":"a"}'


@pytest.mark.parametrize("stream", [True, False])
def test_without_money_both_sdks_raise_their_rate_limit_error_once(world: GatewayWorld, stream: bool) -> None:
    price = DeploymentPrice(input=1_000.0, output=1_000.0)
    world.start(answers(chat_with("hi", 10, 4)), options=[{"price": price}])
    key = world.web.make_key("acme", limits=(Limit(Period.MONTH, nano=NANO // 100),))
    asked: Any = {**ASK, "max_tokens": 500, "stream": stream}
    with world.openai(key, max_retries=5) as ours, pytest.raises(openai.RateLimitError) as broke:
        ours.chat.completions.create(**asked)
    assert (broke.value.code, broke.value.type) == ("insufficient_quota", "insufficient_quota")
    assert broke.value.response.headers["x-should-retry"] == "false"
    assert broke.value.message.count("You exceeded your current quota") == 1
    with world.anthropic(key) as theirs, pytest.raises(anthropic.RateLimitError) as poor:
        theirs.messages.create(**asked)
    assert isinstance(poor.value.body, dict)
    assert poor.value.body["error"]["code"] == "insufficient_quota"
    assert world.upstreams[0].posts == []


def test_a_call_that_ends_without_an_answer_still_may_have_been_done(world: GatewayWorld) -> None:
    async def hang_up(request: Request, peer: Peer) -> None:
        peer.close()

    world.start(hang_up)
    answer = world.client().post(CHAT, json=ASK)
    assert (answer.status_code, answer.json()["error"]["code"]) == (502, "upstream_ambiguous")


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/v1/batches", "nosuch"),
        ("/v1/batches", "Limit"),
        ("/v1/batches", "order"),
        ("/v1/files", "status"),
        ("/v1/files", "sort"),
        ("/v1/models", "limit"),
    ],
)
def test_a_list_refuses_a_parameter_that_it_does_not_know(world: GatewayWorld, path: str, name: str) -> None:
    world.start()
    client = world.client()
    refused = client.get(path, params={name: "1"})
    error = refused.json()["error"]
    assert (refused.status_code, error["code"], error["param"]) == (400, "unknown_parameter", name)
    assert client.get(path).status_code == 200


def test_lists_take_what_clients_send(world: GatewayWorld) -> None:
    world.start()
    client = world.client()
    assert client.get("/v1/batches", params={"limit": 1}).status_code == 200
    assert client.get("/v1/files", params={"limit": 1, "order": "asc", "purpose": "batch"}).status_code == 200
    assert client.get("/v1/models", params={"client_version": "1.0"}).status_code == 200
    versioned = {"anthropic-version": "2023-06-01"}
    assert client.get("/v1/models", params={"limit": 5, "beta": "true"}, headers=versioned).status_code == 200
    with world.openai() as ours:
        assert list(ours.batches.list(limit=1)) == []
        assert list(ours.files.list(limit=1, order="asc", purpose="batch")) == []
    with world.anthropic() as theirs:
        assert [one.id for one in theirs.models.list(limit=1)] == ["m"]


@pytest.mark.parametrize("words", ["No required SSL certificate was sent", "The SSL certificate error"])
def test_a_server_that_wants_a_certificate_uses_up_no_attempt_and_says_so(world: GatewayWorld, words: str) -> None:
    """As nginx does it: the handshake succeeds, and every request is refused with a page."""
    page = f"<html>\r\n<head><title>400 {words}</title></head>\r\n<body>nginx</body></html>".encode()
    world.start(answers(page, 400, Content_Type="text/html"))
    client = world.client()
    for _ in range(7):
        answer = client.post(CHAT, json=ASK)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "upstream_tls_rejected")
    assert len(world.upstreams[0].posts) == 5, "it is left alone after five failures"
