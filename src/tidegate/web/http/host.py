"""What a Host header may say. Nothing here is routed by it, but libraries build URLs from it, so it must be a plain name and port.

A name with `/`, `?`, `#` or `@` in it would change the path or the owner of such a URL. Every listener checks this before anything else
reads the request.
"""

import re
from collections.abc import Iterable

from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from tidegate.core.errors import ApiProblem

_NAME = re.compile(rb"(?:[A-Za-z0-9_.-]{1,255}|\[[0-9A-Fa-f:.]{2,45}\])(?::([0-9]{0,5}))?")
_PORT_MAX = 65_535
# How servers write the version of HTTP whose clients need not name a host.
_WITHOUT_HOST = ("1.0", "1")


def check_host(headers: Iterable[tuple[bytes, bytes]], http_version: str) -> None:
    """Raise a 400 unless there is one Host header, and it is a name or an address with or without a port. HTTP/1.0 needs none."""
    hosts = [value for name, value in headers if name == b"host"]
    if len(hosts) > 1:
        raise ApiProblem(400, "duplicate_header", "The header host may be sent once.", param="headers")
    # The server hands on an empty name where a client sent no Host.
    host = hosts[0] if hosts else b""
    if not is_plain_host(host) if host else http_version not in _WITHOUT_HOST:
        raise ApiProblem(
            400,
            "invalid_host",
            "The Host header must be a host name or an IP address, with or without a port.",
            param="Host",
        )


def is_plain_host(host: bytes) -> bool:
    """Return whether this is a name or an address, with or without a port, and nothing else."""
    found = _NAME.fullmatch(host)
    return found is not None and int(found[1] or 0) <= _PORT_MAX


class HostChecked:
    """Middleware that refuses a request with a bad Host in plain text, for a listener that is not the API."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                check_host(scope["headers"], scope["http_version"])
            except ApiProblem as problem:
                await PlainTextResponse(problem.message, problem.status)(scope, receive, send)
                return
        await self._app(scope, receive, send)
