"""Guarded routes: a method, a path, the scope that a key needs, and the function that answers."""

from collections.abc import Awaitable, Callable

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tidegate.core.nouns import Caller

RouteHandler = Callable[[Request, Caller], Awaitable[Response]]


class Guarded(msgspec.Struct, frozen=True):
    """A route to things of one tenant.

    If it makes work, its answers show what the caller's limits have left.
    """

    method: str
    path: str
    scope: str
    handler: RouteHandler
    makes_work: bool = False
