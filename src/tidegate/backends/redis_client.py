"""The parts of redis-py that are used here, imported without OpenTelemetry.

redis-py imports OpenTelemetry if it is installed, for metrics that are off by default and never
used here. A process without traces must not pay for that import, so OpenTelemetry is hidden during
it.
"""

import sys

_NAME = "opentelemetry"
_IS_HIDDEN = _NAME not in sys.modules
if _IS_HIDDEN:
    # With None in its place, an import fails as if the package was not installed.
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
