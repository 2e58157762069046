"""Pages about operations: what an action on a filter would change, the progress of an operation,
and the list of all.
"""

from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from tidegate.core.errors import ApiProblem
from tidegate.web.admin.operations import ACTIONS, OperationDesk, scope_of
from tidegate.web.console.guard import ConsoleGuard
from tidegate.web.console.live_pages import LiveView
from tidegate.web.console.session import Visitor
from tidegate.web.context import WebContext
from tidegate.web.http.pages import older_link, page
from tidegate.web.requests import requests

LIST_COUNT = 50


class OperationPages:
    def __init__(self, context: WebContext, guard: ConsoleGuard) -> None:
        self._guard = guard
        self._desk = OperationDesk(context)

    def routes(self) -> list[Route]:
        return [
            *self._guard.routes(
                {"/operations/impact": self.impact},
                {"/operations": self.begin_operation, "/operations/{operation_id}/cancel": self.cancel},
            ),
            *self._guard.live_routes(
                {
                    "/operations": (self.operations, 5),
                    "/operations/{operation_id}": (self.operation, 1),
                }
            ),
        ]

    async def operations(self, request: Request, visitor: Visitor) -> LiveView:
        query = request.query_params
        requests.refuse_unknown(query, ("after",))
        found = await self._desk.page(requests.after(query, "op"), LIST_COUNT + 1)
        shown = found[:LIST_COUNT]
        older = older_link(request, str(shown[-1].id)) if len(found) > LIST_COUNT else None
        values = {"visitor": visitor, "here": "operations", "operations": shown, "older": older}
        return LiveView("console/operations.html", values)

    async def impact(self, request: Request, visitor: Visitor) -> Response:
        """Show what would change; the page's form starts the operation."""
        action, asked = _asked(request.query_params.multi_items())
        seen = await self._desk.impact(scope_of(action, asked))
        return page("console/impact.html", visitor=visitor, here="batches", seen=seen, asked=asked.multi_items())

    async def begin_operation(self, request: Request, visitor: Visitor) -> Response:
        form = await self._guard.form(request, visitor)
        action, asked = _asked([(name, value) for name, value in form.items() if name != "csrf"])
        made = await self._desk.make(self._guard.trail(visitor), scope_of(action, asked))
        return RedirectResponse(f"/console/operations/{made.id}", 303)

    async def operation(self, request: Request, visitor: Visitor) -> LiveView:
        one = await self._desk.one(str(request.path_params["operation_id"]))
        values = {"visitor": visitor, "here": "operations", "one": one}
        return LiveView("console/operation.html", values, is_over=one.status != "running")

    async def cancel(self, request: Request, visitor: Visitor) -> Response:
        await self._guard.form(request, visitor)
        one = await self._desk.one(str(request.path_params["operation_id"]))
        await self._desk.cancel(self._guard.trail(visitor), str(one.id))
        return RedirectResponse(f"/console/operations/{one.id}", 303)


def _asked(pairs: list[tuple[str, str]]) -> tuple[str, QueryParams]:
    """Return the action and the filter of a form, without its empty fields."""
    given = QueryParams([(name, value) for name, value in pairs if value and name != "action"])
    action = dict(pairs).get("action", "")
    if action not in ACTIONS:
        raise ApiProblem(400, "invalid_parameter", f"`action` must be one of {', '.join(ACTIONS)}.", param="action")
    return action, given
