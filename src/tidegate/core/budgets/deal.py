"""Deal grants to requests for budget, in order.

A request takes from all of its budgets or from none.

A request waits behind earlier ones for the same budget: otherwise a large one would never fit among
many small ones. That holds within one deal; a request that will never fit, or not before the next
day, week or month, blocks no other. Pure, but it changes the ledgers that it is given.
"""

from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from tidegate.core.budgets.budget import (
    GRANT_MS,
    NEVER_MS,
    TOKENS_MAX,
    Budget,
    BudgetKind,
    BudgetRequest,
    Grant,
    Limit,
    LimitRoom,
    Settlement,
)
from tidegate.core.budgets.ledger import Ledger
from tidegate.core.budgets.money import MoneyLedger


def deal(asks: Sequence[BudgetRequest], ledgers: Mapping[str, Ledger], now: int) -> list[Grant]:
    """Return one grant per ask, in order.

    `ledgers` holds the ledger of every named budget by its id.
    """
    waited_for: dict[str, int] = {}
    return [_grant(ask, ledgers, now, waited_for) for ask in asks]


def check(ask: BudgetRequest) -> None:
    """Raise ValueError for a request with impossible numbers."""
    if ask.requests < 1 or not 0 <= ask.tokens <= TOKENS_MAX or not 0 <= ask.nano <= TOKENS_MAX:
        raise ValueError(
            f"an ask for {ask.requests} requests with {ask.tokens} tokens and {ask.nano} of money cannot be meant"
        )


def _grant(ask: BudgetRequest, ledgers: Mapping[str, Ledger], now: int, waited_for: dict[str, int]) -> Grant:
    check(ask)
    each = (-(-ask.tokens // ask.requests), -(-ask.nano // ask.requests))
    bounds = [(budget, limit) for budget in ask.budgets for limit in budget.limits if limit.enabled]
    count = ask.requests
    if any(budget.id in waited_for for budget, _ in bounds):
        count = 0
    for budget, limit in bounds:
        if count:
            count = ledgers[budget.id].fits(limit, now, count, each[budget.in_money])
    is_whole = count == ask.requests
    sums = (ask.tokens, ask.nano) if is_whole else (count * each[0], count * each[1])
    if count:
        for budget, limit in bounds:
            ledgers[budget.id].reserve(limit, now, count, sums[budget.in_money])
    rooms = tuple(
        ledgers[budget.id].room(budget, limit, now) for budget, limit in bounds if budget.kind is BudgetKind.CALLS
    )
    grant = Grant(str(now), count, sums[0], GRANT_MS, nano=sums[1], rooms=rooms)
    if is_whole:
        return grant
    wait_ms, spent = _wait(bounds, ledgers, now, each, waited_for)
    grant = replace(grant, wait_ms=wait_ms, spent=spent, left_tokens=_left_tokens(rooms, spent, each[0]))
    money = [
        (ledger.left(limit, now), limit, budget.id, ledger)
        for budget, limit in bounds
        if isinstance(ledger := ledgers[budget.id], MoneyLedger)
    ]
    if not money:
        return grant
    left, limit, id, ledger = min(money, key=lambda one: one[0])
    renews_ms = ledger.renews(limit, now, min(left + 1, limit.nano or 0))
    return replace(grant, left_nano=left, renews_ms=renews_ms, tightest=id)


def _wait(
    bounds: Sequence[tuple[Budget, Limit]],
    ledgers: Mapping[str, Ledger],
    now: int,
    each: tuple[int, int],
    waited_for: dict[str, int],
) -> tuple[int, str]:
    # Asking again is worth it after the longest wait of all limits, and after earlier requests for
    # the same budgets.
    waits = [
        (
            max(ledgers[budget.id].wait(limit, now, each[budget.in_money]), waited_for.get(budget.id, 0)),
            budget.id,
        )
        for budget, limit in bounds
    ]
    wait_ms, spent = max(waits, key=lambda one: one[0])
    longest = next(bound for bound, wait in zip(bounds, waits, strict=True) if wait[0] == wait_ms)
    if wait_ms < NEVER_MS and _frees_with_time(*longest):
        for own_ms, id in waits:
            if own_ms:
                waited_for[id] = max(own_ms, waited_for.get(id, 0))
    return wait_ms, spent


def _frees_with_time(budget: Budget, limit: Limit) -> bool:
    """Return whether room comes back bit by bit, so that smaller requests could take it from a
    larger one for ever.
    """
    return budget.in_money or limit.period.slides


def _left_tokens(rooms: Sequence[LimitRoom], spent: str, each: int) -> int:
    """Return the most tokens that a smaller request would still be granted by the budget that
    refused.

    A day, a week, a month or a lifetime gets nothing back before it ends, so there smaller requests
    take nothing from a larger one that waits. In a sliding period they would.
    """
    lasting = [room for room in rooms if room.budget.id == spent and not room.period.slides]
    if any(room.requests is not None and room.requests.left <= 0 for room in lasting):
        return 0
    left = min((room.tokens.left for room in lasting if room.tokens is not None), default=0)
    return left if left < each else 0


def settle(settlements: Sequence[Settlement], ledgers: Mapping[str, Ledger], now: int) -> None:
    """Enter the settlements of grants.

    For an unknown grant only use beyond the reserve counts, as a debt.
    """
    for one in settlements:
        granted_at = int(one.grant_id) if one.grant_id.isdecimal() and len(one.grant_id) < 16 else 0
        unsent, reserved = max(0, one.unsent_requests), max(0, one.reserved_tokens)
        used = min(max(0, one.used_tokens), TOKENS_MAX)
        money = (max(0, one.reserved_nano), min(max(0, one.used_nano), TOKENS_MAX))
        for budget in one.budgets:
            amounts = money if budget.in_money else (reserved, used)
            for limit in budget.limits:
                if limit.enabled:
                    ledgers[budget.id].settle_usage(limit, now, granted_at, unsent, *amounts)
