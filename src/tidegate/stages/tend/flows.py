"""Upkeep of flows: idle ones go to sleep, rested ones wake, and weights follow the settings.

Each pass looks at a bounded number of awake flows and goes on where the last one stopped. Every
process may run it: the store decides under a lock of the flow's row.
"""

import structlog

from tidegate.core.nouns import AwakeFlow
from tidegate.core.policies import Policies
from tidegate.store.store import Store

log = structlog.get_logger()

_PASS_MAX = 500
_FLOW_KEEP_MS = 7 * 24 * 3600 * 1000


class FlowUpkeep:
    def __init__(self, store: Store, policies: Policies, pass_max: int = _PASS_MAX) -> None:
        self._store = store
        self._policies = policies
        self._pass_max = pass_max
        self._after: AwakeFlow | None = None

    async def tend(self) -> int:
        """Run one bounded pass. Return how many flows woke, so that leasing looks again."""
        woken = await self._store.wake_rested(self._pass_max)
        page = await self._store.awake_flows(self._after, self._pass_max)
        for flow in page:
            await self._tend_one(flow)
        self._after = page[-1] if len(page) == self._pass_max else None
        return woken

    async def prune(self) -> None:
        """Forget flows that are not needed any more. This may run seldom."""
        await self._store.prune_flows(_FLOW_KEEP_MS)

    async def _tend_one(self, flow: AwakeFlow) -> None:
        weight_milli = max(1, round(1000 * self._policies.weight(flow.tenant)))
        if weight_milli != flow.weight_milli:
            log.info("flow_weight_changed", model=flow.model, share_owner=flow.share_owner, weight_milli=weight_milli)
            await self._store.set_weight(flow.model, flow.share_owner, weight_milli)
        if flow.has_spent:
            await self._store.close_spent(flow.model, flow.share_owner)
        if flow.has_spent or not flow.is_active:
            await self._store.rest_flow(flow.model, flow.share_owner)
