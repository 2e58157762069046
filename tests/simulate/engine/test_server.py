"""The server over a real socket: endpoints, streaming, pipelining, limits, garbage, control."""

from __future__ import annotations

import json
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.simulate.engine.wire import Address, chat_body, read_reply, request_bytes
from tests.support.processes import wait_until
from tidegate.simulate.engine import EngineOptions

Start = Callable[[EngineOptions], Address]


def events_of(body: bytes) -> list[str]:
    return [line.removeprefix("data: ") for line in body.decode().splitlines() if line.startswith("data: ")]


def test_an_answer_follows_from_its_prompt_alone(address: Address) -> None:
    one, again, other = address.chat("hello"), address.chat("hello", temperature=0.3), address.chat("hullo")
    texts = [seen.json["choices"][0]["message"]["content"] for seen in (one, again, other)]
    assert texts[0] == texts[1] != texts[2]
    assert one.json["usage"]["completion_tokens"] == len(texts[0]) // 4
    assert one.json["id"] != again.json["id"]


def test_answers_differ_in_length_and_keep_their_bound(address: Address) -> None:
    lengths = {address.chat(f"q{number}").json["usage"]["completion_tokens"] for number in range(30)}
    assert len(lengths) > 10
    assert min(lengths) >= 32
    assert max(lengths) < 96
    for field in ("max_tokens", "max_completion_tokens"):
        short = address.chat("q", **{field: 3}).json
        assert (short["usage"]["completion_tokens"], short["choices"][0]["finish_reason"]) == (3, "length")
    assert address.chat("q", max_tokens=700, ignore_eos=True).json["usage"]["completion_tokens"] == 700


def test_streams_say_the_same_as_whole_answers(address: Address) -> None:
    whole = address.chat("hello").json
    streamed = address.chat("hello", stream=True, stream_options={"include_usage": True})
    assert streamed.headers["content-type"] == "text/event-stream"
    *events, last = events_of(streamed.body)
    assert last == "[DONE]"
    chunks = [json.loads(event) for event in events]
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks if chunk["choices"])
    assert text == whole["choices"][0]["message"]["content"]
    assert chunks[-1]["usage"] == whole["usage"]


def test_several_prompts_and_choices(address: Address) -> None:
    seen = address.call("/v1/completions", {"model": "m", "prompt": ["one", "two"], "n": 2, "max_tokens": 4}).json
    assert [choice["index"] for choice in seen["choices"]] == [0, 1, 2, 3]
    assert seen["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": 16,
        "total_tokens": 18,
        "prompt_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
    }


@pytest.mark.parametrize("given", ["text", ["a", "b"], [1, 2, 3], [[1, 2], [3]]])
def test_embeddings_take_every_input_form(address: Address, given: object) -> None:
    seen = address.call("/v1/embeddings", {"model": "e", "input": given, "dimensions": 10}).json
    count = len(given) if isinstance(given, list) and not isinstance(given[0], int) else 1
    assert [entry["index"] for entry in seen["data"]] == list(range(count))
    for entry in seen["data"]:
        assert len(entry["embedding"]) == 10
        assert sum(part**2 for part in entry["embedding"]) == pytest.approx(1)


def test_models_health_and_metrics(address: Address) -> None:
    assert address.call("/v1/models").json["data"][0]["object"] == "model"
    assert address.call("/v1/models/any%2Fname").json["id"] == "any/name"
    assert address.call("/health").status == 200
    text = address.call("/metrics").body.decode()
    for name in (
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
        "vllm:gpu_cache_usage_perc",
        "vllm:prefix_cache_hits_total",
        "vllm:prompt_tokens_total",
        'vllm:request_success_total{engine="0",model_name="simulated",finished_reason="stop"}',
        'vllm:time_to_first_token_seconds_bucket{engine="0",model_name="simulated",le="+Inf"}',
        "vllm:inter_token_latency_seconds_sum",
        "vllm:time_per_output_token_seconds_count",
    ):
        assert f"\n{name}" in text


def test_pipelined_requests_are_answered_in_order(plug: socket.socket) -> None:
    slow = chat_body('first {"behave":"latency=30"}')
    bodies = [slow, chat_body("second"), chat_body('third {"behave":"500"}'), chat_body("fourth")]
    plug.sendall(b"".join(request_bytes("/v1/chat/completions", body) for body in bodies))
    assert [read_one(plug) for _ in bodies] == [200, 200, 500, 200]


def read_one(connection: socket.socket) -> int:
    """The status of one reply, read byte by byte up to its end, so that nothing of the next is lost."""
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        head += connection.recv(1)
    length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
    while length:
        length -= len(connection.recv(length))
    return int(head.split(b" ")[1])


def test_a_request_may_come_in_any_pieces(plug: socket.socket) -> None:
    data = request_bytes("/v1/chat/completions", chat_body("hello"))
    for start in range(0, len(data), 7):
        plug.sendall(data[start : start + 7])
    assert read_reply(plug).status == 200


def send_in_chunks(plug: socket.socket, body: bytes) -> None:
    plug.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
    for start in range(0, len(body), 5):
        piece = body[start : start + 5]
        plug.sendall(b"%x\r\n%s\r\n" % (len(piece), piece))
    plug.sendall(b"0\r\n\r\n")


def test_a_chunked_body_is_read(plug: socket.socket) -> None:
    send_in_chunks(plug, json.dumps(chat_body("hello")).encode())
    assert read_reply(plug).status == 200
    plug.sendall(request_bytes("/health"))
    assert read_reply(plug).status == 200


def test_the_bound_of_a_body_holds_for_each_chunked_body_alone(start: Start) -> None:
    body = json.dumps(chat_body("hello")).encode()
    with start(EngineOptions(body_bytes_max=len(body))).connect() as plug:
        for _ in range(3):
            send_in_chunks(plug, body)
            assert read_reply(plug).status == 200
        send_in_chunks(plug, body + b" ")
        assert read_reply(plug).status == 413


def test_a_client_that_waits_for_continue_gets_it(plug: socket.socket) -> None:
    data = request_bytes("/v1/chat/completions", chat_body("hello"), Expect="100-continue")
    head, _, body = data.partition(b"\r\n\r\n")
    plug.sendall(head + b"\r\n\r\n")
    assert plug.recv(100).startswith(b"HTTP/1.1 100")
    plug.sendall(body)
    assert read_reply(plug).status == 200


def test_connection_close_is_honoured(address: Address, plug: socket.socket) -> None:
    plug.sendall(request_bytes("/v1/chat/completions", chat_body("hello"), Connection="close"))
    assert read_reply(plug).headers["connection"] == "close"
    assert plug.recv(1) == b""


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"\x16\x03\x01\x02\x00 hello this is not http\r\n\r\n", 400),
        (b"GET\r\n\r\n", 400),
        (b"GET / HTTP/3.0\r\n\r\n", 400),
        (b"POST /v1/chat/completions HTTP/1.1\r\nno colon here\r\n\r\n", 400),
        (b"POST /v1/chat/completions HTTP/1.1\r\ncontent-length: -5\r\n\r\n", 400),
        (b"POST /v1/chat/completions HTTP/1.1\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\n", 400),
        (b"POST /v1/chat/completions HTTP/1.1\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n", 400),
        (b"POST /v1/chat/completions HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n", 400),
        (b"POST /v1/chat/completions HTTP/1.1\r\ncontent-length: 99999999999\r\n\r\n", 413),
        (b"POST /v1/chat/completions HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nffffffff\r\n", 413),
        (b"GET / HTTP/1.1\r\nx: " + b"y" * 40_000, 431),
    ],
)
def test_bytes_that_are_no_request_are_refused_once(plug: socket.socket, data: bytes, status: int) -> None:
    plug.sendall(data)
    seen = read_reply(plug)
    assert seen.status == status
    assert seen.json["error"]["message"]
    assert plug.recv(1) == b""


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", b""),
        ("/v1/chat/completions", b"{"),
        ("/v1/chat/completions", b"[]"),
        ("/v1/chat/completions", b'{"model":"m"}'),
        ("/v1/chat/completions", b'{"model":"m","messages":[]}'),
        ("/v1/chat/completions", b'{"model":7,"messages":[{"role":"user","content":"x"}]}'),
        ("/v1/chat/completions", b'{"model":"m","messages":[{"role":"user","content":"\xff\xfe"}]}'),
        ("/v1/chat/completions", b'{"model":"m","messages":[{"role":"user","content":"\\ud800"}]}'),
        ("/v1/chat/completions", b'{"model":"m","n":0,"messages":[{"role":"user","content":"x"}]}'),
        ("/v1/chat/completions", b'{"model":"m","max_tokens":0,"messages":[{"role":"user","content":"x"}]}'),
        ("/v1/chat/completions", b"[" * 20_000),
        ("/v1/completions", b'{"model":"m","prompt":[]}'),
        ("/v1/completions", b'{"model":"m","prompt":["a",1]}'),
        ("/v1/embeddings", b'{"model":"m","input":"x","dimensions":0}'),
        ("/v1/embeddings", b'{"model":"m","input":"x","encoding_format":"hex"}'),
        ("/v1/responses", b'{"model":"m","input":[]}'),
        ("/v1/moderations", b'{"input":[]}'),
    ],
)
def test_bodies_that_are_no_request_get_a_400(address: Address, path: str, body: bytes) -> None:
    seen = address.call(path, body)
    assert seen.status == 400
    assert seen.json["error"]["type"] == "invalid_request_error"


def test_paths_and_methods_that_are_not_there(address: Address, plug: socket.socket) -> None:
    assert address.call("/v1/nothing", {}).status == 404
    assert address.call("/").status == 404
    assert address.call("/v1/chat/completions").status == 405
    assert address.call("/v1/models", {}).status == 405


def test_a_key_is_asked_for_when_it_is_set(start: Start) -> None:
    address = start(EngineOptions(port=0, api_key="secret"))
    for headers in ({}, {"Authorization": "Bearer wrong"}):
        seen = address.call("/v1/chat/completions", chat_body("x"), **headers)
        assert (seen.status, seen.json["error"]["code"]) == (401, "invalid_api_key")
    assert address.call("/v1/models").status == 401
    assert address.call("/v1/chat/completions", chat_body("x"), Authorization="Bearer secret").status == 200


def test_an_outage_begins_and_ends_at_run_time(start: Start) -> None:
    address = start(EngineOptions(port=0))
    assert address.call("/simulate/faults", {"rate": {"503": 1.0}}).json == {"rate": {"503": 1.0}}
    assert [address.chat("x").status, address.call("/v1/models").status, address.call("/health").status] == [503] * 3
    assert address.call("/metrics").status == 200
    assert address.call("/simulate/faults", {}).json == {"rate": {}}
    assert address.chat("x").status == 200
    wrongs: list[object] = [{"rate": {"what": 1}}, {"rate": {"503": 7}}, {"rates": {}}, b"nonsense"]
    for wrong in wrongs:
        assert address.call("/simulate/faults", wrong).status == 400
    counts = address.call("/simulate/calls").json
    assert counts["by_status"] == {"200": 1, "503": 3}
    assert counts["by_path"]["/v1/chat/completions"] == 2


def test_rates_given_at_the_start_hold(start: Start) -> None:
    address = start(EngineOptions(port=0, faults={"429:ra=1": 0.5}, seed=3))
    seen = [address.chat(f"{number}").status for number in range(60)]
    assert 10 < seen.count(429) < 50
    assert seen.count(200) == 60 - seen.count(429)


def test_fixed_mode_answers_and_forgets_calls_whose_client_left(start: Start) -> None:
    address = start(EngineOptions(port=0, mode="fixed", latency_ms=5))
    assert address.chat("x").status == 200
    assert events_of(address.chat("x", stream=True).body)[-1] == "[DONE]"
    patient = start(EngineOptions(port=0, mode="fixed", latency_ms=3_000_000))
    with patient.connect() as plug:
        plug.sendall(request_bytes("/v1/chat/completions", chat_body("x")))
        wait_until(lambda: " 1.0\n" in gauge(patient, "num_requests_running"), what="the call to run")
    wait_until(lambda: " 0.0\n" in gauge(patient, "num_requests_running"), what="the call to be forgotten")


@pytest.mark.parametrize("processes", [1, 2])
def test_an_engine_that_may_be_killed_has_no_file_with_a_name(
    start: Start, processes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    address = start(EngineOptions(processes=processes))
    assert address.chat("hello").status == 200
    assert list(tmp_path.iterdir()) == []


def gauge(address: Address, name: str) -> str:
    text = address.call("/metrics").body.decode()
    return next(line + "\n" for line in text.splitlines() if line.startswith(f"vllm:{name}{{"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"port": 70000}, "port"),
        ({"mode": "modelled", "processes": 2}, "processes=1"),
        ({"latency_ms": 5}, "mode=fixed"),
        ({"faults": {"nonsense": 0.5}}, "unknown behaviour"),
        ({"kv_blocks": 0}, "kv_blocks"),
    ],
)
def test_options_without_sense_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineOptions(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [
        ("port", 0, 65_535),
        ("processes", 1, 64),
        ("max_num_seqs", 1, 65_536),
        ("prefill_chunk_tokens", 1, 1 << 20),
        ("kv_blocks", 1, 1 << 24),
        ("embedding_dimensions", 1, 16_384),
        ("answer_tokens_mean", 1, 65_536),
        ("body_bytes_max", 1, 1 << 32),
    ],
)
def test_numbers_are_taken_up_to_their_bounds(name: str, low: int, high: int) -> None:
    for number in (low, high):
        assert getattr(EngineOptions(**{name: number}), name) == number  # type: ignore[arg-type]
    for number in (low - 1, high + 1):
        with pytest.raises(ValueError, match=f"{name} must be between"):
            EngineOptions(**{name: number})  # type: ignore[arg-type]
