"""How a command on this machine finds and convinces the process that serves a data directory: a private file in it.

Who can read the file owns the data anyway, so its token opens the API for any tenant, but only from this machine.
"""

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

import msgspec

from tidegate.core.deployments import Secret

NAME = "control.json"
_FILE_BYTES_MAX = 4_096


class Control(msgspec.Struct, frozen=True):
    """Where the server is, what it takes for its operator, and which process it is."""

    url: str
    token: str
    pid: int

    def __repr__(self) -> str:
        return f"Control(url={self.url!r}, token=***, pid={self.pid})"


@contextlib.contextmanager
def control_file(data_dir: Path, url: str, token: Secret) -> Iterator[None]:
    """Leave word for commands while this process serves; readable by this user alone."""
    path = data_dir / NAME
    partial = data_dir / f".{NAME}.{secrets.token_hex(8)}"
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as stream:
        stream.write(msgspec.json.encode(Control(url, token.reveal(), os.getpid())))
    partial.replace(path)
    try:
        yield
    finally:
        found = _read(data_dir)
        if found is not None and found.token == token.reveal():
            path.unlink(missing_ok=True)


def running_control(data_dir: Path) -> Control | None:
    """The process that serves this data directory; None when none does."""
    control = _read(data_dir)
    if control is None:
        return None
    try:
        os.kill(control.pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        pass
    return control


def _read(data_dir: Path) -> Control | None:
    try:
        with (data_dir / NAME).open("rb") as stream:
            return msgspec.json.decode(stream.read(_FILE_BYTES_MAX), type=Control)
    except (OSError, msgspec.DecodeError):
        return None
