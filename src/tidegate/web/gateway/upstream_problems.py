"""The refusals that clients get when a call fails.

They have the engine's own words if it refused, else ours, and never an address.
"""

import math

from tidegate.core.errors import (
    Ambiguous,
    ApiProblem,
    BrokenAnswer,
    KeyRejected,
    Overspent,
    PoolExhausted,
    Refused,
    Throttled,
    Unavailable,
    UpstreamError,
    Withheld,
)
from tidegate.core.translate import says_why
from tidegate.upstream.routing.deployment_state import FAILING, TLS_REJECTED

# OpenAI's sentence for an account without money.
NO_MONEY = "You exceeded your current quota, please check your plan and billing details."
# Statuses that fit the gateway too: it cannot answer now. Any other 5xx becomes a 502 if the server
# does not explain it.
PASSED_ON = (503, 504, 529)


def own_words(error: UpstreamError) -> bytes | None:
    """Return the body of the engine's 4xx or 5xx; None if there is none that the client may read.

    The body of a 5xx is often a proxy's page with addresses in it, so it must be an error object.
    """
    if not error.body:
        return None
    if isinstance(error, Ambiguous):
        return error.body if error.status >= 400 and says_why(error.body) else None
    return error.body if isinstance(error, Refused | Throttled) and 400 <= error.status <= 499 else None


def retry_after(error: UpstreamError) -> int | None:
    """Return the whole seconds until a retry; None if they are not known."""
    return None if error.retry_after_ms is None else max(1, math.ceil(error.retry_after_ms / 1000))


def problem_of(error: UpstreamError) -> ApiProblem:
    if isinstance(error, Overspent):
        return ApiProblem(429, "insufficient_quota", f"{NO_MONEY} {_sentence(error.message)}")
    status, message = _status_and_message(error)
    return ApiProblem(status, error.code, message, retry_after_s=retry_after(error))


def _status_and_message(error: UpstreamError) -> tuple[int, str]:
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
            return 503, "It is unknown at the moment what the limits still allow, so nothing is sent. Try again soon."
        case Throttled() if error.code == "flex_unavailable":
            return 429, _sentence(error.message)
        case Throttled() if error.code == "upstream_drained":
            return 503, "An operator has taken this model's servers out of use. Nothing was done: send it again later."
        case Throttled():
            return 429, "Every server of this model is busy. Wait as long as Retry-After says, then send it again."
        case PoolExhausted():
            return 503, "Every connection to this model's servers is in use. Send it again in a moment."
        case KeyRejected():
            return 503, "This model's server does not accept the gateway's own key. Tell your operator."
        case Unavailable() if error.code == FAILING:
            return (
                503,
                "This model's server answered the last calls with errors, so nothing is sent to it for a moment. Nothing was done: send "
                "it again later.",
            )
        case Unavailable() if error.code == TLS_REJECTED:
            return 503, "This model's server does not accept the gateway's TLS certificate. Tell your operator."
        case Unavailable():
            return 503, "No server of this model can be reached at the moment. Nothing was done: send it again later."
        case Refused() if 400 <= error.status <= 499:
            return error.status, _sentence(error.message)
        case Refused():
            return 502, "This model's server sends its callers elsewhere. Tell your operator."
        case BrokenAnswer():
            return 502, "This model's server sent something that is no answer. It may have done the work all the same."
        case Ambiguous() if error.status in (503, 529):
            return (
                error.status,
                f"This model's server is overloaded or not ready ({error.status}). Send it again later.",
            )
        case Ambiguous() if error.status:
            status = error.status if error.status in PASSED_ON else 502
            return (
                status,
                f"This model's server failed with status {error.status}. It may have done the work all the same.",
            )
    return 502, "The call broke off after it was sent to this model's server. It may have done the work all the same."


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:] + "."
