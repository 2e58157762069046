"""Removal of unused blobs and, once they are old, of blobs without a row.

A blob is condemned in the store first, then removed. Record refuses extents in a condemned blob, so
it stays unused.
"""

import structlog

from tidegate.core.errors import BlobError
from tidegate.core.nouns import KeepTimes
from tidegate.core.ports import Blobs, Clock
from tidegate.failpoints import hit
from tidegate.store.store import Store

log = structlog.get_logger()

# Deleted files and refused uploads do not count towards a quota, so they go soon: this much is left
# for downloads that are under way.
_SOON_MS = 20_000
_SUSPECTS_MAX = 10_000


class Garbage:
    """The collector of unused blobs.

    Each pass goes on in the listing of blobs where the last one stopped.
    """

    def __init__(self, store: Store, blobs: Blobs, clock: Clock, keep: KeepTimes) -> None:
        self._store = store
        self._blobs = blobs
        self._clock = clock
        self._safety_ms = keep.orphan_ms
        self._scan_max = keep.scan_max
        self._after = ""
        self._suspects: dict[str, float] = {}

    async def tend(self) -> int:
        """Condemn, remove, and look further for orphans. Return how many blobs were removed."""
        soon_ms = min(_SOON_MS, self._safety_ms)
        await self._store.condemn_unused_blobs(self._safety_ms, soon_ms, self._scan_max)
        removed = 0
        for blob_id in await self._store.condemned_blobs(self._safety_ms, soon_ms, self._scan_max):
            if await self._remove(blob_id):
                await hit("blob_removed")
                await self._store.forget_blob(blob_id)
                removed += 1
        try:
            return removed + await self._orphans()
        except BlobError as error:
            log.warning("orphans_listing_failed", error=str(error))
            return removed

    async def _remove(self, blob_id: str) -> bool:
        """Remove a blob; False if that fails, so that the others are still removed."""
        try:
            await self._blobs.delete(blob_id)
        except BlobError as error:
            log.warning("blob_removal_failed", blob=blob_id, error=str(error))
            return False
        return True

    async def _orphans(self) -> int:
        """Remove blobs without a row; return their number.

        Such a blob was never acknowledged, since its row comes first, or the store was restored
        from an older backup. So it is removed only after this process saw it without a row for the
        whole safety period.
        """
        page = await self._blobs.list_ids(self._after, self._scan_max)
        now_ms = self._clock.monotonic_ms()
        removed = 0
        for blob_id in page:
            if await self._store.knows_blob(blob_id):
                self._suspects.pop(blob_id, None)
            elif blob_id not in self._suspects:
                if len(self._suspects) < _SUSPECTS_MAX:
                    self._suspects[blob_id] = now_ms
            elif now_ms - self._suspects[blob_id] >= self._safety_ms and await self._remove(blob_id):
                del self._suspects[blob_id]
                log.info("orphan_removed", blob=blob_id)
                removed += 1
        self._after = page[-1] if len(page) == self._scan_max else ""
        return removed
