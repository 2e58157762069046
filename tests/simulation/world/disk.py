"""Blobs in memory, shared by all simulated processes, with what a crash keeps and what it tears.

An append is durable from the moment it is carried out; one whose process died on the way may be torn anywhere. A log that failed once
is void. With `objects` lines wait in a spool and become readable to others only when they are sealed, as on an object store.
"""

import hashlib
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import TypeVar

from tests.simulation.world.process import Process
from tests.simulation.world.weather import Weather
from tests.simulation.world.witness import MARK
from tidegate.core.errors import BlobError, BlobMissing, BlobUnavailable, BlobVoid
from tidegate.core.files import Placed, Stamp
from tidegate.core.ports import LogIds

T = TypeVar("T")

_PIECE_BYTES = 200


class Blob:
    """Some bytes. Only finished ones can be read; a spool is seen by its own host alone."""

    def __init__(self, *, finished: bool, spool: bool = False) -> None:
        self.data = bytearray()
        self.finished = finished
        self.spool = spool


class Disk:
    """The place itself, outside of every process."""

    def __init__(self, weather: Weather, time_s: Callable[[], float]) -> None:
        self.weather = weather
        self.blobs: dict[str, Blob] = {}
        self.durable_at_s: dict[str, float] = {}
        self._time_s = time_s

    def append(self, blob: Blob, data: bytes, *, whole: bool) -> None:
        if not whole:
            blob.data += data[: self.weather.dice.randrange(len(data))]
            return
        blob.data += data
        for line in data.splitlines():
            found = MARK.search(line)
            if found is not None:
                self.durable_at_s.setdefault(found[0].decode(), self._time_s())

    def lose_unsynced(self) -> None:
        """The power was cut: of a blob that is still written any part may be left, or nothing."""
        for blob_id, blob in list(self.blobs.items()):
            if blob.finished or blob.spool:
                continue
            if self.weather.dice.random() < 0.5:
                del self.blobs[blob_id]
            else:
                del blob.data[self.weather.dice.randint(0, len(blob.data)) :]

    def readable(self, blob_id: str) -> bytearray:
        blob = self.blobs.get(blob_id)
        if blob is None or not blob.finished:
            raise BlobMissing(f"there is no blob {blob_id}")
        return blob.data

    def read(self, blob_id: str, at: int, count: int) -> bytes:
        data = bytes(self.readable(blob_id)[at : at + count])
        if len(data) < count:
            raise BlobMissing(f"blob {blob_id} ends before byte {at + count}")
        return data

    def put(self, blob_id: str, data: bytes) -> Stamp:
        blob = Blob(finished=True)
        blob.data += data
        self.blobs[blob_id] = blob
        return _stamp(data)


class ProcessBlobs:
    """The Blobs port of one process."""

    def __init__(self, process: Process, disk: Disk) -> None:
        self._process = process
        self._disk = disk

    async def _write(self, act: Callable[[], T]) -> T:
        def carry_out() -> T:
            if self._disk.weather.disk_full or self._disk.weather.strikes("disk_append"):
                raise BlobUnavailable("the disk is full")
            return act()

        return await self._process.ask(carry_out, self._delay_s())

    def _delay_s(self) -> float:
        weather = self._disk.weather
        return weather.dice.uniform(0.2, 4.0) if weather.strikes("disk_slow") else 0.0

    async def _read(self, act: Callable[[], T]) -> T:
        def carry_out() -> T:
            if self._disk.weather.strikes("disk_read"):
                raise BlobUnavailable("the disk did not answer")
            return act()

        return await self._process.ask(carry_out, self._delay_s())

    async def create(self, blob_id: str) -> "Writer":
        def act() -> Blob:
            if blob_id in self._disk.blobs:
                raise BlobError(f"blob {blob_id} exists already")
            return self._disk.blobs.setdefault(blob_id, Blob(finished=False))

        return Writer(self, blob_id, await self._write(act))

    async def adopt(self, blob_id: str, path: Path) -> None:
        def act() -> None:
            self._disk.put(blob_id, path.read_bytes())
            path.unlink()

        await self._write(act)

    async def open_log(self, next_blob_id: LogIds) -> "Log":
        return Log(self, next_blob_id)

    async def read(self, blob_id: str, at: int, count: int) -> bytes:
        return await self._read(lambda: self._disk.read(blob_id, at, count))

    async def stream(self, blob_id: str, at: int, count: int) -> AsyncGenerator[bytes, None]:
        for start in range(at, at + count, _PIECE_BYTES):
            yield await self.read(blob_id, start, min(_PIECE_BYTES, at + count - start))

    async def size(self, blob_id: str) -> int | None:
        def act() -> int | None:
            blob = self._disk.blobs.get(blob_id)
            return len(blob.data) if blob and blob.finished else None

        return await self._read(act)

    async def recover(self, blob_id: str) -> int | None:
        def act() -> int | None:
            blob = self._disk.blobs.get(blob_id)
            if blob is None or (not blob.finished and not blob.spool):
                return None
            if blob.spool and not self._disk.weather.plan.spool_reachable:
                return None
            blob.finished = True
            return blob.data.rfind(b"\n") + 1

        return await self._read(act)

    async def holds_end(self, blob_id: str) -> bool:
        blob = self._disk.blobs.get(blob_id)
        return blob is None or not blob.spool or self._disk.weather.plan.spool_reachable

    async def left_logs(self) -> list[str]:
        """No process here comes back to the disk of another one."""
        return []

    async def delete(self, blob_id: str) -> None:
        await self._read(lambda: self._disk.blobs.pop(blob_id, None))

    async def list_ids(self, after: str, count_max: int) -> list[str]:
        return await self._read(lambda: sorted(name for name in self._disk.blobs if name > after)[:count_max])

    async def local_path(self, blob_id: str, scratch: Path) -> Path:
        data = await self._read(lambda: bytes(self._disk.readable(blob_id)))
        path = scratch / f"{blob_id}-{self._process.name}"
        path.write_bytes(data)
        return path

    async def check(self) -> None:
        await self._write(lambda: None)

    async def close(self) -> None:
        """Nothing is held."""


class Writer:
    def __init__(self, blobs: ProcessBlobs, blob_id: str, blob: Blob) -> None:
        self._blobs = blobs
        self._blob_id = blob_id
        self._blob = blob
        self._void = False

    async def write(self, data: bytes) -> None:
        await self._do(lambda: self._blob.data.extend(data))

    async def finish(self) -> Stamp:
        def act() -> Stamp:
            self._blob.finished = True
            return _stamp(bytes(self._blob.data))

        stamp = await self._do(act)
        self._void = True
        return stamp

    async def abort(self) -> None:
        if not self._blob.finished:
            self._void = True
            await self._blobs._process.ask(lambda: self._blobs._disk.blobs.pop(self._blob_id, None))

    async def _do(self, act: Callable[[], T]) -> T:
        if self._void:
            raise BlobVoid(f"blob {self._blob_id} takes no more bytes")
        try:
            return await self._blobs._write(act)
        except BaseException:
            self._void = True
            raise


class Log:
    """Readable where it grows, or spooled until it is sealed into an object of its own."""

    def __init__(self, blobs: ProcessBlobs, next_blob_id: LogIds) -> None:
        self._blobs = blobs
        self._next_blob_id = next_blob_id
        self._blob: Blob | None = None
        self._blob_id = ""
        self._sealed_bytes = 0
        self._void = False
        self._spooled = blobs._disk.weather.plan.objects

    @property
    def seal_after_ms(self) -> int:
        return 1_500 if self._spooled else 0

    @property
    def seal_after_bytes(self) -> int:
        return 2_000 if self._spooled else 0

    async def append(self, data: bytes) -> None:
        self._refuse_when_void()
        blob_id = await self._next_blob_id() if self._blob is None else ""
        disk, process = self._blobs._disk, self._blobs._process

        def act() -> None:
            if self._blob is None:
                self._blob_id, self._sealed_bytes = blob_id, 0
                self._blob = disk.blobs[blob_id] = Blob(finished=not self._spooled, spool=self._spooled)
            fails = disk.weather.disk_full or disk.weather.strikes("disk_append")
            disk.append(self._blob, data, whole=not (fails or process.dead))
            if fails:
                raise BlobUnavailable("the disk is full")

        try:
            await process.ask(act, self._blobs._delay_s())
        except BaseException:
            self._void = True
            raise

    async def seal(self) -> Placed | None:
        self._refuse_when_void()
        blob = self._blob
        if blob is None or len(blob.data) == self._sealed_bytes:
            return None
        if self._spooled:

            def act() -> None:
                blob.finished, blob.spool = True, False

            await self._blobs._write(act)
            self._blob = None
            return Placed(self._blob_id, 0, len(blob.data))
        start, self._sealed_bytes = self._sealed_bytes, len(blob.data)
        return Placed(self._blob_id, start, self._sealed_bytes - start)

    async def close(self) -> None:
        self._void = True

    def _refuse_when_void(self) -> None:
        if self._void:
            raise BlobVoid("this log failed or was closed: open another one")


def _stamp(data: bytes) -> Stamp:
    return Stamp(len(data), hashlib.sha256(data).hexdigest())
