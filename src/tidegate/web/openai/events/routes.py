"""`GET /v1/batches/{batch_id}/events`: what happens to a batch, as server-sent events that a client can go on with after any break."""

from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec
import structlog
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tidegate.core import ids
from tidegate.core.answers.line_breaks import escape_line_breaks
from tidegate.core.errors import ApiProblem, TidegateError
from tidegate.core.nouns import Caller, Job
from tidegate.core.problems import no_such_batch
from tidegate.core.states import JOB_ENDED
from tidegate.web.context import WebContext
from tidegate.web.http import requests
from tidegate.web.http.content import while_the_client_stays
from tidegate.web.http.open_calls import OpenCall, refusal
from tidegate.web.http.parts import body_part, send_parts
from tidegate.web.http.routes import Guarded
from tidegate.web.http.tenant_slots import TenantSlots
from tidegate.web.jobs.job_watch import JobFollower, JobWatch
from tidegate.web.openai import schemas
from tidegate.web.openai.events.item_lines import is_line_end, item_events, readable_bytes
from tidegate.web.openai.events.position import ENDED, NO_STATUS, STEPS, EventPosition, read_position

log = structlog.get_logger()

HEARTBEAT_S = 15.0
# A client that lost its connection waits this long before it comes back.
RETRY_MS = 1_000
# How soon storage that was away is asked again.
RETRY_S = 2.0
PIECE_BYTES = 16_384
HEADERS = {"X-Accel-Buffering": "no"}
MEDIA_TYPE = "text/event-stream; charset=utf-8"
_HEARTBEAT = b": heartbeat\n\n"


class BatchProgress(msgspec.Struct):
    id: str
    object: str
    request_counts: schemas.RequestCounts
    usage: schemas.BatchUsage


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
            # By this a browser knows that it need not come back.
            return Response(None, 204)
        if request.method == "HEAD":
            return Response(None, 200, HEADERS, MEDIA_TYPE)
        log_of_job = EventLog(self._context, position)
        if not await log_of_job.is_possible(job):
            log_of_job = EventLog(self._context, EventPosition(), is_reset=True)
        return EventStream(self._watch, self._slots, job, log_of_job)


class EventLog:
    """The events of one job from one position on, as bytes. It sends no event twice, whatever happens in between."""

    def __init__(self, context: WebContext, position: EventPosition, *, is_reset: bool = False) -> None:
        self._store = context.store
        self._blobs = context.blobs
        self._position = position
        self._is_reset = is_reset

    @property
    def is_over(self) -> bool:
        return self._position.step == ENDED

    async def is_possible(self, job: Job) -> bool:
        """Whether the position is one that this job's events have."""
        at = self._position
        return await is_line_end(self._store, self._blobs, job, "output", at.output_at) and await is_line_end(
            self._store, self._blobs, job, "errors", at.error_at
        )

    async def news(self, job: Job) -> AsyncGenerator[bytes, None]:
        """What is new with the job as it stands now, in pieces of whole events: statuses, items, progress, and the end."""
        if self._is_reset:
            self._is_reset = False
            yield _event("reset", None, {"id": job.id, "object": "batch.reset"})
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


class EventStream(Response):
    """The answer to one reader. It reads no faster than the client takes, so a slow client is only late."""

    def __init__(self, watch: JobWatch, slots: TenantSlots, job: Job, log_of_job: EventLog) -> None:
        super().__init__(None, 200, HEADERS, MEDIA_TYPE)
        del self.headers["content-length"]
        self._watch = watch
        self._slots = slots
        self._job = job
        self._log = log_of_job

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        open_call: OpenCall | None = scope["tidegate.intake"].open_call
        async with self._slots.taken(self._job.tenant_id):
            with self._watch.following(self._job) as follower:
                if open_call is not None:
                    open_call.when_cut(follower.wake)
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                async with while_the_client_stays(receive):
                    await send(body_part(b"retry: %d\n\n" % RETRY_MS, more=True))
                    await self._tell(follower, open_call, send)
                    await send(body_part(b"", more=False))

    async def _tell(self, follower: JobFollower, open_call: OpenCall | None, send: Send) -> None:
        """Tell everything up to the end of the job, of the key or of this server."""
        has_news, is_behind = True, False
        while follower.job is not None:
            if open_call is not None and open_call.is_cut:
                problem = refusal()
                event = _event("error", None, {"code": problem.code, "message": problem.message})
                await send(body_part(event, more=True))
                return
            if has_news or is_behind:
                is_behind = not await self._tell_news(follower.job, send)
            else:
                await send(body_part(_HEARTBEAT, more=True))
            if self._log.is_over or follower.is_stopping:
                return
            has_news = await follower.wait(RETRY_S if is_behind else HEARTBEAT_S)

    async def _tell_news(self, job: Job, send: Send) -> bool:
        """Send what is new; False when storage is away, and the rest is to be sent later."""
        try:
            async with aclosing(self._log.news(job)) as news:
                async for piece in news:
                    await send_parts(send, piece)
        except TidegateError as error:
            log.warning("event_stream_read_failed", job=job.id, error=str(error))
            return False
        return True


def _last_position(request: Request) -> EventPosition:
    text = request.headers.get("last-event-id")
    if text is None:
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
    """One event, whole: text that a client might take for the end of a line is escaped."""
    named = b"" if number is None else b"id: %d\n" % number
    return b"%bevent: %b\ndata: %b\n\n" % (named, kind.encode(), escape_line_breaks(msgspec.json.encode(data)))
