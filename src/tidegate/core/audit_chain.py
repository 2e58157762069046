"""The chain of the audit: each entry carries the hash of the one before it, so that a later change
of an entry shows.

An entry's hash is SHA-256 over a JSON array of the hash before it and all fields of the entry. The
last number and hash, and those of the last entry that retention removed, are kept beside the
entries: without them a missing end or beginning would not show.
"""

import hashlib
from collections.abc import Sequence

import msgspec

START_HASH = ""
FINDINGS_MAX = 100


class AuditEntry(msgspec.Struct, frozen=True):
    """One entry as it is stored.

    `before` and `after` are JSON texts. An entry of an earlier version has no number until it is
    chained.
    """

    id: str
    happened_at: int
    actor: str
    action: str
    kind: str
    target: str
    before: str | None
    after: str | None
    address: str | None
    number: int | None = None
    previous_hash: str | None = None
    hash: str | None = None


class ChainEnds(msgspec.Struct, frozen=True):
    """The last entry of the chain, and the last one that retention removed."""

    number: int = 0
    hash: str = START_HASH
    pruned_number: int = 0
    pruned_hash: str = START_HASH


def chained(entry: AuditEntry, number: int, previous_hash: str) -> AuditEntry:
    """Return the entry as the next one of a chain."""
    placed = msgspec.structs.replace(entry, number=number, previous_hash=previous_hash)
    return msgspec.structs.replace(placed, hash=hash_of(placed))


def hash_of(entry: AuditEntry) -> str:
    """Return the hash that an entry with this content has at its place."""
    content = [
        entry.previous_hash,
        entry.number,
        entry.id,
        entry.happened_at,
        entry.actor,
        entry.action,
        entry.kind,
        entry.target,
        entry.before,
        entry.after,
        entry.address,
    ]
    return hashlib.sha256(msgspec.json.encode(content)).hexdigest()


class ChainFinding(msgspec.Struct, frozen=True):
    """A fault at one place of the chain: entries `number` to `last_number`; `id` names one that is
    still there.
    """

    kind: str
    number: int
    last_number: int
    id: str | None
    text: str


class ChainCheck:
    """The check of a chain, page by page, oldest entry first.

    It collects the faults.

    Each page comes with the chain's ends of the same moment, so entries may be added and pruned
    meanwhile.
    """

    def __init__(self, expected: tuple[int, str] | None = None) -> None:
        """Begin a check; `expected` is the number and hash of an entry, noted somewhere else."""
        self._expected = expected
        self._last: AuditEntry | None = None
        self._number = 0
        self._hash = START_HASH
        self.first_number: int | None = None
        self.entry_count = 0
        self.finding_count = 0
        self.findings: list[ChainFinding] = []

    @property
    def number(self) -> int:
        """Return the number of the last entry that was looked at, or that retention removed."""
        return self._number

    @property
    def hash(self) -> str:
        return self._hash

    def look(self, ends: ChainEnds, entries: Sequence[AuditEntry]) -> None:
        """Check the next entries; an empty page is the end of the chain."""
        if ends.pruned_number > self._number:
            self._last, self._number, self._hash = None, ends.pruned_number, ends.pruned_hash
        for entry in entries:
            self._look_at(entry)
        if not entries:
            self._finish(ends)

    def _look_at(self, entry: AuditEntry) -> None:
        number = entry.number or 0
        if number > self._number + 1:
            self._find_removed(self._number + 1, number - 1)
        elif entry.previous_hash != self._hash:
            self._find_broken_link(entry)
        if hash_of(entry) != entry.hash:
            self._find("altered", number, number, entry.id, f"entry {number} ({entry.id}) was altered")
        if self._expected is not None and self._expected[0] == number and self._expected[1] != entry.hash:
            text = f"entry {number} ({entry.id}) is not the one whose hash was noted"
            self._find("replaced", number, number, entry.id, text)
        if self.first_number is None:
            self.first_number = number
        self.entry_count += 1
        self._last, self._number, self._hash = entry, number, entry.hash or ""

    def _find_broken_link(self, entry: AuditEntry) -> None:
        if self._last is None:
            text = f"entry {entry.number} ({entry.id}) does not follow the last entry that retention removed"
            self._find("replaced", entry.number or 0, entry.number or 0, entry.id, text)
            return
        text = f"entry {self._number} ({self._last.id}) was replaced: entry {entry.number} follows another one"
        self._find("replaced", self._number, self._number, self._last.id, text)

    def _finish(self, ends: ChainEnds) -> None:
        if self._number < ends.number:
            self._find_removed(self._number + 1, ends.number)
        elif (self._number, self._hash) != (ends.number, ends.hash):
            name = f" ({self._last.id})" if self._last is not None else ""
            text = f"entry {self._number}{name} is not the one that the chain ended with"
            self._find("replaced", self._number, self._number, self._last.id if self._last is not None else None, text)
        if self._expected is not None and self._expected[0] > ends.number:
            self._find_removed(ends.number + 1, self._expected[0])

    def _find_removed(self, first: int, last: int) -> None:
        what = f"entry {first} was" if first == last else f"entries {first} to {last} were"
        self._find("removed", first, last, None, f"{what} removed")

    def _find(self, kind: str, number: int, last_number: int, entry_id: str | None, text: str) -> None:
        self.finding_count += 1
        if len(self.findings) < FINDINGS_MAX:
            self.findings.append(ChainFinding(kind, number, last_number, entry_id, text))
