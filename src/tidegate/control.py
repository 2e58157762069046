"""The private file and the socket by which commands on this machine find the server of
a data directory.

Commands talk through the socket, so the server's listen address does not matter. A user who can
read the file or open the socket owns the data anyway, so the file's token may act for any tenant,
but only from this machine.
"""

import contextlib
import os
import secrets
import socket
import stat
import struct
from collections.abc import Iterator
from pathlib import Path

import msgspec

from tidegate.core.deployments import Secret
from tidegate.core.errors import SettingsError

NAME = "control.json"
SOCKET_NAME = "control.sock"
_FILE_BYTES_MAX = 4_096
# Systems allow 104 to 108 bytes, including a terminating zero.
_ADDRESS_BYTES_MAX = 100
_DESCRIPTORS = Path("/proc/self/fd")
_CONNECT_S = 2.0
_BACKLOG_COUNT = 16
# The kernel's `struct ucred`: process, user and group.
_CREDENTIALS = struct.Struct("=iii")


class Control(msgspec.Struct, frozen=True):
    """The server's address, its operator token, and its process id."""

    url: str
    token: str
    pid: int

    def __repr__(self) -> str:
        return f"Control(url={self.url!r}, token=***, pid={self.pid})"


@contextlib.contextmanager
def control_file(data_dir: Path, url: str, token: Secret) -> Iterator[None]:
    """Keep a control file for commands while this process serves. Only this user can read it."""
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


@contextlib.contextmanager
def control_socket(data_dir: Path) -> Iterator[socket.socket]:
    """Listen for commands in the data directory, for this user alone. A later process replaces the
    socket of an earlier one.

    Raise OSError if the file system has no sockets."""
    name = f".{SOCKET_NAME}.{secrets.token_hex(8)}"
    partial, path = data_dir / name, data_dir / SOCKET_NAME
    with _address(data_dir, name) as address, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        # The address stays valid as long as the socket: the event loop reads it again, and a closed
        # descriptor could belong to another file by then.
        try:
            listener.bind(address)
            partial.chmod(0o600)
            listener.listen(_BACKLOG_COUNT)
            own = partial.stat()
            # Renamed only now, so that a process that finds the socket can use it.
            partial.replace(path)
        except OSError:
            partial.unlink(missing_ok=True)
            raise
        try:
            yield listener
        finally:
            with contextlib.suppress(OSError):
                if os.path.samestat(path.lstat(), own):
                    path.unlink()


def running_control(data_dir: Path) -> Control | None:
    """Return the control data of the process that serves this data directory, or None."""
    control = _read(data_dir)
    return control if control is not None and _is_answered(data_dir) else None


@contextlib.contextmanager
def socket_address(data_dir: Path) -> Iterator[str]:
    """Yield the address at which commands reach the server. Raise SettingsError if another user put
    the socket there."""
    found, owner = (data_dir / SOCKET_NAME).lstat(), data_dir.stat().st_uid
    if not stat.S_ISSOCK(found.st_mode) or found.st_uid not in (owner, os.geteuid()):
        raise SettingsError(f"{data_dir / SOCKET_NAME} was not put there by the owner of the directory. Remove it.")
    with _address(data_dir, SOCKET_NAME) as address:
        yield address


def is_peer_owner(peer: socket.socket) -> bool:
    """Return whether the other end runs as this user or as root; True if the system cannot say,
    because the socket's mode protects it."""
    if not hasattr(socket, "SO_PEERCRED"):
        return True
    _, user_id, _ = _CREDENTIALS.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return user_id in (0, os.geteuid())


@contextlib.contextmanager
def _address(data_dir: Path, name: str) -> Iterator[str]:
    """Yield a path of a socket in the directory that is short enough for the system; a long one
    goes through an open descriptor."""
    path = str(data_dir / name)
    if len(os.fsencode(path)) <= _ADDRESS_BYTES_MAX or not _DESCRIPTORS.is_dir():
        yield path
        return
    directory = os.open(data_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield str(_DESCRIPTORS / str(directory) / name)
    finally:
        os.close(directory)


def _is_answered(data_dir: Path) -> bool:
    """Return whether a process listens at the socket. The socket of a process that died still
    exists, but refuses connections."""
    try:
        with _address(data_dir, SOCKET_NAME) as address, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(_CONNECT_S)
            probe.connect(address)
    except (FileNotFoundError, NotADirectoryError, ConnectionRefusedError):
        return False
    except OSError:
        # The socket exists but is too busy, or belongs to another user: the next
        # request reports that.
        return True
    return True


def _read(data_dir: Path) -> Control | None:
    try:
        with (data_dir / NAME).open("rb") as stream:
            return msgspec.json.decode(stream.read(_FILE_BYTES_MAX), type=Control)
    except (OSError, msgspec.DecodeError):
        return None
