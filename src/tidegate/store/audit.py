"""Verbs about the audit: what operators changed, noted in the transaction of the change.

A store with a witness notes its writes. The witness looks at the thing before and after; a write that changes nothing of it leaves no
row, so a repeat leaves none either.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from tidegate.store.driver import Tx
from tidegate.store.table import Table, reads, writes

_LIST_START = (1 << 62, "")


class AuditNote(msgspec.Struct, frozen=True):
    """Who does what to which thing. `id` is the row's, so that a repeat is noted once. `address` is where a request came from.

    For each kind there is a statement `look_at_KIND`."""

    id: str
    actor: str
    action: str
    kind: str
    target: str
    address: str | None = None


class StoredChange(msgspec.Struct, frozen=True):
    """One change: who did what to which thing. `before` is None for a thing that was not there, `after` for one that is gone."""

    id: str
    happened_at: int
    actor: str
    action: str
    kind: str
    target: str
    before: Any
    after: Any
    address: str | None


class AuditFilter(msgspec.Struct, frozen=True):
    """What a list of changes is asked for; None is anything."""

    actor: str | None = None
    action: str | None = None
    target: str | None = None


class Audit(Table):
    @writes
    async def prune_audit(self, tx: Tx, keep_ms: int, count_max: int) -> None:
        """Forget changes that are older than this, at most so many."""
        await tx.all("audit_prune", keep_ms=keep_ms, count_max=count_max)

    @reads
    async def list_audit(
        self, tx: Tx, wanted: AuditFilter, *, after: str | None, count_max: int
    ) -> list[StoredChange] | None:
        """Return a page of changes, newest first: those older than `after`; None when that names none."""
        start: Sequence[Any] | None = _LIST_START
        if after is not None:
            start = await tx.one("audit_cursor", id=after)
        if start is None:
            return None
        rows = await tx.all(
            "audit_list",
            happened_at=start[0],
            id=start[1],
            actor=wanted.actor,
            action=wanted.action,
            target=wanted.target,
            count_max=count_max,
        )
        return [
            StoredChange(row[0], row[1], row[2], row[3], row[4], row[5], _decoded(row[6]), _decoded(row[7]), row[8])
            for row in rows
        ]

    @writes
    async def note_read(self, tx: Tx, note: AuditNote, detail: Any) -> None:
        """Note that something confidential was read; the same note again is fine."""
        await _put_note(tx, note, None, detail)


class AuditWitness:
    """Looks at a thing before and after a write, and notes how they differ."""

    def __init__(self, note: AuditNote) -> None:
        self._note = note

    async def look(self, tx: Tx) -> Any:
        rows = await tx.dicts(f"look_at_{self._note.kind}", target=self._note.target)
        if self._note.kind == "org":
            return {"keys": [row["id"] for row in rows]}
        return rows[0] if rows else None

    async def note(self, tx: Tx, before: Any, after: Any) -> None:
        if before == after:
            return
        if before is not None and after is not None:
            changed = [name for name in after if after[name] != before[name]]
            before, after = ({name: one[name] for name in changed} for one in (before, after))
        await _put_note(tx, self._note, before, after)


async def _put_note(tx: Tx, note: AuditNote, before: Any, after: Any) -> None:
    await tx.all(
        "audit_put",
        id=note.id,
        actor=note.actor,
        action=note.action,
        kind=note.kind,
        target=note.target,
        before=_encoded(before),
        after=_encoded(after),
        address=note.address,
    )


def _encoded(seen: Any) -> str | None:
    return None if seen is None else msgspec.json.encode(seen).decode()


def _decoded(text: str | None) -> Any:
    return None if text is None else msgspec.json.decode(text)
