"""Durations and sizes as people write them (`30s`, `200MB`), in the unit of the setting's name."""

import re

_UNIT_MS = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_UNIT_BYTES = {
    **{f"{prefix}b": 1_000**power for power, prefix in enumerate(("", "k", "m", "g", "t"))},
    **{f"{prefix}ib": 1_024**power for power, prefix in enumerate(("k", "m", "g", "t"), 1)},
}
_PART = r"(\d{1,15}(?:\.\d{1,6})?) ?([a-z]+)"
_DURATION = re.compile(rf"(?:{_PART} ?)+", re.ASCII)
_TEXT_CHARS_MAX = 40

DURATION_EXAMPLES = "`30s`, `24h` or `1h30m`"
SIZE_EXAMPLES = "`200MB` or `8GiB`"


def examples(name: str) -> str:
    """Return examples of text for a setting of this name; empty if it is no duration or size."""
    unit = _unit_of(name)
    return "" if unit is None else SIZE_EXAMPLES if unit == "bytes" else DURATION_EXAMPLES


def parse(name: str, text: str) -> float | None:
    """Return this text as a number in the unit of the setting's name; None if that fails."""
    unit = _unit_of(name)
    text = text.strip().lower()
    if unit is None or len(text) > _TEXT_CHARS_MAX or not _DURATION.fullmatch(text):
        return None
    sizes = _UNIT_BYTES if unit == "bytes" else _UNIT_MS
    total = 0.0
    for count, word in re.findall(_PART, text, re.ASCII):
        if word not in sizes:
            return None
        total += float(count) * sizes[word]
    return total / 1_000 if unit == "s" else total


def _unit_of(name: str) -> str | None:
    words = name.split("_")
    return next((unit for unit in ("bytes", "ms", "s") if unit in words[1:]), None)
