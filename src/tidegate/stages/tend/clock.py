"""The watch over the store's clock: its steps are corrected before work waits for them."""

import asyncio

import structlog

from tidegate.core.errors import StoreUnavailable
from tidegate.store.store import Store

log = structlog.get_logger()

_LOOK_S = 1.0


async def watch(store: Store) -> None:
    """Look at the store's clock every second, until cancelled."""
    while True:
        await asyncio.sleep(_LOOK_S)
        try:
            await store.look_at_clock()
        except StoreUnavailable as error:
            log.warning("store_clock_read_failed", error=str(error))
