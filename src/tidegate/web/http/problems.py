"""All refusals and failures in the shape of a door.

Each status has one type, and no detail is shown that is not the caller's.

The map from errors to responses is here, once. An error that is not in it is our fault, and its
response has only the request's id.
"""

import errno
from collections.abc import Callable, Mapping

import msgspec
import structlog
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import Scope

from tidegate.core.errors import ApiProblem, BlobError, BlobMissing, LostRace, StoreError, StoreFull
from tidegate.core.hooks import HookCode as HookCode
from tidegate.core.translate import error_to_anthropic

log = structlog.get_logger()

RETRY_AFTER_S = 5
# OpenAI's code for an account without money, and also the error's type.
INSUFFICIENT_QUOTA = "insufficient_quota"
# Requests and refusals under this path have Anthropic's shapes.
ANTHROPIC_PATHS = "/v1/messages"
_FULL = (errno.ENOSPC, errno.EDQUOT)
_PATH_CHARS_MAX = 200
# Paths of clients whose base URL lacks the /v1.
_NEED_V1 = ("batches", "chat/completions", "completions", "embeddings", "files", "models", "responses", "uploads")


# Writes a refusal as a door's body, with the request's id.
ErrorShape = Callable[[ApiProblem, str], bytes]
# The shapes of doors other than OpenAI's, by the beginning of their paths.
ErrorShapes = Mapping[str, ErrorShape]


class ErrorDetail(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct):
    error: ErrorDetail


def error_type(status: int, code: str) -> str:
    """Return OpenAI's type for this kind of failure. Its SDK looks at the status alone."""
    if code == INSUFFICIENT_QUOTA:
        return code
    named = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
    if status >= 500:
        return "server_error"
    return named.get(status, "invalid_request_error")


def problem_of(error: Exception, request_id: str) -> ApiProblem:
    """Return the problem to show to a caller.

    An unknown error is logged, and the caller gets only the request's id.
    """
    match error:
        case ApiProblem():
            return error
        case BlobMissing():
            log.error("bytes_missing", request_id=request_id, problem=str(error))
            return ApiProblem(
                500,
                "bytes_missing",
                f"The bytes of this file are gone. Tell your operator the request id {request_id}.",
            )
        case BlobError() | StoreFull() if _is_full(error):
            log.error("storage_full", request_id=request_id, problem=str(error))
            return ApiProblem(507, "storage_full", "The server has no room for these bytes. Tell your operator.")
        case StoreError() | BlobError() | LostRace():
            log.warning("storage_unavailable", request_id=request_id, problem=str(error))
            return ApiProblem(
                503,
                "unavailable",
                "The server cannot reach its storage at the moment. Nothing was accepted: send the request again.",
                retry_after_s=RETRY_AFTER_S,
            )
    log.error("request_failed", request_id=request_id, exc_info=error)
    return ApiProblem(
        500, "internal_error", f"Something went wrong on our side. Tell your operator the request id {request_id}."
    )


def in_openai_shape(problem: ApiProblem, request_id: str) -> bytes:
    kind = error_type(problem.status, problem.code)
    return msgspec.json.encode(ErrorBody(ErrorDetail(problem.message, kind, problem.param, problem.code)))


def in_anthropic_shape(problem: ApiProblem, request_id: str) -> bytes:
    return error_to_anthropic(problem.status, in_openai_shape(problem, request_id), request_id)


def shape_of(path: str, shapes: ErrorShapes) -> ErrorShape:
    """Return the shape of the door that this path belongs to; OpenAI's for unknown paths."""
    return next((shape for start, shape in shapes.items() if path.startswith(start)), in_openai_shape)


def refusal(error: Exception, shape: ErrorShape, scope: Scope, request_id: str) -> Response:
    """Return the answer to a request that ended with this error."""
    if not isinstance(error, HTTPException):
        return answer(problem_of(error, request_id), shape, request_id)
    refused = answer(routing_problem(error, scope["method"], scope["path"]), shape, request_id)
    for name, value in (error.headers or {}).items():
        refused.headers[name] = value
    return refused


def answer(problem: ApiProblem, shape: ErrorShape = in_openai_shape, request_id: str = "") -> Response:
    """Return the response to a refused request, in the shape of a door."""
    encoded = shape(problem, request_id)
    headers = {}
    if problem.retry_after_s is not None:
        headers["Retry-After"] = str(problem.retry_after_s)
    is_final_conflict = problem.status == 409 and problem.retry_after_s is None
    if is_final_conflict or problem.code in (HookCode.FAILED, INSUFFICIENT_QUOTA):
        # The SDKs repeat a conflict, a 429 or a 500. Here a repeat would not help: a conflict
        # without Retry-After stays, money does not come back by itself, and after a hook that
        # failed on an answer each repeat would be paid for.
        headers["x-should-retry"] = "false"
    if problem.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return Response(encoded, problem.status, headers, "application/json")


def routing_problem(error: HTTPException, method: str, path: str) -> ApiProblem:
    """Return the problem for a path or method that has no route."""
    shown = path[:_PATH_CHARS_MAX]
    if error.status_code == 405:
        allowed = ", ".join(sorted((error.headers or {}).get("Allow", "").split(", ")))
        return ApiProblem(405, "method_not_allowed", f"{method} is not allowed here; allowed: {allowed}.")
    if error.status_code == 404:
        return unknown_url(method, shown)
    return ApiProblem(error.status_code, "refused", str(error.detail))


def unknown_url(method: str, path: str) -> ApiProblem:
    hint = ""
    if path.startswith("/v1/v1/"):
        hint = " It has /v1 twice: take one out of the client's base URL. Anthropic's SDK adds its own."
    elif path.lstrip("/").startswith(_NEED_V1):
        hint = " The API is under /v1: end the client's base URL with it."
    return ApiProblem(404, "unknown_url", f"Unknown request URL: {method} {path[:_PATH_CHARS_MAX]}.{hint}")


def _is_full(error: BaseException) -> bool:
    cause = error.__cause__
    return isinstance(error, StoreFull) or (isinstance(cause, OSError) and cause.errno in _FULL)
