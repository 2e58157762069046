"""A route is a method, a path, what a key must be allowed to do, and who answers."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

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
    return [Route(path, _endpoint(authenticator, methods), methods=list(methods)) for path, methods in by_path.items()]


def _endpoint(authenticator: Authenticator, methods: dict[str, Guarded]) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        entry = methods["GET" if request.method == "HEAD" else request.method]
        caller = await authenticator.caller(request, entry.scope)
        request.scope["tidegate.intake"].tenant_id = caller.tenant_id
        return await entry.handler(request, caller)

    return endpoint
