"""The Limits port in memory, over the clock that the test moves: an exact log of what was granted when. Only for tests of who asks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tests.support.ports import HandClock
from tidegate.core.budgets.budget import Budget, BudgetRequest, Grant, Limit, Period, Settlement
from tidegate.core.errors import LimitsUnavailable

PERIOD_MS = {Period.MINUTE: 60_000, Period.HOUR: 3_600_000}
LASTS_MS = 250


def minute(requests: int | None = None, tokens: int | None = None, *, enabled: bool = True) -> Limit:
    return Limit(Period.MINUTE, requests, tokens, enabled)


@dataclass
class Taken:
    at_ms: float
    requests: int
    tokens: int


@dataclass
class MemoryLimits:
    """`log` has every grant per budget. `away` makes it unreachable, and `gate` is awaited before each answer."""

    clock: HandClock
    away: bool = False
    questions: list[list[BudgetRequest]] = field(default_factory=list)
    settlements: list[Settlement] = field(default_factory=list)
    log: dict[str, list[Taken]] = field(default_factory=dict)
    shares: dict[str, dict[str, int]] = field(default_factory=dict)
    reported: dict[str, Limit] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._grants: dict[str, dict[str, Taken]] = {}

    async def debit(self, asks: Sequence[BudgetRequest]) -> list[Grant]:
        self.questions.append(list(asks))
        if self.away:
            raise LimitsUnavailable("the store is away")
        return [self._grant(ask) for ask in asks]

    async def settle_grants(self, settlements: Sequence[Settlement]) -> None:
        if self.away:
            raise LimitsUnavailable("the store is away")
        self.settlements += settlements
        for settled in settlements:
            for taken in self._grants[settled.grant_id].values():
                taken.requests -= settled.unsent_requests
                taken.tokens += settled.used_tokens - settled.reserved_tokens

    def used(self, budget: Budget | str) -> tuple[int, int]:
        """Requests and tokens that count now, in the last minute."""
        name = budget if isinstance(budget, str) else budget.name
        now = self.clock.monotonic
        counted = [taken for taken in self.log.get(name, ()) if taken.at_ms > now - 60_500]
        return sum(taken.requests for taken in counted), sum(taken.tokens for taken in counted)

    def _grant(self, ask: BudgetRequest) -> Grant:
        requests, wait_ms, spent = ask.requests, 0, ""
        each = ask.tokens / ask.requests
        for budget in ask.budgets:
            for limit in budget.limits:
                if not limit.enabled:
                    continue
                room, frees_in_ms = self._room(budget, limit, each)
                if room < requests:
                    requests, wait_ms, spent = room, frees_in_ms, budget.id
        tokens = int(each * requests) if requests < ask.requests else ask.tokens
        grant = Grant(f"g{len(self._grants)}", requests, tokens, LASTS_MS, wait_ms, spent)
        made = self._grants[grant.id] = {}
        for budget in ask.budgets:
            made[budget.name] = Taken(self.clock.monotonic, requests, tokens)
            self.log.setdefault(budget.name, []).append(made[budget.name])
        return grant

    def _room(self, budget: Budget, limit: Limit, tokens_each: float) -> tuple[int, int]:
        window_ms = PERIOD_MS[limit.period] + 500
        now = self.clock.monotonic
        counted = [taken for taken in self.log.get(budget.name, ()) if taken.at_ms > now - window_ms]
        room = 10**9
        if limit.requests is not None:
            room = min(room, limit.requests - sum(taken.requests for taken in counted))
        if limit.tokens is not None and tokens_each:
            left = limit.tokens - sum(taken.tokens for taken in counted)
            room = min(room, int(left // tokens_each))
        first = min((taken.at_ms for taken in counted if taken.requests or taken.tokens), default=now)
        return max(0, room), int(first + window_ms - now)

    async def share_slots(
        self, worker_id: str, wanted: Mapping[str, int], in_use: Mapping[str, int], caps: Mapping[str, int]
    ) -> dict[str, int]:
        if self.away:
            raise LimitsUnavailable("the store is away")
        answer = {}
        for name, cap in caps.items():
            others = sum(held.get(name, 0) for worker, held in self.shares.items() if worker != worker_id)
            answer[name] = min(wanted[name], max(0, cap - others))
        self.shares[worker_id] = {name: max(answer[name], in_use[name]) for name in caps}
        return answer

    async def put_discovered(self, deployment: str, limit: Limit) -> None:
        self.reported[deployment] = limit

    async def discovered(self) -> dict[str, Limit]:
        return dict(self.reported)
