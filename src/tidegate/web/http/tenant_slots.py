"""How many requests of one kind a tenant may have under way in this process: uploads, event streams, lookups."""

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tidegate.core.errors import ApiProblem


class TenantSlots:
    def __init__(self, count_max: int, code: str, message: str, retry_after_s: int) -> None:
        """One request too many is refused with this 429."""
        self._count_max = count_max
        self._code = code
        self._message = message
        self._retry_after_s = retry_after_s
        self._taken: Counter[str] = Counter()

    def are_taken(self, tenant_id: str) -> bool:
        return self._taken[tenant_id] >= self._count_max

    @asynccontextmanager
    async def taken(self, tenant_id: str) -> AsyncIterator[None]:
        """Hold one of a tenant's slots."""
        if self.are_taken(tenant_id):
            raise ApiProblem(429, self._code, self._message, retry_after_s=self._retry_after_s)
        self._taken[tenant_id] += 1
        try:
            yield
        finally:
            self._taken[tenant_id] -= 1
            if not self._taken[tenant_id]:
                del self._taken[tenant_id]


def upload_slots(count_max: int) -> TenantSlots:
    message = f"You have {count_max} uploads under way. Wait until one of them is done."
    return TenantSlots(count_max, "too_many_uploads", message, 1)


def lookup_slots(count_max: int) -> TenantSlots:
    message = f"You look up {count_max} requests of batches at this moment. Wait for one of them."
    return TenantSlots(count_max, "too_many_lookups", message, 1)


def stream_slots(count_max: int) -> TenantSlots:
    message = f"You have {count_max} event streams open here. Close one of them, or ask for the batch now and then."
    return TenantSlots(count_max, "too_many_streams", message, 5)
