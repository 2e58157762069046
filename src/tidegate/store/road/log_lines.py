"""Takes the finished lines of a log into a job's file: outcome rows, extents and the log's place, only from what was new.

It relies on the job's row being locked by the caller, and knows nothing of counters, tokens or states.
"""

from collections.abc import Callable, Iterator
from operator import itemgetter

import msgspec

from tidegate.core.errors import LostRace
from tidegate.core.nouns import Finished, Placed, Usage
from tidegate.store.database.driver import Tx


class AddedLines(msgspec.Struct, frozen=True):
    """What one log's part of a flush added to one file: the entries that were new, their bytes and usage."""

    entries: list[Finished]
    size_bytes: int
    usage: Usage


class ResultFile(msgspec.Struct, frozen=True):
    """A file of a job's results, which ends after so many bytes."""

    job_id: str
    file_id: str
    size_bytes: int


def end_of(placed: Placed) -> int:
    return placed.at + placed.size_bytes


class Logs:
    """The logs that one transaction takes lines from. Their rows are written last, so it never waits for a job while it holds a log."""

    def __init__(self, tx: Tx) -> None:
        self._tx = tx
        self._recorded_to: dict[str, int] = {}
        self._uses: dict[str, int] = {}
        self._runs: list[tuple[str, int, int, str, int]] = []
        self._needed: set[str] = set()

    async def recorded_to(self, blob_id: str) -> int:
        """How far a log was recorded by transactions before this one. It is recorded front to back, so what ends there or earlier was
        committed before."""
        row = await self._tx.one("blob_recorded_to", id=blob_id)
        return 0 if row is None else int(row[0])

    def look_through(self, placed: Placed, *, needed: bool) -> None:
        """Everything up to the end of this range is dealt with."""
        self._recorded_to[placed.blob_id] = max(end_of(placed), self._recorded_to.get(placed.blob_id, 0))
        if needed:
            self._needed.add(placed.blob_id)

    async def add_lines(
        self, file: ResultFile, entries: list[Finished], placed: Placed | None, allowed: Callable[[Finished], bool]
    ) -> AddedLines:
        """Insert the outcomes of one log's lines and take the bytes of the new ones into the file."""
        lines = list(_wanted(entries, placed, allowed)) if placed is not None else []
        if not lines or placed is None:
            return AddedLines([], 0, Usage())
        rows, at = [], file.size_bytes
        for entry, _ in lines:
            rows.append((file.job_id, entry.number, entry.outcome.value, at, entry.size_bytes, entry.crc32))
            at += entry.size_bytes
        new = frozenset(row[0] for row in await self._tx.many_returning("outcome_put", rows))
        added = [line for line in lines if line[0].number in new]
        if len(added) < len(lines):
            await self._close_gaps(file, rows, new)
        at = file.size_bytes
        for blob_at, size_bytes in _runs(added):
            self._runs.append((file.file_id, at, size_bytes, placed.blob_id, blob_at))
            at += size_bytes
        self.look_through(placed, needed=bool(added))
        usage = Usage.total(entry.usage for entry, _ in added)
        return AddedLines([entry for entry, _ in added], at - file.size_bytes, usage)

    async def _close_gaps(
        self, file: ResultFile, rows: list[tuple[str, int, str, int, int, int | None]], new: frozenset[int]
    ) -> None:
        """Move the lines that stand behind some that were not new to their earlier place in the file."""
        moved, at = [], file.size_bytes
        for _, number, _, thought_at, size_bytes, _ in rows:
            if number in new:
                if thought_at != at:
                    moved.append((at, file.job_id, number))
                at += size_bytes
        if moved:
            await self._tx.many("outcome_move", moved)

    async def settle_runs(self) -> None:
        """Write the extents of all files, many in one statement: a run that goes on where the file's last extent ends makes that longer,
        the others are extents of their own. Only a file's first run can: neighbours were joined before."""
        runs, self._runs = self._runs, []
        if not runs:
            return
        firsts = list({run[0]: run for run in reversed(runs)}.values())
        places = [(size_bytes, file_id, at, blob_id, blob_at) for file_id, at, size_bytes, blob_id, blob_at in firsts]
        grown = {row[0] for row in await self._tx.many_returning("extent_grow", sorted(places, key=itemgetter(1)))}
        put = [run for run in runs if run[0] not in grown or run not in firsts]
        if put:
            await self._tx.many("extent_put", put)
        for _, _, _, blob_id, _ in put:
            self._uses[blob_id] = self._uses.get(blob_id, 0) + 1

    async def write_logs(self) -> dict[str, str]:
        """Write the logs' rows. Says whose logs they are."""
        owners = {}
        for blob_id, recorded_to in sorted(self._recorded_to.items()):
            uses = self._uses.get(blob_id, 0)
            found = await self._tx.one("blob_extend", id=blob_id, uses=uses, recorded_to=recorded_to)
            if found is None and blob_id in self._needed:
                raise LostRace(f"{blob_id} was condemned before its lines were recorded")
            if found is not None and found[0] is not None:
                owners[blob_id] = str(found[0])
        return owners


def _wanted(
    entries: list[Finished], placed: Placed, allowed: Callable[[Finished], bool]
) -> Iterator[tuple[Finished, int]]:
    """The allowed lines and where each lies in the log. Of an item that comes twice, the first."""
    seen: set[int] = set()
    at = placed.at
    for entry in entries:
        if entry.number not in seen and allowed(entry):
            seen.add(entry.number)
            yield entry, at
        at += entry.size_bytes


def _runs(added: list[tuple[Finished, int]]) -> Iterator[tuple[int, int]]:
    """The byte ranges of the log that hold these lines, neighbours joined."""
    start, size_bytes = 0, 0
    for entry, at in added:
        if size_bytes and at != start + size_bytes:
            yield start, size_bytes
            size_bytes = 0
        if not size_bytes:
            start = at
        size_bytes += entry.size_bytes
    if size_bytes:
        yield start, size_bytes
