"""What an interactive call took of its budgets, and what it really used and cost: settled once, told once.

A call whose answer says nothing of its usage is estimated, and of its money all that was set aside counts as spent. Who pays, and where
what was used is written down, is the affair of whoever listens.
"""

from collections.abc import Callable

from tidegate.core.deployments import Deployment
from tidegate.core.estimate import prompt_tokens
from tidegate.core.nouns import Call, Usage
from tidegate.core.prices import cost
from tidegate.upstream.purse import Leave, Purse
from tidegate.upstream.reserve import Reserve

# Hears where a call was answered and what it used.
Heard = Callable[[Deployment, Usage], None]


class Tab:
    __slots__ = ("_call", "_deployment", "_heard", "_is_settled", "_leave", "_purse", "_reserve")

    def __init__(
        self,
        purse: Purse,
        reserve: Reserve,
        call: Call,
        leave: Leave | None,
        deployment: Deployment,
        heard: Heard | None = None,
    ) -> None:
        self._purse = purse
        self._reserve = reserve
        self._call = call
        self._leave = leave
        self._deployment = deployment
        self._heard = heard
        self._is_settled = False

    def settle(self, usage: Usage) -> None:
        """The answer came, and says so."""
        spent = usage.input_tokens + usage.output_tokens
        if not spent:
            self._pay(None, None, usage)
            return
        self._reserve.learn(self._call.model, usage)
        price = self._deployment.price
        is_paid = self._leave is not None and self._leave.nano and price is not None
        self._pay(spent, cost(usage, price, batch=False).total_nano if is_paid and price else 0, usage)

    def not_done(self, *, was_sent: bool) -> None:
        """The upstream did not do it: nothing was sent, or it was turned away."""
        if self._leave is not None and not was_sent:
            self._is_settled = True
            self._purse.give_back(self._leave)
        else:
            self._pay(0, 0, None)

    def lost(self) -> None:
        """It may have been done, and nobody will ever say: what was set aside counts as used."""
        self._pay(None, None, None)

    def estimate(self, event_count: int, said: Usage | None) -> None:
        """It broke off, or nobody said what it used: as much as was reserved, or more when more was seen to come."""
        said = said or Usage()
        seen = Usage(
            said.input_tokens or prompt_tokens(len(self._call.body)),
            said.cached_tokens,
            max(said.output_tokens, event_count),
            said.reasoning_tokens,
        )
        reserved = self._leave.tokens if self._leave is not None else 0
        self._pay(max(seen.input_tokens + seen.output_tokens, reserved), None, seen)

    def _pay(self, tokens: int | None, nano: int | None, used: Usage | None) -> None:
        if self._is_settled:
            return
        self._is_settled = True
        if self._leave is not None:
            self._purse.used(self._leave, self._leave.tokens if tokens is None else tokens, nano)
        if used is not None and self._heard is not None:
            self._heard(self._deployment, used)
