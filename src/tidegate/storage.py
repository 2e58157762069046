"""Opens the store and the blobs of the settings, which every command needs.

It loads nothing else, so that a command that reads one batch starts quickly.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from tidegate.backends.blobs_local import LocalBlobs
from tidegate.backends.disk import make_directories
from tidegate.backends.scratch import scratch_directory
from tidegate.backends.system import LocalWake, SystemClock, SystemEntropy, boot_id, boot_ms
from tidegate.core import ids
from tidegate.core.errors import StoreError, StoreTaken
from tidegate.core.nouns import DEFAULT_TENANT
from tidegate.core.ports import Blobs, Clock, Entropy, Notices, Wakes
from tidegate.settings import Settings, local_path
from tidegate.settings.added import Added, added
from tidegate.stages.tend import clock as clock_tend
from tidegate.store.database import sqlite
from tidegate.store.database.driver import Driver
from tidegate.store.database.sqlite import SqliteDriver
from tidegate.store.database.sqlite_clock import EmbeddedClock
from tidegate.store.store import Store

if TYPE_CHECKING:
    from tidegate.backends.blobs_s3_client import Objects, S3Settings
    from tidegate.backends.shared_redis import RedisShared

    Bucket = Objects


# Entries of the audit that one transaction chains while a store is migrated.
CHAINED_AT_ONCE = 1_000
# A process that wants an embedded store to itself waits this long for a command that writes there.
COMMAND_LOOK_S, COMMAND_LOOKS = 0.05, 60


class Parts(msgspec.Struct, frozen=True):
    """The opened parts that every command needs."""

    settings: Settings
    store: Store
    blobs: Blobs
    clock: Clock
    entropy: Entropy
    wakes: Wakes
    tenant_id: str
    scratch: Path
    shared: "RedisShared | None" = None
    installation: str = ""
    notices: Notices | None = None


@asynccontextmanager
async def opened(
    settings: Settings, *, read_only: bool = False, is_alone: bool = False, on_wait: Callable[[str], None] | None = None
) -> AsyncIterator[Parts]:
    """Open the store and the blobs of these settings, at the current schema, and close them at the
    end.

    With `is_alone` no other process may write to an embedded store meanwhile; `on_wait` gets, once,
    the process that this one waits for.
    """
    clock, entropy = SystemClock(), SystemEntropy()
    if not read_only:
        # Callers' data belongs to them and the operator: no other user of this machine may read it.
        make_directories(settings.data_dir)
        if not settings.store.is_postgresql:
            make_directories(local_path(settings.store.location).parent)
    store = Store(
        await _alone(settings, clock, on_wait)
        if is_alone
        else _driver(settings, clock, read_only=read_only, is_shared=True)
    )
    async with AsyncExitStack() as stack:
        stack.push_async_callback(store.close)
        await _ready_schema(store, settings, read_only=read_only)
        await store.look_at_clock()
        if not read_only:
            stack.push_async_callback(ended, asyncio.create_task(clock_tend.watch(store)))
        blobs = _blobs(settings, read_only=read_only)
        stack.push_async_callback(blobs.close)
        tenant = await store.tenant_by_name(DEFAULT_TENANT)
        if tenant is None and not read_only:
            tenant = await store.put_tenant(ids.make("tenant", entropy.token_bytes(16)), DEFAULT_TENANT)
        scratch = settings.data_dir / "scratch"
        if not read_only:
            scratch = stack.enter_context(scratch_directory(scratch))
        parts = Parts(
            settings, store, blobs, clock, entropy, Wakes(LocalWake(), LocalWake(), LocalWake()), tenant or "", scratch
        )
        if settings.redis.location and not read_only:
            from tidegate.backends.shared_redis import RedisShared

            name = f"{settings.redis.name}:{await store.store_name(entropy.token_bytes(16).hex())}"
            shared = RedisShared(settings.redis.location, name, clock, entropy)
            shared.start()
            stack.push_async_callback(shared.close)
            parts = replace(parts, wakes=replace(parts.wakes, inputs=shared), shared=shared, installation=name)
        yield parts


async def _ready_schema(store: Store, settings: Settings, *, read_only: bool) -> None:
    """Migrate an embedded store, and give an empty database its schema. Raise if a database has an
    older schema: its operator migrates it."""
    if not read_only and (not settings.store.is_postgresql or await store.schema_version() == 0):
        await store.migrate()
    await store.require_schema()
    if not read_only:
        await _chain_audit(store)


async def migrate(settings: Settings) -> list[int]:
    """Migrate the store to this program's schema. Return the versions that ran."""
    store = Store(_driver(settings, SystemClock(), read_only=False))
    try:
        return await _migrate(store)
    finally:
        await store.close()


async def _migrate(store: Store) -> list[int]:
    """Migrate the store to this program's schema, and chain its audit."""
    ran = await store.migrate()
    await _chain_audit(store)
    return ran


async def _chain_audit(store: Store) -> None:
    """Chain the audit entries of earlier versions before any new entry: retention
    removes the chain's first entries, so the oldest must come first. It also continues
    after a migration that was interrupted."""
    while await store.chain_audit(CHAINED_AT_ONCE):
        pass


async def is_empty(settings: Settings) -> bool:
    """Return whether the database has no schema yet."""
    store = Store(_driver(settings, SystemClock(), read_only=True))
    try:
        return await store.schema_version() == 0
    finally:
        await store.close()


async def _alone(settings: Settings, clock: Clock, on_wait: Callable[[str], None] | None) -> Driver:
    """Return the driver of a process that has an embedded store to itself. Wait for a command that
    writes there: it takes a moment."""
    for look in range(COMMAND_LOOKS):
        try:
            return _driver(settings, clock, read_only=False)
        except StoreTaken as taken:
            if look == 0 and on_wait is not None:
                path = local_path(settings.store.location)
                on_wait(f"Waiting up to {COMMAND_LOOKS * COMMAND_LOOK_S:g} s for {taken.holder} that writes to {path}.")
            await asyncio.sleep(COMMAND_LOOK_S)
    return _driver(settings, clock, read_only=False)


def is_taken(settings: Settings) -> bool:
    """Return whether another process has the embedded store of these settings to itself."""
    return not settings.store.is_postgresql and sqlite.is_taken(local_path(settings.store.location))


def _driver(settings: Settings, clock: Clock, *, read_only: bool, is_shared: bool = False) -> Driver:
    if settings.store.is_postgresql:
        from tidegate.store.database.postgres import PostgresDriver

        return PostgresDriver(
            settings.store.location,
            pool_size=settings.store.pool_size,
            statement_timeout_ms=settings.store.statement_timeout_ms,
            pooler=settings.store.pooler,
            steady_ms=None if read_only else boot_ms,
        )
    embedded = EmbeddedClock(clock.now_ms, boot_ms, boot_id())
    return SqliteDriver(local_path(settings.store.location), embedded, read_only=read_only, is_shared=is_shared)


def _blobs(settings: Settings, *, read_only: bool) -> Blobs:
    if not settings.blobs.is_object_store:
        return LocalBlobs(local_path(settings.blobs.url))
    from tidegate.backends.blobs_s3 import S3Blobs
    from tidegate.backends.blobs_s3_client import MISSING_AFTER_MS

    bucket, _, prefix = settings.blobs.url.partition("://")[2].partition("/")
    reach = replace(_s3_settings(settings, bucket), is_azure=settings.blobs.backend == "az", prefix=prefix)
    missing_after_ms = 0 if read_only else MISSING_AFTER_MS
    return S3Blobs(replace(reach, missing_after_ms=missing_after_ms), settings.data_dir / "spool")


@asynccontextmanager
async def open_blobs(settings: Settings) -> AsyncIterator[Blobs]:
    """Open the blobs alone, without a store."""
    blobs = _blobs(settings, read_only=False)
    try:
        yield blobs
    finally:
        await blobs.close()


def passing_files(settings: Settings) -> AbstractContextManager[Path]:
    """Return a directory for files that only pass through this process; it is removed
    at the end."""
    return scratch_directory(settings.data_dir / "scratch")


def open_bucket(settings: Settings, scheme: str, bucket: str, folder: str = "") -> "Bucket":
    """Open the caller's own bucket (`s3`) or container (`az`), or a folder in it, at the address
    and with the keys of `blobs`."""
    from tidegate.backends.blobs_s3_client import Objects

    return Objects(replace(_s3_settings(settings, bucket), is_azure=scheme == "az", prefix=folder))


def _s3_settings(settings: Settings, bucket: str) -> "S3Settings":
    from tidegate.backends.blobs_s3_client import S3Settings

    key, secret = settings.blobs.access_key_id, settings.blobs.secret_access_key
    return S3Settings(
        bucket=bucket,
        endpoint=settings.blobs.endpoint or None,
        region=settings.blobs.region,
        access_key_id=key.reveal() if key else None,
        secret_access_key=secret.reveal() if secret else None,
        allow_http=settings.blobs.allow_http,
    )


async def added_deployments(settings: Settings) -> Added:
    """Return what was added at run time, as this process could use it; nothing if there is no store
    yet or it cannot be read."""
    if not settings.store.is_postgresql and not local_path(settings.store.location).exists():
        return Added()
    try:
        async with opened(settings, read_only=True) as parts:
            _, entries = await parts.store.routing()
    except StoreError:
        return Added()
    return added(settings, [(one.kind, one.name, one.document) for one in entries])


async def ended(task: asyncio.Task[None]) -> None:
    """End a task that would run for as long as the process."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
