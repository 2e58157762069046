"""Read the bytes of a file: its extents page by page, never a file in memory."""

from collections.abc import AsyncGenerator
from contextlib import aclosing

from tidegate.core.errors import BlobMissing
from tidegate.core.ports import Blobs
from tidegate.store.store import Store

EXTENTS_PAGE_COUNT = 64


async def file_bytes(store: Store, blobs: Blobs, file_id: str, start: int, end: int) -> AsyncGenerator[bytes, None]:
    """The bytes of a file from one place up to another.

    Extents may be copied together while this reads, and their old blobs collected: then the list is read again, from where it was."""
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
