"""The cost of a background call for others: a line fitted to the engine's time between tokens.

between tokens = base + per sequence * sequences that decode + per prompt token * prompt tokens per
step

A prior makes it safe before anything was measured and on engines that report nothing. This module
knows no limit and no queue; it only turns a load into a slowdown.

Base and sequences are learned from windows without any prompt. How many prompt tokens a step had is
a guess from outside, and prompts come when many sequences run: with such windows the cost of a
sequence came out at half or at twice of what it was. The cost of a prompt token is what the other
windows take beyond that. The engine reports the mean over the tokens of a window, so the number of
sequences must be the mean over the same tokens too: a moment with thirty sequences has thirty times
the tokens of a moment with one.
"""

import msgspec

from tidegate.core.tide.fit import COEFFICIENT_RANGE, MEASURED_MAX, LineFit, Three
from tidegate.core.tide.signals import EngineSample

# Measured on one H200 with an 8B model; larger models are slower in much the same proportions,
# which is all that counts.
PRIOR_BASE_MS, PRIOR_SEQUENCE_MS, PRIOR_PROMPT_TOKEN_MS = 5.0, 0.025, 0.025
PRIOR_SAMPLES, MEMORY_SAMPLES = 2.0, 400.0
# Fewer prompt tokens a step than this do not show what one costs.
PROMPT_TOKENS_MIN = 1e-6
# The sizes that weigh the prior's parts alike: its word on twenty sequences counts as much as its
# word on none.
TYPICAL_SEQUENCES, TYPICAL_PROMPT_TOKENS = 20.0, 300.0


class Load(msgspec.Struct):
    """The load since the last sample: sequences over time, their squares, and whether there was any
    prompt.
    """

    sequence_ms: float = 0.0
    square_ms: float = 0.0
    has_prompts: bool = False

    def add(self, sequences: float, elapsed_ms: float, *, has_prompts: bool) -> None:
        self.sequence_ms += sequences * elapsed_ms
        self.square_ms += sequences * sequences * elapsed_ms
        self.has_prompts = self.has_prompts or has_prompts


class StepCost:
    """The fitted line of one engine. The caller adds the `load` of its calls."""

    def __init__(self) -> None:
        self.load = Load()
        self._line = LineFit(
            _expected,
            (PRIOR_BASE_MS, PRIOR_SEQUENCE_MS, PRIOR_PROMPT_TOKEN_MS),
            (1.0, TYPICAL_SEQUENCES, TYPICAL_PROMPT_TOKENS),
            PRIOR_SAMPLES,
            MEMORY_SAMPLES,
        )

        self._prompt_square = PRIOR_SAMPLES * TYPICAL_PROMPT_TOKENS * TYPICAL_PROMPT_TOKENS
        self._prompt_share = 1.0

    def learn(self, sample: EngineSample) -> None:
        """Learn from one sample, under the load added since the last one; ignore one without a time
        between tokens.
        """
        load, self.load = self.load, Load()
        between_ms = sample.between_tokens_ms
        if between_ms is None or not 0.0 < between_ms < MEASURED_MAX or not load.sequence_ms:
            return
        sequences = load.square_ms / load.sequence_ms
        if not 0.0 <= sequences < MEASURED_MAX:
            # Absurd counts overflow to infinity, and infinity over infinity is no number.
            return
        prompt_tokens = (sample.prompt_tokens_per_s or 0.0) * between_ms / 1000
        if not load.has_prompts and not prompt_tokens:
            self._line.learn((1.0, sequences, 0.0), between_ms)
        elif PROMPT_TOKENS_MIN <= prompt_tokens < MEASURED_MAX:
            self._learn_prompts(prompt_tokens, between_ms - self._between_ms(sequences))

    def _learn_prompts(self, prompt_tokens: float, more_ms: float) -> None:
        """Learn what a prompt token costs, as a share of what was expected, from a step that took
        so much longer.
        """
        expected_ms = self._line.coefficients[2] * prompt_tokens
        found = min(max(more_ms / expected_ms, 1 / COEFFICIENT_RANGE), COEFFICIENT_RANGE)
        self._prompt_square = self._prompt_square * (1 - 1 / MEMORY_SAMPLES) + prompt_tokens * prompt_tokens
        self._prompt_share += (found - self._prompt_share) * prompt_tokens * prompt_tokens / self._prompt_square

    def _between_ms(self, sequences: float) -> float:
        base_ms, sequence_ms, _ = self._line.coefficients
        return base_ms + sequence_ms * sequences

    def slowdown(self, sequences: float, prompt_tokens_per_ms: float) -> float:
        """Return the share by which others' tokens come later, beside so many decoding sequences
        and so much prefill.
        """
        base_ms, sequence_ms, prompt_token_ms = self._line.coefficients
        return sequence_ms * sequences / base_ms + self._prompt_share * prompt_token_ms * prompt_tokens_per_ms


def _expected(found: Three) -> Three:
    # An engine that is four times as slow as the prior's is so in all three: the base, which is
    # measured first, shows it.
    base_ms = min(max(found[0], PRIOR_BASE_MS / 10), PRIOR_BASE_MS * 100)
    scale = base_ms / PRIOR_BASE_MS
    return (base_ms, PRIOR_SEQUENCE_MS * scale, PRIOR_PROMPT_TOKEN_MS * scale)
