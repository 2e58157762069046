"""The messages of llm-d's async processor: what it is given, and what each of its results comes to."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from yarl import URL

from tidegate.core.deployments import Queue, Secret
from tidegate.core.errors import Ambiguous, BrokenAnswer, Refused, Throttled, Unavailable, UpstreamError
from tidegate.upstream.http.transport import UpstreamRequest
from tidegate.upstream.queue import messages

KEY = "batch_req_0123456789abcdefABCDEF-00112233aabbccdd"
ID = f"{KEY}.0"
QUEUE = Queue(Secret("redis://localhost"), "req", "res")
NOW_MS = 1_764_044_000_500
BODY = b'{"model":"m", "n":12345678901234567890,"messages":[{"role":"user","content":"h\\u00e9"}]}'


def made(total_s: float = 60.0, now_ms: int = NOW_MS, **headers: str) -> dict[str, Any]:
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    sent = UpstreamRequest(URL("http://gateway/v1/chat/completions"), KEY, BODY, lines.encode())
    read: dict[str, Any] = json.loads(messages.queue_request(sent, QUEUE, "tok", now_ms, total_s).message)
    return read


def test_a_request_is_the_envelope_that_the_processor_reads() -> None:
    envelope = made()
    assert list(envelope) == ["internal", "request_kind", "data"]
    assert envelope["request_kind"] == "plain"
    internal = envelope["internal"]
    assert internal == {
        "enqueued_at_ms": NOW_MS,
        "request_token": "tok",
        "request_queue_name": "req",
        "result_queue_name": "res",
    }
    data = envelope["data"]
    assert (data["id"], data["created"], data["deadline"]) == (ID, 1_764_044_000, 1_764_044_060)
    assert (data["endpoint"], data["headers"]) == ("/v1/chat/completions", {"Idempotency-Key": KEY})


def test_the_body_is_spliced_in_as_it_is() -> None:
    sent = UpstreamRequest(URL("http://gateway/e"), KEY, BODY)
    assert BODY in messages.queue_request(sent, QUEUE, "tok", NOW_MS, 60).message


def test_the_earliest_deadline_comes_first_and_then_the_earliest_request() -> None:
    same = [messages.score(1_764_050_000, NOW_MS + 100 * step) for step in range(50)]
    assert same == sorted(same)
    assert len(set(same)) > 25
    assert max(same) < messages.score(1_764_050_001, NOW_MS - 10_000)


@pytest.mark.parametrize(
    ("early_ms", "steps"), [(-1, 0), (0, 0), (62, 0), (63, 1), (65_536_000, 1 << 20), (131_071_999, (1 << 21) - 1)]
)
def test_a_score_grows_by_a_step_each_62_and_a_half_ms_for_the_last_day_and_a_half(early_ms: int, steps: int) -> None:
    """The processor counts in the same steps, 2 097 152 of them in the 131 072 s before a deadline."""
    deadline_s = 1_764_050_000
    assert messages.score(deadline_s, deadline_s * 1000 - 131_072_000 + early_ms) == deadline_s + steps / (1 << 21)


@pytest.mark.parametrize(
    ("status", "is_done"),
    [(200, True), (400, True), (401, False), (403, False), (404, True), (429, False), (500, True)],
)
def test_a_refusal_of_the_caller_is_no_work_that_must_be_kept(status: int, is_done: bool) -> None:
    assert messages.was_done(status) is is_done


@given(st.integers(1, 4_000_000_000), st.integers(0, 4_000_000_000_000))
def test_a_score_never_leaves_its_second(deadline_s: int, now_ms: int) -> None:
    assert deadline_s <= messages.score(deadline_s, now_ms) < deadline_s + 1


def result(**fields: Any) -> bytes:
    return json.dumps({"id": ID, **fields}).encode()


def test_a_result_is_the_reply_that_a_call_would_have_got() -> None:
    body = '{"choices":[{"text":"\\"é\\n"}]}'
    reply = messages.reply(ID, result(status_code=200, payload=body), 1_000)
    assert (reply.status, reply.body) == (200, body.encode())
    reply = messages.reply(ID, b'{"id":"%b","status_code":404,"payload":{"error":1}}' % ID.encode(), 1_000)
    assert (reply.status, reply.body) == (404, b'{"error":1}')


CODES: dict[str, type[UpstreamError]] = {
    "GATE_DROPPED": Throttled,
    "GATE_ERROR": Unavailable,
    "CANCELLED": Unavailable,
    "PAYLOAD_UNAVAILABLE": Unavailable,
    "INVALID_REQUEST": Refused,
    "DEADLINE_EXCEEDED": Ambiguous,
    "INFERENCE_ERROR": Ambiguous,
    "SOMETHING_NEW": Ambiguous,
    "": Ambiguous,
}


@pytest.mark.parametrize("code", CODES)
def test_every_code_of_the_processor_is_one_class(code: str) -> None:
    with pytest.raises(UpstreamError) as raised:
        messages.reply(ID, result(error_code=code, error_message="why", payload='{"error":"why"}'), 1_000)
    assert type(raised.value) is CODES[code]


BROKEN = [
    b"",
    b"{}",
    b"null",
    b"[" * 100_000,
    b'{"id":"another","status_code":200,"payload":"{}"}',
    result(status_code="200", payload="{}"),
    result(status_code=200, payload="x" * 1_001),
    b'{"id":"%b","status_code":200,"payload":"\xff"}' % ID.encode(),
    b'{"id":"%b","status_code":200,"payload":"\\ud800"}' % ID.encode(),
]


@pytest.mark.parametrize("message", BROKEN, ids=range(len(BROKEN)))
def test_what_cannot_be_an_answer_may_have_been_paid_for(message: bytes) -> None:
    with pytest.raises(BrokenAnswer):
        messages.reply(ID, message, 1_000)


@given(st.binary(max_size=200))
def test_no_bytes_break_the_reader(message: bytes) -> None:
    with pytest.raises(UpstreamError):
        messages.reply(ID, message, 1_000)


def test_header_lines_become_fields() -> None:
    assert messages.headers_of(b"X-A: 1\r\nX-B: two: three\r\n") == {"X-A": "1", "X-B": "two: three"}
    assert messages.headers_of(b"") == {}
