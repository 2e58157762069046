"""The client for one bucket of an S3-compatible store, or one container of Azure.

It has time-outs, bounded retries, errors in words, and verification. It deals with keys and bytes,
and knows nothing of spools or logs.

`obstore` repeats what is safe to repeat: 5xx, SlowDown, refused and broken connections, and
time-outs of idempotent requests. The loop here repeats the rest: a body that broke off, and a
conditional PUT without an answer. Both stop after `retry_for_ms`, so no call takes longer than that
plus one `request_timeout_ms`, or one `small_timeout_ms` for requests with few bytes.

`obstore` takes settings that are not given here from the usual AWS_* and AZURE_* variables, roles
and instance credentials.
"""

import asyncio
import atexit
import contextlib
import functools
import hashlib
import random
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec
import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, GenericError, PreconditionError
from obstore.store import AzureStore, S3Store

from tidegate.core import ids
from tidegate.core.errors import BlobError, BlobMissing, BlobUnavailable

if TYPE_CHECKING:
    from obstore import PutMode
    from obstore.store import AzureConfig, ClientConfig, RetryConfig, S3Config

T = TypeVar("T")

GET_BYTES = 524_288
PUT_BYTES_MAX = 8_388_608
BACKOFF_FIRST_MS = 100
BACKOFF_MAX_MS = 5_000
RETRIES_MAX = 20
GROW_TRIES_MAX = 5
EXIT_PAUSE_MS = 100
MISSING_PAUSE_MS = 200

_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>(\w{1,60})</Code>")
# Refusals that a retry does not change, and what to do about each.
_REJECTED = {
    "SignatureDoesNotMatch": "check blobs.secret_access_key",
    "InvalidAccessKeyId": "check blobs.access_key_id",
    "AccessDenied": "let these keys (blobs.access_key_id) read, write, list and delete there",
}
# Azure sends the whole object if a range begins after its end, and obstore reports this text.
_TOO_SHORT = "but object was only"
_NO_BUCKET = ("NoSuchBucket", "ContainerNotFound")
_TRANSIENT_STATUSES = frozenset({"408", "409", "425", "429"})


MISSING_AFTER_MS = 600_000


class S3Settings(msgspec.Struct, frozen=True):
    """The bucket, how to reach it and how long to try.

    Without keys, obstore uses the machine's own credentials. With `is_azure` the bucket is a
    container, `access_key_id` its storage account and `secret_access_key` that account's key.
    """

    bucket: str
    is_azure: bool = False
    prefix: str = ""
    endpoint: str | None = None
    region: str = "us-east-1"
    access_key_id: str | None = None
    secret_access_key: str | None = None
    allow_http: bool = False
    connect_timeout_ms: int = 5_000
    request_timeout_ms: int = 60_000
    small_timeout_ms: int = 10_000
    retry_for_ms: int = 30_000
    missing_after_ms: int = MISSING_AFTER_MS

    def __repr__(self) -> str:
        return f"S3Settings(bucket={self.bucket!r}, prefix={self.prefix!r}, endpoint={self.endpoint!r})"


class StoredObject(msgspec.Struct, frozen=True):
    """The size and the ETag of an object, as the store reports them."""

    size_bytes: int
    etag: str


class Print(msgspec.Struct, frozen=True):
    """The expected size, SHA-256 and ETag of an object.

    The ETag is that of a server that uses MD5.
    """

    size_bytes: int
    sha256: str
    etag: str

    @classmethod
    def of(cls, data: bytes) -> "Print":
        return cls(len(data), hashlib.sha256(data).hexdigest(), hashlib.md5(data, usedforsecurity=False).hexdigest())


class WrongBytes(Exception):
    """Raised if the store holds other bytes under a key than were sent."""


@functools.cache
def _pause_at_exit() -> None:
    """Give obstore's threads time to end before the interpreter does.

    They deliver a result and only then release their Python objects. If the interpreter ends in
    that moment, the whole process aborts (PyO3/pyo3-async-runtimes, issue 40): one short run in
    five did.
    """
    atexit.register(time.sleep, EXIT_PAUSE_MS / 1_000)


class Objects:
    def __init__(self, settings: S3Settings) -> None:
        _pause_at_exit()
        self._retry_for_s = settings.retry_for_ms / 1_000
        self._small_s = settings.small_timeout_ms / 1_000
        self._where = _where(settings)
        self.store = _store(settings)

    async def head(self, key: str) -> StoredObject | None:
        try:
            meta = await self._persist_small(f"looking up {key}", lambda: obstore.head_async(self.store, key))
        except BlobMissing:
            return None
        return StoredObject(meta["size"], (meta["e_tag"] or "").strip('"'))

    async def surely_head(self, key: str) -> StoredObject | None:
        """Look up an object that should exist. Ask twice if it is missing, as `read` does."""
        stored = await self.head(key)
        if stored is None:
            await asyncio.sleep(MISSING_PAUSE_MS / 1_000)
            stored = await self.head(key)
        return stored

    async def put(self, key: str, data: bytes, mode: "PutMode" = "overwrite") -> None:
        """Write an object with one PUT.

        Raise AlreadyExistsError or PreconditionError if the condition fails.
        """
        await self._persist_in_bucket(
            f"writing {key}", lambda: obstore.put_async(self.store, key, data, mode=mode, use_multipart=False)
        )

    async def put_file(self, key: str, path: Path) -> None:
        """Write a local file, completely or not at all, in parts if it is long."""
        await self._persist_in_bucket(
            f"writing {key}", lambda: obstore.put_async(self.store, key, path, chunk_size=PUT_BYTES_MAX)
        )

    async def read(self, key: str, at: int, count: int) -> bytes:
        """Return exactly these bytes. Raise BlobMissing if the object ends before.

        Ask twice if the object is missing: a store or a proxy may answer 404 for a moment, which
        would break a download.
        """
        if count == 0:
            if await self.surely_head(key) is None:
                raise BlobMissing(f"there is no blob {key}")
            return b""

        async def get() -> bytes:
            data = (await obstore.get_range_async(self.store, key, start=at, length=count)).to_bytes()
            if len(data) != count:
                stored = await self.head(key)
                if stored is None or stored.size_bytes < at + count:
                    raise BlobMissing(f"blob {key} ends before byte {at + count}: those bytes are gone")
                raise GenericError(f"{len(data)} bytes came instead of {count}")
            return data

        return await self._persist_twice(f"reading {key}", get)

    async def chunks(self, key: str, at: int, count: int) -> AsyncIterator[bytes]:
        """Yield these bytes by ranged reads.

        Each is retried alone, so a break does not end the download.
        """
        end = at + count
        while at < end:
            chunk = await self.read(key, at, min(GET_BYTES, end - at))
            at += len(chunk)
            yield chunk

    async def copy(self, key: str, to: str) -> None:
        """Copy an object to another key. The store copies it without a download."""
        await self.persist(f"copying {key}", lambda: obstore.copy_async(self.store, key, to))

    async def delete(self, key: str) -> None:
        try:
            await self._persist_small(f"deleting {key}", lambda: obstore.delete_async(self.store, key))
        except BlobMissing:
            return

    async def keys_after(self, after: str, count_max: int) -> tuple[list[str], bool]:
        """Return keys in order after this one, at least `count_max` if there are so many.

        The flag says whether there may be more.
        """

        async def page() -> list[str]:
            # Some servers always list from the first key on.
            found: list[str] = []
            async for metas in obstore.list(self.store, offset=after or None, chunk_size=count_max):
                found += [meta["path"] for meta in metas if meta["path"] > after]
                if len(found) >= count_max:
                    break
            return found

        keys = await self._persist_in_bucket("listing", page)
        return keys, len(keys) >= count_max

    async def verify(self, key: str, expected: Print) -> None:
        """Compare the stored object with what was sent. Raise WrongBytes if they differ.

        Most servers compute an object's ETag as the MD5 of the bytes they received (or of the MD5s
        of its parts). If that equals the one computed here while sending, the bytes are the same.
        If the ETag is something else (encryption with a managed key, other servers), the object is
        read back and hashed.
        """
        stored = await self.surely_head(key)
        if stored is None:
            raise WrongBytes(f"{key} is not there after it was written")
        await self._compare(key, stored, expected)

    async def grow(self, key: str, data: bytes) -> int:
        """Write these bytes as the object and verify it, unless it is longer already.

        Return its size.

        Each PUT has a condition, so a late request that was given up cannot shorten the object of a
        later one: it finds the object present, or changed.
        """
        expected = await asyncio.to_thread(Print.of, data)
        for _ in range(GROW_TRIES_MAX):
            stored = await self.head(key)
            if stored is not None and stored.size_bytes > len(data):
                return stored.size_bytes
            if stored is not None and stored.size_bytes == len(data):
                with contextlib.suppress(WrongBytes):
                    await self._compare(key, stored, expected)
                    return len(data)
            with contextlib.suppress(AlreadyExistsError, PreconditionError):
                await self.put(key, data, "create" if stored is None else {"e_tag": f'"{stored.etag}"'})
        raise BlobUnavailable(
            f"{key} in {self._where} does not keep the bytes it is given: check the store, then try again"
        )

    async def check(self, key: str) -> None:
        """Write, read and delete a small object.

        Check that the store refuses to replace it on that condition.
        """
        content = key.encode()
        await self.put(key, content)
        try:
            if await self.read(key, 0, len(content)) != content:
                raise BlobUnavailable(f"{self._where} gave back other bytes than were written: check the store")
            with contextlib.suppress(AlreadyExistsError):
                await self.put(key, content, "create")
                raise BlobUnavailable(
                    f"{self._where} does not honour conditional writes (If-None-Match): results could be overwritten; "
                    f"use a store that does, as S3 and most of its kind do"
                )
        except BlobMissing as failure:
            raise BlobUnavailable(f"{self._where} does not show what was just written: check the store") from failure
        finally:
            await self.delete(key)

    async def _compare(self, key: str, stored: StoredObject, expected: Print) -> None:
        if stored.size_bytes != expected.size_bytes:
            raise WrongBytes(f"{key} has {stored.size_bytes} bytes instead of {expected.size_bytes}")
        if stored.etag == expected.etag:
            return
        sha256 = hashlib.sha256()
        async for chunk in self.chunks(key, 0, expected.size_bytes):
            await asyncio.to_thread(sha256.update, chunk)
        if sha256.hexdigest() != expected.sha256:
            raise WrongBytes(f"{key} holds other bytes than were sent")

    async def persist(self, doing: str, attempt: Callable[[], Awaitable[T]]) -> T:
        """Repeat an attempt until it succeeds, until a retry is useless, or for `retry_for_ms`."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._retry_for_s
        backoff_ms = BACKOFF_FIRST_MS
        while True:
            try:
                return await attempt()
            except FileNotFoundError as failure:
                if any(code in str(failure) for code in _NO_BUCKET):
                    raise self._bucket_gone(doing) from None
                raise BlobMissing(f"{doing}: there is no such object in {self._where}") from None
            except (AlreadyExistsError, PreconditionError):
                raise
            except BaseError as failure:
                if _status(failure) == "416" or _TOO_SHORT in str(failure):
                    raise BlobMissing(f"{doing}: it ends before that range") from None
                pause_s = random.uniform(0, backoff_ms) / 1_000
                if not _is_transient(failure) or loop.time() + pause_s >= deadline:
                    raise self.unavailable(failure, doing) from failure
                await asyncio.sleep(pause_s)
                backoff_ms = min(2 * backoff_ms, BACKOFF_MAX_MS)

    async def _persist_twice(self, doing: str, attempt: Callable[[], Awaitable[T]]) -> T:
        """Call `persist`, and once more after a 404, which may be wrong for a moment."""
        try:
            return await self.persist(doing, attempt)
        except BlobMissing:
            await asyncio.sleep(MISSING_PAUSE_MS / 1_000)
            return await self.persist(doing, attempt)

    async def _persist_in_bucket(self, doing: str, attempt: Callable[[], Awaitable[T]]) -> T:
        """Call `_persist_twice` for a request that needs no object.

        A 404 means that the bucket is gone.
        """
        try:
            return await self._persist_twice(doing, attempt)
        except BlobMissing as failure:
            raise self._bucket_gone(doing) from failure

    async def _persist_small(self, doing: str, attempt: Callable[[], Awaitable[T]]) -> T:
        """Call `persist` for a request that is answered quickly, with a shorter time-out."""

        async def answered() -> T:
            try:
                async with asyncio.timeout(self._small_s):
                    return await attempt()
            except TimeoutError:
                raise GenericError(f"no answer within {self._small_s:g} s") from None

        return await self.persist(doing, answered)

    def unavailable(self, failure: Exception, doing: str) -> BlobUnavailable:
        """Return an error of the store as one sentence, without its pages of detail."""
        text = str(failure)
        code = _CODE.search(text)
        if code is not None and (what := _REJECTED.get(code.group(1))) is not None:
            return BlobUnavailable(f"{doing} in {self._where} was refused ({code.group(1)}): {what}")
        reason = (code.group(1) + ", " if code else "") + text.split("\n", 1)[0].split("<?xml", 1)[0][:300].strip()
        return BlobUnavailable(
            f"{doing} in {self._where} failed ({reason}): check that the store is up, that the endpoint and the keys are "
            f"right and that the keys may read, write, list and delete there; then try again"
        )

    def _bucket_gone(self, doing: str) -> BlobUnavailable:
        return BlobUnavailable(f"{doing} failed: there is no {self._where}; create it, or correct the configured name")


def _status(failure: BaseError) -> str:
    found = _STATUS.search(str(failure))
    return found.group(1) if found else ""


def _is_transient(failure: BaseError) -> bool:
    """Return whether the request may work later: not when the server understood and refused it."""
    if not isinstance(failure, GenericError):
        return False
    status = _status(failure)
    return not status.startswith("4") or status in _TRANSIENT_STATUSES


def _where(settings: S3Settings) -> str:
    if settings.is_azure:
        return f"container {settings.bucket} at {settings.endpoint or 'Azure'}"
    return f"bucket {settings.bucket} at {settings.endpoint or 'S3 in ' + settings.region}"


def _store(settings: S3Settings) -> AzureStore | S3Store:
    prefix = settings.prefix.strip("/") or None
    client: ClientConfig = {
        "allow_http": settings.allow_http,
        "connect_timeout": timedelta(milliseconds=settings.connect_timeout_ms),
        "timeout": timedelta(milliseconds=settings.request_timeout_ms),
    }
    retry: RetryConfig = {
        "max_retries": RETRIES_MAX,
        "retry_timeout": timedelta(milliseconds=settings.retry_for_ms),
        "backoff": {
            "init_backoff": timedelta(milliseconds=BACKOFF_FIRST_MS),
            "max_backoff": timedelta(milliseconds=BACKOFF_MAX_MS),
            "base": 2,
        },
    }
    if settings.is_azure:
        azure = _azure_config(settings)
        return AzureStore(settings.bucket, prefix=prefix, config=azure, client_options=client, retry_config=retry)
    config = _config(settings)
    return S3Store(settings.bucket, prefix=prefix, config=config, client_options=client, retry_config=retry)


def _azure_config(settings: S3Settings) -> "AzureConfig":
    config: AzureConfig = {}
    if settings.endpoint is not None:
        config["endpoint"] = settings.endpoint
    if settings.access_key_id is not None and settings.secret_access_key is not None:
        config["account_name"] = settings.access_key_id
        config["account_key"] = settings.secret_access_key
    return config


def _config(settings: S3Settings) -> "S3Config":
    config: S3Config = {
        "region": settings.region,
        "virtual_hosted_style_request": False,
        # One object per request works on every server; the bulk call does not.
        "disable_bulk_delete": True,
    }
    if settings.endpoint is not None:
        # Both names, because a variable in the environment would win over the first alone.
        config["endpoint"] = settings.endpoint
        config["aws_endpoint_url_s3"] = settings.endpoint
    if settings.access_key_id is not None and settings.secret_access_key is not None:
        config["access_key_id"] = settings.access_key_id
        config["secret_access_key"] = settings.secret_access_key
    return config


def object_key(blob_id: str) -> str:
    """Return the key of a blob's object, which is its id."""
    if not ids.is_valid("blob", blob_id):
        raise BlobError(f"{blob_id[:60]!r} is no id of a blob: nothing was touched")
    return blob_id
