"""What every store does with tenants and keys."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.contracts.store_world import START_MS, World

pytestmark = pytest.mark.anyio


async def put(world: World, key_id: str, tenant_id: str, **wishes: Any) -> None:
    wishes = {"label": "a key", "team": None, "user": None, "scopes": "", "models": "", "expires_at": None} | wishes
    await world.store.put_key(key_id, tenant_id, b"\x00\xff hash", **wishes)


async def test_a_tenant_is_made_once_per_name(world: World) -> None:
    assert await world.store.tenant_by_name("acme") is None
    first = world.id("tenant")
    made = await asyncio.gather(*(world.store.put_tenant(world.id("tenant"), "acme") for _ in range(4)))
    assert len(set(made)) == 1
    assert await world.store.put_tenant(first, "acme") == made[0]
    assert await world.store.tenant_by_name("acme") == made[0]
    assert await world.store.put_tenant(world.id("tenant"), "Acme") != made[0]
    assert await world.store.put_tenant(first, "é' or 1=1 --") == first
    assert await world.store.tenant_name(first) == "é' or 1=1 --"
    assert await world.store.tenant_name(made[0]) == "acme"
    assert await world.store.tenant_ids(["acme", "nobody"]) == {"acme": made[0]}
    assert await world.store.tenant_name(world.id("tenant")) is None


async def test_a_key_is_kept_as_it_was_made(world: World) -> None:
    tenant = await world.store.put_tenant(world.id("tenant"), "acme")
    assert not await world.store.any_key()
    await put(world, "k1", tenant, team="red", user="ann", scopes="read", models="m1 m2", expires_at=START_MS + 9)
    assert await world.store.any_key()
    key = await world.store.get_key("k1")
    assert key is not None
    assert (key["tenant_id"], bytes(key["secret_hash"])) == (tenant, b"\x00\xff hash")
    assert (key["team"], key["user_name"], key["scopes"], key["models"]) == ("red", "ann", "read", "m1 m2")
    assert (key["expires_at"], key["revoked_at"], key["now"]) == (START_MS + 9, None, START_MS)
    assert await world.store.get_key("k2") is None
    [listed] = await world.store.list_keys(10)
    assert (listed["id"], listed["tenant"], listed["label"], listed["last_used_at"]) == ("k1", "acme", "a key", None)
    assert "secret_hash" not in listed


async def test_making_a_key_may_be_replayed(world: World) -> None:
    tenant = await world.store.put_tenant(world.id("tenant"), "acme")
    for label in ("first", "second"):
        await put(world, "k1", tenant, label=label)
    [listed] = await world.store.list_keys(10)
    assert listed["label"] == "first"


async def test_a_revoked_key_stays_revoked(world: World) -> None:
    tenant = await world.store.put_tenant(world.id("tenant"), "acme")
    await put(world, "k1", tenant)
    assert await world.store.revoke_key("k1")
    await world.clock.advance(5)
    assert not await world.store.revoke_key("k1")
    assert not await world.store.revoke_key("k2")
    key = await world.store.get_key("k1")
    assert key is not None
    assert key["revoked_at"] == START_MS
    assert await world.store.any_key(), "a revoked key still means that every call needs one"


async def test_use_is_marked_at_most_once_a_minute(world: World) -> None:
    tenant = await world.store.put_tenant(world.id("tenant"), "acme")
    await put(world, "k1", tenant)

    async def used_at() -> object:
        return (await world.store.list_keys(1))[0]["last_used_at"]

    await world.store.mark_key_used("k1")
    assert await used_at() == START_MS
    await world.clock.advance(60_000)
    await world.store.mark_key_used("k1")
    assert await used_at() == START_MS
    await world.clock.advance(1)
    await world.store.mark_key_used("k1")
    assert await used_at() == START_MS + 60_001
    await world.store.mark_key_used("nobody's")


async def test_keys_are_listed_oldest_first_and_bounded(world: World) -> None:
    tenant = await world.store.put_tenant(world.id("tenant"), "acme")
    for name in ("c", "a", "b"):
        await put(world, name, tenant)
        await world.clock.advance(1)
    assert [key["id"] for key in await world.store.list_keys(10)] == ["c", "a", "b"]
    assert [key["id"] for key in await world.store.list_keys(2)] == ["c", "a"]
