"""Writes result files where the caller wants them: whole or not at all, or straight into a stream.

A stream is stdout, or a path that is no ordinary file: a device, a pipe, /dev/stdout. Such a path
is written to, but never replaced or removed, because it is not ours.
"""

import contextlib
import os
import re
import secrets
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from itertools import accumulate, count, repeat
from pathlib import Path
from typing import IO, TYPE_CHECKING

import msgspec

from tidegate.cli.terminal import terminal
from tidegate.core.errors import SettingsError
from tidegate.core.ids import item_id

if TYPE_CHECKING:
    from tidegate.storage import Parts

_STREAMS = ("/dev/", "/proc/")
# The length of the number at the end of an item's id.
ITEM_NUMBER_CHARS = 6
# The first bytes of a file, enough to tell which batch its results come from.
BEGIN_BYTES = 64
# Result lines that are sorted are kept in memory up to this size.
IN_MEMORY_BYTES = 32 << 20
# Sorted lines that are written at once.
LINES_AT_ONCE = 256
# The beginning of a result line of ours; a custom_id with other characters than these is decoded.
_PLAIN_ID = re.compile(rb'\{"id":"[^"\\]*","custom_id":"([\x20\x21\x23-\x5b\x5d-\x7e]*)"')
# The one place under /dev that holds ordinary files.
_MEMORY = "/dev/shm/"


class _NamedLine(msgspec.Struct):
    custom_id: str | None = None


_id = msgspec.json.Decoder(_NamedLine)


async def content(parts: "Parts", file_id: str | None, end: int, start: int = 0) -> AsyncIterator[bytes]:
    """Yield the bytes of a result file from `start` to `end`; nothing if there is no file."""
    from tidegate.store.file_bytes import file_bytes

    if file_id is not None and end > start:
        async for chunk in file_bytes(parts.store, parts.blobs, file_id, start, end):
            yield chunk


def is_stream(path: Path) -> bool:
    """Return whether this path is a stream instead of an ordinary file."""
    name = str(path.absolute())
    return (name.startswith(_STREAMS) and not name.startswith(_MEMORY)) or (path.exists() and not path.is_file())


def _meant(path: Path) -> Path:
    """Return the file that is meant: for a link, the file that it leads to."""
    return path.resolve()


def remove(path: Path) -> None:
    """Remove a file that an earlier run may have left under this name."""
    if not is_stream(path):
        path.unlink(missing_ok=True)


async def save(chunks: AsyncIterator[bytes], path: Path) -> int:
    """Write a temporary file, make it durable and rename it, so that a reader never sees half a
    file. Return its size."""
    if is_stream(path):
        return await _write_through(chunks, path)
    path = _meant(path)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    size_bytes = 0
    try:
        with temporary.open("xb") as stream:
            async for chunk in chunks:
                stream.write(chunk)
                size_bytes += len(chunk)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
        sync_directory(path.parent)
    except OSError as error:
        raise cannot_be_written(str(path), error) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()
    return size_bytes


def set_aside(path: Path, job_ids: Sequence[str] = ()) -> None:
    """Rename a file that holds anything but results of these batches, and print that, so that no
    foreign file is overwritten."""
    if is_stream(path) or not path.exists() or not path.stat().st_size:
        return
    with path.open("rb") as stream:
        if begins_with(stream.read(BEGIN_BYTES), job_ids):
            return
    kept = next(one for number in count(1) if not (one := path.with_name(f"{path.name}.{number}.old")).exists())
    _meant(path).rename(kept)
    terminal.say(f"{path} held other results than this run's; they are now in {kept}.")


def begins_with(content: bytes, job_ids: Sequence[str]) -> bool:
    """Return whether these bytes begin with a result of one of these batches."""
    return content.startswith(tuple(b'{"id":"' + item_id(one, 0)[:-ITEM_NUMBER_CHARS].encode() for one in job_ids))


def custom_id_of(line: bytes) -> str:
    """Return the custom_id of a result line."""
    found = _PLAIN_ID.match(line)
    return found[1].decode() if found else _id.decode(line).custom_id or ""


async def in_order(chunks: AsyncIterator[bytes], order: dict[str, int]) -> AsyncIterator[bytes]:
    """Yield result lines in the order of their custom_ids in the input; lines whose custom_id is
    not in it come last."""
    ranks: list[int] = []
    starts, rest = [0], b""
    with tempfile.SpooledTemporaryFile(max_size=IN_MEMORY_BYTES) as spool:
        async for chunk in chunks:
            spool.write(chunk)
            block, cut, rest = (rest + chunk).rpartition(b"\n")
            if not cut:
                continue
            lines = block.split(b"\n")
            ranks += map(order.get, map(custom_id_of, lines), repeat(sys.maxsize))
            starts += accumulate((len(line) + 1 for line in lines), initial=starts.pop())
        placed = sorted(range(len(ranks)), key=ranks.__getitem__)
        for first in range(0, len(placed), LINES_AT_ONCE):
            yield b"".join([_cut_out(spool, starts, index) for index in placed[first : first + LINES_AT_ONCE]])


def _cut_out(spool: IO[bytes], starts: Sequence[int], index: int) -> bytes:
    spool.seek(starts[index])
    return spool.read(starts[index + 1] - starts[index])


async def save_nothing(path: Path) -> None:
    """Write an empty file under this name."""

    async def nothing() -> AsyncIterator[bytes]:
        chunks: tuple[bytes, ...] = ()
        for chunk in chunks:
            yield chunk

    await save(nothing(), path)


async def pour(chunks: AsyncIterator[bytes]) -> int:
    """Write chunks to stdout and return how many bytes."""
    return await _copy(chunks, sys.stdout.buffer, "stdout")


async def _write_through(chunks: AsyncIterator[bytes], path: Path) -> int:
    try:
        stream = path.open("wb", buffering=0)
    except OSError as error:
        raise cannot_be_written(str(path), error) from error
    with stream:
        return await _copy(chunks, stream, str(path))


async def _copy(chunks: AsyncIterator[bytes], stream: IO[bytes], name: str) -> int:
    size_bytes = 0
    try:
        async for chunk in chunks:
            rest = memoryview(chunk)
            while rest:
                rest = rest[stream.write(rest) :]
            size_bytes += len(chunk)
        stream.flush()
    except BrokenPipeError:
        # The reader closed the pipe: that is no error, and the end of the command handles it.
        raise
    except OSError as error:
        raise cannot_be_written(name, error) from error
    return size_bytes


def cannot_be_written(name: str, error: OSError) -> SettingsError:
    """Return the error of a place that cannot be written, with what its user can do."""
    why = error.strerror or str(error)
    return SettingsError(
        f"{name} cannot be written: {why}. The results are kept; make room, or choose another place, and run the same command again."
    )


def sync_directory(path: Path) -> None:
    """Make the names in a directory survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
