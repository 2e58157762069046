"""How many tokens a call is charged before it is sent, by what the deployment's operator asked for.

    likely    prompt bytes over four, and what this model's answers used to take, at most what the caller allows
    bound     prompt bytes, and all that the caller allows: real tokens cannot be more, as long as nothing is fetched by its address

A caller who allows any number of tokens has no bound: such a call takes all that its smallest limit has, and so runs alone in it. This
module looks into a body only for the numbers that bound the answer.

What a call may cost at most is its bound at the deployment's prices. Nothing is sent under a budget in money that has no bound: the caller
says how long an answer may be, or the operator says it of the deployment.
"""

import sys

import msgspec

from tidegate.core.budgets import TOKENS_MAX
from tidegate.core.deployments import Deployment, Estimate
from tidegate.core.errors import Unbounded
from tidegate.core.estimate import prompt_tokens
from tidegate.core.nouns import Call, Usage
from tidegate.core.prices import bound

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
    best_of: object = None


_decoder = msgspec.json.Decoder(_Allowed)


class Reserve:
    """Knows, per model, what an answer took on average so far."""

    def __init__(self) -> None:
        self._output_tokens: dict[str, float] = {}

    def learn(self, model: str, usage: Usage, items: int = 1) -> None:
        output_tokens = usage.output_tokens / items
        if not output_tokens:
            return
        known = self._output_tokens.get(model)
        if known is None:
            if len(self._output_tokens) >= LEARNED_MAX:
                # Callers choose the names of models: what is not needed must not pile up.
                self._output_tokens.clear()
            self._output_tokens[model] = output_tokens
        else:
            self._output_tokens[model] = known + NEWEST_WEIGHT * (output_tokens - known)

    def tokens(self, call: Call, estimate: Estimate) -> int:
        """What this call is charged before it is sent. WHOLE_BUDGET: nothing bounds it."""
        if estimate is Estimate.BOUND:
            if call.endpoint in SILENT:
                return len(call.body)
            allowed = _allowed(call)
            return WHOLE_BUDGET if allowed is None else len(call.body) + allowed
        if call.tokens:
            return call.tokens
        prompt = prompt_tokens(len(call.body))
        if call.endpoint in SILENT:
            return prompt
        likely = int(self._output_tokens.get(call.model, UNKNOWN_OUTPUT_TOKENS) * call.items)
        allowed = _allowed(call)
        return prompt + (likely if allowed is None else min(likely, allowed))

    def nano(self, call: Call, deployment: Deployment, *, batch: bool) -> int:
        """The most that this call can cost there."""
        price = deployment.price
        if price is None:
            return 0
        most = self.most(call, deployment)
        return min(bound(most.input_tokens, most.output_tokens, price, batch=batch), TOKENS_MAX)

    def most(self, call: Call, deployment: Deployment) -> Usage:
        """The most that this call can use there, of what has a price; Unbounded when nothing bounds it."""
        output: int | None = 0
        if deployment.price is not None and deployment.price.output_nano and call.endpoint not in SILENT:
            output = _allowed(call, deployment.output_tokens_max)
        if output is None:
            raise Unbounded(
                "its key, user, team or organization has a budget in money, and nothing bounds what this request can cost: "
                "set its max_tokens, or have output_tokens_max set for the deployment",
                status=400,
            )
        return Usage(len(call.body), 0, output)

    def nano_unanswered(self, call: Call, deployment: Deployment) -> int:
        """The most that a batch call cost which was taken back before its first token."""
        return 0 if deployment.price is None else bound(len(call.body), 0, deployment.price, batch=True)


def _allowed(call: Call, otherwise: int = 0) -> int | None:
    """The most tokens that all choices of its answers may have; None when neither the caller nor `otherwise` says."""
    try:
        said = _decoder.decode(call.body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    counts = [
        number
        for number in (said.max_completion_tokens, said.max_tokens, said.max_output_tokens)
        if isinstance(number, int) and not isinstance(number, bool) and number >= 0
    ]
    if not counts and not otherwise:
        return None
    # An upstream may read any of them, so the largest bounds.
    choices = [
        number
        for number in (1, said.n, said.best_of)
        if isinstance(number, int) and not isinstance(number, bool) and number > 0
    ]
    return max(counts or [otherwise]) * max(choices) * call.items
