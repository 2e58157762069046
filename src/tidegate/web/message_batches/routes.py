"""Anthropic's Message Batches, made of jobs: inline requests become an input file, and from there
on the job is like any other.

`msgbatch_X` here is `batch_X` at OpenAI's door. This door shows only jobs for /v1/messages, because
the results of others have another shape.
"""

import contextlib
from collections.abc import AsyncIterator

from starlette.requests import Request
from starlette.responses import Response

from tidegate.core import window
from tidegate.core.errors import ApiProblem
from tidegate.core.job_shape import JobShape
from tidegate.core.nouns import Caller, Job, JobRequest
from tidegate.core.problems import shown_id
from tidegate.core.states import JOB_ENDED
from tidegate.stages.accept import Reception, Upload
from tidegate.upstream.calls.translation import MESSAGES
from tidegate.web.context import WebContext
from tidegate.web.http import content
from tidegate.web.http.answers import json_answer
from tidegate.web.http.client_address import networks_of, public_base
from tidegate.web.http.intake import Intake
from tidegate.web.http.routes import Guarded
from tidegate.web.http.tenant_slots import TenantSlots
from tidegate.web.jobs.creation import JobCreation
from tidegate.web.message_batches import schemas
from tidegate.web.message_batches.inline_requests import FRAME_BYTES, InlineRequests
from tidegate.web.message_batches.paths import ONE, PATH
from tidegate.web.message_batches.results import results
from tidegate.web.requests import requests

LIST_COUNT = 20
LIST_COUNT_MAX = 1_000
FILENAME = "message_batch.jsonl"
WRITE_BYTES = 65_536
MEDIA_TYPE = "application/x-jsonl"
_SANDBOX = "sandbox; default-src 'none'"


class MessageBatchRoutes:
    def __init__(self, context: WebContext, reception: Reception, creation: JobCreation, slots: TenantSlots) -> None:
        self._store = context.store
        self._blobs = context.blobs
        self._limits = context.settings.limits
        self._keep_s = context.settings.retention.file_s
        self._wakes = context.wakes
        self._trusted_proxies = networks_of(context.settings.server.trusted_proxies)
        self._reception = reception
        self._creation = creation
        self._slots = slots

    def routes(self) -> list[Guarded]:
        return [
            Guarded("POST", PATH, "batches:write", self.create, makes_work=True),
            Guarded("GET", PATH, "batches:read", self.list),
            Guarded("GET", ONE, "batches:read", self.retrieve),
            Guarded("DELETE", ONE, "batches:write", self.delete),
            Guarded("POST", f"{ONE}/cancel", "batches:cancel", self.cancel),
            Guarded("GET", f"{ONE}/results", "files:read", self.results),
        ]

    async def create(self, request: Request, caller: Caller) -> Response:
        key = requests.idempotency_key(request)
        requests.refuse_unknown(request.query_params, ("beta",))
        requests.require_json(request)
        # It has a space, so no key of the caller's own uploads can be equal.
        file_key = f"{key} {FILENAME}" if key else None
        async with self._reception.running_keys.hold_key(caller.tenant_id, "batches", key):
            async with self._slots.taken(caller.tenant_id), self._received(request) as upload:
                file = await upload.keep(
                    caller,
                    purpose="batch",
                    filename=FILENAME,
                    expires_after_ms=self._keep_s * 1000,
                    idempotency_key=file_key,
                    quotas=self._limits.quotas(),
                )
            shape = JobShape(betas=_item_betas(request))
            wanted = JobRequest(
                MESSAGES, file.id, window.DAY_MS, window.DEFAULT_TEXT, invalid_lines="error_file", shape=shape
            )
            job = await self._creation.create_inline(caller, wanted, key, file_key)
        return json_answer(schemas.message_batch(job, file.line_count, self._base(request)))

    async def list(self, request: Request, caller: Caller) -> Response:
        query = request.query_params
        requests.refuse_unknown(query, ("after_id", "before_id", "limit", "beta"))
        count = requests.limit(query, LIST_COUNT, LIST_COUNT_MAX)
        after, before = self._cursor(request, "after_id"), self._cursor(request, "before_id")
        if after is not None and before is not None:
            raise _bad_cursor("before_id", "Give `after_id` or `before_id`, not both.")
        found = await self._store.list_jobs(
            caller.tenant_id, after=after, before=before, count_max=count + 1, endpoint=MESSAGES
        )
        if found is None:
            raise _bad_cursor("after_id" if after else "before_id")
        # One too many was read: it is the one farthest from the cursor.
        shown = found[-count:] if before is not None else found[:count]
        base = self._base(request)
        data = [schemas.message_batch(job, await self._total(job), base) for job in shown]
        page = schemas.MessageBatchPage(
            data, len(found) > count, data[0].id if data else None, data[-1].id if data else None
        )
        return json_answer(page)

    async def retrieve(self, request: Request, caller: Caller) -> Response:
        job = await self._job(request, caller)
        return json_answer(schemas.message_batch(job, await self._total(job), self._base(request)))

    async def cancel(self, request: Request, caller: Caller) -> Response:
        job = await self._job(request, caller)
        try:
            cancelled = await self._reception.replayed(lambda: self._store.cancel_job(caller.tenant_id, job.id))
        except ApiProblem as problem:
            raise _not_cancellable(problem) from problem
        if cancelled is None:
            raise _no_such_batch(request)
        self._wakes.jobs.notify()
        return json_answer(schemas.message_batch(cancelled, await self._total(cancelled), self._base(request)))

    async def delete(self, request: Request, caller: Caller) -> Response:
        job = await self._job(request, caller)
        _require_ended(job)
        await self._reception.replayed(lambda: self._store.forget_job(job.id))
        # The file stays if another batch, such as a retry, uses it.
        await self._reception.take_back_file(caller.tenant_id, job.input_file_id, None)
        return json_answer(schemas.MessageBatchDeleted(schemas.public_id(job.id), "message_batch_deleted"))

    async def results(self, request: Request, caller: Caller) -> Response:
        job = await self._job(request, caller)
        _require_ended(job)
        headers = {"Content-Security-Policy": _SANDBOX}
        if request.method == "HEAD":
            return Response(None, 200, headers, MEDIA_TYPE)
        stream = results(self._store, self._blobs, job)
        # Fetch the first piece before the head goes out, so that unreachable storage is still a
        # 503.
        first = await anext(stream, b"")
        return content.Download(first, stream, 200, headers, MEDIA_TYPE)

    async def _job(self, request: Request, caller: Caller) -> Job:
        requests.refuse_unknown(request.query_params, ("beta",))
        job_id = schemas.job_id_of(request.path_params["message_batch_id"])
        job = await self._store.get_job(caller.tenant_id, job_id) if job_id is not None else None
        if job is None or job.endpoint != MESSAGES:
            raise _no_such_batch(request)
        return job

    async def _total(self, job: Job) -> int:
        """Return the number of a job's requests; before ingest, the lines of its input."""
        if job.work_blob_id is not None:
            return job.item_count
        file = await self._store.get_file(job.tenant_id, job.input_file_id)
        return file.line_count if file is not None else 0

    def _base(self, request: Request) -> str:
        peer = request.client.host if request.client else ""
        return public_base(peer, request.headers, request.url.scheme, self._trusted_proxies)

    @staticmethod
    def _cursor(request: Request, name: str) -> str | None:
        text = requests.one(request.query_params, name)
        if text is None:
            return None
        job_id = schemas.job_id_of(text)
        if job_id is None:
            raise _bad_cursor(name)
        return job_id

    @contextlib.asynccontextmanager
    async def _received(self, request: Request) -> AsyncIterator[Upload]:
        """Receive all requests as the lines of an upload.

        The upload is thrown away if the block fails.
        """
        intake: Intake = request.scope["tidegate.intake"]
        limits = self._limits
        count_max = limits.message_batch_items_max
        inline = InlineRequests(MESSAGES, count_max, limits.line_bytes_max - FRAME_BYTES)
        upload = await self._reception.begin_upload(limits.inline_bytes_max + FRAME_BYTES * count_max)
        try:
            lines = bytearray()
            async for piece in intake.chunks(limits.inline_bytes_max):
                for line in inline.feed(piece):
                    lines += line
                if len(lines) >= WRITE_BYTES:
                    await upload.write(bytes(lines))
                    lines.clear()
            inline.finish()
            await upload.write(bytes(lines))
            yield upload
        except BaseException:
            await upload.abandon()
            raise


def _item_betas(request: Request) -> str:
    """Return the betas for the requests of a batch: all but that of this API itself."""
    named = (one.strip() for one in requests.anthropic_betas(request).split(","))
    return ",".join(one for one in named if one and not one.startswith("message-batches-"))


def _require_ended(job: Job) -> None:
    if job.state not in JOB_ENDED:
        raise ApiProblem(
            409,
            "batch_not_ended",
            "This message batch has not ended. Wait until its processing_status is `ended`, or cancel it first.",
            param="message_batch_id",
        )


def _not_cancellable(problem: ApiProblem) -> ApiProblem:
    """Return this refusal in the words of this API."""
    return ApiProblem(
        problem.status,
        problem.code,
        "This message batch has ended or is about to, so it cannot be canceled. Its results stay as they are.",
        param="message_batch_id",
    )


def _no_such_batch(request: Request) -> ApiProblem:
    return ApiProblem(
        404,
        "batch_not_found",
        f"No message batch found with id '{shown_id(request.path_params['message_batch_id'])}'. List yours with GET {PATH}.",
        param="message_batch_id",
    )


def _bad_cursor(name: str, message: str = "") -> ApiProblem:
    text = message or f"`{name}` must be the id of one of yours, from the page before. Begin again without it."
    return ApiProblem(400, "invalid_parameter", text, param=name)
