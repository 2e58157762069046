"""What every group of verbs stands on: the driver, and the two ways through an Idempotency-Key."""

from typing import NoReturn

from tidegate.core.errors import ApiProblem
from tidegate.core.nouns import Idempotency
from tidegate.store.driver import Driver, Tx

SLICE_COLUMNS = (
    "job_id", "first", "count", "model", "state", "ready_at", "lease_count", "lost_count", "read_first", "work_at", "work_bytes",
    "work_units",
)  # fmt: skip
IDEMPOTENCY_KEEP_MS = 24 * 3600 * 1000


class Table:
    """A group of verbs about one noun."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver


async def idempotent_object(tx: Tx, tenant_id: str, route: str, idempotency: Idempotency | None) -> str | None:
    """The object that this key made before; a key that came with another body is refused."""
    if idempotency is None:
        return None
    row = await tx.one(
        "idempotency_get", tenant_id=tenant_id, route=route, key=idempotency.key, keep_ms=IDEMPOTENCY_KEEP_MS
    )
    if row is None:
        return None
    body_hash, object_id = row
    if body_hash != idempotency.body_hash:
        _refuse_reuse()
    return str(object_id)


async def remember_object(tx: Tx, tenant_id: str, route: str, idempotency: Idempotency | None, object_id: str) -> None:
    if idempotency is None:
        return
    await tx.all(
        "idempotency_forget", tenant_id=tenant_id, route=route, key=idempotency.key, keep_ms=IDEMPOTENCY_KEEP_MS
    )
    await tx.all(
        "idempotency_put",
        tenant_id=tenant_id,
        route=route,
        key=idempotency.key,
        body_hash=idempotency.body_hash,
        object_id=object_id,
    )


def refuse_forgotten() -> NoReturn:
    """Making it again could pay for the same work twice, and there is nothing left to show."""
    raise ApiProblem(
        409,
        "idempotency_result_deleted",
        "What this Idempotency-Key made in the last 24 hours is deleted. Send a new key to make it again.",
        param="Idempotency-Key",
    )


def _refuse_reuse() -> NoReturn:
    raise ApiProblem(
        422,
        "idempotency_key_reused",
        "This Idempotency-Key was used in the last 24 hours with a different request. Send a new key with the new request.",
        param="Idempotency-Key",
    )
