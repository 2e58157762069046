"""The judge's own reader of files: the bytes of extents, cut into lines, each read as strict JSON.

The reader does not know what a line must contain.
"""

import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from tidegate.core.ports import Blobs
from tidegate.judge.records import RecordRow

LINE_BYTES_MAX = 256 << 20
DIGITS_MAX = 400


class NotJson(ValueError):
    """The bytes are not one strict JSON value. The message has the reason but quotes no bytes."""


class NamedTwice(dict[str, Any]):
    """A JSON object with a key twice. Readers differ in which of the two counts."""


@dataclass(frozen=True, slots=True)
class JsonlLine:
    """One line without its newline; `at` is its place in the file.

    Without a newline it is not whole.
    """

    at: int
    data: bytes
    whole: bool

    @property
    def size_bytes(self) -> int:
        return len(self.data) + self.whole


async def pieces_of(blobs: Blobs, extents: Sequence[RecordRow]) -> AsyncIterator[tuple[int, bytes]]:
    """Yield a file's bytes in the order of its extents, each piece with its place in the file."""
    for extent in extents:
        at = extent["at"]
        async for chunk in blobs.stream(extent["blob_id"], extent["blob_at"], extent["size_bytes"]):
            yield at, chunk
            at += len(chunk)


async def lines_of(chunks: AsyncIterator[tuple[int, bytes]]) -> AsyncIterator[JsonlLine]:
    """Cut pieces into lines, at 0x0A only. A gap between two pieces ends a line too."""
    rest, rest_at = b"", 0
    async for at, chunk in chunks:
        if rest and (at != rest_at + len(rest) or len(rest) > LINE_BYTES_MAX):
            yield JsonlLine(rest_at, rest, whole=False)
            rest = b""
        if not rest:
            rest_at = at
        parts = (rest + chunk).split(b"\n")
        for data in parts[:-1]:
            yield JsonlLine(rest_at, data, whole=True)
            rest_at += len(data) + 1
        rest = parts[-1]
    if rest:
        yield JsonlLine(rest_at, rest, whole=False)


def read_json(data: bytes) -> Any:
    """Parse one JSON value. Refuse NaN, bytes that are not UTF-8, and anything behind the value."""
    try:
        return _decoder.decode(data.decode())
    except UnicodeDecodeError as error:
        raise NotJson(f"byte {error.start} is not UTF-8") from None
    except RecursionError:
        raise NotJson("it is nested too deeply") from None
    except ValueError as error:
        place = getattr(error, "pos", None)
        raise NotJson(f"it is not JSON (character {place})" if place is not None else "it is not JSON") from None


def _pairs(found: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(found)
    return value if len(value) == len(found) else NamedTwice(value)


def _whole_number(text: str) -> int:
    # A number of thousands of digits is legal JSON but slow to convert, and no rule needs its
    # value.
    return int(text) if len(text) <= DIGITS_MAX else -1


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


_decoder = json.JSONDecoder(object_pairs_hook=_pairs, parse_int=_whole_number, parse_constant=_no_constant)
