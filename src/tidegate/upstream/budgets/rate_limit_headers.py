"""Limits that an upstream reports about itself in the headers of its answers.

Pure: headers in, limits out.

x-ratelimit-limit-requests, -limit-tokens, -remaining-*, -reset-* ("6m0s", "1s", "20ms", seconds, or
a moment) anthropic-ratelimit-requests-limit, -remaining, -reset (RFC 3339), and the same for
tokens, input-tokens and output-tokens

A header that cannot be read counts as missing, whatever its bytes are.
"""

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

import msgspec

NUMBER_MAX = 10**12
RESET_MS_MAX = 7 * 86_400_000
TEXT_MAX = 40
MINUTE_MS = 60_000
# A plain number from this on is a moment in Unix time, in seconds or milliseconds, because no limit
# takes thirty years to renew.
UNIX_S_MIN = 1_000_000_000
UNIX_MS_MIN = 1_000_000_000_000

_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|us|µs|ns|h|m|s|d)", re.ASCII)
_NUMBER = re.compile(r"\d+(?:\.\d+)?", re.ASCII)
_UNIT_MS = {
    "d": 86_400_000.0,
    "h": 3_600_000.0,
    "m": 60_000.0,
    "s": 1_000.0,
    "ms": 1.0,
    "us": 1e-3,
    "µs": 1e-3,
    "ns": 1e-6,
}


class RateLimitHeaders(msgspec.Struct, frozen=True):
    """The limits of a minute in one answer's headers, and for how long they are used up."""

    requests: int | None = None
    tokens: int | None = None
    empty_for_ms: int = 0


class QuotaLeft(msgspec.Struct, frozen=True):
    """The requests and tokens left until the limits renew, by one answer's headers.

    None means that the headers do not report it.
    """

    requests: int | None = None
    requests_renew_ms: int = MINUTE_MS
    tokens: int | None = None
    tokens_renew_ms: int = MINUTE_MS

    @property
    def is_nothing(self) -> bool:
        return self.requests == 0 or self.tokens == 0


def read_rest_left(headers: Mapping[str, str], now_ms: int, renew_ms: int = MINUTE_MS) -> QuotaLeft:
    """Return the rest that these headers report.

    Without a readable moment of renewal, assume `renew_ms`.
    """
    if "anthropic-ratelimit-requests-limit" in headers or "anthropic-ratelimit-tokens-limit" in headers:
        kinds = ("tokens",) if "anthropic-ratelimit-tokens-remaining" in headers else ("input-tokens", "output-tokens")
        counts = [_count(headers.get(f"anthropic-ratelimit-{kind}-remaining")) for kind in kinds]
        some = [count for count in counts if count is not None]
        return QuotaLeft(
            _count(headers.get("anthropic-ratelimit-requests-remaining")),
            _anthropic_renew_ms(headers, "requests", now_ms) or renew_ms,
            # If one kind of tokens is used up, no call goes, whatever is left of the other.
            (0 if 0 in some else sum(some)) if some else None,
            max(_anthropic_renew_ms(headers, kind, now_ms) for kind in kinds) or renew_ms,
        )
    return QuotaLeft(
        _count(headers.get("x-ratelimit-remaining-requests")),
        _renew_ms(headers, "requests", now_ms) or renew_ms,
        _count(headers.get("x-ratelimit-remaining-tokens")),
        _renew_ms(headers, "tokens", now_ms) or renew_ms,
    )


def read_rate_limits(headers: Mapping[str, str], now_ms: int) -> RateLimitHeaders | None:
    """Return the upstream's limits by these headers; None if there are none.

    `now_ms` is wall time.
    """
    if "x-ratelimit-limit-requests" in headers or "x-ratelimit-limit-tokens" in headers:
        found = RateLimitHeaders(
            _count(headers.get("x-ratelimit-limit-requests")) or None,
            _count(headers.get("x-ratelimit-limit-tokens")) or None,
            max(_empty_for(headers, kind, now_ms) for kind in ("requests", "tokens")),
        )
    elif "anthropic-ratelimit-requests-limit" in headers or "anthropic-ratelimit-tokens-limit" in headers:
        found = RateLimitHeaders(
            _count(headers.get("anthropic-ratelimit-requests-limit")) or None,
            _anthropic_tokens(headers),
            max(_anthropic_empty_for(headers, kind, now_ms) for kind in _ANTHROPIC_KINDS),
        )
    else:
        return None
    return None if found == RateLimitHeaders() else found


_ANTHROPIC_KINDS = ("requests", "tokens", "input-tokens", "output-tokens")


def _anthropic_tokens(headers: Mapping[str, str]) -> int | None:
    both = _count(headers.get("anthropic-ratelimit-tokens-limit"))
    if both:
        return both
    asked = _count(headers.get("anthropic-ratelimit-input-tokens-limit"))
    written = _count(headers.get("anthropic-ratelimit-output-tokens-limit"))
    return asked + written if asked and written else None


def _empty_for(headers: Mapping[str, str], kind: str, now_ms: int) -> int:
    if _count(headers.get(f"x-ratelimit-remaining-{kind}")) != 0:
        return 0
    return _renew_ms(headers, kind, now_ms)


def _anthropic_empty_for(headers: Mapping[str, str], kind: str, now_ms: int) -> int:
    if _count(headers.get(f"anthropic-ratelimit-{kind}-remaining")) != 0:
        return 0
    return _anthropic_renew_ms(headers, kind, now_ms)


def _renew_ms(headers: Mapping[str, str], kind: str, now_ms: int) -> int:
    text = headers.get(f"x-ratelimit-reset-{kind}")
    moment_ms = _unix_ms(text) or _moment_ms(text)
    return _duration_ms(text) if moment_ms is None else _until_ms(moment_ms, headers, now_ms)


def _anthropic_renew_ms(headers: Mapping[str, str], kind: str, now_ms: int) -> int:
    moment_ms = _moment_ms(headers.get(f"anthropic-ratelimit-{kind}-reset"))
    return 0 if moment_ms is None else _until_ms(moment_ms, headers, now_ms)


def _until_ms(moment_ms: int, headers: Mapping[str, str], now_ms: int) -> int:
    # Use the upstream's own clock if it sends it, so that a wrong clock on either side does not
    # matter.
    says_now_ms = _date_ms(headers.get("Date"))
    wait_ms = moment_ms - (now_ms if says_now_ms is None else says_now_ms)
    return min(max(wait_ms, 0), RESET_MS_MAX)


def _count(text: str | None) -> int | None:
    if text is None or len(text) > TEXT_MAX or not text.isascii() or not text.strip().isdecimal():
        return None
    number = int(text)
    return number if number <= NUMBER_MAX else None


def _duration_ms(text: str | None) -> int:
    """Read a duration such as "6m0s", "1.5s", "20ms" or plain seconds, rounded up.

    Return 0 if it cannot be read.
    """
    if text is None or len(text) > TEXT_MAX:
        return 0
    text = text.strip()
    if _NUMBER.fullmatch(text):
        text += "s"
    parts = _PART.findall(text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        return 0
    wait_ms = sum(float(number) * _UNIT_MS[unit] for number, unit in parts)
    return RESET_MS_MAX if wait_ms >= RESET_MS_MAX else int(-(-wait_ms // 1))


def _unix_ms(text: str | None) -> int | None:
    if text is None or len(text) > TEXT_MAX or not _NUMBER.fullmatch(text.strip()):
        return None
    number = float(text)
    if number < UNIX_S_MIN:
        return None
    return int(number if number >= UNIX_MS_MIN else number * 1000)


def _moment_ms(text: str | None) -> int | None:
    # Digits alone are no date, though Python reads eight of them as one.
    if text is None or len(text) > TEXT_MAX or "-" not in text:
        return None
    try:
        moment = datetime.fromisoformat(text.strip())
        return int((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() * 1000)
    except (ValueError, OverflowError, OSError):
        return None


def _date_ms(text: str | None) -> int | None:
    if text is None or len(text) > 2 * TEXT_MAX:
        return None
    try:
        return int(parsedate_to_datetime(text).timestamp() * 1000)
    except (ValueError, TypeError, IndexError, OverflowError):
        return None
