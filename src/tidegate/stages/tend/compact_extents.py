"""Compaction of files with too many extents: neighbours are joined to one blob."""

import structlog

from tidegate.core import ids
from tidegate.core.errors import BlobError, LostRace
from tidegate.core.files import Extent, Placed, Stamp
from tidegate.core.ports import Blobs, Entropy
from tidegate.store.store import Store

log = structlog.get_logger()

PIECES_MAX = 64
_COPY_BYTES_MAX = 64 << 20


async def tend(store: Store, blobs: Blobs, entropy: Entropy, worker_id: str) -> int:
    """Join one run of small extents in each of the worst files. Return how many extents went."""
    gone = 0
    for file_id, _ in await store.crowded_files(PIECES_MAX):
        extents = await store.list_extents(file_id, 0, 4 * PIECES_MAX)
        run = smallest_run(extents)
        if len(run) > 1:
            gone += await _join(store, blobs, entropy, worker_id, file_id, run)
    return gone


def smallest_run(extents: list[Extent]) -> list[Extent]:
    """Return up to PIECES_MAX // 2 neighbouring extents with the fewest bytes to copy.

    The run ends at a bound of bytes, and never has the last extent, which still grows.
    """
    width = PIECES_MAX // 2
    candidates = extents[:-1]
    if len(candidates) < 2:
        return []
    starts = range(max(1, len(candidates) - width + 1))
    best = min(starts, key=lambda start: sum(extent.size_bytes for extent in candidates[start : start + width]))
    run: list[Extent] = []
    for extent in candidates[best : best + width]:
        if run and sum(one.size_bytes for one in run) + extent.size_bytes > _COPY_BYTES_MAX:
            break
        run.append(extent)
    return run


async def _join(store: Store, blobs: Blobs, entropy: Entropy, worker_id: str, file_id: str, run: list[Extent]) -> int:
    blob_id = ids.make("blob", entropy.token_bytes(16))
    await store.begin_blob(blob_id, "compacted", worker_id)
    try:
        stamp = await _copy(blobs, blob_id, run)
        await store.replace_extents(file_id, run, Placed(blob_id, 0, stamp.size_bytes))
    except (BlobError, LostRace) as error:
        # The file is unchanged: the next pass tries again.
        log.info("compaction_abandoned", file=file_id, error=str(error))
        await store.give_up_blob(blob_id)
        return 0
    return len(run) - 1


async def _copy(blobs: Blobs, blob_id: str, run: list[Extent]) -> Stamp:
    writer = await blobs.create(blob_id)
    try:
        for extent in run:
            async for leased in blobs.stream(extent.blob_id, extent.blob_at, extent.size_bytes):
                await writer.write(leased)
        return await writer.finish()
    except BaseException:
        await writer.abort()
        raise
