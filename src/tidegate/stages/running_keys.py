"""Idempotency-Keys whose first request is still under way in this process.

A copy of that request waits a moment, then gets a 409, as the draft standard of Idempotency-Key
wants it. The store makes one object of all copies in any case.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tidegate.core.errors import ApiProblem

# A copy waits this long for the first request: enough for every create whose body has arrived.
WAIT_S = 2.0
RETRY_AFTER_S = 1


class _KeyTurn:
    """The lock of one key. It is kept while a request has it or waits for it."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.request_count = 0


class RunningKeys:
    def __init__(self) -> None:
        self._turns: dict[tuple[str, str, str], _KeyTurn] = {}

    def names(self) -> list[tuple[str, str, str]]:
        """Return the tenant, the route and the key of every request that has a key now or waits for
        one.
        """
        return list(self._turns)

    @asynccontextmanager
    async def hold_key(self, tenant_id: str, route: str, key: str | None) -> AsyncIterator[None]:
        """Hold a tenant's key while its request runs. Raise a 409 if another request still has it.

        A request without a key does not wait. A key is unique within its `route`, as in the store.
        """
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
