"""Verbs about flows: wake them for new work, let idle ones sleep, and set weights.

They are charged in `road/outcomes.py`.
"""

from tidegate.core.nouns import AwakeFlow
from tidegate.store.database.driver import Row, Tx
from tidegate.store.database.table import Table, reads, writes

RATES_KEEP_MINUTES = 60
_FIRST = ("", -1, "")


class StoredFlows(Table):
    @reads
    async def awake_flows(self, tx: Tx, after: AwakeFlow | None, count_max: int) -> list[AwakeFlow]:
        """Return a page of awake flows by model and service, after the last one seen."""
        model, served, share_owner = (after.model, after.served, after.share_owner) if after else _FIRST
        rows = await tx.all("flows_page", model=model, served=served, share_owner=share_owner, count_max=count_max)
        return [AwakeFlow(row[0], row[1], row[2], row[3], row[4], bool(row[5]), bool(row[6])) for row in rows]

    @writes
    async def close_spent(self, tx: Tx, model: str, share_owner: str) -> None:
        """Hide jobs of a flow that have no slice of its model left from the scheduler."""
        await tx.all("job_models_spent", model=model, share_owner=share_owner)

    @writes
    async def rest_flow(self, tx: Tx, model: str, share_owner: str) -> bool:
        """Put a flow to sleep that has nothing to do now; False if it is active.

        The row is locked before the work is looked for. A transaction that brings work waits for
        that lock, and then wakes the flow again.
        """
        locked = await tx.one("flow_hold", model=model, share_owner=share_owner)
        if locked is None:
            return False
        has_open, is_active = await _work(tx, model, share_owner)
        if is_active:
            return False
        wakes = await tx.one("flow_ready_at", model=model, share_owner=share_owner) if has_open else None
        await tx.all("flow_sleep", model=model, share_owner=share_owner, wakes_at=wakes[0] if wakes else None)
        await tx.all("clock_advance", model=model, clock=locked[0])
        return True

    async def wake_rested(self, count_max: int) -> int:
        """Wake the flows whose rest is over and return how many.

        They get no credit for their sleep.
        """
        rested = await self._rested_flows(count_max)
        for model, share_owner in rested:
            await self._wake_flow(model, share_owner)
        return len(rested)

    @reads
    async def _rested_flows(self, tx: Tx, count_max: int) -> list[Row]:
        return await tx.all("flows_rested", count_max=count_max)

    @writes
    async def _wake_flow(self, tx: Tx, model: str, share_owner: str) -> None:
        await _wake(tx, model, share_owner, None)

    @writes
    async def set_weight(self, tx: Tx, model: str, share_owner: str, weight_milli: int) -> None:
        """Set the weight of a flow, in thousandths. It counts from now on."""
        await tx.all("flow_weigh", model=model, share_owner=share_owner, weight_milli=weight_milli)

    @writes
    async def prune_flows(self, tx: Tx, keep_ms: int) -> None:
        """Forget flows that slept this long, and rates that are too old for estimates."""
        await tx.all("flows_forget", keep_ms=keep_ms)
        await tx.all("rates_forget", keep_minutes=RATES_KEEP_MINUTES)


async def wake_flows(tx: Tx, models: list[str], share_owner: str, tenant_id: str, weight_milli: int | None) -> None:
    """Wake a share owner's flows for new slices of these models, which come in order of name."""
    for model in models:
        await tx.all("flow_put", model=model, share_owner=share_owner, tenant_id=tenant_id)
        await _wake(tx, model, share_owner, weight_milli)


async def _wake(tx: Tx, model: str, share_owner: str, weight_milli: int | None) -> None:
    [(lift,)] = await tx.all("flow_lift", model=model)
    await tx.all("flow_wake", model=model, share_owner=share_owner, weight_milli=weight_milli, lift=lift)


async def _work(tx: Tx, model: str, share_owner: str) -> tuple[bool, bool]:
    """Return whether a flow has any work, and whether any is leased or could be leased now."""
    [(has_open, is_active)] = await tx.all("flow_work", model=model, share_owner=share_owner)
    return bool(has_open), bool(is_active)
