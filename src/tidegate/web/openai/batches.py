"""OpenAI's Batches API, made of jobs, and the output of a job while it grows."""

from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response

from tidegate.core import ids
from tidegate.core.job_lists import JobFilter, JobSort
from tidegate.core.nouns import Caller, Job
from tidegate.core.problems import batch_not_ended, no_such_batch, no_such_file
from tidegate.core.states import JOB_ENDED
from tidegate.stages.accept import Reception
from tidegate.web.context import WebContext
from tidegate.web.http.answers import json_answer, page_of
from tidegate.web.http.content import FileContents
from tidegate.web.http.filename import attachment
from tidegate.web.http.routes import Guarded
from tidegate.web.jobs.creation import JobCreation
from tidegate.web.jobs.explanation import Explainer
from tidegate.web.jobs.forecast import Forecaster
from tidegate.web.jobs.forecast_shapes import Forecast
from tidegate.web.jobs.job_wait import WAIT_PREFERENCE, JobWait, preferred_wait_s
from tidegate.web.jobs.limit_rooms import LimitRooms
from tidegate.web.jobs.validation import JobValidation
from tidegate.web.openai import schemas
from tidegate.web.requests import requests
from tidegate.web.requests.control_requests import BatchChange, CanaryWord
from tidegate.web.requests.filter_requests import job_filter, job_sort
from tidegate.web.requests.retry_requests import RetryRequest, retry_choice

LIST_COUNT = 20
LIST_COUNT_MAX = 100
FINAL_HEADER = "X-Tidegate-Final"
GROWING_PREFERENCE = "growing-output"


class BatchRoutes:
    def __init__(self, context: WebContext, reception: Reception, creation: JobCreation, wait: JobWait) -> None:
        self._store = context.store
        self._contents = FileContents(context.store, context.blobs)
        self._settings = context.settings
        self._wakes = context.wakes
        self._reception = reception
        self._creation = creation
        self._wait = wait
        self._forecaster = Forecaster(context)
        self._validation = JobValidation(context, creation)
        self._rooms = LimitRooms(context)
        self._explainer = Explainer(context.store, context.blobs, context.live_settings, context.router)

    def routes(self) -> list[Guarded]:
        return [
            Guarded("POST", "/v1/batches", "batches:write", self.create, makes_work=True),
            Guarded("GET", "/v1/batches", "batches:read", self.list),
            Guarded("GET", "/v1/limits", "batches:read", self.limits),
            Guarded("GET", "/v1/batches/{batch_id}", "batches:read", self.retrieve),
            Guarded("POST", "/v1/batches/{batch_id}", "batches:write", self.change),
            Guarded("DELETE", "/v1/batches/{batch_id}", "batches:write", self.delete),
            Guarded("GET", "/v1/batches/{batch_id}/explain", "batches:read", self.explain),
            Guarded("POST", "/v1/batches/{batch_id}/cancel", "batches:cancel", self.cancel),
            Guarded("POST", "/v1/batches/{batch_id}/pause", "batches:write", self.pause),
            Guarded("POST", "/v1/batches/{batch_id}/resume", "batches:write", self.resume),
            Guarded("POST", "/v1/batches/{batch_id}/canary", "batches:write", self.canary),
            Guarded("POST", "/v1/batches/{batch_id}/retry", "batches:write", self.retry),
            Guarded("GET", "/v1/batches/{batch_id}/output", "files:read", self.output),
            Guarded("GET", "/v1/batches/{batch_id}/errors", "files:read", self.errors),
        ]

    async def create(self, request: Request, caller: Caller) -> Response:
        key = requests.idempotency_key(request)
        async with self._reception.running_keys.hold_key(caller.tenant_id, "batches", key):
            body = await requests.json_body(request, requests.BatchCreate, self._settings.limits.body_bytes_max)
            wanted = requests.job_request(body, self._settings)
            if body.validate_only:
                return json_answer(schemas.validation(await self._validation.validate(caller, wanted)))
            job, warnings = await self._creation.create(caller, wanted, key)
        return json_answer(schemas.batch(job, Forecast(warnings=warnings), await self._webhook_secret(job)))

    async def retry(self, request: Request, caller: Caller) -> Response:
        job_id, key = self._job_id(request), requests.idempotency_key(request)
        async with self._reception.running_keys.hold_key(caller.tenant_id, "retries", key):
            body = await requests.optional_json_body(request, RetryRequest, self._settings.limits.body_bytes_max)
            job = await self._creation.retry(caller, job_id, retry_choice(body), key)
        if job is None:
            raise no_such_batch(job_id)
        return json_answer(schemas.batch(job, signing_secret=await self._webhook_secret(job)))

    async def _webhook_secret(self, job: Job) -> str | None:
        endpoint = await self._store.webhook_endpoint_of_job(job.tenant_id, job.id) if job.webhook else None
        return endpoint.secret.reveal() if endpoint else None

    async def list(self, request: Request, caller: Caller) -> Response:
        query = request.query_params
        wanted, sort = job_filter(query, ("after", "limit", "sort")), job_sort(query)
        count = requests.limit(query, LIST_COUNT, LIST_COUNT_MAX)
        after = requests.after(query, "batch")
        if wanted is None and sort is JobSort.CREATED:
            found = await self._store.list_jobs(caller.tenant_id, after=after, count_max=count + 1)
        else:
            found = await self._store.search_jobs(
                caller.tenant_id, wanted or JobFilter(), after=after, count_max=count + 1, sort=sort
            )
        if found is None:
            raise requests.unknown_cursor()
        shown = found[:count]
        page = page_of([schemas.batch(job) for job in shown], [job.id for job in shown], has_more=len(found) > count)
        return json_answer(page)

    async def limits(self, request: Request, caller: Caller) -> Response:
        requests.refuse_unknown(request.query_params, ())
        return json_answer(schemas.LimitList("list", await self._rooms.of_caller(caller)))

    async def explain(self, request: Request, caller: Caller) -> Response:
        requests.refuse_unknown(request.query_params, ())
        job = await self._job(request, caller)
        return json_answer(await self._explainer.explanation(job, for_owner=True))

    async def retrieve(self, request: Request, caller: Caller) -> Response:
        job = await self._job(request, caller)
        wait_s = preferred_wait_s(request)
        is_waited = wait_s > 0 and self._wait.has_room(job)
        if is_waited:
            begun = schemas.status(job)
            changed = await self._wait.until(
                request, job, wait_s, lambda now: now.state in JOB_ENDED or schemas.status(now) != begun
            )
            if changed is None:
                raise no_such_batch(job.id)
            job = changed
        shown = schemas.batch(job, await self._forecaster.of_job(job))
        applied = [WAIT_PREFERENCE] if is_waited else []
        if GROWING_PREFERENCE in requests.preferences(request) and not job.ordered and not job.parts.all:
            shown.output_file_id, shown.error_file_id = job.output_file_id, job.error_file_id
            applied.append(GROWING_PREFERENCE)
        answer = json_answer(shown)
        if applied:
            answer.headers["Preference-Applied"] = ", ".join(applied)
        return answer

    async def delete(self, request: Request, caller: Caller) -> Response:
        job = await self._job(request, caller)
        if job.state not in JOB_ENDED:
            raise batch_not_ended()
        await self._reception.replayed(lambda: self._store.forget_job(job.id))
        return json_answer(schemas.BatchDeleted(job.id, "batch.deleted", deleted=True))

    async def cancel(self, request: Request, caller: Caller) -> Response:
        return await self._control(request, caller, self._store.cancel_job)

    async def pause(self, request: Request, caller: Caller) -> Response:
        return await self._control(request, caller, self._store.pause_job)

    async def resume(self, request: Request, caller: Caller) -> Response:
        return await self._control(request, caller, self._store.resume_job)

    async def canary(self, request: Request, caller: Caller) -> Response:
        await self._job(request, caller)
        body = await requests.json_body(request, CanaryWord, self._settings.limits.body_bytes_max)
        goes_on = body.action == "continue"
        return await self._control(
            request, caller, lambda tenant_id, job_id: self._store.end_canary(tenant_id, job_id, goes_on=goes_on)
        )

    async def change(self, request: Request, caller: Caller) -> Response:
        await self._job(request, caller)
        body = await requests.json_body(request, BatchChange, self._settings.limits.body_bytes_max)
        wanted = requests.job_change(body, self._settings)
        return await self._control(
            request, caller, lambda tenant_id, job_id: self._store.change_job(tenant_id, job_id, wanted)
        )

    async def _control(
        self, request: Request, caller: Caller, verb: Callable[[str, str], Awaitable[Job | None]]
    ) -> Response:
        """Change a job, and notify those who watch it."""
        job_id = self._job_id(request)
        job = await self._reception.replayed(lambda: verb(caller.tenant_id, job_id))
        if job is None:
            raise no_such_batch(job_id)
        self._wakes.jobs.notify()
        return json_answer(schemas.batch(job))

    async def output(self, request: Request, caller: Caller) -> Response:
        job = await self._job(request, caller)
        return await self._growing(request, job, job.output_file_id, job.output_bytes, "output")

    async def errors(self, request: Request, caller: Caller) -> Response:
        job = await self._job(request, caller)
        return await self._growing(request, job, job.error_file_id, job.error_bytes, "error")

    async def _growing(self, request: Request, job: Job, file_id: str | None, size_bytes: int, name: str) -> Response:
        """Return what is finished so far.

        Bytes that were shown keep their place, so a reader can go on where it stopped.

        An ordered job is rewritten at its end, so until then it shows nothing.
        """
        is_final = job.state in JOB_ENDED
        if is_final and file_id is not None and await self._store.get_file(job.tenant_id, file_id) is None:
            raise no_such_file(file_id, "batch_id")
        if file_id is None or (job.ordered and not is_final):
            file_id, size_bytes = None, 0
        headers = {
            FINAL_HEADER: "true" if is_final else "false",
            "Content-Disposition": attachment(f"{job.id}_{name}.jsonl"),
        }
        return await self._contents.answer(request, file_id, size_bytes, headers)

    async def _job(self, request: Request, caller: Caller) -> Job:
        job_id = self._job_id(request)
        job = await self._store.get_job(caller.tenant_id, job_id)
        if job is None:
            raise no_such_batch(job_id)
        return job

    @staticmethod
    def _job_id(request: Request) -> str:
        job_id = str(request.path_params["batch_id"])
        if not ids.is_valid("batch", job_id):
            raise no_such_batch(job_id)
        return job_id
