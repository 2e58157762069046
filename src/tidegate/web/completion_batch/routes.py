"""The completion-batch API, made of jobs: inline items become an input file, and from there on the
job is like any other.

A workspace is a tenant, by its id or its name, and an environment is a name within it. This door
shows only batches that it made.
"""

import contextlib
import re
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tidegate.core import ids, keys, window
from tidegate.core.errors import ApiProblem
from tidegate.core.input.lines import MIXED, MODEL_BYTES_MAX
from tidegate.core.nouns import Caller, Job, JobRequest
from tidegate.core.policy.policy_rules import allows
from tidegate.core.states import JOB_ENDED
from tidegate.stages.accept import Upload
from tidegate.web.completion_batch import shapes
from tidegate.web.completion_batch.events import ItemEvents
from tidegate.web.completion_batch.inline_items import FRAME_BYTES, MESSAGES, InlineItems
from tidegate.web.completion_batch.items import ItemReader, OpenItems, open_items
from tidegate.web.completion_batch.options import SYNC, CreateOptions, read_options
from tidegate.web.completion_batch.paths import ONE, PATH, SCOPE
from tidegate.web.completion_batch.shapes import BatchEntity, CallbackShown, DoorNotes
from tidegate.web.context import WebContext
from tidegate.web.http import content
from tidegate.web.http.answers import json_answer
from tidegate.web.http.intake import Intake
from tidegate.web.http.routes import Guarded
from tidegate.web.jobs.event_stream import HEADERS, MEDIA_TYPE, EventStream
from tidegate.web.jobs.front_door import DoorParts
from tidegate.web.requests import requests

FILENAME = "completion_batch.jsonl"
WRITE_BYTES = 65_536
PIECE_BYTES = 32_768
_EVENT_NUMBER = re.compile(r"[0-9]{1,15}", re.ASCII)


class CompletionBatchRoutes:
    def __init__(self, parts: DoorParts) -> None:
        self._context = parts.context
        self._store = parts.context.store
        self._reception = parts.reception
        self._creation = parts.creation
        self._watch = parts.watch
        # Bounds of a tenant's simultaneous creates and open streams.
        self._uploads, self._streams = parts.uploads, parts.streams
        self._reader = ItemReader(self._store, parts.context.blobs)

    def routes(self) -> list[Guarded]:
        return [
            Guarded("POST", PATH, SCOPE, self.create, makes_work=True),
            Guarded("GET", ONE, SCOPE, self.retrieve),
            Guarded("POST", f"{ONE}/cancel", SCOPE, self.cancel),
            # Before the route of items, whose path would match too; no item is called `events`.
            Guarded("GET", f"{ONE}/events", SCOPE, self.events),
            Guarded("GET", f"{ONE}/{{item_id}}", SCOPE, self.retrieve_item),
        ]

    async def create(self, request: Request, caller: Caller) -> Response:
        requests.refuse_unknown(request.query_params, ())
        workspace, environment = await self._place(request, caller)
        key = requests.idempotency_key(request)
        requests.require_json(request)
        position = _last_event(request)
        async with contextlib.AsyncExitStack() as slot:
            async with self._reception.running_keys.hold_key(caller.tenant_id, "batches", key):
                async with (
                    self._uploads.taken(caller.tenant_id),
                    self._received(request, caller) as (upload, items),
                ):
                    options = read_options(items.finish(), self._context.settings.callbacks.rules())
                    if options.type == SYNC:
                        if position and key is None:
                            raise _new_batch_has_no_events()
                        # Take the slot first: a batch whose stream would be refused is not created.
                        await slot.enter_async_context(self._streams.taken(caller.tenant_id))
                    file = await upload.keep(
                        caller,
                        purpose="batch",
                        filename=FILENAME,
                        expires_after_ms=self._context.settings.retention.file_s * 1000,
                        idempotency_key=_file_key(key),
                        quotas=self._context.settings.limits.quotas(),
                    )
                notes = DoorNotes(
                    workspace,
                    environment,
                    options.type,
                    items.count,
                    items.estimated_tokens,
                    caller.user,
                    options.shown_capacity,
                    _callback_shown(options),
                )
                job = await self._make(caller, file.id, options, notes, key)
            if options.type == SYNC:
                events = await self._events_behind(job, notes, position)
                return _all_was_read() if events is None else EventStream(self._watch, slot.pop_all(), job, events)
        entity = shapes.created_entity(job, notes)
        if entity.callback_options is not None:
            endpoint = await self._store.webhook_endpoint_of_job(caller.tenant_id, job.id)
            secret = endpoint.secret.reveal() if endpoint else None
            shown = msgspec.structs.replace(entity.callback_options, signing_secret=secret)
            entity = msgspec.structs.replace(entity, callback_options=shown)
        return json_answer(entity, 201)

    async def retrieve(self, request: Request, caller: Caller) -> Response:
        query = request.query_params
        requests.refuse_unknown(query, ("includesItems", "includesUsers"))
        job, notes, running = await self._progress(request, caller)
        shows_users = requests.choice(query, "includesUsers", ("true", "false")) != "false"
        shows_items = requests.choice(query, "includesItems", ("true", "false")) != "false" and request.method != "HEAD"
        state = OpenItems()
        if shows_items:
            look = await self._store.job_look(caller.tenant_id, job.id)
            if look is None:
                raise shapes.no_such_batch(job.id)
            job, running, state = look.job, look.running, open_items(look.leased, look.tries)
        entity = shapes.batch_entity(job, notes, running)
        if shows_users:
            entity = await self._with_users(entity, job, notes)
        if not shows_items:
            return json_answer(entity)
        stream = self._with_items(entity, self._reader.all(job, notes, state))
        # Fetch the first piece before the head goes out, so that unreachable storage is still a
        # 503.
        first = await anext(stream)
        return content.Download(first, stream, 200, {}, "application/json")

    async def retrieve_item(self, request: Request, caller: Caller) -> Response:
        requests.refuse_unknown(request.query_params, ())
        job, notes, _ = await self._progress(request, caller)
        found = ids.split_item_id(str(request.path_params["item_id"]))
        if found is None or found[0] != ids.job_part(job.id) or found[1] >= notes.total:
            raise shapes.no_such_item()
        entity = await self._reader.one(job, notes, found[1])
        if entity is None:
            raise shapes.no_such_item()
        return json_answer(entity)

    async def events(self, request: Request, caller: Caller) -> Response:
        requests.refuse_unknown(request.query_params, ())
        job, notes, _ = await self._progress(request, caller)
        events = await self._events_behind(job, notes, _last_event(request))
        if events is None:
            return _all_was_read()
        if request.method == "HEAD":
            return Response(None, 200, HEADERS, MEDIA_TYPE)
        return EventStream(self._watch, self._streams.taken(caller.tenant_id), job, events)

    async def cancel(self, request: Request, caller: Caller) -> Response:
        requests.refuse_unknown(request.query_params, ())
        job, notes, _ = await self._progress(request, caller)
        if await self._reception.replayed(lambda: self._store.cancel_job(caller.tenant_id, job.id)) is None:
            raise shapes.no_such_batch(job.id)
        self._context.wakes.jobs.notify()
        job, notes, running = await self._progress(request, caller)
        return json_answer(shapes.batch_entity(job, notes, running), 201)

    async def _make(
        self, caller: Caller, file_id: str, options: CreateOptions, notes: DoorNotes, key: str | None
    ) -> Job:
        wanted = JobRequest(
            MIXED,
            file_id,
            window.DAY_MS,
            window.DEFAULT_TEXT,
            invalid_lines="error_file",
            limits=options.limits,
            webhook=options.webhook,
            door=msgspec.json.encode(notes).decode(),
        )
        return await self._creation.create_inline(caller, wanted, key, _file_key(key))

    async def _events_behind(self, job: Job, notes: DoorNotes, position: int) -> ItemEvents | None:
        """Return the events of a batch after this position; None if there are no more and will be
        none.
        """
        total = await self._store.job_event_total(job.id)
        if position > total + (job.state in JOB_ENDED):
            raise _bad_event()
        if position > total:
            return None
        if not await self._reader.keeps_results(job):
            raise shapes.no_results()
        return ItemEvents(self._store, self._reader, notes, position)

    async def _place(self, request: Request, caller: Caller) -> tuple[str, str]:
        """Return the workspace and the environment of a create; refuse those that the caller may
        not use.
        """
        workspace, environment = _named(request)
        if not await self._owns(caller, workspace):
            message = "There is no such workspace. It is the id or the name of the tenant that your key belongs to."
            raise ApiProblem(404, "workspace_not_found", message, param="workspaceId")
        if not keys.ENVIRONMENT.fullmatch(environment):
            message = "`environmentId` must have 1 to 64 letters, digits, hyphens and underscores."
            raise ApiProblem(400, "invalid_parameter", message, param="environmentId")
        if not _is_open(caller, environment):
            message = "This key is bound to other environments. Name one of its own, or use another key."
            raise ApiProblem(403, "api_key_environment_not_authorized", message, param="environmentId")
        return workspace, environment

    async def _owns(self, caller: Caller, workspace: str) -> bool:
        return workspace == caller.tenant_id or workspace == await self._store.tenant_name(caller.tenant_id)

    async def _progress(self, request: Request, caller: Caller) -> tuple[Job, DoorNotes, int]:
        """Return the caller's batch in the environment that the path names, and how many of its
        items are running.
        """
        workspace, environment = _named(request)
        job_id = str(request.path_params["completion_batch_id"])
        if not ids.is_valid("batch", job_id) or not await self._owns(caller, workspace):
            raise shapes.no_such_batch(job_id)
        found = await self._store.job_progress(caller.tenant_id, job_id)
        notes = shapes.notes_of(found[0]) if found is not None else None
        if found is None or notes is None or notes.environment != environment or not _is_open(caller, environment):
            raise shapes.no_such_batch(job_id)
        return found[0], notes, found[1]

    async def _with_users(self, entity: BatchEntity, job: Job, notes: DoorNotes) -> BatchEntity:
        key = await self._store.get_key(job.key_id) if job.key_id else None
        return msgspec.structs.replace(
            entity,
            created_by_user={"id": notes.user, "name": notes.user} if notes.user else None,
            created_by_api_key={"apiKeyId": str(key["id"]), "name": str(key["label"])} if key else None,
        )

    async def _with_items(
        self, entity: BatchEntity, encoded: AsyncGenerator[bytes, None]
    ) -> AsyncGenerator[bytes, None]:
        """Yield the batch with all its items, piece by piece."""
        piece = bytearray(msgspec.json.encode(entity)[:-2])
        comma = b""
        async with aclosing(encoded) as items:
            async for text in items:
                piece += comma + text
                comma = b","
                if len(piece) >= PIECE_BYTES:
                    yield bytes(piece)
                    piece.clear()
        yield bytes(piece) + b"]}"

    @contextlib.asynccontextmanager
    async def _received(self, request: Request, caller: Caller) -> AsyncIterator[tuple[Upload, InlineItems]]:
        """Receive all items as the lines of an upload.

        The upload is thrown away if the block fails.
        """
        intake: Intake = request.scope["tidegate.intake"]
        settings = self._context.settings
        limits = settings.limits
        endpoints = (*requests.ENDPOINTS, MESSAGES, *settings.endpoints)
        items = InlineItems(self._admission(caller), endpoints, limits.items_max, limits.line_bytes_max - FRAME_BYTES)
        upload = await self._reception.begin_upload(limits.inline_bytes_max + FRAME_BYTES * limits.items_max)
        try:
            lines = bytearray()
            async for piece in intake.chunks(limits.inline_bytes_max):
                for line in items.feed(piece):
                    lines += line
                if len(lines) >= WRITE_BYTES:
                    await upload.write(bytes(lines))
                    lines.clear()
            await upload.write(bytes(lines))
            yield upload, items
        except BaseException:
            await upload.abandon()
            raise

    def _admission(self, caller: Caller) -> "ResourceAdmission":
        return ResourceAdmission(caller, self._context)


class ResourceAdmission:
    """The refusal of resources that a caller may not name."""

    def __init__(self, caller: Caller, context: WebContext) -> None:
        self._caller = caller
        self._model_of = context.model_of()
        self._router = context.router

    def __call__(self, resource_id: str, param: str) -> None:
        if not 0 < len(resource_id.encode()) <= MODEL_BYTES_MAX or not resource_id.isprintable():
            message = f"`{param}` must have 1 to {MODEL_BYTES_MAX} bytes of printable text."
            raise ApiProblem(400, "invalid_parameter", message, param=param)
        if not allows(self._caller.models, self._caller.resources, resource_id, self._model_of):
            message = f"`{param}`: this key does not allow the resource. Name one that it allows, or use another key."
            raise ApiProblem(403, "api_key_resource_not_authorized", message, param=param)
        if not self._router.knows(resource_id):
            message = f"`{param}` names no resource and no model of this server: check it against GET /v1/models."
            raise ApiProblem(400, "resource_not_found", message, param=param)


def _named(request: Request) -> tuple[str, str]:
    return str(request.path_params["workspace_id"]), str(request.path_params["environment_id"])


def _file_key(key: str | None) -> str | None:
    """Return the idempotency key of a create's input.

    It has a space, so no key of the caller's own uploads can be equal.
    """
    return f"{key} {FILENAME}" if key else None


def _is_open(caller: Caller, environment: str) -> bool:
    return not caller.environments or environment in caller.environments


def _callback_shown(options: CreateOptions) -> CallbackShown | None:
    webhook = options.webhook
    return CallbackShown(webhook.url, options.callback_events, sorted(webhook.headers)) if webhook else None


def _all_was_read() -> Response:
    # A 204 stops a browser's event source from connecting again.
    return Response(None, 204)


def _last_event(request: Request) -> int:
    """Return the number of the last event that the caller saw; 0 without one."""
    text = request.headers.get("last-event-id")
    if not text:
        # An event source sends an empty id before its first event.
        return 0
    if not _EVENT_NUMBER.fullmatch(text):
        raise _bad_event()
    return int(text)


def _new_batch_has_no_events() -> ApiProblem:
    message = (
        "`Last-Event-ID` on a create needs the Idempotency-Key of the first one: without it this would be another batch. "
        "Or read the events of the first with GET .../{batchId}/events."
    )
    return ApiProblem(400, "invalid_parameter", message, param="Last-Event-ID")


def _bad_event() -> ApiProblem:
    message = "`Last-Event-ID` must be the id of an event of this batch. Leave it out to begin at the start."
    return ApiProblem(400, "invalid_parameter", message, param="Last-Event-ID")
