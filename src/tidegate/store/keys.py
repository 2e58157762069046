"""Verbs about tenants and their API keys. Secrets never come here: only keyed hashes of them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tidegate.core.budgets.budget import Limit
from tidegate.core.keys import PUBLIC_LENGTH
from tidegate.store.driver import Tx
from tidegate.store.rows import limits_from, limits_text
from tidegate.store.table import Table


@dataclass(frozen=True, slots=True)
class KeyRow:
    """What the store knows now of one key whose slices somebody holds; `expires_in_ms` counts from the question."""

    key_id: str
    deleted: bool
    models: str
    resources: str
    expires_in_ms: int | None
    revoked: bool
    limits: tuple[Limit, ...]
    parallel_max: int = 0


class Keys(Table):
    async def put_tenant(self, tenant_id: str, name: str) -> str:
        """The id of the tenant of this name, made now if it is new."""

        async def body(tx: Tx) -> str:
            await tx.all("tenant_put", id=tenant_id, name=name)
            row = await tx.one("tenant_by_name", name=name)
            assert row is not None
            return str(row[0])

        return await self._driver.write(body)

    async def tenant_by_name(self, name: str) -> str | None:
        async def body(tx: Tx) -> str | None:
            row = await tx.one("tenant_by_name", name=name)
            return row[0] if row else None

        return await self._driver.read(body)

    async def tenant_ids(self, names: Iterable[str]) -> dict[str, str]:
        """The ids of those of these tenants that exist, by name."""

        async def body(tx: Tx) -> dict[str, str]:
            rows = [(name, await tx.one("tenant_by_name", name=name)) for name in names]
            return {name: row[0] for name, row in rows if row is not None}

        return await self._driver.read(body)

    async def tenant_name(self, tenant_id: str) -> str | None:
        """What a tenant is called in the settings; it never changes."""

        async def body(tx: Tx) -> str | None:
            row = await tx.one("tenant_name", id=tenant_id)
            return row[0] if row else None

        return await self._driver.read(body)

    async def put_key(
        self,
        key_id: str,
        tenant_id: str,
        secret_hash: bytes,
        *,
        label: str,
        team: str | None,
        user: str | None,
        scopes: str,
        models: str,
        expires_at: int | None,
        resources: str = "",
        limits: tuple[Limit, ...] = (),
        parallel_max: int = 0,
        addresses: str = "",
    ) -> None:
        async def body(tx: Tx) -> None:
            await tx.all(
                "key_put",
                id=key_id,
                tenant_id=tenant_id,
                secret_hash=secret_hash,
                label=label,
                team=team,
                user_name=user,
                scopes=scopes,
                models=models,
                expires_at=expires_at,
                resources=resources,
                limits=limits_text(limits) if limits else None,
                parallel_max=parallel_max,
                addresses=addresses,
            )

        await self._driver.write(body)

    async def change_key(
        self,
        key_id: str,
        *,
        scopes: str | None = None,
        models: str | None = None,
        resources: str | None = None,
        limits: tuple[Limit, ...] | None = None,
        expires_at: int | None = None,
        parallel_max: int | None = None,
        addresses: str | None = None,
    ) -> bool:
        """Change what a key may do; None leaves a part as it is. False: there is no such key, or it is revoked."""

        async def body(tx: Tx) -> bool:
            changed = await tx.one(
                "key_change",
                id=key_id,
                scopes=scopes,
                models=models,
                resources=resources,
                limits=None if limits is None else limits_text(limits),
                expires_at=expires_at,
                parallel_max=parallel_max,
                addresses=addresses,
            )
            return changed is not None

        return await self._woken(key_id, await self._driver.write(body))

    async def rotate_key(self, key_id: str, secret_hash: bytes, grace_ms: int) -> bool:
        """A new secret under the same id; the one before it works for the grace. False: there is no such key, or it works no more."""

        async def body(tx: Tx) -> bool:
            if await tx.one("key_rotate", id=key_id, secret_hash=secret_hash, grace_ms=grace_ms) is not None:
                return True
            row = await tx.dicts("key_get", id=key_id)
            return bool(row) and bytes(row[0]["secret_hash"]) == secret_hash

        return await self._driver.write(body)

    async def key_states(self, worker_id: str) -> list[KeyRow]:
        """How the keys stand whose slices this worker holds."""

        async def body(tx: Tx) -> list[KeyRow]:
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

        return await self._driver.read(body)

    async def get_key(self, key_id: str) -> dict[str, Any] | None:
        """A key's row with the database's `now` beside it; None when there is none."""

        async def body(tx: Tx) -> dict[str, Any] | None:
            rows = await tx.dicts("key_get", id=key_id)
            return rows[0] if rows else None

        return await self._driver.read(body)

    async def key_facts(self, key_ids: Sequence[str]) -> dict[str, dict[str, Any]]:
        """How these keys stand, by id, each with the database's `now` beside it; those that are gone are left out."""
        if not all(len(key_id) == PUBLIC_LENGTH for key_id in key_ids):
            raise ValueError("ids of keys have a fixed length, by which the statement tells them apart")

        async def body(tx: Tx) -> dict[str, dict[str, Any]]:
            rows = await tx.dicts("key_facts", ids="".join(key_ids)) if key_ids else []
            return {row["id"]: row for row in rows}

        return await self._driver.read(body)

    async def list_keys(self, count_max: int) -> list[dict[str, Any]]:
        async def body(tx: Tx) -> list[dict[str, Any]]:
            return await tx.dicts("key_list", count_max=count_max)

        return await self._driver.read(body)

    async def any_key(self) -> bool:
        """Whether any key was ever made: then every call needs one."""

        async def body(tx: Tx) -> bool:
            return await tx.one("key_any") is not None

        return await self._driver.read(body)

    async def revoke_key(self, key_id: str) -> bool:
        async def body(tx: Tx) -> bool:
            return await tx.one("key_revoke", id=key_id) is not None

        return await self._woken(key_id, await self._driver.write(body))

    async def delete_key(self, key_id: str) -> bool:
        """Take a key away for good: it is shown nowhere, and what its jobs have not sent fails. False: there is none."""

        async def body(tx: Tx) -> bool:
            return await tx.one("key_delete", id=key_id, no_hash=b"") is not None

        return await self._woken(key_id, await self._driver.write(body))

    async def delete_keys_of(self, org: str) -> list[str]:
        """Take away every key of the tenant of this name; says which there were."""

        async def body(tx: Tx) -> list[str]:
            return sorted(row[0] for row in await tx.all("keys_delete_of", org=org, no_hash=b""))

        deleted = await self._driver.write(body)
        for key_id in deleted:
            await self._woken(key_id, stands_otherwise=True)
        return deleted

    async def _woken(self, key_id: str, stands_otherwise: bool) -> bool:
        """What rests of a key's jobs, perhaps for long because a budget was spent, is looked at again once the key stands otherwise."""

        async def wake(tx: Tx) -> None:
            for statement in ("key_slices_wake", "key_models_wake", "key_flows_wake"):
                await tx.all(statement, key_id=key_id)

        if stands_otherwise:
            await self._driver.write(wake)
        return stands_otherwise

    async def mark_key_used(self, key_id: str) -> None:
        async def body(tx: Tx) -> None:
            await tx.all("key_used", id=key_id)

        await self._driver.write(body)
