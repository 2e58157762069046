"""Reads server-sent events the way a browser does."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Event:
    """One event; `id` is that of the last one that had any, as a client remembers it."""

    kind: str
    data: dict[str, Any] = field(default_factory=dict)
    id: int | None = None


def events(lines: Iterable[str], comments: list[str] | None = None) -> Iterator[Event]:
    """The events in these lines; an event that the end of the stream cut off does not count."""
    kind, data, last_id = "", "", None
    for line in lines:
        name, _, value = line.partition(": ")
        if not line:
            if data:
                yield Event(kind, json.loads(data), last_id)
            kind, data = "", ""
        elif not name:
            if comments is not None:
                comments.append(value)
        elif name == "event":
            kind = value
        elif name == "data":
            data = value
        elif name == "id":
            last_id = int(value)
