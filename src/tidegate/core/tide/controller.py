"""The tide of one deployment: signals in, two numbers out.

A prefill cannot be interrupted, so interactive users first feel the batch prompts that wait for
their first token, and then the number of batch sequences that decode beside theirs. So these rules
hold, in this order: nothing new while an interactive call waits for its first token, and our own
calls that wait for one are handed back; one small prompt at a time while there is interactive
traffic; longer prompts the longer it has been quiet; and no more calls in flight than the slowdown
that the operator allows can pay for.

The last is one learned number, the swell. It rises while the slowdown that batch causes to
interactive tokens stays under what is allowed, and falls while it is above, so that over time the
two meet. Its exponential is how many calls may fly the moment traffic ends; quiet then doubles that
again and again up to the ceiling. What the swell has beyond the ceiling lets calls fly beside
traffic.

This module knows no clock, no engine and no item; the thin loop around it does.
"""

import math

import msgspec

from tidegate.core.tide.engine_room import EngineRoom
from tidegate.core.tide.learner import SAFE_CALLS, Learner
from tidegate.core.tide.signals import UNLIMITED_TOKENS, Decision, EngineSample, Signals
from tidegate.core.tide.steps import StepCost
from tidegate.core.wording import in_words


class TidePolicy(msgspec.Struct, frozen=True):
    """An operator's settings for the tide of one deployment.

    `is_known`: an operator gave `calls_max`, so the tide begins there and only refusals lower it;
    else it is learned. `yields`: batch gives way to interactive calls; an engine of our own needs
    it, a hosted provider does not. `slowdown_max` is the share by which interactive tokens may come
    later because of batch, on average. A ready item whose prompt is too long to go beside traffic
    is held for `waiting_ms_max` at most, unless that slowdown is used up.
    """

    calls_max: int = 64
    is_known: bool = False
    capacity_fraction: float = 1.0
    yields: bool = True
    slowdown_max: float = 0.08
    waiting_ms_max: float = 60_000.0
    sample_age_ms_max: float = 3_000.0

    @property
    def ceiling(self) -> int:
        """Return the most calls batch may ever have in flight."""
        return max(1, math.floor(self.calls_max * min(1.0, self.capacity_fraction)))


CALLS_DOUBLING_MS, TOKENS_DOUBLING_MS = 4_000.0, 1_500.0
DOUBLINGS_MAX = 30.0
LONG_QUIET_MS = 10_000.0
BESIDE_TOKENS, QUIET_TOKENS, QUIET_TOKENS_MAX = 512, 1_500, 8_192
# A few tokens ride along with a step for nothing: sending them twice costs more.
HAND_BACK_TOKENS_MIN = 128
SWELL_START_CALLS = 16
SWELL_PER_S = 0.15
SURPLUS_MAX, BESIDE_PER_SURPLUS = 8.0, 2.0
# Samples alone show traffic only long after its first tokens: allow less slowdown, and fewer tokens
# in its way.
UNSEEN_SHARE, UNSEEN_TOKENS, UNSEEN_TOKENS_MAX, UNSEEN_DOUBLING_MS = 0.5, 1_024, 2_048, 4_000.0
MEMORY_MS = 60_000.0
PAUSE_MS_MAX = 5_000.0
WAITED_AT_LAST = 10.0


class Tide:
    """The controller of one deployment.

    Ask it on every event of the gateway, on every sample, and now and then while our own calls come
    and go. Its last answer holds in between.
    """

    def __init__(self, policy: TidePolicy) -> None:
        self.policy = policy
        self.cost = StepCost()
        ceiling = policy.ceiling
        is_known = policy.is_known
        self._learner = Learner(ceiling, start=ceiling, by_pace=False) if is_known else Learner(ceiling)
        self._refusals = Learner(ceiling, start=ceiling, by_pace=False)
        self._room = EngineRoom(ceiling)
        self._swell = math.log(min(SWELL_START_CALLS, ceiling))
        self._traffic_ms = self._calls_ms = 1_000.0
        self._harm_ms = self._calls_ms * policy.slowdown_max / 2
        self._before: Signals | None = None
        self._quiet_from_ms = 0.0
        self._sampled_at_ms: float | None = None
        self._outside: int | None = None

    @property
    def slowdown(self) -> float:
        """Return the share by which interactive tokens came later because of batch, over the last
        minute of traffic.
        """
        return self._harm_ms / self._calls_ms

    @property
    def answers_missing(self) -> int:
        """Return how many more answers may change the decision, where only our own calls count."""
        return self._learner.answers_missing

    def begin_at(self, calls: int) -> None:
        """Begin with the calls that were learned before a restart, if no number is configured."""
        if not self.policy.is_known:
            self._learner.begin_at(calls)

    def observe(self, signals: Signals) -> Decision:
        """Return what holds from now on, until the next answer."""
        if not self.policy.yields:
            self._learner.observe(signals.now_ms, signals.in_flight, signals.ended, signals.refusals)
            return self._blind(signals)
        self._account(signals)
        sample = self._take_in(signals)
        interactive = (signals.interactive or 0) + (self._outside or 0)
        if self._before is None or interactive:
            self._quiet_from_ms = signals.now_ms
        self._before = signals
        if signals.interactive is None and self._outside is None:
            return self._blind(signals)
        room = max(1, self._room.calls // max(1, signals.workers))
        cap = min(self._refusals.calls, room) if sample else self._learner.calls
        if interactive:
            return self._beside(signals, sample, interactive, cap)
        return self._quiet(signals, cap)

    def _ceiling(self, signals: Signals) -> int:
        return max(1, self.policy.ceiling // max(1, signals.workers))

    def _take_in(self, signals: Signals) -> EngineSample | None:
        """Return the engine's last sample while it is fresh; learn from each sample once."""
        self._learner.observe(signals.now_ms, signals.in_flight, signals.ended, signals.refusals)
        self._refusals.observe(signals.now_ms, signals.in_flight, signals.ended, signals.refusals)
        sample = signals.sample
        if sample is None or sample.running is None or signals.now_ms - sample.at_ms > self.policy.sample_age_ms_max:
            self._outside = None
            return None
        if sample.at_ms != self._sampled_at_ms:
            self._sampled_at_ms = sample.at_ms
            self._outside = _outside(sample)
            self.cost.learn(sample)
            self._room.learn(sample, signals.in_flight * max(1, signals.workers))
        return sample

    def _account(self, signals: Signals) -> None:
        """Note how much batch slowed interactive calls since the last time, and let the swell
        follow.
        """
        before = self._before
        if before is None:
            return
        interactive = (before.interactive or 0) + (self._outside or 0)
        elapsed_ms = min(max(0.0, signals.now_ms - before.now_ms), PAUSE_MS_MAX)
        decoding = max(0, before.in_flight - before.awaiting)
        prompt_tokens = max(0, signals.sent_tokens - before.sent_tokens)
        workers = max(1, signals.workers)
        has_prompts = bool(before.awaiting or before.interactive_awaiting or prompt_tokens)
        self.cost.load.add(decoding * workers + interactive, elapsed_ms, has_prompts=has_prompts)
        if not interactive or not elapsed_ms:
            return
        # Assume that the other processes do what this one does.
        slowdown = self.cost.slowdown(decoding, prompt_tokens / elapsed_ms) * workers
        keep = math.exp(-elapsed_ms / MEMORY_MS)
        self._traffic_ms = self._traffic_ms * keep + elapsed_ms
        self._calls_ms = self._calls_ms * keep + interactive * elapsed_ms
        self._harm_ms = self._harm_ms * keep + interactive * elapsed_ms * slowdown
        # A moment with many users counts for more, as it does in the mean over their tokens.
        weight = interactive * self._traffic_ms / self._calls_ms
        allowed = self.policy.slowdown_max * (UNSEEN_SHARE if signals.interactive is None else 1.0)
        rise = SWELL_PER_S * elapsed_ms / 1000 * weight * (1 - slowdown / allowed)
        self._swell = min(max(0.0, self._swell + rise), math.log(self._ceiling(signals)) + SURPLUS_MAX)

    def _beside(self, signals: Signals, sample: EngineSample | None, interactive: int, cap: int) -> Decision:
        """Decide while there is interactive traffic."""
        policy, ceiling = self.policy, self._ceiling(signals)
        surplus = max(0.0, self._swell - math.log(ceiling))
        calls = min(ceiling, cap, 1 + int(surplus * BESIDE_PER_SURPLUS))
        waiting = signals.interactive_awaiting
        if waiting is None:
            waiting = max(0, round((sample.waiting if sample else None) or 0.0) - signals.awaiting)
        if waiting:
            hand_back = signals.awaiting if signals.awaiting_tokens >= HAND_BACK_TOKENS_MIN else 0
            waits = in_words(waiting, "interactive call waits", "interactive calls wait")
            return Decision(
                calls, 0, hand_back, f"first_token: {waits} for {'its' if waiting == 1 else 'theirs'}", True
            )
        tokens = BESIDE_TOKENS // max(1, signals.workers)
        spent = self.slowdown > policy.slowdown_max and signals.waiting_ms < WAITED_AT_LAST * policy.waiting_ms_max
        if signals.waiting_ms > policy.waiting_ms_max and not spent and not signals.awaiting:
            tokens = max(tokens, signals.waiting_tokens)
        users = in_words(interactive, "interactive call")
        why = f"beside: {users}, slowed by {self.slowdown:.1%} of {policy.slowdown_max:.1%}"
        return Decision(calls, tokens, 0, why, True)

    def _quiet(self, signals: Signals, cap: int) -> Decision:
        """Decide while no user is here: the longer so, the more calls and the longer prompts."""
        quiet_ms = max(0.0, signals.now_ms - self._quiet_from_ms)
        ceiling = self._ceiling(signals)
        swell = min(float(ceiling), math.exp(self._swell))
        calls = int(swell * 2.0 ** min(quiet_ms / CALLS_DOUBLING_MS, DOUBLINGS_MAX))
        at_once = UNSEEN_TOKENS if signals.interactive is None else QUIET_TOKENS
        tokens = int(at_once * 2.0 ** min(quiet_ms / TOKENS_DOUBLING_MS, DOUBLINGS_MAX))
        tokens = min(tokens, QUIET_TOKENS_MAX)
        if signals.interactive is None:
            # A user who comes unseen waits behind all of these prompts: allow one long prompt or a
            # few short ones.
            beside = int(BESIDE_TOKENS * 2.0 ** min(quiet_ms / UNSEEN_DOUBLING_MS, DOUBLINGS_MAX))
            tokens = min(tokens, UNSEEN_TOKENS_MAX)
            if signals.awaiting:
                tokens = min(tokens, beside, UNSEEN_TOKENS_MAX // 2)
        tokens = tokens // max(1, signals.workers)
        if quiet_ms >= LONG_QUIET_MS:
            # Let a longer prompt that is held go too.
            tokens = max(tokens, signals.waiting_tokens)
        return Decision(max(1, min(ceiling, cap, calls)), tokens, 0, f"quiet: for {quiet_ms / 1000:.1f} s")

    def _blind(self, signals: Signals) -> Decision:
        """Decide without metrics, by the pace and the refusals of our own calls."""
        calls = min(self._learner.calls, self._ceiling(signals))
        if self.policy.yields and self._sampled_at_ms is not None:
            # It showed metrics before, and its other calls may be users': send only a safe number.
            return Decision(min(calls, SAFE_CALLS), QUIET_TOKENS_MAX, 0, "unseen: what else runs there is unknown")
        return Decision(calls, UNLIMITED_TOKENS, 0, f"learned: {in_words(calls, 'call')}")


def _outside(sample: EngineSample) -> int | None:
    """Return how many calls of the engine are not ours; None where that is unknown."""
    if sample.known is None:
        return None
    return max(0, round((sample.running or 0.0) + (sample.waiting or 0.0)) - sample.known)
