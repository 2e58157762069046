"""The pages of the console. What they show comes from the same verbs as the admin API; each change is noted in the audit."""

from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urlencode

from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from tidegate.core import ids
from tidegate.core.errors import ApiProblem, TidegateError
from tidegate.core.nouns import Job, JobFilter
from tidegate.core.problems import no_such_batch, no_such_delivery
from tidegate.core.schedule.explain import explain
from tidegate.core.states import JOB_ENDED, JobState
from tidegate.store.audit import AuditFilter
from tidegate.web.admin.audit import AuditTrail
from tidegate.web.admin.batches import BatchActions, moments
from tidegate.web.admin.deployments import DeploymentRoutes
from tidegate.web.admin.overview import FLOWS_MAX, WORKERS_MAX, Overviews, flow_shown, worker_shown
from tidegate.web.console.error_groups import error_groups
from tidegate.web.console.session import Sessions, Visitor, form_of, set_cookie
from tidegate.web.context import WebContext
from tidegate.web.http import problems, requests
from tidegate.web.http.auth import Authenticator
from tidegate.web.http.filter_requests import FILTERS, job_filter
from tidegate.web.http.pages import page
from tidegate.web.jobs.forecast import Forecaster
from tidegate.web.webhooks.webhooks import delivery_object, delivery_parts

LIST_COUNT = 50
SIGN_IN = "/console/sign-in"

Show = Callable[[Request, Visitor], Awaitable[Response]]


class ConsolePages:
    def __init__(self, context: WebContext, authenticator: Authenticator) -> None:
        self._context = context
        self._store = context.store
        self._sessions = Sessions(context, authenticator)
        self._overviews = Overviews(context)
        self._forecaster = Forecaster(context)
        self._actions = BatchActions(context)
        self._deployments = DeploymentRoutes(context)

    def routes(self) -> list[Route]:
        looks: dict[str, Show] = {
            "": self.overview,
            "/batches": self.batches,
            "/batches/{batch_id}": self.batch,
            "/queues": self.queues,
            "/deployments": self.deployments,
            "/orgs": self.orgs,
            "/deliveries": self.deliveries,
            "/audit": self.audit,
        }
        changes: dict[str, Show] = {
            "/batches/{batch_id}/{action}": self.act,
            "/deliveries/{delivery_id}/replay": self.replay,
            "/sign-out": self.sign_out,
        }
        return [
            Route(SIGN_IN, self.sign_in_page, methods=["GET"]),
            Route(SIGN_IN, self.sign_in, methods=["POST"]),
            *(Route(f"/console{path}", self._shown(show), methods=["GET"]) for path, show in looks.items()),
            *(Route(f"/console{path}", self._shown(show), methods=["POST"]) for path, show in changes.items()),
        ]

    def _shown(self, show: Show) -> Callable[[Request], Awaitable[Response]]:
        """Show a page to someone who may see it; a refusal is a page too."""

        async def answer(request: Request) -> Response:
            visitor = None
            try:
                visitor = await self._sessions.visitor(request)
                if visitor is None:
                    return RedirectResponse(SIGN_IN, 303)
                return await show(request, visitor)
            except TidegateError as error:
                problem = problems.problem_of(error, str(request.scope["tidegate.request_id"]))
                return page("console/problem.html", problem.status, problem=problem, visitor=visitor, here="")

        return answer

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
        await self._form(request, visitor)
        return set_cookie(RedirectResponse(SIGN_IN, 303), "", 0)

    async def overview(self, request: Request, visitor: Visitor) -> Response:
        return page(
            "console/overview.html",
            visitor=visitor,
            here="overview",
            overview=await self._overviews.look(),
            workers=[worker_shown(row) for row in await self._store.list_workers(WORKERS_MAX)],
        )

    async def batches(self, request: Request, visitor: Visitor) -> Response:
        query = request.query_params
        # A form sends its empty fields too.
        given = QueryParams([(name, value) for name, value in query.multi_items() if value])
        wanted = job_filter(given, ("after", "org")) or JobFilter()
        org = requests.one(given, "org")
        found = await self._store.search_every_job(
            org, wanted, after=requests.after(given, "batch"), count_max=LIST_COUNT + 1
        )
        if found is None:
            raise requests.unknown_cursor()
        shown = found[:LIST_COUNT]
        older = None
        if len(found) > LIST_COUNT:
            kept = [(name, value) for name, value in given.multi_items() if name != "after"]
            older = "/console/batches?" + urlencode([*kept, ("after", shown[-1][0].id)])
        return page(
            "console/batches.html",
            visitor=visitor,
            here="batches",
            batches=shown,
            older=older,
            asked={name: given.get(name, "") for name in (*FILTERS, "org")},
            statuses=[state.value for state in JobState],
        )

    async def batch(self, request: Request, visitor: Visitor) -> Response:
        job, org = await self._found(request)
        changes = await self._store.list_audit(AuditFilter(target=job.id), after=None, count_max=LIST_COUNT)
        inputs = await self._store.explain_inputs(job.id)
        timeline = [(one.at_ms, one.event, "") for one in moments(job)]
        timeline += [(one.happened_at, one.action, one.actor) for one in changes or ()]
        return page(
            "console/batch.html",
            visitor=visitor,
            here="batches",
            job=job,
            org=org,
            ended=job.state in JOB_ENDED,
            forecast=await self._forecaster.of_job(job),
            why=explain(job, inputs) if inputs is not None else [],
            groups=await error_groups(self._store, self._context.blobs, job),
            timeline=sorted(timeline),
            actions=_possible(job),
        )

    async def act(self, request: Request, visitor: Visitor) -> Response:
        await self._form(request, visitor)
        job, _ = await self._found(request)
        action = str(request.path_params["action"])
        if action not in self._actions.names():
            raise ApiProblem(404, "unknown_url", "There is no such action.")
        await self._actions.do(self._trail(visitor), action, job)
        return RedirectResponse(f"/console/batches/{job.id}", 303)

    async def queues(self, request: Request, visitor: Visitor) -> Response:
        overview = await self._overviews.look()
        flows = [flow_shown(row) for row in await self._store.list_flows(None, FLOWS_MAX)]
        return page("console/queues.html", visitor=visitor, here="queues", models=overview.models, flows=flows)

    async def deployments(self, request: Request, visitor: Visitor) -> Response:
        overview = await self._overviews.look()
        listed = {one.name: one for one in await self._deployments.list("deployment")}
        return page(
            "console/deployments.html", visitor=visitor, here="deployments", health=overview.deployments, listed=listed
        )

    async def orgs(self, request: Request, visitor: Visitor) -> Response:
        orgs = await self._store.list_orgs(after=None, count_max=LIST_COUNT) or []
        keys = await self._store.key_page(None, after=None, count_max=LIST_COUNT) or []
        return page("console/orgs.html", visitor=visitor, here="orgs", orgs=orgs, keys=keys)

    async def deliveries(self, request: Request, visitor: Visitor) -> Response:
        found = await self._store.list_every_delivery(None, None, None, LIST_COUNT) or []
        shown = [(delivery_object(one), org) for one, org in found]
        return page("console/deliveries.html", visitor=visitor, here="deliveries", deliveries=shown)

    async def replay(self, request: Request, visitor: Visitor) -> Response:
        await self._form(request, visitor)
        delivery_id = str(request.path_params["delivery_id"])
        parts = delivery_parts(delivery_id)
        tenant_id = None if parts is None else await self._store.tenant_of_delivery(*parts)
        if parts is None or tenant_id is None:
            raise no_such_delivery(delivery_id)
        await self._trail(visitor).noting("delivery.replay", "delivery", delivery_id).replay_webhook(tenant_id, *parts)
        return RedirectResponse("/console/deliveries", 303)

    async def audit(self, request: Request, visitor: Visitor) -> Response:
        found = await self._store.list_audit(AuditFilter(), after=None, count_max=LIST_COUNT) or []
        return page("console/audit.html", visitor=visitor, here="audit", changes=found)

    async def _form(self, request: Request, visitor: Visitor) -> dict[str, Any]:
        """Return a form's fields, if the visitor may change things and one of our pages sent it."""
        form = await form_of(request)
        if visitor.key_id is None or form.get("csrf") != visitor.csrf:
            raise ApiProblem(403, "foreign_form", "Sign in, and send this form from its page.")
        if not visitor.may_write and request.url.path != "/console/sign-out":
            raise ApiProblem(
                403, "insufficient_scope", "Your key may look, and change nothing: it lacks `admin:write`."
            )
        return form

    def _trail(self, visitor: Visitor) -> AuditTrail:
        return AuditTrail(self._store, self._context.entropy, f"key:{visitor.key_id}")

    async def _found(self, request: Request) -> tuple[Job, str]:
        batch_id = str(request.path_params["batch_id"])
        found = await self._store.job_of_anyone(batch_id) if ids.is_valid("batch", batch_id) else None
        if found is None:
            raise no_such_batch(batch_id)
        return found


def _possible(job: Job) -> list[str]:
    """Return which actions the job's state allows, least drastic first."""
    if job.state in JOB_ENDED:
        return []
    if job.state is JobState.FINALIZING:
        return ["retry_finalization", "abandon"]
    if job.closing is not None:
        return ["requeue"]
    return ["resume" if job.paused_at else "pause", "requeue", "cancel", "fail"]
