"""The choice of a deployment for a call, the call's part of it meanwhile, and what its end teaches.

- `View` has the present state: which deployments have a slot, which budgets are spent, and from
  when on they take calls. It reads deployments, budgets and slots, and changes none of them.
- `choose` is a pure function of it, for background and interactive calls alike.
- `Admissions` takes the call's part in the same moment: a slot, a place in the tide, an attempt.
  Items and flex calls count as background calls, interactive calls count apart, and all of them
  count against the deployment's slots. An admission ends exactly once.
- `Feedback` reports the end of a call to its deployment, the other processes and its sender. An
  answer shows the usage and the deployment's limits; a failure may show that the deployment is not
  healthy. A failure by our own ceiling, deadline or budgets does not.

This module does not wait and sends no call.
"""

import asyncio
import math
from collections.abc import Callable, Collection, Iterable, Mapping

import msgspec
import structlog

from tidegate.core.answers import answer as answers
from tidegate.core.budgets.budget import Budget
from tidegate.core.errors import (
    Ambiguous,
    AnswerUnusable,
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
from tidegate.core.nouns import Answer, Call, Usage
from tidegate.core.ports import Clock, Entropy, Rests
from tidegate.upstream.budgets.budget_client import EXCEEDS_LIMIT, BudgetClient
from tidegate.upstream.budgets.token_estimator import TokenEstimator
from tidegate.upstream.calls.limit_notes import LimitNotes
from tidegate.upstream.calls.traffic import Traffic
from tidegate.upstream.http import classify
from tidegate.upstream.http.transport import HttpReply
from tidegate.upstream.routing.backpressure import Backpressure
from tidegate.upstream.routing.deployment_state import Attempt, DeploymentState
from tidegate.upstream.routing.routes import NameRoute, Routes, stick
from tidegate.upstream.routing.slots import ModelSlots, RoomSignal, SlotDemand
from tidegate.upstream.tide.tide_loop import TideLoop
from tidegate.upstream.tide.tides import BackgroundFlight

log = structlog.get_logger(__name__)

# The first token of an answer that is not streamed cannot be seen; it is assumed to have come after
# this time.
UNSEEN_FIRST_TOKEN_S = 1.0

# A server that answers with one of these has too much to do.
BUSY = (429, 503, 529)


class View:
    """The state of routes, slots and budgets at one moment. `routes` is for reading."""

    def __init__(
        self,
        routes: Routes,
        slots: ModelSlots,
        demand: SlotDemand,
        budget_client: BudgetClient,
        estimator: TokenEstimator,
        patience_ms: float,
    ) -> None:
        self.routes = routes
        self._model_slots = slots
        self._demand = demand
        self._budgets = budget_client
        self._estimator = estimator
        self._patience_ms = patience_ms

    # Slots.

    def has_model_slots(self, route: NameRoute, call: Call, now_ms: float) -> bool:
        """Return whether the call's model has a background slot that this process still owns."""
        slots = self._model_slots
        return (self._demand.is_alone or self._demand.own_until_ms() > now_ms) and (
            not slots.has_caps or slots.room(route.model or call.model) >= 1
        )

    def has_slot_for_user(self, state: DeploymentState, owner: str, now_ms: float) -> bool:
        return state.takes_interactive(owner) and (not state.counts_interactive or self._demand.own_until_ms() > now_ms)

    def takes_item(self, state: DeploymentState, call: Call, now_ms: float) -> bool:
        """Return whether a deployment has a slot for this background call and may take it."""
        if state.free_slots(now_ms) < 1:
            return False
        if state.refusals.waiting and state.refusals.waits_until_ms(call.idempotency_key) > now_ms:
            return False
        if call.attempt_count and not self.routes.may_try(state, call, now_ms):
            return False
        if state.tide is not None and not state.tide.can_take(call.idempotency_key, call.body):
            return False
        return not state.tokens_max or state.can_take(self._estimator.tokens(call, state.deployment.estimate))

    def can_take(self, route: NameRoute, state: DeploymentState, call: Call) -> bool:
        """Return whether a deployment that takes an item also takes the item's shared call."""
        if state.tide is not None and not state.tide.can_take(call.idempotency_key, call.body):
            return False
        terms = self._budgets.terms(route.budgets(state) + call.budgets)
        if not state.tokens_max and not terms.counts_tokens:
            return True
        tokens = self._estimator.tokens(call, state.deployment.estimate)
        fits_now = not state.tokens_max or state.tokens_in_flight + tokens <= state.tokens_max
        return fits_now and (not terms.counts_tokens or tokens <= terms.tokens_max)

    def may_try(self, state: DeploymentState, call: Call, now_ms: float) -> bool:
        return self.routes.may_try(state, call, now_ms)

    def are_limits_away(self, now_ms: float) -> bool:
        return self._budgets.unreachable_until_ms > now_ms

    # Moments.

    def budgets_spent_until_ms(self, route: NameRoute, state: DeploymentState) -> float:
        """Return the moment until which the budgets of a name on a deployment are spent."""
        return self._budgets.spent_until_ms(route.budgets(state))

    def is_budget_of(self, route: NameRoute, state: DeploymentState, budget_id: str) -> bool:
        """Return whether this is a budget of a name on a deployment, and not of the caller."""
        return any(budget.id == budget_id for budget in route.budgets(state))

    def worth_sending_at_ms(self, budgets: tuple[Budget, ...]) -> float:
        """Return the known moment before which no call is worth sending under these budgets."""
        return self._budgets.spent_until_ms(budgets) - self._patience_ms

    def opens_at_ms(self, route: NameRoute, state: DeploymentState) -> float:
        """Return the moment from which a name's budgets on a deployment let a call in."""
        if not state.budgets and not route.own_budgets:
            return 0.0
        return self._budgets.opens_at_ms(route.budgets(state), self._patience_ms)

    def ready_at_ms(self, route: NameRoute, state: DeploymentState) -> float:
        return max(state.ready_at_ms(), state.background_rests_until_ms, self.opens_at_ms(route, state))

    def waits_ms(self, route: NameRoute, state: DeploymentState, now_ms: float) -> float:
        """Return the moment until which calls for a name should go to another deployment."""
        return max(state.rest_ends_ms(now_ms), state.background_rests_until_ms, self.opens_at_ms(route, state))

    def wait_ms(self, route: NameRoute, now_ms: float, call: Call) -> int | None:
        """Return the wait until the first deployment takes this call.

        Return None if one does now, or none is left.
        """
        states = [(one, state) for one in route.ways(call.models) for state in one.states]
        states = states or [(route, state) for state in route.interactive_states]
        moments = (max(self.waits_ms(one, state, now_ms), state.waits_until_ms(call)) for one, state in states)
        wait_ms = math.ceil(min(moments, default=now_ms) - now_ms)
        return wait_ms if wait_ms > 0 else None


def states_for(route: NameRoute, traffic: Traffic | None) -> list[DeploymentState]:
    """Return the deployments that a call of this traffic may go to."""
    if traffic is None:
        return route.states
    return route.flex_states if traffic.flex_wait_s else route.interactive_states


def choose(
    view: View,
    route: NameRoute,
    call: Call,
    traffic: Traffic | None,
    tried: Collection[DeploymentState],
    now_ms: float,
) -> DeploymentState | None:
    """Return the least loaded fit deployment, or the one that the call's prefix sticks to.

    - Return None if none is fit.
    - Next best is a deployment whose budget is spent for a moment, then one where this call has
      failed before: otherwise all its tries could go to the one unhealthy deployment.
    - A background call takes a deployment whose probe is due first. Otherwise the circuit of a
      deployment beside a healthy one would stay open.
    - A user's call goes to a deployment with an open circuit only if that deployment has answered a
      probe since, or if no other is there.
    """
    is_user = traffic is not None and not traffic.flex_wait_s
    if not is_user and not view.has_model_slots(route, call, now_ms):
        return None
    states = states_for(route, traffic)
    best = spent = again = unready = None
    sticky: list[DeploymentState] | None = [] if call.prefix_salt and len(states) > 1 else None
    for state in states:
        if tried and state in tried:
            continue
        if is_user:
            assert traffic is not None
            if state.ready_at_ms() > now_ms or not view.has_slot_for_user(state, traffic.owner, now_ms):
                continue
        elif not view.takes_item(state, call, now_ms):
            continue
        if state.budgets or route.own_budgets:
            if not is_user and view.opens_at_ms(route, state) > now_ms:
                continue
            if view.budgets_spent_until_ms(route, state) > now_ms:
                spent = state
                continue
        if call.attempt_count and state.has_failed(call.idempotency_key):
            again = state
            continue
        if state.breaker.is_open:
            if not is_user or state.breaker.has_answered:
                return state
            unready = state
            continue
        if sticky is not None:
            sticky.append(state)
        if best is None or state.load() < best.load():
            best = state
    if sticky:
        return stick(sticky, call.prefix_group) or best
    if again is not None and best is None and spent is None and _is_full_elsewhere(view, route, call, tried, now_ms):
        return None
    return best or spent or again or unready


def open_circuit_beside(route: NameRoute, chosen: DeploymentState, now_ms: float) -> DeploymentState | None:
    """Return a deployment with an open circuit beside a user's chosen one whose probe is due."""
    for state in route.interactive_states:
        if state.breaker.is_open and state is not chosen and state.ready_at_ms() <= now_ms:
            return state
    return None


def _is_full_elsewhere(
    view: View, route: NameRoute, call: Call, tried: Collection[DeploymentState], now_ms: float
) -> bool:
    """Return whether a healthy deployment that has not failed this call lacks only a slot."""
    return any(
        state.slots.share > 0
        and state not in tried
        and max(view.ready_at_ms(route, state), state.waits_until_ms(call)) <= now_ms
        and not state.has_failed(call.idempotency_key)
        for state in route.states
    )


class Feedback:
    def __init__(
        self,
        clock: Clock,
        entropy: Entropy,
        view: View,
        routes: Routes,
        rests: Rests | None,
        backpressure: Backpressure,
        notes: LimitNotes,
    ) -> None:
        self._clock = clock
        self._entropy = entropy
        self._view = view
        self._routes = routes
        self._rests = rests
        self._backpressure = backpressure
        self._notes = notes

    def read_reply(self, admission: "Admission", endpoint: str, reply: HttpReply) -> Answer:
        """Return the answer and note its reported limits.

        Raise one UpstreamError if it is no answer.
        """
        status, headers, body = reply
        self.note_limits(admission, headers)
        line, usage = accept(endpoint, status, headers, body, self._clock.now_ms)
        return Answer(status, line, usage, admission.state.deployment.name)

    def note_limits(self, admission: "Admission", headers: Mapping[str, str]) -> None:
        """Note what the head of an answer reports of the deployment's limits."""
        by_requests, by_tokens = admission.state.limit_headers
        if by_requests in headers or by_tokens in headers:
            self._notes.note(admission.state, headers, admission.call, admission.number)

    def answered(self, state: DeploymentState) -> None:
        if state.succeeded():
            log.info("upstream_recovered", deployment=state.deployment.name)
        if self._rests is not None:
            self._backpressure.answered(state)

    def failed(self, state: DeploymentState, call: Call, error: UpstreamError, attempt: Attempt) -> UpstreamError:
        """Let the deployment learn from a failure, and return the error that the engine sees."""
        now_ms = self._clock.monotonic_ms()
        was_withheld = (
            isinstance(error, Withheld | Overspent | Unbounded | Untranslatable | RecordedElsewhere)
            or error.code == EXCEEDS_LIMIT
        )
        if was_withheld or (not error.billed and not isinstance(error, Refused)):
            # The upstream did not take the call, so it counts neither as a first attempt nor as a
            # retry.
            state.budget.undo(attempt)
        if was_withheld:
            return error
        if isinstance(error, KeyRejected) and error.status == 403 and state.blames_the_request(call.idempotency_key):
            state.failures[Refused.reason] += 1
            return Refused("the upstream forbids this request (403), while others pass with the same key", status=403)
        if isinstance(error, PoolExhausted) or (now_ms >= call.deadline_ms and not isinstance(error, Throttled)):
            # Our own ceiling or deadline is no sign of bad health. But a deployment that asks for a
            # rest gets it, even after the deadline.
            state.failures[error.reason] += 1
        else:
            self._learn(state, call, error, now_ms)
        key = state.deployment.api_key
        if key is not None:
            # In an error even a short key is redacted, though an answer could hold its letters by
            # chance.
            error.redact(key.reveal())
        if not isinstance(error, PoolExhausted):
            error.put_off(self._view.wait_ms(self._routes.get(call.model, self._routes.other), now_ms, call))
        return error

    def _learn(self, state: DeploymentState, call: Call, error: UpstreamError, now_ms: float) -> None:
        rested_until_ms = state.rests_until_ms
        if state.failed(error, call.idempotency_key, now_ms, self._entropy.uniform(0.0, 1.0)):
            _log_open_circuit(state, error)
        if self._rests is not None and state.rests_until_ms > rested_until_ms:
            self._rests.publish(state.deployment.name, math.ceil(state.rests_until_ms - now_ms))
        is_ill = isinstance(error, Unavailable | Ambiguous | BrokenAnswer | KeyRejected)
        if is_ill and not isinstance(error, AnswerUnusable):
            self._backpressure.failed(state)


def _log_open_circuit(state: DeploymentState, error: UpstreamError) -> None:
    name = state.deployment.name
    if isinstance(error, KeyRejected):
        log.error("upstream_key_rejected", deployment=name, status=error.status, to_do="check the deployment's api_key")
    else:
        log.warning("upstream_circuit_opened", deployment=name, why=error.message)


def accept(
    endpoint: str, status: int, headers: Mapping[str, str], body: bytes, now_ms: Callable[[], int]
) -> tuple[bytes, Usage]:
    """Return the answer as one line, and its usage; raise one UpstreamError if it is no answer.

    `now_ms` is wall time, for dates in headers.
    """
    if not 200 <= status <= 299:
        raise classify.refusal(status, headers, body, now_ms())
    try:
        return answers.read(endpoint, body)
    except answers.NotAnAnswer as wrong:
        failed = classify.no_answer(wrong, status, body)
    raise failed


class Admission(msgspec.Struct, eq=False):
    """The part of one deployment that one call takes.

    - `number` is the call's number among the deployment's calls, set when it goes out.
    - The call may begin until `begin_by_ms`; after that its slot may belong to another process.
    - `is_awaiting` is true while an interactive call waits for its first token.
    """

    state: DeploymentState
    call: Call
    traffic: Traffic | None
    model: str
    attempt: Attempt
    is_probe: bool
    begin_by_ms: float
    number: int = 0
    flight: BackgroundFlight | None = None
    is_awaiting: bool = False
    timer: asyncio.TimerHandle | None = None

    def begin_by(self, moment_ms: float) -> None:
        """Lower the moment by which the call must begin to this one, if it is earlier."""
        self.begin_by_ms = min(self.begin_by_ms, moment_ms)

    def go_out(self, tokens: int) -> None:
        """Count the call as sent, with the tokens that it takes by our estimate."""
        self.number = self.state.count_sent(tokens)


class Admissions:
    """The admissions of calls.

    `tides` notifies other processes of interactive calls; None without others.
    """

    def __init__(
        self,
        routes: Routes,
        slots: ModelSlots,
        demand: SlotDemand,
        feedback: Feedback,
        tides: TideLoop | None,
        room: RoomSignal,
    ) -> None:
        self._routes = routes
        self._model_slots = slots
        self._demand = demand
        self._feedback = feedback
        self._tides = tides
        self._room = room
        # Background calls out by model, also of models without a cap: they may get one while calls
        # are out.
        self.out: dict[str, int] = {}

    def begin_call(
        self, route: NameRoute, state: DeploymentState, call: Call, traffic: Traffic | None, now_ms: float
    ) -> Admission:
        """Take the call's part.

        No other call may have been admitted since its deployment was chosen.
        """
        is_probe = state.breaker.is_open
        if is_probe:
            state.breaker.begin_probe(now_ms)
        is_retry = bool(call.attempt_count) and self._routes.is_retry(state, call, now_ms)
        attempt = state.budget.count(now_ms, is_retry=is_retry)
        # A resource may lead to another model by the time the call ends.
        model = route.model or call.model
        admission = Admission(state, call, traffic, model, attempt, is_probe, call.begin_by_ms)
        if traffic is not None and (state.counts_interactive or traffic.flex_wait_s):
            # An item's own moment is that of its lease.
            admission.begin_by(self._demand.own_until_ms())
        if traffic is not None and not traffic.flex_wait_s:
            if not self._demand.is_alone:
                # This comes before its slot is taken. For items, a worker notes the demand when it
                # asks for free slots.
                self._demand.note_interactive(route.interactive_states, traffic.owner)
            state.begin_interactive(traffic.owner, now_ms)
            admission.is_awaiting = True
            self._notify_tide(state)
            if not traffic.is_stream:
                self.expect_first_token(admission)
            return admission
        state.begin_background()
        self.out[model] = self.out.get(model, 0) + 1
        if self._model_slots.has_caps:
            self._model_slots.take_model_slot(model)
        if state.tide is not None:
            if traffic is None:
                kind = (model, call.endpoint)
                admission.flight = state.tide.begin_flight(
                    call.idempotency_key, call.body, now_ms, call.hand_backs, kind
                )
            else:
                # The tide never takes a flex call back, because a user waits for it.
                admission.flight = state.tide.begin_flight(call.idempotency_key, call.body, now_ms)
        return admission

    def expect_first_token(self, admission: Admission) -> None:
        """Assume the first token after a while: an answer that is not streamed does not show it."""
        if admission.is_awaiting and admission.timer is None:
            loop = asyncio.get_running_loop()
            admission.timer = loop.call_later(UNSEEN_FIRST_TOKEN_S, self.first_token, admission)

    def first_token(self, admission: Admission) -> None:
        """Note that the first token came."""
        state = admission.state
        if admission.is_awaiting:
            admission.is_awaiting = False
            state.first_token_came()
            self._notify_tide(state)
        elif admission.flight is not None and state.tide is not None:
            state.tide.first_token(admission.flight)

    def end_call(
        self, admission: Admission, error: UpstreamError | None = None, answer_tokens: int | None = None
    ) -> UpstreamError | None:
        """Give back the call's part, let its deployment learn, and return the caller's error.

        An answered call has `answer_tokens`. Without these and without an error, we ended the call.
        """
        state, traffic = admission.state, admission.traffic
        learned = None
        if error is not None:
            # The failure is reported while the call still counts as in flight.
            learned = self._feedback.failed(state, admission.call, error, admission.attempt)
        elif answer_tokens is not None:
            self._feedback.answered(state)
        if traffic is not None and not traffic.flex_wait_s:
            if admission.timer is not None:
                admission.timer.cancel()
            if admission.is_awaiting:
                admission.is_awaiting = False
                state.first_token_came()
            state.end_interactive(traffic.owner)
            self._notify_tide(state)
        else:
            state.end_background()
            left = self.out[admission.model] - 1
            if left:
                self.out[admission.model] = left
            else:
                # Callers choose the names of models, so the table must not grow without a limit.
                del self.out[admission.model]
            if self._model_slots.has_caps:
                self._model_slots.release_model_slot(admission.model)
            if admission.flight is not None and state.tide is not None:
                is_busy = error is not None and error.status in BUSY
                # The time of a streamed answer also depends on its reader, so its tokens are not
                # measured.
                tokens = answer_tokens if traffic is None else None
                state.tide.end_flight(admission.flight, tokens, refused=is_busy)
        if admission.is_probe:
            state.breaker.end_probe()
        if self._room.line.turns:
            self._room.wake()
        return learned

    # Calls that wait for a slot.

    def note_demand(self, route: NameRoute, call: Call, traffic: Traffic | None, now_ms: float) -> None:
        """Report to the loop that shares slots which slots this call finds, and which it lacks."""
        if traffic is not None and not traffic.flex_wait_s:
            self._demand.note_interactive(route.interactive_states, traffic.owner)
        else:
            self._demand.note_background(route.states, route.model or call.model, now_ms)

    def begin_wait(self, states: Iterable[DeploymentState], call: Call, traffic: Traffic | None) -> None:
        for state in states:
            if traffic is not None and not traffic.flex_wait_s:
                state.begin_wait(traffic.owner)
                self._notify_tide(state)
            else:
                state.begin_wait(None)
                if state.tide is not None:
                    state.tide.stands(call.idempotency_key, call.body)

    def end_wait(
        self,
        states: Iterable[DeploymentState],
        call: Call,
        traffic: Traffic | None,
        chosen: DeploymentState | None = None,
    ) -> None:
        """Note that the call no longer waits at these deployments.

        At the chosen one it begins in the same moment, so that tide is not notified.
        """
        for state in states:
            if traffic is not None and not traffic.flex_wait_s:
                state.end_wait(traffic.owner)
                if state is not chosen:
                    self._notify_tide(state)
            else:
                state.end_wait(None)
                if state.tide is not None:
                    state.tide.leaves(call.idempotency_key)

    def _notify_tide(self, state: DeploymentState) -> None:
        if state.tide is not None and state.tide.yields:
            state.tide.users_changed()
            if self._tides is not None:
                self._tides.announce(state.deployment.name)
