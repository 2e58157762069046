"""`GET /v1/batches/{batch_id}/events`: the events of a batch as server-sent events; a client can go
on after any break.
"""

from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tidegate.core import ids
from tidegate.core.answers.line_breaks import escape_line_breaks
from tidegate.core.errors import ApiProblem
from tidegate.core.nouns import Caller, Job
from tidegate.core.problems import no_such_batch
from tidegate.core.states import JOB_ENDED
from tidegate.web.context import WebContext
from tidegate.web.http.routes import Guarded
from tidegate.web.http.tenant_slots import TenantSlots
from tidegate.web.jobs.event_stream import HEADERS, MEDIA_TYPE, EventSource, EventStream
from tidegate.web.jobs.job_watch import JobWatch
from tidegate.web.openai import schemas
from tidegate.web.openai.events.item_lines import is_line_end, item_events, readable_bytes
from tidegate.web.openai.events.position import ENDED, NO_STATUS, STEPS, EventPosition, read_position
from tidegate.web.requests import requests

# A client that lost its connection waits this long before it connects again.
RETRY_MS = 1_000
PIECE_BYTES = 16_384


class BatchProgress(msgspec.Struct):
    id: str
    object: str
    request_counts: schemas.RequestCounts
    usage: schemas.BatchUsage


class BatchReset(msgspec.Struct):
    """The reader must go on after the event with this event's id; without an id, from the
    beginning.
    """

    id: str
    object: str


class EventRoutes:
    def __init__(self, context: WebContext, watch: JobWatch, slots: TenantSlots) -> None:
        self._context = context
        self._watch = watch
        self._slots = slots

    def routes(self) -> list[Guarded]:
        return [Guarded("GET", "/v1/batches/{batch_id}/events", "batches:read", self.events)]

    async def events(self, request: Request, caller: Caller) -> Response:
        requests.refuse_unknown(request.query_params, ())
        job_id = str(request.path_params["batch_id"])
        store = self._context.store
        job = await store.get_job(caller.tenant_id, job_id) if ids.is_valid("batch", job_id) else None
        if job is None:
            raise no_such_batch(job_id)
        position = _last_position(request)
        if position.step == ENDED and job.state in JOB_ENDED:
            # A 204 stops a browser's event source from connecting again.
            return Response(None, 204)
        if request.method == "HEAD":
            return Response(None, 200, HEADERS, MEDIA_TYPE)
        log_of_job = EventLog(self._context, position)
        if not await log_of_job.is_possible(job):
            log_of_job = EventLog(self._context, EventPosition(), is_reset=True)
        return EventStream(self._watch, self._slots.taken(job.tenant_id), job, log_of_job)


class EventLog(EventSource):
    """The events of one job from one position on, in OpenAI's shape."""

    opening = b"retry: %d\n\n" % RETRY_MS

    def __init__(self, context: WebContext, position: EventPosition, *, is_reset: bool = False) -> None:
        self._store = context.store
        self._blobs = context.blobs
        self._position = position
        self._is_reset = is_reset

    @property
    def is_over(self) -> bool:
        return self._position.step == ENDED

    async def is_possible(self, job: Job) -> bool:
        """Return whether the position can be one of this job's events."""
        at = self._position
        return await is_line_end(self._store, self._blobs, job, "output", at.output_at) and await is_line_end(
            self._store, self._blobs, job, "errors", at.error_at
        )

    def after_cut(self, problem: ApiProblem) -> bytes:
        return _event("error", None, {"code": problem.code, "message": problem.message})

    def after_slow(self, job: Job) -> bytes:
        return _event("reset", self._position.number(), BatchReset(job.id, "batch.reset"))

    async def news(self, job: Job) -> AsyncGenerator[bytes, None]:
        """Yield what is new with the job in its present state, in pieces of whole events: statuses,
        items, progress, and the end.
        """
        if self._is_reset:
            self._is_reset = False
            yield _event("reset", None, BatchReset(job.id, "batch.reset"))
        for step, moment in enumerate((job.created_at, job.in_progress_at, job.cancelling_at)):
            if moment is not None and step > self._position.step:
                yield self._status(job, step, STEPS[step])
        async with aclosing(self._items(job)) as items:
            async for piece in items:
                yield piece
        if self._position.output_at + self._position.error_at and not self._position.has_progress:
            self._position = self._position._replace(has_progress=True)
            shown = schemas.batch(job)
            progress = BatchProgress(job.id, "batch.progress", shown.request_counts, shown.usage)
            yield _event("batch.progress", self._position.number(), progress)
        if job.finalizing_at is not None and self._position.step < ENDED - 1:
            yield self._status(job, ENDED - 1, STEPS[ENDED - 1])
        if job.state in JOB_ENDED and not self.is_over:
            yield self._status(job, ENDED, job.state.value)

    def _status(self, job: Job, step: int, status: str) -> bytes:
        self._position = self._position._replace(step=step)
        return _event(f"batch.{status}", self._position.number(), schemas.batch(job))

    async def _items(self, job: Job) -> AsyncGenerator[bytes, None]:
        output_bytes, error_bytes = readable_bytes(job)
        at = self._position
        piece = bytearray()
        for name, kind, start, end in (
            ("output", "item.completed", at.output_at, output_bytes),
            ("errors", "item.failed", at.error_at, error_bytes),
        ):
            async with aclosing(item_events(self._store, self._blobs, job, name, start, end)) as found:
                async for item in found:
                    sent_to = item.line.at + item.line.bytes
                    at = at._replace(has_progress=False, **{"output_at" if name == "output" else "error_at": sent_to})
                    piece += _event(kind, at.number(), item)
                    if len(piece) >= PIECE_BYTES:
                        self._position = at
                        yield bytes(piece)
                        piece.clear()
        self._position = at
        if piece:
            yield bytes(piece)


def _last_position(request: Request) -> EventPosition:
    text = request.headers.get("last-event-id")
    if not text:
        # An event source sends an empty id before its first event.
        return EventPosition(step=NO_STATUS)
    position = read_position(text)
    if position is None:
        raise ApiProblem(
            400,
            "invalid_parameter",
            "`Last-Event-ID` must be the id of an event of this batch. Leave it out to begin at the start.",
            param="Last-Event-ID",
        )
    return position


def _event(kind: str, number: int | None, data: object) -> bytes:
    """Return one event. Characters that a client might take for a line end are escaped."""
    named = b"" if number is None else b"id: %d\n" % number
    return b"%bevent: %b\ndata: %b\n\n" % (named, kind.encode(), escape_line_breaks(msgspec.json.encode(data)))
