"""Chat items in one provider call: who may, why others may not, and what becomes of each item of a mixed answer."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.core.answers.results import http_error_body
from tidegate.core.errors import Ambiguous, BrokenAnswer, Refused, SettingsError, Throttled, UpstreamError
from tidegate.core.grouping.chat import (
    ENDPOINT,
    ChatAnswer,
    ChatBatching,
    ChatMode,
    ChatPart,
    ChatRoute,
    Singly,
    build,
    plan,
    read,
    split,
)
from tidegate.core.nouns import Usage
from tidegate.core.retry import GiveUp

ROUTE = ChatRoute("d1", "example", "http://h/v1", "public", "inner", ("d2",))
GROUPS = ChatBatching(ChatMode.SYNC_MICROBATCH, upstream_max_batch_size=4, max_total_input_tokens=1000)
HI = [{"role": "user", "content": "hi"}]


def item(route: ChatRoute = ROUTE, **fields: Any) -> ChatPart | Singly:
    return read(ENDPOINT, json.dumps({"model": "m", "messages": HI, **fields}).encode(), route, GROUPS)


def part(**fields: Any) -> ChatPart:
    found = item(**fields)
    assert isinstance(found, ChatPart)
    return found


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"stream": True}, Singly.STREAM),
        ({"tools": [{"type": "mcp", "server_url": "x"}]}, Singly.MCP_TOOLS),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, Singly.TOOLS),
        ({"tools": [{"type": "function"}, {"type": "mcp"}]}, Singly.MCP_TOOLS),
        ({"functions": [{"name": "f"}]}, Singly.TOOLS),
        ({"response_format": {"type": "json_object"}}, Singly.RESPONSE_FORMAT),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, Singly.RESPONSE_FORMAT),
        ({"n": 2}, Singly.CHOICES),
        ({"best_of": 2}, Singly.CHOICES),
        ({"messages": [{"role": "user", "content": "x" * 5000}]}, Singly.TOKENS),
        ({"messages": "hi"}, Singly.MALFORMED),
        ({"messages": None}, Singly.MALFORMED),
    ],
)
def test_what_a_group_could_spoil_goes_alone_and_the_reason_is_named(fields: dict[str, Any], reason: Singly) -> None:
    assert item(**fields) is reason


@pytest.mark.parametrize(
    "fields", [{}, {"stream": False}, {"n": 1}, {"tools": []}, {"tools": None}, {"response_format": {"type": "text"}}]
)
def test_plain_items_may_share_a_call(fields: dict[str, Any]) -> None:
    assert isinstance(item(**fields), ChatPart)


def test_mode_size_executor_and_endpoint_decide_first() -> None:
    body = json.dumps({"model": "m", "messages": HI}).encode()
    for mode in (ChatMode.DISABLED, ChatMode.CONCURRENT):
        assert read(ENDPOINT, body, ROUTE, ChatBatching(mode, upstream_max_batch_size=4)) is Singly.MODE
    assert read(ENDPOINT, body, ROUTE, ChatBatching(ChatMode.SYNC_MICROBATCH)) is Singly.MODE
    assert read(ENDPOINT, body, ROUTE, ChatBatching()) is Singly.MODE
    assert read(ENDPOINT, body, ROUTE, GROUPS, executor=False) is Singly.NO_EXECUTOR
    assert read("/v1/embeddings", body, ROUTE, GROUPS) is Singly.ENDPOINT
    for garbage in (b"", b"[]", b"\xff", b'{"messages":[', b'{"stream":' + b"[" * 100_000):
        assert read(ENDPOINT, garbage, ROUTE, GROUPS) is Singly.MALFORMED


def test_every_part_of_the_route_and_every_parameter_must_agree() -> None:
    base = part()
    for name in ("deployment", "provider", "api_base", "public_model", "deployment_model"):
        other = ChatRoute(**{**{field: getattr(ROUTE, field) for field in ROUTE.__struct_fields__}, name: "else"})
        found = item(other)
        assert isinstance(found, ChatPart)
        assert found.key != base.key
    alone = item(ChatRoute("d1", "example", "http://h/v1", "public", "inner"))
    assert isinstance(alone, ChatPart)
    assert alone.key != base.key
    assert part(temperature=0.5).key != base.key
    assert part(messages=[{"role": "user", "content": "other"}]).key == base.key


@given(st.lists(st.tuples(st.sampled_from("abx"), st.integers(1, 1000)), max_size=30))
def test_each_item_goes_once_within_size_and_token_cap(items: list[tuple[str, int]]) -> None:
    parts: list[ChatPart | Singly] = [
        Singly.TOOLS if key == "x" else ChatPart(key.encode(), b"", b"[]", tokens) for key, tokens in items
    ]
    calls = plan(parts, GROUPS)
    assert sorted(place for call in calls for place in call) == list(range(len(parts)))
    for call in calls:
        assert call == sorted(call)
        assert len(call) <= 4
        assert len({items[place][0] for place in call}) == 1
        assert len(call) == 1 or sum(items[place][1] for place in call) <= 1000


def test_a_group_is_one_request_with_a_list_of_conversations() -> None:
    other = [{"role": "user", "content": "you"}]
    assert json.loads(build([part(max_tokens=5), part(max_tokens=5, messages=other)])) == {
        "model": "m",
        "max_tokens": 5,
        "messages": [HI, other],
    }
    with pytest.raises(ValueError):
        build([part(), part(max_tokens=5)])


def completion(text: str, usage: Any = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "message": {"role": "assistant", "content": text}}], "usage": usage}


def test_a_mixed_answer_settles_each_item_by_itself() -> None:
    used = {"prompt_tokens": 3, "completion_tokens": 2}
    rows = [
        {"index": 5, "error": {"status_code": 400, "message": "bad"}},
        {"index": 1, "error": {"status_code": 429, "message": "slow down", "retry_after": 2}},
        {"index": 0, "body": completion("a", used)},
        {"index": 2, "error": {"status_code": 503}},
        {"index": 3, "error": {"status_code": 408}},
        {"index": 4, "error": "no idea"},
        {"index": 6, "body": completion("b")},
        {"index": 7, "body": {"choices": []}},
        {"index": 9, "body": completion("c", used)},
        {"index": 9, "body": completion("d", used)},
        {"index": 10, "body": completion("e", {"prompt_tokens": 3})},
        {"index": 99, "body": completion("f", used)},
    ]
    got = split(json.dumps({"results": rows}).encode(), 11)
    assert got[0] == ChatAnswer(json.dumps(completion("a", used)).encode(), Usage(3, 0, 2))
    kinds = [type(one) for one in got[1:]]
    assert kinds == [
        Throttled,
        Ambiguous,
        Ambiguous,
        Refused,
        Refused,
        GiveUp,
        BrokenAnswer,
        BrokenAnswer,
        BrokenAnswer,
        GiveUp,
    ]
    assert isinstance(got[1], Throttled)
    assert got[1].retry_after_ms == 2000
    assert isinstance(got[4], Refused)
    assert got[4].code == "invalid_request"
    assert isinstance(got[6], GiveUp)
    assert got[6].code == "chat_usage_missing"


@pytest.mark.parametrize(
    "body", [b"", b"null", b"[]", b"{}", b'{"results":{}}', b'{"results":[1]}', b"\xff", b"[" * 10**5]
)
def test_an_answer_without_items_is_broken(body: bytes) -> None:
    with pytest.raises(BrokenAnswer):
        split(body, 2)


@pytest.mark.parametrize("error", [b"{}", b"[]", b'{"status_code":"429"}', b'{"status_code":true}', b"1", b'"429"'])
def test_an_error_without_a_status_is_the_end(error: bytes) -> None:
    (got,) = split(b'{"results":[{"index":0,"error":%b}]}' % error, 1)
    assert isinstance(got, Refused)


def test_settings_that_cannot_be_are_refused_in_words() -> None:
    assert ChatBatching.named("sync_microbatch", upstream_max_batch_size=8).mode is ChatMode.SYNC_MICROBATCH
    for mode, limits in (
        ("native_async_batch", {}),
        ("serial", {}),
        ("concurrent", {"max_in_flight": 0}),
        ("concurrent", {"upstream_max_batch_size": 0}),
        ("concurrent", {"max_total_input_tokens": -1}),
        ("concurrent", {"require_homogeneous_params": False}),
    ):
        with pytest.raises(SettingsError, match="chat_batching"):
            ChatBatching.named(mode, **limits)


def test_an_items_error_is_written_in_openais_shape() -> None:
    errors: list[Any] = [
        {"status_code": 400, "message": "too long", "code": "context_length", "param": "messages", "trace": "x"},
        {"status_code": 422, "type": "bad_schema", "error": "no"},
        "no idea",
        {"status_code": 503, "message": "busy"},
        {"status_code": 401, "message": "sk-ours is wrong"},
        {"status_code": 200, "message": "odd"},
        {"status_code": 403, "message": "sk-ours may not"},
    ]
    rows = [{"index": index, "error": error} for index, error in enumerate(errors)]
    got = [one for one in split(json.dumps({"results": rows}).encode(), len(rows)) if isinstance(one, UpstreamError)]
    errors_shown = [json.loads(http_error_body(one.status, one.body, one.message, one.code))["error"] for one in got]
    assert [one.status for one in got] == [400, 422, 400, 503, 401, 400, 403]
    assert all(set(error) == {"message", "type", "param", "code"} for error in errors_shown)
    assert errors_shown[0] == {
        "message": "too long", "type": "invalid_request_error", "param": "messages", "code": "context_length",
    }  # fmt: skip
    assert errors_shown[1]["code"] == "bad_schema"
    assert errors_shown[2]["message"] == "no idea"
    assert (errors_shown[3]["message"], errors_shown[3]["type"]) == ("busy", "server_error")
    assert all("sk-ours" not in errors_shown[place]["message"] for place in (4, 6))
