"""Verbs about the audit: the changes of operators, chained as core/audit_chain.py describes.

Each is noted in the transaction of the change. A store with a witness notes its writes: the witness
looks at the object before and after. A write that changes nothing leaves no row, so a repeat leaves
none. Entries are written last in a transaction, because they lock the chain until it commits.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from tidegate.core.audit_chain import AuditEntry, ChainEnds, chained
from tidegate.store.database.driver import Tx
from tidegate.store.database.table import Table, frees, reads, writes

_LIST_START = (1 << 62, "")


class AuditNote(msgspec.Struct, frozen=True):
    """The actor, the action and the target of a change.

    `id` is that of the row, so that a repeat is noted once. `address` is where the request came
    from. Each kind has a statement `look_at_KIND`.
    """

    id: str
    actor: str
    action: str
    kind: str
    target: str
    address: str | None = None


class StoredChange(msgspec.Struct, frozen=True):
    """One change: its actor, action and target.

    `before` is None if the target was created, `after` if it was removed. `number` and `hash` are
    its place in the chain; None for an entry of an earlier version that is not chained yet.
    """

    id: str
    happened_at: int
    actor: str
    action: str
    kind: str
    target: str
    before: Any
    after: Any
    address: str | None
    number: int | None
    hash: str | None


class NotedChange(msgspec.Struct, frozen=True):
    """A change that will be written to the audit."""

    note: AuditNote
    before: Any
    after: Any


class AuditFilter(msgspec.Struct, frozen=True):
    """The filter of a list of changes. None matches anything."""

    actor: str | None = None
    action: str | None = None
    target: str | None = None


class Audit(Table):
    @frees
    async def prune_audit(self, tx: Tx, keep_ms: int, count_max: int) -> None:
        """Forget at most `count_max` changes older than `keep_ms`, from the chain's beginning."""
        if not await _old_entries(tx, keep_ms, 1):
            return
        await _hold_chain(tx)
        old = await _old_entries(tx, keep_ms, count_max)
        if old:
            number, entry_hash = old[-1]
            # The store refuses to delete entries after the beginning of the chain, so that moves
            # first.
            await tx.all("audit_chain_shorten", number=number, hash=entry_hash)
            await tx.all("audit_places_put", number=number)
            await tx.all("audit_prune", number=number)

    @writes
    async def chain_audit(self, tx: Tx, count_max: int) -> int:
        """Chain at most `count_max` entries of programs of an earlier version. Return how many."""
        if not await tx.all("audit_unchained", count_max=1):
            return 0
        ends, _ = await _hold_chain(tx)
        rows = await tx.all("audit_unchained", count_max=count_max)
        number, last_hash = ends.number, ends.hash
        placed = []
        for row in rows:
            entry = chained(AuditEntry(*row), number + 1, last_hash)
            placed.append((entry.number, entry.previous_hash, entry.hash, entry.id))
            number, last_hash = number + 1, entry.hash or ""
        await tx.many("audit_number", placed)
        await tx.all("audit_chain_extend", number=number, hash=last_hash)
        return len(rows)

    @reads
    async def audit_entries(self, tx: Tx, after: int, count_max: int) -> tuple[ChainEnds, list[AuditEntry]]:
        """Return the ends of the chain and its entries after this number, of one moment."""
        row = await tx.one("audit_chain_ends")
        rows = await tx.all("audit_entries", number=after, count_max=count_max)
        return ChainEnds(*row) if row is not None else ChainEnds(), [AuditEntry(*one) for one in rows]

    @reads
    async def unchained_audit_count(self, tx: Tx) -> int:
        """Return how many entries of an earlier version are not chained yet."""
        [(count,)] = await tx.all("audit_unchained_count")
        return int(count)

    @reads
    async def list_audit(
        self, tx: Tx, wanted: AuditFilter, *, after: str | None, count_max: int
    ) -> list[StoredChange] | None:
        """Return a page of changes older than `after`, newest first.

        Return None if `after` is no change.
        """
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
            StoredChange(row[0], row[1], row[2], row[3], row[4], row[5], _decoded(row[6]), _decoded(row[7]), *row[8:])
            for row in rows
        ]

    @writes
    async def note_read(self, tx: Tx, note: AuditNote, detail: Any) -> None:
        """Note that something confidential was read. A repeat of the note is harmless."""
        await put_changes(tx, [NotedChange(note, None, detail)])


class AuditWitness:
    """The observer that compares an object before and after a write, and notes the difference.

    The note goes to the audit, or to a list that is written there later.
    """

    def __init__(self, note: AuditNote, noted: list[NotedChange] | None = None) -> None:
        self._note = note
        self._noted = noted

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
        change = NotedChange(self._note, before, after)
        if self._noted is not None:
            self._noted.append(change)
        else:
            await put_changes(tx, [change])


async def put_changes(tx: Tx, changes: Sequence[NotedChange]) -> None:
    """Add changes to the end of the chain.

    Other processes wait for that until this transaction ends.
    """
    if not changes:
        return
    ends, now_ms = await _hold_chain(tx)
    number, last_hash = ends.number, ends.hash
    for change in changes:
        note = change.note
        entry = AuditEntry(
            id=note.id,
            happened_at=now_ms,
            actor=note.actor,
            action=note.action,
            kind=note.kind,
            target=note.target,
            before=_encoded(change.before),
            after=_encoded(change.after),
            address=note.address,
        )
        entry = chained(entry, number + 1, last_hash)
        if await tx.one("audit_put", **msgspec.structs.asdict(entry)) is not None:
            number, last_hash = number + 1, entry.hash or ""
    await tx.all("audit_chain_extend", number=number, hash=last_hash)


async def _hold_chain(tx: Tx) -> tuple[ChainEnds, int]:
    """Lock the chain until the transaction ends. Return its ends and the time."""
    row = await tx.one("audit_chain_hold")
    assert row is not None
    *ends, now_ms = row
    return ChainEnds(*ends), now_ms


async def _old_entries(tx: Tx, keep_ms: int, count_max: int) -> list[tuple[int, str]]:
    """Return the number and hash of the chain's first entries that are older than `keep_ms`."""
    old = []
    for number, entry_hash, is_old in await tx.all("audit_oldest", keep_ms=keep_ms, count_max=count_max):
        if not is_old:
            break
        old.append((number, entry_hash))
    return old


def _encoded(seen: Any) -> str | None:
    return None if seen is None else msgspec.json.encode(seen).decode()


def _decoded(text: str | None) -> Any:
    return None if text is None else msgspec.json.decode(text)
