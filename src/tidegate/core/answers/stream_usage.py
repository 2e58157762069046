"""Read the usage of a streamed answer while it passes: no byte is changed or held back.

OpenAI's chunks report it once near the end, if asked; some engines report it in every chunk;
responses report it with the last event; Anthropic's events count up. Text after the last report, or
all text of a stream without one, is counted by its bytes.
"""

import re
from collections.abc import Iterable
from typing import Any

import msgspec

from tidegate.core.answers.answer import ReportedUsage, loose_usage, usage_of
from tidegate.core.answers.answer_text import text_bytes
from tidegate.core.nouns import Usage

# A line longer than this is not kept: it counts as text, and no server reports usage there.
LINE_BYTES_MAX = 1 << 20
KEPT_BYTES_MAX = 1 << 16

_DONE = b"[DONE]"
_LAST = "message_delta"
_LINE_END = re.compile(rb"\r\n|\n|\r")
_SAYS_USAGE = re.compile(rb'"usage"[ \t]*:[ \t]*\{')


class _Inner(msgspec.Struct):
    usage: ReportedUsage | None = None


class _StreamChoice(msgspec.Struct):
    delta: Any = None
    text: Any = None


class _Event(msgspec.Struct):
    """The parts of an event that report usage or bring text, in every dialect."""

    usage: ReportedUsage | None = None
    response: _Inner | None = None
    message: _Inner | None = None
    choices: list[_StreamChoice] | None = None
    delta: Any = None
    content_block: Any = None
    type: Any = None


class _Loose(msgspec.Struct):
    """An event with numbers that could not be read: its text and its other numbers still count."""

    choices: Any = None
    delta: Any = None
    content_block: Any = None
    usage: Any = None
    response: Any = None
    message: Any = None
    type: Any = None


_decode = msgspec.json.Decoder(_Event).decode
_decode_loose = msgspec.json.Decoder(_Loose).decode


class UsageReader:
    """The usage of one stream.

    `usage` is None until the stream reports it; `uncounted_bytes` is the text since it last
    reported its output. Both are right once `end_stream` was called. Until then only a few bytes
    are kept: the text of a stream that reports its usage at its end need not be read.
    """

    __slots__ = ("_dropped", "_kept", "_kept_bytes", "uncounted_bytes", "usage")

    def __init__(self) -> None:
        self.usage: Usage | None = None
        self.uncounted_bytes = 0
        self._kept: list[bytes] = []
        self._kept_bytes = 0
        self._dropped = False

    def feed(self, chunk: bytes) -> None:
        self._kept.append(chunk)
        self._kept_bytes += len(chunk)
        if self._kept_bytes > KEPT_BYTES_MAX:
            self._read_kept()

    def end_stream(self) -> None:
        """Read all that is left, including a last line without a line end."""
        self._kept.append(b"\n")
        self._read_kept()

    def _read_kept(self) -> None:
        data = b"".join(self._kept)
        end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        start = self._end_dropped_line(data) if self._dropped and end else 0
        self._read_lines(data, start, end)
        rest = data[end:]
        if self._dropped or len(rest) > LINE_BYTES_MAX:
            self.uncounted_bytes += len(rest)
            self._dropped = True
            rest = b""
        self._kept = [rest]
        # An incomplete line is looked at again only after as much more has come.
        self._kept_bytes = 0

    def _end_dropped_line(self, data: bytes) -> int:
        """Count the end of a line whose beginning was not kept, and return where it ends."""
        line_end = _LINE_END.search(data)
        assert line_end is not None
        self._dropped = False
        self.uncounted_bytes += line_end.start()
        return line_end.end()

    def _read_lines(self, data: bytes, start: int, end: int) -> None:
        """Read the lines that report usage, and count the text after the last report."""
        usage_parts: list[tuple[int, int]] = []
        uncounted = start
        at = start
        while found := _SAYS_USAGE.search(data, at, end):
            first = max(data.rfind(b"\n", start, found.start()), data.rfind(b"\r", start, found.start()), start - 1) + 1
            line_end = _LINE_END.search(data, found.end())
            last, at = line_end.span() if line_end is not None else (end, end)
            if not data.startswith(b"data:", first):
                continue
            counts_all = self._read_event(data[first + 5 : last])
            usage_parts.append((first, at))
            if counts_all:
                uncounted = at
        for first, last in usage_parts:
            if first >= uncounted:
                self._count_text(data[uncounted:first])
                uncounted = last
        self._count_text(data[uncounted:end])

    def _count_text(self, lines: bytes) -> None:
        for line in lines.splitlines():
            data = line[5:].strip() if line.startswith(b"data:") else b""
            if data and data != _DONE:
                self._read_event(data)

    def _read_event(self, data: bytes) -> bool:
        """Note the usage and the text of an event; return whether its usage counts all the text
        that came before.
        """
        try:
            event = _decode(data)
        except msgspec.ValidationError:
            return self._read_loosely(data)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            self.uncounted_bytes += len(data)
            return False
        if event.choices:
            for choice in event.choices:
                self.uncounted_bytes += (
                    text_bytes(choice.delta) if choice.text is None else text_bytes([choice.delta, choice.text])
                )
        elif event.delta is not None and event.type != _LAST:
            self.uncounted_bytes += text_bytes(event.delta)
        elif event.content_block is not None:
            self.uncounted_bytes += text_bytes(event.content_block)
        inner = (holder.usage for holder in (event.response, event.message) if holder is not None)
        return self._note_usages((event.usage, *inner), event.type)

    def _read_loosely(self, data: bytes) -> bool:
        try:
            event = _decode_loose(data)
        except msgspec.MsgspecError:
            # The event is JSON, but no object.
            self.uncounted_bytes += len(data)
            return False
        delta = None if event.type == _LAST else event.delta
        self.uncounted_bytes += text_bytes(event.choices) + text_bytes(delta) + text_bytes(event.content_block)
        inner = (holder.get("usage") for holder in (event.response, event.message) if isinstance(holder, dict))
        return self._note_usages([loose_usage(one) for one in (event.usage, *inner)], event.type)

    def _note_usages(self, reported: Iterable[ReportedUsage | None], kind: Any) -> bool:
        counts_all = False
        for one in reported:
            if one is not None:
                counts_all = self._note_usage(usage_of(one), is_last=kind == _LAST) or counts_all
        return counts_all

    def _note_usage(self, new: Usage, *, is_last: bool) -> bool:
        """Note a usage; return whether it counts all the text that came before.

        Anthropic counts an answer's first token before there is any text, and its last event may
        count no more than that.
        """
        old = self.usage or Usage()
        counts_all = new.output_tokens > old.output_tokens or (is_last and new.output_tokens > 0)
        if counts_all:
            self.uncounted_bytes = 0
        # Each count is cumulative; one that is not repeated keeps its value.
        self.usage = Usage(
            max(new.input_tokens, old.input_tokens),
            max(new.cached_tokens, old.cached_tokens),
            max(new.output_tokens, old.output_tokens),
            max(new.reasoning_tokens, old.reasoning_tokens),
        )
        return counts_all
