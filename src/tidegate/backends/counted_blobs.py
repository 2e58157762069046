"""Blobs whose operations are counted, for one part of a process."""

from collections.abc import AsyncGenerator, Awaitable
from pathlib import Path
from typing import TypeVar

from tidegate import metrics, tracing
from tidegate.core.errors import BlobError, BlobUnavailable
from tidegate.core.files import Placed, Stamp
from tidegate.core.ports import Blobs, BlobWriter, LogIds, ResultLog

T = TypeVar("T")


class CountedBlobs:
    """Blobs that count their operations under a component: `processor` or `apiserver`.

    Deletions always count under the garbage collector.
    """

    def __init__(self, inner: Blobs, component: str, backend: str) -> None:
        self._inner = inner
        self._component = component
        self._backend = backend
        self._succeeded = {
            one: metrics.blob_operations.of(one, self._component_of(one), "success")
            for one in ("store", "retrieve", "delete")
        }

    async def create(self, blob_id: str) -> BlobWriter:
        return _CountedWriter(await self.counted("store", self._inner.create(blob_id)), self)

    async def adopt(self, blob_id: str, path: Path) -> None:
        await self.counted("store", self._inner.adopt(blob_id, path))

    async def open_log(self, next_blob_id: LogIds) -> ResultLog:
        return _CountedLog(await self.counted("store", self._inner.open_log(next_blob_id)), self)

    async def read(self, blob_id: str, at: int, count: int) -> bytes:
        return await self.counted("retrieve", self._inner.read(blob_id, at, count))

    async def stream(self, blob_id: str, at: int, count: int) -> AsyncGenerator[bytes, None]:
        try:
            with tracing.storage("retrieve"):
                async for piece in self._inner.stream(blob_id, at, count):
                    yield piece
        except BlobError as error:
            self._failed("retrieve", error)
            raise
        self._succeeded["retrieve"].inc()

    async def size(self, blob_id: str) -> int | None:
        return await self._inner.size(blob_id)

    async def recover(self, blob_id: str) -> int | None:
        return await self._inner.recover(blob_id)

    async def holds_end(self, blob_id: str) -> bool:
        return await self._inner.holds_end(blob_id)

    async def left_logs(self) -> list[str]:
        return await self._inner.left_logs()

    async def delete(self, blob_id: str) -> None:
        await self.counted("delete", self._inner.delete(blob_id))

    async def list_ids(self, after: str, count_max: int) -> list[str]:
        return await self._inner.list_ids(after, count_max)

    async def local_path(self, blob_id: str, scratch: Path) -> Path:
        return await self.counted("retrieve", self._inner.local_path(blob_id, scratch))

    async def check(self) -> None:
        await self._inner.check()

    async def close(self) -> None:
        await self._inner.close()

    async def counted(self, operation: str, doing: Awaitable[T]) -> T:
        try:
            done = await (doing if tracing.ACTIVE is None else _timed(operation, doing))
        except BlobError as error:
            self._failed(operation, error)
            raise
        self._succeeded[operation].inc()
        return done

    def _failed(self, operation: str, error: BlobError) -> None:
        status = "retry" if isinstance(error, BlobUnavailable) else "exhausted"
        metrics.blob_operations.of(operation, self._component_of(operation), status).inc()
        metrics.blob_failures.of(operation, self._backend).inc()

    def _component_of(self, operation: str) -> str:
        return "garbage-collector" if operation == "delete" else self._component


async def _timed(operation: str, doing: Awaitable[T]) -> T:
    with tracing.storage(operation):
        return await doing


class _CountedWriter:
    def __init__(self, inner: BlobWriter, blobs: CountedBlobs) -> None:
        self._inner = inner
        self._blobs = blobs
        self.write = inner.write
        self.abort = inner.abort

    async def finish(self) -> Stamp:
        return await self._blobs.counted("store", self._inner.finish())


class _CountedLog:
    def __init__(self, inner: ResultLog, blobs: CountedBlobs) -> None:
        self._inner = inner
        self._blobs = blobs

    @property
    def seal_after_ms(self) -> int:
        return self._inner.seal_after_ms

    @property
    def seal_after_bytes(self) -> int:
        return self._inner.seal_after_bytes

    async def append(self, data: bytes) -> None:
        await self._blobs.counted("store", self._inner.append(data))

    async def seal(self) -> Placed | None:
        return await self._blobs.counted("store", self._inner.seal())

    async def close(self) -> None:
        await self._inner.close()
