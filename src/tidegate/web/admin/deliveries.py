"""Webhook deliveries of all tenants, listed and sent again."""

from starlette.requests import Request
from starlette.responses import Response

from tidegate.core.nouns import Caller
from tidegate.core.problems import no_delivery_of_anyone
from tidegate.core.states import DeliveryState
from tidegate.web.admin.audit import READ, WRITE, text, trail_of
from tidegate.web.context import WebContext
from tidegate.web.http.answers import json_answer, page_of
from tidegate.web.http.routes import Guarded
from tidegate.web.requests import requests
from tidegate.web.webhooks.webhooks import DeliveryObject, delivery_object, delivery_parts

LIST_COUNT = 20
LIST_COUNT_MAX = 100


class AdminDelivery(DeliveryObject):
    """A delivery as its owner sees it, with the owner's organization."""

    org: str


class DeliveryRoutes:
    def __init__(self, context: WebContext) -> None:
        self._context = context
        self._store = context.store

    def routes(self) -> list[Guarded]:
        return [
            Guarded("GET", "/admin/v1/deliveries", READ, self.list),
            Guarded("POST", "/admin/v1/deliveries/{delivery_id}/replay", WRITE, self.replay),
        ]

    async def list(self, request: Request, caller: Caller) -> Response:
        query = request.query_params
        requests.refuse_unknown(query, ("after", "limit", "org", "status"))
        count = requests.limit(query, LIST_COUNT, LIST_COUNT_MAX)
        status = requests.choice(query, "status", tuple(DeliveryState))
        cursor = requests.one(query, "after")
        after = None if cursor is None else delivery_parts(cursor)
        state = None if status is None else DeliveryState(status)
        found = None
        if cursor is None or after is not None:
            found = await self._store.list_every_delivery(text(query, "org"), state, after, count + 1)
        if found is None:
            raise requests.unknown_cursor()
        shown = [admin_delivery(delivery_object(one), org) for one, org in found[:count]]
        return json_answer(page_of(shown, [one.id for one in shown], has_more=len(found) > count))

    async def replay(self, request: Request, caller: Caller) -> Response:
        delivery_id = str(request.path_params["delivery_id"])
        parts = delivery_parts(delivery_id)
        tenant_id = None if parts is None else await self._store.tenant_of_delivery(*parts)
        if parts is None or tenant_id is None:
            raise no_delivery_of_anyone(delivery_id)
        noting = trail_of(self._context, request, caller).noting("delivery.replay", "delivery", delivery_id)
        found = await noting.replay_webhook(tenant_id, *parts)
        if found is None:
            raise no_delivery_of_anyone(delivery_id)
        return json_answer(delivery_object(found))


def admin_delivery(delivery: DeliveryObject, org: str) -> AdminDelivery:
    """Return a delivery with its organization."""
    return AdminDelivery(**{name: getattr(delivery, name) for name in delivery.__struct_fields__}, org=org)
