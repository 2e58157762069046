"""How long it takes until a number of calls may be sent under limits, from what is counted of each
limit now.

The ledgers are played forward: grants are taken as soon as they fit, as if no other call asked.
Limits in tokens and in money are left out, because what calls will really use is not known. Pure.
"""

from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from tidegate.core.budgets.budget import NEVER_MS, Budget, BudgetKind, BudgetRequest
from tidegate.core.budgets.deal import deal
from tidegate.core.budgets.ledger import Ledger

# Behind so many grants the rest goes on at the rate so far.
_GRANTS_MAX = 120


def calls_take_ms(ways: Sequence[Sequence[Budget]], packed: Mapping[str, bytes], now: int, calls: int) -> int | None:
    """Return how long until so many calls may all be sent, None when they never may. `packed` are the ledgers by id; a way that nothing
    limits takes any number of calls at once."""
    limited = [_requests_only(way) for way in ways]
    if calls <= 0 or not limited or not all(limited):
        return 0
    ledgers = {budget.id: Ledger.unpack(packed.get(budget.id, b"")) for way in limited for budget in way}
    at, left = now, calls
    for _ in range(_GRANTS_MAX):
        waits = []
        for way in limited:
            grant = deal([BudgetRequest(way, left, 0)], ledgers, at)[0]
            left -= grant.requests
            if not left:
                return at - now
            waits.append(grant.wait_ms)
        if min(waits) >= NEVER_MS:
            return None
        at += max(1, min(waits))
    return (at - now) * calls // max(1, calls - left)


def _requests_only(way: Sequence[Budget]) -> tuple[Budget, ...]:
    """The budgets of a way that limit how many calls are sent, with those limits alone."""
    found = []
    for budget in way:
        limits = tuple(
            replace(limit, tokens=None)
            for limit in budget.limits
            if limit.enabled and limit.requests is not None and budget.kind is BudgetKind.CALLS
        )
        if limits:
            found.append(replace(budget, limits=limits))
    return tuple(found)
