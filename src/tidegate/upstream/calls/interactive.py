"""Interactive calls: over the same deployments and under the same budgets as batch work, and before it.

They have places of their own in each deployment, counted apart, and never wait behind batch; how many there are, and how many of them wait
for their first token, is what the tide goes by. A call goes on to another deployment only when the first can neither have done nor billed
it, and never after its first byte. A flex call takes batch's places instead and waits for one. This module translates nothing.
"""

import asyncio
import math
from collections import deque
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from typing import NamedTuple

import structlog

from tidegate.core.answers import answer
from tidegate.core.deployments import EngineKind, Estimate
from tidegate.core.errors import (
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
from tidegate.core.nouns import Call
from tidegate.core.ports import Clock
from tidegate.upstream.budgets.budget_client import FREE, BudgetClient
from tidegate.upstream.budgets.call_receipt import CallReceipt, OnUsage
from tidegate.upstream.budgets.token_estimator import WHOLE_BUDGET, TokenEstimator
from tidegate.upstream.calls.closed_route import closed_route_error
from tidegate.upstream.calls.delivery import PERMIT_EXPIRED_MS, PERMITS_MAX, Delivery
from tidegate.upstream.calls.response import Admission, Closed, UpstreamResponse
from tidegate.upstream.calls.translation import Shaped as Shaped
from tidegate.upstream.http import classify
from tidegate.upstream.http.send_permit import PermitExpired
from tidegate.upstream.http.streams import Stream
from tidegate.upstream.routing.deployment_state import DeploymentState
from tidegate.upstream.routing.probe import probe
from tidegate.upstream.routing.retry_budget import Attempt
from tidegate.upstream.routing.routes import NameRoute
from tidegate.upstream.routing.usage_asking import UsageAsking, names_the_option

log = structlog.get_logger(__name__)

FLEX_RETRY_MS = 5_000
EVENT_STREAM = "text/event-stream"


Shape = Callable[[EngineKind], Shaped]


class InteractiveCall(NamedTuple):
    """One interactive call. `shape` says how an engine must hear it; `flex_wait_s` above 0 makes it a flex call that waits so long."""

    call: Call
    shape: Shape
    is_stream: bool
    flex_wait_s: float = 0.0
    on_usage: OnUsage | None = None


@dataclass(frozen=True, slots=True)
class BackgroundSide:
    """What interactive calls need of the batch side: its places for flex calls, and what is learned from failures."""

    choose: Callable[[NameRoute, Call, Collection[DeploymentState], float], DeploymentState | None]
    wait_for_deployment: Callable[[NameRoute, Call, float], Awaitable[DeploymentState]]
    learn: Callable[[DeploymentState, Call, UpstreamError, Attempt], UpstreamError]
    count: Callable[[str, int], None]
    wake: Callable[[], None]


class Interactive:
    def __init__(
        self,
        batch: BackgroundSide,
        budget_client: BudgetClient,
        estimator: TokenEstimator,
        delivery: Delivery,
        clock: Clock,
        *,
        pool_timeout_s: float,
        patience_ms: float,
    ) -> None:
        self._batch = batch
        self._budgets = budget_client
        self._estimator = estimator
        self._delivery = delivery
        self._clock = clock
        self._pool_timeout_s = pool_timeout_s
        self._patience_ms = patience_ms
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._watchers: list[Callable[[str], None]] = []
        self._probing: dict[str, asyncio.Task[None]] = {}
        self._answered_probe: set[str] = set()
        self._usage = UsageAsking()

    def watch(self, changed: Callable[[str], None]) -> None:
        """Have this called, with a deployment's name, whenever one of its two numbers of interactive calls changed."""
        self._watchers.append(changed)

    async def open(self, route: NameRoute, ask: InteractiveCall) -> UpstreamResponse:
        """The answer's beginning, or all of it; raises an UpstreamError of exactly one class, or what `shape` raises."""
        call = ask.call
        give_up_ms = self._clock.monotonic_ms() + self._patience_ms
        tried: list[DeploymentState] = []
        state = await self._lane(route, ask, tried)
        while True:
            try:
                return await self._open_on(route, state, ask)
            except Withheld as error:
                now_ms = self._clock.monotonic_ms()
                if error.code not in Withheld.BRIEF or error.until_ms > give_up_ms:
                    error.retry_after_ms = math.ceil(max(error.until_ms - now_ms, 1.0))
                    raise
                await asyncio.sleep(max(error.until_ms - now_ms, 1.0) / 1000)
                state = await self._lane(route, ask, ())
            except (Throttled, Unavailable, KeyRejected, Overspent, ApiProblem) as error:
                # What cannot be paid for there may be cheaper elsewhere, and what cannot be said there may be said elsewhere.
                tried.append(state)
                other = self._choose(route, ask, tried)
                if other is None:
                    raise
                log.info(
                    "upstream_failover",
                    deployment=state.deployment.name,
                    to=other.deployment.name,
                    why=error.code,
                    model=call.model,
                )
                state = other

    # Where it goes.

    async def _lane(
        self, route: NameRoute, ask: InteractiveCall, tried: Collection[DeploymentState]
    ) -> DeploymentState:
        state = self._choose(route, ask, tried)
        if state is not None:
            return state
        if ask.flex_wait_s:
            return await self._wait_for_gap(route, ask)
        try:
            async with asyncio.timeout(self._pool_timeout_s):
                while state is None:
                    self._refuse_what_a_place_cannot_help(route, ask)
                    await self._next_release()
                    state = self._choose(route, ask, tried)
                return state
        except TimeoutError:
            pass
        raise PoolExhausted(
            f"every place for interactive calls to model {ask.call.model!r} stayed taken for {self._pool_timeout_s:g} s: "
            "raise max_in_flight of its deployments",
            retry_after_ms=1000,
        )

    def _choose(
        self, route: NameRoute, ask: InteractiveCall, tried: Collection[DeploymentState]
    ) -> DeploymentState | None:
        now_ms = self._clock.monotonic_ms()
        if ask.flex_wait_s:
            return self._batch.choose(route, ask.call, tried, now_ms)
        best: DeploymentState | None = None
        shut: DeploymentState | None = None
        for state in route.interactive_states:
            if state.interactive_in_flight >= state.deployment.max_in_flight or state in tried:
                continue
            if state.ready_at_ms() > now_ms:
                continue
            if state.breaker.is_open:
                shut = state
            elif best is None or state.load() < best.load():
                best = state
        if shut is not None and best is not None:
            # A user's call is not risked on a server that does not even answer a knock; one that does gets one call to prove itself.
            if shut.deployment.name in self._answered_probe:
                self._answered_probe.discard(shut.deployment.name)
                return shut
            self._probe_beside(shut)
        return best or shut

    def _probe_beside(self, state: DeploymentState) -> None:
        name = state.deployment.name
        if name not in self._probing:
            self._probing[name] = task = asyncio.create_task(self._probe(state))
            task.add_done_callback(lambda _: self._probing.pop(name, None))

    async def _probe(self, state: DeploymentState) -> None:
        try:
            await probe(state)
        except Unavailable:
            # Asked again one interval later.
            state.breaker.begin_probe(self._clock.monotonic_ms())
            state.breaker.end_probe()
        else:
            self._answered_probe.add(state.deployment.name)

    async def _wait_for_gap(self, route: NameRoute, ask: InteractiveCall) -> DeploymentState:
        try:
            return await self._batch.wait_for_deployment(route, ask.call, ask.flex_wait_s)
        except PoolExhausted:
            pass
        raise Throttled(
            f"no gap for a flex call came within {ask.flex_wait_s:g} s: send it again later, or without service_tier",
            code="flex_unavailable",
            retry_after_ms=FLEX_RETRY_MS,
        )

    def _refuse_what_a_place_cannot_help(self, route: NameRoute, ask: InteractiveCall) -> None:
        now_ms = self._clock.monotonic_ms()
        states = route.interactive_states
        if not states:
            raise Unavailable(f"no deployment serves model {ask.call.model!r} to interactive calls")
        if all(state.ready_at_ms() > now_ms for state in states):
            wait_ms = math.ceil(min(state.ready_at_ms() for state in states) - now_ms)
            raise closed_route_error(ask.call.model, states, wait_ms)

    async def _next_release(self) -> None:
        admission = asyncio.get_running_loop().create_future()
        self._waiting.append(admission)
        try:
            await admission
        finally:
            if admission in self._waiting:
                self._waiting.remove(admission)

    def _changed(self, state: DeploymentState) -> None:
        for changed in self._watchers:
            changed(state.deployment.name)

    # The call itself.

    async def _open_on(self, route: NameRoute, state: DeploymentState, ask: InteractiveCall) -> UpstreamResponse:
        shaped = ask.shape(state.deployment.engine)
        now_ms = self._clock.monotonic_ms()
        is_probe = state.breaker.is_open
        if is_probe:
            state.breaker.begin_probe(now_ms)
        attempt = state.budget.count(now_ms, is_retry=False)
        # A resource may lead to another model by the time the call ends.
        model = route.model_of(ask.call.model)
        admission = Admission(
            state,
            ask.call,
            is_flex=bool(ask.flex_wait_s),
            counted=lambda more: self._batch.count(model, more),
            changed=self._changed,
        )
        if not ask.is_stream:
            # Its first byte is its last, so its first token is not seen.
            admission.is_not_streamed()

        def closed(error: UpstreamError | None, came_whole: bool) -> UpstreamError | None:
            admission.release(refused=error is not None and error.status in (429, 503, 529))
            if is_probe:
                state.breaker.end_probe()
            learned = None
            if error is not None:
                learned = self._batch.learn(state, ask.call, error, attempt)
            elif came_whole and state.succeeded():
                log.info("upstream_recovered", deployment=state.deployment.name)
            self._wake()
            return learned

        try:
            if is_probe:
                await probe(state)
            return await self._deliver_asking(route, state, ask, shaped, admission, closed)
        except UpstreamError as error:
            failed = closed(error, False) or error
        except BaseException:
            closed(None, False)
            raise
        raise failed

    async def _deliver_asking(
        self,
        route: NameRoute,
        state: DeploymentState,
        ask: InteractiveCall,
        shaped: Shaped,
        admission: Admission,
        closed: Closed,
    ) -> UpstreamResponse:
        """Send the call, and ask a stream for its usage; without asking where the server refuses that."""
        asking = None
        if ask.is_stream:
            is_translated = shaped.endpoint != ask.call.endpoint
            asking = self._usage.request(state, shaped.endpoint, shaped.body, is_translated=is_translated)
        if asking is None:
            return await self._deliver(route, state, ask, shaped, admission, closed)
        if self._usage.takes(state) is not False:
            wished = shaped._replace(body=asking.body, hides_usage=asking.is_extra)
            try:
                response = await self._deliver(route, state, ask, wished, admission, closed)
            except UpstreamError as error:
                if not self._usage.may_be_refused_for(state, error):
                    raise
            else:
                self._usage.learn(state, takes=True)
                return response
        plain = asking.plain()
        if plain is not None:
            shaped = shaped._replace(body=plain)
        response = await self._deliver(route, state, ask, shaped, admission, closed)
        if self._usage.takes(state) is not False:
            self._usage.learn(state, takes=False)
            log.info("stream_usage_refused", deployment=state.deployment.name)
        return response

    async def _deliver(
        self,
        route: NameRoute,
        state: DeploymentState,
        ask: InteractiveCall,
        shaped: Shaped,
        admission: Admission,
        closed: Closed,
    ) -> UpstreamResponse:
        call = ask.call
        body = route.body(state, shaped.body)
        line = state.open_line
        assert line is not None
        terms = self._budgets.terms(route.budgets(state) + call.budgets)
        tokens = self._estimator.tokens(call, state.deployment.estimate) if terms.counts_tokens else 0
        is_bound = state.deployment.estimate is Estimate.BOUND and tokens != WHOLE_BUDGET
        cost = self._estimator.nano(call, state.deployment, batch=False) if terms.counts_money else FREE
        # Nobody waits for an answer until a budget renews.
        give_up_ms = self._clock.monotonic_ms() + self._patience_ms
        for _ in range(PERMITS_MAX if terms.budgets else 1):
            permit = None
            if terms.budgets:
                permit = await self._budgets.take(terms, tokens, is_bound=is_bound, cost=cost, give_up_ms=give_up_ms)
            receipt = CallReceipt(self._budgets, self._estimator, call, permit, state.deployment, ask.on_usage)
            admission.number = state.quota.count(tokens)
            try:
                stream = await line.open(
                    state.url(shaped.endpoint),
                    call.idempotency_key,
                    body,
                    route.total_s(state, call.endpoint),
                    shaped.headers,
                    permit,
                    interactive=not ask.flex_wait_s,
                )
                try:
                    return await self._read_answer(state, ask, shaped, stream, admission, receipt, closed)
                except BaseException:
                    stream.close()
                    raise
            except PermitExpired:
                # Nothing was written, and the connection that took so long is there now.
                receipt.not_done(was_sent=False)
            except BaseException as wrong:
                if permit is not None and not permit.begun:
                    receipt.not_done(was_sent=False)
                elif isinstance(wrong, Throttled | Refused | KeyRejected | Unavailable) or names_the_option(wrong):
                    receipt.not_done(was_sent=True)
                elif isinstance(wrong, asyncio.CancelledError):
                    receipt.left(is_stream=ask.is_stream)
                else:
                    receipt.lost()
                raise
        until_ms = self._clock.monotonic_ms() + PERMIT_EXPIRED_MS
        raise Withheld(
            "every permit to send ran out before a connection was there", until_ms=until_ms, code="permit_expired"
        )

    async def _read_answer(
        self,
        state: DeploymentState,
        ask: InteractiveCall,
        shaped: Shaped,
        stream: Stream,
        admission: Admission,
        receipt: CallReceipt,
        closed: Closed,
    ) -> UpstreamResponse:
        """The answer up to its first byte, or whole where it is not streamed."""
        headers = stream.headers
        if state.tells_by[0] in headers or state.tells_by[1] in headers:
            self._delivery.note_limits(state, headers, ask.call, admission.number)
        is_good = 200 <= stream.status <= 299
        if is_good and ask.is_stream and headers.get("Content-Type", "").startswith(EVENT_STREAM):
            first = await stream.read()
            if not first:
                raise BrokenAnswer("the upstream's stream ended before it began", status=stream.status)
            admission.first_token()
            return UpstreamResponse(
                state.deployment, stream, receipt, closed, first=first, hides_usage=shaped.hides_usage
            )
        admission.is_not_streamed()
        body = await stream.read_whole()
        if not is_good:
            raise classify.refusal(stream.status, headers, body, self._clock.now_ms())
        why = ""
        try:
            _, usage = answer.read(shaped.endpoint, body)
        except answer.NotAnAnswer as wrong:
            why = str(wrong)
        if why:
            raise BrokenAnswer(why, status=stream.status)
        receipt.settle_whole(usage, body)
        closed(None, True)
        return UpstreamResponse(state.deployment, stream, receipt, None, body=body)

    def _wake(self) -> None:
        self._batch.wake()
        waiting, self._waiting = self._waiting, deque()
        for one in waiting:
            if not one.done():
                one.set_result(None)

    async def close(self) -> None:
        for task in list(self._probing.values()):
            task.cancel()
        await asyncio.gather(*self._probing.values(), return_exceptions=True)
