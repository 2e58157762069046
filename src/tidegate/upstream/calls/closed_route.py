"""The error of a route that takes no call at all.

Its deployments are drained, rest, reject our key, answer with errors or are away. The error follows
from their last failures. This module does not wait or send.
"""

from collections.abc import Sequence

from tidegate.core.errors import KeyRejected, Throttled, Unavailable, UpstreamError
from tidegate.upstream.routing.deployment_state import FAILING, TLS_REJECTED, DeploymentState


def closed_route_error(model: str, states: Sequence[DeploymentState], retry_after_ms: int | None) -> UpstreamError:
    """Return the error for a call to `model` while none of these deployments takes a call."""
    if all(state.deployment.is_drained for state in states):
        return Throttled(
            f"every deployment of model {model!r} is drained: an operator can resume one",
            retry_after_ms=retry_after_ms,
            code="upstream_drained",
        )
    if any(not state.breaker.is_open for state in states):
        return Throttled(
            f"every deployment of model {model!r} rests or has an open circuit", retry_after_ms=retry_after_ms
        )
    if all(state.breaker.is_paused for state in states):
        return KeyRejected(
            f"every deployment of model {model!r} rejected our own key and is paused: check their api_key",
            retry_after_ms=retry_after_ms,
        )
    message = f"every deployment of model {model!r} has an open circuit after failures"
    codes = {state.failure_code for state in states}
    if TLS_REJECTED in codes:
        return Unavailable(message, retry_after_ms=retry_after_ms, code="upstream_tls_rejected")
    if FAILING in codes:
        return Unavailable(message, retry_after_ms=retry_after_ms, code="upstream_failing")
    return Unavailable(message, retry_after_ms=retry_after_ms)
