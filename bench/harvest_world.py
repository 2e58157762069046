"""A world in virtual time for the harvest: one modelled engine, interactive users at a gateway, and a batch without end.

The policy under test sees what a real worker sees: gateway events at once where gateway and worker are one process, and after the delay of
a notice or of a poll where they are two; one network hop late, its own calls' first tokens (or, where calls are not streamed, an estimate
of them) and ends; and a sample of the engine's metrics every `SAMPLE_MS`. It never sees the engine itself. Arrivals and items are given, so
that two policies meet the same ones in the same order.
"""

import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import NamedTuple, Protocol

from bench.harvest_traces import Ask
from tidegate.core.tide.prefill import PrefillRate
from tidegate.core.tide.signals import Decision, Ended, EngineSample, Signals
from tidegate.simulate.engine.cost import step_ms
from tidegate.simulate.engine.kv_cache import TOKEN_BYTES
from tidegate.simulate.engine.model import EngineLimits, ModelledEngine, ModelledEvent, ModelledRequest, Sequence
from tidegate.upstream.tide.tides import HAND_BACKS_MAX, OWN_EVENTS_MS

HOP_MS = 1.0
SAMPLE_MS = 200.0
# Two processes that tell each other through the store do so twice a second, at the next tick of a loop.
POLL_MS = 600.0
WINDOW_ITEMS = 64


class Policy(Protocol):
    def observe(self, signals: Signals) -> Decision: ...


@dataclass(slots=True, eq=False)
class Call:
    """One call in the world; `last_ms` is when its last token left the engine."""

    ask: Ask
    batch: bool
    number: int
    ready_ms: float = 0.0
    sent_ms: float = 0.0
    last_ms: float = 0.0
    tokens: int = 0
    awaiting: bool = True
    hand_backs: int = 0
    handed_back: bool = False
    ahead_tokens: int = 0
    sequence: Sequence | None = None


class Apart(NamedTuple):
    """Gateway and worker are two processes. `notice_ms` are delays of notices as measured, one for each percent; none where there are
    only polls of the store. A notice goes out at once but never sooner than `gap_ms` after the last; some may be lost."""

    notice_ms: tuple[float, ...] = ()
    gap_ms: float = 10.0
    lost_share: float = 0.0


class Sight(NamedTuple):
    """What the worker can see: a gateway that interactive calls pass, the engine's metrics, first tokens of its own calls."""

    gateway: bool = True
    metrics: bool = True
    first_tokens: bool = True
    apart: Apart | None = None


class Costs(NamedTuple):
    """How an engine's step differs from the calibrated one: a factor for each part, and a spread from step to step."""

    base: float = 1.0
    sequence: float = 1.0
    prompt: float = 1.0
    spread: float = 0.0

    def step_ms(self, seed: int) -> Callable[[int, int, int], float]:
        chance = random.Random(f"steps {seed}")
        empty_ms = step_ms(0, 0, 0)

        def cost(decoding: int, context_tokens: int, prefill_tokens: int) -> float:
            decoded_ms = step_ms(decoding, context_tokens, 0) - empty_ms
            prefilled_ms = step_ms(0, 0, prefill_tokens) - empty_ms
            whole_ms = self.base * empty_ms + self.sequence * decoded_ms + self.prompt * prefilled_ms
            return whole_ms * chance.lognormvariate(0.0, self.spread) if self.spread else whole_ms

        return cost


CALIBRATED = Costs()


@dataclass(slots=True)
class Report:
    """What happened: times in ms, tokens of work that counted, and prompt tokens that were sent in vain."""

    duration_ms: float
    ttft_ms: list[float] = field(default_factory=list)
    between_ms: list[float] = field(default_factory=list)
    batch_tokens: int = 0
    batch_calls: int = 0
    handed_back: int = 0
    aborted: int = 0
    wasted_tokens: int = 0
    busy_ms: float = 0.0
    line: list[tuple[float, int, int]] = field(default_factory=list)


def prompt(number: int, tokens: int) -> bytes:
    """Bytes that share no block with any other prompt, so that the prefix cache plays no part beyond calls sent again."""
    return number.to_bytes(8, "big") + bytes(tokens * TOKEN_BYTES - 8)


class HarvestWorld:
    def __init__(
        self,
        limits: EngineLimits,
        arrivals: list[tuple[float, Ask]],
        items: Iterator[Ask],
        policy: Policy | None,
        duration_ms: float,
        sight: Sight,
        costs: Costs = CALIBRATED,
        seed: int = 0,
    ) -> None:
        self.sight = sight
        self.prefill = PrefillRate()
        self.engine = ModelledEngine(limits, costs.step_ms(seed))
        self._chance = random.Random(f"notices {seed}")
        self.policy = policy
        self.items = items
        self.now_ms = 0.0
        self.report = Report(duration_ms)
        self._events: list[tuple[float, int, str, object]] = []
        self._order = 0
        self._stepping = False
        self._window: deque[Call] = deque()
        self._flying: dict[int, Call] = {}
        self._awaiting: dict[int, Call] = {}
        self._awaiting_tokens = 0
        self._sent_tokens = 0
        self._asked_ms = 0.0
        self._decision = Decision(0, 0, 0, "not asked yet")
        self._interactive = 0
        self._interactive_awaiting = 0
        # What was last reported to the worker of these two and when, and what stands in the store.
        self._reported = self._stored = (0.0, 0, 0)
        self._noticed_ms = -POLL_MS
        self._notice_due = False
        self._sample: EngineSample | None = None
        self._numbers = 0
        self._first = [0.0, 0]
        self._between = [0.0, 0]
        self._ended: list[Ended] = []
        self._prompt_tokens = 0
        self._ahead: list[int] = []
        for at_ms, ask in arrivals:
            self._later(at_ms, "arrive", ask)
        if policy is not None:
            self._later(0.0, "sample", None)
        if sight.apart is not None:
            self._later(self._chance.uniform(0.0, POLL_MS), "tell", None)
            self._later(self._chance.uniform(0.0, POLL_MS), "poll", None)

    def run(self) -> Report:
        while self._events:
            at_ms, _, kind, what = heappop(self._events)
            if at_ms >= self.report.duration_ms:
                break
            self.now_ms = at_ms
            getattr(self, f"_on_{kind}")(what)
        return self.report

    def _later(self, at_ms: float, kind: str, what: object) -> None:
        self._order += 1
        heappush(self._events, (at_ms, self._order, kind, what))

    # ---- the engine's side

    def _on_submit(self, call: Call) -> None:
        if call.handed_back:
            return
        request = ModelledRequest(
            prompt(call.number, call.ask.prompt_tokens), call.ask.output_tokens, priority=int(call.batch), tag=call
        )
        call.sequence = self.engine.submit(request)
        self._step()

    def _on_abort(self, call: Call) -> None:
        sequence, call.sequence = call.sequence, None
        if sequence is None:
            return
        self.report.wasted_tokens += sequence.computed_tokens
        if call.tokens:
            # The estimate was wrong: it was decoding, and all of that is lost.
            self.report.batch_tokens -= call.tokens + call.ask.prompt_tokens
            self.report.aborted += 1
        self.engine.abort(sequence)

    def _step(self) -> None:
        if self._stepping:
            return
        step = self.engine.step()
        if step is None:
            return
        self._stepping = True
        self.report.busy_ms += step.duration_ms
        self._later(self.now_ms + step.duration_ms, "stepped", step.events)

    def _on_stepped(self, events: list[ModelledEvent]) -> None:
        self._stepping = False
        now_ms = self.now_ms
        seen: list[tuple[Call, bool, bool]] = []
        for event in events:
            call = event.sequence.tag
            assert isinstance(call, Call)
            if call.sequence is not event.sequence:
                continue
            call.tokens += 1
            if call.batch:
                self.report.batch_tokens += 1
            if call.tokens == 1:
                self._first[0] += now_ms - call.sent_ms
                self._first[1] += 1
                self._prompt_tokens += call.ask.prompt_tokens
                if call.batch:
                    self.report.batch_tokens += call.ask.prompt_tokens
                    # What an earlier attempt left in the prefix cache was not computed in vain.
                    self.report.wasted_tokens -= event.sequence.cached_tokens
                seen.append((call, True, event.finished))
            else:
                gap = now_ms - call.last_ms
                self._between[0] += gap
                self._between[1] += 1
                if not call.batch:
                    self.report.between_ms.append(gap)
                if event.finished:
                    seen.append((call, False, True))
            call.last_ms = now_ms
        if seen:
            self._later(now_ms + HOP_MS, "seen", seen)
        self._step()

    # ---- the gateway's and the worker's side

    def _on_arrive(self, ask: Ask) -> None:
        self._numbers += 1
        call = Call(ask, batch=False, number=self._numbers, sent_ms=self.now_ms)
        self._interactive += 1
        self._interactive_awaiting += 1
        self._later(self.now_ms + HOP_MS, "submit", call)
        self._interactive_changed()

    def _on_seen(self, seen: list[tuple[Call, bool, bool]]) -> None:
        news = False
        for call, first, finished in seen:
            if call.batch:
                self._seen_batch(call, first, finished)
                continue
            news = True
            if first:
                self._interactive_awaiting -= 1
                self.report.ttft_ms.append(self.now_ms - call.sent_ms)
            if finished:
                self._interactive -= 1
        if news:
            self._interactive_changed()
        else:
            self._act(news=False)

    # ---- what the gateway tells the worker

    def _interactive_changed(self) -> None:
        apart = self.sight.apart
        if apart is None:
            self._reported = self._now_there()
            self._act(news=self.sight.gateway)
            return
        if apart.notice_ms and not self._notice_due:
            self._notice_due = True
            self._later(max(self.now_ms, self._noticed_ms + apart.gap_ms), "notice", apart)
        self._act(news=False)

    def _now_there(self) -> tuple[float, int, int]:
        return self.now_ms, self._interactive, self._interactive_awaiting

    def _on_notice(self, apart: Apart) -> None:
        self._notice_due = False
        self._noticed_ms = self.now_ms
        if self._chance.random() >= apart.lost_share:
            self._later(self.now_ms + self._chance.choice(apart.notice_ms), "report", self._now_there())

    def _on_report(self, report: tuple[float, int, int]) -> None:
        if report[0] > self._reported[0]:
            self._reported = report
            self._act(news=True)

    def _on_tell(self, _: object) -> None:
        self._stored = self._now_there()
        self._later(self.now_ms + POLL_MS, "tell", None)

    def _on_poll(self, _: object) -> None:
        self._on_report(self._stored)
        self._later(self.now_ms + POLL_MS, "poll", None)

    # ---- the worker's side

    def _seen_batch(self, call: Call, first: bool, finished: bool) -> None:
        if call.handed_back:
            return
        if first and self.sight.first_tokens:
            self._on_first_token(call)
        if finished:
            self._on_first_token(call)
            del self._flying[call.number]
            self.report.batch_calls += 1
            latency_ms = self.now_ms - call.sent_ms
            self._ended.append(Ended(*call.ask, latency_ms))
            if not self.sight.metrics:
                self.prefill.learn_call(call.ahead_tokens, call.ask.output_tokens - 1, latency_ms)

    def _on_first_token(self, call: Call) -> None:
        if call.awaiting and not call.handed_back:
            call.awaiting = False
            del self._awaiting[call.number]
            self._awaiting_tokens -= call.ask.prompt_tokens

    def _on_due(self, call: Call) -> None:
        """By the estimate, this call has its first token now."""
        self._on_first_token(call)
        self._act(news=False)

    def _on_sample(self, _: object) -> None:
        engine = self.engine
        (first_ms, firsts), (between_ms, betweens) = self._first, self._between
        self._sample = EngineSample(
            at_ms=self.now_ms,
            known=len(self._flying) + (self._reported[1] if self.sight.gateway else 0),
            running=len(engine.running),
            waiting=engine.waiting_count,
            kv_use=engine.cache.usage,
            ttft_ms=first_ms / firsts if firsts else None,
            between_tokens_ms=between_ms / betweens if betweens else None,
            prompt_tokens_per_s=self._prompt_tokens / SAMPLE_MS * 1000,
        )
        self._prompt_tokens = 0
        ahead, self._ahead = self._ahead, []
        if ahead and firsts and not self._reported[1]:
            self.prefill.learn_first_token(sum(ahead) / len(ahead), first_ms / firsts)
        self._first, self._between = [0.0, 0], [0.0, 0]
        self._later(self.now_ms + SAMPLE_MS, "sample", None)
        self.report.line.append((self.now_ms, self._interactive, len(self._flying)))
        self._act(news=True)

    def _signals(self, held: Call) -> Signals:
        ended, self._ended = tuple(self._ended), []
        return Signals(
            now_ms=self.now_ms,
            in_flight=len(self._flying),
            awaiting=len(self._awaiting),
            awaiting_tokens=self._awaiting_tokens,
            sent_tokens=self._sent_tokens,
            waiting_tokens=held.ask.prompt_tokens,
            waiting_ms=self.now_ms - held.ready_ms,
            interactive=self._reported[1] if self.sight.gateway else None,
            interactive_awaiting=self._reported[2] if self.sight.gateway else None,
            sample=self._sample if self.sight.metrics else None,
            ended=ended,
        )

    def _act(self, news: bool) -> None:
        """Ask the policy, hand back what it says, and send what it allows, in order; longer prompts than it allows wait."""
        if self.policy is None:
            return
        while len(self._window) < WINDOW_ITEMS:
            self._fill()
        if news or self.now_ms - self._asked_ms >= OWN_EVENTS_MS:
            self._asked_ms = self.now_ms
            self._decision = self.policy.observe(self._signals(self._window[0]))
            self._hand_back(self._decision.hand_back)
        decision = self._decision
        for call in list(self._window):
            if len(self._flying) >= decision.calls or self._awaiting_tokens >= decision.prompt_tokens:
                return
            if call.ask.prompt_tokens > decision.prompt_tokens:
                continue
            if call.ask.prompt_tokens > decision.prompt_tokens - self._awaiting_tokens:
                # It would be allowed by itself: room is kept for it, or shorter ones would pass it for ever.
                return
            self._window.remove(call)
            self._send(call)

    def _fill(self) -> None:
        self._numbers += 1
        self._window.append(Call(next(self.items), batch=True, number=self._numbers, ready_ms=self.now_ms))

    def _send(self, call: Call) -> None:
        call.sent_ms = self.now_ms
        self._flying[call.number] = self._awaiting[call.number] = call
        self._awaiting_tokens += call.ask.prompt_tokens
        self._sent_tokens += call.ask.prompt_tokens
        call.ahead_tokens = self._awaiting_tokens
        self._ahead.append(call.ahead_tokens)
        if not self.sight.first_tokens:
            self._later(self.now_ms + self.prefill.first_token_ms(call.ahead_tokens), "due", call)
        self._later(self.now_ms + HOP_MS, "submit", call)

    def _hand_back(self, count: int) -> None:
        """The newest first: the oldest is likely to be in the engine's hands already."""
        for call in list(reversed(self._awaiting.values())):
            if count <= 0:
                return
            if call.hand_backs >= HAND_BACKS_MAX:
                continue
            count -= 1
            self.report.handed_back += 1
            del self._flying[call.number], self._awaiting[call.number]
            self._awaiting_tokens -= call.ask.prompt_tokens
            again = Call(
                call.ask, batch=True, number=call.number, ready_ms=call.ready_ms, hand_backs=call.hand_backs + 1
            )
            self._window.appendleft(again)
            call.handed_back = True
            self._later(self.now_ms + HOP_MS, "abort", call)
