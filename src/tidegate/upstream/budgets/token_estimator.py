"""The estimate of a call's tokens, which is charged before it is sent.

The operator chooses the kind for each deployment:

    likely    prompt bytes over four, and the usual length of this model's answers, at most the
              caller's limit
    bound     prompt bytes without those of images, the most that images and files may have, and all
              that the caller allows: real tokens cannot be more

A call whose caller allows any number of tokens has no bound. It takes all of its smallest limit,
and so runs alone under that limit. This module reads a body only for the bounds of answer and
prompt.

The most that a call may cost is its bound at the deployment's prices. Under a budget in money a
call is not sent if it has no bound, or if it costs more than its tokens and the price does not
cover that. The caller limits the length of the answer, or the operator does so for the deployment.

The likely cost differs from the most in the prompt alone: a plain letter counts as half a token,
another byte as nearly a whole one. Once the deployment has counted tokens of prompts, the estimate
is a quarter above its highest count.
"""

import math
import string
import sys

from tidegate.core.budgets.budget import TOKENS_MAX
from tidegate.core.deployments import Deployment, Estimate
from tidegate.core.errors import SurchargeUnpriced, Unbounded
from tidegate.core.nouns import Call, Usage
from tidegate.core.usage.answer_bounds import SILENT, output_tokens_max
from tidegate.core.usage.inline_files import without_files
from tidegate.core.usage.prices import CostRange, Price, bound
from tidegate.core.usage.prompt_bounds import (
    COMPARED,
    audio_tokens,
    compared_bytes,
    hidden_tokens,
    likely_prompt_tokens,
)
from tidegate.core.usage.surcharges import surcharge

UNKNOWN_OUTPUT_TOKENS = 256
LEARNED_MAX = 1_000
NEWEST_WEIGHT = 0.02

WHOLE_BUDGET = sys.maxsize


# Tokens for each byte of a prompt before a deployment has counted any: for a plain letter or a
# space, and for any other byte.
_LETTERS = string.ascii_letters.encode() + b" "
LETTER_TOKENS = 0.5
OTHER_TOKENS = 0.8
# A deployment's count is used with a margin, and only of prompts that are longer than the frame of
# a request.
COUNTED_MARGIN = 1.25
COUNTED_MIN = 0.25
COUNTED_BYTES_MIN = 256


class TokenEstimator:
    """Estimates of tokens, which learn from answers.

    They learn the mean tokens of each model's answers, and the most tokens that a deployment counts
    in prompts.
    """

    def __init__(self) -> None:
        self._output_tokens: dict[str, float] = {}
        self._counted: dict[tuple[str, str, bool], float] = {}

    def learn(self, model: str, usage: Usage, items: int = 1) -> None:
        output_tokens = usage.output_tokens / items
        if not output_tokens:
            return
        known = self._output_tokens.get(model)
        if known is None:
            if len(self._output_tokens) >= LEARNED_MAX:
                # Callers choose the names of models, so the table must not grow without a limit.
                self._output_tokens.clear()
            self._output_tokens[model] = output_tokens
        else:
            self._output_tokens[model] = known + NEWEST_WEIGHT * (output_tokens - known)

    def tokens(self, call: Call, estimate: Estimate) -> int:
        """Return how many tokens this call is charged before it is sent; WHOLE_BUDGET: no bound."""
        if estimate is Estimate.BOUND:
            if call.endpoint in SILENT:
                return _size_bytes(call)
            allowed = _allowed(call)
            return WHOLE_BUDGET if allowed is None else _size_bytes(call) + allowed
        if call.tokens:
            return call.tokens
        prompt = likely_prompt_tokens(call)
        if call.endpoint in SILENT:
            return prompt
        likely = int(self._output_tokens.get(call.model, UNKNOWN_OUTPUT_TOKENS) * call.items)
        allowed = _allowed(call)
        return prompt + (likely if allowed is None else min(likely, allowed))

    def nano(self, call: Call, deployment: Deployment, *, batch: bool) -> CostRange:
        """Return what this call will likely cost at a deployment, and the most that it can cost."""
        price = deployment.price
        if price is None:
            return CostRange()
        _check_surcharge(call, price)
        most = self.most(call, deployment)
        likely = self.likely(call, deployment, most)
        return CostRange(
            min(bound(likely.input_tokens, likely.output_tokens, price, batch=batch), TOKENS_MAX),
            min(bound(most.input_tokens, most.output_tokens, price, batch=batch), TOKENS_MAX),
        )

    def learn_prompt(self, call: Call, deployment: Deployment, usage: Usage) -> None:
        """Learn how many tokens a deployment counted in a prompt.

        Keep its highest ratio to the estimate.
        """
        size = compared_bytes(call.endpoint, call.body)
        if (
            size < COUNTED_BYTES_MIN
            or usage.input_tokens > size
            or call.audio is not None
            or hidden_tokens(call.body).most
        ):
            # The count is not about text alone: with more tokens than bytes the deployment fetched
            # a file.
            return
        likely, is_wordy = _likely_tokens(call)
        key = (deployment.name, call.model, is_wordy)
        if key not in self._counted and len(self._counted) >= LEARNED_MAX:
            self._counted.clear()
        self._counted[key] = max(usage.input_tokens / likely, COUNTED_MIN, self._counted.get(key, 0.0))

    def likely(self, call: Call, deployment: Deployment, most: Usage) -> Usage:
        """Return the likely usage of this call: the most, but with its prompt's likely tokens."""
        likely, is_wordy = _likely_tokens(call)
        counted = self._counted.get((deployment.name, call.model, is_wordy))
        if counted is not None:
            likely *= counted * COUNTED_MARGIN
        # Most calls can use as many tokens as they have bytes. Then they hide no tokens, and are
        # not searched again.
        hidden = hidden_tokens(call.body).likely if most.input_tokens != len(call.body) else 0
        tokens = math.ceil(likely) + audio_tokens(call) + hidden
        return Usage(min(tokens, most.input_tokens), 0, most.output_tokens)

    def most(self, call: Call, deployment: Deployment) -> Usage:
        """Return the most that this call can use at a deployment with a price.

        Raise Unbounded without a bound.
        """
        output: int | None = 0
        if deployment.price is not None and deployment.price.output_nano and call.endpoint not in SILENT:
            output = _allowed(call, deployment.output_tokens_max)
        if output is None:
            raise Unbounded(
                "its key, user, team or organization has a budget in money, and nothing bounds what this request can cost: "
                "set its max_tokens (for /v1/responses its max_output_tokens), or have output_tokens_max set for the deployment",
                status=400,
            )
        return Usage(_size_bytes(call), 0, output)

    def nano_unanswered(self, call: Call, deployment: Deployment) -> int:
        """Return the most that a call can have cost that was taken back before its first token."""
        return 0 if deployment.price is None else bound(_size_bytes(call), 0, deployment.price, batch=True)


def _check_surcharge(call: Call, price: Price) -> None:
    """Refuse a call for which a provider charges more than the price covers."""
    found = surcharge(call.body, price.covers)
    if found is not None:
        raise SurchargeUnpriced(
            f"its key, user, team or organization has a budget in money, and `{found.param}` as it is here may cost more than the tokens "
            f"of the request: leave it out, or have `{found.kind}` listed in price.covers of the deployment",
            status=400,
        )


def _size_bytes(call: Call) -> int:
    """Return how much the model has to read, in bytes: the prompt cannot have more tokens."""
    audio_bytes = 0 if call.audio is None else len(call.audio.data)
    hidden = hidden_tokens(call.body)
    shown = 0 if call.endpoint in COMPARED else hidden.shown_bytes
    return compared_bytes(call.endpoint, call.body) - shown + hidden.most + audio_bytes


def _likely_tokens(call: Call) -> tuple[float, bool]:
    """Return a prompt's likely tokens, and whether it is mostly plain words.

    Counts of the two kinds differ.
    """
    body = without_files(call.body)
    others = len(body.translate(None, _LETTERS))
    letters = len(body) - others
    times = compared_bytes(call.endpoint, call.body) / max(1, len(call.body))
    return (letters * LETTER_TOKENS + others * OTHER_TOKENS) * times, letters > others


def _allowed(call: Call, otherwise: int = 0) -> int | None:
    """Return the most tokens of all choices of a call's answers; None if there is no limit."""
    return output_tokens_max(call.endpoint, call.body, otherwise, call.items)
