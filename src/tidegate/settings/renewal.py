"""Keys and certificates in files, read again, so that a replaced one is used without a restart.

- A file may be replaced in two steps. While it cannot be read, or holds no secret, the secret from
  before stays in use, and the file is read again later.
- Secrets from the environment or the settings stay, because a process cannot see them change.

This module makes no call and knows no store.
"""

import os
from collections.abc import Mapping
from pathlib import Path

from msgspec.structs import replace

from tidegate.core.deployments import Deployment, Secret
from tidegate.core.errors import SettingsError
from tidegate.settings import secrets

# A file's inode, time of writing and size; None if there is no file.
FileStamp = tuple[int, int, int] | None


class Renewal:
    """The secrets and certificates that were asked for since `begin_renewal`.

    `troubles` has the problem of each file that cannot be used, by reference.
    """

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        self._environ: Mapping[str, str] = os.environ if environ is None else environ
        self._last_good: dict[str, Secret] = {}
        self._stamps: dict[Path, FileStamp] = {}
        self.troubles: dict[str, str] = {}

    def begin_renewal(self) -> None:
        """Forget the files. The caller asks again for all that it still needs."""
        self._stamps = {}
        self.troubles = {}

    def has_news(self) -> bool:
        """Return whether a file has changed since it was read, or could not be used."""
        return bool(self.troubles) or any(file_stamp(path) != stamp for path, stamp in self._stamps.items())

    def secret(self, reference: str, before: Secret | None = None) -> Secret:
        """Return the present secret of a reference; `before` is the one at the start, if known."""
        path = secrets.file_of(reference)
        if path is None:
            return secrets.resolve(reference, self._environ)[0]
        self._stamps[path] = file_stamp(path)
        known = self._last_good.get(reference, before)
        try:
            found = secrets.resolve(reference, self._environ)[0]
            if known is not None and not _is_one_word(found.reveal()):
                raise SettingsError(f"names the file {path}, which has spaces or non-ASCII characters in its secret")
        except SettingsError as error:
            if known is None:
                raise
            self.troubles[reference] = str(error)
            return known
        self._last_good[reference] = found
        return found

    def renewed(self, deployment: Deployment) -> Deployment:
        """Return a deployment of the settings with its present secrets and certificates."""
        key, queue = deployment.api_key, deployment.queue
        if key is not None and key.source:
            deployment = replace(deployment, api_key=self.secret(key.source, key))
        if queue is not None and queue.url.source:
            deployment = replace(deployment, queue=replace(queue, url=self.secret(queue.url.source, queue.url)))
        return self.stamped(deployment)

    def stamped(self, deployment: Deployment) -> Deployment:
        """Return a deployment with the stamp of its certificates.

        A new stamp means new connections.
        """
        tls = deployment.tls
        paths = [Path(name) for name in (tls.ca_file, tls.cert_file, tls.key_file) if name]
        if not paths:
            return deployment
        for path in paths:
            self._stamps[path] = file_stamp(path)
        return replace(deployment, tls=replace(tls, stamp=repr([self._stamps[path] for path in paths])))


def _is_one_word(text: str) -> bool:
    return text.isascii() and " " not in text


def file_stamp(path: Path) -> FileStamp:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size
