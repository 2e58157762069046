"""The receipt of one call: the reserved parts of its budgets, and its real usage and cost.

A receipt is settled once and reported once. A call can end in four ways, each with its cost:

    not sent      the permit goes back
    refused       it counts as a request; it was not done, so it took no tokens and no money
    perhaps done  all that was set aside counts as used, unless a lower figure is known
    done          the usage in the answer, or an estimate without one

Budgets and usage reports get the same figures. This module does not know where usage is stored.
"""

from collections.abc import Callable
from enum import Enum, auto

from tidegate.core.answers.answer_text import counted, unreported_bytes
from tidegate.core.deployments import Deployment, Estimate
from tidegate.core.errors import KeyRejected, Refused, Throttled, Unavailable
from tidegate.core.nouns import Call, Usage
from tidegate.core.usage.prices import cost
from tidegate.upstream.budgets.budget_client import BudgetClient
from tidegate.upstream.budgets.token_estimator import TokenEstimator
from tidegate.upstream.http.transport import SendPermit

# Called with the deployment that answered a call, and what the call used.
OnUsage = Callable[[Deployment, Usage], None]


class CallEnd(Enum):
    NOT_SENT = auto()
    REFUSED = auto()
    PERHAPS_DONE = auto()


def end_of_failed(permit: SendPermit, wrong: BaseException) -> CallEnd:
    """Return how a call without an answer ended."""
    if not permit.begun:
        return CallEnd.NOT_SENT
    if isinstance(wrong, Throttled | Refused | KeyRejected | Unavailable):
        return CallEnd.REFUSED
    return CallEnd.PERHAPS_DONE


class CallReceipt:
    """The receipt of one call.

    `is_batch` marks an item's call: it has the batch price, and the store writes its usage with its
    outcome.
    """

    __slots__ = ("_budgets", "_call", "_deployment", "_estimator", "_is_batch", "_is_settled", "_on_usage", "_permit")

    def __init__(
        self,
        budget_client: BudgetClient,
        estimator: TokenEstimator,
        call: Call,
        permit: SendPermit,
        deployment: Deployment,
        *,
        is_batch: bool,
        on_usage: OnUsage | None = None,
    ) -> None:
        self._budgets = budget_client
        self._estimator = estimator
        self._call = call
        self._permit = permit
        self._deployment = deployment
        self._is_batch = is_batch
        self._on_usage = on_usage
        self._is_settled = False

    def settle_failed(self, end: CallEnd) -> None:
        """Settle a call that failed without an answer."""
        match end:
            case CallEnd.NOT_SENT:
                self._is_settled = True
                if self._permit.budgets:
                    self._budgets.release_permit(self._permit)
            case CallEnd.REFUSED:
                self._close(0, 0, None)
            case CallEnd.PERHAPS_DONE:
                self._settle_perhaps_done()

    def _settle_perhaps_done(self) -> None:
        price = self._deployment.price
        if self._is_batch or not self._permit.nano or price is None:
            self._close(None, None, None)
            return
        used = self._estimator.most(self._call, self._deployment)
        if cost(used, price, batch=False).total_nano > self._permit.nano:
            # The call ran alone: less was set aside than the most that it can cost.
            used = self._estimator.likely(self._call, self._deployment, used)
        self._pay(self._permit.tokens, used)

    def settle_taken_back(self) -> None:
        """Settle a call that was taken back before a token: only its prompt may have cost."""
        nano = self._estimator.nano_unanswered(self._call, self._deployment) if self._permit.nano else 0
        self._close(None, min(self._permit.nano, nano), None)

    def settle_left(self, *, is_stream: bool) -> None:
        """Settle a call whose caller left before the answer began.

        A stream was stopped at its prompt; the upstream may write any other answer to its end.
        """
        if is_stream:
            self.settle_answer(None)
        else:
            self._settle_perhaps_done()

    def settle_whole(self, reported: Usage, answer: bytes) -> Usage:
        """Settle a call with a whole answer.

        Return its usage, with unreported figures counted by the text.
        """
        return self.settle_answer(reported, unreported_bytes(self._call.endpoint, reported, answer))

    def settle_answer(self, reported: Usage | None, uncounted_bytes: int = 0) -> Usage:
        """Settle a call whose answer ended, or was left by its caller, and return its usage.

        Usage that was not reported is counted by the received bytes.
        """
        if reported is not None and not uncounted_bytes and reported.input_tokens:
            if self._permit.budgets or self._deployment.tokens_in_flight_max:
                # Calls without limits are not learned from, because items without limits have no
                # receipt either.
                self._estimator.learn(self._call.model, reported, self._call.items)
            if self._permit.nano:
                self._estimator.learn_prompt(self._call, self._deployment, reported)
            self._pay(reported.input_tokens + reported.output_tokens, reported)
            return reported
        used = counted(self._call, reported, uncounted_bytes)
        tokens = used.input_tokens + used.output_tokens
        if self._permit.budgets and self._deployment.estimate is Estimate.BOUND:
            # Real tokens must not exceed a limit of this kind, and the answer did not report how
            # many there were.
            tokens = max(tokens, self._permit.tokens)
        self._pay(tokens, used)
        return used

    def _pay(self, tokens: int, used: Usage) -> None:
        self._close(tokens, self._nano(used), used)

    def _nano(self, used: Usage) -> int:
        price = self._deployment.price
        if not self._permit.nano or price is None:
            return 0
        return cost(used, price, batch=self._is_batch).total_nano

    def _close(self, tokens: int | None, nano: int | None, used: Usage | None) -> None:
        if self._is_settled:
            return
        self._is_settled = True
        if self._permit.budgets:
            self._budgets.used(self._permit, self._permit.tokens if tokens is None else tokens, nano)
        if used is not None and self._on_usage is not None:
            self._on_usage(self._deployment, used)
