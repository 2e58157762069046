"""The disk as a power cut leaves it: only what was synced, rebuilt from the journal of the `power` shim.

The rules are the strict ones of POSIX: bytes survive when their file was synced after they were written, a name survives when its
directory was synced after it was made, changed or removed. A file system may keep more; no program may rely on it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

HEADER = struct.Struct("=6Q")
CREATED, WROTE, CUT, SYNCED, DIR_SYNCED, RENAMED, REMOVED, DIR_MADE = b"cwtsSrud"


@dataclass(frozen=True)
class Change:
    """One call that changed or synced something, and when it returned."""

    at_ns: int
    kind: int
    inode: int
    path: Path
    offset: int
    data: bytes


def read_journal(journal: Path) -> Iterator[Change]:
    data, at = journal.read_bytes(), 0
    while at + HEADER.size <= len(data):
        at_ns, inode, offset, kind, path_bytes, data_bytes = HEADER.unpack_from(data, at)
        at += HEADER.size
        path = Path(data[at : at + path_bytes].decode())
        at += path_bytes
        yield Change(at_ns, kind, inode, path, offset, data[at : at + data_bytes])
        at += data_bytes


@dataclass
class _File:
    live: bytearray = field(default_factory=bytearray)
    synced: bytes = b""


@dataclass
class Disk:
    """Everything below `root`, as it is and as it would be after a power cut."""

    root: Path
    files: dict[int, _File] = field(default_factory=dict)
    # Directory -> name -> inode of a file, or None for a directory.
    live: dict[Path, dict[str, int | None]] = field(default_factory=dict)
    durable: dict[Path, dict[str, int | None]] = field(default_factory=dict)

    def apply(self, change: Change) -> None:
        path, names = change.path, self.live.setdefault(change.path.parent, {})
        if change.kind == CREATED:
            self.files[change.inode] = _File()
            names[path.name] = change.inode
        elif change.kind == WROTE:
            live = self.files.setdefault(change.inode, _File()).live
            if len(live) < change.offset:
                live.extend(bytes(change.offset - len(live)))
            live[change.offset : change.offset + len(change.data)] = change.data
        elif change.kind == CUT:
            live = self.files.setdefault(change.inode, _File()).live
            del live[change.offset :]
            live.extend(bytes(change.offset - len(live)))
        elif change.kind == SYNCED:
            file = self.files.setdefault(change.inode, _File())
            file.synced = bytes(file.live)
        elif change.kind == DIR_SYNCED:
            self.durable[path] = dict(self.live.get(path, {}))
        elif change.kind == DIR_MADE:
            names[path.name] = None
        elif change.kind == REMOVED:
            names.pop(path.name, None)
        elif change.kind == RENAMED:
            target = Path(change.data.decode())
            self.live.setdefault(target.parent, {})[target.name] = names.pop(path.name, None)

    def rebuild(self, target: Path) -> None:
        """Write what survives a power cut at this moment below `target`, which takes the place of `root`."""
        self._rebuild(self.root, target)

    def _rebuild(self, directory: Path, target: Path) -> None:
        target.mkdir(parents=True, exist_ok=True)
        for name, inode in self.durable.get(directory, {}).items():
            if inode is None:
                self._rebuild(directory / name, target / name)
            else:
                (target / name).write_bytes(self.files[inode].synced)
