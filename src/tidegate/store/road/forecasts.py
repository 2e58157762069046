"""Verbs for estimates of a job's end, also of a job that does not exist yet."""

from collections.abc import Sequence

from tidegate.core.budgets.ahead import CallsAhead, calls_take_ms
from tidegate.core.budgets.budget import Budget
from tidegate.core.schedule.outlooks import Backlog, Minute, ModelOutlook, Outlook
from tidegate.store.database.driver import Row, Tx
from tidegate.store.database.table import IDEMPOTENCY_KEEP_MS, Table, reads
from tidegate.store.road.leases import RATE_MINUTES, rates_of
from tidegate.store.tenants.budgets import few_at_a_time

OUTLOOK_JOBS_MAX = 10_000
OUTLOOK_FLOWS_MAX = 64


class Forecasts(Table):
    @reads
    async def outlook(self, tx: Tx, job_id: str) -> Outlook | None:
        """Return the data for an estimate of a job's end; None if there is no such job."""
        rows = await tx.dicts("job_any", id=job_id)
        row = await tx.one("snapshot_now", search_max=0, worker_id="")
        if not rows or row is None:
            return None
        job = rows[0]
        parts = [
            await _model_outlook(tx, part)
            for part in await tx.all("outlook_job", job_id=job_id, jobs_max=OUTLOOK_JOBS_MAX)
        ]
        models = tuple(part for part in parts if part is not None)
        times = (job["created_at"], job["expires_at"], job["begin_by"], job["begun_at"])
        return Outlook(row[0], *times, row[1], models)

    @reads
    async def forecast(self, tx: Tx, model: str, share_owner: str, work: Backlog, servers: str = "") -> ModelOutlook:
        """Return the work that would come before new work of this share owner on this model.

        With a name of model servers, the rates are those that were measured there.
        """
        [(flow_count, weights_milli)] = await tx.all("flows_weight", model=model)
        [(weight_milli, is_awake, *ahead)] = await tx.all(
            "forecast_flow", model=model, share_owner=share_owner, jobs_max=OUTLOOK_JOBS_MAX
        )
        if not is_awake:
            flow_count, weights_milli = flow_count + 1, weights_milli + weight_milli
        recent = await tx.all("rates_recent", model=model, minutes=RATE_MINUTES, servers=servers)
        minutes = tuple(Minute(*row) for row in recent)
        others = await _other_flows(tx, model, share_owner, flow_count, weights_milli - weight_milli)
        weight, weights = weight_milli / 1000, weights_milli / 1000
        return ModelOutlook(model, work, work, 0, Backlog(*ahead), weight, weights, flow_count, minutes, others)

    @reads
    async def workers_alive(self, tx: Tx) -> int:
        """Return how many processes are alive, at least 1."""
        [(count,)] = await tx.all("workers_alive")
        return max(1, int(count))

    @reads
    async def calls_take_ms(self, tx: Tx, ways: Sequence[tuple[Budget, ...]], calls: CallsAhead) -> int | None:
        """Return how long until these calls may all be sent, if no others are.

        Return None if they never may. `ways` are the sets of budgets under which a call may be
        sent.
        """
        [(now,)] = await tx.all("now")
        packed: dict[str, bytes] = {}
        for ids in few_at_a_time({budget.id for way in ways for budget in way}):
            packed |= {id: bytes(ledger) for id, ledger in await tx.all("budgets_look", **ids)}
        return calls_take_ms(ways, packed, int(now), calls)

    @reads
    async def was_made(self, tx: Tx, tenant_id: str, route: str, key: str) -> bool:
        """Return whether this Idempotency-Key has made an object already."""
        found = await tx.one("idempotency_get", tenant_id=tenant_id, route=route, key=key, keep_ms=IDEMPOTENCY_KEEP_MS)
        return found is not None


async def _model_outlook(tx: Tx, row: Row) -> ModelOutlook | None:
    model, units, items, done, share_owner, state, weight_milli, ahead_units, ahead_items, in_flight_units = row
    if state != "open":
        return None
    [(flow_count, weights_milli)] = await tx.all("flows_weight", model=model)
    [(changed_at,)] = await tx.all("flows_changed", model=model, share_owner=share_owner)
    left_units = max(0, units - units * done // max(1, items))
    return ModelOutlook(
        model,
        Backlog(units, items),
        Backlog(left_units, max(0, items - done)),
        in_flight_units,
        Backlog(ahead_units, ahead_items),
        weight_milli / 1000,
        weights_milli / 1000,
        flow_count,
        await rates_of(tx, model),
        await _other_flows(tx, model, share_owner, flow_count, weights_milli - weight_milli),
        changed_at,
    )


async def _other_flows(
    tx: Tx, model: str, share_owner: str, flow_count: int, weights_milli: int
) -> tuple[tuple[float, Backlog | None], ...]:
    """Return the other flows of a model with their work.

    Flows beyond the bound count as one with enough work.
    """
    rows = await tx.all(
        "flows_backlog", model=model, share_owner=share_owner, jobs_max=OUTLOOK_JOBS_MAX, flows_max=OUTLOOK_FLOWS_MAX
    )
    seen: list[tuple[float, Backlog | None]] = [(row[0] / 1000, Backlog(row[1], row[2])) for row in rows]
    unseen_milli = weights_milli - sum(row[0] for row in rows)
    if flow_count > len(rows) + 1 and unseen_milli > 0:
        seen.append((unseen_milli / 1000, None))
    return tuple(seen)
