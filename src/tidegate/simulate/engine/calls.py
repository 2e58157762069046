"""The calls log: the witness of all calls to the engine, on disk before their answers leave.

One append writes the lines of one turn of the event loop, and several processes share the file. If
the log cannot be written, the caller must not answer, because a witness with gaps proves nothing.
"""

import os

import msgspec


class CallLine(msgspec.Struct, omit_defaults=True):
    """One call's line in the log.

    - `custom` is the start of the body's SHA-256, and `n` is unique within a run.
    - `tokens` is what its whole answer is billed for.
    - `beside` is the number of other calls of the process that were under way when it came.
    """

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
        """Write the added lines; raise OSError if that fails."""
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
