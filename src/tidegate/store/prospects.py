"""Verbs about a job that is not there yet: what it would stand behind, and whether its Idempotency-Key made one before."""

from tidegate.core.nouns import Minute, ModelOutlook
from tidegate.store.driver import Tx
from tidegate.store.snapshots import OUTLOOK_JOBS_MAX, RATE_MINUTES
from tidegate.store.table import IDEMPOTENCY_KEEP_MS, Table


class Prospects(Table):
    async def prospect(self, model: str, scope: str, units: int) -> ModelOutlook:
        """What would stand before so many work units of this scope on this model, if they came now."""

        async def body(tx: Tx) -> ModelOutlook:
            shared = await tx.one("flows_weight", model=model)
            flow_count, weights_milli = (shared[0], shared[1]) if shared else (0, 0)
            row = await tx.one("prospect_flow", model=model, scope=scope, jobs_max=OUTLOOK_JOBS_MAX)
            weight_milli, is_awake, ahead_units = row if row else (1000, 0, 0)
            if not is_awake:
                flow_count, weights_milli = flow_count + 1, weights_milli + weight_milli
            recent = await tx.all("rates_recent", model=model, minutes=RATE_MINUTES)
            minutes = tuple(Minute(*row) for row in recent)
            return ModelOutlook(
                model, units, units, 0, ahead_units, weight_milli / 1000, weights_milli / 1000, flow_count, minutes
            )

        return await self._driver.read(body)

    async def was_made(self, tenant_id: str, route: str, key: str) -> bool:
        """Whether this Idempotency-Key stands for something already."""

        async def body(tx: Tx) -> bool:
            found = await tx.one(
                "idempotency_get", tenant_id=tenant_id, route=route, key=key, keep_ms=IDEMPOTENCY_KEEP_MS
            )
            return found is not None

        return await self._driver.read(body)
