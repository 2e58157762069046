"""Batches of all tenants, as an operator sees and repairs them. Changes are noted in the audit."""

from collections.abc import Awaitable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tidegate import metrics
from tidegate.core import ids
from tidegate.core.errors import ApiProblem
from tidegate.core.job_controls import RetryChoice
from tidegate.core.job_lists import JobFilter
from tidegate.core.nouns import Caller, Job
from tidegate.core.operations import RETRY
from tidegate.core.problems import no_batch_of_anyone
from tidegate.core.states import JOB_ENDED
from tidegate.stages.operate import ABANDON, job_verbs, retry
from tidegate.stages.ship import report_end
from tidegate.store.operators.audit import AuditFilter
from tidegate.store.store import Store
from tidegate.web.admin.audit import READ, WRITE, AuditTrail, text, trail_of
from tidegate.web.context import WebContext
from tidegate.web.http.answers import json_answer, page_of
from tidegate.web.http.routes import Guarded, RouteHandler
from tidegate.web.jobs.error_groups import ErrorReader
from tidegate.web.jobs.explanation import Explainer
from tidegate.web.jobs.forecast import Forecaster
from tidegate.web.openai import schemas
from tidegate.web.requests import requests
from tidegate.web.requests.filter_requests import job_filter, job_sort
from tidegate.web.requests.retry_requests import OperatorRetryRequest, retry_choice

LIST_COUNT = 20
LIST_COUNT_MAX = 100
CHANGES_MAX = 100


class AdminBatch(schemas.Batch):
    """A batch as its owner sees it, with the owner's organization."""

    org: str


class TimelineEntry(msgspec.Struct, frozen=True):
    """One moment of a batch's life, in unix milliseconds.

    `actor` is the operator who made a change.
    """

    at_ms: int
    event: str
    actor: str | None = None
    detail: Any = None


class Timeline(msgspec.Struct, frozen=True):
    object: str
    batch_id: str
    data: list[TimelineEntry]


class BatchActions:
    """The actions of an operator on a batch, for the admin API and the console alike."""

    def __init__(self, context: WebContext) -> None:
        self._wakes = context.wakes
        self._entropy = context.entropy
        self._verbs = job_verbs(context.entropy, context.settings.retention.failed_s * 1000)

    def names(self) -> list[str]:
        return list(self._verbs)

    async def do(self, trail: AuditTrail, name: str, job: Job) -> Job:
        """Carry out the action, note it in the audit, and notify those who wait for the batch."""
        return await self._done(name, job, self._verbs[name](trail.noting(f"batch.{name}", "batch", job.id), job))

    async def retry(self, trail: AuditTrail, job: Job, choice: RetryChoice) -> Job:
        """Run some items of an ended batch again, as a new batch of its owner."""
        noting = trail.noting("batch.retry", "batch", job.id)
        return await self._done(RETRY, job, retry(noting, self._entropy, job, choice))

    async def _done(self, name: str, job: Job, change: Awaitable[Job | None]) -> Job:
        try:
            changed = await change
            if changed is None:
                raise no_batch_of_anyone(job.id)
        except ApiProblem:
            metrics.repair_actions.of(name, "refused").inc()
            raise
        metrics.repair_actions.of(name, "done").inc()
        if name == ABANDON and job.state not in JOB_ENDED:
            report_end(changed)
        self._wakes.jobs.notify()
        self._wakes.inputs.notify()
        return changed


class AdminBatchRoutes:
    def __init__(self, context: WebContext) -> None:
        self._context = context
        self._store = context.store
        self._forecaster = Forecaster(context)
        self._actions = BatchActions(context)
        self._explainer = Explainer(context.store, context.blobs, context.live_settings, context.router)
        self._errors = ErrorReader(context.store, context.blobs)

    def routes(self) -> list[Guarded]:
        one = "/admin/v1/batches/{batch_id}"
        return [
            Guarded("GET", "/admin/v1/batches", READ, self.list),
            Guarded("GET", one, READ, self.retrieve),
            Guarded("GET", f"{one}/timeline", READ, self.timeline),
            Guarded("GET", f"{one}/explain", READ, self.explain),
            Guarded("GET", f"{one}/errors", READ, self.errors),
            *(Guarded("POST", f"{one}/{name}", WRITE, self._doing(name)) for name in self._actions.names()),
        ]

    async def list(self, request: Request, caller: Caller) -> Response:
        query = request.query_params
        wanted = job_filter(query, ("after", "limit", "org", "sort")) or JobFilter()
        count, sort = requests.limit(query, LIST_COUNT, LIST_COUNT_MAX), job_sort(query)
        found = await self._store.search_every_job(
            text(query, "org"), wanted, after=requests.after(query, "batch"), count_max=count + 1, sort=sort
        )
        if found is None:
            raise requests.unknown_cursor()
        shown = [admin_batch(schemas.batch(job), org) for job, org in found[:count]]
        return json_answer(page_of(shown, [one.id for one in shown], has_more=len(found) > count))

    async def retrieve(self, request: Request, caller: Caller) -> Response:
        job, org = await job_named(self._store, request)
        return json_answer(admin_batch(schemas.batch(job, await self._forecaster.of_job(job)), org))

    async def timeline(self, request: Request, caller: Caller) -> Response:
        requests.refuse_unknown(request.query_params, ())
        job, _ = await job_named(self._store, request)
        changes = await self._store.list_audit(AuditFilter(target=job.id), after=None, count_max=CHANGES_MAX)
        entries = [
            *moments(job),
            *(
                TimelineEntry(one.happened_at, one.action, one.actor, {"before": one.before, "after": one.after})
                for one in changes or ()
            ),
        ]
        return json_answer(Timeline("batch.timeline", job.id, sorted(entries, key=lambda one: one.at_ms)))

    async def explain(self, request: Request, caller: Caller) -> Response:
        requests.refuse_unknown(request.query_params, ())
        job, _ = await job_named(self._store, request)
        return json_answer(await self._explainer.explanation(job, for_owner=False))

    async def errors(self, request: Request, caller: Caller) -> Response:
        requests.refuse_unknown(request.query_params, ())
        job, _ = await job_named(self._store, request)
        return json_answer((await self._errors.groups_of(job)).shown(job.id))

    def _doing(self, name: str) -> RouteHandler:
        async def do(request: Request, caller: Caller) -> Response:
            choice = await self._choice(request) if name == RETRY else None
            job, org = await job_named(self._store, request)
            trail = trail_of(self._context, request, caller)
            if choice is None:
                changed = await self._actions.do(trail, name, job)
            else:
                changed = await self._actions.retry(trail, job, choice)
            return json_answer(admin_batch(schemas.batch(changed), org))

        return do

    async def _choice(self, request: Request) -> RetryChoice:
        bytes_max = self._context.settings.limits.body_bytes_max
        return retry_choice(await requests.optional_json_body(request, OperatorRetryRequest, bytes_max))


async def job_named(store: Store, request: Request) -> tuple[Job, str]:
    """Return the batch that a path names, with its organization."""
    batch_id = str(request.path_params["batch_id"])
    found = await store.job_of_anyone(batch_id) if ids.is_valid("batch", batch_id) else None
    if found is None:
        raise no_batch_of_anyone(batch_id)
    return found


def admin_batch(batch: schemas.Batch, org: str) -> AdminBatch:
    """Return a batch with its organization."""
    return AdminBatch(**{name: getattr(batch, name) for name in batch.__struct_fields__}, org=org)


def moments(job: Job) -> list[TimelineEntry]:
    """Return the moments of a job's life that its own row has."""
    known = {
        "created": job.created_at,
        "in_progress": job.in_progress_at,
        "first_item_sent": job.begun_at,
        "paused": job.paused_at,
        "cancelling": job.cancelling_at,
        "finalizing": job.finalizing_at,
        "completed": job.completed_at,
        "failed": job.failed_at,
        "expired": job.expired_at,
        "cancelled": job.cancelled_at,
    }
    return [TimelineEntry(at_ms, event) for event, at_ms in known.items() if at_ms is not None]
