"""What a streamed answer says it cost, heard while it passes: no byte is changed, kept back or written anew.

OpenAI's chunks say it once near the end, if asked; responses say it with the last event; Anthropic's events count up. A stream that never
says it is estimated by its events, which engines send one a token.
"""

import msgspec

from tidegate.core.answers import SaidUsage, usage_of
from tidegate.core.nouns import Usage

# A line longer than this is no place where an engine says its usage.
LINE_BYTES_MAX = 1 << 20

_NAME = b'"usage"'


class _Inner(msgspec.Struct):
    usage: SaidUsage | None = None


class _Event(msgspec.Struct):
    usage: SaidUsage | None = None
    response: _Inner | None = None
    message: _Inner | None = None


_decode = msgspec.json.Decoder(_Event).decode


class UsageEar:
    """`usage` is None until the stream has said something; `event_count` is what it sent so far."""

    __slots__ = ("_rest", "event_count", "usage")

    def __init__(self) -> None:
        self.usage: Usage | None = None
        self.event_count = 0
        self._rest = b""

    def hear(self, piece: bytes) -> None:
        end = piece.rfind(b"\n")
        if end < 0:
            if len(self._rest) + len(piece) <= LINE_BYTES_MAX:
                self._rest += piece
            return
        lines = self._rest + piece[:end] if self._rest else piece[:end]
        self._rest = piece[end + 1 :]
        self.event_count += lines.count(b"data:")
        if _NAME in lines:
            for line in lines.splitlines():
                if _NAME in line and line.startswith(b"data:"):
                    self._hear_line(line[5:])

    def _hear_line(self, data: bytes) -> None:
        try:
            said = _decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return
        for holder in (said, said.response, said.message):
            if holder is not None and holder.usage is not None:
                new, old = usage_of(holder.usage), self.usage or Usage()
                # Each count is cumulative, and one that is not repeated stands as it was.
                self.usage = Usage(
                    max(new.input_tokens, old.input_tokens),
                    max(new.cached_tokens, old.cached_tokens),
                    max(new.output_tokens, old.output_tokens),
                    max(new.reasoning_tokens, old.reasoning_tokens),
                )
