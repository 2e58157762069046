"""The events of a batch as server-sent events.

Each has `id: N` and one line `data: {"action", "payload"}`, and a marker ends the stream.

The store numbers the events of a job without gaps. So a reader that returns with the number of its
last event misses none and gets none twice, at any server.
"""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

import msgspec

from tidegate.core.answers.line_breaks import escape_line_breaks
from tidegate.core.errors import ApiProblem
from tidegate.core.nouns import Job
from tidegate.core.states import JOB_ENDED
from tidegate.store.jobs.job_events import RUNNING, JobEventRow
from tidegate.store.store import Store
from tidegate.web.completion_batch import shapes
from tidegate.web.completion_batch.items import ItemReader, StoredResult
from tidegate.web.completion_batch.shapes import DoorNotes, ItemEntity
from tidegate.web.jobs.event_stream import EventSource

CREATED = 1
ROWS_MAX = 32
# The items that are read at once for one reader, fewer if they are large: a slow reader takes no
# more memory than this.
CHUNK_ITEMS = 64
CHUNK_BYTES = 262_144
PIECE_BYTES = 16_384
DONE, ERROR = b"data: [DONE]\n\n", b"data: [ERROR]\n\n"
_ACTIONS = {
    shapes.COMPLETED: "item-completed",
    shapes.FAILED: "item-failed",
    shapes.CANCELLED: "item-cancelled",
    shapes.RUNNING: "item-running",
}


class ItemEvents(EventSource):
    """The events of one batch after the event with the number `position`."""

    def __init__(self, store: Store, reader: ItemReader, notes: DoorNotes, position: int) -> None:
        self._store = store
        self._reader = reader
        self._notes = notes
        self._position = position
        self._is_over = False

    @property
    def is_over(self) -> bool:
        return self._is_over

    async def news(self, job: Job) -> AsyncGenerator[bytes, None]:
        if self._position < CREATED:
            yield self._event("batch-created", shapes.created_entity(job, self._notes))
        while rows := await self._store.job_events(job.id, self._position, ROWS_MAX):
            for row in rows:
                async with aclosing(self._row(job, row)) as pieces:
                    async for piece in pieces:
                        yield piece
        if job.state in JOB_ENDED and not self._is_over:
            entity = shapes.batch_entity(job, self._notes, 0)
            self._is_over = True
            yield self._event(f"batch-{entity.status.lower()}", entity) + DONE

    async def _row(self, job: Job, row: JobEventRow) -> AsyncGenerator[bytes, None]:
        """Yield the events of one row that were not sent yet, in pieces of whole events."""
        sent_count = max(0, self._position + 1 - row.number)
        if row.kind == RUNNING:
            step = _chunk_items(job)
            for at in range(sent_count, row.count, step):
                count = min(step, row.count - at)
                for piece in self._pieces(await self._reader.running(job, self._notes, row.first + at, count)):
                    yield piece
            return
        skip, read_bytes = sent_count, 0
        read: list[StoredResult] = []
        for file_id, start, size_bytes in (
            (job.output_file_id, row.output_at, row.output_bytes),
            (job.error_file_id, row.error_at, row.error_bytes),
        ):
            if file_id is None or not size_bytes:
                continue
            async with aclosing(self._reader.results(job, file_id, start, start + size_bytes)) as found:
                async for stored, result in found:
                    if skip:
                        skip -= 1
                        continue
                    read.append(result)
                    read_bytes += len(stored.text)
                    if len(read) >= CHUNK_ITEMS or read_bytes >= CHUNK_BYTES:
                        for piece in self._pieces(await self._finished(job, read, row)):
                            yield piece
                        read, read_bytes = [], 0
        for piece in self._pieces(await self._finished(job, read, row)):
            yield piece

    async def _finished(self, job: Job, read: Sequence[StoredResult], row: JobEventRow) -> list[ItemEntity]:
        return await self._reader.finished(job, self._notes, read, [row.happened_at] * len(read)) if read else []

    def _pieces(self, entities: Sequence[ItemEntity]) -> list[bytes]:
        pieces, piece = [], bytearray()
        for entity in entities:
            piece += self._event(_ACTIONS[entity.status], entity)
            if len(piece) >= PIECE_BYTES:
                pieces.append(bytes(piece))
                piece = bytearray()
        return [*pieces, bytes(piece)] if piece else pieces

    def _event(self, action: str, payload: object) -> bytes:
        """Return the next event. Characters that a client might take for a line end are escaped."""
        self._position += 1
        data = escape_line_breaks(msgspec.json.encode({"action": action, "payload": payload}))
        return b"id: %d\ndata: %b\n\n" % (self._position, data)

    def after_cut(self, problem: ApiProblem) -> bytes:
        return _failure(problem.message)

    def after_slow(self, job: Job) -> bytes:
        return _failure(
            "The events were not taken in time. The batch goes on: read its events again from the last id on."
        )

    def after_stop(self) -> bytes:
        return _failure("The server stops. The batch goes on: read its events again from the last id on.")

    def after_loss(self) -> bytes | None:
        return _failure(
            "The server cannot reach its storage. The batch goes on: read its events again from the last id on."
        )


def _chunk_items(job: Job) -> int:
    """Return how many running items are read at once, by the size of their requests, or of their
    results once the job ended.
    """
    item_bytes = (job.work_bytes + job.output_bytes + job.error_bytes) // max(1, job.item_count)
    return max(1, min(CHUNK_ITEMS, CHUNK_BYTES // max(1, item_bytes)))


def _failure(message: str) -> bytes:
    return b"data: %b\n\n%b" % (msgspec.json.encode({"error": message}), ERROR)
