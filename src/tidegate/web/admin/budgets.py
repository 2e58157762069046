"""Budgets of organizations: each limit, and its present rest."""

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tidegate.core.errors import ApiProblem
from tidegate.core.nouns import Caller
from tidegate.web.admin.audit import READ, text
from tidegate.web.context import WebContext
from tidegate.web.http.answers import json_answer, page_of
from tidegate.web.http.routes import Guarded
from tidegate.web.jobs.limit_rooms import CallerLimit, LimitRooms
from tidegate.web.requests import requests

LIST_COUNT = 20
LIST_COUNT_MAX = 100


class OrgBudgets(msgspec.Struct, frozen=True):
    """The limits of an organization as a whole, without those of its keys, teams and users."""

    id: str
    object: str
    org: str
    limits: list[CallerLimit]


class BudgetRoutes:
    def __init__(self, context: WebContext) -> None:
        self._store = context.store
        self._rooms = LimitRooms(context)

    def routes(self) -> list[Guarded]:
        return [Guarded("GET", "/admin/v1/budgets", READ, self.list)]

    async def list(self, request: Request, caller: Caller) -> Response:
        """Show organizations with their limits, newest first, or only the one that is named."""
        query = request.query_params
        requests.refuse_unknown(query, ("after", "limit", "org"))
        count = requests.limit(query, LIST_COUNT, LIST_COUNT_MAX)
        org = text(query, "org")
        if org is not None:
            tenant_id = await self._store.tenant_by_name(org)
            if tenant_id is None:
                raise ApiProblem(404, "tenant_not_found", "There is no organization of this name.", param="org")
            found, has_more = [(tenant_id, org)], False
        else:
            rows = await self._store.list_orgs(after=requests.after(query, "tenant"), count_max=count + 1)
            if rows is None:
                raise requests.unknown_cursor()
            found, has_more = [(row["id"], row["name"]) for row in rows[:count]], len(rows) > count
        shown = [
            OrgBudgets(tenant_id, "org.budgets", name, await self._rooms.of_caller(Caller(tenant_id)))
            for tenant_id, name in found
        ]
        return json_answer(page_of(shown, [one.id for one in shown], has_more=has_more))
