"""Pages about the requests of a batch: their outcomes and, for visitors whose key allows it, a
request with its response, and results.
"""

import contextlib
import json

import msgspec
from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tidegate.core.errors import ApiProblem
from tidegate.core.states import Outcome
from tidegate.web.admin.batches import job_named
from tidegate.web.admin.items import CONTENT, ItemDesk
from tidegate.web.console.guard import ConsoleGuard, Show
from tidegate.web.console.session import Visitor
from tidegate.web.context import WebContext
from tidegate.web.http.content import FileContents
from tidegate.web.http.filename import attachment
from tidegate.web.http.pages import older_link, page
from tidegate.web.openai.items import item_filter
from tidegate.web.requests import requests

LIST_COUNT = 50
# The most that a page shows of a request or a response.
SHOWN_CHARS_MAX = 100_000
_NO_RESULTS = "This batch has no such file: it has not ended yet, no request ended in this way, or the file expired."


class ItemPages:
    def __init__(self, context: WebContext, guard: ConsoleGuard) -> None:
        self._store = context.store
        self._guard = guard
        self._desk = ItemDesk(context)
        self._contents = FileContents(context.store, context.blobs)

    def routes(self) -> list[Route]:
        items = "/batches/{batch_id}/items"
        looks: dict[str, Show] = {
            items: self.items,
            f"{items}/{{item_id}}": self.item,
            "/batches/{batch_id}/results/{kind}": self.results,
        }
        return self._guard.routes(looks, {})

    async def results(self, request: Request, visitor: Visitor) -> Response:
        """Send a result file of an ended batch as a download, and note in the audit who read it."""
        _require_content(visitor)
        job, _ = await job_named(self._store, request)
        kind = str(request.path_params["kind"])
        file_id = {"output": job.output_file_id, "errors": job.error_file_id}.get(kind)
        file = await self._store.get_file(job.tenant_id, file_id) if file_id else None
        if file is None:
            raise ApiProblem(404, "file_not_found", _NO_RESULTS)
        await self._guard.trail(visitor).note_read("batch.download", "batch", job.id, {"file": kind})
        headers = {"Content-Disposition": attachment(file.filename)}
        return await self._contents.answer(request, file.id, file.size_bytes, headers)

    async def items(self, request: Request, visitor: Visitor) -> Response:
        given = QueryParams([(name, value) for name, value in request.query_params.multi_items() if value])
        wanted = item_filter(given, ("after",))
        job, org = await job_named(self._store, request)
        found = await self._desk.page(job, wanted, requests.after(given, "batch_req"), LIST_COUNT)
        return page(
            "console/items.html",
            visitor=visitor,
            here="batches",
            job=job,
            org=org,
            items=found.items,
            asked=wanted,
            outcomes=[outcome.value for outcome in Outcome],
            older=older_link(request, found.last_id) if found.has_more and found.last_id else None,
        )

    async def item(self, request: Request, visitor: Visitor) -> Response:
        _require_content(visitor)
        job, org = await job_named(self._store, request)
        one = await self._desk.one(self._guard.trail(visitor), job, str(request.path_params["item_id"]))
        return page(
            "console/item.html",
            visitor=visitor,
            here="batches",
            job=job,
            org=org,
            item=one,
            request=_pretty(one.request),
            response=_pretty(one.response),
        )


def _require_content(visitor: Visitor) -> None:
    if not visitor.may_read_content:
        raise ApiProblem(403, "insufficient_scope", f"Requests and responses need a key with the scope `{CONTENT}`.")


def _pretty(raw: msgspec.Raw) -> str:
    """Return JSON with a field on each line; text that is not JSON stays unchanged.

    Both are cut to a bounded length.
    """
    text = bytes(raw).decode("utf-8", "replace")
    with contextlib.suppress(ValueError, RecursionError):
        text = json.dumps(json.loads(text), indent=2, ensure_ascii=False)
    return text if len(text) <= SHOWN_CHARS_MAX else text[:SHOWN_CHARS_MAX] + "\n…"
