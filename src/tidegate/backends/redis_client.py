"""What is used of redis-py, imported without OpenTelemetry.

redis-py imports OpenTelemetry where that is installed, for figures that it keeps only when asked to. Here they are never asked
for, so it is imported as if OpenTelemetry was not installed: a process without traces must not pay for it.
"""

import sys

_NAME = "opentelemetry"
_IS_HIDDEN = _NAME not in sys.modules
if _IS_HIDDEN:
    # With None in its place an import fails as if there was no such package.
    sys.modules[_NAME] = None  # type: ignore[assignment]
try:
    from redis.asyncio import Redis
    from redis.asyncio.connection import AbstractConnection, Connection, parse_url
    from redis.asyncio.retry import Retry
    from redis.backoff import NoBackoff
    from redis.exceptions import NoScriptError, RedisError
finally:
    if _IS_HIDDEN:
        del sys.modules[_NAME]

__all__ = [
    "AbstractConnection",
    "Connection",
    "NoBackoff",
    "NoScriptError",
    "Redis",
    "RedisError",
    "Retry",
    "parse_url",
]
