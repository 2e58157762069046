"""Operations: one action on every batch that matches a filter.

A dry run shows what would change. A worker carries the operation out, and it can be watched and
cancelled meanwhile.
"""

from typing import Annotated, Any, Literal, get_args

import msgspec
from msgspec import Meta
from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import Response

from tidegate.core import ids
from tidegate.core.errors import ApiProblem
from tidegate.core.job_lists import FILTER_PAIRS_MAX, JobFilter
from tidegate.core.nouns import Caller
from tidegate.core.operations import Impact, JobOperation, OperationScope
from tidegate.core.problems import shown_id
from tidegate.core.usage.prices import units_text
from tidegate.web.admin.audit import READ, WRITE, AuditTrail, text, trail_of
from tidegate.web.context import WebContext
from tidegate.web.http.answers import json_answer, page_of
from tidegate.web.http.routes import Guarded
from tidegate.web.requests import requests
from tidegate.web.requests.filter_requests import job_filter

LIST_COUNT = 20
LIST_COUNT_MAX = 100
OperationAction = Literal["pause", "resume", "cancel", "retry", "requeue", "fail", "retry_finalization", "abandon"]
ACTIONS: tuple[str, ...] = get_args(OperationAction)


class OperationFilter(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """The batches of an operation: those that match every field, as in the list of batches.

    An empty filter matches every batch that the action can change.
    """

    org: str | None = None
    status: str | None = None
    model: str | None = None
    metadata: Annotated[dict[str, str], Meta(max_length=FILTER_PAIRS_MAX)] = {}
    created_after: int | None = None
    created_before: int | None = None
    error_code: str | None = None
    q: str | None = None


class OperationRequest(msgspec.Struct, forbid_unknown_fields=True):
    """The action, and the filter of its batches.

    With `dry_run` nothing is changed, and the answer shows what would be.
    """

    action: OperationAction
    filter: OperationFilter
    dry_run: bool = False


class MatchedShown(msgspec.Struct, frozen=True):
    """The impact of an operation.

    `items` are requests that have not run, or for a retry those that failed. `tokens` and `cost`
    are what they are expected to need. `due_within_hour` counts the batches that must end within an
    hour.
    """

    jobs: int
    items: int
    tokens: int
    cost: str
    first_deadline: int | None
    due_within_hour: int


class FailureShown(msgspec.Struct, frozen=True):
    batch_id: str
    code: str
    message: str


class OperationShown(msgspec.Struct, frozen=True):
    """An operation; a dry run has no `id`. `done` and `failed` count batches."""

    id: str | None
    object: str
    status: Literal["dry_run", "running", "completed", "cancelled"]
    action: str
    filter: OperationFilter
    matched: MatchedShown
    done: int = 0
    failed: int = 0
    created_at: int | None = None
    ended_at: int | None = None
    actor: str | None = None
    last_failure: FailureShown | None = None


class OperationDesk:
    """The maker of operations, for the admin API and the console alike.

    It also shows and cancels them.
    """

    def __init__(self, context: WebContext) -> None:
        self._store = context.store
        self._wakes = context.wakes
        self._entropy = context.entropy

    async def impact(self, scope: OperationScope) -> OperationShown:
        """Return what an operation would change, without changing anything."""
        matched = _matched(await self._store.impact_of(scope))
        return OperationShown(None, "operation", "dry_run", scope.action, filter_shown(scope), matched)

    async def make(self, trail: AuditTrail, scope: OperationScope) -> OperationShown:
        """Make an operation; workers carry it out."""
        operation_id = ids.make("op", self._entropy.token_bytes(ids.RANDOM_BYTES))
        noting = trail.noting("operation.create", "operation", operation_id)
        made = await noting.put_operation(operation_id, trail.actor, scope)
        self._wakes.inputs.notify()
        return operation_shown(made)

    async def cancel(self, trail: AuditTrail, operation_id: str) -> OperationShown:
        """Cancel an operation, so that it changes nothing more."""
        found = await trail.noting("operation.cancel", "operation", operation_id).cancel_operation(operation_id)
        if found is None:
            raise no_such_operation(operation_id)
        return operation_shown(found)

    async def one(self, operation_id: str) -> OperationShown:
        found = await self._store.get_operation(operation_id) if ids.is_valid("op", operation_id) else None
        if found is None:
            raise no_such_operation(operation_id)
        return operation_shown(found)

    async def page(self, after: str | None, count_max: int) -> list[OperationShown]:
        found = await self._store.list_operations(after=after, count_max=count_max)
        if found is None:
            raise requests.unknown_cursor()
        return [operation_shown(one) for one in found]


class OperationRoutes:
    def __init__(self, context: WebContext) -> None:
        self._context = context
        self._desk = OperationDesk(context)
        self._body_bytes_max = context.settings.limits.body_bytes_max

    def routes(self) -> list[Guarded]:
        one = "/admin/v1/operations/{operation_id}"
        return [
            Guarded("POST", "/admin/v1/operations", WRITE, self.create),
            Guarded("GET", "/admin/v1/operations", READ, self.list),
            Guarded("GET", one, READ, self.retrieve),
            Guarded("POST", f"{one}/cancel", WRITE, self.cancel),
        ]

    async def create(self, request: Request, caller: Caller) -> Response:
        wanted = await requests.json_body(request, OperationRequest, self._body_bytes_max)
        scope = scope_of(wanted.action, _query(wanted.filter))
        if wanted.dry_run:
            return json_answer(await self._desk.impact(scope))
        return json_answer(await self._desk.make(trail_of(self._context, request, caller), scope))

    async def list(self, request: Request, caller: Caller) -> Response:
        query = request.query_params
        requests.refuse_unknown(query, ("after", "limit"))
        count = requests.limit(query, LIST_COUNT, LIST_COUNT_MAX)
        found = await self._desk.page(requests.after(query, "op"), count + 1)
        shown = found[:count]
        return json_answer(page_of(shown, [str(one.id) for one in shown], has_more=len(found) > count))

    async def retrieve(self, request: Request, caller: Caller) -> Response:
        return json_answer(await self._desk.one(str(request.path_params["operation_id"])))

    async def cancel(self, request: Request, caller: Caller) -> Response:
        operation_id = str(request.path_params["operation_id"])
        await self._desk.one(operation_id)
        return json_answer(await self._desk.cancel(trail_of(self._context, request, caller), operation_id))


def scope_of(action: str, query: QueryParams) -> OperationScope:
    """Return the scope of an operation. Its filter is checked like that of the list of batches."""
    return OperationScope(action, text(query, "org"), job_filter(query, ("org",)) or JobFilter())


def _query(wanted: OperationFilter) -> QueryParams:
    """Return a filter as the query of the list of batches."""
    given: dict[str, Any] = msgspec.to_builtins(wanted)
    pairs = given.pop("metadata", {})
    named = [(name, str(value)) for name, value in given.items() if value is not None]
    return QueryParams([*named, *((f"metadata[{key}]", value) for key, value in pairs.items())])


def filter_shown(scope: OperationScope) -> OperationFilter:
    """Return the filter of a scope in the form in which it was given."""
    jobs, anything = scope.jobs, JobFilter()
    return OperationFilter(
        scope.org,
        jobs.status,
        jobs.model,
        jobs.metadata,
        jobs.from_ms // 1000 if jobs.from_ms != anything.from_ms else None,
        jobs.to_ms // 1000 if jobs.to_ms != anything.to_ms else None,
        jobs.error_code,
        jobs.words,
    )


def operation_shown(one: JobOperation) -> OperationShown:
    failure = one.last_failure
    return OperationShown(
        one.id,
        "operation",
        one.state.value,
        one.scope.action,
        filter_shown(one.scope),
        _matched(one.impact),
        one.done,
        one.failed,
        one.created_at // 1000,
        None if one.ended_at is None else one.ended_at // 1000,
        one.actor,
        None if failure is None else FailureShown(failure.job_id, failure.code, failure.message),
    )


def _matched(impact: Impact) -> MatchedShown:
    deadline = None if impact.first_deadline is None else impact.first_deadline // 1000
    return MatchedShown(
        impact.jobs, impact.items, impact.tokens, units_text(impact.cost_nano), deadline, impact.due_soon
    )


def no_such_operation(operation_id: str) -> ApiProblem:
    return ApiProblem(
        404, "operation_not_found", f"There is no operation '{shown_id(operation_id)}'.", param="operation_id"
    )
