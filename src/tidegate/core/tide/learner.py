"""Learn how many calls an upstream takes when nothing says so: try more calls, and keep them when
they get more work done.

For hosted providers and engines without metrics. The measure is work done: calls in flight, divided
by how long a call takes. What calls take is compared per token, only between calls of the same kind
(model and endpoint), and only with the step before, never with the best that was ever seen. Steps
up are tried again and again, so the number never stays low for good. When a step up brought
nothing, or calls became much slower, a step down is tried, and stays when it costs nothing.

Refusals lower the number by their share for as long as they come. Many refusals lower it until a
step up succeeds again. This module knows no queue and no interactive traffic. Time is an argument.
"""

import math
from collections.abc import Sequence

from tidegate.core.tide.signals import CallKind, Ended

SAFE_CALLS = 16
# Steps double until the first one that brings nothing; after that they are smaller, and measured
# more carefully.
FIRST_STEP, STEP = 2.0, 1.5
# A step up must bring at least this share of what it adds: twice the calls, a tenth more work.
GAIN_SHARE_MIN = 0.1
# One round is as many answers as the limit, but never so few that chance rules, nor so many that a
# slow upstream teaches nothing.
ROUND_CALLS_MIN, ROUND_CALLS_MAX = 8, 64
USED_SHARE_MIN = 0.75
# A step up says nothing when less than this share of it was in flight, because there was too little
# to send.
USED_STEP_SHARE_MIN = 0.5
TELLING_SHARE, ROUND_MS_MAX = 0.5, 60_000.0
# After a step that brought nothing, so many rounds pass before the next in its direction, and twice
# as many each time.
UP_ROUNDS_MAX = 4
DOWN_ROUNDS_MIN, DOWN_ROUNDS_MAX = 2, 64
MUCH_SLOWER = 1.5
# How much of a kind's known pace is kept when a round at the same limit measures another.
PACE_KEPT = 0.5
# From this refused share of about the last hundred calls on, the limit itself falls, at most by
# half in a round.
MANY_REFUSED_SHARE = 0.05
REFUSALS_MEMORY_CALLS = 100
SHRINK_MAX, REGROWTH = 0.5, 1.25
# The cost of a call in answer tokens: about this much for itself, and one for so many prompt
# tokens.
CALL_TOKENS, PROMPT_TOKENS_PER_TOKEN = 4.0, 200.0


class Round:
    """The calls that began and ended since a limit was set: their time and tokens, by kind, and how
    many were in flight.
    """

    def __init__(self, now_ms: float, in_flight: int, settling: int = 0) -> None:
        self.calls = self.refusals = 0
        self._settling = settling
        self._now_in_flight = in_flight
        self._ms: dict[CallKind, float] = {}
        self._tokens: dict[CallKind, float] = {}
        self._begin(now_ms)

    def _begin(self, now_ms: float) -> None:
        self._began_ms = self._seen_ms = now_ms
        # Calls in flight, summed over milliseconds; and how much of that belongs to calls that
        # ended.
        self._flown_ms = self._ended_ms = 0.0
        self._highest = self._now_in_flight

    @property
    def in_flight(self) -> float:
        elapsed_ms = self._seen_ms - self._began_ms
        return max(1.0, self._flown_ms / elapsed_ms if elapsed_ms > 0.0 else float(self._highest))

    @property
    def is_telling(self) -> bool:
        """Return whether the calls that ended say something about those in flight.

        Quick calls end first, and slow ones may be what fills the limit. Calls that hang for long
        are not waited for.
        """
        return self._ended_ms >= TELLING_SHARE * self._flown_ms or self._seen_ms - self._began_ms >= ROUND_MS_MAX

    @property
    def refused_share(self) -> float:
        return self.refusals / max(1, self.calls + self.refusals)

    def see(self, now_ms: float, in_flight: int, ended: Sequence[Ended]) -> None:
        """Count what was in flight since the last look.

        Count as many as now, because the last look may have been just before a step. Count more, up
        to what the last look saw, where calls that ended meanwhile kept more of them busy.
        """
        if not self._now_in_flight and not self.calls:
            # Nothing ran yet: the round begins now.
            self._begin(now_ms)
        if (elapsed_ms := now_ms - self._seen_ms) > 0.0:
            flown_ms = in_flight * elapsed_ms
            if in_flight < self._now_in_flight:
                ended_ms = sum([min(call.latency_ms, elapsed_ms) for call in ended])
                flown_ms = max(flown_ms, min(ended_ms, self._now_in_flight * elapsed_ms))
            self._flown_ms += flown_ms
            self._seen_ms = now_ms
        self._now_in_flight = in_flight
        self._highest = max(self._highest, in_flight)

    def add(self, call: Ended, now_ms: float) -> None:
        """Count a call, unless it began under another limit or while the number in flight still
        changed.
        """
        if now_ms - call.latency_ms < self._began_ms:
            return
        if self._settling:
            self._settling -= 1
            if not self._settling:
                self._begin(now_ms)
            return
        self.calls += 1
        latency_ms, kind = max(0.001, call.latency_ms), call.kind
        self._ended_ms += latency_ms
        tokens = CALL_TOKENS + call.prompt_tokens / PROMPT_TOKENS_PER_TOKEN + call.answer_tokens
        self._ms[kind] = self._ms.get(kind, 0.0) + latency_ms
        self._tokens[kind] = self._tokens.get(kind, 0.0) + tokens

    def paces(self) -> dict[CallKind, float]:
        """Return the milliseconds per token, by kind."""
        return {kind: ms / self._tokens[kind] for kind, ms in self._ms.items()}

    def speedup(self, paces: dict[CallKind, float]) -> float | None:
        """Return how much quicker calls were than at these paces; None when most of the time went
        into kinds without one.
        """
        known_ms = expected_ms = 0.0
        for kind, ms in self._ms.items():
            if kind in paces:
                known_ms += ms
                expected_ms += paces[kind] * self._tokens[kind]
        return expected_ms / known_ms if known_ms and known_ms >= sum(self._ms.values()) / 2 else None


class Learner:
    """The learner of one deployment: `calls` is its limit now, at least 1 and at most its ceiling.

    Without `by_pace` only refusals lower it.
    """

    def __init__(self, ceiling: int, start: int = SAFE_CALLS, *, by_pace: bool = True) -> None:
        self.ceiling = max(1, ceiling)
        self._by_pace = by_pace
        self._limit = float(min(start, self.ceiling))
        self._trial: float | None = None
        self._refused_share = 0.0
        self._round: Round | None = None
        self._begin_again()

    def _begin_again(self) -> None:
        """Forget what was learned by pace: nothing is known of the kinds that run now."""
        self._is_doubling = True
        self._paces: dict[CallKind, float] = {}
        self._in_flight = 1.0
        self._up_after, self._up_rounds = 0, 1
        self._down_after: float = math.inf
        self._down_rounds = DOWN_ROUNDS_MIN
        self._first_paces: dict[CallKind, float] = {}

    def begin_at(self, calls: int) -> None:
        """Begin where an earlier process of this deployment was, but never below the safe number.

        Later rounds correct it.
        """
        self._limit = float(min(max(calls, SAFE_CALLS), self.ceiling))

    @property
    def calls(self) -> int:
        limit = self._limit if self._trial is None else self._trial
        return max(1, round(limit * (1.0 - self._refused_share)))

    @property
    def answers_missing(self) -> int:
        """Return how many more answers the round needs before `calls` can change.

        While refusals lower `calls`, each answer counts.
        """
        current, limit = self._round, self._limit if self._trial is None else self._trial
        if current is None or self.calls < round(limit):
            return 1
        return max(1, self._answers_wanted() - current.calls - current.refusals)

    def _answers_wanted(self) -> int:
        return ROUND_CALLS_MIN if self._is_doubling else min(max(self.calls, ROUND_CALLS_MIN), ROUND_CALLS_MAX)

    def observe(self, now_ms: float, in_flight: int, ended: Sequence[Ended], refusals: int) -> None:
        """Learn from the calls that ended since the last time."""
        current = self._round
        if current is None:
            # Calls that ended by now may have begun at any time before.
            current = self._round = Round(now_ms, in_flight)
        current.see(now_ms, in_flight, ended)
        current.refusals += refusals
        if self._by_pace:
            for call in ended:
                current.add(call, now_ms)
        else:
            current.calls += len(ended)
        count = len(ended) + refusals
        if count and (refusals or self._refused_share):
            kept = (1.0 - 1.0 / REFUSALS_MEMORY_CALLS) ** count
            self._refused_share = self._refused_share * kept + refusals / count * (1.0 - kept)
        calls, wanted = self.calls, self._answers_wanted()
        is_telling = not self._by_pace or current.refusals >= wanted or current.is_telling
        if current.calls + current.refusals >= wanted and is_telling:
            self._end(current)
            # A smaller step is measured only when as many calls as are in flight have come and gone
            # under it.
            is_settling = self._by_pace and not self._is_doubling and self.calls != calls
            settling = min(max(calls, self.calls), ROUND_CALLS_MAX) if is_settling else 0
            self._round = Round(now_ms, in_flight, settling)

    def _end(self, current: Round) -> None:
        if current.refusals and self._refused_share >= MANY_REFUSED_SHARE:
            self._shrink(current.refused_share)
        elif not self._by_pace:
            self._limit = min(float(self.ceiling), max(self._limit * REGROWTH, self._limit + 1))
        elif not current.calls:
            return
        elif self._trial is None:
            self._measure(current)
        else:
            trial, self._trial = self._trial, None
            self._judge(trial, current)

    def _shrink(self, refused_share: float) -> None:
        if self._trial is not None and self._trial > self._limit:
            self._up_failed()
        else:
            self._limit = max(1.0, self._limit * max(SHRINK_MAX, 1.0 - refused_share))
            self._refused_share = 0.0
        self._trial = None
        self._is_doubling = False
        self._paces = {}

    def _measure(self, current: Round) -> None:
        """Learn from a round at the limit itself: the next step is compared with what calls take
        there.
        """
        if self._paces and current.speedup(self._paces) is None:
            # Other models or endpoints than before: what was learned of those says little about the
            # new ones.
            self._limit = max(self._limit, float(min(SAFE_CALLS, self.ceiling)))
            self._begin_again()
        paces = current.paces()
        for kind in paces.keys() & self._paces.keys():
            paces[kind] += PACE_KEPT * (self._paces[kind] - paces[kind])
        self._paces, self._in_flight = paces, current.in_flight
        self._up_after -= 1
        self._down_after -= 1
        slower = 1.0 / (current.speedup(self._first_paces) or 1.0)
        if slower > MUCH_SLOWER and math.isinf(self._down_after):
            self._down_after = 0
        if slower > MUCH_SLOWER or not self._first_paces:
            self._first_paces = paces
        # A limit that was not used has not been tried, and so a step from it would say nothing.
        if current.in_flight >= USED_SHARE_MIN * self.calls:
            self._step()

    def _step(self) -> None:
        if self._up_after <= 0 and self._limit < self.ceiling:
            wanted = max(self._limit * (FIRST_STEP if self._is_doubling else STEP), self._limit + 1)
            self._trial = min(float(self.ceiling), wanted)
        elif self._down_after <= 0 and self._limit > 1:
            self._is_doubling = False
            self._trial = max(1.0, min(self._limit / STEP, self._limit - 1))

    def _judge(self, trial: float, current: Round) -> None:
        """Judge a round under another limit: keep it when it gets more work done, or the same with
        fewer calls.
        """
        is_up = trial > self._limit
        speedup = current.speedup(self._paces)
        if speedup is None:
            self._begin_again()
            return
        if is_up and current.in_flight - self._in_flight < USED_STEP_SHARE_MIN * (round(trial) - round(self._limit)):
            return
        more = current.in_flight / self._in_flight
        is_good = speedup * more >= (1.0 + GAIN_SHARE_MIN * (more - 1.0) if is_up else 1.0)
        if is_good:
            self._limit = trial
            self._paces, self._in_flight = current.paces(), current.in_flight
            self._first_paces = self._paces
        if is_up and is_good:
            self._up_after, self._up_rounds = 0, 1
            self._down_after = math.inf
            self._step()
        elif is_up:
            self._up_failed()
        elif is_good:
            self._down_after = self._down_rounds = DOWN_ROUNDS_MIN
        else:
            self._down_rounds = min(2 * self._down_rounds, DOWN_ROUNDS_MAX)
            self._down_after = self._down_rounds

    def _up_failed(self) -> None:
        if math.isinf(self._down_after):
            # Perhaps fewer would do.
            self._down_after = self._down_rounds = DOWN_ROUNDS_MIN
        self._is_doubling = False
        self._up_after = self._up_rounds
        self._up_rounds = min(2 * self._up_rounds, UP_ROUNDS_MAX)
