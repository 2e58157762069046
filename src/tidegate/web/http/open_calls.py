"""The calls that are open under keys: when a key is revoked, deleted, expired or given another secret, its open calls end too.

While calls are open, the store is asked once a second how their keys stand, all in one statement. A call whose key does not work any more
is cut: a stream ends with an error event, a call without an answer gets the refusal that a wrong key gets, an upload is refused and a
download breaks off. While the store does not answer, open calls go on. It knows no route and no tenant.
"""

import asyncio
import hmac
from collections.abc import Callable
from typing import Any

import structlog

from tidegate.core.errors import ApiProblem, TidegateError
from tidegate.store.store import Store

log = structlog.get_logger()

LOOK_S = 1.0
_ABSENT = bytes(32)


class KeyCut(Exception):
    """The key stopped working while the answer was on its way, so that only a broken connection can say it."""


class OpenCall:
    """One request under a key, from the moment that its key was found right. Unless it listens for
    the moment that the key stops working, the next part of its body or of its answer is refused then."""

    __slots__ = ("_calls", "_listener", "is_cut", "key_id", "secret_hash")

    def __init__(self, calls: "OpenCalls", key_id: str, secret_hash: bytes) -> None:
        self.key_id = key_id
        self.secret_hash = secret_hash
        self.is_cut = False
        self._listener: Callable[[], object] | None = None
        self._calls = calls

    @property
    def is_cut_unheard(self) -> bool:
        """Whether the key stopped working and the request itself does not listen for that."""
        return self.is_cut and self._listener is None

    def when_cut(self, listener: Callable[[], object] | None) -> None:
        """Call this once when the key stops working; None listens no longer."""
        self._listener = listener

    def cut(self) -> None:
        """The key does not work any more."""
        self.is_cut = True
        if self._listener is not None:
            self._listener()

    def leave(self) -> None:
        """The request is over."""
        self._calls.remove(self)


class OpenCalls:
    def __init__(self, store: Store) -> None:
        self._store = store
        self._by_key: dict[str, set[OpenCall]] = {}
        self._watching: asyncio.Task[None] | None = None

    def add(self, key_id: str, secret_hash: bytes) -> OpenCall:
        """Watch the key of a call from now on; `secret_hash` is what the caller showed."""
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
        # A call that begins while the store is asked was checked later than this answer: only the calls of now are judged by it.
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
    """Whether a key's row, read so long ago, lets a caller in who shows this secret."""
    matches = matches_secret(row, secret_hash, age_ms)
    return matches and row is not None and row["revoked_at"] is None and not is_over(row, age_ms)


def matches_secret(row: dict[str, Any] | None, secret_hash: bytes, age_ms: float) -> bool:
    """Whether this is the key's secret, or the one before it while that still works.

    Both are compared always, also when there is no such key, so that the time taken tells nothing."""
    is_right = hmac.compare_digest(secret_hash, bytes(row["secret_hash"]) if row else _ABSENT)
    was_right = hmac.compare_digest(secret_hash, bytes((row and row["old_hash"]) or _ABSENT))
    return row is not None and (is_right or (was_right and bool(row["old_until"] > row["now"] + age_ms)))


def is_over(row: dict[str, Any], age_ms: float) -> bool:
    """Whether the key expired."""
    return row["expires_at"] is not None and bool(row["expires_at"] <= row["now"] + age_ms)


def refusal() -> ApiProblem:
    return ApiProblem(
        401,
        "invalid_api_key",
        "The API key is missing or not valid. Send it as `Authorization: Bearer tg_live_…`; `tidegate keys create` makes one.",
    )
