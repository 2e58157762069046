"""One call to one deployment that budgets bind, that is told more than its body, or that is weighed in tokens.

It takes a permit, has the call sent under it, and settles what it took: an unsent permit goes back, what was sent and not done takes no
tokens, what may have been done keeps its reserve. It neither chooses a deployment nor judges one.
"""

import math
from collections.abc import Mapping

import structlog

from tidegate.core.deployments import Estimate
from tidegate.core.errors import KeyRejected, Refused, Throttled, Unavailable, UpstreamError, Withheld
from tidegate.core.nouns import Call, Usage
from tidegate.core.ports import Clock, Rests
from tidegate.core.usage.prices import CostRange, cost
from tidegate.upstream.budgets import rate_limit_headers
from tidegate.upstream.budgets.budget_client import FREE, BindingLimits, BudgetClient
from tidegate.upstream.budgets.token_estimator import WHOLE_BUDGET, TokenEstimator
from tidegate.upstream.calls.translation import ItemTranslation, Shaped, is_translated
from tidegate.upstream.http import classify
from tidegate.upstream.http.send_permit import PermitExpired, SendPermit
from tidegate.upstream.routing.deployment_state import DeploymentState
from tidegate.upstream.routing.discovered_limits import DiscoveredLimits
from tidegate.upstream.routing.routes import NameRoute
from tidegate.upstream.tide.tides import BackgroundFlight

log = structlog.get_logger(__name__)

# A connection that takes longer than a permit lives is kept, so the second permit is nearly always enough.
PERMITS_MAX = 4
PERMIT_EXPIRED_MS = 1_000


class Delivery:
    def __init__(
        self,
        budget_client: BudgetClient,
        estimator: TokenEstimator,
        clock: Clock,
        notebook: DiscoveredLimits | None,
        rests: Rests | None,
    ) -> None:
        self._budgets = budget_client
        self._estimator = estimator
        self._clock = clock
        self._discovered = notebook
        self._rests = rests

    def bears(self, route: NameRoute, state: DeploymentState, call: Call) -> bool:
        """Whether a deployment that takes an item also takes this call, which the item shares with others."""
        if state.tide is not None and not state.tide.bears(call.idempotency_key, call.body):
            return False
        terms = self._budgets.terms(route.budgets(state) + call.budgets)
        if not state.tokens_max and not terms.counts_tokens:
            return True
        tokens = self._estimator.tokens(call, state.deployment.estimate)
        fits_now = not state.tokens_max or state.tokens_in_flight + tokens <= state.tokens_max
        return fits_now and (not terms.counts_tokens or tokens <= terms.tokens_max)

    async def send(
        self,
        route: NameRoute,
        state: DeploymentState,
        call: Call,
        total_s: float,
        flight: BackgroundFlight | None = None,
    ) -> tuple[int, bytes, Usage]:
        """The same for a call that budgets bind, or that is told more, or is weighed. `flight` knows whether it was taken back."""
        terms = self._budgets.terms(route.budgets(state) + call.budgets)
        engine = state.deployment.engine
        translation = None
        endpoint, body = call.endpoint, call.body
        if is_translated(endpoint, engine):
            translation = ItemTranslation(endpoint, body, engine, self._clock.now_ms() // 1000)
            endpoint, body = translation.shaped.endpoint, translation.shaped.body
        shaped = Shaped(endpoint, state.hinter.body(route.body(state, body)))
        is_weighed = terms.counts_tokens or state.tokens_max
        tokens = self._estimator.tokens(call, state.deployment.estimate) if is_weighed else 0
        nano = self._estimator.nano(call, state.deployment, batch=True) if terms.counts_money else FREE
        state.tokens_in_flight += tokens
        try:
            for _ in range(PERMITS_MAX):
                try:
                    status, line, usage = await self._send_once(
                        terms, state, call, shaped, tokens, nano, total_s, flight
                    )
                    return status, line if translation is None else translation.answer(line), usage
                except UpstreamError as error:
                    if translation is not None:
                        translation.failed(error)
                    raise
                except PermitExpired:
                    # Nothing was written, and the connection that took so long is there now.
                    continue
        finally:
            state.tokens_in_flight -= tokens
        until_ms = self._clock.monotonic_ms() + PERMIT_EXPIRED_MS
        raise Withheld(
            "every permit to send ran out before a connection was there", until_ms=until_ms, code="permit_expired"
        )

    async def _send_once(
        self,
        terms: BindingLimits,
        state: DeploymentState,
        call: Call,
        shaped: Shaped,
        tokens: int,
        nano: CostRange,
        total_s: float,
        flight: BackgroundFlight | None,
    ) -> tuple[int, bytes, Usage]:
        is_bound = state.deployment.estimate is Estimate.BOUND and tokens != WHOLE_BUDGET
        is_granted = bool(terms.budgets)
        if is_granted:
            permit = await self._budgets.take(terms, tokens, is_bound=is_bound, cost=nano, give_up_ms=call.deadline_ms)
        else:
            permit = SendPermit(self._clock, (), "", 0, math.inf)
        try:
            self._look_again(state, permit, call, tokens)
            more = (
                b""
                if state.hinter.is_silent
                else state.hinter.headers(call, call.deadline_ms - self._clock.monotonic_ms())
            )
            number = state.quota.count(tokens)
            status, headers, answer = await state.line.post(
                state.url(shaped.endpoint), call.idempotency_key, shaped.body, total_s, more, permit, call.attempt_count
            )
            if state.tells_by[0] in headers or state.tells_by[1] in headers:
                self.note_limits(state, headers, call, number)
            line, usage = classify.accept(shaped.endpoint, status, headers, answer, self._clock.now_ms)
        except BaseException as wrong:
            if is_granted and not permit.begun:
                self._budgets.give_back(permit)
            elif is_granted and isinstance(wrong, Throttled | Refused | KeyRejected | Unavailable):
                # It was sent and counts as a request; it was not done, so it took no tokens. What may have been done keeps its reserve.
                self._budgets.used(permit, 0, 0)
            elif permit.nano:
                is_taken_back = flight is not None and flight.handed_back
                # All that was set aside counts as spent, and no longer as in flight.
                unanswered = self._estimator.nano_unanswered(call, state.deployment) if is_taken_back else permit.nano
                self._budgets.used(permit, permit.tokens, min(permit.nano, unanswered))
            raise
        self._settle(permit if is_granted else None, state, call, usage)
        return status, line, usage

    def _settle(self, permit: SendPermit | None, state: DeploymentState, call: Call, usage: Usage) -> None:
        spent = usage.input_tokens + usage.output_tokens
        if spent:
            self._estimator.learn(call.model, usage, call.items)
        if permit is None:
            return
        if not spent:
            # Nobody said what it took: all that was set aside, as far as anyone knows.
            self._budgets.used(permit, permit.tokens)
            return
        price = state.deployment.price
        paid = 0
        if permit.nano and price is not None:
            paid = cost(usage, price, batch=True).total_nano
            self._estimator.learn_prompt(call, state.deployment, usage)
        self._budgets.used(permit, spent, paid)

    def _look_again(self, state: DeploymentState, permit: SendPermit, call: Call, tokens: int) -> None:
        """Leave may have been waited for: nothing begins when the lease that covers the call may be over, after its job's window, or at a
        deployment that asked for a rest meanwhile or has said that less is left."""
        now_ms = self._clock.monotonic_ms()
        opens_at_ms = state.quota.opens_at_ms(tokens)
        if opens_at_ms > now_ms:
            raise Withheld("the deployment said that no more is left", until_ms=opens_at_ms, code="upstream_rests")
        if state.rests_until_ms > now_ms:
            raise Withheld("the deployment asked for a rest", until_ms=state.rests_until_ms, code="upstream_rests")
        if now_ms >= call.begin_by_ms:
            raise Withheld("the lease may be over before the call was sent", until_ms=now_ms, code="lease_over")
        if now_ms >= call.deadline_ms:
            raise Withheld("the call's deadline passed before it was sent", until_ms=now_ms, code="deadline_passed")
        permit.dies_ms = min(permit.dies_ms, call.begin_by_ms, call.deadline_ms)

    def note_limits(self, state: DeploymentState, headers: Mapping[str, str], call: Call, number: int) -> None:
        """The answer to the deployment's call with this number tells of its deployment's limits, and of what is left of them."""
        now_ms = self._clock.monotonic_ms()
        wall_ms = self._clock.now_ms()
        reported = rate_limit_headers.read_rate_limits(headers, wall_ms)
        left = rate_limit_headers.read_rest_left(
            headers, wall_ms, classify.retry_after_ms(headers, wall_ms) or rate_limit_headers.MINUTE_MS
        )
        tokens = self._estimator.tokens(call, state.deployment.estimate)
        state.is_empty = left.is_nothing
        state.quota.note(left, number, tokens, now_ms)
        if reported is None:
            return
        if state.note_limits(reported, now_ms):
            log.info(
                "upstream_limits", deployment=state.deployment.name, requests=reported.requests, tokens=reported.tokens
            )
            if state.discovered is not None and not left.is_nothing:
                # What went out before is inside the window too, and all processes must know it. Of a rest they are told otherwise.
                spent = state.quota.spent_of(state.discovered, state.budget.attempts(now_ms), tokens)
                renew_ms = max(left.requests_renew_ms, left.tokens_renew_ms if left.tokens is not None else 0)
                self._budgets.charge(state.budgets[-1], *spent, now_ms + renew_ms)
            if self._discovered is not None:
                self._discovered.note(state)
        if reported.empty_for_ms and self._rests is not None:
            self._rests.publish(state.deployment.name, reported.empty_for_ms)
