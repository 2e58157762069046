"""The present rest of each limit of a caller, read without taking anything and without a wait."""

from collections.abc import Iterable

import msgspec
from msgspec.structs import replace

from tidegate.core.budgets.budget import Budget, BudgetKind, BudgetRequest, Limit, LimitBound, with_limits
from tidegate.core.errors import StoreError
from tidegate.core.nouns import Caller
from tidegate.core.usage.prices import units_text
from tidegate.settings.tenants import TenantPolicy
from tidegate.store.store import Store
from tidegate.web.context import WebContext
from tidegate.web.http.rate_limits import Headers, limit_headers

# More than any limit allows.
_MANY = 1 << 50


class LimitSides(msgspec.Struct):
    """The amounts of a limit in requests, tokens and cost; null for a side that it does not
    limit."""

    requests: int | None
    tokens: int | None
    cost: str | None


class CallerLimit(msgspec.Struct):
    """One limit and what it has left. `bound` is the kind of thing that it binds."""

    bound: str
    period: str
    limit: LimitSides
    remaining: LimitSides


class LimitRooms:
    def __init__(self, context: WebContext) -> None:
        self._store: Store = context.store
        self._tenants = context.tenants()

    async def of_caller(self, caller: Caller, job_limits: tuple[Limit, ...] = ()) -> list[CallerLimit]:
        """Return what the limits of the caller's tenant, team, user and key, and those of a new
        job, have left.
        """
        return await self._rooms(self._budgets(await self._policy(caller), caller, job_limits))

    async def headers(self, caller: Caller, *, is_creation: bool = True) -> Headers:
        """Return headers with what the caller's limits have left of calls and, for a creation, of
        batches to create. If the store fails there are no such headers.
        """
        try:
            policy = await self._policy(caller)
            budgets = [one for one in self._budgets(policy, caller) if not one.in_money]
            if is_creation:
                budgets += policy.creation_budgets(
                    caller.tenant_id, caller.team, caller.user, caller.key_id, caller.limits
                )
            return limit_headers(await self._store.budget_rooms(budgets) if budgets else ())
        except StoreError:
            return []

    async def _policy(self, caller: Caller) -> TenantPolicy:
        name = await self._store.tenant_name(caller.tenant_id) if self._tenants.names() else None
        return self._tenants.of(name or "")

    def _budgets(self, policy: TenantPolicy, caller: Caller, job_limits: tuple[Limit, ...] = ()) -> tuple[Budget, ...]:
        own = policy.budgets(caller.tenant_id, caller.user, caller.key_id, "new", job_limits, caller.team)
        return with_limits(own, LimitBound.KEY, caller.key_id, caller.limits) if caller.key_id else own

    async def _rooms(self, budgets: Iterable[Budget]) -> list[CallerLimit]:
        single = [(budget, limit) for budget in budgets for limit in budget.limits if limit.enabled]
        asks = [_ask(budget, limit, side) for budget, limit in single for side in ("requests", "tokens")]
        grants = iter(await self._store.look_at_budgets(asks))
        found: dict[tuple[str, str], CallerLimit] = {}
        for budget, limit in single:
            requests, tokens = next(grants), next(grants)
            room = found.setdefault(
                (budget.bound, limit.period),
                CallerLimit(budget.bound, limit.period, LimitSides(None, None, None), LimitSides(None, None, None)),
            )
            if budget.kind is BudgetKind.MONEY and limit.nano is not None:
                left = min(limit.nano, requests.left_nano)
                room.limit.cost, room.remaining.cost = units_text(limit.nano), units_text(left)
            if limit.requests is not None:
                room.limit.requests, room.remaining.requests = limit.requests, requests.requests
            if limit.tokens is not None:
                room.limit.tokens, room.remaining.tokens = limit.tokens, tokens.requests
        return list(found.values())


def _ask(budget: Budget, limit: Limit, side: str) -> BudgetRequest:
    """Return a request for more of one side of a limit than it has: what is granted is what is
    left.
    """
    if budget.kind is BudgetKind.MONEY:
        return BudgetRequest((replace(budget, limits=(limit,)),), 1, 0, nano=_MANY)
    alone = replace(limit, tokens=None) if side == "requests" else replace(limit, requests=None)
    return BudgetRequest((replace(budget, limits=(alone,)),), _MANY, _MANY if side == "tokens" else 0)
