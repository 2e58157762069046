"""The file of the settings, read again after a change: which settings change without a restart."""

from collections.abc import Callable
from pathlib import Path

import msgspec

from tidegate.settings.groups import Settings
from tidegate.settings.renewal import file_stamp

# All others take effect when a process starts.
RELOADED = ("models", "resources", "tenants", "tiers", "budgets")


class SettingsFile:
    """The settings' file and its last change. `read` loads it as at the start of this process."""

    def __init__(self, path: Path, read: Callable[[], Settings]) -> None:
        self._path = path
        self._read = read
        self._used = self._seen = file_stamp(path)

    def news(self) -> Settings | None:
        """Return the settings if the file was changed; None if not.

        - An editor may still be writing, so the file must not have changed since the last look.
        - Settings that cannot be used raise SettingsError at every look, because the cause may go
          away: a disk may come back, or a file that they name may appear.
        """
        stamp = file_stamp(self._path)
        is_still = stamp == self._seen
        self._seen = stamp
        if stamp is None or stamp == self._used or not is_still:
            return None
        found = self._read()
        self._used = stamp
        return found


def reloaded(used: Settings, found: Settings) -> tuple[Settings, list[str]]:
    """Return the used settings with changes that need no restart, and the groups that need one."""
    waiting = [
        name for name in found.__struct_fields__ if name not in RELOADED and getattr(found, name) != getattr(used, name)
    ]
    return msgspec.structs.replace(used, **{name: getattr(found, name) for name in RELOADED}), waiting
