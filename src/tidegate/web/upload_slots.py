"""How many bodies one process receives from one tenant at once that are written out as they come."""

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tidegate.core.errors import ApiProblem


class UploadSlots:
    def __init__(self, count_max: int) -> None:
        self._count_max = count_max
        self._receiving: Counter[str] = Counter()

    @asynccontextmanager
    async def taken(self, tenant_id: str) -> AsyncIterator[None]:
        """Hold one of a tenant's slots; 429 when all are taken."""
        if self._receiving[tenant_id] >= self._count_max:
            raise ApiProblem(
                429,
                "too_many_uploads",
                f"You have {self._count_max} uploads under way. Wait until one of them is done.",
                retry_after_s=1,
            )
        self._receiving[tenant_id] += 1
        try:
            yield
        finally:
            self._receiving[tenant_id] -= 1
            if not self._receiving[tenant_id]:
                del self._receiving[tenant_id]
