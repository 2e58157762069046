"""The identity of a caller: the holder of a key, this machine's operator, or a local program.

A local program counts only while there is no key and no other machine can connect.

A command on this machine shows the token that a server left in its data directory. Who can read
that file owns the data anyway, so the token is good for any tenant, but only from this machine. A
refusal never says why. A row of a key is believed for two seconds at most, so a revoked or expired
key stops working by then; open calls with that key are cut within a second more.

This module decides who a caller is, which scopes it has and which routes these open. The store
decides which things belong to the caller.

A right key is never refused for the mistakes of others. After too many wrong keys from an address
or under a key's name, keys that have not been used here before are looked up a few at a time, and
only the wrong ones among them are answered with 429.
"""

import asyncio
import functools
import hmac
from collections import OrderedDict
from hashlib import blake2b
from typing import Any, NamedTuple, Protocol
from urllib.parse import unquote

import structlog
from starlette.requests import Request
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from tidegate.core import ids, keys
from tidegate.core.errors import ApiProblem, SettingsError, TidegateError
from tidegate.core.nouns import DEFAULT_TENANT, Caller
from tidegate.store.database.rows import limits_from
from tidegate.web.context import WebContext
from tidegate.web.http.client_address import client_address, is_allowed, networks_of, owner_of
from tidegate.web.http.failures import Failures
from tidegate.web.http.intake import OpenCalls, is_over, matches_secret, refusal
from tidegate.web.http.loopback import BY_SOCKET, is_loopback, refuse_remote
from tidegate.web.http.pepper import pepper_of as pepper_of
from tidegate.web.http.pepper import require_pepper
from tidegate.web.http.problems import ANTHROPIC_PATHS
from tidegate.web.http.rate_limits import LIMIT_HEADERS, Headers
from tidegate.web.http.routes import Guarded

log = structlog.get_logger()

CONTROL_HEADER = "X-Tidegate-Control"
TENANT_HEADER = "X-Tidegate-Tenant"
# The entry of a request's scope that holds the caller's address, behind trusted proxies too.
CLIENT = "tidegate.client"
BELIEVED_MS = 2_000
ROWS_MAX = 4_096
ADDRESS_FAILURES_MAX = 30
KEY_FAILURES_MAX = 10
# Keys that are looked up at once for addresses and key names with too many failures.
DOUBTFUL_LOOK_UPS = 4
USED_EVERY_MS = 60_000
_TENANT_CHARS_MAX = 255
NEEDS_ADMIN_KEY = (
    "Without an API key this can only be looked at. Use the `tidegate` commands on this machine, or make a key with "
    "`tidegate keys create --org NAME --scopes admin:write`."
)


class BelievedKey(NamedTuple):
    """A key that was found right, with its holder.

    It is used without another check until `until_ms`.
    """

    until_ms: float
    public_id: str
    secret_hash: bytes
    caller: Caller


class Authenticator:
    def __init__(self, context: WebContext) -> None:
        self._store = context.store
        self._clock = context.clock
        self._entropy = context.entropy
        self._pepper = context.pepper
        self._control_token = context.control_token
        self._scopes = context.scopes
        self._operator_scopes = frozenset(context.scopes.all)
        # While there is no key, a program on this machine may read everything, but needs a key for
        # an operator's changes.
        self._keyless_scopes = frozenset((*context.scopes.tenant, "admin:read"))
        self._rows: OrderedDict[str, tuple[float, dict[str, Any] | None]] = OrderedDict()
        # Keyed by a hash that only this process can make, so that no key's text is kept.
        self._believed: OrderedDict[bytes, BelievedKey] = OrderedDict()
        self._hash_key = self._entropy.token_bytes(32)
        self._proven: OrderedDict[str, float] = OrderedDict()
        self._keyless_until_ms = 0.0
        self._pepper_until_ms = 0.0
        self._any_key = False
        self._default_tenant_id: str | None = None
        # If other machines can connect, a proxy may run on this machine: then a local address
        # proves nothing.
        self._is_local_only = is_loopback(context.settings.server.host)
        self._address_failures = Failures(self._clock, ADDRESS_FAILURES_MAX)
        self._key_failures = Failures(self._clock, KEY_FAILURES_MAX)
        self._doubtful = asyncio.Semaphore(DOUBTFUL_LOOK_UPS)
        self._trusted_proxies = networks_of(context.settings.server.trusted_proxies)
        self._notes: set[asyncio.Task[None]] = set()
        self._open_calls = OpenCalls(self._store)

    async def caller(self, request: Request, scope: str, key: str | None = None) -> Caller:
        """Return who sent this request; raise a 403 without the scope `scope`.

        `key` is a key that did not come in a header.
        """
        peer = request.client.host if request.client else ""
        client = client_address(peer, request.headers, self._trusted_proxies) if self._trusted_proxies else peer
        request.scope[CLIENT] = client
        if CONTROL_HEADER in request.headers:
            return await self._operator(request, client)
        text = _bearer(request) if key is None else key
        is_keyless = not await self._any_key_exists(text)
        if is_keyless:
            if not self._is_local_only:
                raise refusal()
            refuse_remote(client, request.headers)
            caller = Caller(await self._default_tenant(), scopes=self._keyless_scopes)
        else:
            caller = await self._key_holder(request, text, client)
        if not any(one in caller.scopes for one in scope.split(" or ")):
            raise ApiProblem(403, "insufficient_scope", NEEDS_ADMIN_KEY if is_keyless else _lacks(scope, caller.scopes))
        return caller

    async def _key_holder(self, request: Request, text: str, client: str) -> Caller:
        if not text:
            raise refusal()
        text_hash = blake2b(text.encode(), key=self._hash_key, digest_size=32).digest()
        key = self._believed.get(text_hash)
        if key is None or self._clock.monotonic_ms() >= key.until_ms:
            key = await self._check_key(text, client)
            if key.until_ms:
                self._believed[text_hash] = key
                self._believed.move_to_end(text_hash)
                if len(self._believed) > ROWS_MAX:
                    self._believed.popitem(last=False)
        self._note_use(key.public_id)
        request.scope["tidegate.intake"].count_under(self._open_calls.add(key.public_id, key.secret_hash))
        return key.caller

    async def _check_key(self, text: str, client: str) -> BelievedKey:
        public_id = keys.public_id_of(text)
        given = keys.keyed_hash(self._pepper, text)
        if public_id is None:
            raise self._failed(client, None)
        # A key that was right before does not wait for the failures of others.
        if public_id in self._proven or not self._wait_s(client, public_id):
            row, age_ms, matches = await self._look_up(public_id, given)
        else:
            async with self._doubtful:
                row, age_ms, matches = await self._look_up(public_id, given)
        if row is None or row["revoked_at"] is not None or is_over(row, age_ms):
            self._proven.pop(public_id, None)
            raise self._failed(client, public_id)
        if not matches:
            await self._require_pepper()
            raise self._failed(client, public_id)
        if row["addresses"] and not is_allowed(client, row["addresses"]):
            log.warning("key_address_refused", key=public_id, address=client)
            raise self._failed(client, public_id)
        return BelievedKey(
            self._believed_until_ms(public_id, row), public_id, given, holder_of(public_id, row, self._scopes)
        )

    def _believed_until_ms(self, public_id: str, row: dict[str, Any]) -> float:
        """Return until when a right key needs no other check: as long as its row is believed, at
        most until it expires.
        """
        if row["addresses"] or row["old_hash"]:
            # Its address, or which of its two secrets was sent, must be checked each time.
            return 0.0
        read_ms = self._rows[public_id][0] if public_id in self._rows else 0.0
        left_ms = BELIEVED_MS if row["expires_at"] is None else min(BELIEVED_MS, row["expires_at"] - row["now"])
        return read_ms + left_ms

    async def _look_up(self, public_id: str, given: bytes) -> tuple[dict[str, Any] | None, float, bool]:
        """Return a key's row, the age of the row, and whether the secret matches."""
        row, age_ms = await self._row(public_id)
        matches = matches_secret(row, given, age_ms)
        if not matches and age_ms:
            # The row may be older than a new secret. Wrong secrets are bounded, so this extra read
            # is too.
            self._rows.pop(public_id, None)
            row, age_ms = await self._row(public_id)
            matches = matches_secret(row, given, age_ms)
        return row, age_ms, matches

    async def _require_pepper(self) -> None:
        """Raise a 503 if the keys are hashed with another pepper: the caller's secret may be
        right."""
        now_ms = self._clock.monotonic_ms()
        if now_ms < self._pepper_until_ms:
            return
        try:
            await require_pepper(self._store, self._pepper)
        except SettingsError as error:
            log.error("pepper_differs", why=str(error))
            raise ApiProblem(
                503,
                "pepper_differs",
                "This server cannot check API keys: its operator has to give it the pepper (auth.pepper) of the other servers.",
            ) from None
        self._pepper_until_ms = now_ms + BELIEVED_MS

    async def _row(self, public_id: str) -> tuple[dict[str, Any] | None, float]:
        now_ms = self._clock.monotonic_ms()
        known = self._rows.get(public_id)
        if known is not None and now_ms - known[0] < BELIEVED_MS:
            return known[1], now_ms - known[0]
        row = await self._store.get_key(public_id)
        self._rows[public_id] = (now_ms, row)
        self._rows.move_to_end(public_id)
        if len(self._rows) > ROWS_MAX:
            self._rows.popitem(last=False)
        return row, 0.0

    async def _any_key_exists(self, text: str) -> bool:
        """Return whether there is any key.

        A yes is final; a no is believed for two seconds.

        A request with a key asks the store again: as a keyless caller it would make things that its
        key cannot find later.
        """
        now_ms = self._clock.monotonic_ms()
        is_shown = not self._any_key and keys.public_id_of(text) is not None
        if not self._any_key and (is_shown or now_ms >= self._keyless_until_ms):
            self._any_key = await self._store.any_key()
            self._keyless_until_ms = now_ms + BELIEVED_MS
        return self._any_key

    async def _operator(self, request: Request, client: str) -> Caller:
        given = request.headers[CONTROL_HEADER].encode("latin-1", "replace")
        wanted = self._control_token.reveal().encode() if self._control_token else b""
        is_here = request.scope.get(BY_SOCKET, False) or is_loopback(client)
        if not hmac.compare_digest(given, wanted) or not wanted or not is_here:
            raise self._failed(client, None)
        # A name may have characters that a header may not, so it comes percent-encoded.
        name = unquote(request.headers.get(TENANT_HEADER, DEFAULT_TENANT))
        if name == DEFAULT_TENANT:
            return Caller(await self._default_tenant(), scopes=self._operator_scopes)
        tenant_id = None
        if name.isprintable() and len(name) <= _TENANT_CHARS_MAX:
            tenant_id = await self._store.tenant_by_name(name)
        if tenant_id is None:
            raise ApiProblem(
                404,
                "tenant_not_found",
                f"There is no organization {name[:_TENANT_CHARS_MAX]!r}; `tidegate keys list` shows those that have keys.",
            )
        return Caller(tenant_id, scopes=self._operator_scopes)

    async def _default_tenant(self) -> str:
        if self._default_tenant_id is None:
            fresh = ids.make("tenant", self._entropy.token_bytes(ids.RANDOM_BYTES))
            self._default_tenant_id = await self._store.put_tenant(fresh, DEFAULT_TENANT)
        return self._default_tenant_id

    def _wait_s(self, client: str, public_id: str | None) -> int:
        """Return how long this client must wait after too many failures from its address or under
        this key's name; 0 if it need not.
        """
        wait_s = self._address_failures.wait_s(owner_of(client))
        return max(wait_s, self._key_failures.wait_s(public_id)) if public_id is not None else wait_s

    def _failed(self, client: str, public_id: str | None) -> ApiProblem:
        """Count a wrong key.

        Return the refusal: the key is wrong, or there were too many wrong ones.
        """
        wait_s = self._wait_s(client, public_id)
        if wait_s:
            return ApiProblem(
                429,
                "too_many_failures",
                "Too many requests with a wrong API key came from here. Check the key, then wait and try again.",
                retry_after_s=wait_s,
            )
        self._address_failures.add(owner_of(client))
        if public_id is not None:
            self._key_failures.add(public_id)
        return refusal()

    def _note_use(self, public_id: str) -> None:
        """Note that the key is right, and write the time of its last use to the store once a
        minute. A lost note does no harm.
        """
        now_ms = self._clock.monotonic_ms()
        noted_ms = self._proven.get(public_id)
        if noted_ms is not None and now_ms - noted_ms < USED_EVERY_MS:
            return
        self._proven[public_id] = now_ms
        self._proven.move_to_end(public_id)
        if len(self._proven) > ROWS_MAX:
            self._proven.popitem(last=False)
        note = asyncio.get_running_loop().create_task(self._mark_used(public_id))
        self._notes.add(note)
        note.add_done_callback(self._notes.discard)

    async def _mark_used(self, public_id: str) -> None:
        try:
            await self._store.mark_key_used(public_id)
        except TidegateError:
            return


class CallerLimits(Protocol):
    async def headers(self, caller: Caller) -> Headers:
        """Return what the caller's limits have left, as headers."""


def guarded_routes(authenticator: Authenticator, limits: CallerLimits, entries: list[Guarded]) -> list[Route]:
    """Make one route per path, so that a 405 names every right method.

    Each request is authenticated first.
    """
    by_path: dict[str, dict[str, Guarded]] = {}
    for entry in entries:
        by_path.setdefault(entry.path, {})[entry.method] = entry
    return [
        Route(path, GuardedPath(authenticator, limits, methods), methods=list(methods))
        for path, methods in by_path.items()
    ]


class GuardedPath:
    """The ASGI app of one path.

    Starlette would wrap a function in layers that repeat the door's work.
    """

    def __init__(self, authenticator: Authenticator, limits: CallerLimits, methods: dict[str, Guarded]) -> None:
        self._authenticator = authenticator
        self._limits = limits
        self._methods = methods

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive, send)
        entry = self._methods["GET" if request.method == "HEAD" else request.method]
        caller = await self._authenticator.caller(request, entry.scope)
        scope["tidegate.intake"].belongs_to(caller.tenant_id)
        if entry.makes_work:
            scope[LIMIT_HEADERS] = functools.partial(self._limits.headers, caller)
        response = await entry.handler(request, caller)
        await response(scope, receive, send)


def holder_of(public_id: str, row: dict[str, Any], known: keys.Scopes) -> Caller:
    """Return the holder of a key, with all that its row allows and limits."""
    scopes, environments = keys.scopes_from(row["scopes"]), keys.models_from(row["environments"])
    return Caller(
        row["tenant_id"],
        public_id,
        row["team"],
        row["user_name"],
        scopes & known.in_environments if environments else scopes,
        keys.models_from(row["models"]),
        keys.models_from(row["resources"]),
        limits_from(row["limits"]),
        row["parallel_max"],
        environments,
    )


def _lacks(scope: str, scopes: frozenset[str]) -> str:
    named = " or ".join(f"`{one}`" for one in scope.split(" or "))
    if scopes.isdisjoint(keys.ADMIN_SCOPES):
        return f"This key lacks the scope {named}. Ask for a key that has it."
    if not scope.startswith("admin:"):
        return f"This is an operator's key. Use a key of the organization, with the scope {named}."
    return f"This operator's key lacks the scope {named}. Ask for a key that has it."


def _bearer(request: Request) -> str:
    if request.scope["path"].startswith(ANTHROPIC_PATHS) and "x-api-key" in request.headers:
        return request.headers["x-api-key"].strip()
    kind, _, text = request.headers.get("authorization", "").partition(" ")
    return text.strip() if kind.lower() == "bearer" else ""
