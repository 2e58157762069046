"""Verbs about tenants and their API keys. Secrets never come here: only keyed hashes of them."""

from collections.abc import Iterable
from typing import Any

from tidegate.store.driver import Tx
from tidegate.store.table import Table


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
            )

        await self._driver.write(body)

    async def get_key(self, key_id: str) -> dict[str, Any] | None:
        """A key's row with the database's `now` beside it; None when there is none."""

        async def body(tx: Tx) -> dict[str, Any] | None:
            rows = await tx.dicts("key_get", id=key_id)
            return rows[0] if rows else None

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

        return await self._driver.write(body)

    async def mark_key_used(self, key_id: str) -> None:
        async def body(tx: Tx) -> None:
            await tx.all("key_used", id=key_id)

        await self._driver.write(body)
