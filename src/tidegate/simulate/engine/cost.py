"""The cost of one step of the modelled engine, as measured on one H200 with Llama-3-8B's shapes.

The figures are the calibration's fit (mean error 3 %, worst 11 %). This module turns a step's load
into milliseconds, and knows no queue, no cache and no clock.
"""

STEP_BASE_MS = 4.95
SEQUENCE_MS = 0.0087
CROWDED_SEQUENCE_MS = 0.0101
CROWDED_SEQUENCES = 100
CONTEXT_KILOTOKEN_MS = 0.0300
PREFILL_TOKEN_MS = 0.0252
PREFILL_FREE_TOKENS = 100


def step_ms(decoding: int, context_tokens: int, prefill_tokens: int) -> float:
    """Return the milliseconds of a step.

    `decoding` sequences, whose contexts add up to `context_tokens`, emit a token each, beside
    `prefill_tokens` tokens of prompts.
    """
    return (
        STEP_BASE_MS
        + SEQUENCE_MS * decoding
        + CROWDED_SEQUENCE_MS * max(0, decoding - CROWDED_SEQUENCES)
        + CONTEXT_KILOTOKEN_MS * context_tokens / 1024
        + PREFILL_TOKEN_MS * max(0, prefill_tokens - PREFILL_FREE_TOKENS)
    )
