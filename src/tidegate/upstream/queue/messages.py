"""The messages of llm-d's async processor: a request for it, and its result as a reply or an error.

A request is an envelope (`internal`, `request_kind`, `data`) like those of its other producers,
with the caller's body unchanged. A result is not trusted, because any client of the queue can write
one. This module knows no Redis and does not wait.
"""

import msgspec

from tidegate.core.deployments import Queue
from tidegate.core.errors import Ambiguous, AnswerTooLong, BrokenAnswer, Refused, Throttled, Unavailable, UpstreamError
from tidegate.core.queues import QueueRequest
from tidegate.upstream.http.transport import HttpReply, UpstreamRequest

# Requests of one deadline keep the order in which they were queued, in steps of 62.5 ms: the
# processor's own formula.
ORDER_MS = (1 << 17) * 1000
ORDER_STEPS = 1 << 21

# A request is remembered for this long after its caller stopped waiting: its answer may be on its
# way.
LATE_MS = 600_000

_NEVER = msgspec.Raw(b"null")


class _Routing(msgspec.Struct):
    enqueued_at_ms: int
    request_token: str
    request_queue_name: str
    result_queue_name: str


class _QueuedCall(msgspec.Struct):
    id: str
    created: int
    deadline: int
    endpoint: str
    headers: dict[str, str]
    payload: msgspec.Raw


class _Envelope(msgspec.Struct):
    internal: _Routing
    request_kind: str
    data: _QueuedCall


class _Result(msgspec.Struct):
    id: str
    status_code: int = 0
    payload: msgspec.Raw = _NEVER
    error_code: str = ""
    error_message: str = ""


_read = msgspec.json.Decoder(_Result).decode
_read_text = msgspec.json.Decoder(str).decode


def request_id(idempotency_key: str, attempt: int) -> str:
    """Return the id of one attempt of an item; all senders of it wait for the same answer."""
    return f"{idempotency_key}.{attempt}"


def queue_request(request: UpstreamRequest, queue: Queue, token: str, now_ms: int, total_s: float) -> QueueRequest:
    """Return a request for the queue, to be answered within `total_s`."""
    assert request.body is not None
    name = request_id(request.idempotency_key, request.attempt)
    deadline_s = int(now_ms / 1000 + total_s)
    headers = {"Idempotency-Key": request.idempotency_key, **headers_of(request.headers)}
    routing = _Routing(now_ms, token, queue.requests, queue.results)
    data = _QueuedCall(name, now_ms // 1000, deadline_s, request.url.raw_path, headers, msgspec.Raw(request.body))
    message = msgspec.json.encode(_Envelope(routing, "plain", data))
    return QueueRequest(name, message, score(deadline_s, now_ms), token, int(total_s * 1000) + LATE_MS)


def score(deadline_s: int, now_ms: int) -> float:
    """Return the score that sorts the earliest deadline first, then the earliest put."""
    early_ms = min(max(now_ms - (deadline_s * 1000 - ORDER_MS), 0), ORDER_MS - 1)
    return deadline_s + early_ms * ORDER_STEPS // ORDER_MS / ORDER_STEPS


def headers_of(lines: bytes) -> dict[str, str]:
    """Return header lines, in the form of HTTP, as a mapping by name."""
    pairs = (line.partition(": ") for line in lines.decode("latin-1").split("\r\n") if line)
    return {name: value for name, _, value in pairs}


def reply(request_id: str, message: bytes, bytes_max: int) -> HttpReply:
    """Return the reply that a direct call would have got, read from a result.

    Raise one UpstreamError if the result has none.
    """
    try:
        result = _read(message)
        if result.id != request_id:
            raise BrokenAnswer("the result in the queue names another request than the one it was found under")
        body = _body(result.payload)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        # It is an answer to this request, so it may have been paid for.
        raise BrokenAnswer(
            "the result in the queue cannot be read: is it llm-d's async processor that writes it?"
        ) from None
    if result.status_code <= 0:
        raise _failure(result)
    if len(body) > bytes_max:
        raise too_large(bytes_max, result.status_code)
    return HttpReply(result.status_code, {}, body)


def too_large(bytes_max: int, status: int = 0) -> AnswerTooLong:
    message = (
        f"the result in the queue is larger than {bytes_max} bytes: raise http.response_bytes_max if it is meant to be"
    )
    return AnswerTooLong(message, status=status)


def was_done(status: int) -> bool:
    """Return whether a reply with this status must be kept until it is recorded.

    It must if it may have been worked or paid for, or if it is about the request itself.
    """
    return status not in (401, 403, 429)


def _body(payload: msgspec.Raw) -> bytes:
    """Return the body of a result. The processor writes it as text; plain JSON is read too."""
    raw = bytes(payload)
    return _read_text(raw).encode() if raw.startswith(b'"') else raw


def _failure(result: _Result) -> UpstreamError:
    """Return the error for one of the processor's codes.

    Its class tells whether the request may have been worked on.
    """
    why = result.error_message[:200].encode("utf-8", "replace").decode() or "it does not say why"
    match result.error_code:
        case "GATE_DROPPED":
            return Throttled(f"the processor has no room for the request: {why}", code="queue_dropped")
        case "CANCELLED" | "GATE_ERROR" | "PAYLOAD_UNAVAILABLE":
            return Unavailable(f"the processor did not send the request: {why}", code="queue_not_sent")
        case "INVALID_REQUEST":
            return Refused(f"the processor refuses the request: {why}", status=400)
        case "DEADLINE_EXCEEDED":
            return Ambiguous(f"the processor says that the request's time was over: {why}")
    return Ambiguous(f"the processor has no answer: {why}")
