"""OpenAI's webhook endpoints, as its SDK manages them, and the deliveries to them, which OpenAI
does not show.

Only the answer that makes or rotates a signing secret shows it. Of a receiver's answer a tenant
sees only the status.
"""

from collections import Counter
from hashlib import sha256
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tidegate.core import ids
from tidegate.core.errors import ApiProblem
from tidegate.core.nouns import Caller, Idempotency
from tidegate.core.problems import no_such_delivery, no_such_webhook_endpoint
from tidegate.core.states import DeliveryState
from tidegate.core.webhooks import (
    EVENT_TYPES,
    OLD_SECRET_MS,
    SECRET_BYTES,
    EndpointShape,
    WebhookDelivery,
    WebhookEndpoint,
)
from tidegate.stages.accept import Reception
from tidegate.stages.deliver import send_test
from tidegate.web.context import WebContext
from tidegate.web.http.answers import json_answer, page_of
from tidegate.web.http.routes import Guarded
from tidegate.web.requests import requests
from tidegate.web.requests.webhook_requests import EventTypes, bad, check_events, check_url

NAME_CHARS_MAX = 255
LIST_COUNT = 20
LIST_COUNT_MAX = 100
TESTS_MAX = 5


class EndpointCreate(msgspec.Struct, forbid_unknown_fields=True):
    event_types: EventTypes
    name: str
    url: str


class EndpointChange(msgspec.Struct, forbid_unknown_fields=True):
    event_types: EventTypes | None = None
    name: str | None = None
    url: str | None = None


class SecretRotation(msgspec.Struct, forbid_unknown_fields=True):
    keep_old_secret_active_for_24_hours: bool = False


class EndpointTest(msgspec.Struct, forbid_unknown_fields=True):
    event_type: str


class EndpointExtras(msgspec.Struct):
    """The state of an endpoint: whether events are sent there, and if not, since when and why.

    The reason is `gone` after a 410, and `failing` after days without a success.
    """

    enabled: bool
    disabled_at: int | None
    disabled_reason: str | None


class EndpointObject(msgspec.Struct, omit_defaults=True):
    id: str
    object: str
    created_at: int
    updated_at: int
    name: str
    url: str
    event_types: list[str]
    signing_secret_hint: str
    tidegate: EndpointExtras
    signing_secret: str | None = None


class EndpointDeleted(msgspec.Struct):
    id: str
    object: str
    deleted: bool


class EndpointTestResult(msgspec.Struct):
    object: str
    webhook_endpoint_id: str
    event_type: str
    status_code: int
    success: bool


class EventTypeList(msgspec.Struct):
    object: str
    data: list[str]


class DeliveryObject(msgspec.Struct):
    """`failure` is the kind of the last try's failure; `next_attempt_at` is null when no more tries
    follow.
    """

    id: str
    object: str
    event_id: str
    event_type: str
    webhook_endpoint_id: str
    url: str
    batch_id: str
    status: str
    attempts: int
    created_at: int
    next_attempt_at: int | None
    ended_at: int | None
    failure: str | None


class WebhookRoutes:
    def __init__(self, context: WebContext, reception: Reception) -> None:
        self._store = context.store
        self._entropy = context.entropy
        self._callbacks = context.callbacks
        self._rules = context.settings.callbacks.rules()
        self._bytes_max = context.settings.limits.body_bytes_max
        self._reception = reception
        self._tests: Counter[str] = Counter()

    def routes(self) -> list[Guarded]:
        endpoint = "/v1/webhook_endpoints/{webhook_endpoint_id}"
        return [
            Guarded("POST", "/v1/webhook_endpoints", "batches:write", self.create),
            Guarded("GET", "/v1/webhook_endpoints", "batches:read", self.list),
            Guarded("GET", endpoint, "batches:read", self.retrieve),
            Guarded("POST", endpoint, "batches:write", self.update),
            Guarded("DELETE", endpoint, "batches:write", self.delete),
            Guarded("POST", f"{endpoint}/rotate_secret", "batches:write", self.rotate_secret),
            Guarded("POST", f"{endpoint}/test", "batches:write", self.test),
            Guarded("GET", "/v1/webhook_event_types", "batches:read", self.event_types),
            Guarded("GET", "/v1/webhook_deliveries", "batches:read", self.deliveries),
            Guarded("POST", "/v1/webhook_deliveries/{delivery_id}/replay", "batches:write", self.replay),
        ]

    async def create(self, request: Request, caller: Caller) -> Response:
        key = requests.idempotency_key(request)
        async with self._reception.running_keys.hold_key(caller.tenant_id, "webhook_endpoints", key):
            body = await requests.json_body(request, EndpointCreate, self._bytes_max)
            shape = self._shape(body.name, body.url, body.event_types)
            idempotency = Idempotency(key, sha256(msgspec.json.encode(body)).hexdigest()) if key else None
            endpoint_id = ids.make("whk", self._entropy.token_bytes(ids.RANDOM_BYTES))
            secret = self._entropy.token_bytes(SECRET_BYTES)
            made = await self._reception.replayed(
                lambda: self._store.create_webhook_endpoint(caller.tenant_id, endpoint_id, shape, secret, idempotency)
            )
        return json_answer(_endpoint_object(made, shows_secret=True))

    async def list(self, request: Request, caller: Caller) -> Response:
        query = request.query_params
        requests.refuse_unknown(query, ("after", "limit"))
        count = requests.limit(query, LIST_COUNT, LIST_COUNT_MAX)
        after = requests.after(query, "whk")
        found = await self._store.list_webhook_endpoints(caller.tenant_id, after, count + 1)
        if found is None:
            raise requests.unknown_cursor()
        shown = [_endpoint_object(one) for one in found[:count]]
        return json_answer(page_of(shown, [one.id for one in shown], has_more=len(found) > count))

    async def retrieve(self, request: Request, caller: Caller) -> Response:
        return json_answer(_endpoint_object(await self._endpoint(request, caller)))

    async def update(self, request: Request, caller: Caller) -> Response:
        endpoint_id = (await self._endpoint(request, caller)).id
        body = await requests.json_body(request, EndpointChange, self._bytes_max)
        shape = self._shape(body.name, body.url, body.event_types)
        changed = await self._reception.replayed(
            lambda: self._store.change_webhook_endpoint(caller.tenant_id, endpoint_id, shape)
        )
        if changed is None:
            raise no_such_webhook_endpoint(endpoint_id)
        return json_answer(_endpoint_object(changed))

    async def delete(self, request: Request, caller: Caller) -> Response:
        endpoint_id = _endpoint_id(request)
        if not await self._store.delete_webhook_endpoint(caller.tenant_id, endpoint_id):
            raise no_such_webhook_endpoint(endpoint_id)
        return json_answer(EndpointDeleted(endpoint_id, "webhook_endpoint.deleted", True))

    async def rotate_secret(self, request: Request, caller: Caller) -> Response:
        endpoint_id = (await self._endpoint(request, caller)).id
        body = await requests.optional_json_body(request, SecretRotation, self._bytes_max)
        secret = self._entropy.token_bytes(SECRET_BYTES)
        keep_ms = OLD_SECRET_MS if body.keep_old_secret_active_for_24_hours else 0
        rotated = await self._reception.replayed(
            lambda: self._store.rotate_webhook_secret(caller.tenant_id, endpoint_id, secret, keep_ms)
        )
        if rotated is None:
            raise no_such_webhook_endpoint(endpoint_id)
        return json_answer(_endpoint_object(rotated, shows_secret=True))

    async def test(self, request: Request, caller: Caller) -> Response:
        endpoint = await self._endpoint(request, caller)
        body = await requests.json_body(request, EndpointTest, self._bytes_max)
        check_events([body.event_type], "event_type")
        if self._tests[caller.tenant_id] >= TESTS_MAX:
            raise ApiProblem(
                429,
                "too_many_tests",
                f"{TESTS_MAX} tests of webhook endpoints run already; wait for them.",
                retry_after_s=15,
            )
        self._tests[caller.tenant_id] += 1
        try:
            reply = await send_test(
                self._callbacks, self._entropy, endpoint, body.event_type, await self._store.now_ms()
            )
        finally:
            self._tests[caller.tenant_id] -= 1
            self._tests += Counter()
        if not reply.status:
            raise ApiProblem(
                400,
                "webhook_test_failed",
                f"No answer came from the webhook endpoint: {reply.word}. Check its URL, its certificate and its firewall.",
            )
        result = EndpointTestResult("webhook_endpoint.test", endpoint.id, body.event_type, reply.status, True)
        return json_answer(result)

    async def event_types(self, request: Request, caller: Caller) -> Response:
        return json_answer(EventTypeList("list", list(EVENT_TYPES)))

    async def deliveries(self, request: Request, caller: Caller) -> Response:
        query = request.query_params
        requests.refuse_unknown(query, ("after", "limit", "status"))
        count = requests.limit(query, LIST_COUNT, LIST_COUNT_MAX)
        status = requests.choice(query, "status", tuple(DeliveryState))
        text = requests.one(query, "after")
        after = None if text is None else delivery_parts(text)
        if text is not None and after is None:
            raise requests.unknown_cursor()
        state = None if status is None else DeliveryState(status)
        found = await self._store.list_webhook_deliveries(caller.tenant_id, state, after, count + 1)
        if found is None:
            raise requests.unknown_cursor()
        shown = [delivery_object(one) for one in found[:count]]
        return json_answer(page_of(shown, [one.id for one in shown], has_more=len(found) > count))

    async def replay(self, request: Request, caller: Caller) -> Response:
        delivery_id = str(request.path_params["delivery_id"])
        parts = delivery_parts(delivery_id)
        if parts is None:
            raise no_such_delivery(delivery_id)
        found = await self._reception.replayed(lambda: self._store.replay_webhook(caller.tenant_id, *parts))
        if found is None:
            raise no_such_delivery(delivery_id)
        return json_answer(delivery_object(found))

    async def _endpoint(self, request: Request, caller: Caller) -> WebhookEndpoint:
        endpoint_id = _endpoint_id(request)
        endpoint = await self._store.webhook_endpoint(caller.tenant_id, endpoint_id)
        if endpoint is None:
            raise no_such_webhook_endpoint(endpoint_id)
        return endpoint

    def _shape(self, name: str | None, url: str | None, event_types: Any) -> EndpointShape:
        """Check the values that an owner sets; values that are not given stay None."""
        if name is not None and not (1 <= len(name) <= NAME_CHARS_MAX and name.isprintable()):
            raise bad("name", f"`name` must have 1 to {NAME_CHARS_MAX} printable characters.")
        if url is not None:
            check_url(url, self._rules, "url")
        types = None if event_types is None else check_events(event_types, "event_types")
        return EndpointShape(name, url, types)


def _endpoint_id(request: Request) -> str:
    endpoint_id = str(request.path_params["webhook_endpoint_id"])
    if not ids.is_valid("whk", endpoint_id):
        raise no_such_webhook_endpoint(endpoint_id)
    return endpoint_id


def delivery_parts(delivery_id: str) -> tuple[str, str] | None:
    """Return the event and the endpoint in a delivery's id; None for anything else."""
    event_id, _, endpoint_id = delivery_id.partition(".")
    return (event_id, endpoint_id) if ids.is_valid("evt", event_id) and ids.is_valid("whk", endpoint_id) else None


def _endpoint_object(endpoint: WebhookEndpoint, *, shows_secret: bool = False) -> EndpointObject:
    disabled_at = endpoint.disabled_at
    return EndpointObject(
        id=endpoint.id,
        object="webhook_endpoint",
        created_at=endpoint.created_at // 1000,
        updated_at=endpoint.updated_at // 1000,
        name=endpoint.name,
        url=endpoint.url,
        event_types=list(endpoint.event_types),
        signing_secret_hint=endpoint.secret_hint,
        tidegate=EndpointExtras(
            disabled_at is None, None if disabled_at is None else disabled_at // 1000, endpoint.disabled_why
        ),
        signing_secret=endpoint.secret.reveal() if shows_secret else None,
    )


def delivery_object(delivery: WebhookDelivery) -> DeliveryObject:
    is_pending = delivery.state is DeliveryState.PENDING
    return DeliveryObject(
        id=f"{delivery.event_id}.{delivery.endpoint_id}",
        object="webhook_delivery",
        event_id=delivery.event_id,
        event_type=delivery.event_type,
        webhook_endpoint_id=delivery.endpoint_id,
        url=delivery.url,
        batch_id=delivery.job_id,
        status=delivery.state.value,
        attempts=delivery.attempt_count,
        created_at=delivery.created_at // 1000,
        next_attempt_at=delivery.due_at // 1000 if is_pending else None,
        ended_at=None if delivery.ended_at is None else delivery.ended_at // 1000,
        failure=delivery.failure,
    )
