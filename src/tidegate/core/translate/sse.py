"""Read server-sent events from bytes that come in any parts.

At most one unfinished event is kept.
"""

import re

EVENT_BYTES_MAX = 4 * 1024 * 1024

_LINE_END = re.compile(rb"\r\n|\n|\r")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
# Fields of an event that say nothing about its data.
_OTHER_FIELDS = (b"id", b"retry")


class StreamBroken(ValueError):
    """The bytes are no readable stream of events; the text says why, without quoting them."""


class SseEvent:
    """One event: its name (empty when it has none) and its data. A comment has the name `:`."""

    __slots__ = ("data", "name")

    def __init__(self, name: str, data: bytes) -> None:
        self.name = name
        self.data = data


class EventReader:
    def __init__(self, event_bytes_max: int = EVENT_BYTES_MAX, *, refuses_odd_lines: bool = False) -> None:
        """Create a reader. Lines that belong to no event are passed over, or refused as broken."""
        self._event_bytes_max = event_bytes_max
        self._refuses_odd_lines = refuses_odd_lines
        self._is_at_start = True
        self._rest = bytearray()
        self._searched = 0
        self._name = ""
        self._data: list[bytes] = []
        self._data_bytes = 0

    def feed(self, chunk: bytes) -> list[SseEvent]:
        """Return the events that these bytes complete."""
        self._rest += chunk
        events: list[SseEvent] = []
        at = 0
        # A carriage return at the very end may be half of a line end: the next piece shows.
        usable = len(self._rest) - self._rest.endswith(b"\r")
        while found := _LINE_END.search(self._rest, max(at, self._searched), usable):
            self._line(bytes(self._rest[at : found.start()]), events)
            at = self._searched = found.end()
        del self._rest[:at]
        self._searched = max(0, usable - at)
        if len(self._rest) + self._data_bytes > self._event_bytes_max:
            raise StreamBroken(f"an event of the stream is longer than {self._event_bytes_max} bytes")
        return events

    def _line(self, line: bytes, events: list[SseEvent]) -> None:
        if self._is_at_start:
            self._is_at_start = False
            line = line.removeprefix(_BYTE_ORDER_MARK)
        if not line:
            if self._data:
                events.append(SseEvent(self._name, b"\n".join(self._data)))
            self._name, self._data, self._data_bytes = "", [], 0
            return
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if not field:
            events.append(SseEvent(":", value))
        elif field == b"data":
            self._data.append(value)
            self._data_bytes += len(value) + 1
            if self._data_bytes > self._event_bytes_max:
                raise StreamBroken(f"an event of the stream is longer than {self._event_bytes_max} bytes")
        elif field == b"event":
            self._name = value.decode("utf-8", "replace")
        elif self._refuses_odd_lines and field not in _OTHER_FIELDS:
            raise StreamBroken("the upstream's stream has a line that is no part of an event")
