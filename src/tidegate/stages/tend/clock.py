"""The store's clock: a step of it is taken out before work waits for it."""

import asyncio

import structlog

from tidegate.core.errors import StoreUnavailable
from tidegate.store.store import Store

log = structlog.get_logger()

_LOOK_S = 1.0


async def watch(store: Store) -> None:
    """Look at the store's clock every second, for ever."""
    while True:
        await asyncio.sleep(_LOOK_S)
        try:
            await store.look_at_clock()
        except StoreUnavailable as error:
            log.warning("store_clock_read_failed", error=str(error))
