"""Items of a batch: pages of their outcomes, and one request with its response."""

from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import Response

from tidegate.core import ids
from tidegate.core.errors import ApiProblem
from tidegate.core.nouns import Caller, Job
from tidegate.core.problems import no_such_batch
from tidegate.core.states import Outcome
from tidegate.web.context import WebContext
from tidegate.web.http.answers import Page, json_answer
from tidegate.web.http.routes import Guarded
from tidegate.web.jobs.job_items import ItemFilter, JobItems
from tidegate.web.requests import requests
from tidegate.web.requests.retry_requests import CODE_CHARS_MAX

ITEMS_COUNT = 20
ITEMS_COUNT_MAX = 100
_OUTCOMES = tuple(outcome.value for outcome in Outcome)


class ItemRoutes:
    def __init__(self, context: WebContext) -> None:
        self._store = context.store
        self._items = JobItems(context.store, context.blobs)

    def routes(self) -> list[Guarded]:
        return [
            Guarded("GET", "/v1/batches/{batch_id}/items", "files:read", self.list),
            Guarded("GET", "/v1/batches/{batch_id}/items/{custom_id:path}", "files:read", self.retrieve),
        ]

    async def list(self, request: Request, caller: Caller) -> Response:
        query = request.query_params
        wanted = item_filter(query, ("after", "limit"))
        count, after = requests.limit(query, ITEMS_COUNT, ITEMS_COUNT_MAX), requests.after(query, "batch_req")
        page = await self._items.page(await self._job(request, caller), wanted, after, count)
        if page is None:
            raise requests.unknown_cursor()
        first_id = page.items[0].id if page.items else None
        return json_answer(Page("list", page.items, first_id, page.last_id, page.has_more))

    async def retrieve(self, request: Request, caller: Caller) -> Response:
        requests.refuse_unknown(request.query_params, ())
        job = await self._job(request, caller)
        return json_answer(await self._items.one(job, str(request.path_params["custom_id"])))

    async def _job(self, request: Request, caller: Caller) -> Job:
        job_id = str(request.path_params["batch_id"])
        job = await self._store.get_job(caller.tenant_id, job_id) if ids.is_valid("batch", job_id) else None
        if job is None:
            raise no_such_batch(job_id)
        return job


def item_filter(query: QueryParams, others: tuple[str, ...]) -> ItemFilter:
    """Return the filter of a list's query. `others` are the list's own parameters."""
    requests.refuse_unknown(query, ("outcome", "code", *others))
    code = requests.one(query, "code")
    if code is not None and not 1 <= len(code) <= CODE_CHARS_MAX:
        raise ApiProblem(400, "invalid_parameter", f"`code` must have 1 to {CODE_CHARS_MAX} characters.", param="code")
    return ItemFilter(requests.choice(query, "outcome", _OUTCOMES), code)
