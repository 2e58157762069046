"""A consistent copy of an embedded store, made while another process writes to it."""

from pathlib import Path

import apsw

from tidegate.core.errors import StoreRefused


def copy_database(source: Path, target: Path) -> None:
    """Copy a whole database to a new file and check the copy."""
    try:
        reading = apsw.Connection(str(source), apsw.SQLITE_OPEN_READONLY)
        writing = apsw.Connection(str(target), apsw.SQLITE_OPEN_READWRITE | apsw.SQLITE_OPEN_CREATE)
        try:
            # All pages in one step: a copy in several begins again whenever the writer commits in
            # between.
            with writing.backup("main", reading, "main") as copying:
                copying.step(-1)
            # One plain file, without a log beside it.
            writing.pragma("journal_mode", "delete")
            found = writing.pragma("integrity_check")
        finally:
            writing.close()
            reading.close()
    except apsw.Error as error:
        raise StoreRefused(f"cannot copy the store at {source} to {target}: {error}") from error
    if found != "ok":
        raise StoreRefused(f"the copy of the store at {source} is damaged: {found}. Check the disk of both.")
