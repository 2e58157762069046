"""The quota of created jobs and input bytes, counted in the transaction that creates a job.

All budgets of one creation belong to one tenant, whose row the caller has locked, so no other
creation counts in them meanwhile. A refused job counts nothing, and a replayed creation is not
counted twice.
"""

import math

from tidegate.core.budgets.budget import NEVER_MS, Budget, BudgetRequest, LimitBound
from tidegate.core.budgets.deal import deal
from tidegate.core.budgets.ledger import Ledger
from tidegate.core.errors import ApiProblem
from tidegate.store.database.driver import Tx
from tidegate.store.tenants.budgets import few_at_a_time

_WHOSE = {LimitBound.TENANT: "organization"}


async def count_creation(tx: Tx, budgets: tuple[Budget, ...], size_bytes: int) -> None:
    """Count one job with an input of this size. Refuse it if a limit is reached."""
    for budget in budgets:
        for limit in budget.limits:
            if limit.tokens is not None and size_bytes > limit.tokens:
                raise ApiProblem(
                    413,
                    "input_exceeds_quota",
                    f"This file has {size_bytes:,} bytes, and the {_whose(budget)} may submit {limit.tokens:,} bytes of input per "
                    f"{limit.period}. Split it, or have the limit raised.",
                    param="input_file_id",
                )
    await tx.many("budget_begin", [(one.id, one.bound.value, one.name, b"") for one in sorted(budgets, key=_id)])
    ledgers: dict[str, Ledger] = {}
    now = 0
    for ids in few_at_a_time(map(_id, budgets)):
        for id, packed, at in await tx.all("budgets_lock", **ids):
            ledgers[id] = Ledger.unpack(bytes(packed))
            now = max(now, at)
    [grant] = deal([BudgetRequest(budgets, 1, size_bytes)], ledgers, now)
    if not grant.requests:
        raise _reached(next(one for one in budgets if one.id == grant.spent), grant.wait_ms)
    await tx.many("budget_write", [(ledgers[id].pack(), ledgers[id].empty_at(), id) for id in sorted(ledgers)])


def _reached(budget: Budget, wait_ms: int) -> ApiProblem:
    allowed = ", ".join(
        f"{count:,} {what} per {limit.period}"
        for limit in budget.limits
        for count, what in ((limit.requests, "batches"), (limit.tokens, "bytes of input"))
        if count is not None
    )
    message = f"The {_whose(budget)} may create {allowed}, and that is reached."
    if wait_ms >= NEVER_MS:
        return ApiProblem(429, "quota_exceeded", f"{message} Have the limit raised.")
    wait_s = max(1, math.ceil(wait_ms / 1000))
    return ApiProblem(429, "quota_exceeded", f"{message} Wait as long as Retry-After says.", retry_after_s=wait_s)


def _whose(budget: Budget) -> str:
    return _WHOSE.get(budget.bound, budget.bound.value)


def _id(budget: Budget) -> str:
    return budget.id
