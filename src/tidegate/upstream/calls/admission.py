"""What a call takes of its deployment while it is under way: a slot, a place in the tide, an attempt; and what its end teaches.

Calls of batch work and flex calls count among batch's, interactive ones by themselves, and all of them against the deployment's slots. An
admission ends exactly once.

From how a call ended its deployment, the other processes and its sender learn (`Feedback`): from an answer, what it used and what limits
it reports; from a failure, whether the deployment is healthy. Our own ceiling, deadline and budgets say nothing about that.

Nothing is chosen or sent here.
"""

import asyncio
import math
from collections.abc import Callable, Iterable, Mapping

import msgspec
import structlog

from tidegate.core.answers import answer as answers
from tidegate.core.errors import (
    Ambiguous,
    AnswerTooLong,
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
from tidegate.upstream.budgets.budget_client import EXCEEDS_LIMIT
from tidegate.upstream.calls.availability import View
from tidegate.upstream.calls.limit_notes import LimitNotes
from tidegate.upstream.calls.traffic import Traffic
from tidegate.upstream.http import classify
from tidegate.upstream.http.transport import HttpReply
from tidegate.upstream.routing.backpressure import Backpressure
from tidegate.upstream.routing.deployment_state import Attempt, DeploymentState
from tidegate.upstream.routing.routes import NameRoute, Routes
from tidegate.upstream.routing.slots import ModelSlots, RoomSignal, SlotDemand
from tidegate.upstream.tide.tide_loop import TideLoop
from tidegate.upstream.tide.tides import BackgroundFlight

log = structlog.get_logger(__name__)

# The first token of an answer that is not streamed cannot be seen; it is taken to have come by then.
UNSEEN_FIRST_TOKEN_S = 1.0

# A server that answers so has too much to do.
BUSY = (429, 503, 529)


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
        """Return the answer, and note the limits that it reports; raise an UpstreamError of one class when it is none."""
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
        is_ill = isinstance(error, Unavailable | Ambiguous | BrokenAnswer | KeyRejected)
        if is_ill and not isinstance(error, AnswerTooLong):
            self._backpressure.failed(state)


def _say_shut(state: DeploymentState, error: UpstreamError) -> None:
    name = state.deployment.name
    if isinstance(error, KeyRejected):
        log.error("upstream_key_rejected", deployment=name, status=error.status, to_do="check the deployment's api_key")
    else:
        log.warning("upstream_circuit_opened", deployment=name, why=error.message)


def accept(
    endpoint: str, status: int, headers: Mapping[str, str], body: bytes, now_ms: Callable[[], int]
) -> tuple[bytes, Usage]:
    """The answer as one line and its usage, or one UpstreamError raised. `now_ms` is wall time, for dates in headers."""
    if not 200 <= status <= 299:
        raise classify.refusal(status, headers, body, now_ms())
    try:
        return answers.read(endpoint, body)
    except answers.NotAnAnswer as wrong:
        why = str(wrong)
    raise classify.no_answer(why, status, body)


class Admission(msgspec.Struct, eq=False):
    """One call at one deployment. `number` is which of its deployment's calls it is, once it goes out. It may begin until `begin_by_ms`:
    then its slot may be another process's. An interactive call `is_awaiting` until it has its first token."""

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
        """Begin by this moment, or earlier."""
        self.begin_by_ms = min(self.begin_by_ms, moment_ms)

    def go_out(self, tokens: int) -> None:
        """The call is sent now, and takes so many tokens by our estimate."""
        self.number = self.state.count_sent(tokens)


class Admissions:
    """`tides` tell other processes at once of interactive calls; None where no process listens."""

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

    def begin_call(
        self, route: NameRoute, state: DeploymentState, call: Call, traffic: Traffic | None, now_ms: float
    ) -> Admission:
        """Take what the call needs; nothing may have happened since its deployment was chosen."""
        is_probe = state.breaker.is_open
        if is_probe:
            state.breaker.begin_probe(now_ms)
        is_retry = bool(call.attempt_count) and self._routes.is_retry(state, call, now_ms)
        attempt = state.budget.count(now_ms, is_retry=is_retry)
        # A resource may lead to another model by the time the call ends.
        model = route.model_of(call.model)
        admission = Admission(state, call, traffic, model, attempt, is_probe, call.begin_by_ms)
        if traffic is not None and (state.counts_interactive or traffic.flex_wait_s):
            # An item's own moment is that of its lease.
            admission.begin_by(self._demand.own_until_ms())
        if traffic is not None and not traffic.flex_wait_s:
            if not self._demand.is_alone:
                # Before its slot is taken. A worker notes what its items need when it asks what is free.
                self._demand.note_interactive(route.interactive_states, traffic.owner)
            state.begin_interactive(traffic.owner, now_ms)
            admission.is_awaiting = True
            self._tell_tide(state)
            if not traffic.is_stream:
                self.expect_first_token(admission)
            return admission
        state.begin_background()
        self._model_slots.take_model_slot(model)
        if state.tide is not None:
            if traffic is None:
                kind = (model, call.endpoint)
                admission.flight = state.tide.begin_flight(
                    call.idempotency_key, call.body, now_ms, call.hand_backs, kind
                )
            else:
                # The tide never takes a flex call back, for someone waits for it.
                admission.flight = state.tide.begin_flight(call.idempotency_key, call.body, now_ms)
        return admission

    def expect_first_token(self, admission: Admission) -> None:
        """The answer's first byte is its last, so its first token is not seen."""
        if admission.is_awaiting and admission.timer is None:
            loop = asyncio.get_running_loop()
            admission.timer = loop.call_later(UNSEEN_FIRST_TOKEN_S, self.first_token, admission)

    def first_token(self, admission: Admission) -> None:
        """The prompt is done with."""
        state = admission.state
        if admission.is_awaiting:
            admission.is_awaiting = False
            state.first_token_came()
            self._tell_tide(state)
        elif admission.flight is not None and state.tide is not None:
            state.tide.first_token(admission.flight)

    def end_call(
        self, admission: Admission, error: UpstreamError | None = None, answer_tokens: int | None = None
    ) -> UpstreamError | None:
        """Give back what the call took, and let its deployment learn. With `answer_tokens` it was answered; with neither it was ended from
        here. Gives the error that the caller sees."""
        state, traffic = admission.state, admission.traffic
        learned = None
        if error is not None:
            # It still counts as in flight.
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
            self._tell_tide(state)
        else:
            state.end_background()
            self._model_slots.release_model_slot(admission.model)
            if admission.flight is not None and state.tide is not None:
                is_busy = error is not None and error.status in BUSY
                # How long a streamed answer took is also its reader's doing.
                tokens = answer_tokens if traffic is None else None
                state.tide.end_flight(admission.flight, tokens, refused=is_busy)
        if admission.is_probe:
            state.breaker.end_probe()
        if self._room.line.turns:
            self._room.wake()
        return learned

    # Calls that wait for a slot.

    def note_demand(self, route: NameRoute, call: Call, traffic: Traffic | None, now_ms: float) -> None:
        """Let the loop that shares slots know what this call finds and lacks."""
        if traffic is not None and not traffic.flex_wait_s:
            self._demand.note_interactive(route.interactive_states, traffic.owner)
        else:
            self._demand.note_background(route.states, route.model_of(call.model), now_ms)

    def begin_wait(self, states: Iterable[DeploymentState], call: Call, traffic: Traffic | None) -> None:
        for state in states:
            if traffic is not None and not traffic.flex_wait_s:
                state.begin_wait(traffic.owner)
                self._tell_tide(state)
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
        """The call waits there no longer; at the chosen one it begins in this same moment, so its tide has nothing to hear."""
        for state in states:
            if traffic is not None and not traffic.flex_wait_s:
                state.end_wait(traffic.owner)
                if state is not chosen:
                    self._tell_tide(state)
            else:
                state.end_wait(None)
                if state.tide is not None:
                    state.tide.leaves(call.idempotency_key)

    def _tell_tide(self, state: DeploymentState) -> None:
        if state.tide is not None and state.tide.yields:
            state.tide.users_changed()
            if self._tides is not None:
                self._tides.announce(state.deployment.name)
