"""Interactive calls: OpenAI's endpoints and Anthropic's messages over the same deployments, keys
and budgets as batches.

The gateway checks the caller and the request, and passes the call to the router; it does not read
bodies and answers beyond that. An answer never has anything of another tenant: a call looks up
nothing but its own key.
"""

import functools
from collections import OrderedDict

from starlette.requests import Request
from starlette.responses import Response

from tidegate.core.body_rules.caller_fields import rules_for
from tidegate.core.budgets.budget import Budget, LimitBound, with_limits
from tidegate.core.errors import ApiProblem
from tidegate.core.hooks import About
from tidegate.core.nouns import Call, Caller
from tidegate.core.policy.policy_rules import allows
from tidegate.guards.closer_look import look_closely
from tidegate.guards.guard import Guards
from tidegate.settings import call_rules
from tidegate.upstream.calls.router import Router
from tidegate.upstream.calls.traffic import Traffic
from tidegate.upstream.calls.translation import MESSAGES
from tidegate.web.background.routes import BackgroundRoutes
from tidegate.web.context import WebContext
from tidegate.web.gateway.dialects import Dialect
from tidegate.web.gateway.guarding import guarded_answer, guarded_request, guarded_stream
from tidegate.web.gateway.interactive_request import INTERACTIVE_AFTER, InteractiveRequest, interactive_request_of
from tidegate.web.gateway.proxy_response import ProxyResponse
from tidegate.web.http.rate_limits import LIMIT_HEADERS, Headers, limit_headers
from tidegate.web.http.routes import Guarded
from tidegate.web.requests.requests import anthropic_betas

SCOPE = "inference"
ENDPOINTS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/responses",
    "/v1/moderations",
    MESSAGES,
)
# Only has to be later than the deployment's own timeout, which ends a call.
DEADLINE_MS = 7 * 86_400_000
TENANTS_MAX = 4_096


class GatewayRoutes:
    def __init__(self, context: WebContext, background: BackgroundRoutes) -> None:
        """Create the routes. `background` accepts the responses that run in the background."""
        self._context = context
        self._background = background
        self._limits = context.settings.limits
        self._gateway = context.settings.gateway
        self._tenants = context.tenants()
        self._names: OrderedDict[str, str] = OrderedDict()
        self._model_of = context.model_of()
        self._fields_of = context.fields_of()
        self._guards = Guards(call_rules(context.settings), context.reached_by())

    def routes(self) -> list[Guarded]:
        return [Guarded("POST", endpoint, SCOPE, functools.partial(self.call, endpoint)) for endpoint in ENDPOINTS]

    async def call(self, endpoint: str, request: Request, caller: Caller) -> Response:
        """Read one call and answer it.

        `endpoint` is the path of the route, and also of the upstream call.
        """
        wanted = await interactive_request_of(
            request, endpoint, self._gateway.body_bytes_max, self._limits.json_depth_max
        )
        return await self.answer(endpoint, request, wanted, caller)

    async def answer(self, endpoint: str, request: Request, wanted: InteractiveRequest, caller: Caller) -> Response:
        """Answer a call whose body is already read."""
        self._check_model(wanted, caller)
        await self._check_fields(wanted)
        if wanted.is_background:
            return await self._background.create(request, caller, wanted.body, wanted.interactive_after_s)
        tenant = await self._tenant(caller)
        guard = self._guards.of(tenant, caller.key_id, wanted.model) if self._guards.rules else None
        judged = judge_stream = None
        if guard is not None:
            about = About(endpoint, wanted.model, tenant, caller.key_id or "", caller.user or "")
            wanted = await guarded_request(guard, about, wanted)
            judged = functools.partial(guarded_answer, guard, about)
            judge_stream = functools.partial(guarded_stream, guard, about) if guard.holds_streams else None
        clock, router = self._context.clock, self._context.router
        request_id = str(request.scope["tidegate.request_id"])
        budgets, parallel = self._bounds(tenant, caller)
        if budgets:
            request.scope[LIMIT_HEADERS] = functools.partial(_known_limits, router, budgets)
        betas = anthropic_betas(request) if "anthropic-beta" in request.headers else ""
        dialect = Dialect(endpoint, wanted.body, clock.now_ms() // 1000, betas)
        call = Call(
            job_id="",
            number=0,
            endpoint=endpoint,
            model=wanted.model,
            body=wanted.body,
            idempotency_key=request_id,
            deadline_ms=clock.monotonic_ms() + DEADLINE_MS,
            budgets=budgets,
            share_owner=f"tenant:{caller.tenant_id}",
            parallel=parallel,
            models=caller.models,
        )
        book = self._context.book
        on_usage = None if book is None else functools.partial(book.add, caller, wanted.model)
        traffic = Traffic(
            dialect.shape,
            wanted.is_stream,
            self._gateway.flex_wait_s if wanted.is_flex else 0.0,
            on_usage,
            # Without keys there is only one tenant, so slots need no sharing.
            caller.tenant_id if caller.key_id is not None else "",
        )
        opened = functools.partial(router.open, call, traffic)
        return ProxyResponse(opened, dialect, clock, wanted.model, request_id, judged, judge_stream)

    def _bounds(self, tenant: str, caller: Caller) -> tuple[tuple[Budget, ...], tuple[tuple[str, int], ...]]:
        """Return the budgets that bind a caller's calls, and the most open calls for each name that
        is counted; both include those of the key.
        """
        if not (self._tenants.bind_calls or caller.limits or caller.parallel_max):
            return (), ()
        policy = self._tenants.of(tenant)
        budgets = policy.budgets(caller.tenant_id, caller.user, caller.key_id, team=caller.team)
        if caller.limits:
            budgets = with_limits(budgets, LimitBound.KEY, caller.key_id or "", caller.limits)
        return budgets, policy.parallel(caller.tenant_id, caller.user, caller.key_id, caller.parallel_max)

    def _check_model(self, wanted: InteractiveRequest, caller: Caller) -> None:
        is_bound = caller.models or caller.resources
        if is_bound and not allows(caller.models, caller.resources, wanted.model, self._model_of):
            message = "This key does not allow the model: name one that it allows, or use another key."
            raise ApiProblem(404, "model_not_found", message, param="model")
        router = self._context.router
        takes_interactive = router.takes_interactive(wanted.model)
        if takes_interactive and not (wanted.is_background or wanted.is_flex):
            return
        takes_background = router.knows(wanted.model)
        is_taken = takes_background if wanted.is_background else wanted.is_flex and router.takes_flex(wanted.model)
        if wanted.interactive_after_s is not None and takes_background and not takes_interactive:
            message = f"No deployment of this model takes interactive calls: leave `{INTERACTIVE_AFTER}` out."
            raise ApiProblem(400, "model_batch_only", message, param=INTERACTIVE_AFTER)
        if is_taken:
            return
        if takes_interactive:
            param = "background" if wanted.is_background else "service_tier"
            lacking = "takes batch work but through a queue" if takes_background else "takes batch work"
            message = f"No deployment of this model {lacking}, in whose gaps this would be served: leave `{param}` out."
            raise ApiProblem(400, "model_interactive_only", message, param=param)
        if takes_background:
            message = "This model is served through a queue, to batches only: send a batch."
            if router.takes_flex(wanted.model):
                message = 'This model is served to batches only: send a batch, or set `service_tier` to "flex".'
            raise ApiProblem(400, "model_batch_only", message, param="model")
        message = "The model does not exist here: GET /v1/models lists those that do."
        if not wanted.names_model:
            message = f"`model` was left out, which means {wanted.model}, and that model does not exist here: name one of GET /v1/models."
        raise ApiProblem(404, "model_not_found", message, param="model")

    async def _check_fields(self, wanted: InteractiveRequest) -> None:
        """Refuse fields that the caller may not set. Hooks run later, and may add them."""
        if wanted.is_plain:
            return
        if (fault := await look_closely(wanted.body, rules_for(self._fields_of, wanted.model))) is not None:
            raise ApiProblem(400, fault.code, fault.message, param=fault.param or None)

    async def _tenant(self, caller: Caller) -> str:
        """Return the organization's name, which settings use."""
        name = self._names.get(caller.tenant_id)
        if name is None:
            name = await self._context.store.tenant_name(caller.tenant_id) or ""
            self._names[caller.tenant_id] = name
            if len(self._names) > TENANTS_MAX:
                self._names.popitem(last=False)
        return name


async def _known_limits(router: Router, budgets: tuple[Budget, ...]) -> Headers:
    return limit_headers(router.rooms(budgets))
