"""Verbs about tenants and their API keys.

Secrets never reach the store, only keyed hashes of them.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from tidegate.core.budgets.budget import Limit
from tidegate.core.keys import PUBLIC_LENGTH
from tidegate.core.nouns import FOREVER_MS, Caller
from tidegate.store.database.driver import Tx
from tidegate.store.database.rows import limits_from, limits_text
from tidegate.store.database.table import Table, frees, reads, writes


class KeyRights(msgspec.Struct, frozen=True):
    """The rights of a key. A part that is None is not changed, and is unlimited in a new key."""

    scopes: str | None = None
    models: str | None = None
    resources: str | None = None
    limits: tuple[Limit, ...] | None = None
    expires_at: int | None = None
    parallel_max: int | None = None
    addresses: str | None = None
    environments: str | None = None


class KeyRow(msgspec.Struct, frozen=True):
    """The present state of a key whose slices a worker has leased.

    `expires_in_ms` counts from the question.
    """

    key_id: str
    deleted: bool
    models: str
    resources: str
    expires_in_ms: int | None
    revoked: bool
    limits: tuple[Limit, ...]
    parallel_max: int


class Keys(Table):
    @writes
    async def put_tenant(self, tx: Tx, tenant_id: str, name: str) -> str:
        """Return the id of the tenant of this name, and create it if it is new."""
        await tx.all("tenant_put", id=tenant_id, name=name)
        row = await tx.one("tenant_by_name", name=name)
        assert row is not None
        return str(row[0])

    @reads
    async def tenant_by_name(self, tx: Tx, name: str) -> str | None:
        row = await tx.one("tenant_by_name", name=name)
        return row[0] if row else None

    @reads
    async def tenant_ids(self, tx: Tx, names: Iterable[str]) -> dict[str, str]:
        """Return the ids of these tenants by name, without those that do not exist."""
        rows = [(name, await tx.one("tenant_by_name", name=name)) for name in names]
        return {name: row[0] for name, row in rows if row is not None}

    @reads
    async def tenant_name(self, tx: Tx, tenant_id: str) -> str | None:
        """Return the name of a tenant in the settings, which never changes."""
        row = await tx.one("tenant_name", id=tenant_id)
        return row[0] if row else None

    @writes
    async def put_key(self, tx: Tx, holder: Caller, secret_hash: bytes, label: str, rights: KeyRights) -> None:
        """Write a new key.

        `holder` has its id and its owner: a tenant, and perhaps a team and a user.
        """
        await tx.all(
            "key_put",
            id=holder.key_id,
            tenant_id=holder.tenant_id,
            secret_hash=secret_hash,
            label=label,
            team=holder.team,
            user_name=holder.user,
            scopes=rights.scopes or "",
            models=rights.models or "",
            expires_at=rights.expires_at,
            resources=rights.resources or "",
            limits=limits_text(rights.limits) if rights.limits else None,
            parallel_max=rights.parallel_max or 0,
            addresses=rights.addresses or "",
            environments=rights.environments or "",
        )

    async def change_key(self, key_id: str, rights: KeyRights) -> bool:
        """Change the rights of a key; False if there is no such key, or it is revoked."""
        return await self._wake_work(key_id) if await self._put_rights(key_id, rights) else False

    @writes
    async def _put_rights(self, tx: Tx, key_id: str, rights: KeyRights) -> bool:
        changed = await tx.one(
            "key_change",
            id=key_id,
            scopes=rights.scopes,
            models=rights.models,
            resources=rights.resources,
            limits=None if rights.limits is None else limits_text(rights.limits),
            expires_at=rights.expires_at,
            parallel_max=rights.parallel_max,
            addresses=rights.addresses,
            environments=rights.environments,
        )
        return changed is not None

    @writes
    async def rotate_key(self, tx: Tx, key_id: str, secret_hash: bytes, grace_ms: int) -> bool:
        """Give a key a new secret; False if there is no such key, or it is not valid any more.

        The old secret works for the grace.
        """
        if await tx.one("key_rotate", id=key_id, secret_hash=secret_hash, grace_ms=grace_ms) is not None:
            return True
        row = await tx.dicts("key_get", id=key_id)
        return bool(row) and bytes(row[0]["secret_hash"]) == secret_hash

    @reads
    async def key_states(self, tx: Tx, worker_id: str) -> list[KeyRow]:
        """Return the states of the keys whose slices this worker has leased."""
        return [
            KeyRow(
                row[0],
                row[1] is None,
                row[2] or "",
                row[3] or "",
                row[4],
                row[5] is not None,
                limits_from(row[6]),
                row[7] or 0,
            )
            for row in await tx.all("key_states", worker_id=worker_id)
        ]

    @reads
    async def get_key(self, tx: Tx, key_id: str) -> dict[str, Any] | None:
        """Return a key's row with the database's `now` beside it; None if there is no such key."""
        rows = await tx.dicts("key_get", id=key_id)
        return rows[0] if rows else None

    @frees
    async def end_session(self, tx: Tx, nonce: str, ends_at: int) -> None:
        """End a session of the console before its time."""
        await tx.all("session_end", nonce=nonce, ends_at=ends_at)

    @reads
    async def is_session_ended(self, tx: Tx, nonce: str) -> bool:
        return await tx.one("session_ended", nonce=nonce) is not None

    @frees
    async def prune_sessions(self, tx: Tx, keep_ms: int) -> None:
        """Forget ended sessions whose own time was over longer than `keep_ms` ago."""
        await tx.all("sessions_prune", keep_ms=keep_ms)

    @reads
    async def key_facts(self, tx: Tx, key_ids: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Return the rows of these keys by id, each with the database's `now`.

        Keys that are gone are left out.
        """
        if not all(len(key_id) == PUBLIC_LENGTH for key_id in key_ids):
            raise ValueError("ids of keys have a fixed length, by which the statement tells them apart")
        rows = await tx.dicts("key_facts", ids="".join(key_ids)) if key_ids else []
        return {row["id"]: row for row in rows}

    @reads
    async def list_keys(self, tx: Tx, count_max: int) -> list[dict[str, Any]]:
        return await tx.dicts("key_list", count_max=count_max)

    @reads
    async def key_page(
        self, tx: Tx, org: str | None, *, after: str | None, count_max: int
    ) -> list[dict[str, Any]] | None:
        """Return a page of keys of one organization or of all, newest first.

        Return None if `after` is no key.
        """
        start: Sequence[Any] | None = (1 << 62, "")
        if after is not None:
            start = await tx.one("key_cursor", id=after)
        if start is None:
            return None
        return await tx.dicts("key_page", org=org, created_at=start[0], id=start[1], count_max=count_max)

    @writes
    async def claim_pepper(self, tx: Tx, fingerprint: str) -> bool:
        """Note the pepper of this store's keys.

        Return False if there are keys that were hashed with another.
        """
        return await tx.one("pepper_claim", fingerprint=fingerprint) is not None

    @reads
    async def pepper_fingerprint(self, tx: Tx) -> str | None:
        """Return the fingerprint of the pepper that was claimed for this store.

        Return None if there is none.
        """
        row = await tx.one("pepper_fingerprint")
        return None if row is None else str(row[0])

    @reads
    async def any_key(self, tx: Tx) -> bool:
        """Return whether any key was ever made: then each call needs one."""
        return await tx.one("key_any") is not None

    async def revoke_key(self, key_id: str) -> bool:
        return await self._wake_work(key_id) if await self._mark_revoked(key_id) else False

    @frees
    async def _mark_revoked(self, tx: Tx, key_id: str) -> bool:
        return await tx.one("key_revoke", id=key_id) is not None

    async def delete_key(self, key_id: str) -> bool:
        """Delete a key for good; False if there is none. Unsent items of its jobs fail."""
        return await self._wake_work(key_id) if await self._mark_deleted(key_id) else False

    @frees
    async def _mark_deleted(self, tx: Tx, key_id: str) -> bool:
        return await tx.one("key_delete", id=key_id, no_hash=b"") is not None

    async def delete_keys_of(self, org: str) -> list[str]:
        """Delete all keys of the tenant of this name. Return their ids."""
        deleted = await self._mark_deleted_of(org)
        for key_id in deleted:
            await self._wake_work(key_id)
        return deleted

    @frees
    async def _mark_deleted_of(self, tx: Tx, org: str) -> list[str]:
        return sorted(row[0] for row in await tx.all("keys_delete_of", org=org, no_hash=b""))

    @frees
    async def _wake_work(self, tx: Tx, key_id: str) -> bool:
        """Wake the work of a changed key's jobs, which may rest because of a spent budget."""
        await tx.all("key_slices_wake", key_id=key_id, forever=FOREVER_MS)
        for statement in ("key_models_wake", "key_flows_wake"):
            await tx.all(statement, key_id=key_id)
        return True

    @writes
    async def mark_key_used(self, tx: Tx, key_id: str) -> None:
        await tx.all("key_used", id=key_id)
