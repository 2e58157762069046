"""The pepper that API keys are hashed with: the operator's secret, or one that is made once and
kept in the data directory.
"""

import contextlib
import hmac
import os
from hashlib import sha256
from pathlib import Path

from tidegate.core.errors import SettingsError
from tidegate.settings import Settings
from tidegate.store.store import Store

NAME = "pepper"
PEPPER_BYTES = 32
_FILE_BYTES_MAX = 4_096
OTHER_PEPPER = (
    "The API keys of this store are hashed with another pepper, so none of them would work here. Set auth.pepper as the other "
    f"processes have it, or use their data directory or a copy of its file `{NAME}`. If the pepper is lost, delete the keys with "
    "`tidegate keys delete` and make new ones."
)


def pepper_of(settings: Settings) -> bytes:
    """Return the pepper of these settings; make one if there is none.

    Two processes that make one at once get the same.
    """
    if settings.auth.pepper is not None:
        return settings.auth.pepper.reveal().encode()
    path = settings.data_dir / NAME
    try:
        if not path.exists():
            _make(path)
        with path.open("rb") as stream:
            pepper = stream.read(_FILE_BYTES_MAX).strip()
    except OSError as error:
        raise SettingsError(
            f"the file {path}, which API keys are hashed with, cannot be used ({error.strerror or error}). "
            "Give this user the rights on it, or set auth.pepper."
        ) from error
    if len(pepper) < PEPPER_BYTES:
        raise SettingsError(f"the file {path} is too short to hash API keys with. Restore it from a backup.")
    return pepper


async def agreed_pepper(settings: Settings, store: Store) -> bytes:
    """Return the pepper; raise an error if the keys of this store are hashed with another one and
    would all be rejected.
    """
    pepper = pepper_of(settings)
    await claim_pepper(store, pepper)
    return pepper


async def claim_pepper(store: Store, pepper: bytes) -> None:
    """Note that keys are hashed with this pepper; raise an error if there are keys of another one.

    While there are no keys, API processes with different peppers may run. So a process claims its
    own again when it makes the first key.
    """
    if not await store.claim_pepper(_fingerprint(pepper)):
        raise SettingsError(OTHER_PEPPER)


async def require_pepper(store: Store, pepper: bytes) -> None:
    """Raise an error if there are keys and they are hashed with another pepper."""
    noted = await store.pepper_fingerprint()
    if noted is not None and not hmac.compare_digest(noted, _fingerprint(pepper)) and await store.list_keys(1):
        raise SettingsError(OTHER_PEPPER)


async def can_check_keys(settings: Settings, store: Store) -> bool | None:
    """Return whether an API process with these settings could check the keys of this store; None if
    it has no pepper yet. No pepper is made or claimed.
    """
    noted = await store.pepper_fingerprint()
    if noted is None or not await store.list_keys(1):
        return True
    if settings.auth.pepper is None and not (settings.data_dir / NAME).exists():
        return None
    return hmac.compare_digest(noted, _fingerprint(pepper_of(settings)))


def _fingerprint(pepper: bytes) -> str:
    return hmac.new(pepper, b"the fingerprint of a pepper", sha256).hexdigest()


def _make(path: Path) -> None:
    """Make a pepper file, complete or not at all.

    If two processes make one at once, the first file stays.
    """
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    partial = path.with_name(f".{NAME}.{os.urandom(8).hex()}")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(os.urandom(PEPPER_BYTES).hex().encode() + b"\n")
            stream.flush()
            os.fsync(stream.fileno())
        with contextlib.suppress(FileExistsError):
            os.link(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
