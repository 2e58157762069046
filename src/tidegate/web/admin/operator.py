"""What only an operator does: keys made, changed, rotated, revoked and deleted, a batch given up; by a command that holds the store, or
through these routes by one that finds it held by a server.

The routes are for the operator on this machine, who shows the control file's token; to everybody else they do not exist.
"""

import unicodedata
from typing import Annotated

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from tidegate.core import ids, keys
from tidegate.core.errors import ApiProblem
from tidegate.core.nouns import Caller
from tidegate.core.ports import Entropy
from tidegate.core.problems import no_such_batch
from tidegate.store.keys import KeyRights
from tidegate.store.store import Store
from tidegate.web.context import WebContext
from tidegate.web.http import requests
from tidegate.web.http.answers import json_answer
from tidegate.web.http.auth import CONTROL_HEADER
from tidegate.web.http.client_address import networks_of
from tidegate.web.http.limit_requests import KeyLimitAsks, job_limits
from tidegate.web.http.routes import Guarded

NAME_CHARS_MAX = 255
MODELS_MAX = 1_000
ADDRESSES_MAX = 100
EXPIRES_MS_MAX = 100 * 366 * 86_400_000
GRACE_MS = 86_400_000
GRACE_MS_MAX = 90 * 86_400_000
_SCOPE = "batches:write"

ParallelMax = Annotated[int, msgspec.Meta(ge=0, le=1_000_000)]


class KeyWish(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A key to be made."""

    org: str
    label: str = ""
    team: str | None = None
    user: str | None = None
    scopes: list[str] = []
    models: list[str] = []
    expires_after_ms: int | None = None
    resources: list[str] = []
    limits: KeyLimitAsks = []
    parallel_max: ParallelMax = 0
    addresses: list[str] = []


class KeyChange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What of a key is to be another way; what is not given stays. An empty list of models, resources or addresses allows any, and 0
    parallel calls as many as there are slots."""

    scopes: list[str] | None = None
    models: list[str] | None = None
    resources: list[str] | None = None
    limits: KeyLimitAsks | None = None
    expires_after_ms: int | None = None
    parallel_max: ParallelMax | None = None
    addresses: list[str] | None = None


class KeyRotation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """For how long the secret before still works."""

    grace_ms: Annotated[int, msgspec.Meta(ge=0, le=GRACE_MS_MAX)] = GRACE_MS


class KeyDeletion(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The key that is to be no more, or the organization none of whose keys are."""

    id: str | None = None
    org: str | None = None


class KeysDeleted(msgspec.Struct, frozen=True):
    deleted: list[str]


class KeyMade(msgspec.Struct, frozen=True):
    """A new key: the only time that anyone sees it."""

    id: str
    key: str


class BatchAbandoned(msgspec.Struct, frozen=True):
    id: str
    status: str


class KeyChanged(msgspec.Struct, frozen=True):
    id: str
    changed: bool


class KeyRevoked(msgspec.Struct, frozen=True):
    id: str
    revoked: bool


def check_wish(wish: KeyWish) -> None:
    """Refuse what could not be distinguished later: empty, endless or invisible names, and scopes that do not exist."""
    for name, text in (("org", wish.org), ("team", wish.team), ("user", wish.user)):
        if text is not None and not _is_name(text):
            raise _bad(name, f"`{name}` needs 1 to {NAME_CHARS_MAX} printable characters, without spaces around them.")
    if wish.label and not _is_name(wish.label):
        raise _bad("label", f"`label` may have {NAME_CHARS_MAX} printable characters.")
    check_change(
        KeyChange(
            wish.scopes or None,
            wish.models,
            wish.resources,
            wish.limits,
            wish.expires_after_ms,
            addresses=wish.addresses,
        )
    )


def check_change(change: KeyChange) -> None:
    """Refuse names that cannot be meant, scopes that do not exist, limits that limit nothing, and a time that is over."""
    for name, names in (("models", change.models), ("resources", change.resources)):
        if len(names or ()) > MODELS_MAX or not all(_is_name(one) for one in names or ()):
            raise _bad(
                name, f"`{name}` may name {MODELS_MAX:,} of them, each in {NAME_CHARS_MAX} printable characters."
            )
    if change.expires_after_ms is not None and not 0 < change.expires_after_ms <= EXPIRES_MS_MAX:
        raise _bad("expires_after_ms", "A key must work for a while, of at most 100 years: give a time above 0.")
    if len(change.addresses or ()) > ADDRESSES_MAX:
        raise _bad("addresses", f"`addresses` may name {ADDRESSES_MAX:,} addresses or ranges.")
    try:
        networks_of(change.addresses or [])
    except ValueError:
        message = "`addresses` needs IP addresses or ranges, such as 192.0.2.7, 10.0.0.0/8 or 2001:db8::/32."
        raise _bad("addresses", message) from None
    job_limits(change.limits)
    if change.scopes == []:
        raise _bad("scopes", f"A key needs a scope: name some of {', '.join(keys.SCOPES)}, or revoke the key.")
    try:
        keys.scopes_text(change.scopes or [])
    except ValueError as error:
        raise _bad("scopes", f"{error}.") from None


async def make_key(store: Store, entropy: Entropy, pepper: bytes, wish: KeyWish) -> KeyMade:
    """Draw a key, keep its keyed hash, give its text."""
    check_wish(wish)
    tenant_id = await store.put_tenant(ids.make("tenant", entropy.token_bytes(ids.RANDOM_BYTES)), wish.org)
    made = keys.make(entropy.token_bytes(keys.RANDOM_BYTES))
    after_ms = wish.expires_after_ms
    await store.put_key(
        Caller(tenant_id, made.public_id, wish.team, wish.user),
        keys.keyed_hash(pepper, made.text.reveal()),
        wish.label,
        KeyRights(
            scopes=keys.scopes_text(wish.scopes),
            models=keys.models_text(wish.models),
            resources=keys.models_text(wish.resources),
            limits=job_limits(wish.limits),
            expires_at=None if after_ms is None else await store.now_ms() + after_ms,
            parallel_max=wish.parallel_max,
            addresses=keys.addresses_text(wish.addresses),
        ),
    )
    return KeyMade(made.public_id, made.text.reveal())


async def rotate_key(store: Store, entropy: Entropy, pepper: bytes, key_id: str, rotation: KeyRotation) -> KeyMade:
    """Draw another secret for a key. Its id, its limits and what it made stay; the secret before works for the grace."""
    if keys.PUBLIC_ID.fullmatch(key_id):
        made = keys.remake(key_id, entropy.token_bytes(keys.RANDOM_BYTES))
        if await store.rotate_key(key_id, keys.keyed_hash(pepper, made.text.reveal()), rotation.grace_ms):
            return KeyMade(made.public_id, made.text.reveal())
    raise ApiProblem(
        404, "key_not_found", "There is no key of this id that still works. `tidegate keys list` shows them."
    )


async def change_key(store: Store, key_id: str, change: KeyChange) -> bool:
    """Change what a key may do; it holds everywhere within seconds, also for what its batches have not sent yet."""
    check_change(change)
    after_ms = change.expires_after_ms
    rights = KeyRights(
        scopes=None if change.scopes is None else keys.scopes_text(change.scopes),
        models=None if change.models is None else keys.models_text(change.models),
        resources=None if change.resources is None else keys.models_text(change.resources),
        limits=None if change.limits is None else job_limits(change.limits),
        expires_at=None if after_ms is None else await store.now_ms() + after_ms,
        parallel_max=change.parallel_max,
        addresses=None if change.addresses is None else keys.addresses_text(change.addresses),
    )
    return bool(keys.PUBLIC_ID.fullmatch(key_id)) and await store.change_key(key_id, rights)


async def delete_keys(store: Store, deletion: KeyDeletion) -> KeysDeleted:
    """Take away a key, or all those of an organization: what their batches have not sent yet fails within seconds."""
    if (deletion.id is None) == (deletion.org is None):
        raise _bad("id", "Name the key to delete, or the organization whose keys are to go; not both.")
    if deletion.org is not None:
        if not _is_name(deletion.org):
            raise _bad("org", f"`org` needs 1 to {NAME_CHARS_MAX} printable characters, without spaces around them.")
        return KeysDeleted(await store.delete_keys_of(deletion.org))
    key_id = str(deletion.id)
    found = bool(keys.PUBLIC_ID.fullmatch(key_id)) and await store.delete_key(key_id)
    return KeysDeleted([key_id] if found else [])


class Operator:
    def __init__(self, context: WebContext) -> None:
        self._store = context.store
        self._entropy = context.entropy
        self._pepper = context.pepper
        self._body_bytes_max = context.settings.limits.body_bytes_max
        self._failed_keep_ms = context.settings.retention.failed_s * 1000

    def routes(self) -> list[Guarded]:
        return [
            Guarded("POST", "/control/keys", _SCOPE, self.create_key),
            Guarded("POST", "/control/keys/{key_id}/change", _SCOPE, self.change_key),
            Guarded("POST", "/control/keys/{key_id}/rotate", _SCOPE, self.rotate_key),
            Guarded("POST", "/control/keys/{key_id}/revoke", _SCOPE, self.revoke_key),
            Guarded("POST", "/control/keys/delete", _SCOPE, self.delete_keys),
            Guarded("POST", "/control/batches/{batch_id}/abandon", _SCOPE, self.abandon_batch),
        ]

    async def create_key(self, request: Request, caller: Caller) -> Response:
        require_operator(request)
        wish = await requests.json_body(request, KeyWish, self._body_bytes_max)
        return json_answer(await make_key(self._store, self._entropy, self._pepper, wish))

    async def change_key(self, request: Request, caller: Caller) -> Response:
        require_operator(request)
        change = await requests.json_body(request, KeyChange, self._body_bytes_max)
        key_id = str(request.path_params["key_id"])
        return json_answer(KeyChanged(key_id, await change_key(self._store, key_id, change)))

    async def rotate_key(self, request: Request, caller: Caller) -> Response:
        require_operator(request)
        rotation = await requests.json_body(request, KeyRotation, self._body_bytes_max)
        key_id = str(request.path_params["key_id"])
        return json_answer(await rotate_key(self._store, self._entropy, self._pepper, key_id, rotation))

    async def revoke_key(self, request: Request, caller: Caller) -> Response:
        require_operator(request)
        key_id = str(request.path_params["key_id"])
        revoked = bool(keys.PUBLIC_ID.fullmatch(key_id)) and await self._store.revoke_key(key_id)
        return json_answer(KeyRevoked(key_id, revoked))

    async def delete_keys(self, request: Request, caller: Caller) -> Response:
        require_operator(request)
        deletion = await requests.json_body(request, KeyDeletion, self._body_bytes_max)
        return json_answer(await delete_keys(self._store, deletion))

    async def abandon_batch(self, request: Request, caller: Caller) -> Response:
        require_operator(request)
        batch_id = str(request.path_params["batch_id"])
        job = None
        if ids.is_valid("batch", batch_id):
            job = await self._store.abandon_job(caller.tenant_id, batch_id, self._failed_keep_ms)
        if job is None:
            raise no_such_batch(batch_id)
        return json_answer(BatchAbandoned(job.id, job.state))


def require_operator(request: Request) -> None:
    """Require the operator. A request with this header has shown the right token already; one without it is only a caller's."""
    if CONTROL_HEADER not in request.headers:
        raise HTTPException(404)


def _is_name(text: str) -> bool:
    """Whether people can tell it from others: what looks the same is the same."""
    is_plain = text.isprintable() and text.strip() == text and unicodedata.is_normalized("NFC", text)
    return is_plain and 1 <= len(text) <= NAME_CHARS_MAX


def _bad(param: str, message: str) -> ApiProblem:
    return ApiProblem(400, "invalid_parameter", message, param=param)
