"""Sessions of the console: for the holder of a key with an admin scope or, while there is no key, a
program on this machine.

A session is a cookie with a key's id, an end and a nonce, under a MAC that also covers the key's
stored hash. No session is stored, every process can check it, and it ends when the key is rotated,
revoked, deleted or expired. Only the nonces of sessions that were signed out are stored. The API
never reads the cookie.
"""

import hmac
from urllib.parse import parse_qsl

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tidegate.core import keys
from tidegate.core.errors import ApiProblem
from tidegate.core.nouns import Caller
from tidegate.web.admin.audit import READ
from tidegate.web.context import WebContext
from tidegate.web.http.auth import CONTROL_HEADER, Authenticator, holder_of
from tidegate.web.http.client_address import client_address, is_allowed, networks_of, public_base
from tidegate.web.http.intake import Intake
from tidegate.web.http.loopback import is_sent_without_a_network

COOKIE = "__Host-tidegate"
SESSION_S = 12 * 3600
FORM_BYTES_MAX = 16_384
FORM_FIELDS_MAX = 32
_SEPARATOR = "."


class Visitor(msgspec.Struct, frozen=True):
    """A person who may see the console; with `may_write` also change things, and with
    `may_read_content` also read requests and responses. `csrf` must come with each change. Without
    keys there is no `key_id`. `holder` is the caller that the key stands for, and `address` the
    person's address.
    """

    key_id: str | None
    may_write: bool
    csrf: str
    may_read_content: bool = False
    holder: Caller | None = None
    address: str = ""


class Sessions:
    def __init__(self, context: WebContext, authenticator: Authenticator) -> None:
        self._store = context.store
        self._clock = context.clock
        self._entropy = context.entropy
        self._pepper = context.pepper
        self._scopes = context.scopes
        self._authenticator = authenticator
        self._trusted = networks_of(context.settings.server.trusted_proxies)

    async def visitor(self, request: Request) -> Visitor | None:
        """Return the visitor; None if they must sign in first."""
        found = await self._of_cookie(request.cookies.get(COOKIE, ""), self._client(request))
        if found is not None or "authorization" in request.headers or CONTROL_HEADER in request.headers:
            return found
        try:
            await self._authenticator.caller(request, READ)
        except ApiProblem as problem:
            if problem.status == 401:
                return None
            raise
        return Visitor(None, False, "")

    async def sign_in(self, request: Request, key: str) -> str:
        """Return a new session's cookie for a right key; refuse a wrong one."""
        if not self.is_encrypted(request) and not is_sent_without_a_network(self._client(request), request.headers):
            raise ApiProblem(
                403,
                "https_required",
                "Sign in over HTTPS, or call the console as localhost: on the server's own machine, or through a tunnel to it.",
            )
        holder: Caller = await self._authenticator.caller(request, READ, key)
        row = await self._store.get_key(str(holder.key_id))
        if holder.key_id is None or row is None:
            raise ApiProblem(401, "invalid_api_key", "There is no such key.")
        ends_s = self._clock.now_ms() // 1000 + SESSION_S
        named = _SEPARATOR.join((holder.key_id, self._entropy.token_bytes(16).hex(), str(ends_s)))
        return named + _SEPARATOR + self._mac(named, bytes(row["secret_hash"]))

    async def sign_out(self, request: Request) -> None:
        """End the session of this request's cookie in every process.

        The cookie must have been checked.
        """
        _, nonce, ends_s, _ = request.cookies[COOKIE].split(_SEPARATOR)
        await self._store.end_session(nonce, int(ends_s) * 1000)

    async def _of_cookie(self, cookie: str, client: str) -> Visitor | None:
        named, _, mac = cookie.rpartition(_SEPARATOR)
        parts = named.split(_SEPARATOR)
        if len(parts) != 3 or not keys.PUBLIC_ID.fullmatch(parts[0]) or not parts[2].isdecimal() or len(parts[2]) > 12:
            return None
        row = await self._store.get_key(parts[0])
        wanted = self._mac(named, bytes(row["secret_hash"]) if row else b"")
        if row is None or not hmac.compare_digest(mac.encode(), wanted.encode()):
            return None
        is_over = row["expires_at"] is not None and row["expires_at"] <= row["now"]
        if row["revoked_at"] is not None or is_over or int(parts[2]) * 1000 <= self._clock.now_ms():
            return None
        if await self._store.is_session_ended(parts[1]):
            return None
        holder = holder_of(parts[0], row, self._scopes)
        # A cookie allows no more than its key: its scopes and its addresses hold here too.
        if not holder.scopes & {"admin:read", "admin:write"} or not is_allowed(client, row["addresses"]):
            return None
        csrf = hmac.digest(self._pepper, b"console csrf\0" + named.encode(), "sha256").hex()
        may_write, may_read_content = "admin:write" in holder.scopes, "admin:content" in holder.scopes
        return Visitor(parts[0], may_write, csrf, may_read_content, holder, client)

    def _mac(self, named: str, secret_hash: bytes) -> str:
        return hmac.digest(self._pepper, b"console session\0" + named.encode() + b"\0" + secret_hash, "sha256").hex()

    def is_encrypted(self, request: Request) -> bool:
        """Return whether the browser uses HTTPS, as trusted proxies report it."""
        peer = request.client.host if request.client else ""
        return public_base(peer, request.headers, request.url.scheme, self._trusted).startswith("https:")

    def _client(self, request: Request) -> str:
        return client_address(request.client.host if request.client else "", request.headers, self._trusted)


def set_cookie(response: Response, value: str, max_age_s: int = SESSION_S) -> Response:
    """Give a session to the browser, or take it back with an empty value."""
    response.set_cookie(COOKIE, value, max_age=max_age_s, path="/", secure=True, httponly=True, samesite="strict")
    return response


async def form_of(request: Request) -> dict[str, str]:
    """Return the fields of a form that one of our own pages sent; refuse forms from elsewhere."""
    refuse_foreign(request)
    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/x-www-form-urlencoded":
        raise ApiProblem(415, "unsupported_media_type", "Send a form.", param="Content-Type")
    intake: Intake = request.scope["tidegate.intake"]
    over = ApiProblem(413, "body_too_large", f"A form may have {FORM_BYTES_MAX:,} bytes.")
    body = await intake.whole(FORM_BYTES_MAX, over)
    try:
        return dict(parse_qsl(body.decode("utf-8", "replace"), max_num_fields=FORM_FIELDS_MAX, keep_blank_values=True))
    except ValueError:
        raise ApiProblem(400, "invalid_parameter", f"A form may have {FORM_FIELDS_MAX} fields.") from None


def refuse_foreign(request: Request) -> None:
    """Refuse requests from pages of other sites."""
    if not _is_ours(request):
        raise ApiProblem(403, "foreign_form", "This form was sent by another site.")


def _is_ours(request: Request) -> bool:
    """Return whether one of our own pages sent this.

    Our referrer policy makes a browser send the origin `null`; then Sec-Fetch-Site tells whether
    the page is ours.
    """
    site, origin = request.headers.get("sec-fetch-site"), request.headers.get("origin")
    if site is not None and site != "same-origin":
        return False
    if origin is None or (origin == "null" and site is not None):
        return True
    return origin.partition("://")[2] == request.headers.get("host")
