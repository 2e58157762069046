"""Limits in headers of answers, passed on to the deployment, its budgets and other processes."""

from collections.abc import Mapping

import structlog

from tidegate.core.nouns import Call
from tidegate.core.ports import Clock, Rests
from tidegate.core.retry_after import retry_after_ms
from tidegate.upstream.budgets import rate_limit_headers
from tidegate.upstream.budgets.budget_client import BudgetClient
from tidegate.upstream.budgets.quota import Quota
from tidegate.upstream.budgets.token_estimator import TokenEstimator
from tidegate.upstream.routing.deployment_state import DeploymentState
from tidegate.upstream.routing.discovered_limits import DiscoveredLimits

log = structlog.get_logger(__name__)


class LimitNotes:
    def __init__(
        self,
        budget_client: BudgetClient,
        estimator: TokenEstimator,
        clock: Clock,
        discovered: DiscoveredLimits | None,
        rests: Rests | None,
    ) -> None:
        self._budgets = budget_client
        self._estimator = estimator
        self._clock = clock
        self._discovered = discovered
        self._rests = rests

    def note(self, state: DeploymentState, headers: Mapping[str, str], call: Call, number: int) -> None:
        """Learn from an answer's headers with limits.

        `number` is the call's number at its deployment.
        """
        now_ms = self._clock.monotonic_ms()
        wall_ms = self._clock.now_ms()
        reported = rate_limit_headers.read_rate_limits(headers, wall_ms)
        left = rate_limit_headers.read_rest_left(
            headers, wall_ms, retry_after_ms(headers, wall_ms) or rate_limit_headers.MINUTE_MS
        )
        tokens = self._estimator.tokens(call, state.deployment.estimate)
        state.note_empty(is_empty=left.is_nothing)
        state.note_quota(left, number, tokens, now_ms)
        if reported is None:
            return
        if state.note_limits(reported, now_ms):
            log.info(
                "upstream_limits_discovered",
                deployment=state.deployment.name,
                requests=reported.requests,
                tokens=reported.tokens,
            )
            if state.discovered is not None and not left.is_nothing:
                # Calls sent earlier count in the window too, and all processes must know it. Rests
                # are published separately.
                quota = state.quota or Quota()
                spent = quota.spent_of(state.discovered, state.budget.attempts(now_ms), tokens)
                renew_ms = max(left.requests_renew_ms, left.tokens_renew_ms if left.tokens is not None else 0)
                self._budgets.charge(state.budgets[-1], *spent, now_ms + renew_ms)
            if self._discovered is not None:
                self._discovered.note(state)
        if reported.empty_for_ms and self._rests is not None:
            self._rests.publish(state.deployment.name, reported.empty_for_ms)
