"""Modelled mode over a socket: usage, streams in time, limits, clients that leave."""

from __future__ import annotations

from collections.abc import Callable

from tests.simulate.engine.test_server import events_of, gauge
from tests.simulate.engine.wire import Address, chat_body, request_bytes
from tests.support.processes import wait_until
from tidegate.simulate.engine import EngineOptions

Start = Callable[[EngineOptions], Address]
LONG = "a long preamble that many requests share, word for word. " * 20


def test_cached_tokens_are_reported_and_counted(start: Start) -> None:
    address = start(EngineOptions(port=0, mode="modelled"))
    first = address.chat(LONG + "one", max_tokens=2).json["usage"]
    second = address.chat(LONG + "two", max_tokens=2).json["usage"]
    assert first["prompt_tokens_details"]["cached_tokens"] == 0
    cached = second["prompt_tokens_details"]["cached_tokens"]
    assert cached % 16 == 0
    assert 0.8 * second["prompt_tokens"] < cached < second["prompt_tokens"]
    assert gauge(address, "prefix_cache_hits_total").endswith(f" {float(cached)}\n")
    assert gauge(address, "generation_tokens_total").endswith(" 4.0\n")
    assert gauge(address, "time_to_first_token_seconds_count").endswith(" 2.0\n")
    assert gauge(address, "inter_token_latency_seconds_count").endswith(" 2.0\n")


def test_streams_come_token_by_token(start: Start) -> None:
    address = start(EngineOptions(port=0, mode="modelled"))
    with address.connect() as plug:
        plug.sendall(
            request_bytes("/v1/chat/completions", chat_body("hi", stream=True, max_tokens=20, ignore_eos=True))
        )
        pieces: list[bytes] = []
        while not b"".join(pieces).endswith(b"0\r\n\r\n"):
            pieces.append(plug.recv(65536))
    assert len(pieces) > 5
    whole = address.chat("hi", max_tokens=20, ignore_eos=True).json
    assert whole["usage"]["completion_tokens"] == 20
    for path, body in (
        ("/v1/completions", {"model": "m", "prompt": ["a", "b"], "max_tokens": 3, "stream": True}),
        ("/v1/responses", {"model": "m", "input": "a", "max_output_tokens": 3, "stream": True}),
    ):
        seen = address.call(path, body)
        assert seen.whole
        assert len(events_of(seen.body)) >= 6


def test_embeddings_and_moderations_take_prefill_only(start: Start) -> None:
    address = start(EngineOptions(port=0, mode="modelled"))
    assert len(address.call("/v1/embeddings", {"model": "e", "input": ["a", "b"]}).json["data"]) == 2
    assert address.call("/v1/moderations", {"input": "a"}).json["results"][0]["flagged"] is False


def test_a_prompt_larger_than_the_cache_is_refused(start: Start) -> None:
    address = start(EngineOptions(port=0, mode="modelled", kv_blocks=8))
    seen = address.chat(LONG)
    assert (seen.status, seen.json["error"]["code"]) == (400, "context_length_exceeded")
    assert address.chat("short", max_tokens=2).status == 200


def test_a_client_that_leaves_frees_its_place(start: Start) -> None:
    address = start(EngineOptions(port=0, mode="modelled", max_num_seqs=1))
    endless = request_bytes("/v1/chat/completions", chat_body("hi", max_tokens=100_000, ignore_eos=True))
    with address.connect() as runs, address.connect() as waits:
        runs.sendall(endless)
        wait_until(lambda: gauge(address, "num_requests_running").endswith(" 1.0\n"), what="the first to run")
        waits.sendall(endless)
        wait_until(lambda: gauge(address, "num_requests_waiting").endswith(" 1.0\n"), what="the second to wait")
    wait_until(lambda: gauge(address, "num_requests_running").endswith(" 0.0\n"), what="both to be forgotten")
    assert gauge(address, "num_requests_waiting").endswith(" 0.0\n")
    assert gauge(address, "kv_cache_usage_perc").endswith(" 0.0\n")
    assert address.chat("next", max_tokens=2).status == 200


def test_faults_work_beside_the_model(start: Start) -> None:
    address = start(EngineOptions(port=0, mode="modelled"))
    assert address.behave("500").status == 500
    assert not address.behave("half").whole
    assert b"\n" in address.behave("pretty").body
