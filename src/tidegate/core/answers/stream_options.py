"""Ask a stream of OpenAI's chunks for its usage, and remove the usage chunk again where the caller
did not ask for it.

The caller's other bytes stay as they are, in the request and in the answer. Only chunks without a
choice are removed: an engine that reports usage beside the text did so before it was asked.
"""

import re
from typing import Any

import msgspec

ENDPOINTS = ("/v1/chat/completions", "/v1/completions")
EVENT_BYTES_MAX = 1 << 20

_ASKING = b'"stream_options":{"include_usage":true}'
_NAME = b'"stream_options"'
# No ordinary client escapes a plain letter, but an escape could hide the name.
_ESCAPED_LETTER = re.compile(rb"\\u00[4-7]")
_ENDS = (b"\n\n", b"\r\n\r\n", b"\r\r")
_EVENT_END = re.compile(rb"\r\n\r\n|\n\n|\r\r")
# When asked, many servers write `"usage": null` in each of the other chunks.
_USAGE = re.compile(rb'"usage"(?!\s*:\s*null)')
_members = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


def asking_for_usage(body: bytes) -> bytes | None:
    """Return the request with `include_usage`; None where it asks already, or has options that no
    engine takes.
    """
    start = body.find(b"{") + 1
    if _NAME not in body and start and not _ESCAPED_LETTER.search(body):
        rest = body[start:]
        comma = b"" if rest.lstrip().startswith(b"}") else b","
        return body[:start] + _ASKING + comma + rest
    try:
        members = _members(body)
        options = msgspec.json.decode(members["stream_options"]) if "stream_options" in members else None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    if options is None:
        options = {}
    if not isinstance(options, dict) or options.get("include_usage"):
        return None
    members["stream_options"] = msgspec.Raw(msgspec.json.encode({**options, "include_usage": True}))
    return msgspec.json.encode(members)


def without_asking(body: bytes) -> bytes | None:
    """Return the request without `stream_options`; None where it has none."""
    try:
        members = _members(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    if members.pop("stream_options", None) is None:
        return None
    return msgspec.json.encode(members)


class _Chunk(msgspec.Struct):
    choices: Any = None
    usage: Any = None
    error: Any = None


_chunk = msgspec.json.Decoder(_Chunk).decode


class UsageChunkFilter:
    """A filter that removes chunks which only report usage from a stream.

    It takes bytes and returns whole events.
    """

    __slots__ = ("_rest",)

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, chunk: bytes) -> bytes:
        data = self._rest + chunk if self._rest else chunk
        end = len(data) if data.endswith(b"\n\n") else _end_of_last_event(data, len(data))
        if not end and len(data) > EVENT_BYTES_MAX:
            # No engine reports usage in an event of this size.
            end = len(data)
        whole, self._rest = data[:end], data[end:]
        return _without_usage_chunks(whole)

    def end_stream(self) -> bytes:
        """Return the held part of an event without its end."""
        rest, self._rest = self._rest, b""
        return _without_usage_chunks(rest)


def _end_of_last_event(data: bytes, before: int) -> int:
    """Return where the last event ends that is whole before this place; 0 if there is none."""
    return max(at + len(mark) if (at := data.rfind(mark, 0, before)) >= 0 else 0 for mark in _ENDS)


def _without_usage_chunks(data: bytes) -> bytes:
    """Return these events without those that only report usage; only events that name it are looked
    at.
    """
    found = _USAGE.search(data)
    if found is None:
        return data
    kept = []
    done = 0
    while found is not None:
        first = _end_of_last_event(data, found.start())
        event_end = _EVENT_END.search(data, found.end())
        last = event_end.end() if event_end is not None else len(data)
        kept.append(data[done:first] if _says_only_usage(data[first:last]) else data[done:last])
        done = last
        found = _USAGE.search(data, done)
    kept.append(data[done:])
    return b"".join(kept)


def _says_only_usage(event: bytes) -> bool:
    data = b"".join(line[5:] for line in event.splitlines() if line.startswith(b"data:"))
    try:
        chunk = _chunk(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return False
    return isinstance(chunk.usage, dict) and not chunk.choices and chunk.error is None
