"""What a batch call costs the others: a line fitted to what the engine says about its time between tokens.

    between tokens = base + per sequence * running + per prompt token * prompt tokens per step

It has a prior, so it is safe before anything was seen and on engines that say nothing. It knows no limit and no queue; it
only turns a load into a slowdown.
"""

from tidegate.core.tide.fit import Line, Three
from tidegate.core.tide.signals import EngineSample

# Measured on one H200 with an 8B model; larger models are slower in much the same proportions, which is all that counts.
PRIOR_BASE_MS, PRIOR_SEQUENCE_MS, PRIOR_PROMPT_TOKEN_MS = 5.0, 0.025, 0.025
PRIOR_SAMPLES, MEMORY_SAMPLES = 20.0, 600.0
CHUNK_TOKENS = 512.0
# The sizes at which the prior speaks: what it says about sixty sequences weighs as much as what it says about none.
TYPICAL_SEQUENCES, TYPICAL_PROMPT_TOKENS = 60.0, 300.0


class StepCost:
    """The fitted line of one engine."""

    def __init__(self) -> None:
        self._line = Line(
            _expected,
            (PRIOR_BASE_MS, PRIOR_SEQUENCE_MS, PRIOR_PROMPT_TOKEN_MS),
            (1.0, TYPICAL_SEQUENCES, TYPICAL_PROMPT_TOKENS),
            PRIOR_SAMPLES,
            MEMORY_SAMPLES,
        )

    def learn(self, sample: EngineSample) -> None:
        """Take in one sample; one without a time between tokens says nothing."""
        between_ms, running = sample.between_tokens_ms, sample.running
        if between_ms is not None and running is not None and between_ms > 0.0:
            prompt_tokens = (sample.prompt_tokens_per_s or 0.0) * between_ms / 1000
            self._line.learn((1.0, running, prompt_tokens), between_ms)

    def slowdown(self, sequences: float, prompt_tokens_per_ms: float) -> float:
        """By which share the others' tokens come later, beside so many decoding sequences and so much prefill."""
        base_ms, sequence_ms, prompt_token_ms = self._line.coefficients
        return sequence_ms * sequences / base_ms + prompt_token_ms * prompt_tokens_per_ms

    def prefill_ms(self, prompt_tokens: float, sequences: float) -> float:
        """How long so many prompt tokens take beside so many decoding sequences: a step for each chunk, and their own cost."""
        base_ms, sequence_ms, prompt_token_ms = self._line.coefficients
        steps = 1 + prompt_tokens / CHUNK_TOKENS
        return steps * (base_ms + sequence_ms * sequences) + prompt_tokens * prompt_token_ms


def _expected(found: Three) -> Three:
    # An engine that is four times as slow as the prior's is so in all three: the base, which is seen first, tells.
    base_ms = min(max(found[0], PRIOR_BASE_MS / 10), PRIOR_BASE_MS * 100)
    scale = base_ms / PRIOR_BASE_MS
    return (base_ms, PRIOR_SEQUENCE_MS * scale, PRIOR_PROMPT_TOKEN_MS * scale)
