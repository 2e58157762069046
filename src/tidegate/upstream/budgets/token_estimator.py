"""How many tokens a call is charged before it is sent, by what the deployment's operator asked for.

    likely    prompt bytes over four, and what this model's answers used to take, at most what the caller allows
    bound     prompt bytes but those of images, the most that images and files may have, and all that the caller allows: real tokens
              cannot be more

A caller who allows any number of tokens has no bound: such a call takes all that its smallest limit has, and so runs alone in it. This
module looks into a body only for what bounds the answer and the prompt.

What a call may cost at most is its bound at the deployment's prices. Nothing is sent under a budget in money that has no bound: the caller
says how long an answer may be, or the operator says it of the deployment. Nor is anything that costs more than its tokens, unless the price
covers that. What a call will likely cost differs in the prompt alone: a plain letter counts as half a token, another byte nearly as a whole
one, until the deployment has counted some; then a quarter more than it ever did.
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


# How many tokens a byte of a prompt likely is before a deployment has counted any: a plain letter or a space, and any other.
_LETTERS = string.ascii_letters.encode() + b" "
LETTER_TOKENS = 0.5
OTHER_TOKENS = 0.8
# What a deployment counted is believed with a margin, and only of prompts that are more than the frame of a request.
COUNTED_MARGIN = 1.25
COUNTED_MIN = 0.25
COUNTED_BYTES_MIN = 256


class TokenEstimator:
    """Knows, per model, what an answer took on average so far, and how many tokens a deployment counts in prompts at most."""

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
                # Callers choose the names of models: what is not needed must not pile up.
                self._output_tokens.clear()
            self._output_tokens[model] = output_tokens
        else:
            self._output_tokens[model] = known + NEWEST_WEIGHT * (output_tokens - known)

    def tokens(self, call: Call, estimate: Estimate) -> int:
        """What this call is charged before it is sent. WHOLE_BUDGET: nothing bounds it."""
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
        """What this call will likely cost there, and the most that it can."""
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
        """Learn how many tokens a deployment counted in a prompt. The most that it ever counted, beside the estimate, is remembered."""
        size = compared_bytes(call.endpoint, call.body)
        if (
            size < COUNTED_BYTES_MIN
            or usage.input_tokens > size
            or call.audio is not None
            or hidden_tokens(call.body).most
        ):
            # More tokens than bytes are no text: something was fetched.
            return
        likely, is_wordy = _likely_tokens(call)
        key = (deployment.name, call.model, is_wordy)
        if key not in self._counted and len(self._counted) >= LEARNED_MAX:
            self._counted.clear()
        self._counted[key] = max(usage.input_tokens / likely, COUNTED_MIN, self._counted.get(key, 0.0))

    def likely(self, call: Call, deployment: Deployment, most: Usage) -> Usage:
        """What this call will likely use there: as much as it can, but for the tokens of its prompt."""
        likely, is_wordy = _likely_tokens(call)
        counted = self._counted.get((deployment.name, call.model, is_wordy))
        if counted is not None:
            likely *= counted * COUNTED_MARGIN
        # Most calls can use as many tokens as they have bytes, so nothing is hidden in them, and they are not looked through again.
        hidden = hidden_tokens(call.body).likely if most.input_tokens != len(call.body) else 0
        tokens = math.ceil(likely) + audio_tokens(call) + hidden
        return Usage(min(tokens, most.input_tokens), 0, most.output_tokens)

    def most(self, call: Call, deployment: Deployment) -> Usage:
        """The most that this call can use there, of what has a price; Unbounded when nothing bounds it."""
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
        """The most that a batch call cost which was taken back before its first token."""
        return 0 if deployment.price is None else bound(_size_bytes(call), 0, deployment.price, batch=True)


def _check_surcharge(call: Call, price: Price) -> None:
    """Refuse what a provider charges more for than the price says."""
    found = surcharge(call.body, price.covers)
    if found is not None:
        raise SurchargeUnpriced(
            f"its key, user, team or organization has a budget in money, and `{found.param}` as it is here may cost more than the tokens "
            f"of the request: leave it out, or have `{found.kind}` listed in price.covers of the deployment",
            status=400,
        )


def _size_bytes(call: Call) -> int:
    """How much there is to read for the model: its tokens cannot be more."""
    audio_bytes = 0 if call.audio is None else len(call.audio.data)
    hidden = hidden_tokens(call.body)
    shown = 0 if call.endpoint in COMPARED else hidden.shown_bytes
    return compared_bytes(call.endpoint, call.body) - shown + hidden.most + audio_bytes


def _likely_tokens(call: Call) -> tuple[float, bool]:
    """How many tokens a prompt likely has, and whether it is mostly plain words: of the two kinds, counts differ."""
    body = without_files(call.body)
    others = len(body.translate(None, _LETTERS))
    letters = len(body) - others
    times = compared_bytes(call.endpoint, call.body) / max(1, len(call.body))
    return (letters * LETTER_TOKENS + others * OTHER_TOKENS) * times, letters > others


def _allowed(call: Call, otherwise: int = 0) -> int | None:
    """The most tokens that all choices of its answers may have; None when neither the caller nor `otherwise` says."""
    return output_tokens_max(call.endpoint, call.body, otherwise, call.items)
