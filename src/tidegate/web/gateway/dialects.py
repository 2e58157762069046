"""The shapes of a door's client for streams: unchanged or translated.

`Translation` handles requests, whole answers and errors.
"""

from typing import Protocol

import msgspec

from tidegate.core import translate
from tidegate.upstream.calls.translation import Translation

RESPONSES = "/v1/responses"


class Translator(Protocol):
    """The translator of a stream into the other shape."""

    ended: bool

    def feed(self, chunk: bytes) -> bytes: ...

    def end_stream(self) -> bytes: ...


class Dialect(Translation):
    """One call in the shape of its door."""

    def translator(self) -> Translator | None:
        """Return the translator of a stream; None if its bytes are passed on unchanged."""
        if not self.is_translated:
            return None
        if self.is_anthropic:
            return translate.StreamToAnthropic()
        return translate.StreamToOpenai(self.now_s, include_usage=self.include_usage)

    def broken_off(self, code: str, message: str) -> bytes:
        """Return the event that reports that a stream ends early, and why."""
        if self.is_anthropic:
            error = {"type": "error", "error": {"type": "api_error", "message": message, "code": code}}
            return b"event: error\ndata: %b\n\n" % msgspec.json.encode(error)
        if self.endpoint == RESPONSES:
            event = {"type": "error", "code": code, "message": message, "param": None, "sequence_number": 0}
            return b"event: error\ndata: %b\n\n" % msgspec.json.encode(event)
        detail = {"message": message, "type": "server_error", "param": None, "code": code}
        return b"data: %b\n\n" % msgspec.json.encode({"error": detail})
