"""Durations as callers write them: a whole number with a unit, or several, largest first: `24h`,
`90m`, `7d`, `1h30m`.

A bare number is refused, because its unit is unknown. Settings bound how long a window may be.
"""

import re

_PATTERN = re.compile(
    r"(?:(?P<d>[0-9]{1,6})d)?(?:(?P<h>[0-9]{1,6})h)?(?:(?P<m>[0-9]{1,6})m)?(?:(?P<s>[0-9]{1,9})s)?", re.ASCII
)
_UNIT_MS = {"d": 86_400_000, "h": 3_600_000, "m": 60_000, "s": 1_000}
_TEXT_CHARS_MAX = 40

DAY_MS = 86_400_000
DEFAULT_TEXT = "24h"


def parse(text: str) -> int | None:
    """Return the milliseconds of a duration; None for any other text, and for no time at all."""
    matched = _PATTERN.fullmatch(text) if len(text) <= _TEXT_CHARS_MAX else None
    if matched is None:
        return None
    duration_ms = sum(int(count) * _UNIT_MS[unit] for unit, count in matched.groupdict().items() if count)
    return duration_ms or None


def spoken(duration_ms: int) -> str:
    """Return the shortest text that `parse` reads as this duration, in whole seconds."""
    rest_s = duration_ms // 1_000
    parts = []
    for unit in ("d", "h", "m", "s"):
        count, rest_s = divmod(rest_s, _UNIT_MS[unit] // 1_000)
        if count:
            parts.append(f"{count}{unit}")
    return "".join(parts) or "0s"
