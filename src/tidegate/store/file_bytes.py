"""Reading of a file's bytes, by pages of its extents, so that no whole file is in memory."""

from collections.abc import AsyncGenerator
from contextlib import aclosing

from tidegate.core.errors import BlobMissing
from tidegate.core.ports import Blobs
from tidegate.store.store import Store

EXTENTS_PAGE_COUNT = 64


async def file_bytes(store: Store, blobs: Blobs, file_id: str, start: int, end: int) -> AsyncGenerator[bytes, None]:
    """Yield the bytes of a file from `start` up to `end`.

    Extents may be compacted meanwhile and their old blobs collected. Then the list of extents is
    read again, from the place that was reached.
    """
    at, missed_at = start, -1
    while at < end:
        extents = await store.list_extents(file_id, at, EXTENTS_PAGE_COUNT)
        if not extents or extents[0].at > at:
            raise BlobMissing(f"{file_id} has no bytes at {at}, though it should have {end}")
        for extent in extents:
            skip = at - extent.at
            count = min(extent.size_bytes - skip, end - at)
            if count <= 0:
                break
            try:
                async with aclosing(blobs.stream(extent.blob_id, extent.blob_at + skip, count)) as stream:
                    async for chunk in stream:
                        at += len(chunk)
                        yield chunk
            except BlobMissing:
                if missed_at == at:
                    raise
                missed_at = at
                break
