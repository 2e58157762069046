"""The permits that this process takes to send calls under the budgets that all processes share.

- Every call that a budget binds takes a permit here, right before it is sent. Calls without budgets
  never come here.
- One question to the Limits port asks for all calls that wait, and only one question is out at a
  time, so a thousand calls cost a few questions.
- A permit is short-lived. An unused one goes back before it expires; a used one is settled with the
  real figures of its call.
- A spent budget is asked again at the moment that it named, and a budget of tokens every few
  seconds.
- A budget whose day or lifetime has too little left for one call is still asked for smaller calls.

A budget in money is never exceeded, because a call reserves the most that it can cost. If less is
left, but enough for its likely cost, the call reserves all that is left and so runs alone. A call
that would likely exceed a budget even if all calls in flight were free is refused for good, unless
the budget renews while the call may wait. Any other call is put off until calls in flight have
settled.

This module knows no deployment and no HTTP.
"""

import asyncio
import math
from collections.abc import Callable, Sequence

import msgspec
import structlog

from tidegate import metrics
from tidegate.core.budgets.budget import Budget, BudgetRequest, Grant, LimitBound, LimitRoom, Settlement
from tidegate.core.budgets.money import RESERVED_MS
from tidegate.core.errors import LimitsUnavailable, Overspent, Refused, Withheld
from tidegate.core.policy.policy_rules import DenialCode
from tidegate.core.ports import Clock, Limits
from tidegate.core.usage.prices import CostRange, units_text
from tidegate.core.wording import in_words
from tidegate.upstream.budgets.settlements import Settlements
from tidegate.upstream.budgets.spent_budgets import Budgets, SpentBudgets
from tidegate.upstream.http.transport import SendPermit

log = structlog.get_logger(__name__)

# Waiting calls are put off if an answer takes longer. The question itself is never cancelled,
# because it may have been granted.
ANSWER_S_MAX = 5.0
UNREACHABLE_MS = 1_000

# A budget frees a little at a time. To ask for each part would keep the CPU busy; this pause costs
# a thousandth of a minute.
SPENT_MS_MIN = 50
# A spent month or lifetime stays spent for long, but an operator may raise it, so it is asked now
# and then.
SPENT_MS_MAX = 600_000
# The most calls that ask at once for a budget that was spent lately, so that other processes get a
# part of it.
CONTENDED_ASK_MAX = 16
ASK_MAX = 512

TERMS_MAX = 4_096
FREE = CostRange()

EXCEEDS_LIMIT = "request_exceeds_limit"

# The names that callers know for the owners of budgets.
PAYERS = {LimitBound.TENANT: "organization", LimitBound.JOB: "batch"}


class BindingLimits(msgspec.Struct, frozen=True):
    """A call's budgets that have limits, and the most tokens and money that one call may take."""

    budgets: Budgets
    counts_tokens: bool
    tokens_max: int
    counts_money: bool = False
    nano_max: int = 0
    poorest: Budget | None = None


# The limits of a call without budgets: none.
UNBOUND = BindingLimits((), False, 0)


class _Waiter:
    """A call that waits for a permit.

    `nano` is the money to set aside, `nano_likely` the least to go with.
    """

    __slots__ = ("answer", "give_up_ms", "nano", "nano_likely", "tokens")

    def __init__(self, answer: "asyncio.Future[SendPermit]", tokens: int, cost: CostRange, give_up_ms: float) -> None:
        self.answer = answer
        self.tokens = tokens
        self.nano = cost.most
        self.nano_likely = min(cost.likely, cost.most)
        self.give_up_ms = give_up_ms


class BudgetClient:
    def __init__(self, limits: Limits | None, clock: Clock) -> None:
        self._limits = limits
        self._clock = clock
        self._terms: dict[Budgets, BindingLimits] = {}
        self._waiting: dict[Budgets, list[_Waiter]] = {}
        self._one_by_one: set[Budgets] = set()
        self._charges: list[tuple[BudgetRequest, float]] = []
        self._charged: list[tuple[BudgetRequest, float, Grant]] = []
        self._asking: asyncio.Task[None] | None = None
        self._spent = SpentBudgets(clock)
        self._settlements = Settlements(limits, self._spent)
        # The rest of each limit at the last answer, and the moment of the question.
        self._rooms: dict[Budget, tuple[float, list[LimitRoom]]] = {}
        self._closed = False
        self.unreachable_until_ms = 0.0

    def terms(self, budgets: Budgets) -> BindingLimits:
        """Return the limits that these budgets set."""
        terms = self._terms.get(budgets)
        if terms is None:
            if len(self._terms) >= TERMS_MAX:
                self._terms.clear()
            terms = self._terms[budgets] = _terms(budgets)
        return terms

    def spent_until_ms(self, budgets: Budgets) -> float:
        """Return the known moment before which these budgets allow no call; 0 if none is known."""
        if self._charged:
            self._renew_charged()
        return self._spent.until_ms(budgets)

    def opens_at_ms(self, budgets: Budgets, patience_ms: float) -> float:
        """Return the known moment from which a call with this patience should come here."""
        if self._charged:
            self._renew_charged()
        return max(self._spent.opens_at_ms(budgets, patience_ms), self.unreachable_until_ms)

    def spent(self) -> dict[str, float]:
        """Return the ids of budgets that are known to be spent, each with its end."""
        return self._spent.by_id()

    def rooms(self, budgets: Budgets) -> list[LimitRoom]:
        """Return the last known remainders of these budgets' limits of requests and tokens."""
        now_ms = self._clock.monotonic_ms()
        found = [self._rooms[budget] for budget in budgets if budget in self._rooms]
        return [room.later(now_ms - known_ms) for known_ms, rooms in found for room in rooms]

    def _note_rooms(self, rooms: Sequence[LimitRoom], asked_ms: float) -> None:
        if len(self._rooms) >= TERMS_MAX:
            self._rooms.clear()
        by_budget: dict[Budget, list[LimitRoom]] = {}
        for room in rooms:
            by_budget.setdefault(room.budget, []).append(room)
        for budget, own in by_budget.items():
            self._rooms[budget] = (asked_ms, own)

    async def reserve_permit(
        self, terms: BindingLimits, tokens: int, *, is_bound: bool, cost: CostRange = FREE, give_up_ms: float = math.inf
    ) -> SendPermit:
        """Return the permit to send one call that may take `tokens`.

        Raise Withheld if there is none now.

        - With `is_bound` the call cannot take more, so one above the limit of a period is refused
          for good.
        - `cost` is the range of what the call can cost.
        - A wait is worth it only if a budget in money renews by `give_up_ms`.
        """
        if self._limits is None or self._closed:
            raise self._unreachable("nothing keeps the shared budgets here: check the store's settings")
        self._refuse_what_is_known(terms.budgets)
        if not terms.counts_tokens:
            tokens = 0
        elif tokens > terms.tokens_max:
            if is_bound:
                raise Refused(
                    f"this request may take {in_words(tokens, 'token')}, and its limits allow {terms.tokens_max} in one period: "
                    "lower its max_tokens or raise the limit",
                    status=400,
                    code=EXCEEDS_LIMIT,
                )
            tokens = terms.tokens_max
        if terms.poorest is not None:
            if cost.likely > terms.nano_max:
                raise overspent(terms.poorest, cost.likely, terms.nano_max, is_all=True)
            cost = CostRange(cost.likely, min(cost.most, terms.nano_max))
        waiter = _Waiter(asyncio.get_running_loop().create_future(), tokens, cost, give_up_ms)
        self._waiting.setdefault(terms.budgets, []).append(waiter)
        if self._asking is None:
            self._asking = asyncio.create_task(self._ask_while_any_waits())
        try:
            return await waiter.answer
        except asyncio.CancelledError:
            if waiter.answer.done() and not waiter.answer.cancelled() and waiter.answer.exception() is None:
                self.release_permit(waiter.answer.result())
            raise

    def charge(self, budget: Budget, requests: int, tokens: int, until_ms: float) -> None:
        """Debit what was spent of this budget before any process knew of the budget.

        The charge counts until this moment, and is asked for before any permit.
        """
        if self._limits is None or self._closed or not (requests or tokens):
            return
        # Tokens are granted along with requests: some that took tokens took a request too.
        self._charges.append((BudgetRequest((budget,), max(1, requests), tokens), until_ms))
        if self._asking is None:
            self._asking = asyncio.create_task(self._ask_while_any_waits())

    def _renew_charged(self) -> None:
        """Give back the charges whose time is over, because the upstream's window began again."""
        now_ms = self._clock.monotonic_ms()
        for one in [one for one in self._charged if one[1] <= now_ms]:
            self._charged.remove(one)
            (budget,), grant = one[0].budgets, one[2]
            self._spent.renew(budget)
            self._settlements.add(Settlement(grant.id, (budget,), grant.requests, grant.tokens, 0))

    def release_permit(self, permit: SendPermit) -> None:
        """Give back a permit of a call that was not sent."""
        self._settlements.add(Settlement(permit.grant_id, permit.budgets, 1, permit.tokens, 0, permit.nano))

    def used(self, permit: SendPermit, tokens: int, nano: int | None = None) -> None:
        """Settle a permit with the tokens and the money that its call really took.

        Without a figure for the money, all that was set aside counts.
        """
        if permit.nano or nano or (permit.tokens != tokens and self.terms(permit.budgets).counts_tokens):
            used_nano = permit.nano if nano is None else nano
            self._settlements.add(
                Settlement(permit.grant_id, permit.budgets, 0, permit.tokens, tokens, permit.nano, used_nano)
            )

    async def close(self) -> None:
        """Refuse waiting calls, and settle the known figures."""
        self._closed = True
        self._put_off_all(self._unreachable("this process stops"))
        if self._asking is not None:
            await asyncio.wait({self._asking}, timeout=ANSWER_S_MAX)
        await self._settlements.close(ANSWER_S_MAX)

    # The question.

    async def _ask_while_any_waits(self) -> None:
        try:
            while self._waiting or self._charges:
                if self._charges:
                    await self._charge(*self._charges.pop(0))
                await self._ask()
        finally:
            self._asking = None

    async def _charge(self, ask: BudgetRequest, until_ms: float) -> None:
        assert self._limits is not None
        try:
            (grant,) = await self._limits.debit([ask])
        except LimitsUnavailable as error:
            # The quota that the upstream reported still binds this process.
            log.warning("limits_unavailable", why=str(error))
        else:
            self._charged.append((ask, until_ms, grant))

    async def _ask(self) -> None:
        now_ms = self._clock.monotonic_ms()
        parts = [(budgets, self._next_part(budgets, now_ms)) for budgets in list(self._waiting)]
        parts = [(budgets, part) for budgets, part in parts if part]
        asks = [
            BudgetRequest(
                budgets, len(part), sum(waiter.tokens for waiter in part), sum(waiter.nano for waiter in part)
            )
            for budgets, part in parts
        ]
        if not asks:
            return
        assert self._limits is not None
        question = asyncio.ensure_future(self._limits.debit(asks))
        done, _ = await asyncio.wait({question}, timeout=ANSWER_S_MAX)
        late = not done
        if late:
            self._lose_touch("the shared budgets did not answer in time", parts)
        try:
            grants = await question
        except LimitsUnavailable as error:
            if not late:
                self._lose_touch(str(error), parts)
            return
        except Exception as error:
            # It is unknown what may be sent now, and calls must not wait for ever.
            log.error("limits_crashed", kind=type(error).__name__)
            self._lose_touch("asking the shared budgets failed", parts)
            return
        self.unreachable_until_ms = 0.0
        for (budgets, part), grant in zip(parts, grants, strict=True):
            self._deal(budgets, part, grant, now_ms)

    def _next_part(self, budgets: Budgets, now_ms: float) -> list[_Waiter]:
        """Return the waiters under these budgets to ask for now.

        The others come with the next question.
        """
        waiting = [waiter for waiter in self._waiting.pop(budgets) if not waiter.answer.done()]
        spent = self._spent.first(budgets, now_ms)
        if spent is not None:
            # The answer to another question has shown since that the budget is spent.
            for waiter in waiting:
                waiter.answer.set_exception(_spent(spent[0].id, spent[1]))
            return []
        count = CONTENDED_ASK_MAX if self._spent.are_contended(budgets, now_ms) else ASK_MAX
        if budgets in self._one_by_one:
            # The last grant was too small for any waiter. A question for one waiter gets all that
            # it needs or no tokens.
            self._one_by_one.discard(budgets)
            count = 1
        if len(waiting) > count:
            # The rest goes to the end: waiters under other budgets come first.
            self._waiting[budgets] = waiting[count:]
        return waiting[:count]

    def _deal(self, budgets: Budgets, part: Sequence[_Waiter], grant: Grant, asked_ms: float) -> None:
        dies_ms = asked_ms + grant.lasts_ms
        if grant.rooms:
            self._note_rooms(grant.rooms, asked_ms)
        for budget in budgets:
            metrics.limits_granted_requests.of(budget.bound).inc(grant.requests)
            metrics.limits_granted_tokens.of(budget.bound).inc(grant.tokens)
        requests, tokens, nano = grant.requests, grant.tokens, grant.nano
        counts_tokens = self.terms(budgets).counts_tokens
        left: list[_Waiter] = []
        for waiter in part:
            if waiter.answer.done():
                continue
            if requests and (not counts_tokens or waiter.tokens <= tokens) and waiter.nano <= nano:
                requests -= 1
                tokens -= waiter.tokens
                nano -= waiter.nano
                waiter.answer.set_result(
                    SendPermit(self._clock, budgets, grant.id, waiter.tokens, dies_ms, waiter.nano)
                )
            else:
                left.append(waiter)
        if requests or (counts_tokens and tokens > 0) or nano > 0:
            self._settlements.add(Settlement(grant.id, budgets, requests, max(tokens, 0), 0, max(nano, 0)))
        is_lowered = False
        if grant.tightest and left:
            left = self._without_the_poor(budgets, grant, left)
            is_lowered = self._lower(left, grant.left_nano)
        if not left:
            return
        if is_lowered:
            # A lowered waiter may fit into the rest of the budget if it is asked for alone.
            self._one_by_one.add(budgets)
            self._waiting[budgets] = left + self._waiting.get(budgets, [])
            return
        if grant.requests and not grant.wait_ms:
            if len(left) == len(part):
                self._one_by_one.add(budgets)
            self._waiting[budgets] = left + self._waiting.get(budgets, [])
            return
        lacking = next((budget for budget in budgets if budget.in_money and budget.id == grant.spent), None)
        if lacking is None and not 0 < grant.left_tokens < max(waiter.tokens for waiter in left):
            self._say_spent(budgets, grant, left)
        elif len(part) > 1:
            # The question treated all as of the same size: asked for alone, some of them may fit.
            self._one_by_one.add(budgets)
            self._waiting[budgets] = left + self._waiting.get(budgets, [])
        elif lacking is None:
            self._say_too_large(budgets, grant, left[0])
        else:
            self._say_reserved(budgets, lacking, left[0])

    def _without_the_poor(self, budgets: Budgets, grant: Grant, left: Sequence[_Waiter]) -> list[_Waiter]:
        """Refuse the waiters that would exceed a money budget even if calls in flight were free.

        Return the other waiters.
        """
        now_ms = self._clock.monotonic_ms()
        tightest = next(budget for budget in budgets if budget.id == grant.tightest)
        others = []
        for waiter in left:
            if waiter.nano_likely <= grant.left_nano:
                others.append(waiter)
            elif now_ms + grant.renews_ms > waiter.give_up_ms:
                waiter.answer.set_exception(overspent(tightest, waiter.nano_likely, grant.left_nano))
            else:
                until_ms = now_ms + min(max(grant.renews_ms, SPENT_MS_MIN), SPENT_MS_MAX)
                waiter.answer.set_exception(_spent(tightest.id, until_ms))
        metrics.limits_spent.of(tightest.bound).inc(len(left) - len(others))
        return others

    @staticmethod
    def _lower(waiters: Sequence[_Waiter], left_nano: int) -> bool:
        """Lower waiters that may cost more than is left to all that is left.

        Return whether there are any.
        """
        dear = [waiter for waiter in waiters if waiter.nano > left_nano]
        for waiter in dear:
            waiter.nano = left_nano
        return bool(dear)

    def _say_reserved(self, budgets: Budgets, lacking: Budget, first: _Waiter) -> None:
        """Refuse all waiters that need at least as much money; calls in flight reserve it."""
        until_ms = self._clock.monotonic_ms() + RESERVED_MS
        for waiter in [first, *self._remove_waiting(budgets, lambda waiter: waiter.nano >= first.nano)]:
            if not waiter.answer.done():
                waiter.answer.set_exception(
                    Withheld(
                        f"the rest of the budget of {lacking.id} is set aside for calls in flight",
                        until_ms=until_ms,
                        spent=lacking.id,
                        code="budget_reserved",
                    )
                )

    def _say_too_large(self, budgets: Budgets, grant: Grant, first: _Waiter) -> None:
        """Refuse all waiters that need at least as many tokens; smaller ones may still go."""
        until_ms = self._clock.monotonic_ms() + _spent_for_ms(grant)
        for waiter in [first, *self._remove_waiting(budgets, lambda waiter: waiter.tokens >= first.tokens)]:
            if not waiter.answer.done():
                waiter.answer.set_exception(_spent(grant.spent, until_ms))

    def _remove_waiting(self, budgets: Budgets, is_meant: Callable[[_Waiter], bool]) -> list[_Waiter]:
        """Remove and return the waiters that are meant; the others go on waiting."""
        waiting = self._waiting.pop(budgets, [])
        others = [waiter for waiter in waiting if not is_meant(waiter)]
        if others:
            self._waiting[budgets] = others
        return [waiter for waiter in waiting if is_meant(waiter)]

    def _say_spent(self, budgets: Budgets, grant: Grant, left: Sequence[_Waiter]) -> None:
        now_ms = self._clock.monotonic_ms()
        until_ms = now_ms + _spent_for_ms(grant)
        named = [budget for budget in budgets if grant.spent == budget.id] or list(budgets)
        metrics.limits_spent.of(named[0].bound).inc()
        metrics.budget_wait_seconds.observe((until_ms - now_ms) / 1000)
        for budget in named:
            self._spent.note(budget, until_ms)
        # Calls that came meanwhile would get the same answer.
        for waiter in [*left, *self._waiting.pop(budgets, [])]:
            if not waiter.answer.done():
                waiter.answer.set_exception(_spent(named[0].id, until_ms))

    def _refuse_what_is_known(self, budgets: Budgets) -> None:
        if not self._spent and not self.unreachable_until_ms:
            return
        now_ms = self._clock.monotonic_ms()
        if self.unreachable_until_ms > now_ms:
            raise self._unreachable("the shared budgets could not be asked a moment ago")
        spent = self._spent.first(budgets, now_ms)
        if spent is not None:
            raise _spent(spent[0].id, spent[1])

    def _lose_touch(self, why: str, parts: Sequence[tuple[Budgets, Sequence[_Waiter]]]) -> None:
        self.unreachable_until_ms = self._clock.monotonic_ms() + UNREACHABLE_MS
        metrics.limits_unavailable.inc()
        log.warning("limits_unavailable", why=why)
        for _, part in parts:
            for waiter in part:
                if not waiter.answer.done():
                    waiter.answer.set_exception(self._unreachable(why))
        self._put_off_all(self._unreachable(why))

    def _put_off_all(self, error: Withheld) -> None:
        waiting, self._waiting = self._waiting, {}
        for part in waiting.values():
            for waiter in part:
                if not waiter.answer.done():
                    waiter.answer.set_exception(error)

    def _unreachable(self, why: str) -> Withheld:
        until_ms = max(self.unreachable_until_ms, self._clock.monotonic_ms() + UNREACHABLE_MS)
        message = f"nothing is sent while it is unknown what the shared budgets allow: {why}"
        return Withheld(message, until_ms=until_ms, code="limits_unavailable")


def _spent_for_ms(grant: Grant) -> int:
    return min(max(grant.wait_ms, SPENT_MS_MIN), SPENT_MS_MAX)


def _terms(budgets: Budgets) -> BindingLimits:
    binding = tuple(
        budget
        for budget in budgets
        if any(
            limit.enabled and (limit.requests, limit.tokens, limit.nano) != (None, None, None)
            for limit in budget.limits
        )
    )
    limits = [(limit, budget) for budget in binding for limit in budget.limits if limit.enabled]
    tokens = [limit.tokens for limit, _ in limits if limit.tokens is not None]
    money = [(limit.nano, budget) for limit, budget in limits if limit.nano is not None]
    nano_max, poorest = min(money, key=lambda one: one[0], default=(0, None))
    return BindingLimits(binding, bool(tokens), min(tokens, default=0), bool(money), nano_max, poorest)


def overspent(budget: Budget, nano: int, left_nano: int, *, is_all: bool = False) -> Overspent:
    """Return the error of a call that costs more than a budget has left.

    With `is_all`, `left_nano` is the whole budget.
    """
    whose = PAYERS.get(budget.bound, budget.bound.value)
    if left_nano <= 0:
        message = f"the budget of this {whose} is spent: have it raised, or wait until it renews"
    else:
        has = f"is {units_text(left_nano)} in all" if is_all else f"has {units_text(left_nano)} left"
        message = (
            f"this may cost {units_text(nano)}, and the budget of this {whose} {has}: "
            "shorten the input, lower max_tokens where the request has it, or have the budget raised"
        )
    return Overspent(message, code=DenialCode.BUDGET_EXCEEDED)


def _spent(name: str, until_ms: float) -> Withheld:
    return Withheld(f"the budget of {name} is spent for now", until_ms=until_ms, spent=name, code="budget_spent")
