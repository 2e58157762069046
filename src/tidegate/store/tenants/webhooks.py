"""Verbs about webhook endpoints and the deliveries to them.

The verbs that end a job write the outbox in their transaction: see `put_events`. Signing secrets
leave the store only with an endpoint, for its owner, and with a leased delivery.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from tidegate.core.callback_targets import CallbackReply
from tidegate.core.errors import ApiProblem
from tidegate.core.nouns import Idempotency
from tidegate.core.states import DeliveryState
from tidegate.core.webhooks import (
    DISABLED_AFTER_MS,
    EndpointShape,
    LeasedDelivery,
    WebhookDelivery,
    WebhookEndpoint,
    secret_text,
)
from tidegate.core.wording import in_words
from tidegate.failpoints import hit
from tidegate.store.database.driver import Row, Tx
from tidegate.store.database.table import (
    Table,
    frees,
    idempotent_object,
    reads,
    refuse_forgotten,
    remember_object,
    writes,
)

ENDPOINTS_MAX = 100
# The deliveries that one transaction deletes. They take the store about a tenth of a second.
DELETED_AT_ONCE = 1_000
_ENDPOINTS_START = (1 << 62, "")
_DELIVERIES_START = (1 << 62, "", "")
_DELIVERY_COLUMNS = (
    "event_id", "endpoint_id", "job_id", "url", "event_type", "attempt_count", "created_at", "due_at", "ended_at", "status", "failure",
)  # fmt: skip


class Webhooks(Table):
    @writes
    async def create_webhook_endpoint(
        self,
        tx: Tx,
        tenant_id: str,
        endpoint_id: str,
        shape: EndpointShape,
        secret: bytes,
        idempotency: Idempotency | None = None,
    ) -> WebhookEndpoint:
        """Write a new endpoint with all parts of its shape.

        A repeat, or a known Idempotency-Key, returns the endpoint that was made before.
        """
        await tx.one("tenant_lock", tenant_id=tenant_id)
        if known := await _endpoint(tx, tenant_id, endpoint_id):
            return known
        if earlier := await idempotent_object(tx, tenant_id, "webhook_endpoints", idempotency):
            return await _endpoint(tx, tenant_id, earlier) or refuse_forgotten()
        [(count,)] = await tx.all("webhook_endpoint_count", tenant_id=tenant_id)
        if count >= ENDPOINTS_MAX:
            raise ApiProblem(
                400,
                "too_many_webhook_endpoints",
                f"You have {in_words(count, 'webhook endpoint')}; the limit is {ENDPOINTS_MAX}. Delete one.",
            )
        await put_endpoint(tx, tenant_id, endpoint_id, shape, secret)
        await remember_object(tx, tenant_id, "webhook_endpoints", idempotency, endpoint_id)
        return _endpoint_from((await tx.dicts("webhook_endpoint_get", tenant_id=tenant_id, id=endpoint_id))[0])

    @reads
    async def webhook_endpoint(self, tx: Tx, tenant_id: str, endpoint_id: str) -> WebhookEndpoint | None:
        """Return one of a tenant's endpoints."""
        return await _endpoint(tx, tenant_id, endpoint_id)

    @reads
    async def webhook_endpoint_of_job(self, tx: Tx, tenant_id: str, job_id: str) -> WebhookEndpoint | None:
        """Return the endpoint that came with the creation of this job."""
        rows = await tx.dicts("webhook_endpoint_of_job", tenant_id=tenant_id, job_id=job_id)
        return _endpoint_from(rows[0]) if rows else None

    @reads
    async def wants_response_events(self, tx: Tx, tenant_id: str) -> bool:
        """Return whether a webhook of this tenant wants events of background responses."""
        return await tx.one("webhook_responses_wanted", tenant_id=tenant_id) is not None

    @reads
    async def list_webhook_endpoints(
        self, tx: Tx, tenant_id: str, after: str | None, count_max: int
    ) -> list[WebhookEndpoint] | None:
        """Return a page of a tenant's endpoints, newest first; None if `after` is none of them."""
        start: Row | None = _ENDPOINTS_START
        if after is not None:
            start = await tx.one("webhook_endpoint_cursor", tenant_id=tenant_id, id=after)
        if start is None:
            return None
        rows = await tx.dicts(
            "webhook_endpoint_list", tenant_id=tenant_id, created_at=start[0], id=start[1], count_max=count_max
        )
        return [_endpoint_from(row) for row in rows]

    @writes
    async def change_webhook_endpoint(
        self, tx: Tx, tenant_id: str, endpoint_id: str, shape: EndpointShape
    ) -> WebhookEndpoint | None:
        """Change an endpoint, and enable it if it was disabled.

        Return None if there is no such endpoint.
        """
        types = None if shape.event_types is None else ",".join(shape.event_types)
        await tx.one(
            "webhook_endpoint_change",
            tenant_id=tenant_id,
            id=endpoint_id,
            name=shape.name,
            url=shape.url,
            event_types=types,
        )
        return await _endpoint(tx, tenant_id, endpoint_id)

    @writes
    async def rotate_webhook_secret(
        self, tx: Tx, tenant_id: str, endpoint_id: str, secret: bytes, keep_ms: int
    ) -> WebhookEndpoint | None:
        """Sign with a new secret, and for a while also with the old one.

        Return None if there is no such endpoint.
        """
        await tx.one("webhook_secret_rotate", tenant_id=tenant_id, id=endpoint_id, secret=secret, keep_ms=keep_ms)
        return await _endpoint(tx, tenant_id, endpoint_id)

    async def delete_webhook_endpoint(self, tenant_id: str, endpoint_id: str) -> bool:
        """Delete an endpoint and its deliveries; False if there is no such endpoint.

        The deliveries go first, in pieces. If this is interrupted the endpoint remains, and a
        repeat goes on.
        """
        while (deleted := await self._delete_endpoint(tenant_id, endpoint_id)) is None:
            await hit("deliveries_deleted")
        return deleted

    @frees
    async def _delete_endpoint(self, tx: Tx, tenant_id: str, endpoint_id: str) -> bool | None:
        """Delete some deliveries of an endpoint, and with the last of them the endpoint.

        Return None if there may be more.
        """
        if await _endpoint(tx, tenant_id, endpoint_id) is None:
            return False
        name = {"tenant_id": tenant_id, "endpoint_id": endpoint_id}
        gone = await tx.all("webhook_deliveries_delete", count_max=DELETED_AT_ONCE, **name)
        if await _mark_places(tx, gone) == DELETED_AT_ONCE:
            return None
        await tx.all("webhook_endpoint_place_put", tenant_id=tenant_id, id=endpoint_id)
        deleted = await tx.one("webhook_endpoint_delete", tenant_id=tenant_id, id=endpoint_id) is not None
        # Jobs that ended in this moment may have added deliveries. The deletion waited for them,
        # and no later job adds any.
        await _mark_places(tx, await tx.all("webhook_deliveries_delete", count_max=DELETED_AT_ONCE, **name))
        return deleted

    @reads
    async def any_webhook_due(self, tx: Tx) -> bool:
        """Return whether a delivery is due that no living worker has leased."""
        return await tx.one("webhook_deliveries_due") is not None

    @writes
    async def lease_webhooks(
        self, tx: Tx, worker_id: str, token: str, *, count_max: int, tenant_max: int, endpoint_max: int | None = None
    ) -> list[LeasedDelivery]:
        """Lease due deliveries, fair between tenants and between the endpoints of a tenant.

        Each tenant and each endpoint has a maximum of deliveries under way. A repeat with the same
        token returns also what was leased before.
        """
        by = {"worker_id": worker_id, "token": token}
        bound = tenant_max if endpoint_max is None else endpoint_max
        tenants = await tx.all("webhook_tenants_due", tenant_max=tenant_max, count_max=count_max)
        left = count_max
        for place, (tenant_id, out_count) in enumerate(tenants):
            share = min(tenant_max - out_count, -(-left // (len(tenants) - place)))
            left -= await _lease_of_tenant(tx, tenant_id, share, bound, by)
        return [_leased_from(row, token) for row in await tx.dicts("webhook_deliveries_leased", token=token)]

    async def record_webhook(
        self, leased: LeasedDelivery, reply: CallbackReply, wait_ms: int | None
    ) -> DeliveryState | None:
        """Record the result of a try.

        Return None if another process has the delivery, or it is recorded already. Without a wait,
        a failure is final. If this disables the endpoint, its other deliveries fail too, in pieces.
        If that is interrupted, each of the rest is sent once more.
        """
        state, is_disabled = await self._record_try(leased, reply, wait_ms)
        while is_disabled and await self._fail_rest(leased.endpoint_id) == DELETED_AT_ONCE:
            continue
        return state

    @writes
    async def _fail_rest(self, tx: Tx, endpoint_id: str) -> int:
        return len(await tx.all("webhook_deliveries_fail_rest", endpoint_id=endpoint_id, count_max=DELETED_AT_ONCE))

    @writes
    async def _record_try(
        self, tx: Tx, leased: LeasedDelivery, reply: CallbackReply, wait_ms: int | None
    ) -> tuple[DeliveryState | None, bool]:
        """Record a try. Return the delivery's state, and whether this disabled its endpoint."""
        endpoint = await tx.one("webhook_endpoint_lock", id=leased.endpoint_id)
        if endpoint is None:
            return None, False
        guard = {"event_id": leased.event_id, "endpoint_id": leased.endpoint_id, "token": leased.token}
        status = reply.status or None
        if reply.is_success:
            if await tx.one("webhook_delivered", status=status, **guard) is None:
                return None, False
            await tx.all("webhook_endpoint_recovered", id=leased.endpoint_id)
            name = {"event_id": leased.event_id, "endpoint_id": leased.endpoint_id}
            if gone := await tx.one("webhook_delivered_forget", **name):
                await tx.all("webhook_delivery_place_put", tenant_id=gone[1], created_at=gone[2], **name)
                await tx.all("webhook_endpoint_forget", job_id=gone[0])
            return DeliveryState.DELIVERED, False
        if wait_ms is None or endpoint[0] is not None:
            state, row = (
                DeliveryState.FAILED,
                await tx.one("webhook_failed", status=status, failure=reply.word, **guard),
            )
        else:
            state, row = (
                DeliveryState.PENDING,
                await tx.one("webhook_postponed", status=status, failure=reply.word, wait_ms=wait_ms, **guard),
            )
        if row is None:
            return None, False
        await tx.all("webhook_endpoint_failing", id=leased.endpoint_id)
        why, failing_ms = ("gone", 0) if reply.is_gone else ("failing", DISABLED_AFTER_MS)
        disabled = await tx.one("webhook_endpoint_disable", id=leased.endpoint_id, why=why, failing_ms=failing_ms)
        return state, disabled is not None

    @reads
    async def list_webhook_deliveries(
        self, tx: Tx, tenant_id: str, state: DeliveryState | None, after: tuple[str, str] | None, count_max: int
    ) -> list[WebhookDelivery] | None:
        """Return a page of a tenant's deliveries, newest first; None if `after` is none of them.

        `after` is an event and an endpoint.
        """
        start = await deliveries_start(tx, after, tenant_id)
        if start is None:
            return None
        created_at, event_id, endpoint_id = start
        rows = await tx.dicts(
            "webhook_delivery_list",
            tenant_id=tenant_id,
            state=state,
            created_at=created_at,
            event_id=event_id,
            endpoint_id=endpoint_id,
            count_max=count_max,
        )
        return [delivery_from(row) for row in rows]

    @writes
    async def replay_webhook(self, tx: Tx, tenant_id: str, event_id: str, endpoint_id: str) -> WebhookDelivery | None:
        """Send a delivery again from its first try, also to a disabled endpoint.

        Return None if there is none. A delivery that waits already is not changed.
        """
        name = {"tenant_id": tenant_id, "event_id": event_id, "endpoint_id": endpoint_id}
        await tx.one("webhook_delivery_replay", **name)
        rows = await tx.dicts("webhook_delivery_get", **name)
        return delivery_from(rows[0]) if rows else None

    async def prune_webhooks(self, keep_ms: int, count_max: int) -> None:
        """Forget failed deliveries of some gone jobs whose events are older than `keep_ms`."""
        for job_id in await self._gone_jobs(keep_ms, count_max):
            while await self._drop_deliveries(job_id) == DELETED_AT_ONCE:
                await hit("deliveries_deleted")

    @reads
    async def _gone_jobs(self, tx: Tx, keep_ms: int, count_max: int) -> list[str]:
        gone = await tx.all("webhook_jobs_gone", keep_ms=keep_ms, count_max=count_max)
        return sorted({row[0] for row in gone})

    @frees
    async def _drop_deliveries(self, tx: Tx, job_id: str) -> int:
        dropped = await tx.all("webhook_deliveries_drop", job_id=job_id, count_max=DELETED_AT_ONCE)
        await tx.all("webhook_endpoint_forget", job_id=job_id)
        return await _mark_places(tx, dropped)


async def deliveries_start(
    tx: Tx, after: tuple[str, str] | None, tenant_id: str | None = None
) -> tuple[int, str, str] | None:
    """Return where a page of deliveries begins.

    Return None if `after` is no delivery, or none of this tenant. `after` is an event and an
    endpoint.
    """
    if after is None:
        return _DELIVERIES_START
    known = await tx.one("webhook_delivery_cursor", event_id=after[0], endpoint_id=after[1])
    if known is None or tenant_id not in (None, known[0]):
        return None
    return (known[1], *after)


async def _mark_places(tx: Tx, gone: Sequence[Row]) -> int:
    """Note the places that these deliveries had in lists. Return how many there are."""
    if gone:
        await tx.many("webhook_delivery_place_put", [tuple(row) for row in gone])
    return len(gone)


async def forget_some_deliveries(tx: Tx, job_id: str) -> bool:
    """Forget some completed deliveries of an ended job; False if those were the last."""
    gone = await tx.all("webhook_deliveries_forget", job_id=job_id, count_max=DELETED_AT_ONCE)
    return await _mark_places(tx, gone) == DELETED_AT_ONCE


async def put_events(tx: Tx, job_id: str, response_status: str = "completed") -> None:
    """Write the events of a job's end into the outbox, in the transaction that ends it.

    `response_status` is the status in the answer of a background response.
    """
    await tx.all("webhook_events_put", job_id=job_id, response_status=response_status)


async def put_endpoint(
    tx: Tx, tenant_id: str, endpoint_id: str, shape: EndpointShape, secret: bytes, job_id: str | None = None
) -> None:
    """Write the row of an endpoint, of a tenant or of one job."""
    await tx.all(
        "webhook_endpoint_put",
        id=endpoint_id,
        tenant_id=tenant_id,
        job_id=job_id,
        name=shape.name,
        url=shape.url,
        event_types=",".join(shape.event_types or ()),
        secret=secret,
        door=shape.door,
        headers=msgspec.json.encode(shape.headers).decode() if shape.headers else None,
    )


async def _lease_of_tenant(tx: Tx, tenant_id: str, count_max: int, endpoint_max: int, by: dict[str, str]) -> int:
    """Lease deliveries of a tenant, in turns of its endpoints. Return how many there were."""
    endpoints = await tx.all(
        "webhook_endpoints_due", tenant_id=tenant_id, endpoint_max=endpoint_max, count_max=count_max
    )
    left = count_max
    for place, (endpoint_id, out_count) in enumerate(endpoints):
        share = min(endpoint_max - out_count, -(-left // (len(endpoints) - place)))
        name = {"tenant_id": tenant_id, "endpoint_id": endpoint_id}
        left -= len(await tx.all("webhook_deliveries_lease", count_max=share, **name, **by))
    return count_max - left


async def _endpoint(tx: Tx, tenant_id: str, endpoint_id: str) -> WebhookEndpoint | None:
    rows = await tx.dicts("webhook_endpoint_get", tenant_id=tenant_id, id=endpoint_id)
    return _endpoint_from(rows[0]) if rows else None


def _endpoint_from(row: dict[str, Any]) -> WebhookEndpoint:
    return WebhookEndpoint(
        id=row["id"],
        job_id=row["job_id"],
        name=row["name"],
        url=row["url"],
        event_types=tuple(row["event_types"].split(",")),
        secret=secret_text(bytes(row["secret"])),
        created_at=row["created_at"],
        updated_at=row["updated_at"],
        disabled_at=row["disabled_at"],
        disabled_why=row["disabled_why"],
    )


def delivery_from(row: dict[str, Any]) -> WebhookDelivery:
    return WebhookDelivery(state=DeliveryState(row["state"]), **{name: row[name] for name in _DELIVERY_COLUMNS})


def _leased_from(row: dict[str, Any], token: str) -> LeasedDelivery:
    secrets = [secret for secret in (row["secret"], row["old_secret"]) if secret is not None]
    return LeasedDelivery(
        event_id=row["event_id"],
        endpoint_id=row["endpoint_id"],
        tenant_id=row["tenant_id"],
        job_id=row["job_id"],
        event_type=row["event_type"],
        created_at=row["created_at"],
        attempt_count=row["attempt_count"],
        url=row["url"],
        secrets=tuple(secret_text(bytes(secret)) for secret in secrets),
        sent_at=row["now"],
        token=token,
        item=row["item"],
        door=row["door"],
        headers=msgspec.json.decode(row["headers"], type=dict[str, str]) if row["headers"] else {},
    )
