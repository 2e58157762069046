"""Keys and certificates that lie in files, as the files are now: a key that its owner replaced is used without a restart.

A file that cannot be read, or does not hold a secret, for a moment (it may be replaced in two steps) changes nothing: what it
held before is used on, and it is looked at again. What came from the environment or stands in the settings stays as it is: a process
cannot see those change. This module makes no call and knows no store.
"""

import os
from collections.abc import Mapping
from pathlib import Path

from msgspec.structs import replace

from tidegate.core.deployments import Deployment, Secret
from tidegate.core.errors import SettingsError
from tidegate.settings import secrets

# Which file it is and when it was written; None when there is none.
Stamp = tuple[int, int, int] | None


class Renewal:
    """Remembers what it was asked for since `begin_renewal`. `troubles` says which files are not what they should be, and why."""

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        self._environ: Mapping[str, str] = os.environ if environ is None else environ
        self._held: dict[str, Secret] = {}
        self._stamps: dict[Path, Stamp] = {}
        self.troubles: dict[str, str] = {}

    def begin_renewal(self) -> None:
        """Everything that is still needed is asked for again from here on."""
        self._stamps = {}
        self.troubles = {}

    def has_news(self) -> bool:
        """Whether a file is another than when it was read, or could not be read."""
        return bool(self.troubles) or any(file_stamp(path) != stamp for path, stamp in self._stamps.items())

    def secret(self, reference: str, before: Secret | None = None) -> Secret:
        """What a reference stands for now; `before` is what it was at the start, where that is known."""
        path = secrets.file_of(reference)
        if path is None:
            return secrets.resolve(reference, self._environ)[0]
        self._stamps[path] = file_stamp(path)
        known = self._held.get(reference, before)
        try:
            found = secrets.resolve(reference, self._environ)[0]
            if known is not None and not _is_one_word(found.reveal()):
                raise SettingsError(f"names the file {path}, which has spaces or non-ASCII characters in its secret")
        except SettingsError as error:
            if known is None:
                raise
            self.troubles[reference] = str(error)
            return known
        self._held[reference] = found
        return found

    def renewed(self, deployment: Deployment) -> Deployment:
        """A deployment of the settings, with its secrets and certificates as they are now."""
        key, queue = deployment.api_key, deployment.queue
        if key is not None and key.source:
            deployment = replace(deployment, api_key=self.secret(key.source, key))
        if queue is not None and queue.url.source:
            deployment = replace(deployment, queue=replace(queue, url=self.secret(queue.url.source, queue.url)))
        return self.stamped(deployment)

    def stamped(self, deployment: Deployment) -> Deployment:
        """With another certificate it is called over other connections."""
        tls = deployment.tls
        paths = [Path(name) for name in (tls.ca_file, tls.cert_file, tls.key_file) if name]
        if not paths:
            return deployment
        for path in paths:
            self._stamps[path] = file_stamp(path)
        return replace(deployment, tls=replace(tls, stamp=repr([self._stamps[path] for path in paths])))


def _is_one_word(text: str) -> bool:
    return text.isascii() and " " not in text


def file_stamp(path: Path) -> Stamp:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size
