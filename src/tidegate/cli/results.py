"""Puts result files where the caller wants them: whole or not at all, or straight to stdout."""

import contextlib
import os
import secrets
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING

from tidegate.core.errors import SettingsError

if TYPE_CHECKING:
    from tidegate.service import Parts


async def content(parts: "Parts", file_id: str | None, end: int, start: int = 0) -> AsyncIterator[bytes]:
    """The bytes of a result file from one place up to another; without a file there are none."""
    from tidegate.web.content import pieces

    if file_id is not None and end > start:
        async for piece in pieces(parts.store, parts.blobs, file_id, start, end):
            yield piece


async def save(pieces: AsyncIterator[bytes], path: Path) -> int:
    """Write beside the target, make it durable, then take its name: a reader never sees half a file. Says its size."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    size_bytes = 0
    try:
        with temporary.open("xb") as stream:
            async for piece in pieces:
                stream.write(piece)
                size_bytes += len(piece)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
        _sync_directory(path.parent)
    except OSError as error:
        raise SettingsError(
            f"{path} cannot be written: {error.strerror or error}. The results are kept; make room and run the same command again."
        ) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()
    return size_bytes


async def pour(pieces: AsyncIterator[bytes]) -> int:
    """Write to stdout."""
    size_bytes = 0
    async for piece in pieces:
        sys.stdout.buffer.write(piece)
        size_bytes += len(piece)
    sys.stdout.buffer.flush()
    return size_bytes


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
