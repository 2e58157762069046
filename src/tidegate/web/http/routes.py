"""Routes with access checks: a method, a path, the scope that a key needs, and the function that answers."""

import functools
from collections.abc import Awaitable, Callable
from typing import Protocol

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from tidegate.core.nouns import Caller
from tidegate.web.http.auth import Authenticator
from tidegate.web.http.rate_limits import LIMIT_HEADERS, Headers


class CallerLimits(Protocol):
    async def headers(self, caller: Caller) -> Headers:
        """Return what the caller's limits have left, as headers."""


Handler = Callable[[Request, Caller], Awaitable[Response]]


class Guarded(msgspec.Struct, frozen=True):
    """A route to things of one tenant. If it makes work, its answers show what the caller's limits have left."""

    method: str
    path: str
    scope: str
    handler: Handler
    makes_work: bool = False


def guarded_routes(authenticator: Authenticator, limits: CallerLimits, entries: list[Guarded]) -> list[Route]:
    """Make one route per path, so that a 405 names every right method. Each request is authenticated first."""
    by_path: dict[str, dict[str, Guarded]] = {}
    for entry in entries:
        by_path.setdefault(entry.path, {})[entry.method] = entry
    return [
        Route(path, GuardedPath(authenticator, limits, methods), methods=list(methods))
        for path, methods in by_path.items()
    ]


class GuardedPath:
    """The ASGI app of one path. Starlette would wrap a function in layers that repeat the door's work."""

    def __init__(self, authenticator: Authenticator, limits: CallerLimits, methods: dict[str, Guarded]) -> None:
        self._authenticator = authenticator
        self._limits = limits
        self._methods = methods

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive, send)
        entry = self._methods["GET" if request.method == "HEAD" else request.method]
        caller = await self._authenticator.caller(request, entry.scope)
        scope["tidegate.intake"].belongs_to(caller.tenant_id)
        if entry.makes_work:
            scope[LIMIT_HEADERS] = functools.partial(self._limits.headers, caller)
        response = await entry.handler(request, caller)
        await response(scope, receive, send)
