"""What an interactive call took of its budgets, and what it really used and cost: settled once, told once.

Budgets and books hear the same: what the answer said of its usage, and by its text what it did not say; of a call that may have been done
unheard, what was set aside for it. Where usage is written down is not known here.
"""

from collections.abc import Callable

from tidegate.core.answers.answer_text import estimated, written_bytes
from tidegate.core.deployments import Deployment, Estimate
from tidegate.core.nouns import Call, Usage
from tidegate.core.usage.prices import cost
from tidegate.upstream.budgets.budget_client import BudgetClient
from tidegate.upstream.budgets.token_estimator import SILENT, TokenEstimator
from tidegate.upstream.http.send_permit import SendPermit

# Hears where a call was answered and what it used.
OnUsage = Callable[[Deployment, Usage], None]


class CallReceipt:
    __slots__ = ("_budgets", "_call", "_deployment", "_estimator", "_is_settled", "_on_usage", "_permit")

    def __init__(
        self,
        budget_client: BudgetClient,
        estimator: TokenEstimator,
        call: Call,
        permit: SendPermit | None,
        deployment: Deployment,
        on_usage: OnUsage | None = None,
    ) -> None:
        self._budgets = budget_client
        self._estimator = estimator
        self._call = call
        self._permit = permit
        self._deployment = deployment
        self._on_usage = on_usage
        self._is_settled = False

    def settle_whole(self, usage: Usage, answer: bytes) -> None:
        """The answer came whole. What it does not say is counted by its text."""
        uncounted = 0
        if not usage.output_tokens and self._call.endpoint not in SILENT:
            uncounted = written_bytes(answer)
        self.settle(usage, uncounted)

    def settle(self, said: Usage | None, uncounted_bytes: int) -> None:
        """The answer ended, or nobody wants the rest: what was heard of it is what it used, in the books and in the budgets."""
        if said is not None and said.input_tokens and not uncounted_bytes:
            self._estimator.learn(self._call.model, said)
            if self._permit is not None and self._permit.nano:
                self._estimator.learn_prompt(self._call, self._deployment, said)
            self._pay(said.input_tokens + said.output_tokens, said)
            return
        seen = estimated(said, len(self._call.body), uncounted_bytes)
        tokens = seen.input_tokens + seen.output_tokens
        if self._permit is not None and self._deployment.estimate is Estimate.BOUND:
            # Real tokens must not pass such a limit, and nobody said how many there were.
            tokens = max(tokens, self._permit.tokens)
        self._pay(tokens, seen)

    def not_done(self, *, was_sent: bool) -> None:
        """The upstream did not do it: nothing was sent, or it was turned away."""
        if self._permit is not None and not was_sent:
            self._is_settled = True
            self._budgets.give_back(self._permit)
        else:
            self._close(0, 0, None)

    def lost(self) -> None:
        """It may have been done, and nobody will ever say: what was set aside counts as used, and stands in the books."""
        price = self._deployment.price
        if self._permit is None or not self._permit.nano or price is None:
            self._close(None, None, None)
            return
        used = self._estimator.most(self._call, self._deployment)
        if cost(used, price, batch=False).total_nano > self._permit.nano:
            # It ran alone, with less set aside than its worst.
            used = self._estimator.likely(self._call, self._deployment, used)
        self._pay(self._permit.tokens, used)

    def left(self, *, is_stream: bool) -> None:
        """The caller left before anything came. A stream was stopped at its prompt; any other answer may be written to its end."""
        if is_stream and self._permit is not None:
            self.settle(None, 0)
        else:
            self.lost()

    def _pay(self, tokens: int, used: Usage) -> None:
        price = self._deployment.price
        is_paid = self._permit is not None and self._permit.nano
        self._close(tokens, cost(used, price, batch=False).total_nano if is_paid and price is not None else 0, used)

    def _close(self, tokens: int | None, nano: int | None, used: Usage | None) -> None:
        if self._is_settled:
            return
        self._is_settled = True
        if self._permit is not None:
            self._budgets.used(self._permit, self._permit.tokens if tokens is None else tokens, nano)
        if used is not None and self._on_usage is not None:
            self._on_usage(self._deployment, used)
