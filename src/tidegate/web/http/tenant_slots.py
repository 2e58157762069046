"""A bound on the requests of one kind that a tenant may have open in this process.

The kinds are uploads, dry runs, event streams and lookups.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tidegate.core.errors import ApiProblem
from tidegate.core.wording import in_words
from tidegate.wait_line import WaitLine

# An upload waits this long for a slot.
UPLOAD_WAIT_S = 5.0
# Long, because a dry run of a large input takes a while and its caller expects to wait.
DRY_RUN_WAIT_S = 300.0
# The requests of one tenant that may wait at once.
WAITING_MAX = 200


class TenantSlots:
    def __init__(self, count_max: int, code: str, message: str, retry_after_s: int, wait_s: float = 0.0) -> None:
        """Create the slots. A request without a slot waits at most `wait_s`, then gets this 429."""
        self._count_max = count_max
        self._code = code
        self._message = message
        self._retry_after_s = retry_after_s
        self._wait_s = wait_s
        self._taken: Counter[str] = Counter()
        self._lines: dict[str, WaitLine] = {}

    def are_taken(self, tenant_id: str) -> bool:
        return self._taken[tenant_id] >= self._count_max

    @asynccontextmanager
    async def taken(self, tenant_id: str) -> AsyncIterator[None]:
        """Hold one of a tenant's slots."""
        if self.are_taken(tenant_id):
            await self._wait(tenant_id)
        else:
            self._taken[tenant_id] += 1
        try:
            yield
        finally:
            self._give_back(tenant_id)

    async def _wait(self, tenant_id: str) -> None:
        """Wait until another request passes its slot on."""
        line = self._lines.setdefault(tenant_id, WaitLine())
        if not self._wait_s or len(line) >= WAITING_MAX:
            raise self._refusal()
        turn = line.join()
        try:
            async with asyncio.timeout(self._wait_s):
                await turn
        except BaseException as error:
            if line.give_up(turn):
                self._give_back(tenant_id)
            if isinstance(error, TimeoutError):
                raise self._refusal() from None
            raise

    def _refusal(self) -> ApiProblem:
        return ApiProblem(429, self._code, self._message, retry_after_s=self._retry_after_s)

    def _give_back(self, tenant_id: str) -> None:
        line = self._lines.get(tenant_id)
        if line is not None and line.call_first():
            return
        self._lines.pop(tenant_id, None)
        self._taken[tenant_id] -= 1
        if not self._taken[tenant_id]:
            del self._taken[tenant_id]


def upload_slots(count_max: int) -> TenantSlots:
    message = f"You have {in_words(count_max, 'upload')} under way. Wait until one of them is done."
    return TenantSlots(count_max, "too_many_uploads", message, 1, UPLOAD_WAIT_S)


def dry_run_slots() -> TenantSlots:
    message = "Other dry runs of your organization are under way. Wait until they are done."
    return TenantSlots(1, "too_many_dry_runs", message, 5, DRY_RUN_WAIT_S)


def lookup_slots(count_max: int) -> TenantSlots:
    message = f"You look up {in_words(count_max, 'request')} of batches at this moment. Wait for one of them."
    return TenantSlots(count_max, "too_many_lookups", message, 1)


def stream_slots(count_max: int) -> TenantSlots:
    message = f"You have {in_words(count_max, 'event stream')} open here. Close one of them, or ask for the batch now and then."
    return TenantSlots(count_max, "too_many_streams", message, 5)
