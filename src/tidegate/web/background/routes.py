"""Background responses: `background: true` on POST /v1/responses makes a job of one item, which
outlives this process and the client.

A response is built from its job: the request is the job's input, and the answer is the one line of
its result files. Nothing else is kept, so budgets, guardrails, retries, deadlines and restarts work
as for a batch of one line.
"""

import functools

from starlette.requests import Request
from starlette.responses import Response

from tidegate.core import ids
from tidegate.core.answers.outcome_lines import ItemError, OutcomeLine
from tidegate.core.errors import ApiProblem
from tidegate.core.input.line_faults import LineFault
from tidegate.core.input.lines import LineRules
from tidegate.core.input.slices import plan_of_line
from tidegate.core.nouns import Caller, Job, ResponseTerms
from tidegate.core.problems import no_such_response
from tidegate.core.schedule.share_owner import share_owner_of
from tidegate.core.states import JOB_ENDED, JobKind, JobState
from tidegate.stages.accept import Reception
from tidegate.store.file_bytes import file_bytes
from tidegate.web.background import shapes
from tidegate.web.context import WebContext
from tidegate.web.http.answers import json_answer
from tidegate.web.http.rate_limits import LIMIT_HEADERS
from tidegate.web.http.routes import Guarded
from tidegate.web.jobs.job_wait import APPLIED, JobWait, preferred_wait_s
from tidegate.web.jobs.limit_rooms import LimitRooms
from tidegate.web.jobs.stored_lines import ERRORS, OUTPUT, StoredLines
from tidegate.web.requests import requests

ENDPOINT = "/v1/responses"
ONE = ENDPOINT + "/{response_id}"
SCOPE = "inference"
# The job's input is one line: the request between these two.
_HEAD = b'{"custom_id":"response","method":"POST","url":"/v1/responses","body":'
_TAIL = b"}\n"
_ONE_LINE = bytes.maketrans(b"\r\n", b"  ")
# The parameters of OpenAI's API for reading a response; only `stream` would change the answer, and
# is refused.
_READ_PARAMETERS = ("include", "include[]", "include_obfuscation", "starting_after", "stream")


class BackgroundRoutes:
    def __init__(self, context: WebContext, reception: Reception, wait: JobWait) -> None:
        self._store = context.store
        self._blobs = context.blobs
        self._settings = context.settings
        self._wakes = context.wakes
        self._reception = reception
        self._wait = wait
        self._rooms = LimitRooms(context)

    def routes(self) -> list[Guarded]:
        return [
            Guarded("GET", ONE, SCOPE, self.retrieve),
            Guarded("DELETE", ONE, SCOPE, self.delete),
            Guarded("POST", f"{ONE}/cancel", SCOPE, self.cancel),
        ]

    async def create(
        self, request: Request, caller: Caller, body: bytes, interactive_after_s: int | None = None
    ) -> Response:
        """Accept a background response.

        `body` is the request as the model server gets it. After `interactive_after_s` it is sent
        like an interactive call.
        """
        request.scope[LIMIT_HEADERS] = functools.partial(self._rooms.headers, caller, is_creation=False)
        key = requests.idempotency_key(request)
        limits = self._settings.limits
        line = _HEAD + body.translate(_ONE_LINE) + _TAIL
        if len(line) > limits.line_bytes_max:
            message = f"The body of a background response may have about {limits.line_bytes_max:,} bytes. Send it without `background`."
            raise ApiProblem(413, "body_too_large", message)
        rules = LineRules(ENDPOINT, line_bytes_max=limits.line_bytes_max, depth_max=limits.json_depth_max + 1)
        try:
            plan = plan_of_line(line, rules)
        except LineFault as fault:
            param = (fault.param or "").removeprefix("body.") or None
            raise ApiProblem(400, fault.code, fault.message, param=param) from None
        terms = ResponseTerms(
            ENDPOINT,
            self._settings.retention.file_s * 1000,
            share_owner_of(caller, self._settings.scheduler.scope_preference),
            limits.quotas(),
            None if interactive_after_s is None else interactive_after_s * 1000,
        )
        async with self._reception.running_keys.hold_key(caller.tenant_id, "responses", key):
            job = await self._reception.create_response(caller, line, plan, terms, key)
        self._wakes.slices.notify()
        return await self._answer_within(request, job)

    async def retrieve(self, request: Request, caller: Caller) -> Response:
        requests.refuse_unknown(request.query_params, _READ_PARAMETERS)
        if request.query_params.get("stream", "false").lower() not in ("false", "0", ""):
            message = "A background response has no stream: leave `stream` out, and ask again with the header `Prefer: wait=60`."
            raise ApiProblem(400, "unsupported_parameter", message, param="stream")
        return await self._answer_within(request, await self._job(request, caller))

    async def cancel(self, request: Request, caller: Caller) -> Response:
        """Cancel a response. A final one stays unchanged."""
        job = await self._job(request, caller)
        if not shapes.is_final(job):
            try:
                changed = await self._reception.replayed(lambda: self._store.cancel_job(caller.tenant_id, job.id))
            except ApiProblem:
                # It ended, or reached its deadline, at this very moment.
                changed = await self._store.get_job(caller.tenant_id, job.id)
            if changed is None:
                raise _absent(request)
            self._wakes.jobs.notify()
            job = changed
        return Response(await self._shown(job), media_type="application/json")

    async def delete(self, request: Request, caller: Caller) -> Response:
        """Hide a response at once.

        Its bytes are deleted with it, or when its open call has ended.
        """
        job = await self._job(request, caller)
        if not await self._reception.replayed(lambda: self._store.delete_response(caller.tenant_id, job.id)):
            raise _absent(request)
        await self._reception.replayed(lambda: self._store.forget_job(job.id))
        self._wakes.jobs.notify()
        return json_answer(shapes.ResponseDeleted(shapes.response_id(job.id), "response", True))

    async def _job(self, request: Request, caller: Caller) -> Job:
        response_id = str(request.path_params["response_id"])
        job = None
        if ids.is_valid("resp", response_id):
            job = await self._store.get_job(caller.tenant_id, shapes.job_id_of(response_id))
        if job is None or job.kind is not JobKind.RESPONSE:
            raise _absent(request)
        return job

    async def _answer_within(self, request: Request, job: Job) -> Response:
        """Return the response in its present state; if the client prefers to wait, once it is final
        or the time is over.
        """
        wait_s = preferred_wait_s(request)
        is_waited = wait_s > 0 and self._wait.has_room(job)
        if is_waited and not shapes.is_final(job):
            changed = await self._wait.until(request, job, wait_s, shapes.is_final)
            if changed is None or changed.kind is not JobKind.RESPONSE:
                raise no_such_response(shapes.response_id(job.id))
            job = changed
        answer = Response(await self._shown(job), media_type="application/json")
        if is_waited:
            answer.headers.update(APPLIED)
        return answer

    async def _shown(self, job: Job) -> bytes:
        if job.closing is JobState.CANCELLED:
            return shapes.unanswered(job, await self._asked(job), "cancelled")
        if job.answered_count:
            line = await self._line(job, job.output_file_id, job.output_bytes)
            if line.response is None:
                return shapes.unanswered(job, await self._asked(job), "failed", shapes.error_of(line.error))
            tier = None if line.tidegate is None else line.tidegate.service_tier
            return shapes.answered(job, bytes(line.response.body), tier)
        if not shapes.is_final(job):
            return shapes.unanswered(job, await self._asked(job), shapes.unfinished_status(job))
        return shapes.unanswered(job, await self._asked(job), "failed", shapes.error_of(await self._failure(job)))

    async def _failure(self, job: Job) -> ItemError | None:
        """Return why a job without an answer has none; None if it expired."""
        if job.errors:
            return ItemError(job.errors[0].code, job.errors[0].message)
        if not job.error_bytes:
            return None
        return (await self._line(job, job.error_file_id, job.error_bytes)).failure()

    async def _line(self, job: Job, file_id: str | None, size_bytes: int) -> OutcomeLine:
        """Return the one line of a result file; raise a 404 once the file is deleted."""
        if file_id is None or (job.state in JOB_ENDED and await self._store.get_file(job.tenant_id, file_id) is None):
            raise no_such_response(shapes.response_id(job.id))
        name = OUTPUT if file_id == job.output_file_id else ERRORS
        return StoredLines(self._store, job, name).one("", (await self._read(file_id, size_bytes)).rstrip(b"\n"))

    async def _asked(self, job: Job) -> bytes:
        """Return the request as it was sent."""
        file = await self._store.get_file(job.tenant_id, job.input_file_id)
        if file is None:
            raise no_such_response(shapes.response_id(job.id))
        return (await self._read(file.id, file.size_bytes))[len(_HEAD) : -len(_TAIL)]

    async def _read(self, file_id: str, size_bytes: int) -> bytes:
        return b"".join([chunk async for chunk in file_bytes(self._store, self._blobs, file_id, 0, size_bytes)])


def _absent(request: Request) -> ApiProblem:
    return no_such_response(str(request.path_params["response_id"]))
