"""Items of any tenant's batch: the outcomes of its requests, and one request with its response.

Requests and responses are shown only with a scope of their own, and the audit notes who read them.
"""

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tidegate.core.nouns import Caller, Job
from tidegate.web.admin.audit import READ, AuditTrail, trail_of
from tidegate.web.admin.batches import job_named
from tidegate.web.context import WebContext
from tidegate.web.http.answers import Page, json_answer
from tidegate.web.http.routes import Guarded
from tidegate.web.jobs.job_items import ItemDetail, ItemFilter, ItemPage, ItemShown, JobItems
from tidegate.web.openai.items import ITEMS_COUNT, ITEMS_COUNT_MAX, item_filter
from tidegate.web.requests import requests

CONTENT = "admin:content"


class ItemDesk:
    """The view of items for operators, for the admin API and the console alike."""

    def __init__(self, context: WebContext) -> None:
        self._items = JobItems(context.store, context.blobs)

    async def page(self, job: Job, wanted: ItemFilter, after: str | None, count_max: int) -> ItemPage:
        """Return a page of items.

        A message may quote a request, so it is left out; the code stays.
        """
        found = await self._items.page(job, wanted, after, count_max)
        if found is None:
            raise requests.unknown_cursor()
        return ItemPage([_without_message(item) for item in found.items], found.last_id, found.has_more)

    async def one(self, trail: AuditTrail, job: Job, name: str) -> ItemDetail:
        """Return a request with its response, and note who read it."""
        item = await self._items.one(job, name)
        await trail.note_read("batch.item_read", "batch", job.id, {"custom_id": item.custom_id})
        return item


class AdminItemRoutes:
    def __init__(self, context: WebContext) -> None:
        self._context = context
        self._desk = ItemDesk(context)

    def routes(self) -> list[Guarded]:
        items = "/admin/v1/batches/{batch_id}/items"
        return [
            Guarded("GET", items, READ, self.list),
            Guarded("GET", f"{items}/{{custom_id:path}}", CONTENT, self.retrieve),
        ]

    async def list(self, request: Request, caller: Caller) -> Response:
        query = request.query_params
        wanted = item_filter(query, ("after", "limit"))
        count, after = requests.limit(query, ITEMS_COUNT, ITEMS_COUNT_MAX), requests.after(query, "batch_req")
        job, _ = await job_named(self._context.store, request)
        found = await self._desk.page(job, wanted, after, count)
        first_id = found.items[0].id if found.items else None
        return json_answer(Page("list", found.items, first_id, found.last_id, found.has_more))

    async def retrieve(self, request: Request, caller: Caller) -> Response:
        requests.refuse_unknown(request.query_params, ())
        job, _ = await job_named(self._context.store, request)
        trail = trail_of(self._context, request, caller)
        return json_answer(await self._desk.one(trail, job, str(request.path_params["custom_id"])))


def _without_message(item: ItemShown) -> ItemShown:
    if item.error is None:
        return item
    return msgspec.structs.replace(item, error=msgspec.structs.replace(item.error, message=""))
