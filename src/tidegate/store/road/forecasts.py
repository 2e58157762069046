"""Verbs about a job that is not there yet: what it would stand behind, and whether its Idempotency-Key made one before."""

from collections.abc import Sequence

from tidegate.core.budgets.ahead import CallsAhead, calls_take_ms
from tidegate.core.budgets.budget import Budget
from tidegate.core.schedule.outlooks import Minute, ModelOutlook
from tidegate.store.database.driver import Tx
from tidegate.store.database.table import IDEMPOTENCY_KEEP_MS, Table, reads
from tidegate.store.road.snapshots import OUTLOOK_JOBS_MAX, RATE_MINUTES, other_flows
from tidegate.store.tenants.budgets import few_at_a_time


class Forecasts(Table):
    @reads
    async def forecast(self, tx: Tx, model: str, share_owner: str, units: int, servers: str = "") -> ModelOutlook:
        """What would stand before so many work units of this share owner on this model, if they came now. With a name of model servers
        the rates are those that were measured there."""
        [(flow_count, weights_milli)] = await tx.all("flows_weight", model=model)
        [(weight_milli, is_awake, ahead_units)] = await tx.all(
            "forecast_flow", model=model, share_owner=share_owner, jobs_max=OUTLOOK_JOBS_MAX
        )
        if not is_awake:
            flow_count, weights_milli = flow_count + 1, weights_milli + weight_milli
        recent = await tx.all("rates_recent", model=model, minutes=RATE_MINUTES, servers=servers)
        minutes = tuple(Minute(*row) for row in recent)
        others = await other_flows(tx, model, share_owner, flow_count, weights_milli - weight_milli)
        weight, weights = weight_milli / 1000, weights_milli / 1000
        return ModelOutlook(model, units, units, 0, ahead_units, weight, weights, flow_count, minutes, others)

    @reads
    async def workers_alive(self, tx: Tx) -> int:
        """How many processes are alive, one at the least."""
        [(count,)] = await tx.all("workers_alive")
        return max(1, int(count))

    @reads
    async def calls_take_ms(self, tx: Tx, ways: Sequence[tuple[Budget, ...]], calls: CallsAhead) -> int | None:
        """Return how long until so many calls may all be sent over these ways, if no others are sent; None when they never may."""
        [(now,)] = await tx.all("now")
        packed: dict[str, bytes] = {}
        for ids in few_at_a_time({budget.id for way in ways for budget in way}):
            packed |= {id: bytes(ledger) for id, ledger in await tx.all("budgets_look", **ids)}
        return calls_take_ms(ways, packed, int(now), calls)

    @reads
    async def was_made(self, tx: Tx, tenant_id: str, route: str, key: str) -> bool:
        """Whether this Idempotency-Key stands for something already."""
        found = await tx.one("idempotency_get", tenant_id=tenant_id, route=route, key=key, keep_ms=IDEMPOTENCY_KEEP_MS)
        return found is not None
