"""A route is a method, a path, what a key must be allowed to do, and who answers."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from tidegate.core.nouns import Caller
from tidegate.web.http.auth import Authenticator

Handler = Callable[[Request, Caller], Awaitable[Response]]


@dataclass(frozen=True, slots=True)
class Guarded:
    """A route of one tenant's things."""

    method: str
    path: str
    scope: str
    handler: Handler


def guarded_routes(authenticator: Authenticator, entries: list[Guarded]) -> list[Route]:
    """Make one route per path, so that a 405 names every right method. Each request is authenticated first."""
    by_path: dict[str, dict[str, Guarded]] = {}
    for entry in entries:
        by_path.setdefault(entry.path, {})[entry.method] = entry
    return [
        Route(path, GuardedPath(authenticator, methods), methods=list(methods)) for path, methods in by_path.items()
    ]


class GuardedPath:
    """What answers at one path. It is an ASGI app: around a function Starlette would put layers that do what the door does."""

    def __init__(self, authenticator: Authenticator, methods: dict[str, Guarded]) -> None:
        self._authenticator = authenticator
        self._methods = methods

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive, send)
        entry = self._methods["GET" if request.method == "HEAD" else request.method]
        caller = await self._authenticator.caller(request, entry.scope)
        scope["tidegate.intake"].tenant_id = caller.tenant_id
        response = await entry.handler(request, caller)
        await response(scope, receive, send)
