"""Translate error bodies.

The kind follows from the status, so that a client's own retry rules hold on either side.

Anthropic's shape has no place for OpenAI's `code` and `param`: they travel as extra fields, and are
translated back.
"""

from typing import Any

import msgspec

MESSAGE_CHARS_MAX = 4096
NAME_CHARS_MAX = 256
KINDS_ANTHROPIC = {
    400: "invalid_request_error",
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}
KINDS_OPENAI = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
STATUSES = {
    "invalid_request_error": 400,
    "authentication_error": 401,
    "billing_error": 402,
    "permission_error": 403,
    "not_found_error": 404,
    "request_too_large": 413,
    "rate_limit_error": 429,
    "api_error": 500,
    "server_error": 500,
    "timeout_error": 504,
    "overloaded_error": 529,
}


def error_to_anthropic(status: int, body: bytes, request_id: str | None = None) -> bytes:
    """Translate OpenAI's error, or any other body that came with this status, to Anthropic's
    shape."""
    return msgspec.json.encode(error_object(status, _error_of(body), request_id))


def is_error_of(body: bytes, *, anthropic: bool) -> bool:
    """Return whether a body already is an error in Anthropic's shape, or in OpenAI's."""
    try:
        decoded = msgspec.json.decode(body, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return False
    inner = decoded.get("error")
    has_shape = isinstance(inner, dict) and isinstance(inner.get("message"), str)
    return has_shape and (decoded.get("type") == "error") is anthropic


def says_why(body: bytes) -> bool:
    """Return whether a body that came with a failure is an object with a message in one of the
    known shapes.
    """
    return bool(_words(_error_of(body)))


def error_to_openai(status: int, body: bytes) -> bytes:
    """Translate Anthropic's error, or any other body that came with this status, to OpenAI's
    shape."""
    return msgspec.json.encode(openai_error_object(status, _error_of(body)))


def error_object(status: int, reported: dict[str, Any], request_id: str | None = None) -> dict[str, Any]:
    kind = KINDS_ANTHROPIC.get(status) or ("api_error" if status >= 500 else "invalid_request_error")
    error = {"type": kind, "message": _message(status, reported)}
    error |= {
        name: reported[name][:NAME_CHARS_MAX] for name in ("code", "param") if isinstance(reported.get(name), str)
    }
    return {"type": "error", "error": error, "request_id": request_id}


def openai_error_object(status: int, reported: dict[str, Any]) -> dict[str, Any]:
    kind = KINDS_OPENAI.get(status) or ("server_error" if status >= 500 else "invalid_request_error")
    named = [reported[name] for name in ("code", "type") if isinstance(reported.get(name), str)]
    param = reported["param"][:NAME_CHARS_MAX] if isinstance(reported.get("param"), str) else None
    code = named[0][:NAME_CHARS_MAX] if named else None
    return {"error": {"message": _message(status, reported), "type": kind, "param": param, "code": code}}


def status_of(reported: dict[str, Any]) -> int:
    """Return the status for an error inside a stream, which has only a kind."""
    for name in ("status", "code"):
        if type(reported.get(name)) is int and 400 <= reported[name] <= 599:
            return int(reported[name])
    kind = reported.get("type")
    return STATUSES.get(kind, 500) if isinstance(kind, str) else 500


def _error_of(body: bytes) -> dict[str, Any]:
    """Return the inner error object of any known shape; an empty one when there is none."""
    try:
        decoded = msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return {}
    inner = decoded.get("error", decoded) if isinstance(decoded, dict) else {}
    if isinstance(inner, str):
        return {"message": inner}
    return inner if isinstance(inner, dict) else {}


def _message(status: int, reported: dict[str, Any]) -> str:
    return _words(reported) or f"the upstream answered {status} without saying why"


def _words(reported: dict[str, Any]) -> str:
    """Return the sentence in an error object: OpenAI's and Anthropic's `message`, or the `detail`
    of FastAPI's servers.
    """
    for name in ("message", "detail"):
        words = reported.get(name)
        if isinstance(words, list):
            # FastAPI lists what is wrong with each field.
            words = "; ".join(one["msg"] for one in words if isinstance(one, dict) and isinstance(one.get("msg"), str))
        if isinstance(words, str) and words:
            return words[:MESSAGE_CHARS_MAX]
    return ""
