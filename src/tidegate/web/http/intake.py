"""One request while it is open: its incoming body and its key.

This module knows no route.

A body is bounded, never awaited for ever, and read to its end before an answer goes out. A client
that still sends when it is refused would see a broken connection instead of the refusal; so the
rest of a body is received and thrown away for a short while.

When a key is revoked, deleted, expired or given another secret, its open calls end too: while calls
are open, one statement a second reads the rows of their keys. A call whose key does not work any
more is cut: a stream ends with an error event, a call without an answer gets the refusal of a wrong
key, an upload is refused and a download breaks off. While the store does not answer, open calls go
on.
"""

import asyncio
import hmac
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any

import structlog
from starlette.types import Message, Receive

from tidegate.core.errors import ApiProblem, TidegateError
from tidegate.core.ports import Clock
from tidegate.store.store import Store

log = structlog.get_logger()

IDLE_S = 30.0
# A body that is held in memory must be complete by then.
WHOLE_BODY_S = 300.0
RATE_MIN_BYTES_PER_S = 1_024
RATE_GRACE_S = 30.0
DRAIN_S = 5.0
DRAIN_BYTES_MAX = 1 << 30
RETRY_AFTER_S = 1
LOOK_S = 1.0
_ABSENT = bytes(32)


class Intake:
    """The body of one request.

    It replaces ASGI's `receive`, so that it knows what any part of the program has read.

    `tenant_id` is the tenant whose room a body in memory takes, and `open_call` is the call with
    its key. Both are set once the caller is known.
    """

    def __init__(self, receive: Receive, headers: dict[bytes, bytes], clock: Clock, room: "BodyRoom") -> None:
        self.tenant_id = ""
        self.open_call: OpenCall | None = None
        self._room = room
        self._taken_bytes = 0
        self._receive = receive
        self._clock = clock
        self._began_ms = clock.monotonic_ms()
        declared = headers.get(b"content-length", b"")
        self.declared_bytes = int(declared) if declared.isdigit() else None
        # A client that expects a `100 Continue` is answered without its body.
        self._over = b"expect" in headers or (not self.declared_bytes and b"transfer-encoding" not in headers)
        self.received_bytes = 0

    def belongs_to(self, tenant_id: str) -> None:
        """Note the tenant whose room a body in memory takes."""
        self.tenant_id = tenant_id

    def count_under(self, open_call: "OpenCall") -> None:
        """Note the call to cut when its key stops working."""
        self.open_call = open_call

    @property
    def is_cut_silently(self) -> bool:
        """Return whether the key stopped working and only the next part of the body or of the
        answer can report it.
        """
        return self.open_call is not None and self.open_call.is_cut_silently

    async def __call__(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.request":
            self.received_bytes += len(message.get("body", b""))
            self._over = not message.get("more_body", False)
        else:
            self._over = True
        return message

    async def chunks(self, bytes_max: int, over: ApiProblem | None = None) -> AsyncIterator[bytes]:
        """Yield the body piece by piece.

        A body above `bytes_max` raises a 413 or `over`, unread if its Content-Length shows it.
        """
        if self.declared_bytes is not None and self.declared_bytes > bytes_max:
            raise over or _too_large(bytes_max)
        while True:
            message = await self._next()
            if message["type"] != "http.request":
                raise ApiProblem(
                    400, "incomplete_body", "The request's body ended before it was complete. Send it again."
                )
            if self.received_bytes > bytes_max:
                raise over or _too_large(bytes_max)
            if self.is_cut_silently:
                raise refusal()
            if body := message.get("body", b""):
                yield body
            if not message.get("more_body", False):
                return

    async def whole(self, bytes_max: int, over: ApiProblem | None = None) -> bytes:
        """Return the whole body. It takes room in memory until `release`."""
        if self.declared_bytes is not None and self.declared_bytes <= bytes_max:
            self._hold(self.declared_bytes)
        first, rest = b"", bytearray()
        async for chunk in self.chunks(bytes_max, over):
            self._hold(self.received_bytes)
            if self._clock.monotonic_ms() - self._began_ms > WHOLE_BODY_S * 1000:
                self._over = True
                raise _too_slow(f"The request's body was not there within {WHOLE_BODY_S:g} seconds.")
            # A client may send chunks of one byte: kept apart, each would take fifty.
            if first:
                rest += chunk
            else:
                first = chunk
        return first + rest if rest else first

    def _hold(self, size_bytes: int) -> None:
        if size_bytes > self._taken_bytes:
            self._room.reserve_room(self.tenant_id, size_bytes - self._taken_bytes)
            self._taken_bytes = size_bytes

    def release(self) -> None:
        """Give back the room of the body when the request is over."""
        if self._taken_bytes:
            self._room.release_room(self.tenant_id, self._taken_bytes)
            self._taken_bytes = 0

    async def _next(self) -> Message:
        try:
            async with asyncio.timeout(IDLE_S):
                message = await self()
        except TimeoutError:
            self._over = True
            raise _too_slow(f"No byte of the request's body came for {IDLE_S:g} seconds.") from None
        passed_s = (self._clock.monotonic_ms() - self._began_ms) / 1000
        if passed_s > RATE_GRACE_S and self.received_bytes < passed_s * RATE_MIN_BYTES_PER_S:
            self._over = True
            raise _too_slow(f"The request's body comes at less than {RATE_MIN_BYTES_PER_S:,} bytes a second.")
        return message

    async def drain(self) -> None:
        """Receive the rest of the body and throw it away, within limits."""
        if self._over:
            return
        until_bytes = self.received_bytes + DRAIN_BYTES_MAX
        try:
            async with asyncio.timeout(DRAIN_S):
                while not self._over and self.received_bytes < until_bytes:
                    await self()
        except TimeoutError:
            pass
        self._over = True


def _too_large(bytes_max: int) -> ApiProblem:
    return ApiProblem(413, "body_too_large", f"The body is larger than {bytes_max:,} bytes.")


def _too_slow(message: str) -> ApiProblem:
    return ApiProblem(408, "request_timeout", f"{message} Nothing was kept: send it again.")


class BodyRoom:
    """The room for request bodies in this process's memory, over all callers and for each tenant.

    Uploads take none: they are written out as they arrive. A body that does not fit is refused."""

    def __init__(self, bytes_max: int, one_body_bytes_max: int) -> None:
        """Give a tenant at most half of all room, and always enough for one body of the largest
        size.
        """
        self._bytes_max = max(bytes_max, one_body_bytes_max)
        self._tenant_bytes_max = max(bytes_max // 2, one_body_bytes_max)
        self.taken_bytes = 0
        self._by_tenant: Counter[str] = Counter()

    def reserve_room(self, tenant_id: str, size_bytes: int) -> None:
        """Reserve room for so many bytes, or refuse the request."""
        if self._by_tenant[tenant_id] + size_bytes > self._tenant_bytes_max:
            raise ApiProblem(
                429,
                "request_bytes_exceeded",
                f"Your bodies under way may have {self._tenant_bytes_max:,} bytes together. Send it again once one is answered.",
                retry_after_s=RETRY_AFTER_S,
            )
        if self.taken_bytes + size_bytes > self._bytes_max:
            raise ApiProblem(
                503,
                "server_busy",
                "The server holds as many bodies of calls as it can. Nothing was accepted: send the request again.",
                retry_after_s=RETRY_AFTER_S,
            )
        self._by_tenant[tenant_id] += size_bytes
        self.taken_bytes += size_bytes

    def release_room(self, tenant_id: str, size_bytes: int) -> None:
        self.taken_bytes -= size_bytes
        self._by_tenant[tenant_id] -= size_bytes
        if not self._by_tenant[tenant_id]:
            del self._by_tenant[tenant_id]


class KeyCut(Exception):
    """The key stopped working in the middle of an answer, so only a broken connection can report
    it.
    """


class OpenCall:
    """One request with a key, from the moment its key was found right.

    When the key stops working the listener is called; without a listener the next part of the body
    or of the answer is refused.
    """

    __slots__ = ("_calls", "_listener", "is_cut", "key_id", "secret_hash")

    def __init__(self, calls: "OpenCalls", key_id: str, secret_hash: bytes) -> None:
        self.key_id = key_id
        self.secret_hash = secret_hash
        self.is_cut = False
        self._listener: Callable[[], object] | None = None
        self._calls = calls

    @property
    def is_cut_silently(self) -> bool:
        """Return whether the key stopped working and the request has no listener for that."""
        return self.is_cut and self._listener is None

    def when_cut(self, listener: Callable[[], object] | None) -> None:
        """Set the listener that is called once when the key stops working; None removes it."""
        self._listener = listener

    def cut(self) -> None:
        """Note that the key does not work any more, and call the listener."""
        self.is_cut = True
        if self._listener is not None:
            self._listener()

    def leave(self) -> None:
        """Stop watching the key, because the request is over."""
        self._calls.remove(self)


class OpenCalls:
    def __init__(self, store: Store) -> None:
        self._store = store
        self._by_key: dict[str, set[OpenCall]] = {}
        self._watching: asyncio.Task[None] | None = None

    def add(self, key_id: str, secret_hash: bytes) -> OpenCall:
        """Watch the key of a call from now on.

        `secret_hash` is the hash of the secret that the caller sent.
        """
        call = OpenCall(self, key_id, secret_hash)
        self._by_key.setdefault(key_id, set()).add(call)
        if self._watching is None:
            self._watching = asyncio.get_running_loop().create_task(self._watch())
        return call

    def remove(self, call: OpenCall) -> None:
        calls = self._by_key.get(call.key_id)
        if calls is not None:
            calls.discard(call)
            if not calls:
                del self._by_key[call.key_id]

    async def look(self) -> None:
        """Cut every call whose key does not work any more."""
        # Calls that begin while the store is asked are left out: their keys were checked later than
        # this answer.
        asked = [call for calls in self._by_key.values() for call in calls]
        rows = await self._store.key_facts(sorted(self._by_key))
        for call in asked:
            is_open = call in self._by_key.get(call.key_id, ())
            if is_open and not call.is_cut and not works(rows.get(call.key_id), call.secret_hash):
                self._cut(call)

    async def _watch(self) -> None:
        try:
            while self._by_key:
                await asyncio.sleep(LOOK_S)
                try:
                    await self.look()
                except TidegateError as error:
                    log.warning("open_calls_watch_failed", error=str(error))
        finally:
            self._watching = None

    def _cut(self, call: OpenCall) -> None:
        log.info("open_call_cut", key=call.key_id)
        call.cut()


def works(row: dict[str, Any] | None, secret_hash: bytes, age_ms: float = 0.0) -> bool:
    """Return whether a key's row, read `age_ms` ago, allows a caller with this secret."""
    matches = matches_secret(row, secret_hash, age_ms)
    return matches and row is not None and row["revoked_at"] is None and not is_over(row, age_ms)


def matches_secret(row: dict[str, Any] | None, secret_hash: bytes, age_ms: float) -> bool:
    """Return whether this is the key's secret, or its former secret while that still works.

    Both are always compared, even without a row, so that the time taken reveals nothing."""
    is_right = hmac.compare_digest(secret_hash, bytes(row["secret_hash"]) if row else _ABSENT)
    was_right = hmac.compare_digest(secret_hash, bytes((row and row["old_hash"]) or _ABSENT))
    return row is not None and (is_right or (was_right and bool(row["old_until"] > row["now"] + age_ms)))


def is_over(row: dict[str, Any], age_ms: float) -> bool:
    """Return whether the key has expired."""
    return row["expires_at"] is not None and bool(row["expires_at"] <= row["now"] + age_ms)


def refusal() -> ApiProblem:
    return ApiProblem(
        401,
        "invalid_api_key",
        "The API key is missing or not valid. Send it as `Authorization: Bearer tg_live_…`; `tidegate keys create` makes one.",
    )
