"""How many tokens a call is charged before it is sent, by what the deployment's operator asked for.

    likely    prompt bytes over four, and what this model's answers used to take, at most what the caller allows
    bound     prompt bytes, and all that the caller allows: real tokens cannot be more, as long as nothing is fetched by its address

A caller who allows any number of tokens has no bound: such a call takes all that its smallest limit has, and so runs alone in it. This
module looks into a body only for the numbers that bound the answer.
"""

import sys

import msgspec

from tidegate.core.deployments import Estimate
from tidegate.core.estimate import prompt_tokens
from tidegate.core.nouns import Call, Usage

UNKNOWN_OUTPUT_TOKENS = 256
LEARNED_MAX = 1_000
NEWEST_WEIGHT = 0.02

# Nothing is written by these: what they return is no text of tokens.
SILENT = ("/v1/embeddings", "/v1/moderations", "/v1/rerank")

WHOLE_BUDGET = sys.maxsize


class _Allowed(msgspec.Struct):
    max_tokens: object = None
    max_completion_tokens: object = None
    max_output_tokens: object = None
    n: object = None


_decoder = msgspec.json.Decoder(_Allowed)


class Reserve:
    """Knows, per model, what an answer took on average so far."""

    def __init__(self) -> None:
        self._output_tokens: dict[str, float] = {}

    def learn(self, model: str, usage: Usage) -> None:
        if not usage.output_tokens:
            return
        known = self._output_tokens.get(model)
        if known is None:
            if len(self._output_tokens) >= LEARNED_MAX:
                # Callers choose the names of models: what is not needed must not pile up.
                self._output_tokens.clear()
            self._output_tokens[model] = float(usage.output_tokens)
        else:
            self._output_tokens[model] = known + NEWEST_WEIGHT * (usage.output_tokens - known)

    def tokens(self, call: Call, estimate: Estimate) -> int:
        """What this call is charged before it is sent. WHOLE_BUDGET: nothing bounds it."""
        if estimate is Estimate.BOUND:
            if call.endpoint in SILENT:
                return len(call.body)
            allowed = _allowed(call.body)
            return WHOLE_BUDGET if allowed is None else len(call.body) + allowed
        if call.tokens:
            return call.tokens
        prompt = prompt_tokens(len(call.body))
        if call.endpoint in SILENT:
            return prompt
        likely = int(self._output_tokens.get(call.model, UNKNOWN_OUTPUT_TOKENS))
        allowed = _allowed(call.body)
        return prompt + (likely if allowed is None else min(likely, allowed))


def _allowed(body: bytes) -> int | None:
    """The most tokens that all choices of an answer may have; None when the caller does not say."""
    try:
        said = _decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    counts = [
        number
        for number in (said.max_completion_tokens, said.max_tokens, said.max_output_tokens)
        if isinstance(number, int) and not isinstance(number, bool) and number >= 0
    ]
    if not counts:
        return None
    # An upstream may read any of them, so the largest bounds.
    choices = said.n if isinstance(said.n, int) and not isinstance(said.n, bool) and said.n > 0 else 1
    return max(counts) * choices
