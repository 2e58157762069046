"""Write result lines in OpenAI's exact shapes.

An answer's body is spliced in as the bytes that the upstream sent; only the characters that some
clients take for the end of a line are escaped.
"""

from contextlib import suppress

import msgspec

from tidegate.core.answers.line_breaks import escape_line_breaks
from tidegate.core.answers.outcome_lines import NEVER_RAN
from tidegate.core.ids import item_id
from tidegate.core.nouns import AnswerTry
from tidegate.core.states import Outcome
from tidegate.core.translate import error_to_openai, is_error_of, says_why
from tidegate.core.usage.prices import units_text

_encode = msgspec.json.encode
INTERACTIVE_TIER = "default"
# A member of the line of an item that went like an interactive call.
INTERACTIVE_MEMBER = b'"service_tier":"%b"' % INTERACTIVE_TIER.encode()


def response_line(name: str, custom_id: bytes, status: int, body: bytes) -> bytes:
    """Return the line of what the upstream answered to this item, good or bad.

    `body` is one line of JSON, `custom_id` the caller's own JSON text.
    """
    line = (
        b'{"id":"%b","custom_id":%b,"response":{"status_code":%d,"request_id":"req_%b","body":%b},"error":null}\n'
        % (
            name.encode(),
            custom_id,
            status,
            name[10:].encode(),
            body,
        )
    )
    return line if line.isascii() else escape_line_breaks(line)


def error_line(job_id: str, number: int, custom_id: bytes, code: str, message: str) -> bytes:
    """Return the line of an item without an answer, with the reason."""
    return escape_line_breaks(
        b'{"id":"%b","custom_id":%b,"response":null,"error":{"code":%b,"message":%b}}\n'
        % (item_id(job_id, number).encode(), custom_id, _encode(code), _encode(message))
    )


def with_members(line: bytes, members: list[bytes]) -> bytes:
    """Return a line with members that OpenAI's shape has no place for: `raw`, `tries`, costs and
    `service_tier`.
    """
    return b'%b,"tidegate":{%b}}\n' % (line[:-2], b",".join(members))


def cost_members(cost_nano: tuple[int, int, int]) -> bytes:
    """Return the cost of an item's answers, exact, so that lines add up to the job's cost."""
    costs = (sum(cost_nano), *cost_nano)
    return b'"cost":"%b","input_cost":"%b","cached_cost":"%b","output_cost":"%b"' % tuple(
        units_text(nano).encode() for nano in costs
    )


def raw_member(raw: bytes) -> bytes:
    """Return what came instead of a usable answer, as a string."""
    text = raw.decode("utf-8", "replace")
    if raw.startswith(b'"'):
        with suppress(msgspec.DecodeError):
            text = msgspec.json.decode(raw, type=str)
    return b'"raw":%b' % escape_line_breaks(_encode(text))


def tries_member(tries: tuple[AnswerTry, ...]) -> bytes:
    """Return every answer that was paid for, in order: its model, its usage and cost, and its
    problem.
    """
    shown = [
        {
            "model": one.model,
            **msgspec.structs.asdict(one.usage),
            "cost": units_text(sum(one.cost_nano)),
            "problem": one.problem,
        }
        for one in tries
    ]
    return b'"tries":%b' % escape_line_breaks(_encode(shown))


def never_ran_line(job_id: str, number: int, custom_id: bytes, outcome: Outcome) -> bytes:
    """Return the line of an item that was not executed before its job ended."""
    return error_line(job_id, number, custom_id, *NEVER_RAN[outcome])


def refused_body(message: str, code: str, param: str | None) -> bytes:
    """Return the body of a request that we refused in the model server's place, in OpenAI's
    shape."""
    return _encode({"error": {"message": message, "type": "invalid_request_error", "param": param, "code": code}})


def http_error_body(status: int, body: bytes, message: str, code: str) -> bytes:
    """Return the body of a refused call: the upstream's error object, its text in OpenAI's shape,
    or our own error.
    """
    if is_error_of(body, anthropic=False) or is_error_of(body, anthropic=True):
        return body.replace(b"\r", b" ").replace(b"\n", b" ")
    if says_why(body):
        return error_to_openai(status, body)
    kind = "invalid_request_error" if status < 500 else "server_error"
    return _encode({"error": {"message": message, "type": kind, "param": None, "code": code}})
