"""Read the wait that a server's `Retry-After` asks for.

The moment is an argument; nothing here waits.
"""

import math
from collections.abc import Mapping
from email.utils import parsedate_to_datetime


def retry_after_ms(headers: Mapping[str, str], now_ms: int | None) -> int | None:
    """Return how long a server asks us to wait, from `retry-after-ms`, seconds or an HTTP date;
    None for nonsense and the past.

    A date is compared with the server's own clock where its answer has one, so a wrong clock on
    either side does not matter; else with `now_ms`, where that is known. The caller bounds the
    wait.
    """
    exact = _number(headers.get("retry-after-ms"))
    if exact is not None:
        return int(exact)
    text = headers.get("Retry-After")
    seconds = _number(text)
    if seconds is not None:
        return int(seconds * 1000)
    moment_ms = _date_ms(text)
    if moment_ms is None:
        return None
    since_ms = _date_ms(headers.get("Date"))
    if since_ms is None:
        since_ms = now_ms
    if since_ms is None:
        return None
    return moment_ms - since_ms if moment_ms >= since_ms else None


def _number(text: str | None) -> float | None:
    if text is None or len(text) > 32:
        return None
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) and number >= 0 else None


def _date_ms(text: str | None) -> int | None:
    if text is None or len(text) > 64:
        return None
    try:
        return int(parsedate_to_datetime(text).timestamp() * 1000)
    except (ValueError, TypeError, IndexError, OverflowError):
        return None
