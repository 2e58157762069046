"""What happened, in order: a running hash over everything, so that two runs can be compared, and the last events, to be read."""

import hashlib
from collections import deque
from collections.abc import Callable

SHOWN_MAX = 50


class Trace:
    def __init__(self, time_s: Callable[[], float]) -> None:
        self._time_s = time_s
        self._hash = hashlib.sha256()
        self._last: deque[str] = deque(maxlen=SHOWN_MAX)
        self.keep: list[str] | None = None
        self.count = 0

    def note(self, who: str, what: str, *details: object) -> None:
        self.count += 1
        text = f"{self._time_s():10.4f} {who:8} {what} {' '.join(map(str, details))[:300]}"
        self._hash.update(text.encode())
        self._last.append(text)
        if self.keep is not None:
            self.keep.append(text)

    def digest(self) -> str:
        return self._hash.hexdigest()

    def last(self) -> list[str]:
        return list(self._last)
