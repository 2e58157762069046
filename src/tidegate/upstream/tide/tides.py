"""The tide of one deployment: it turns events into signals, and decisions into a limit.

- The router reports background calls to it.
- It reads the number of interactive calls. Other calls show in the engine's metrics, which the loop
  reads through the control client.
- If background work yields to users here, each change of users is reported to it.
- It sends nothing, but may take back a call that has no first token yet.
- First tokens of background calls are estimated: to see them, every call would have to be streamed.
"""

import asyncio
from collections import deque
from typing import Protocol

import msgspec
import structlog
from yarl import URL

from tidegate import metrics
from tidegate.core.deployments import Deployment, EngineKind, TideMode
from tidegate.core.errors import UpstreamError
from tidegate.core.ports import Clock, Present
from tidegate.core.schedule.reasons import Reason
from tidegate.core.tide.controller import Tide, TidePolicy
from tidegate.core.tide.engine_metrics import SGLANG, VLLM, MetricNames, Reading, metric_names, read, sample
from tidegate.core.tide.prefill import PrefillRate
from tidegate.core.tide.signals import CallKind, Decision, Ended, EngineSample, Signals
from tidegate.core.usage.estimate import PROMPT_BYTES_PER_TOKEN
from tidegate.core.usage.inline_files import TEXT_BYTES_MAX, unread_bytes
from tidegate.core.wording import in_words
from tidegate.upstream.http.transport import Client
from tidegate.upstream.tide.peers import GATEWAY_MS, Peers, Users

log = structlog.get_logger(__name__)

SCRAPE_S = 2.0
SCRAPE_AGAIN_MS = 5_000.0
OWN_EVENTS_MS = 20.0
# Calls that end within this time show the same, so only one of them is learned from.
LEARN_EVERY_MS = 5.0
HAND_BACKS_MAX = 2
# This many calls may wait at a deployment that admits fewer: one of them may have a short enough
# prompt.
READY_MAX = 16
WAITING_MAX = 1_000
# Room is kept for a call that has waited for the first time; one that was not seen for the second
# is forgotten.
KEPT_FROM_MS, FORGOTTEN_MS = 10_000.0, 30_000.0
# Other processes report their calls twice a second. Until then, unknown calls at the engine may be
# theirs.
UNREPORTED_MS = 1_000.0


class BackgroundFlight(msgspec.Struct, eq=False):
    """One background call, from its first byte to its end."""

    prompt_tokens: int
    sent_ms: float
    hand_backs: int
    kind: CallKind
    # The fields below are set only where background work yields to users.
    ahead_tokens: int = 0
    task: "asyncio.Task[object] | None" = None
    due: "asyncio.TimerHandle | None" = None
    awaiting: bool = False
    handed_back: bool = False


class InteractiveCalls(Protocol):
    """The count of this process's interactive calls at one deployment."""

    @property
    def users(self) -> Users:
        """Return the calls in flight or waiting for a slot, and those without a first token."""


class Room(Protocol):
    """A receiver of the news that more calls may go."""

    def announce(self) -> None:
        """Note that more may go than before."""

    def wake(self) -> None:
        """Let waiting calls look again."""


class WaitingPrompt(msgspec.Struct):
    """One ready call that may not begin yet: its prompt's length, and the moments of its wait."""

    prompt_tokens: int
    since_ms: float
    seen_ms: float
    stands: bool = True


class TideLimit(msgspec.Struct, frozen=True):
    """The limit of the tide for this process's background calls.

    `calls_max` holds over all processes.
    """

    calls: int
    prompt_tokens: int
    calls_max: int


class DeploymentTide:
    """The tide of one deployment, as this process knows it."""

    def __init__(
        self,
        deployment: Deployment,
        control: Client,
        interactive_calls: InteractiveCalls,
        clock: Clock,
        room: Room,
        *,
        runs_items: bool = True,
    ) -> None:
        self.deployment = deployment
        self._interactive_calls = interactive_calls
        self.yields = shares_engine(deployment)
        self._control = control
        self._clock = clock
        self._room = room
        self.runs_items = runs_items
        self._tide = Tide(
            TidePolicy(
                deployment.max_in_flight,
                is_known=deployment.is_capacity_known,
                capacity_fraction=deployment.batch_fraction,
                yields=self.yields,
            )
        )
        self._prefill = PrefillRate()
        self._names = _names(deployment)
        self._metrics_url = URL(deployment.metrics_url or _metrics_url(deployment))
        # Calls in flight, in the order in which they began.
        self._flights: dict[BackgroundFlight, None] = {}
        self._awaiting_tokens = self._sent_tokens = 0
        self._ahead: list[int] = []
        self._waiting: dict[str, WaitingPrompt] = {}
        self._ended: list[Ended] = []
        self._refusals = 0
        self._learned_ms = -LEARN_EVERY_MS
        self._asked_ms = 0.0
        self._reading: Reading | None = None
        self._sample: EngineSample | None = None
        self._scrape_at_ms = 0.0
        self._gateway_ms: float | None = None
        self.peers = Peers(clock)
        self._unknown: deque[tuple[float, int]] = deque()
        self.decision: Decision = self._tide.observe(Signals(clock.monotonic_ms()))
        # The number of background calls that may be in flight; 0 while none may begin.
        self.calls = self.decision.calls if self.decision.prompt_tokens else 0
        # With fewer new answers the controller would not change its decision, so the loop passes
        # them on later.
        self._answers_missing = self._tide.answers_missing

    # Called by the router.

    def can_take(self, key: str, body: bytes) -> bool:
        """Return whether a call with this body may begin now."""
        if len(self._flights) >= self.calls:
            return False
        if not self.yields:
            # Prompts are limited only where they could be in the way of users.
            return True
        if prompt_tokens(body) > self.decision.prompt_tokens - self._awaiting_tokens:
            return False
        return not self._waiting or not self._is_kept_for_another(key)

    def stands(self, key: str, body: bytes) -> None:
        """Note that a call waits to begin.

        Room is kept for the longest wait, so that long prompts go too.
        """
        if not self.yields:
            return
        now_ms = self._clock.monotonic_ms()
        waiting = self._waiting.get(key)
        if waiting is not None:
            waiting.seen_ms, waiting.stands = now_ms, True
        elif len(self._waiting) < WAITING_MAX:
            self._waiting[key] = WaitingPrompt(prompt_tokens(body), now_ms, now_ms)

    def leaves(self, key: str) -> None:
        """Note that a call does not wait any more, but may come again."""
        waiting = self._waiting.get(key)
        if waiting is not None:
            waiting.seen_ms, waiting.stands = self._clock.monotonic_ms(), False

    def forget(self, key: str) -> None:
        """Forget a waiting call, because it begins or will not come again."""
        self._waiting.pop(key, None)

    def _is_kept_for_another(self, key: str) -> bool:
        """Return whether the room is kept for another call, the one that has waited longest.

        Otherwise shorter prompts would take it again and again.
        """
        first, waiting = next(iter(self._waiting.items()))
        if first == key or not waiting.stands or waiting.prompt_tokens > self.decision.prompt_tokens:
            return False
        return self._clock.monotonic_ms() - waiting.since_ms >= KEPT_FROM_MS

    def begin_flight(
        self, key: str, body: bytes, now_ms: float, hand_backs: int = HAND_BACKS_MAX, kind: CallKind = ("", "")
    ) -> BackgroundFlight:
        """Count a call that begins.

        It may be taken back, unless that happened too often before. A call without `hand_backs` is
        never taken back, because a user waits for its answer.
        """
        flight = BackgroundFlight(prompt_tokens(body), now_ms, hand_backs, kind)
        self._flights[flight] = None
        if self.yields:
            self._waiting.pop(key, None)
            self._await_first_token(flight)
        return flight

    def _await_first_token(self, flight: BackgroundFlight) -> None:
        """Count a call's prompt as in the way of users until the estimate of its first token."""
        self._awaiting_tokens += flight.prompt_tokens
        self._sent_tokens += flight.prompt_tokens
        flight.awaiting, flight.ahead_tokens, flight.task = True, self._awaiting_tokens, asyncio.current_task()
        self._ahead.append(flight.ahead_tokens)
        wait_s = self._prefill.first_token_ms(flight.ahead_tokens) / 1000
        flight.due = asyncio.get_running_loop().call_later(wait_s, self.first_token, flight)

    def end_flight(self, flight: BackgroundFlight, answer_tokens: int | None, *, refused: bool = False) -> None:
        """Count a call as ended; without an answer `answer_tokens` is None."""
        if flight.due is not None:
            flight.due.cancel()
        if flight not in self._flights:
            # The call began under an earlier tide of this deployment with other terms.
            return
        del self._flights[flight]
        if flight.awaiting:
            self._no_longer_awaiting(flight)
        now_ms = self._clock.monotonic_ms()
        if answer_tokens is not None:
            latency_ms = now_ms - flight.sent_ms
            self._ended.append(Ended(flight.prompt_tokens, answer_tokens, latency_ms, flight.kind))
            if self.yields and self._sample is None and now_ms - self._learned_ms >= LEARN_EVERY_MS:
                self._learned_ms = now_ms
                self._prefill.learn_call(flight.ahead_tokens, max(0, answer_tokens - 1), latency_ms)
        self._refusals += refused
        is_news = self.yields or len(self._ended) >= self._answers_missing
        if refused or (is_news and now_ms - self._asked_ms >= OWN_EVENTS_MS):
            self.act()

    def users_changed(self) -> None:
        """Act at once on a change of interactive calls here: a call, a first token or an end."""
        self._gateway_ms = self._clock.monotonic_ms()
        self.act()

    # From signals to a limit.

    def first_token(self, flight: BackgroundFlight) -> None:
        """Note that this call has its first token, really or by the estimate."""
        if flight.due is not None:
            flight.due.cancel()
        if not flight.awaiting or flight not in self._flights:
            return
        self._no_longer_awaiting(flight)
        if self._clock.monotonic_ms() - self._asked_ms >= OWN_EVENTS_MS:
            self.act()
        elif self._waiting:
            # The controller decided a moment ago, and its limit has room again.
            self._room.wake()

    def _no_longer_awaiting(self, flight: BackgroundFlight) -> None:
        flight.awaiting = False
        self._awaiting_tokens -= flight.prompt_tokens

    def act(self) -> None:
        """Ask the controller, take back calls if it wants that, and wake waiting calls."""
        before = self.decision
        self._asked_ms = self._clock.monotonic_ms()
        decision = self.decision = self._tide.observe(self._signals(self._asked_ms))
        self._answers_missing = self._tide.answers_missing
        self.calls = decision.calls if decision.prompt_tokens else 0
        if decision.hand_back:
            self._hand_back(decision.hand_back)
        if decision.calls > before.calls or decision.prompt_tokens > before.prompt_tokens:
            self._room.announce()
        elif self._waiting:
            self._room.wake()

    def _signals(self, now_ms: float) -> Signals:
        ended, self._ended = tuple(self._ended), []
        refusals, self._refusals = self._refusals, 0
        workers = self.peers.workers + 1
        if not self.yields:
            return Signals(now_ms, workers, len(self._flights), ended=ended, refusals=refusals)
        awaiting = sum(flight.awaiting for flight in self._flights)
        waiting = self._longest_waiting(now_ms)
        seen = self._gateway_ms is not None and now_ms - self._gateway_ms < GATEWAY_MS
        others = self.others
        # If no gateway sends users' calls, only the engine's metrics can show users.
        users = self.users
        has_gateway = seen or users.interactive > 0 or others.has_gateway or not self.deployment.takes_interactive
        return Signals(
            now_ms=now_ms,
            in_flight=len(self._flights),
            awaiting=awaiting,
            awaiting_tokens=self._awaiting_tokens,
            sent_tokens=self._sent_tokens,
            waiting_tokens=waiting.prompt_tokens if waiting else 0,
            waiting_ms=now_ms - waiting.since_ms if waiting else 0.0,
            interactive=users.interactive + others.interactive if has_gateway else None,
            interactive_awaiting=users.awaiting + others.interactive_awaiting if has_gateway else None,
            sample=self._sample,
            ended=ended,
            refusals=refusals,
            workers=workers,
        )

    def _longest_waiting(self, now_ms: float) -> WaitingPrompt | None:
        while self._waiting:
            key, waiting = next(iter(self._waiting.items()))
            if waiting.stands or now_ms - waiting.seen_ms < FORGOTTEN_MS:
                return waiting
            del self._waiting[key]
        return None

    def _hand_back(self, count: int) -> None:
        """Take back the newest calls first, because the engine has likely begun with the oldest."""
        for flight in reversed(list(self._flights)):
            if count <= 0:
                return
            if flight.awaiting and not flight.handed_back and flight.hand_backs < HAND_BACKS_MAX and flight.task:
                count -= 1
                flight.handed_back = True
                flight.task.cancel()
                metrics.tide_handbacks.of(self.deployment.name).inc()

    # Called by the loop.

    def begin_at(self, calls: int) -> None:
        """Go on with the number of calls that was learned before this process was restarted."""
        self._tide.begin_at(calls)
        self.act()

    def present(self) -> Present:
        """Return the report of this process's calls for the other processes."""
        now_ms = self._clock.monotonic_ms()
        has_gateway = self._gateway_ms is not None and now_ms - self._gateway_ms < GATEWAY_MS
        workers = int(bool(self._flights) or bool(self._waiting))
        why = f"{in_words(self.calls, 'call')} ({self.decision.why})" if self._needs_engine else ""
        if why and self.is_closed:
            why += f", and it has no room for more ({Reason.TIDE_CLOSED})"
        tide = self.calls if self._needs_engine else 0
        return Present(workers, len(self._flights), *self.users, has_gateway, why, tide)

    @property
    def limit(self) -> TideLimit:
        """Return the limit of background calls: this process's now, and the most of all ever."""
        decision = self.decision
        return TideLimit(decision.calls, decision.prompt_tokens, self.deployment.background_in_flight_max)

    @property
    def others(self) -> Present:
        """Return the calls of the other processes here."""
        return self.peers.present

    @property
    def users(self) -> Users:
        """Return the interactive calls of this process here."""
        return self._interactive_calls.users

    @property
    def is_closed(self) -> bool:
        """Return whether interactive calls keep new or waiting background calls out."""
        stands = any(waiting.stands for waiting in self._waiting.values())
        return self.decision.has_users and (stands or len(self._flights) >= self.calls)

    @property
    def is_idle(self) -> bool:
        """Return whether we have no call in flight or waiting: then the engine need not be read."""
        return (
            not self._flights and not self._waiting and not self.users.interactive and self.decision.prompt_tokens > 0
        )

    @property
    def _needs_engine(self) -> bool:
        """Return whether background calls of this process depend on the engine's state.

        In a process without a worker only flex calls do.
        """
        return self.runs_items or bool(self._flights) or bool(self._waiting)

    async def look(self) -> None:
        """Read the engine's metrics, if it has any, and act on them.

        One that does not show them is asked rarely.
        """
        now_ms = self._clock.monotonic_ms()
        is_due = self._needs_engine and not self.is_idle and now_ms >= self._scrape_at_ms
        if self.yields and self._names is not None and is_due:
            known = self._known() or 0
            try:
                status, _, text = await self._control.get(self._metrics_url, SCRAPE_S)
            except UpstreamError as error:
                self._cannot_look(str(error))
            else:
                if status == 200:
                    after = self._known()
                    self._learn(text, None if after is None else max(known, after))
                else:
                    self._cannot_look(f"status {status}")
        self.act()

    def _known(self) -> int | None:
        """Return how many of the engine's calls are known, ours and those of other processes.

        Return None while there are other processes without a recent report.
        """
        others = self.others
        if others.workers and not self.peers.is_current:
            return None
        return len(self._flights) + self.users.interactive + others.calls + others.interactive

    def _known_or_unreported(self, reading: Reading, known: int) -> int:
        """Return `known` plus the calls that other processes began or ended without a report yet.

        These are not users' calls.
        """
        there = round((reading.running or 0.0) + (reading.waiting or 0.0))
        self._unknown.append((reading.at_ms, max(0, there - known)))
        since_ms = reading.at_ms - UNREPORTED_MS if self.others.workers else reading.at_ms
        while self._unknown[0][0] < since_ms:
            self._unknown.popleft()
        return max(known, there - min(count for _, count in self._unknown))

    def _learn(self, text: bytes, known: int | None) -> None:
        assert self._names is not None
        reading = read(text, self._names, self._clock.monotonic_ms(), self.deployment.models)
        if reading.running is None:
            self._cannot_look("its page has none of the figures that we look for")
            return
        if known is not None:
            known = self._known_or_unreported(reading, known)
        self._sample = sample(self._reading, reading, known)
        self._reading = reading
        ahead, self._ahead = self._ahead, []
        if ahead and self._sample.ttft_ms is not None and self._is_ours_alone(self._sample):
            # The engine's mean is over all first tokens: with users there, it is not the mean of
            # our prompts.
            self._prefill.learn_first_token(sum(ahead) / len(ahead), self._sample.ttft_ms)

    def _is_ours_alone(self, seen: EngineSample) -> bool:
        there = round((seen.running or 0.0) + (seen.waiting or 0.0))
        return (
            not self.users.interactive
            and not self.others.interactive
            and seen.known is not None
            and there <= seen.known
        )

    def _cannot_look(self, why: str) -> None:
        if self._reading is not None or not self._scrape_at_ms:
            log.warning("engine_metrics_unavailable", deployment=self.deployment.name, why=why)
        self._reading = None
        self._scrape_at_ms = self._clock.monotonic_ms() + SCRAPE_AGAIN_MS


def tide_of(
    deployment: Deployment,
    control: Client,
    interactive_calls: InteractiveCalls,
    clock: Clock,
    room: Room,
    *,
    runs_items: bool = True,
) -> DeploymentTide | None:
    """Return the tide of a deployment; None if only the operator's limit counts.

    That is so if a setting says it, or if the capacity is configured and the engine is not ours.
    """
    if deployment.tide is TideMode.OFF or (deployment.is_capacity_known and not shares_engine(deployment)):
        return None
    return DeploymentTide(deployment, control, interactive_calls, clock, room, runs_items=runs_items)


def tide_terms(deployment: Deployment) -> tuple[object, ...]:
    """Return the terms from which a deployment's tide is made.

    After a change it needs another tide.
    """
    one = deployment
    names = tuple(sorted(one.metrics_names.items()))
    reported = (one.engine, one.models, one.tide, one.metrics_url, names, one.serves)
    return (one.max_in_flight, one.is_capacity_known, one.batch_fraction, *reported)


def shares_engine(deployment: Deployment) -> bool:
    """Return whether background work yields to users here: our own engine reports its state."""
    return deployment.engine in (EngineKind.VLLM, EngineKind.SGLANG) or bool(deployment.metrics_names)


def prompt_tokens(body: bytes) -> int:
    size_bytes = len(body)
    if size_bytes > TEXT_BYTES_MAX:
        size_bytes -= unread_bytes(body)
    return max(1, size_bytes // PROMPT_BYTES_PER_TOKEN)


def _names(deployment: Deployment) -> MetricNames | None:
    if deployment.metrics_names:
        return metric_names(deployment.metrics_names)
    return {EngineKind.VLLM: VLLM, EngineKind.SGLANG: SGLANG}.get(deployment.engine)


def _metrics_url(deployment: Deployment) -> str:
    return deployment.url.rstrip("/").removesuffix("/v1") + "/metrics"
