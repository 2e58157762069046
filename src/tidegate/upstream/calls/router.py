"""The Upstream port: each call goes to a deployment of its model that is fit for it, within that deployment's slots and budgets.

It chooses, hands the call to the transport, has the answer sorted, and lets the deployment learn. It does not wait out a rest or a
retry: it says until when, and the engine decides what to do meanwhile; only a budget that frees within a moment is waited for. A call
goes on to another deployment only when the first can neither have done nor billed it, and then under the other's budgets.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Mapping
from typing import Any, TypeVar

import structlog

from tidegate.core.budgets.budget import Budget
from tidegate.core.deployments import Deployment, HttpLimits, Queue, Resource
from tidegate.core.errors import (
    HandedBack,
    KeyRejected,
    Overspent,
    PoolExhausted,
    SettingsError,
    Throttled,
    Unavailable,
    Untranslatable,
    UpstreamError,
    Withheld,
)
from tidegate.core.nouns import Answer, Call
from tidegate.core.ports import Clock, Entropy, RequestQueue
from tidegate.core.usage.prices import Price
from tidegate.upstream.budgets.budget_client import BudgetClient
from tidegate.upstream.budgets.token_estimator import TokenEstimator
from tidegate.upstream.calls.availability import Availability
from tidegate.upstream.calls.budget_wait import BudgetWait
from tidegate.upstream.calls.delivery import Delivery
from tidegate.upstream.calls.feedback import Feedback
from tidegate.upstream.calls.interactive import BackgroundSide, Interactive, InteractiveCall
from tidegate.upstream.calls.response import UpstreamResponse
from tidegate.upstream.calls.slot_queue import Missing, SlotQueue
from tidegate.upstream.calls.translation import MESSAGES
from tidegate.upstream.grouping.groups import Groups
from tidegate.upstream.http import classify
from tidegate.upstream.http.send_permit import PermitExpired, SendPermit
from tidegate.upstream.http.transport import AiohttpTransport, Transport
from tidegate.upstream.queue.asynchronous import Office, QueueTransport
from tidegate.upstream.routing.backpressure import Backpressure
from tidegate.upstream.routing.deployment_state import DeploymentPolicy, DeploymentState, DeploymentStatus
from tidegate.upstream.routing.deployments import Deployments
from tidegate.upstream.routing.discovered_limits import DiscoveredLimits
from tidegate.upstream.routing.key_slots import KeySlots
from tidegate.upstream.routing.probe import CONTROL_LIMITS, PROBE_TIMEOUT_S, Probe, ask_models, probe
from tidegate.upstream.routing.routes import NameRoute, Routes, stick
from tidegate.upstream.routing.slots import Capacity, DeploymentSlots, ModelSlots
from tidegate.upstream.tide.tide_loop import TideLoop
from tidegate.upstream.tide.tides import tide_of

log = structlog.get_logger(__name__)

T = TypeVar("T")


class Router:
    def __init__(
        self,
        deployments: Iterable[Deployment],
        transport: Transport,
        control: Transport,
        clock: Clock,
        entropy: Entropy,
        policy: DeploymentPolicy | None = None,
        pool_timeout_s: float = 10.0,
        resources: Iterable[Resource] = (),
        capacity: Capacity | None = None,
    ) -> None:
        self._transport, self._control, self._clock = transport, control, clock
        capacity = capacity or Capacity()
        policy = policy or DeploymentPolicy()
        self._patience_ms = policy.patience_ms
        self._routes = Routes()
        self._budgets = BudgetClient(capacity.limits, clock)
        self._key_slots = KeySlots(capacity.limits, capacity.worker_id, clock)
        self._model_slots = ModelSlots(capacity.model_in_flight_max, capacity.in_flight_max_global)
        self._room = Availability(
            self._budgets,
            clock,
            self._patience_ms,
            self._model_slots,
            lambda: self._states.spare_calls(capacity.in_flight_max),
        )
        self._groups = self._room.groups = Groups(
            self._find, self._send_from, self._bears, clock, policy.attempts_grouped
        )
        missing = Missing(self._budgets, clock, self._room.ready_at_ms, self._room.wait_ms, self._routes.may_try)
        self._slot_queue = SlotQueue(self._choose, missing, clock, pool_timeout_s, self._room.hurry)
        self._budget_wait = BudgetWait(self._budgets, clock, self._patience_ms, self._choose, self._slot_queue)
        self._room_listeners: list[Callable[[], None]] = []
        room, runs_items = (self._has_room, self._slot_queue.wake), capacity.runs_items
        self._states = Deployments(
            transport, control, policy, lambda one, line: tide_of(one, line, clock, *room, runs_items=runs_items)
        )
        self._tides = TideLoop((), clock, capacity.fleet, capacity.worker_id, capacity.notices)
        self._deployment_slots: DeploymentSlots | None = None
        self._backpressure: Backpressure | None = None
        for why in self.replace(deployments, resources).values():
            raise SettingsError(why)
        self._estimator = TokenEstimator()
        self._discovered = (
            DiscoveredLimits(capacity.discovered, self._states) if capacity.discovered is not None else None
        )
        if (rests := capacity.rests) is not None:
            self._backpressure = Backpressure(rests, clock, policy, self._states.values())
        self._feedback = Feedback(clock, entropy, self._room, self._routes.of, rests, self._backpressure)
        self._delivery = Delivery(self._budgets, self._estimator, clock, self._discovered, rests)
        if capacity.worker_id is not None and capacity.limits is not None:
            self._deployment_slots = DeploymentSlots(
                capacity.limits,
                capacity.worker_id,
                self._states.for_background(),
                self._model_slots,
                rests,
                self._has_room,
            )
            self._room.shared = self._deployment_slots
        self._interactive = self._interactive_side(pool_timeout_s)
        self._interactive.watch(self._interactive_changed)

    def _interactive_side(self, pool_timeout_s: float) -> Interactive:
        return Interactive(
            BackgroundSide(
                self._choose,
                self._slot_queue.wait,
                self._feedback.failed,
                self._model_slots.count,
                self._slot_queue.wake,
            ),
            self._budgets,
            self._estimator,
            self._delivery,
            self._clock,
            pool_timeout_s=pool_timeout_s,
            patience_ms=self._patience_ms,
        )

    # Where calls may go.

    def replace(
        self,
        deployments: Iterable[Deployment],
        resources: Iterable[Resource],
        model_in_flight_max: Mapping[str, int] | None = None,
    ) -> dict[str, str]:
        """Serve these from now on, and say which of them cannot be used and why: those are left out. Without caps of models these stay.

        What is in flight at a deployment that is gone, or now is another server, ends there; who waits looks again. A deployment that only
        has other terms keeps its calls, its health and what was learned of it.
        """
        self._model_slots.allow(model_in_flight_max)
        refused = self._states.serve(deployments, is_alone=self._deployment_slots is None)
        refused |= self._routes.assign(self._states.values(), resources)
        self._groups.refresh()
        self._tides.serve(self._states.tides())
        if self._deployment_slots is not None:
            self._deployment_slots.serve(self._states.for_background())
        self._has_room()
        return refused

    def names(self) -> list[str]:
        """Every model and resource that leads to a deployment; one that serves any model adds none."""
        return self._routes.names()

    # Interactive calls.

    def takes_interactive(self, model: str) -> bool:
        route = self._routes.of(model)
        return any(one.interactive_states for one in (route, *route.fallbacks))

    async def open(self, ask: InteractiveCall) -> UpstreamResponse:
        """Begin an interactive call: its answer, whole or from its first byte on."""
        route, call = self._routes.of(ask.call.model), ask.call
        if not call.parallel:
            return await self._along(route, call, lambda one: self._interactive.open(one, ask))
        await self._key_slots.take(call.parallel)
        try:
            response = await self._along(route, call, lambda one: self._interactive.open(one, ask))
        except BaseException:
            self._key_slots.give_back(call.parallel)
            raise
        response.when_ended(lambda: self._key_slots.give_back(call.parallel))
        return response

    def interactive(self, deployment: str) -> tuple[int, int]:
        """How many interactive calls this process has at a deployment, and how many of them wait for their first token."""
        state = self._states[deployment]
        return state.interactive_in_flight, state.interactive_awaiting

    def watch_interactive(self, changed: Callable[[str], None]) -> None:
        """Have this called at once, with a deployment's name, whenever one of these two numbers changes."""
        self._interactive.watch(changed)

    # What the engine asks before it sends.

    def knows(self, model: str) -> bool:
        route = self._routes.of(model)
        return bool(route.states) or any(one.states for one in route.fallbacks)

    def free_slots(self, model: str) -> int:
        return self._room.free(self._routes.of(model), model)

    def items_per_call(self, model: str | None = None) -> int:
        routes = self._routes.all() if model is None else (self._routes.of(model),)
        return max((one.items_per_call for route in routes for one in (route, *route.fallbacks)), default=1)

    def rests_until_ms(self, model: str) -> float:
        return self._room.rests_until_ms(self._routes.of(model))

    def closed(self, model: str) -> str:
        """Why nothing may be sent to this model now; empty while something may."""
        return self._room.closed(self._routes.of(model), model)

    def budgets(self, model: str) -> list[tuple[Budget, ...]]:
        """What binds calls for this name, for each deployment that could take them."""
        return self._room.budgets(self._routes.of(model))

    def spent_until_ms(self, budgets: tuple[Budget, ...]) -> float:
        return self._room.spent_until_ms(budgets)

    def recorded(self, items: Iterable[tuple[str, int]]) -> None:
        self._transport.recorded(items)

    def on_room(self, tell: Callable[[], None]) -> None:
        self._room_listeners.append(tell)

    def _has_room(self) -> None:
        """More may go than before: those who wait here try again, and those outside look again."""
        if self._backpressure is not None:
            self._backpressure.obey()
        self._slot_queue.wake()
        for tell in self._room_listeners:
            tell()

    def _interactive_changed(self, deployment: str) -> None:
        state = self._states.get(deployment)
        if state is not None and state.tide is not None:
            state.tide.interactive_is(state.interactive_in_flight, state.interactive_awaiting)
            self._tides.announce(deployment)

    # The call itself.

    def send(self, call: Call) -> Coroutine[Any, Any, Answer]:
        route = self._routes.of(call.model)
        if call.parallel:
            return self._send_within(route, call)
        return self._send_by(route, call) if route.is_direct else self._send(route, call)

    async def _send_within(self, route: NameRoute, call: Call) -> Answer:
        await self._key_slots.take(call.parallel)
        try:
            return await self._send(route, call)
        finally:
            self._key_slots.give_back(call.parallel)

    async def _send(self, route: NameRoute, call: Call) -> Answer:
        for one in (route, *route.fallbacks):
            if one.queued_states and (len(one.states) > 1 or route.fallbacks):
                state = await self._out_at(one, call)
                if state is not None:
                    return await self._send_to(one, state, call, self._clock.monotonic_ms())
        if not route.fallbacks:
            return await self._send_by(route, call)
        return await self._along(route, call, lambda one: self._send_by(one, call))

    async def _out_at(self, route: NameRoute, call: Call) -> DeploymentState | None:
        """Where a worker that is gone left this very call: it is waited for there, and sent to no other."""
        for state in route.queued_states:
            line = state.queued_line
            if line is not None and await line.is_out(call.idempotency_key, call.attempt_count):
                return state
        return None

    async def _along(self, route: NameRoute, call: Call, go: Callable[[NameRoute], Awaitable[T]]) -> T:
        """The name's own deployments, then the fallbacks that its key allows, if those before can neither have done nor billed it.

        A retry goes first to those that did not fail this call, or all its tries could go to the one deployment that is ill.
        """
        failed: UpstreamError | None = None
        ways = route.ways(call.models)
        if call.attempt_count:
            ways = tuple(sorted(ways, key=lambda one: one.has_failed(call)))
        for one in ways:
            try:
                return await go(one)
            except (Throttled, Unavailable, KeyRejected, PoolExhausted) as error:
                if not route.fallbacks or error.code in ("deadline_passed", "lease_over"):
                    raise
                log.info("upstream_fallback", model=call.model, failed=one.model_of(call.model), why=error.code)
                failed = failed or error
        assert failed is not None
        if failed.retry_after_ms is None:
            # When it failed, those after it still took calls.
            failed.retry_after_ms = self._room.wait_ms(route, self._clock.monotonic_ms(), call)
        raise failed

    def _send_by(self, route: NameRoute, call: Call) -> Coroutine[Any, Any, Answer]:
        return self._groups.send(route, call) if route.items_per_call > 1 else self._send_from(route, None, call)

    async def _find(self, route: NameRoute, call: Call) -> DeploymentState:
        state = self._choose(route, call, (), self._clock.monotonic_ms())
        return state if state is not None else await self._slot_queue.wait(route, call)

    def _bears(self, route: NameRoute, state: DeploymentState, call: Call) -> bool:
        return self._delivery.bears(route, state, call)

    async def _send_from(self, route: NameRoute, state: DeploymentState | None, call: Call) -> Answer:
        now_ms = self._clock.monotonic_ms()
        if state is None:
            state = self._choose(route, call, (), now_ms)
            if state is None:
                state = await self._slot_queue.wait(route, call)
                now_ms = self._clock.monotonic_ms()
        give_up_ms = now_ms + self._patience_ms
        tried: list[DeploymentState] = []
        put_off: list[DeploymentState] = []
        while True:
            try:
                return await self._send_to(route, state, call, now_ms)
            except Withheld as error:
                # Each deployment at most once without a wait: what is wrong with the call itself is wrong with it everywhere.
                put_off.append(state)
                state = await self._budget_wait.next_state(route, put_off, call, error, give_up_ms)
                now_ms = self._clock.monotonic_ms()
            except (Throttled, Unavailable, KeyRejected, Overspent, Untranslatable) as error:
                # What cannot be paid for there may be cheaper elsewhere, and what cannot be said there may be said elsewhere.
                tried.append(state)
                now_ms = self._clock.monotonic_ms()
                is_left = any(one not in tried for one in route.states)
                other = self._choose(route, call, tried, now_ms) if is_left else None
                if other is None:
                    raise
                log.info(
                    "upstream_failover", deployment=state.deployment.name, to=other.deployment.name, why=error.reason
                )
                state = other

    def _choose(
        self, route: NameRoute, call: Call, tried: Collection[DeploymentState], now_ms: float
    ) -> DeploymentState | None:
        """The least loaded fit deployment, or the one that the call's prefix sticks to; a probe that is due goes first, or a shut
        deployment
        beside a good one stays shut. A deployment whose budget is spent for a moment is the last resort but one: the last is where this
        call was tried before, or all its tries could go to the one deployment that is ill.
        """
        if not self._room.has_slots() or (
            self._model_slots.slots and self._model_slots.room(route.model_of(call.model)) < 1
        ):
            for state in route.states:
                state.is_asked = True
            return None
        best: DeploymentState | None = None
        spent: DeploymentState | None = None
        again: DeploymentState | None = None
        sticky: list[DeploymentState] | None = [] if call.prefix_salt and len(route.states) > 1 else None
        for state in route.states:
            if state.free_slots(now_ms) < 1 or (tried and state in tried):
                continue
            if state.refusals.waits_until_ms(call.idempotency_key) > now_ms:
                continue
            if call.attempt_count and not self._routes.may_try(state, call, now_ms):
                continue
            if state.tide is not None and not state.tide.bears(call.idempotency_key, call.body):
                continue
            if state.tokens_max and not state.bears(self._estimator.tokens(call, state.deployment.estimate)):
                continue
            if state.budgets or route.own_budgets:
                if self._room.opens_at_ms(route, state) > now_ms:
                    continue
                if self._budgets.spent_until_ms(route.budgets(state)) > now_ms:
                    spent = state
                    continue
            if call.attempt_count and state.has_failed(call.idempotency_key):
                again = state
                continue
            if state.breaker.is_open:
                return state
            if sticky is not None:
                sticky.append(state)
            if best is None or state.load() < best.load():
                best = state
        if sticky and len(sticky) > 1:
            return stick(sticky, call.prefix_group) or best
        if again is not None and best is None and spent is None and self._is_full_elsewhere(route, call, tried, now_ms):
            return None
        return best or spent or again

    def _is_full_elsewhere(
        self, route: NameRoute, call: Call, tried: Collection[DeploymentState], now_ms: float
    ) -> bool:
        """Whether a deployment that has not failed this call is well and lacks only room for now: that is worth a wait."""
        return any(
            state.slots > 0
            and state not in tried
            and max(self._room.ready_at_ms(route, state), state.waits_until_ms(call)) <= now_ms
            and not state.has_failed(call.idempotency_key)
            for state in route.states
        )

    async def _send_to(self, route: NameRoute, state: DeploymentState, call: Call, now_ms: float) -> Answer:
        left_s = (call.deadline_ms - now_ms) / 1000
        if left_s <= 0:
            raise Unavailable("the call's deadline passed before it was sent", code="deadline_passed")
        if now_ms >= call.begin_by_ms:
            raise Unavailable("the lease may be over before the call was sent", code="lease_over")
        is_probe = state.breaker.is_open
        if is_probe:
            state.breaker.begin_probe(now_ms)
        attempt = state.budget.count(now_ms, is_retry=self._routes.is_retry(state, call, now_ms))
        state.in_flight += 1
        if state.in_flight > state.highest:
            state.highest = state.in_flight
        # A resource may lead to another model by the time the call ends.
        model = route.model_of(call.model)
        self._model_slots.count(model, 1)
        tide = state.tide
        flight = None
        if tide is not None:
            flight = tide.begin(call.idempotency_key, call.body, call.hand_backs, (model, call.endpoint))
        answered: int | None = None
        refused = False
        try:
            if is_probe:
                await probe(state)
            total_s = min(left_s + call.grace_ms / 1000, route.total_s(state, call.endpoint))
            if state.is_plain and route.is_plain and not call.budgets and call.endpoint != MESSAGES:
                # A probe or a connection may take a while: nothing begins when the lease or the job's window may be over by then.
                permit = SendPermit(self._clock, (), "", 0, min(call.begin_by_ms, call.deadline_ms))
                number = state.quota.count(0)
                status, headers, body = await state.line.post(
                    state.url(call.endpoint), call.idempotency_key, call.body, total_s, b"", permit, call.attempt_count
                )
                by_requests, by_tokens = state.tells_by
                if by_requests in headers or by_tokens in headers:
                    self._delivery.note_limits(state, headers, call, number)
                line, usage = classify.accept(call.endpoint, status, headers, body, self._clock.now_ms)
            else:
                status, line, usage = await self._delivery.send(route, state, call, total_s, flight)
        except UpstreamError as error:
            failed = self._feedback.failed(state, call, error, attempt)
            refused = error.status in (429, 503, 529)
        except PermitExpired:
            late = Withheld("the lease or the window may be over before the call was sent", code="lease_over")
            late.until_ms = self._clock.monotonic_ms()
            failed = self._feedback.failed(state, call, late, attempt)
        except asyncio.CancelledError:
            if flight is None or not flight.handed_back or _is_cancelled_twice():
                raise
            state.budget.undo(attempt)
            failed = HandedBack("an interactive call needed the engine, and this one had no first token yet")
        else:
            answered = usage.output_tokens
            self._feedback.answered(state)
            return Answer(status, line, usage, state.deployment.name)
        finally:
            state.in_flight -= 1
            if flight is not None and tide is not None:
                tide.end(flight, answered, refused=refused)
            self._model_slots.count(model, -1)
            if is_probe:
                state.breaker.end_probe()
            self._slot_queue.wake()
        raise failed

    # What people ask.

    def status(self) -> list[DeploymentStatus]:
        now_ms = self._clock.monotonic_ms()
        states = self._states.values()
        return [state.status(now_ms, self._budgets.spent_until_ms(state.budgets)) for state in states]

    def spent(self) -> dict[str, float]:
        """Until which monotonic moment which budgets are spent, as far as is known here."""
        return self._budgets.spent()

    def price_of(self, name: str) -> Price | None:
        """What tokens cost at a deployment; None where they cost nothing."""
        return self._states.prices.get(name)

    async def probe(self, name: str, timeout_s: float = PROBE_TIMEOUT_S) -> Probe:
        """Ask one deployment, through the control client, whether it is there and which models it serves."""
        return await ask_models(self._states[name], self._clock, timeout_s)

    async def close(self) -> None:
        await self._tides.close()
        await self._interactive.close()
        await self._key_slots.close()
        if self._deployment_slots is not None:
            await self._deployment_slots.close()
        if self._discovered is not None:
            await self._discovered.close()
        await self._budgets.close()
        await self._transport.close()
        await self._control.close()


def _is_cancelled_twice() -> bool:
    """Whether someone else wants this task to end too: then it is not ours to go on with."""
    task = asyncio.current_task()
    return task is None or task.uncancel() > 0


def open_router(
    deployments: Iterable[Deployment],
    limits: HttpLimits,
    clock: Clock,
    entropy: Entropy,
    policy: DeploymentPolicy | None = None,
    resources: Iterable[Resource] = (),
    capacity: Capacity | None = None,
    open_queue: Callable[[Queue], RequestQueue] | None = None,
) -> Router:
    """A router over aiohttp, and over queues where deployments have one; to be called inside the running loop, and closed with it."""
    transport: Transport = AiohttpTransport(limits)
    control: Transport = AiohttpTransport(CONTROL_LIMITS)
    if open_queue is not None:
        office = Office(open_queue, limits, clock, entropy)
        transport, control = QueueTransport(transport, office), QueueTransport(control, office)
    return Router(deployments, transport, control, clock, entropy, policy, limits.pool_timeout_s, resources, capacity)
