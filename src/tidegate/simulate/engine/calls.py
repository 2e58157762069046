"""The calls log: the witness of every call that reached the engine, on disk before its answer leaves.

Lines of one turn of the event loop are written together with one append; several processes share a file. A log that cannot
be written is an error for the caller, who must then not answer: a witness with gaps would prove nothing.
"""

import os

import msgspec


class CallLine(msgspec.Struct, omit_defaults=True):
    """One call, as the log holds it. `custom` is the start of the body's SHA-256, `n` is unique within a run; `tokens` are those that its
    whole answer is billed for, `beside` how many other calls its process had under way when it came."""

    at: float
    path: str
    model: str | None
    status: int
    idempotency_key: str | None
    custom: str
    n: int
    fault: str = ""
    tokens: int = 0
    beside: int = 0


class CallsLog:
    """An append-only file of call lines."""

    def __init__(self, path: str, *, fsync: bool) -> None:
        try:
            self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise OSError(
                error.errno, f"the calls log {path} cannot be opened for writing: {error.strerror}"
            ) from error
        self._fsync = fsync
        self._lines: list[bytes] = []
        self._encode = msgspec.json.Encoder().encode

    def add(self, line: CallLine) -> None:
        """Keep a line for the next flush."""
        self._lines.append(self._encode(line))

    def flush(self) -> None:
        """Write what was added; raises OSError when the file does not take it."""
        if not self._lines:
            return
        self._lines.append(b"")
        data = b"\n".join(self._lines)
        self._lines = []
        while data:
            data = data[os.write(self._fd, data) :]
        if self._fsync:
            os.fdatasync(self._fd)

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)
