"""API keys, which an operator makes, changes, rotates, revokes and deletes through these routes or
by a command that holds the store.

A key is shown once, in the answer that makes it. Each change is noted in the audit, without
secrets.
"""

import unicodedata
from typing import Annotated, Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tidegate.core import ids, keys
from tidegate.core.budgets.budget import Limit
from tidegate.core.deployments import Secret
from tidegate.core.errors import ApiProblem, SettingsError
from tidegate.core.nouns import DEFAULT_TENANT, Caller
from tidegate.core.ports import Entropy
from tidegate.settings.capacity import ParallelMax
from tidegate.store.database.rows import limits_from
from tidegate.store.store import Store
from tidegate.store.tenants.keys import KeyRights
from tidegate.web.admin.audit import READ, WRITE, AuditTrail, trail_of
from tidegate.web.context import WebContext
from tidegate.web.doors import SCOPES
from tidegate.web.http.answers import json_answer, page_of
from tidegate.web.http.client_address import networks_of
from tidegate.web.http.pepper import claim_pepper
from tidegate.web.http.routes import Guarded
from tidegate.web.requests import requests
from tidegate.web.requests.limit_requests import KeyRequestLimits, job_limits

NAME_CHARS_MAX = 255
MODELS_MAX = 1_000
ADDRESSES_MAX = 100
ENVIRONMENTS_MAX = 100
EXPIRES_MS_MAX = 100 * 366 * 86_400_000
LIST_COUNT = 20
LIST_COUNT_MAX = 100
GRACE_MS = 86_400_000
GRACE_MS_MAX = 90 * 86_400_000


class KeyRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A key to be made."""

    org: str
    label: str = ""
    team: str | None = None
    user: str | None = None
    scopes: list[str] = []
    models: list[str] = []
    expires_after_ms: int | None = None
    resources: list[str] = []
    limits: KeyRequestLimits = []
    parallel_max: ParallelMax = 0
    addresses: list[str] = []
    environments: list[str] = []


class KeyChange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The changes to a key; fields that are left out stay.

    An empty list of models, resources, addresses or environments allows any, and 0 parallel calls
    allows as many as there are slots.
    """

    scopes: list[str] | None = None
    models: list[str] | None = None
    resources: list[str] | None = None
    limits: KeyRequestLimits | None = None
    expires_after_ms: int | None = None
    parallel_max: ParallelMax | None = None
    addresses: list[str] | None = None
    environments: list[str] | None = None


class KeyRotation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A new secret for a key. The former secret works for `grace_ms` more."""

    grace_ms: Annotated[int, msgspec.Meta(ge=0, le=GRACE_MS_MAX)] = GRACE_MS


class KeyDeletion(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The key to delete, or the organization whose keys are all deleted."""

    id: str | None = None
    org: str | None = None


class KeysDeleted(msgspec.Struct, frozen=True):
    deleted: list[str]


class KeyMade(msgspec.Struct, frozen=True):
    """A new key. Its text is shown only here."""

    id: str
    key: str


class KeyChanged(msgspec.Struct, frozen=True):
    id: str
    changed: bool


class KeyRevoked(msgspec.Struct, frozen=True):
    id: str
    revoked: bool


def check_key_request(wanted: KeyRequest) -> None:
    """Refuse names that are empty, too long or invisible, and scopes that do not exist."""
    for name, text in (("org", wanted.org), ("team", wanted.team), ("user", wanted.user)):
        if text is not None and not _is_name(text):
            raise _bad(name, f"`{name}` needs 1 to {NAME_CHARS_MAX} printable characters, without spaces around them.")
    if wanted.label and not _is_name(wanted.label):
        raise _bad("label", f"`label` may have {NAME_CHARS_MAX} printable characters.")
    check_change(
        KeyChange(
            wanted.scopes or None,
            wanted.models,
            wanted.resources,
            wanted.limits,
            wanted.expires_after_ms,
            addresses=wanted.addresses,
            environments=wanted.environments,
        )
    )


def check_change(change: KeyChange) -> None:
    """Refuse impossible names, scopes that do not exist, limits that limit nothing, and times in
    the past.
    """
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
    environments = change.environments or ()
    if len(environments) > ENVIRONMENTS_MAX or not all(keys.ENVIRONMENT.fullmatch(one) for one in environments):
        message = (
            f"`environments` may name {ENVIRONMENTS_MAX:,}, each in 1 to 64 letters, digits, hyphens and underscores."
        )
        raise _bad("environments", message)
    job_limits(change.limits)
    if change.scopes == []:
        raise _bad(
            "scopes",
            f"A key needs a scope: name some of {', '.join(SCOPES.all)}, or revoke the key.",
        )
    try:
        SCOPES.text(change.scopes or [])
    except ValueError as error:
        raise _bad("scopes", f"{error}.") from None


async def make_key(trail: AuditTrail, entropy: Entropy, pepper: bytes, wanted: KeyRequest) -> KeyMade:
    """Make a key, store its keyed hash, and return its text."""
    check_key_request(wanted)
    made = keys.make(entropy.token_bytes(keys.RANDOM_BYTES))
    store = trail.noting("key.create", "key", made.public_id)
    await _claim_pepper(store, pepper)
    tenant_id = await store.put_tenant(ids.make("tenant", entropy.token_bytes(ids.RANDOM_BYTES)), wanted.org)
    after_ms = wanted.expires_after_ms
    await store.put_key(
        Caller(tenant_id, made.public_id, wanted.team, wanted.user),
        keys.keyed_hash(pepper, made.text.reveal()),
        wanted.label,
        KeyRights(
            scopes=SCOPES.text(wanted.scopes),
            models=keys.models_text(wanted.models),
            resources=keys.models_text(wanted.resources),
            limits=job_limits(wanted.limits),
            expires_at=None if after_ms is None else await store.now_ms() + after_ms,
            parallel_max=wanted.parallel_max,
            addresses=keys.addresses_text(wanted.addresses),
            environments=keys.models_text(wanted.environments),
        ),
    )
    return KeyMade(made.public_id, made.text.reveal())


async def _claim_pepper(store: Store, pepper: bytes) -> None:
    try:
        await claim_pepper(store, pepper)
    except SettingsError as error:
        raise ApiProblem(503, "pepper_differs", str(error)) from None


async def bootstrap_key(trail: AuditTrail, entropy: Entropy, pepper: bytes, text: Secret) -> None:
    """Store the key of the settings as the first key, for every call of a tenant.

    A store that has keys is left unchanged.
    """
    public_id = keys.public_id_of(text.reveal())
    if public_id is None:
        raise SettingsError("auth.bootstrap_key is no key; `tidegate keys generate` prints one.")
    store = trail.noting("key.create", "key", public_id)
    if await store.any_key():
        return
    await claim_pepper(store, pepper)
    tenant_id = await store.put_tenant(ids.make("tenant", entropy.token_bytes(ids.RANDOM_BYTES)), DEFAULT_TENANT)
    rights = KeyRights(scopes=SCOPES.text(()))
    await store.put_key(
        Caller(tenant_id, public_id), keys.keyed_hash(pepper, text.reveal()), "auth.bootstrap_key", rights
    )


async def rotate_key(trail: AuditTrail, entropy: Entropy, pepper: bytes, key_id: str, rotation: KeyRotation) -> KeyMade:
    """Make another secret for a key.

    Its id, its limits and its work stay; the former secret works for the grace.
    """
    if keys.PUBLIC_ID.fullmatch(key_id):
        made = keys.remake(key_id, entropy.token_bytes(keys.RANDOM_BYTES))
        store = trail.noting("key.rotate", "key", key_id)
        await _claim_pepper(store, pepper)
        if await store.rotate_key(key_id, keys.keyed_hash(pepper, made.text.reveal()), rotation.grace_ms):
            return KeyMade(made.public_id, made.text.reveal())
    raise ApiProblem(
        404, "key_not_found", "There is no key of this id that still works. `tidegate keys list` shows them."
    )


async def change_key(trail: AuditTrail, key_id: str, change: KeyChange) -> bool:
    """Change what a key may do.

    The change holds everywhere within seconds, also for items of its batches that were not sent
    yet.
    """
    check_change(change)
    store = trail.noting("key.change", "key", key_id)
    after_ms = change.expires_after_ms
    rights = KeyRights(
        scopes=None if change.scopes is None else SCOPES.text(change.scopes),
        models=None if change.models is None else keys.models_text(change.models),
        resources=None if change.resources is None else keys.models_text(change.resources),
        limits=None if change.limits is None else job_limits(change.limits),
        expires_at=None if after_ms is None else await store.now_ms() + after_ms,
        parallel_max=change.parallel_max,
        addresses=None if change.addresses is None else keys.addresses_text(change.addresses),
        environments=None if change.environments is None else keys.models_text(change.environments),
    )
    return bool(keys.PUBLIC_ID.fullmatch(key_id)) and await store.change_key(key_id, rights)


async def revoke_key(trail: AuditTrail, key_id: str) -> bool:
    """Revoke a key; it stops working within seconds.

    Return False if there is no such key, or it is revoked already.
    """
    store = trail.noting("key.revoke", "key", key_id)
    return bool(keys.PUBLIC_ID.fullmatch(key_id)) and await store.revoke_key(key_id)


async def delete_keys(trail: AuditTrail, deletion: KeyDeletion) -> KeysDeleted:
    """Delete a key, or all keys of an organization.

    The items of their batches that were not sent yet fail within seconds.
    """
    if (deletion.id is None) == (deletion.org is None):
        raise _bad("id", "Name the key to delete, or the organization whose keys are to go; not both.")
    if deletion.org is not None:
        if not _is_name(deletion.org):
            raise _bad("org", f"`org` needs 1 to {NAME_CHARS_MAX} printable characters, without spaces around them.")
        return KeysDeleted(await trail.noting("org.delete_keys", "org", deletion.org).delete_keys_of(deletion.org))
    key_id = str(deletion.id)
    store = trail.noting("key.delete", "key", key_id)
    found = bool(keys.PUBLIC_ID.fullmatch(key_id)) and await store.delete_key(key_id)
    return KeysDeleted([key_id] if found else [])


class KeyShown(msgspec.Struct, frozen=True):
    """A key without its secret. Times are unix seconds."""

    id: str
    object: str
    org: str
    team: str | None
    user: str | None
    label: str
    scopes: list[str]
    models: list[str]
    resources: list[str]
    addresses: list[str]
    environments: list[str]
    limits: list[Limit]
    parallel_max: int
    created_at: int
    expires_at: int | None
    revoked_at: int | None
    last_used_at: int | None


class KeyRoutes:
    def __init__(self, context: WebContext) -> None:
        self._context = context
        self._store = context.store
        self._body_bytes_max = context.settings.limits.body_bytes_max

    def routes(self) -> list[Guarded]:
        return [
            Guarded("GET", "/admin/v1/keys", READ, self.list),
            Guarded("POST", "/admin/v1/keys", WRITE, self.create_key),
            Guarded("POST", "/admin/v1/keys/{key_id}/change", WRITE, self.change_key),
            Guarded("POST", "/admin/v1/keys/{key_id}/rotate", WRITE, self.rotate_key),
            Guarded("POST", "/admin/v1/keys/{key_id}/revoke", WRITE, self.revoke_key),
            Guarded("POST", "/admin/v1/keys/delete", WRITE, self.delete_keys),
        ]

    async def list(self, request: Request, caller: Caller) -> Response:
        query = request.query_params
        requests.refuse_unknown(query, ("after", "limit", "org"))
        count = requests.limit(query, LIST_COUNT, LIST_COUNT_MAX)
        org, after = requests.one(query, "org"), requests.one(query, "after")
        found = await self._store.key_page(org, after=after, count_max=count + 1)
        if found is None:
            raise requests.unknown_cursor()
        shown = [key_shown(row) for row in found[:count]]
        return json_answer(page_of(shown, [one.id for one in shown], has_more=len(found) > count))

    async def create_key(self, request: Request, caller: Caller) -> Response:
        wanted = await requests.json_body(request, KeyRequest, self._body_bytes_max)
        trail = trail_of(self._context, request, caller)
        return json_answer(await make_key(trail, self._context.entropy, self._context.pepper, wanted))

    async def change_key(self, request: Request, caller: Caller) -> Response:
        change = await requests.json_body(request, KeyChange, self._body_bytes_max)
        key_id = str(request.path_params["key_id"])
        changed = await change_key(trail_of(self._context, request, caller), key_id, change)
        return json_answer(KeyChanged(key_id, changed))

    async def rotate_key(self, request: Request, caller: Caller) -> Response:
        rotation = await requests.json_body(request, KeyRotation, self._body_bytes_max)
        key_id = str(request.path_params["key_id"])
        trail = trail_of(self._context, request, caller)
        made = await rotate_key(trail, self._context.entropy, self._context.pepper, key_id, rotation)
        return json_answer(made)

    async def revoke_key(self, request: Request, caller: Caller) -> Response:
        key_id = str(request.path_params["key_id"])
        return json_answer(KeyRevoked(key_id, await revoke_key(trail_of(self._context, request, caller), key_id)))

    async def delete_keys(self, request: Request, caller: Caller) -> Response:
        deletion = await requests.json_body(request, KeyDeletion, self._body_bytes_max)
        return json_answer(await delete_keys(trail_of(self._context, request, caller), deletion))


def key_shown(row: dict[str, Any]) -> KeyShown:
    """Return a stored key as operators see it."""
    return KeyShown(
        id=row["id"],
        object="key",
        org=row["tenant"],
        team=row["team"],
        user=row["user_name"],
        label=row["label"],
        scopes=sorted(keys.scopes_from(row["scopes"])),
        models=sorted(keys.models_from(row["models"])),
        resources=sorted(keys.models_from(row["resources"])),
        addresses=list(keys.addresses_from(row["addresses"])),
        environments=sorted(keys.models_from(row["environments"])),
        limits=list(limits_from(row["limits"])),
        parallel_max=row["parallel_max"],
        created_at=row["created_at"] // 1000,
        expires_at=_seconds(row["expires_at"]),
        revoked_at=_seconds(row["revoked_at"]),
        last_used_at=_seconds(row["last_used_at"]),
    )


def _seconds(moment_ms: int | None) -> int | None:
    return None if moment_ms is None else moment_ms // 1000


def _is_name(text: str) -> bool:
    """Return whether a text can be a name.

    It must be normalized, so that no two names look the same.
    """
    is_plain = text.isprintable() and text.strip() == text and unicodedata.is_normalized("NFC", text)
    return is_plain and 1 <= len(text) <= NAME_CHARS_MAX


def _bad(param: str, message: str) -> ApiProblem:
    return ApiProblem(400, "invalid_parameter", message, param=param)
