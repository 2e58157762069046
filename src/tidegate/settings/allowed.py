"""The variables and folders that deployments added at run time may read: those in the settings.

A caller who may add a deployment chooses where its calls go. Without this rule the caller could
send another server's key, or any file of this process, there. This module reads no file and no
variable; it says which may be read.
"""

import os
from collections.abc import Sequence
from pathlib import Path

from tidegate.core.errors import SettingsError
from tidegate.settings import secrets

OWN_PREFIX = "TIDEGATE_"


class Allowed:
    """The variables and folders that may be read.

    A name in `env_names` may end with `*` for any rest. Our own variables need their whole name.
    """

    def __init__(self, env_names: Sequence[str], folders: Sequence[str]) -> None:
        self._env_names = env_names
        self._folders = [Path(folder).expanduser().absolute() for folder in folders]

    def check_reference(self, reference: str) -> None:
        """Refuse a reference that is not allowed.

        Links are not followed, because the process that reads it may be on another machine.
        """
        name = secrets.variable_of(reference)
        if name is not None:
            self._check_variable(name)
        path = secrets.file_of(reference)
        if path is not None:
            self.check_path(path)

    def check_path(self, path: Path) -> None:
        """Refuse a path whose name leads out of the folders; links are not followed."""
        self._require_within(path, Path(os.path.normpath(path.absolute())), self._folders)

    def readable_reference(self, reference: str) -> str:
        """Return the reference to read: for a file, one to the real path behind its links."""
        self.check_reference(reference)
        path = secrets.file_of(reference)
        return reference if path is None else f"file:{self.readable_path(path)}"

    def readable_path(self, path: Path) -> Path:
        """Return the real path behind a file's links; refuse one outside of the allowed folders."""
        self.check_path(path)
        real = Path(os.path.realpath(path))
        self._require_within(path, real, [Path(os.path.realpath(folder)) for folder in self._folders])
        if real.exists() and not real.is_file():
            raise SettingsError(f"names {path}, which is not a plain file")
        return real

    def _check_variable(self, name: str) -> None:
        for allowed in self._env_names:
            is_prefix = allowed.endswith("*") and not name.startswith(OWN_PREFIX)
            if name == allowed or (is_prefix and name.startswith(allowed[:-1])):
                return
        raise SettingsError(
            f"names the environment variable {name}, which deployments added at run time may not read: "
            "list it in added.env_names of every process"
        )

    @staticmethod
    def _require_within(path: Path, place: Path, folders: Sequence[Path]) -> None:
        if not any(place.is_relative_to(folder) for folder in folders):
            raise SettingsError(
                f"names the file {path}, which lies outside of the folders that deployments added at run time may read: "
                "list its folder in added.folders of every process"
            )
