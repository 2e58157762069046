"""What a streamed answer used, heard while it passes: no byte is changed, kept back or written anew.

OpenAI's chunks say it once near the end, if asked; some engines say it in every chunk; responses say it with the last event; Anthropic's
events count up. What came after the last word on it, or all of a stream that never says it, is counted by its text.
"""

from typing import Any

import msgspec

from tidegate.core.answer_text import text_bytes
from tidegate.core.answers import SaidUsage, usage_of
from tidegate.core.nouns import Usage

# A line longer than this is not kept: it counts as text, and nobody says usage there.
LINE_BYTES_MAX = 1 << 20

_DONE = b"[DONE]"


class _Inner(msgspec.Struct):
    usage: SaidUsage | None = None


class _Choice(msgspec.Struct):
    delta: Any = None
    text: Any = None


class _Event(msgspec.Struct):
    """The parts of an event that say usage or bring text, in every dialect."""

    usage: SaidUsage | None = None
    response: _Inner | None = None
    message: _Inner | None = None
    choices: list[_Choice] | None = None
    delta: Any = None
    content_block: Any = None
    type: Any = None


class _Loose(msgspec.Struct):
    """The second look at an event whose numbers could not be read: it still brings text."""

    choices: Any = None
    delta: Any = None
    content_block: Any = None


_decode = msgspec.json.Decoder(_Event).decode
_decode_loose = msgspec.json.Decoder(_Loose).decode


class UsageEar:
    """`usage` is None until the stream has said something; `unsaid_bytes` is the text that came since it last told its output."""

    __slots__ = ("_dropped", "_rest", "unsaid_bytes", "usage")

    def __init__(self) -> None:
        self.usage: Usage | None = None
        self.unsaid_bytes = 0
        self._rest = b""
        self._dropped = False

    def hear(self, piece: bytes) -> None:
        end = max(piece.rfind(b"\n"), piece.rfind(b"\r"))
        if end < 0:
            self._keep(piece)
            return
        lines = self._rest + piece[:end] if self._rest else piece[:end]
        self._rest = b""
        self._hear_lines(lines)
        self._keep(piece[end + 1 :])

    def end(self) -> None:
        """Hear a last line that has no line end."""
        lines, self._rest = self._rest, b""
        self._hear_lines(lines)

    def _keep(self, piece: bytes) -> None:
        if self._dropped or len(self._rest) + len(piece) > LINE_BYTES_MAX:
            self.unsaid_bytes += len(self._rest) + len(piece)
            self._rest = b""
            self._dropped = True
        elif piece:
            self._rest += piece

    def _hear_lines(self, lines: bytes) -> None:
        for line in lines.splitlines():
            if self._dropped:
                # The end of a line whose beginning was not kept.
                self._dropped = False
                self.unsaid_bytes += len(line)
            elif line.startswith(b"data:"):
                data = line[5:].strip()
                if data and data != _DONE:
                    self._hear_event(data)

    def _hear_event(self, data: bytes) -> None:
        try:
            event = _decode(data)
        except msgspec.ValidationError:
            self._hear_loosely(data)
            return
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            self.unsaid_bytes += len(data)
            return
        if event.choices:
            for choice in event.choices:
                self.unsaid_bytes += text_bytes(choice.delta) + text_bytes(choice.text)
        elif event.delta is not None and event.type != "message_delta":
            self.unsaid_bytes += text_bytes(event.delta)
        elif event.content_block is not None:
            self.unsaid_bytes += text_bytes(event.content_block)
        for holder in (event, event.response, event.message):
            if holder is not None and holder.usage is not None:
                self._hear_usage(usage_of(holder.usage))

    def _hear_loosely(self, data: bytes) -> None:
        try:
            event = _decode_loose(data)
        except msgspec.MsgspecError:
            # It is JSON, but no object.
            self.unsaid_bytes += len(data)
            return
        self.unsaid_bytes += text_bytes(event.choices) + text_bytes(event.delta) + text_bytes(event.content_block)

    def _hear_usage(self, new: Usage) -> None:
        old = self.usage or Usage()
        if new.output_tokens > old.output_tokens:
            self.unsaid_bytes = 0
        # Each count is cumulative, and one that is not repeated stands as it was.
        self.usage = Usage(
            max(new.input_tokens, old.input_tokens),
            max(new.cached_tokens, old.cached_tokens),
            max(new.output_tokens, old.output_tokens),
            max(new.reasoning_tokens, old.reasoning_tokens),
        )
