"""Parses moments as people type them: a day, a day and a time of this machine's clock,
or unix seconds."""

import re
from datetime import datetime

from tidegate.core.errors import SettingsError

# The end of the year 9999.
UNIX_S_MAX = 253_402_300_799
_SECONDS = re.compile(r"[0-9]{1,12}", re.ASCII)


def unix_s(text: str, option: str) -> int:
    """Return the moment that an option names, in unix seconds."""
    if _SECONDS.fullmatch(text):
        second = int(text)
    else:
        try:
            second = int(datetime.fromisoformat(text).timestamp())
        except (ValueError, OverflowError, OSError):
            second = -1
    if not 0 <= second <= UNIX_S_MAX:
        raise SettingsError(
            f"{option} {text}: write a day such as 2026-11-01, a moment such as 2026-11-01T22:00, or unix seconds."
        )
    return second
