"""The writer of one S3 object: a single PUT if it is small, else a streamed multipart upload.

At most two parts are in memory: one that is filled and one under way. S3 shows only complete
objects, so an unfinished one is invisible. `abort` also removes the parts that were sent. Parts of
a killed process stay hidden in the bucket and cost space until a lifecycle rule
(AbortIncompleteMultipartUpload) removes them: operators should set one.
"""

import asyncio
import contextlib
import hashlib
from collections import deque
from collections.abc import AsyncIterator
from concurrent.futures import Executor

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError

from tidegate.backends.blobs_s3_client import PUT_BYTES_MAX, Objects, Print, WrongBytes
from tidegate.backends.disk import hop
from tidegate.core.errors import BlobError, BlobUnavailable, BlobVoid
from tidegate.core.files import Stamp

HOP_BYTES = 262_144
QUEUED_BLOCKS_MAX = 4
PART_BYTES = PUT_BYTES_MAX
ABORT_WAIT_S = 5.0


class _Aborted(Exception):
    """Raised in the stream of pieces to end it early: the upload then removes the parts it sent."""


class Digests:
    """The SHA-256 of the whole and the MD5 of each part, computed in one pass."""

    def __init__(self) -> None:
        self.size_bytes = 0
        self._sha256 = hashlib.sha256()
        self._parts: list[bytes] = []
        self._part = hashlib.md5(usedforsecurity=False)
        self._part_bytes = 0

    def update(self, data: bytes) -> None:
        self._sha256.update(data)
        self.size_bytes += len(data)
        view = memoryview(data)
        while view:
            taken = view[: PART_BYTES - self._part_bytes]
            self._part.update(taken)
            self._part_bytes += len(taken)
            view = view[len(taken) :]
            if self._part_bytes == PART_BYTES:
                self._end_part()

    def print(self, *, multipart: bool) -> Print:
        if self._part_bytes or not self._parts:
            self._end_part()
        if multipart:
            whole = hashlib.md5(b"".join(self._parts), usedforsecurity=False).hexdigest()
            etag = f"{whole}-{len(self._parts)}"
        else:
            etag = self._parts[0].hex()
        return Print(self.size_bytes, self._sha256.hexdigest(), etag)

    def _end_part(self) -> None:
        self._parts.append(self._part.digest())
        self._part = hashlib.md5(usedforsecurity=False)
        self._part_bytes = 0


class S3Writer:
    def __init__(self, objects: Objects, threads: Executor, key: str) -> None:
        self._objects = objects
        self._threads = threads
        self._key = key
        self._gathered: list[bytes] = []
        self._gathered_bytes = 0
        self._first_blocks: deque[bytes] = deque()
        self._digests = Digests()
        self._blocks: asyncio.Queue[bytes | None] = asyncio.Queue(QUEUED_BLOCKS_MAX)
        self._upload: asyncio.Task[None] | None = None
        self._sent_whole = False
        self._aborting = False
        self._void = False
        self._finished = False

    async def write(self, data: bytes) -> None:
        self._refuse_when_over()
        self._gathered.append(data)
        self._gathered_bytes += len(data)
        if self._gathered_bytes >= HOP_BYTES:
            try:
                await self._take()
            except BaseException:
                self._void = True
                raise

    async def finish(self) -> Stamp:
        self._refuse_when_over()
        try:
            await self._take()
            expected = self._digests.print(multipart=self._upload is not None)
            self._sent_whole = True
            if self._upload is None:
                await self._put_whole(expected)
            else:
                await self._send(None)
                # Shielded, because a cancelled upload leaves its parts behind; `abort` removes
                # them.
                await asyncio.shield(self._upload)
            await self._objects.verify(self._key, expected)
        except WrongBytes as failure:
            self._void = True
            raise BlobUnavailable(f"{failure}: it was not kept; upload it again under a fresh id") from failure
        except BaseException:
            self._void = True
            raise
        self._finished = True
        return Stamp(expected.size_bytes, expected.sha256)

    async def abort(self) -> None:
        self._void = True
        self._gathered = []
        self._first_blocks.clear()
        if self._finished:
            return
        if self._upload is not None and not self._upload.done():
            self._aborting = True
            self._make_room()
            self._blocks.put_nowait(None)
            await asyncio.wait({self._upload}, timeout=ABORT_WAIT_S)
            self._upload.cancel()
            await asyncio.wait({self._upload}, timeout=ABORT_WAIT_S)
        if self._sent_whole:
            # No caller knows this object. If the store is away now, a later sweep removes it.
            with contextlib.suppress(BlobUnavailable, TimeoutError):
                async with asyncio.timeout(ABORT_WAIT_S):
                    await self._objects.delete(self._key)

    async def _take(self) -> None:
        block = b"".join(self._gathered)
        self._gathered, self._gathered_bytes = [], 0
        await hop(self._threads, self._digests.update, block)
        if self._upload is not None:
            await self._send(block)
            return
        self._first_blocks.append(block)
        if self._digests.size_bytes > PART_BYTES:
            self._upload = asyncio.create_task(self._run_upload())
            self._upload.add_done_callback(self._on_upload_over)

    async def _send(self, block: bytes | None) -> None:
        upload = self._upload
        assert upload is not None
        if not upload.done():
            await self._blocks.put(block)
        if upload.done():
            await upload

    async def _put_whole(self, expected: Print) -> None:
        data = b"".join(self._first_blocks)
        self._first_blocks.clear()
        try:
            await self._objects.put(self._key, data, "create")
        except AlreadyExistsError:
            # Either an earlier try of this PUT succeeded and its answer was lost, or the id is
            # taken.
            try:
                await self._objects.verify(self._key, expected)
            except WrongBytes:
                self._sent_whole = False
                raise BlobError(f"blob {self._key} exists already: take a fresh id") from None

    async def _run_upload(self) -> None:
        doing = f"uploading {self._key}"
        try:
            await obstore.put_async(
                self._objects.store,
                self._key,
                self._chunks(),
                use_multipart=True,
                chunk_size=PART_BYTES,
                max_concurrency=1,
            )
        except _Aborted:
            raise BlobVoid(f"{doing} was given up") from None
        except (BaseError, OSError) as failure:
            raise self._objects.unavailable(failure, doing) from failure

    async def _chunks(self) -> AsyncIterator[bytes]:
        # Drop each block once the upload has it, so that the first part is not in memory twice.
        while self._first_blocks:
            yield self._first_blocks.popleft()
        while True:
            next_block = await self._blocks.get()
            if self._aborting:
                raise _Aborted
            if next_block is None:
                return
            yield next_block

    def _on_upload_over(self, upload: asyncio.Task[None]) -> None:
        """Wake a write that waits for room, so that it sees the failure.

        Mark the failure as seen.
        """
        self._make_room()
        if not upload.cancelled():
            upload.exception()

    def _make_room(self) -> None:
        while not self._blocks.empty():
            self._blocks.get_nowait()

    def _refuse_when_over(self) -> None:
        if self._void or self._finished:
            raise BlobVoid(f"blob {self._key} takes no more bytes: begin another one under a fresh id")
