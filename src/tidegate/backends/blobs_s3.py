"""Blobs as objects of one bucket (or of one prefix in it), with a local spool for logs.

A blob's key is its id. Only one process writes under an id, and the object never changes, with one
exception: the object of a log may be replaced by a longer one with the same beginning (a recovered
log whose owner was alive after all). So every sealed range stays valid.

`list_ids` also lists the files of this host's spool, so that the sweep for orphans finds those
without a row.
"""

import asyncio
import fcntl
import os
import secrets
from collections.abc import AsyncGenerator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from tidegate.backends.blobs_s3_client import Objects, S3Settings, object_key
from tidegate.backends.blobs_s3_log import SpooledLog
from tidegate.backends.blobs_s3_writer import S3Writer
from tidegate.backends.disk import (
    create_exclusive,
    hop,
    make_directories,
    open_plain,
    read_exact,
    try_write,
    unavailable,
    whole_lines_bytes,
    write_all,
)
from tidegate.core import ids
from tidegate.core.errors import BlobError, BlobMissing, BlobUnavailable
from tidegate.core.ports import LogIds

PIECE_BYTES = 131_072
COPY_BYTES = 262_144
THREAD_COUNT = 8
_MISSED_MAX = 1_000


class S3Blobs:
    """The blobs of one bucket. The constructor makes the spool directory and sends nothing."""

    def __init__(self, settings: S3Settings, spool: Path) -> None:
        self._objects = Objects(settings)
        self._spool = spool.absolute()
        self._checking = asyncio.Lock()
        self._probe = f"probe-{secrets.token_hex(8)}"
        self._missing_after_s = settings.missing_after_ms / 1_000
        self._missed: dict[str, float] = {}
        try:
            make_directories(self._spool)
        except OSError as failure:
            raise unavailable(failure, self._spool, "opening the spool") from failure
        self._threads = ThreadPoolExecutor(THREAD_COUNT, thread_name_prefix="blobs")

    async def create(self, blob_id: str) -> S3Writer:
        key = object_key(blob_id)
        # A large object cannot be put on a condition, so check here. Ids are random and never used
        # twice.
        if await self._objects.head(key) is not None:
            raise BlobError(f"blob {blob_id} exists already: take a fresh id")
        return S3Writer(self._objects, self._threads, key)

    async def adopt(self, blob_id: str, path: Path) -> None:
        writer = await self.create(blob_id)
        try:
            at = 0
            while chunk := await hop(self._threads, self._read_file, path, at):
                await writer.write(chunk)
                at += len(chunk)
            await writer.finish()
        except BaseException:
            await writer.abort()
            raise
        await hop(self._threads, path.unlink, missing_ok=True)

    async def open_log(self, next_blob_id: LogIds) -> SpooledLog:
        return SpooledLog(self._objects, self._threads, next_blob_id, self._spool)

    async def read(self, blob_id: str, at: int, count: int) -> bytes:
        with self._missing_for_a_while(blob_id):
            return await self._objects.read(object_key(blob_id), at, count)

    async def stream(self, blob_id: str, at: int, count: int) -> AsyncGenerator[bytes, None]:
        if count == 0:
            await self.read(blob_id, at, 0)
        with self._missing_for_a_while(blob_id):
            async for large in self._objects.chunks(object_key(blob_id), at, count):
                for start in range(0, len(large), PIECE_BYTES):
                    yield large[start : start + PIECE_BYTES]

    async def size(self, blob_id: str) -> int | None:
        stored = await self._objects.head(object_key(blob_id))
        return None if stored is None else stored.size_bytes

    async def recover(self, blob_id: str) -> int | None:
        """Write the whole lines of a spool file to the object, unless it has them already."""
        key = object_key(blob_id)
        found = await hop(self._threads, self._read_spool, key)
        if found is None:
            return await self.size(blob_id)
        data, owner_is_dead = found
        size = await self._objects.grow(key, data) if data else (await self.size(blob_id) or 0)
        if owner_is_dead:
            await hop(self._threads, self._drop_spool, key)
        return size

    async def holds_end(self, blob_id: str) -> bool:
        return await hop(self._threads, self._read_spool, object_key(blob_id)) is not None

    async def left_logs(self) -> list[str]:
        """Return the logs that dead processes left in the spool.

        An empty file is left out: a process may be about to lock it.
        """
        names = sorted(await hop(self._threads, self._list_spool, ""))
        found = [(name, await hop(self._threads, self._read_spool, name)) for name in names]
        return [name for name, spool in found if spool is not None and spool[0] and spool[1]]

    async def delete(self, blob_id: str) -> None:
        key = object_key(blob_id)
        await self._objects.delete(key)
        await hop(self._threads, self._drop_spool, key)

    async def list_ids(self, after: str, count_max: int) -> list[str]:
        spooled = await hop(self._threads, self._list_spool, after)
        objects: list[str] = []
        cursor, more = after, True
        while more and len(objects) < count_max:
            keys, more = await self._objects.keys_after(cursor, count_max)
            objects += [key for key in keys if ids.is_valid("blob", key)]
            cursor = keys[-1] if keys else cursor
        # Objects after the cursor may not be listed yet: a spool file's id must not come before
        # them.
        due = [name for name in spooled if not more or name <= cursor]
        return sorted({*objects, *due})[:count_max]

    async def local_path(self, blob_id: str, scratch: Path) -> Path:
        with self._missing_for_a_while(blob_id):
            return await self._copy(blob_id, scratch)

    @contextmanager
    def _missing_for_a_while(self, blob_id: str) -> Iterator[None]:
        """Treat a missing object as unavailable at first: a 404 may be wrong for a moment."""
        try:
            yield
        except BlobMissing as missing:
            now_s = asyncio.get_running_loop().time()
            since_s = self._missed.setdefault(blob_id, now_s)
            if len(self._missed) > _MISSED_MAX:
                del self._missed[next(iter(self._missed))]
            if now_s - since_s < self._missing_after_s:
                raise BlobUnavailable(f"{missing}. It is asked for again, in case that passes") from missing
            raise
        self._missed.pop(blob_id, None)

    async def _copy(self, blob_id: str, scratch: Path) -> Path:
        stored = await self._objects.surely_head(object_key(blob_id))
        if stored is None:
            raise BlobMissing(f"there is no blob {blob_id}")
        size = stored.size_bytes
        # A unique name: several jobs may read the same input at once, and each removes its copy.
        path = scratch / f"{blob_id}.{secrets.token_hex(8)}"
        partial = path.with_name(path.name + ".part")
        try:
            os.close(create_exclusive(partial))
            async for chunk in self._objects.chunks(object_key(blob_id), 0, size):
                await hop(self._threads, _append, partial, chunk)
            if partial.stat().st_size != size:
                raise BlobUnavailable(f"the copy of blob {blob_id} in {scratch} is not whole: try again")
            partial.rename(path)
        except OSError as failure:
            partial.unlink(missing_ok=True)
            raise unavailable(failure, scratch, f"copying blob {blob_id}") from failure
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
        return path

    async def check(self) -> None:
        async with self._checking:
            await self._check()

    async def close(self) -> None:
        self._threads.shutdown(wait=False)

    async def _check(self) -> None:
        try:
            await hop(self._threads, try_write, self._spool, "." + self._probe)
        except OSError as failure:
            raise unavailable(failure, self._spool, "writing a probe file") from failure
        await self._objects.check(self._probe)

    def _read_file(self, path: Path, at: int) -> bytes:
        try:
            fd = open_plain(path)
            try:
                return read_exact(fd, at, COPY_BYTES)
            finally:
                os.close(fd)
        except OSError as failure:
            raise unavailable(failure, path.parent, f"reading {path.name}") from failure

    def _read_spool(self, key: str) -> tuple[bytes, bool] | None:
        """Return a spool file's durable lines and whether its owner is gone; None if absent."""
        try:
            fd = open_plain(self._spool / key, os.O_RDWR)
        except FileNotFoundError:
            return None
        except OSError as failure:
            raise unavailable(failure, self._spool, f"opening the spool of {key}") from failure
        try:
            os.fsync(fd)
            owner_is_dead = True
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                owner_is_dead = False
            return read_exact(fd, 0, whole_lines_bytes(fd)), owner_is_dead
        except OSError as failure:
            raise unavailable(failure, self._spool, f"reading the spool of {key}") from failure
        finally:
            os.close(fd)

    def _drop_spool(self, key: str) -> None:
        try:
            (self._spool / key).unlink(missing_ok=True)
        except OSError as failure:
            raise unavailable(failure, self._spool, f"removing the spool of {key}") from failure

    def _list_spool(self, after: str) -> list[str]:
        try:
            return [name for name in os.listdir(self._spool) if name > after and ids.is_valid("blob", name)]
        except OSError as failure:
            raise unavailable(failure, self._spool, "listing the spool") from failure


def _append(path: Path, data: bytes) -> None:
    """Append to a file. The descriptor is opened and closed in this thread.

    A cancelled caller does not wait for the thread. If it closed the descriptor, that could belong
    to another file by the time of the write.
    """
    fd = open_plain(path, os.O_WRONLY | os.O_APPEND)
    try:
        write_all(fd, data)
    finally:
        os.close(fd)
