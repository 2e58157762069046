"""What is learned from how a call ended: by its deployment, by the other processes, and by its sender.

Our own ceiling, deadline and budgets say nothing about a deployment's health. It chooses nothing and sends nothing.
"""

import math

import structlog

from tidegate.core.errors import (
    Ambiguous,
    BrokenAnswer,
    KeyRejected,
    Overspent,
    PoolExhausted,
    RecordedElsewhere,
    Refused,
    Throttled,
    Unavailable,
    Unbounded,
    Untranslatable,
    UpstreamError,
    Withheld,
)
from tidegate.core.nouns import Call
from tidegate.core.ports import Clock, Entropy, Rests
from tidegate.upstream.budgets.budget_client import EXCEEDS_LIMIT
from tidegate.upstream.calls.view import View
from tidegate.upstream.routing.backpressure import Backpressure
from tidegate.upstream.routing.deployment_state import DeploymentState
from tidegate.upstream.routing.retry_budget import Attempt
from tidegate.upstream.routing.routes import Routes

log = structlog.get_logger(__name__)


class Feedback:
    def __init__(
        self,
        clock: Clock,
        entropy: Entropy,
        view: View,
        routes: Routes,
        rests: Rests | None,
        backpressure: Backpressure,
    ) -> None:
        self._clock = clock
        self._entropy = entropy
        self._view = view
        self._routes = routes
        self._rests = rests
        self._backpressure = backpressure

    def answered(self, state: DeploymentState) -> None:
        if state.succeeded():
            log.info("upstream_recovered", deployment=state.deployment.name)
        self._backpressure.answered(state)

    def failed(self, state: DeploymentState, call: Call, error: UpstreamError, attempt: Attempt) -> UpstreamError:
        """Let the deployment learn from a failure; gives the error that the engine sees."""
        now_ms = self._clock.monotonic_ms()
        was_withheld = (
            isinstance(error, Withheld | Overspent | Unbounded | Untranslatable | RecordedElsewhere)
            or error.code == EXCEEDS_LIMIT
        )
        if was_withheld or (not error.billed and not isinstance(error, Refused)):
            # The upstream did not take it, so it was no attempt, neither a first nor another.
            state.budget.undo(attempt)
        if was_withheld:
            return error
        if isinstance(error, KeyRejected) and error.status == 403 and state.blames_the_request(call.idempotency_key):
            state.failures[Refused.reason] += 1
            return Refused("the upstream forbids this request (403), while others pass with the same key", status=403)
        if isinstance(error, PoolExhausted) or (now_ms >= call.deadline_ms and not isinstance(error, Throttled)):
            # Our own ceiling or deadline says nothing about health. A deployment that asks for a rest gets it, however late.
            state.failures[error.reason] += 1
        else:
            self._learn(state, call, error, now_ms)
        key = state.deployment.api_key
        if key is not None:
            # Of an error also a key so short that an answer may well say it.
            error.redact(key.reveal())
        if not isinstance(error, PoolExhausted):
            error.put_off(self._view.wait_ms(self._routes.of(call.model), now_ms, call))
        return error

    def _learn(self, state: DeploymentState, call: Call, error: UpstreamError, now_ms: float) -> None:
        rested_until_ms = state.rests_until_ms
        if state.failed(error, call.idempotency_key, now_ms, self._entropy.uniform(0.0, 1.0)):
            _say_shut(state, error)
        if self._rests is not None and state.rests_until_ms > rested_until_ms:
            self._rests.publish(state.deployment.name, math.ceil(state.rests_until_ms - now_ms))
        if isinstance(error, Unavailable | Ambiguous | BrokenAnswer | KeyRejected):
            self._backpressure.failed(state)


def _say_shut(state: DeploymentState, error: UpstreamError) -> None:
    name = state.deployment.name
    if isinstance(error, KeyRejected):
        log.error("upstream_key_rejected", deployment=name, status=error.status, to_do="check the deployment's api_key")
    else:
        log.warning("upstream_circuit_opened", deployment=name, why=error.message)
