"""One call to one deployment that budgets bind, that is told more than its body, or that is weighed in tokens.

It takes leave, has the call sent under it, and settles what it took: unsent leave goes back, what was sent and not done takes no tokens,
what may have been done keeps its reserve. It neither chooses a deployment nor judges one.
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

# A connection that takes longer than a leave lives is kept, so the second leave is nearly always enough.
LEAVES_MAX = 4
LEAVE_DIED_MS = 1_000


class Delivery:
    def __init__(
        self,
        purse: BudgetClient,
        reserve: TokenEstimator,
        clock: Clock,
        notebook: DiscoveredLimits | None,
        rests: Rests | None,
    ) -> None:
        self._purse = purse
        self._reserve = reserve
        self._clock = clock
        self._notebook = notebook
        self._rests = rests

    def bears(self, route: NameRoute, lane: DeploymentState, call: Call) -> bool:
        """Whether a lane that takes an item also takes this call, which the item shares with others."""
        if lane.tide is not None and not lane.tide.bears(call.idempotency_key, call.body):
            return False
        terms = self._purse.terms(route.budgets(lane) + call.budgets)
        if not lane.tokens_max and not terms.counts_tokens:
            return True
        tokens = self._reserve.tokens(call, lane.deployment.estimate)
        fits_now = not lane.tokens_max or lane.tokens_in_flight + tokens <= lane.tokens_max
        return fits_now and (not terms.counts_tokens or tokens <= terms.tokens_max)

    async def send(
        self,
        route: NameRoute,
        lane: DeploymentState,
        call: Call,
        total_s: float,
        flight: BackgroundFlight | None = None,
    ) -> tuple[int, bytes, Usage]:
        """The same for a call that budgets bind, or that is told more, or is weighed. `flight` knows whether it was taken back."""
        terms = self._purse.terms(route.budgets(lane) + call.budgets)
        engine = lane.deployment.engine
        translation = None
        endpoint, body = call.endpoint, call.body
        if is_translated(endpoint, engine):
            translation = ItemTranslation(endpoint, body, engine, self._clock.now_ms() // 1000)
            endpoint, body = translation.shaped.endpoint, translation.shaped.body
        shaped = Shaped(endpoint, lane.hinter.body(route.body(lane, body)))
        is_weighed = terms.counts_tokens or lane.tokens_max
        tokens = self._reserve.tokens(call, lane.deployment.estimate) if is_weighed else 0
        nano = self._reserve.nano(call, lane.deployment, batch=True) if terms.counts_money else FREE
        lane.tokens_in_flight += tokens
        try:
            for _ in range(LEAVES_MAX):
                try:
                    status, line, usage = await self._send_once(
                        terms, lane, call, shaped, tokens, nano, total_s, flight
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
            lane.tokens_in_flight -= tokens
        until_ms = self._clock.monotonic_ms() + LEAVE_DIED_MS
        raise Withheld(
            "every leave to send ran out before a connection was there", until_ms=until_ms, code="leave_died"
        )

    async def _send_once(
        self,
        terms: BindingLimits,
        lane: DeploymentState,
        call: Call,
        shaped: Shaped,
        tokens: int,
        nano: CostRange,
        total_s: float,
        flight: BackgroundFlight | None,
    ) -> tuple[int, bytes, Usage]:
        is_bound = lane.deployment.estimate is Estimate.BOUND and tokens != WHOLE_BUDGET
        is_granted = bool(terms.budgets)
        if is_granted:
            leave = await self._purse.take(terms, tokens, is_bound=is_bound, cost=nano, give_up_ms=call.deadline_ms)
        else:
            leave = SendPermit(self._clock, (), "", 0, math.inf)
        try:
            self._look_again(lane, leave, call, tokens)
            more = (
                b""
                if lane.hinter.is_silent
                else lane.hinter.headers(call, call.deadline_ms - self._clock.monotonic_ms())
            )
            number = lane.quota.count(tokens)
            status, headers, answer = await lane.line.post(
                lane.url(shaped.endpoint), call.idempotency_key, shaped.body, total_s, more, leave, call.attempt_count
            )
            if lane.tells_by[0] in headers or lane.tells_by[1] in headers:
                self.hear(lane, headers, call, number)
            line, usage = classify.accept(shaped.endpoint, status, headers, answer, self._clock.now_ms)
        except BaseException as wrong:
            if is_granted and not leave.begun:
                self._purse.give_back(leave)
            elif is_granted and isinstance(wrong, Throttled | Refused | KeyRejected | Unavailable):
                # It was sent and counts as a request; it was not done, so it took no tokens. What may have been done keeps its reserve.
                self._purse.used(leave, 0, 0)
            elif leave.nano:
                is_taken_back = flight is not None and flight.handed_back
                # All that was set aside counts as spent, and no longer as in flight.
                unanswered = self._reserve.nano_unanswered(call, lane.deployment) if is_taken_back else leave.nano
                self._purse.used(leave, leave.tokens, min(leave.nano, unanswered))
            raise
        self._settle(leave if is_granted else None, lane, call, usage)
        return status, line, usage

    def _settle(self, leave: SendPermit | None, lane: DeploymentState, call: Call, usage: Usage) -> None:
        spent = usage.input_tokens + usage.output_tokens
        if spent:
            self._reserve.learn(call.model, usage, call.items)
        if leave is None:
            return
        if not spent:
            # Nobody said what it took: all that was set aside, as far as anyone knows.
            self._purse.used(leave, leave.tokens)
            return
        price = lane.deployment.price
        paid = 0
        if leave.nano and price is not None:
            paid = cost(usage, price, batch=True).total_nano
            self._reserve.learn_prompt(call, lane.deployment, usage)
        self._purse.used(leave, spent, paid)

    def _look_again(self, lane: DeploymentState, leave: SendPermit, call: Call, tokens: int) -> None:
        """Leave may have been waited for: nothing begins when the lease that covers the call may be over, after its job's window, or at a
        deployment that asked for a rest meanwhile or has said that less is left."""
        now_ms = self._clock.monotonic_ms()
        opens_at_ms = lane.quota.opens_at_ms(tokens)
        if opens_at_ms > now_ms:
            raise Withheld("the deployment said that no more is left", until_ms=opens_at_ms, code="upstream_rests")
        if lane.rests_until_ms > now_ms:
            raise Withheld("the deployment asked for a rest", until_ms=lane.rests_until_ms, code="upstream_rests")
        if now_ms >= call.begin_by_ms:
            raise Withheld("the lease may be over before the call was sent", until_ms=now_ms, code="lease_over")
        if now_ms >= call.deadline_ms:
            raise Withheld("the call's deadline passed before it was sent", until_ms=now_ms, code="deadline_passed")
        leave.dies_ms = min(leave.dies_ms, call.begin_by_ms, call.deadline_ms)

    def hear(self, lane: DeploymentState, headers: Mapping[str, str], call: Call, number: int) -> None:
        """The answer to the lane's call with this number tells of its deployment's limits, and of what is left of them."""
        now_ms = self._clock.monotonic_ms()
        wall_ms = self._clock.now_ms()
        told = rate_limit_headers.read_rate_limits(headers, wall_ms)
        left = rate_limit_headers.read_rest_left(
            headers, wall_ms, classify.retry_after_ms(headers, wall_ms) or rate_limit_headers.MINUTE_MS
        )
        tokens = self._reserve.tokens(call, lane.deployment.estimate)
        lane.is_empty = left.is_nothing
        lane.quota.hear(left, number, tokens, now_ms)
        if told is None:
            return
        if lane.told(told, now_ms):
            log.info("upstream_limits", deployment=lane.deployment.name, requests=told.requests, tokens=told.tokens)
            if lane.discovered is not None and not left.is_nothing:
                # What went out before is inside the window too, and all processes must know it. Of a rest they are told otherwise.
                spent = lane.quota.spent_of(lane.discovered, lane.budget.attempts(now_ms), tokens)
                renew_ms = max(left.requests_renew_ms, left.tokens_renew_ms if left.tokens is not None else 0)
                self._purse.charge(lane.budgets[-1], *spent, now_ms + renew_ms)
            if self._notebook is not None:
                self._notebook.note(lane)
        if told.empty_for_ms and self._rests is not None:
            self._rests.publish(lane.deployment.name, told.empty_for_ms)
