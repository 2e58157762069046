"""Deliver: send the events in the outbox to webhook endpoints, and record the result of each try.

- Any number of processes share the outbox by leases.
- A delivery is recorded after it was sent. If the process dies in between, it is sent again under
  the same id.
- The fewer slots are free, the fewer a tenant may use, so one tenant's slow receivers do not block
  others.
- A tenant's endpoints take turns, and no endpoint gets all of its tenant's slots, so a receiver
  that hangs does not block the tenant's others.
"""

import asyncio
import contextlib
from collections.abc import Callable, Mapping

import structlog

from tidegate import metrics
from tidegate.core import ids
from tidegate.core.callback_targets import CallbackReply
from tidegate.core.errors import BlobError, BlobMissing, StoreError
from tidegate.core.ports import Callbacks, Clock, Entropy
from tidegate.core.states import DeliveryState
from tidegate.core.webhooks import (
    JITTER,
    EventBodies,
    LeasedDelivery,
    WebhookEndpoint,
    event_body,
    retry_wait_ms,
    signed_headers,
)
from tidegate.failpoints import hit
from tidegate.store.store import Store

log = structlog.get_logger()

SLOTS = 100
TENANT_MAX = 20
ENDPOINT_MAX = 15
POLL_S = 1.0
GATHER_S = 0.05
_RETRY_S_MAX = 5.0
_TOKEN_BYTES = 16


async def send_test(
    callbacks: Callbacks, entropy: Entropy, endpoint: WebhookEndpoint, event_type: str, now_ms: int
) -> CallbackReply:
    """Send one sample event, signed like a real one. It is neither recorded nor tried again."""
    event_id, job_id = (ids.make(kind, entropy.token_bytes(ids.RANDOM_BYTES)) for kind in ("evt", "batch"))
    body = event_body(event_id, event_type, now_ms, job_id)
    headers = signed_headers(event_id, now_ms, body, (endpoint.secret,))
    # Its own owner gives it its own slots, so a test answers while deliveries to the same host
    # hang.
    return await callbacks.post(endpoint.url, body, headers, owner=endpoint.id)


class WebhookDeliveries:
    def __init__(
        self,
        store: Store,
        callbacks: Callbacks,
        clock: Clock,
        entropy: Entropy,
        worker_id: Callable[[], str],
        bodies: Mapping[str, EventBodies] | None = None,
    ) -> None:
        """Create the deliverer.

        `bodies` holds the front doors that write their own events, by name.
        """
        self._store = store
        self._bodies = bodies or {}
        self._callbacks = callbacks
        self._clock = clock
        self._entropy = entropy
        self._worker_id = worker_id
        self._sending: set[asyncio.Task[None]] = set()
        self._token = ""
        self._ended = asyncio.Event()

    async def run(self) -> None:
        """Deliver until cancelled.

        Another process then sends what was still under way, perhaps again.
        """
        try:
            while True:
                try:
                    taken = await self.lease()
                except StoreError as error:
                    log.warning("webhook_lease_failed", error=str(error))
                    taken = 0
                except Exception:
                    log.exception("webhook_delivery_broken")
                    taken = 0
                if not taken:
                    await self._wait()
        finally:
            for task in self._sending:
                task.cancel()
            await asyncio.gather(*self._sending, return_exceptions=True)

    async def _wait(self) -> None:
        """Wait a while, or until a delivery ends, which frees a slot of its tenant."""
        self._ended.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(POLL_S):
                await self._ended.wait()
                # One look serves all deliveries that end now.
                await asyncio.sleep(GATHER_S)

    async def lease(self) -> int:
        """Begin to send the deliveries that are due and have a slot; return their number."""
        free = SLOTS - len(self._sending)
        if not free or not (self._token or await self._store.any_webhook_due()):
            return 0
        # The token is kept until the store answers, so that leases of an unknown commit are not
        # lost.
        self._token = self._token or self._entropy.token_bytes(_TOKEN_BYTES).hex()
        begun_ms = self._clock.monotonic_ms()
        leased = await self._store.lease_webhooks(
            self._worker_id(),
            self._token,
            count_max=free,
            tenant_max=max(1, min(TENANT_MAX, free // 2)),
            endpoint_max=ENDPOINT_MAX,
        )
        self._token = ""
        for one in leased:
            task = asyncio.create_task(self._deliver(one, begun_ms))
            self._sending.add(task)
            task.add_done_callback(self._end)
        return len(leased)

    def _end(self, task: "asyncio.Task[None]") -> None:
        self._sending.discard(task)
        self._ended.set()

    async def _deliver(self, leased: LeasedDelivery, leased_ms: float) -> None:
        try:
            reply = await self._send(leased, leased_ms)
        except BlobMissing:
            reply = CallbackReply(failure="results_missing")
        except Exception:
            # Without a record the delivery would stay leased as long as this process lives.
            log.exception("webhook_send_broken", event_id=leased.event_id, endpoint=leased.endpoint_id)
            reply = CallbackReply(failure="internal_error")
        await hit("webhook_sent")
        wait_ms = retry_wait_ms(leased.attempt_count + 1, reply, self._entropy.uniform(*JITTER))
        await self._record(leased, reply, wait_ms)

    async def _send(self, leased: LeasedDelivery, leased_ms: float) -> CallbackReply:
        body = await self._body(leased)
        # The receiver compares the timestamp with its own clock; all processes share the store's
        # clock.
        at_ms = leased.sent_at + int(self._clock.monotonic_ms() - leased_ms)
        # The receiver's own headers come first, so that they cannot replace ours.
        headers = {**leased.headers, **signed_headers(leased.event_id, at_ms, body, leased.secrets)}
        return await self._callbacks.post(leased.url, body, headers, owner=leased.tenant_id)

    async def _body(self, leased: LeasedDelivery) -> bytes:
        """Return the body to send.

        Wait while the store or the blobs are away; the delivery stays leased.

        Raise BlobMissing if the bytes that it reports are lost: they may come back, but not soon.
        """
        if leased.door is None:
            return event_body(leased.event_id, leased.event_type, leased.created_at, leased.job_id)
        pause_s = 0.1
        while True:
            try:
                return await self._bodies[leased.door].event_body(leased)
            except BlobMissing:
                raise
            except (StoreError, BlobError):
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _RETRY_S_MAX)

    async def _record(self, leased: LeasedDelivery, reply: CallbackReply, wait_ms: int | None) -> None:
        """Record the result, however long the store is away.

        The delivery stays leased until then.
        """
        pause_s = 0.1
        while True:
            try:
                state = await self._store.record_webhook(leased, reply, wait_ms)
                break
            except StoreError:
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _RETRY_S_MAX)
        if state is not None:
            outcome = "postponed" if state is DeliveryState.PENDING else state.value
            metrics.webhook_deliveries.of(outcome).inc()
            if state is DeliveryState.FAILED:
                log.warning("webhook_failed", event_id=leased.event_id, endpoint=leased.endpoint_id, failure=reply.word)
