"""How long it takes until a number of calls may be sent under limits, from what is counted of each
limit now.

The ledgers are played forward: grants are taken as soon as they fit, as if no other call asked.
Limits in tokens count only where it was measured what such calls use. Limits in money are left out.
Pure.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from tidegate.core.budgets.budget import NEVER_MS, Budget, BudgetKind, BudgetRequest
from tidegate.core.budgets.deal import deal
from tidegate.core.budgets.ledger import Ledger

# After so many grants the remaining calls are taken to go at the average pace so far.
_GRANTS_MAX = 120


class CallsAhead(NamedTuple):
    """Calls still to be sent, and the average tokens of such calls; 0 when that is unknown."""

    left: int
    tokens_each: int = 0


def calls_take_ms(
    ways: Sequence[Sequence[Budget]], packed: Mapping[str, bytes], now: int, calls: CallsAhead
) -> int | None:
    """Return how long until all of these calls may be sent; None when they never may.

    `packed` holds the ledgers by the id of their budget. When a way has no limit, no call waits.
    """
    count, tokens_each = calls
    limited = [_foreseen(way, has_tokens=tokens_each > 0) for way in ways]
    if count <= 0 or not limited or not all(limited):
        return 0
    ledgers = {budget.id: Ledger.unpack(packed.get(budget.id, b"")) for way in limited for budget in way}
    at, left = now, count
    for _ in range(_GRANTS_MAX):
        waits = []
        for way in limited:
            grant = deal([BudgetRequest(way, left, left * tokens_each)], ledgers, at)[0]
            left -= grant.requests
            if not left:
                return at - now
            waits.append(grant.wait_ms)
        if min(waits) >= NEVER_MS:
            return None
        at += max(1, min(waits))
    return (at - now) * count // max(1, count - left)


def _foreseen(way: Sequence[Budget], *, has_tokens: bool) -> tuple[Budget, ...]:
    """Return the budgets of a way that limit requests or, with `has_tokens`, tokens; each with
    those limits alone.
    """
    found = []
    for budget in way:
        limits = tuple(
            limit if has_tokens else replace(limit, tokens=None)
            for limit in budget.limits
            if limit.enabled
            and budget.kind is BudgetKind.CALLS
            and (limit.requests is not None or (has_tokens and limit.tokens is not None))
        )
        if limits:
            found.append(replace(budget, limits=limits))
    return tuple(found)
