"""What a client hears of a call that came to nothing: the engine's own words where it refused, ours elsewhere, without any address."""

import math

from tidegate.core.errors import (
    ApiProblem,
    BrokenAnswer,
    KeyRejected,
    PoolExhausted,
    Refused,
    Throttled,
    Unavailable,
    UpstreamError,
    Withheld,
)


def own_words(error: UpstreamError) -> bytes | None:
    """The body that the engine sent with a 4xx of its own; None when there is none that is the client's to read."""
    is_its_own = isinstance(error, Refused | Throttled) and 400 <= error.status <= 499
    return error.body if is_its_own and error.body else None


def retry_after(error: UpstreamError) -> int | None:
    """Whole seconds."""
    return None if error.retry_after_ms is None else max(1, math.ceil(error.retry_after_ms / 1000))


def problem_of(error: UpstreamError) -> ApiProblem:
    status, message = _said(error)
    return ApiProblem(status, error.code, message, retry_after_s=retry_after(error))


def _said(error: UpstreamError) -> tuple[int, str]:
    match error:
        case Withheld() if error.code == "budget_spent":
            return (
                429,
                "A limit of requests or tokens is reached. Wait as long as Retry-After says, then send it again.",
            )
        case Withheld() if error.code == "budget_reserved":
            return (
                429,
                "The rest of a budget is set aside for calls in flight. Send it again when some of them have ended.",
            )
        case Withheld() if error.code == "max_parallel_requests_exceeded":
            return 429, "All parallel calls of this key, user or organization are in use. Wait for one to end."
        case Withheld():
            return 503, "Nobody can say at the moment what the limits still allow, so nothing is sent. Try again soon."
        case Throttled() if error.code == "flex_unavailable":
            return 429, error.message[0].upper() + error.message[1:] + "."
        case Throttled():
            return 429, "Every server of this model is busy. Wait as long as Retry-After says, then send it again."
        case PoolExhausted():
            return 503, "Every connection to this model's servers is in use. Send it again in a moment."
        case KeyRejected():
            return 503, "This model's server does not accept the gateway's own key. Tell your operator."
        case Unavailable():
            return 503, "No server of this model can be reached at the moment. Nothing was done: send it again later."
        case Refused() if 400 <= error.status <= 499:
            return error.status, error.message[0].upper() + error.message[1:] + "."
        case Refused():
            return 502, "This model's server sends its callers elsewhere. Tell your operator."
        case BrokenAnswer():
            return 502, "This model's server sent something that is no answer. It may have done the work all the same."
    return 502, "The call broke off after it was sent to this model's server. It may have done the work all the same."
