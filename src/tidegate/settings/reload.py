"""The file that settings came from, read again when it was changed: what may change without a restart, and what may not."""

from collections.abc import Callable
from pathlib import Path

import msgspec

from tidegate.settings.groups import Settings
from tidegate.settings.renewal import file_stamp

# Everything else is built into a process when it starts.
RELOADED = ("models", "resources", "tenants", "tiers", "budgets")


class SettingsFile:
    """`read` reads the settings as the command that started this process did."""

    def __init__(self, path: Path, read: Callable[[], Settings]) -> None:
        self._path = path
        self._read = read
        self._used = self._seen = file_stamp(path)

    def news(self) -> Settings | None:
        """Return the settings if the file was changed and stayed the same since the last look: an editor may be writing it.

        Settings that cannot be used raise SettingsError at every look: a disk may come back, or a file that they name may appear."""
        stamp = file_stamp(self._path)
        is_still = stamp == self._seen
        self._seen = stamp
        if stamp is None or stamp == self._used or not is_still:
            return None
        found = self._read()
        self._used = stamp
        return found


def reloaded(used: Settings, found: Settings) -> tuple[Settings, list[str]]:
    """Return the settings in use with what may change while a process runs, and the groups that wait for the next start."""
    waiting = [
        name for name in found.__struct_fields__ if name not in RELOADED and getattr(found, name) != getattr(used, name)
    ]
    return msgspec.structs.replace(used, **{name: getattr(found, name) for name in RELOADED}), waiting
