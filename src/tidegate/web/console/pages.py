"""The pages of the console.

They use the same verbs as the admin API, and each change is noted in the audit.
"""

import msgspec
from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from tidegate.core.errors import ApiProblem, TidegateError
from tidegate.core.job_lists import JobFilter, JobSort
from tidegate.core.nouns import Job
from tidegate.core.operations import RETRY
from tidegate.core.problems import no_delivery_of_anyone
from tidegate.core.schedule.explain import explain
from tidegate.core.states import JOB_ENDED, DeliveryState, JobState
from tidegate.store.operators.audit import AuditFilter
from tidegate.web.admin.batches import BatchActions, job_named, moments
from tidegate.web.admin.operations import ACTIONS
from tidegate.web.admin.overview import FLOWS_MAX, Overviews, flow_shown, worker_shown
from tidegate.web.console.compare_pages import ComparePages
from tidegate.web.console.creation_pages import CreationPages
from tidegate.web.console.deployment_pages import DeploymentPages
from tidegate.web.console.guard import SIGN_IN, ConsoleGuard, Show
from tidegate.web.console.item_pages import ItemPages
from tidegate.web.console.live_pages import LiveView
from tidegate.web.console.load_history import LoadHistory
from tidegate.web.console.operation_pages import OperationPages
from tidegate.web.console.org_pages import OrgPages
from tidegate.web.console.playground import PlaygroundPages
from tidegate.web.console.session import Sessions, Visitor, form_of, set_cookie
from tidegate.web.context import WebContext
from tidegate.web.gateway.gateway import GatewayRoutes
from tidegate.web.http import problems
from tidegate.web.http.auth import Authenticator
from tidegate.web.http.pages import older_link, page
from tidegate.web.jobs.error_groups import ErrorReader
from tidegate.web.jobs.explanation import Explainer
from tidegate.web.jobs.forecast import Forecaster
from tidegate.web.requests import requests
from tidegate.web.requests.filter_requests import FILTERS, job_filter, job_sort
from tidegate.web.requests.retry_requests import OperatorRetryRequest, retry_choice
from tidegate.web.webhooks.webhooks import delivery_object, delivery_parts

LIST_COUNT = 50
# The page of queues explains so many batches that wait.
EXPLAINED_MODELS_MAX = 8
EXPLAINED_JOBS_MAX = 3

_SORTS = {
    JobSort.CREATED: "newest",
    JobSort.DEADLINE: "next deadline",
    JobSort.SIZE: "largest",
    JobSort.FAILED: "most failed",
    JobSort.COST: "dearest",
}


class ConsolePages:
    def __init__(self, context: WebContext, authenticator: Authenticator, gateway: GatewayRoutes) -> None:
        """Create the pages. `gateway` makes the calls of the playground."""
        self._gateway = gateway
        self._context = context
        self._store = context.store
        self._sessions = Sessions(context, authenticator)
        self._guard = ConsoleGuard(context, self._sessions)
        self._overviews = Overviews(context)
        self._errors = ErrorReader(context.store, context.blobs)
        self._load_history = LoadHistory(context.store)
        self._forecaster = Forecaster(context)
        self._explainer = Explainer(context.store, context.blobs, context.live_settings, context.router)
        self._actions = BatchActions(context)

    def routes(self) -> list[Route]:
        looks: dict[str, Show] = {
            "/deliveries": self.deliveries,
            "/audit": self.audit,
            "/{rest:path}": self.unknown,
        }
        live = {
            "": (self.overview, 3),
            "/batches": (self.batches, 5),
            "/batches/{batch_id}": (self.batch, 2),
            "/queues": (self.queues, 5),
        }
        changes: dict[str, Show] = {
            "/batches/{batch_id}/{action}": self.act,
            "/deliveries/{delivery_id}/replay": self.replay,
            "/sign-out": self.sign_out,
        }
        return [
            self._guard.route(SIGN_IN, self.sign_in_page, "GET"),
            self._guard.route(SIGN_IN, self.sign_in, "POST"),
            *CreationPages(self._context, self._guard).routes(),
            *PlaygroundPages(self._context, self._guard, self._gateway).routes(),
            *OperationPages(self._context, self._guard).routes(),
            *ItemPages(self._context, self._guard).routes(),
            *DeploymentPages(self._context, self._guard).routes(),
            *OrgPages(self._context, self._guard).routes(),
            *ComparePages(self._context, self._guard).routes(),
            *self._guard.live_routes(live),
            *self._guard.routes(looks, changes),
        ]

    async def sign_in_page(self, request: Request) -> Response:
        return page("console/sign_in.html", problem=None)

    async def sign_in(self, request: Request) -> Response:
        try:
            form = await form_of(request)
            cookie = await self._sessions.sign_in(request, form.get("key", "").strip())
        except TidegateError as error:
            problem = problems.problem_of(error, str(request.scope["tidegate.request_id"]))
            return page("console/sign_in.html", problem.status, problem=problem)
        return set_cookie(RedirectResponse("/console", 303), cookie)

    async def sign_out(self, request: Request, visitor: Visitor) -> Response:
        await self._guard.form(request, visitor)
        await self._sessions.sign_out(request)
        return set_cookie(RedirectResponse(SIGN_IN, 303), "", 0)

    async def overview(self, request: Request, visitor: Visitor) -> LiveView:
        requests.refuse_unknown(request.query_params, ())
        overview = await self._overviews.look()
        values = {
            "visitor": visitor,
            "here": "overview",
            "overview": overview,
            "point": msgspec.to_builtins(await self._load_history.look(overview.deployments)),
            # Only a whole page needs all points; an event adds one.
            "points": lambda: msgspec.to_builtins(self._load_history.points()),
            "workers": [worker_shown(row) for row in await self._store.list_workers(LIST_COUNT)],
        }
        return LiveView("console/overview.html", values)

    async def batches(self, request: Request, visitor: Visitor) -> LiveView:
        query = request.query_params
        # A form sends its empty fields too.
        given = QueryParams([(name, value) for name, value in query.multi_items() if value])
        wanted, sort = job_filter(given, ("after", "org", "sort")) or JobFilter(), job_sort(given)
        org = requests.one(given, "org")
        found = await self._store.search_every_job(
            org, wanted, after=requests.after(given, "batch"), count_max=LIST_COUNT + 1, sort=sort
        )
        if found is None:
            raise requests.unknown_cursor()
        shown = found[:LIST_COUNT]
        older = older_link(request, shown[-1][0].id) if len(found) > LIST_COUNT else None
        values = {
            "visitor": visitor,
            "here": "batches",
            "batches": shown,
            "older": older,
            "asked": {name: given.get(name, "") for name in (*FILTERS, "org")},
            # For an action on every batch that matches: with all filters, or it would match more
            # batches.
            "filters": {name: value for name, value in given.items() if name not in ("after", "sort")},
            "sort": sort,
            "sorts": _SORTS,
            "now_ms": await self._store.now_ms(),
            "ended": JOB_ENDED,
            "statuses": [state.value for state in JobState],
            "choices": ACTIONS,
        }
        return LiveView("console/batches.html", values)

    async def batch(self, request: Request, visitor: Visitor) -> LiveView:
        job, org = await job_named(self._store, request)
        changes = await self._store.list_audit(AuditFilter(target=job.id), after=None, count_max=LIST_COUNT)
        timeline = [(one.at_ms, one.event, "") for one in moments(job)]
        timeline += [(one.happened_at, one.action, one.actor) for one in changes or ()]
        values = {
            "visitor": visitor,
            "here": "batches",
            "job": job,
            "org": org,
            "ended": job.state in JOB_ENDED,
            "forecast": await self._forecaster.of_job(job),
            "why": explain(job, await self._explainer.inputs(job)),
            "groups": await self._errors.groups_of(job),
            "runs": [
                one for one in await self._store.runs_of_file(job.tenant_id, job.input_file_id) if one.id != job.id
            ],
            "timeline": sorted(timeline),
            "actions": _possible(job),
        }
        return LiveView("console/batch.html", values, is_over=job.state in JOB_ENDED)

    async def act(self, request: Request, visitor: Visitor) -> Response:
        form = await self._guard.form(request, visitor)
        job, _ = await job_named(self._store, request)
        action = str(request.path_params["action"])
        if action == RETRY:
            asked = {name: [form[name]] for name in ("codes", "kinds") if form.get(name)}
            wanted = requests.decoded(msgspec.json.encode(asked), OperatorRetryRequest)
            made = await self._actions.retry(self._guard.trail(visitor), job, retry_choice(wanted))
            return RedirectResponse(f"/console/batches/{made.id}", 303)
        if action not in self._actions.names():
            raise ApiProblem(404, "unknown_url", "There is no such action.")
        await self._actions.do(self._guard.trail(visitor), action, job)
        return RedirectResponse(f"/console/batches/{job.id}", 303)

    async def unknown(self, request: Request, visitor: Visitor) -> Response:
        if request.url.path == "/console/":
            return RedirectResponse("/console", 303)
        raise ApiProblem(404, "unknown_url", "There is no such page.")

    async def queues(self, request: Request, visitor: Visitor) -> LiveView:
        overview = await self._overviews.look()
        flows = [flow_shown(row) for row in await self._store.list_flows(None, FLOWS_MAX)]
        values = {
            "visitor": visitor,
            "here": "queues",
            "models": overview.models,
            "flows": flows,
            "waiting": await self._waiting([one.model for one in overview.models if one.requests]),
        }
        return LiveView("console/queues.html", values)

    async def _waiting(self, models: list[str]) -> list[tuple[Job, str, list[str]]]:
        """Return the newest open batches of these models with their organizations, and why each
        waits or runs.
        """
        found: list[tuple[Job, str, list[str]]] = []
        for model in models[:EXPLAINED_MODELS_MAX]:
            wanted = JobFilter(status=JobState.IN_PROGRESS, model=model)
            for job, org in (
                await self._store.search_every_job(None, wanted, after=None, count_max=EXPLAINED_JOBS_MAX) or ()
            ):
                inputs = await self._store.explain_inputs(job.id)
                if inputs is not None:
                    found.append((job, org, explain(job, inputs)))
        return found

    async def deliveries(self, request: Request, visitor: Visitor) -> Response:
        given = _given(request, ("after", "org", "status"))
        cursor = requests.one(given, "after")
        after = None if cursor is None else delivery_parts(cursor)
        org, status = requests.one(given, "org"), requests.choice(given, "status", tuple(DeliveryState))
        found = None
        if cursor is None or after is not None:
            state = None if status is None else DeliveryState(status)
            found = await self._store.list_every_delivery(org, state, after, LIST_COUNT + 1)
        if found is None:
            raise requests.unknown_cursor()
        shown = [(delivery_object(one), org) for one, org in found[:LIST_COUNT]]
        older = older_link(request, shown[-1][0].id) if len(found) > LIST_COUNT else None
        return page(
            "console/deliveries.html",
            visitor=visitor,
            here="deliveries",
            deliveries=shown,
            older=older,
            asked={name: given.get(name, "") for name in ("org", "status")},
            statuses=list(DeliveryState),
        )

    async def replay(self, request: Request, visitor: Visitor) -> Response:
        await self._guard.form(request, visitor)
        delivery_id = str(request.path_params["delivery_id"])
        parts = delivery_parts(delivery_id)
        tenant_id = None if parts is None else await self._store.tenant_of_delivery(*parts)
        if parts is None or tenant_id is None:
            raise no_delivery_of_anyone(delivery_id)
        await (
            self._guard.trail(visitor)
            .noting("delivery.replay", "delivery", delivery_id)
            .replay_webhook(tenant_id, *parts)
        )
        return RedirectResponse("/console/deliveries", 303)

    async def audit(self, request: Request, visitor: Visitor) -> Response:
        given = _given(request, ("after", "actor", "action", "target"))
        asked = {name: requests.one(given, name) for name in ("actor", "action", "target")}
        wanted = AuditFilter(**asked)
        found = await self._store.list_audit(wanted, after=requests.after(given, "aud"), count_max=LIST_COUNT + 1)
        if found is None:
            raise requests.unknown_cursor()
        older = older_link(request, found[LIST_COUNT - 1].id) if len(found) > LIST_COUNT else None
        shown = found[:LIST_COUNT]
        return page("console/audit.html", visitor=visitor, here="audit", changes=shown, older=older, asked=asked)


def _given(request: Request, known: tuple[str, ...]) -> QueryParams:
    """Return the query of a list, without a form's empty fields."""
    requests.refuse_unknown(request.query_params, known)
    return QueryParams([(name, value) for name, value in request.query_params.multi_items() if value])


def _possible(job: Job) -> list[str]:
    """Return the actions that the job's state allows, least drastic first."""
    if job.state in JOB_ENDED:
        return [RETRY] if job.failed_count and not job.retried_by and job.door is None else []
    if job.state is JobState.FINALIZING:
        return ["retry_finalization", "abandon"]
    if job.closing is not None:
        return ["requeue"]
    return ["resume" if job.paused_at else "pause", "requeue", "cancel", "fail"]
