"""Webhooks: what is sent when a job ends, how it is signed, and when a failed delivery is tried
again.

Signatures follow Standard Webhooks: `v1,` and the HMAC-SHA256 of `id.timestamp.body`, one for each
secret that is live. This module sends nothing and does not know where secrets lie.
"""

import base64
import hmac
from collections.abc import Mapping
from hashlib import sha256
from typing import Protocol

import msgspec

from tidegate.core.callback_targets import CallbackReply
from tidegate.core.deployments import Secret
from tidegate.core.states import JOB_ENDED, DeliveryState

BATCH_EVENT_TYPES = tuple(f"batch.{state}" for state in ("completed", "failed", "expired", "cancelled"))
assert {f"batch.{state}" for state in JOB_ENDED} == set(BATCH_EVENT_TYPES)
RESPONSE_EVENT_TYPES = tuple(f"response.{status}" for status in ("completed", "incomplete", "failed", "cancelled"))
EVENT_TYPES = (*BATCH_EVENT_TYPES, *RESPONSE_EVENT_TYPES)
SECRET_BYTES = 32
SECRET_PREFIX = "whsec_"
OLD_SECRET_MS = 24 * 3600 * 1000
ATTEMPTS_MAX = 10
DISABLED_AFTER_MS = 5 * 24 * 3600 * 1000
RETRY_AFTER_MS_MAX = 24 * 3600 * 1000
_WAITS_S = (5, 5 * 60, 30 * 60, 2 * 3600, 5 * 3600, 10 * 3600, 14 * 3600, 20 * 3600, 24 * 3600)
JITTER = (0.9, 1.1)
_HINT_CHARS = 4


class EndpointShape(msgspec.Struct, frozen=True):
    """The settings that the owner of an endpoint chooses; in a change, None leaves a part as it
    is."""

    name: str | None = None
    url: str | None = None
    event_types: tuple[str, ...] | None = None
    door: str | None = None
    headers: Mapping[str, str] = {}

    def __repr__(self) -> str:
        return (
            f"EndpointShape(name={self.name!r}, url={self.url!r}, event_types={self.event_types!r}, door={self.door!r})"
        )


class WebhookEndpoint(msgspec.Struct, frozen=True):
    """An endpoint for a tenant's events; `job_id` names the only job whose events it gets.

    Times are unix milliseconds.
    """

    id: str
    job_id: str | None
    name: str
    url: str
    event_types: tuple[str, ...]
    secret: Secret
    created_at: int
    updated_at: int
    disabled_at: int | None = None
    disabled_why: str | None = None

    @property
    def secret_hint(self) -> str:
        """Return the end of the secret, which is enough to distinguish two."""
        return f"{SECRET_PREFIX}...{self.secret.reveal()[-_HINT_CHARS:]}"


class WebhookDelivery(msgspec.Struct, frozen=True):
    """One event on its way to one endpoint. `failure` is a word for the result of the last try."""

    event_id: str
    endpoint_id: str
    job_id: str
    url: str
    event_type: str
    state: DeliveryState
    attempt_count: int
    created_at: int
    due_at: int
    ended_at: int | None
    status: int | None
    failure: str | None


class LeasedDelivery(msgspec.Struct, frozen=True):
    """A delivery that this process makes now.

    `sent_at` is the store's time at the lease. `item` is the number of the item that the event is
    about, `door` the front door that words it, and `headers` are the receiver's own.
    """

    event_id: str
    endpoint_id: str
    tenant_id: str
    job_id: str
    event_type: str
    created_at: int
    attempt_count: int
    url: str
    secrets: tuple[Secret, ...]
    sent_at: int
    token: str
    item: int | None = None
    door: str | None = None
    headers: Mapping[str, str] = {}

    def __repr__(self) -> str:
        return f"LeasedDelivery(event_id={self.event_id!r}, endpoint_id={self.endpoint_id!r}, url={self.url!r})"


class EventBodies(Protocol):
    """The bodies of a front door's own events."""

    async def event_body(self, delivery: LeasedDelivery) -> bytes:
        """Return the body to send for this event; asked again, return the same."""


def secret_text(random_bytes: bytes) -> Secret:
    """Return a signing secret of 32 random bytes as its owner gets it."""
    if len(random_bytes) != SECRET_BYTES:
        raise ValueError(f"a signing secret needs {SECRET_BYTES} random bytes, not {len(random_bytes)}")
    return Secret(SECRET_PREFIX + base64.b64encode(random_bytes).decode())


def event_body(event_id: str, event_type: str, created_at_ms: int, job_id: str) -> bytes:
    """Return the event as OpenAI writes it.

    The owner of a response knows its job by the response's id.
    """
    shown_id = job_id.replace("batch_", "resp_", 1) if event_type in RESPONSE_EVENT_TYPES else job_id
    event = {
        "id": event_id,
        "object": "event",
        "created_at": created_at_ms // 1000,
        "type": event_type,
        "data": {"id": shown_id},
    }
    return msgspec.json.encode(event)


def signed_headers(event_id: str, at_ms: int, body: bytes, secrets: tuple[Secret, ...]) -> dict[str, str]:
    """Return the headers that prove to a receiver who sent this body and when."""
    timestamp = str(at_ms // 1000)
    content = b".".join((event_id.encode(), timestamp.encode(), body))
    signatures = []
    for secret in secrets:
        key = base64.b64decode(secret.reveal().removeprefix(SECRET_PREFIX))
        signatures.append("v1," + base64.b64encode(hmac.new(key, content, sha256).digest()).decode())
    return {"webhook-id": event_id, "webhook-timestamp": timestamp, "webhook-signature": " ".join(signatures)}


def retry_wait_ms(attempts: int, reply: CallbackReply, jitter: float) -> int | None:
    """Return how long to wait after this many failed attempts; None when that was the last one."""
    if attempts >= ATTEMPTS_MAX or reply.is_gone:
        return None
    wait_ms = int(_WAITS_S[attempts - 1] * 1000 * jitter)
    return max(wait_ms, min(reply.retry_after_ms, RETRY_AFTER_MS_MAX))
