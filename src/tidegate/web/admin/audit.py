"""The audit: every change by an operator is noted, with its actor, in the transaction of the
change.
"""

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tidegate.core import ids
from tidegate.core.errors import ApiProblem
from tidegate.core.nouns import Caller
from tidegate.core.ports import Entropy
from tidegate.store.operators.audit import AuditFilter, AuditNote, StoredChange
from tidegate.store.store import Store
from tidegate.web.context import WebContext
from tidegate.web.http.answers import json_answer, page_of
from tidegate.web.http.auth import CLIENT, CONTROL_HEADER
from tidegate.web.http.routes import Guarded
from tidegate.web.requests import requests

READ = "admin:read or admin:write"
WRITE = "admin:write"
COMMAND = "command"
LIST_COUNT = 20
LIST_COUNT_MAX = 100
TEXT_CHARS_MAX = 512


class AuditTrail:
    """The notes of the changes that one actor makes to the store.

    `address` is where a request came from.
    """

    def __init__(self, store: Store, entropy: Entropy, actor: str, address: str | None = None) -> None:
        self._store = store
        self._entropy = entropy
        self.actor = actor
        self._address = address

    def noting(self, action: str, kind: str, target: str) -> Store:
        """Return the store that notes its writes as this action on this target."""
        return self._store.audited(self._note(action, kind, target))

    async def note_read(self, action: str, kind: str, target: str, detail: Any) -> None:
        """Note that confidential data was read."""
        await self._store.note_read(self._note(action, kind, target), detail)

    def _note(self, action: str, kind: str, target: str) -> AuditNote:
        note_id = ids.make("aud", self._entropy.token_bytes(ids.RANDOM_BYTES))
        return AuditNote(note_id, self.actor, action, kind, target, self._address)


def trail_of(context: WebContext, request: Request, caller: Caller) -> AuditTrail:
    """Return the trail of the caller: of a key by its id, or of the operator on this machine."""
    actor = "operator" if CONTROL_HEADER in request.headers else f"key:{caller.key_id}"
    return AuditTrail(context.store, context.entropy, actor, request.scope[CLIENT] or None)


class ChangeShown(msgspec.Struct, frozen=True):
    """One change.

    `before` and `after` hold only the differences; one of them is null for a thing that was created
    or removed. `address` is where the request for it came from. `number` and `hash` are its place
    in the chain that `tidegate audit verify` checks.
    """

    id: str
    object: str
    created_at: int
    actor: str
    action: str
    kind: str
    target: str
    before: Any
    after: Any
    address: str | None
    number: int | None
    hash: str | None


class AuditRoutes:
    def __init__(self, context: WebContext) -> None:
        self._store = context.store

    def routes(self) -> list[Guarded]:
        return [Guarded("GET", "/admin/v1/audit", READ, self.list)]

    async def list(self, request: Request, caller: Caller) -> Response:
        query = request.query_params
        requests.refuse_unknown(query, ("after", "limit", "actor", "action", "target"))
        count = requests.limit(query, LIST_COUNT, LIST_COUNT_MAX)
        after = requests.after(query, "aud")
        wanted = AuditFilter(*(text(query, name) for name in ("actor", "action", "target")))
        found = await self._store.list_audit(wanted, after=after, count_max=count + 1)
        if found is None:
            raise requests.unknown_cursor()
        shown = [_shown(one) for one in found[:count]]
        return json_answer(page_of(shown, [one.id for one in shown], has_more=len(found) > count))


def text(query: Any, name: str) -> str | None:
    """Return a filter's text; refuse one that cannot be a name."""
    found = requests.one(query, name)
    if found is not None and (not 1 <= len(found) <= TEXT_CHARS_MAX or "\0" in found):
        raise ApiProblem(
            400,
            "invalid_parameter",
            f"`{name}` must have 1 to {TEXT_CHARS_MAX} characters, none of them U+0000.",
            param=name,
        )
    return found


def _shown(one: StoredChange) -> ChangeShown:
    return ChangeShown(
        one.id,
        "audit_event",
        one.happened_at // 1000,
        one.actor,
        one.action,
        one.kind,
        one.target,
        one.before,
        one.after,
        one.address,
        one.number,
        one.hash,
    )
