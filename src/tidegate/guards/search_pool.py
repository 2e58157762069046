"""Searches through long bodies in threads, a few at a time and fairly between tenants.

RE2 lets other threads run while it searches, so the event loop goes on meanwhile. A search cannot
be stopped, but its time is linear in the length of its text. Tenants take turns, and a tenant may
not have all threads, so that its long texts do not delay the others.
"""

import asyncio
import concurrent.futures
from collections import OrderedDict
from collections.abc import Callable
from typing import TypeVar

from tidegate.wait_line import WaitLine

THREADS_MAX = 4
THREADS_PER_TENANT_MAX = 2

T = TypeVar("T")


class SearchPool:
    def __init__(self) -> None:
        self._threads = concurrent.futures.ThreadPoolExecutor(THREADS_MAX, "guardrail search")
        self._busy = 0
        self._busy_by_tenant: dict[str, int] = {}
        # Tenants in the order of their turns, each with the line of its searches.
        self._lines: OrderedDict[str, WaitLine] = OrderedDict()

    async def run(self, tenant: str, search: Callable[[bytes], T], body: bytes) -> T:
        """Wait for the tenant's turn, search this body and return what the search found."""
        await self._wait_for_turn(tenant)
        work = self._threads.submit(search, body)
        loop = asyncio.get_running_loop()
        # The thread stays busy until the search ends, even if its caller was cancelled.
        work.add_done_callback(lambda _: loop.call_soon_threadsafe(self._release, tenant))
        return await asyncio.wrap_future(work)

    def close(self) -> None:
        """Begin no more searches. A search under way ends by itself."""
        self._threads.shutdown(wait=False)

    async def _wait_for_turn(self, tenant: str) -> None:
        line = self._lines.setdefault(tenant, WaitLine())
        turn = line.join()
        self._give_turns()
        try:
            await turn
        except asyncio.CancelledError:
            if line.give_up(turn):
                self._release(tenant)
            raise

    def _give_turns(self) -> None:
        while self._busy < THREADS_MAX:
            tenant = next((one for one in self._lines if self._may_begin(one)), None)
            if tenant is None:
                return
            line = self._lines[tenant]
            if line.call_first():
                self._busy += 1
                self._busy_by_tenant[tenant] = self._busy_by_tenant.get(tenant, 0) + 1
            if line:
                self._lines.move_to_end(tenant)
            else:
                del self._lines[tenant]

    def _may_begin(self, tenant: str) -> bool:
        return self._busy_by_tenant.get(tenant, 0) < THREADS_PER_TENANT_MAX

    def _release(self, tenant: str) -> None:
        self._busy -= 1
        self._busy_by_tenant[tenant] -= 1
        if not self._busy_by_tenant[tenant]:
            del self._busy_by_tenant[tenant]
        self._give_turns()
