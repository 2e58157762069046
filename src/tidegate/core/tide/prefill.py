"""Estimate when a call of ours has its first token, where no stream shows it, from what calls took.

latency = fixed + per prompt token * prompt tokens ahead of it and its own + per answer token *
answer tokens

A streamed call shows its first token, a point on the same line without an answer. Any other call
shows its whole latency and, when it ends, how many tokens it had: that is enough to separate the
prompt's part from the answer's.
"""

from tidegate.core.tide.fit import LineFit, Three

PRIOR_FIXED_MS, PRIOR_PROMPT_TOKEN_MS, PRIOR_ANSWER_TOKEN_MS = 10.0, 0.03, 10.0
PRIOR_CALLS, MEMORY_CALLS = 10.0, 120.0
# An estimate that is too short is the costlier error: a prompt that still waits is taken for one
# that decodes, and stays.
MARGIN = 1.4
TYPICAL_PROMPT_TOKENS, TYPICAL_ANSWER_TOKENS = 500.0, 100.0


class PrefillRate:
    """The cost of a prompt on one deployment, learned from our own calls."""

    def __init__(self) -> None:
        self._line = LineFit(
            _expected,
            (PRIOR_FIXED_MS, PRIOR_PROMPT_TOKEN_MS, PRIOR_ANSWER_TOKEN_MS),
            (1.0, TYPICAL_PROMPT_TOKENS, TYPICAL_ANSWER_TOKENS),
            PRIOR_CALLS,
            MEMORY_CALLS,
        )

    def learn_first_token(self, prompt_tokens: float, first_token_ms: float) -> None:
        """Learn from a streamed call's first token.

        `prompt_tokens` are its own and those of calls sent before it that still waited.
        """
        self._line.learn((1.0, prompt_tokens, 0.0), first_token_ms)

    def learn_call(self, prompt_tokens: int, answer_tokens: int, latency_ms: float) -> None:
        """Learn from a call that ended; `prompt_tokens` as for a first token, `answer_tokens`
        beyond the first.
        """
        self._line.learn((1.0, prompt_tokens, answer_tokens), latency_ms)

    def first_token_ms(self, prompt_tokens: int) -> float:
        """Return how long after it is sent a call has its first token; `prompt_tokens` as when
        learning.
        """
        fixed_ms, prompt_token_ms, _ = self._line.coefficients
        return MARGIN * (fixed_ms + prompt_token_ms * prompt_tokens)


def _expected(found: Three) -> Three:
    # The answer's tokens are measured best: an engine that is slow with them is slow with prompts
    # too.
    answer_token_ms = min(max(found[2], PRIOR_ANSWER_TOKEN_MS / 20), PRIOR_ANSWER_TOKEN_MS * 100)
    scale = answer_token_ms / PRIOR_ANSWER_TOKEN_MS
    return (PRIOR_FIXED_MS * scale, PRIOR_PROMPT_TOKEN_MS * scale, answer_token_ms)
