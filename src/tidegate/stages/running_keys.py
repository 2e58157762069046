"""Idempotency-Keys whose first request is still under way in this process: a copy of it waits a moment, then gets a 409.

The store makes one object of all copies, whatever happens here. This only says so early, and in the words of the key's draft standard.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tidegate.core.errors import ApiProblem

# A copy waits so long for the first request, which is enough for every create whose body is there already.
WAIT_S = 2.0
RETRY_AFTER_S = 1


class _KeyTurn:
    """The turn of one key. It is kept while a request has it or waits for it."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.request_count = 0


class RunningKeys:
    def __init__(self) -> None:
        self._turns: dict[tuple[str, str, str], _KeyTurn] = {}

    def names(self) -> list[tuple[str, str, str]]:
        """Return the tenant, the route and the key of every request that has a key now or waits for one."""
        return list(self._turns)

    @asynccontextmanager
    async def held(self, tenant_id: str, route: str, key: str | None) -> AsyncIterator[None]:
        """Hold a tenant's key while its request is worked on; a request without a key waits for nothing. 409 when another request
        still has it. `route` is what the key is unique in, as in the store."""
        if key is None:
            yield
            return
        name = (tenant_id, route, key)
        turn = self._turns.setdefault(name, _KeyTurn())
        turn.request_count += 1
        try:
            try:
                async with asyncio.timeout(WAIT_S):
                    await turn.lock.acquire()
            except TimeoutError:
                raise _still_running() from None
            try:
                yield
            finally:
                turn.lock.release()
        finally:
            turn.request_count -= 1
            if not turn.request_count:
                del self._turns[name]


def _still_running() -> ApiProblem:
    message = (
        "The first request with this Idempotency-Key is still under way. Send this one again in a moment: it then gets what "
        "the first one made."
    )
    return ApiProblem(409, "idempotency_in_progress", message, param="Idempotency-Key", retry_after_s=RETRY_AFTER_S)
