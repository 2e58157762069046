"""The error of a call that no deployment takes: why, and when to come back."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tidegate.core.errors import KeyRejected, Throttled, Unavailable, UpstreamError
from tidegate.upstream.calls.closed_route import closed_route_error
from tidegate.upstream.routing.deployment_state import FAILING, TLS_REJECTED


def state(*, drained: bool = False, opened: bool = True, paused: bool = False, failure: str = "") -> Any:
    breaker = SimpleNamespace(is_open=opened, is_paused=paused)
    return SimpleNamespace(deployment=SimpleNamespace(is_drained=drained), breaker=breaker, failure_code=failure)


@pytest.mark.parametrize(
    ("states", "kind", "code", "says"),
    [
        ([state(drained=True), state(drained=True, opened=False)], Throttled, "upstream_drained", "is drained"),
        ([state(drained=True), state(opened=False)], Throttled, Throttled("").code, "rests or has an open circuit"),
        ([state(paused=True), state(paused=True)], KeyRejected, KeyRejected("").code, "check their api_key"),
        ([state(paused=True), state()], Unavailable, Unavailable("").code, "has an open circuit"),
        ([state(failure=FAILING), state()], Unavailable, "upstream_failing", "has an open circuit"),
        (
            [state(failure=FAILING), state(failure=TLS_REJECTED)],
            Unavailable,
            "upstream_tls_rejected",
            "has an open circuit",
        ),
    ],
)
def test_the_reason_is_that_of_all_deployments_together(
    states: list[Any], kind: type[UpstreamError], code: str, says: str
) -> None:
    error = closed_route_error("m", states, 4_321)
    assert (type(error), error.code, error.retry_after_ms) == (kind, code, 4_321)
    assert says in error.message
    assert "model 'm'" in error.message
