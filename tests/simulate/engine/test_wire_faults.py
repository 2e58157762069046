"""Every fault as a client sees it."""

from __future__ import annotations

import gzip
import json
import socket
import zlib
from collections.abc import Callable
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

import pytest

from tests.simulate.engine.wire import Address, chat_body, read_reply, request_bytes
from tidegate.simulate.engine import EngineOptions
from tidegate.simulate.engine.faults import KINDS

Start = Callable[[EngineOptions], Address]


@pytest.mark.parametrize("status", [400, 401, 404, 429, 500, 502, 503, 504, 529])
def test_statuses(address: Address, status: int) -> None:
    seen = address.behave(str(status))
    assert seen.status == status
    assert set(seen.json["error"]) == {"message", "type", "param", "code"}
    assert "retry-after" not in seen.headers


@pytest.mark.parametrize("value", ["2", "-1", "soon", "1.5"])
def test_retry_after_is_sent_as_written(address: Address, value: str) -> None:
    assert address.behave(f"429:ra={value}").headers["retry-after"] == value


def test_retry_after_can_be_a_date(address: Address) -> None:
    ahead = parsedate_to_datetime(address.behave("503:ra=date+3600").headers["retry-after"]) - datetime.now(UTC)
    assert 3500 < ahead.total_seconds() <= 3600
    past = parsedate_to_datetime(address.behave("503:ra=date-60").headers["retry-after"])
    assert past < datetime.now(UTC)


def test_a_number_of_times_wears_off_for_each_prompt(address: Address) -> None:
    assert [address.behave("500x2", "a").status for _ in range(4)] == [500, 500, 200, 200]
    assert address.behave("500x2", "b").status == 500


def test_a_number_of_times_follows_the_idempotency_key(address: Address) -> None:
    body = chat_body(json.dumps({"behave": "503x1"}))
    seen = [
        address.call("/v1/chat/completions", body, Idempotency_Key=key).status for key in ("k1", "k2", "k1", "k2", "k1")
    ]
    assert seen == [503, 503, 200, 200, 200]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"model": "m", "prompt": 'x {"behave":"503"}'}),
        ("/v1/embeddings", {"model": "m", "input": ["fine", '{"behave":"503"}', "fine"]}),
        ("/v1/responses", {"model": "m", "input": '{"behave":"503"}'}),
        ("/v1/moderations", {"model": "m", "input": '{"behave":"503"}'}),
        (
            "/v1/chat/completions",
            {"model": "m", "messages": [{"role": "user", "content": [{"type": "text", "text": '{"behave":"503"}'}]}]},
        ),
    ],
)
def test_every_endpoint_obeys(address: Address, path: str, body: object) -> None:
    assert address.call(path, body).status == 503


def test_only_the_last_user_message_is_obeyed(address: Address) -> None:
    messages = [{"role": "user", "content": '{"behave":"503"}'}, {"role": "user", "content": "I do not behave"}]
    assert address.call("/v1/chat/completions", {"model": "m", "messages": messages}).status == 200


def test_an_unknown_behaviour_is_a_clear_400(address: Address) -> None:
    seen = address.behave("explode")
    assert seen.status == 400
    assert "slowloris" in seen.json["error"]["message"]


@pytest.mark.parametrize("behaviour", ["hang", "hang_body"])
def test_hangs(address: Address, plug: socket.socket, behaviour: str) -> None:
    plug.sendall(request_bytes("/v1/chat/completions", chat_body(json.dumps({"behave": behaviour}))))
    if behaviour == "hang_body":
        assert plug.recv(65536).endswith(b"\r\n\r\n")
    plug.settimeout(0.2)
    with pytest.raises(TimeoutError):
        plug.recv(1)
    assert address.chat("others are not held up").status == 200


def test_half_a_body_then_the_end(address: Address) -> None:
    seen = address.behave("half")
    assert (seen.status, seen.whole, seen.body[:1]) == (200, False, b"{")


def test_a_length_longer_than_the_body(address: Address) -> None:
    seen = address.behave("longlength")
    assert not seen.whole
    assert seen.json["choices"]
    assert int(seen.headers["content-length"]) == len(seen.body) + 100


def test_reset_before_an_answer(address: Address) -> None:
    with pytest.raises(ConnectionResetError):
        address.behave("reset_before")


def test_reset_in_the_middle_of_a_body(plug: socket.socket) -> None:
    plug.sendall(request_bytes("/v1/chat/completions", chat_body('{"behave":"reset"}')))
    assert plug.recv(100).startswith(b"HTTP/1.1 200 OK")
    with pytest.raises(ConnectionResetError):
        read_to_the_end(plug)


def read_to_the_end(connection: socket.socket) -> None:
    while connection.recv(65536):
        pass


def test_bodies_that_are_wrong(address: Address) -> None:
    with pytest.raises(json.JSONDecodeError):
        _ = address.behave("malformed").json
    assert address.behave("html").headers["content-type"] == "text/html"
    assert address.behave("empty").body == b""
    assert address.behave("null").json is None
    assert address.behave("nochoices").json["choices"] == []
    assert address.call("/v1/embeddings", {"model": "m", "input": '{"behave":"nochoices"}'}).json["data"] == []
    error = address.behave("error200")
    assert (error.status, "error" in error.json) == (200, True)


def test_an_unfit_answer_is_an_answer_whose_text_is_no_json(address: Address) -> None:
    ask: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": '{"behave":"unfitx1"}'}]}
    schema = {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]}
    ask["response_format"] = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    texts = [address.call("/v1/chat/completions", ask).json["choices"][0]["message"]["content"] for _ in range(2)]
    with pytest.raises(json.JSONDecodeError):
        json.loads(texts[0])
    assert isinstance(json.loads(texts[1]), dict)


def test_a_pretty_body_has_lines(address: Address) -> None:
    seen = address.behave("pretty")
    assert seen.body.count(b"\n") > 10
    assert seen.json["choices"][0]["message"]["content"]


def test_a_huge_body_is_as_large_as_asked(address: Address) -> None:
    seen = address.behave("huge=5000000")
    assert len(seen.body) == 5_000_000
    assert seen.json["choices"]


def test_gzip_that_is_none_and_gzip_that_is_a_bomb(address: Address) -> None:
    bad = address.behave("badgzip")
    assert bad.headers["content-encoding"] == "gzip"
    with pytest.raises((OSError, EOFError, zlib.error)):
        gzip.decompress(bad.body)
    bomb = address.behave("bomb=20000000")
    assert len(bomb.body) < 50_000
    assert len(gzip.decompress(bomb.body)) >= 20_000_000


def test_a_redirect_leads_to_a_path_that_tells(address: Address) -> None:
    seen = address.behave("redirect")
    assert (seen.status, seen.headers["location"]) == (307, "/v1/redirected")


@pytest.mark.parametrize("behaviour", ["slow=20", "slowloris=1", "latency=5", "latency=1,slow=5"])
def test_slow_answers_are_whole_in_the_end(address: Address, behaviour: str) -> None:
    seen = address.behave(behaviour)
    assert seen.whole
    assert seen.json["choices"]


def test_slowness_and_an_error_together(address: Address) -> None:
    assert [address.behave("slow=10,500x1", "both").status for _ in range(2)] == [500, 200]


def test_streams_break_too(address: Address) -> None:
    seen = address.chat('{"behave":"half"}', stream=True)
    assert (seen.headers["content-type"], seen.whole) == ("text/event-stream", False)


def test_an_engine_takes_every_kind_at_random(start: Start) -> None:
    kinds = sorted(KINDS - {"hang", "hang_body", "bomb", "huge", "slowloris", "slow"})
    address = start(EngineOptions(port=0, faults={kind: 0.9 / len(kinds) for kind in kinds}, seed=1))
    broken = 0
    for number in range(120):
        try:
            broken += not address.chat(str(number)).whole
        except ConnectionError:
            broken += 1
    assert 0 < broken < 120
    with address.connect() as plug:
        plug.sendall(request_bytes("/metrics"))
        assert read_reply(plug).status == 200


@pytest.mark.parametrize("tools", [[None], [[]], ["x"]])
def test_tools_that_are_no_objects_are_refused(address: Address, tools: list[object]) -> None:
    seen = address.call("/v1/responses", {"model": "m", "input": "x", "tools": tools})
    assert (seen.status, seen.json["error"]["param"]) == (400, "tools")


def test_a_response_repeats_the_tools_that_it_was_given(address: Address) -> None:
    seen = address.call("/v1/responses", {"model": "m", "input": "x", "tools": [{"type": "function", "name": "f"}]})
    assert seen.json["tools"] == [{"strict": True, "parameters": None, "type": "function", "name": "f"}]
