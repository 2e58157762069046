"""Pages about organizations: their budgets, spend, keys and webhooks.

Keys are made and revoked here.
"""

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from tidegate.core import ids
from tidegate.core.errors import ApiProblem
from tidegate.core.keys import PUBLIC_ID
from tidegate.core.nouns import Caller
from tidegate.core.usage import spending
from tidegate.core.usage.spending import SpendEntry
from tidegate.web.admin.keys import KeyMade, KeyRequest, key_shown, make_key, revoke_key
from tidegate.web.console.guard import ConsoleGuard
from tidegate.web.console.session import Visitor
from tidegate.web.context import WebContext
from tidegate.web.http.pages import older_link, page
from tidegate.web.jobs.limit_rooms import LimitRooms
from tidegate.web.requests import requests

LIST_COUNT = 50
KEYS_SHOWN = 100
WEBHOOKS_SHOWN = 50
DAYS_SHOWN = 31
DAY_MS = 86_400_000
# The scopes that a key made here can get; the empty choice allows everything of a tenant's.
SCOPE_CHOICES = {
    "": "everything of a tenant's",
    "admin:read": "look at the console",
    "admin:write": "act in the console",
}


class OrgPages:
    def __init__(self, context: WebContext, guard: ConsoleGuard) -> None:
        self._context = context
        self._store = context.store
        self._guard = guard
        self._rooms = LimitRooms(context)

    def routes(self) -> list[Route]:
        return self._guard.routes(
            {"/orgs": self.orgs, "/orgs/{org_id}": self.org},
            {"/orgs/{org_id}/keys": self.make, "/orgs/{org_id}/revoke": self.revoke},
        )

    async def orgs(self, request: Request, visitor: Visitor) -> Response:
        requests.refuse_unknown(request.query_params, ("after",))
        after = requests.after(request.query_params, "tenant")
        orgs = await self._store.list_orgs(after=after, count_max=LIST_COUNT + 1)
        if orgs is None:
            raise requests.unknown_cursor()
        spent = spending.sum_by(await self._spent(""), ["organization"])
        older = older_link(request, orgs[LIST_COUNT - 1]["id"]) if len(orgs) > LIST_COUNT else None
        return page(
            "console/orgs.html",
            visitor=visitor,
            here="orgs",
            orgs=orgs[:LIST_COUNT],
            spent={one.organization: one.spend for one in spent},
            days=DAYS_SHOWN,
            older=older,
        )

    async def org(self, request: Request, visitor: Visitor) -> Response:
        requests.refuse_unknown(request.query_params, ("after",))
        return await self._org(request, visitor)

    async def make(self, request: Request, visitor: Visitor) -> Response:
        """Make a key and show it; no other page shows it."""
        form = await self._guard.form(request, visitor)
        _, name = await self._named(request)
        scope = form.get("scope", "")
        if scope not in SCOPE_CHOICES:
            raise ApiProblem(400, "invalid_parameter", "There is no such choice of scopes.", param="scope")
        wanted = KeyRequest(org=name, label=form.get("label", "").strip(), scopes=[scope] if scope else [])
        made = await make_key(self._guard.trail(visitor), self._context.entropy, self._context.pepper, wanted)
        return await self._org(request, visitor, made)

    async def revoke(self, request: Request, visitor: Visitor) -> Response:
        form = await self._guard.form(request, visitor)
        org_id, _ = await self._named(request)
        key_id = form.get("key_id", "")
        row = await self._store.get_key(key_id) if PUBLIC_ID.fullmatch(key_id) else None
        if row is None or row["tenant_id"] != org_id:
            raise ApiProblem(404, "key_not_found", "This organization has no such key.")
        await revoke_key(self._guard.trail(visitor), key_id)
        return RedirectResponse(f"/console/orgs/{org_id}", 303)

    async def _org(self, request: Request, visitor: Visitor, made: KeyMade | None = None) -> Response:
        org_id, name = await self._named(request)
        spent = await self._spent(org_id)
        after = requests.one(request.query_params, "after")
        keys = await self._store.key_page(name, after=after, count_max=KEYS_SHOWN + 1)
        if keys is None:
            raise requests.unknown_cursor()
        return page(
            "console/org.html",
            visitor=visitor,
            here="orgs",
            org_id=org_id,
            name=name,
            limits=await self._rooms.of_caller(Caller(org_id)),
            by_model=spending.sum_by(spent, ["model"]),
            by_day=spending.sum_by(spent, ["day"])[::-1],
            days=DAYS_SHOWN,
            keys=[key_shown(row) for row in keys[:KEYS_SHOWN]],
            older_keys=keys[KEYS_SHOWN - 1]["id"] if len(keys) > KEYS_SHOWN else None,
            webhooks=await self._store.list_webhook_endpoints(org_id, None, WEBHOOKS_SHOWN) or [],
            made=made,
            choices=SCOPE_CHOICES,
        )

    async def _spent(self, tenant_id: str) -> list[SpendEntry]:
        today = self._context.clock.now_ms() // DAY_MS
        return await self._store.usage(today - DAYS_SHOWN + 1, today + 1, tenant_id=tenant_id)

    async def _named(self, request: Request) -> tuple[str, str]:
        """Return the id and the name of the organization that the path names."""
        org_id = str(request.path_params["org_id"])
        name = await self._store.tenant_name(org_id) if ids.is_valid("tenant", org_id) else None
        if name is None:
            raise ApiProblem(404, "tenant_not_found", "There is no such organization.")
        return org_id, name
