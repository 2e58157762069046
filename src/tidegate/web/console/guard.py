"""The checks before every page of the console: the visitor, the origin of forms, and refusals as
pages.
"""

from collections.abc import Awaitable, Callable, Mapping

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from tidegate.core.errors import ApiProblem, TidegateError
from tidegate.web.admin.audit import AuditTrail
from tidegate.web.console.live_pages import MEDIA_TYPE, LiveContent, LivePage, LivePages
from tidegate.web.console.session import Sessions, Visitor, form_of
from tidegate.web.context import WebContext
from tidegate.web.http import problems
from tidegate.web.http.pages import page

SIGN_IN = "/console/sign-in"
HSTS = {"Strict-Transport-Security": "max-age=31536000"}

Show = Callable[[Request, Visitor], Awaitable[Response]]
PageHandler = Callable[[Request], Awaitable[Response]]


class ConsoleGuard:
    def __init__(self, context: WebContext, sessions: Sessions) -> None:
        self._context = context
        self._sessions = sessions
        self._live_pages = LivePages(context, sessions)

    def routes(self, looks: dict[str, Show], changes: dict[str, Show]) -> list[Route]:
        """Return routes to pages and to forms that change something, by path below /console."""
        return [
            *(self.route(f"/console{path}", self._shown(show), "GET") for path, show in looks.items()),
            *(self.route(f"/console{path}", self._shown(show), "POST") for path, show in changes.items()),
        ]

    def live_routes(self, looks: Mapping[str, tuple[LiveContent, int]]) -> list[Route]:
        """Return routes to live pages with the seconds between looks, by path below /console."""
        pages = {path: LivePage(look, every_s) for path, (look, every_s) in looks.items()}
        return [self.route(f"/console{path}", self._live(one), "GET") for path, one in pages.items()]

    def route(self, path: str, show: PageHandler, method: str) -> Route:
        """Return a route that makes a browser on HTTPS use only HTTPS from then on."""

        async def answer(request: Request) -> Response:
            shown = await show(request)
            if self._sessions.is_encrypted(request):
                shown.headers.update(HSTS)
            return shown

        return Route(path, answer, methods=[method])

    async def form(self, request: Request, visitor: Visitor) -> dict[str, str]:
        """Return a form's fields; refuse a form from elsewhere, or of a visitor who may not change
        things.
        """
        form = await form_of(request)
        self.admit(request, visitor, form.get("csrf"))
        return form

    def admit(self, request: Request, visitor: Visitor, csrf: str | None) -> None:
        """Refuse a form that did not come from this visitor's page, or whose visitor may only
        read."""
        if visitor.key_id is None or csrf != visitor.csrf:
            raise ApiProblem(403, "foreign_form", "Sign in, and send this form from its page.")
        if not visitor.may_write and request.url.path != "/console/sign-out":
            raise ApiProblem(
                403, "insufficient_scope", "Your key may look, and change nothing: it lacks `admin:write`."
            )

    def trail(self, visitor: Visitor) -> AuditTrail:
        """Return the trail of the visitor's key."""
        context = self._context
        return AuditTrail(context.store, context.entropy, f"key:{visitor.key_id}", visitor.address or None)

    def _live(self, live: LivePage) -> PageHandler:
        """Show a page, or its events if its script asks the same address for them."""

        async def show(request: Request, visitor: Visitor) -> Response:
            view = await live.look(request, visitor)
            query = f"?{request.url.query}" if request.url.query else ""
            follows = "" if view.is_over else request.url.path + query
            return page(view.template, live_url=follows, **view.values)

        shown = self._shown(show)

        async def answer(request: Request) -> Response:
            if request.headers.get("accept") == MEDIA_TYPE:
                return self._live_pages.stream(request, live)
            return await shown(request)

        return answer

    def _shown(self, show: Show) -> PageHandler:
        """Show a page to a visitor who may see it; a refusal is a page too."""

        async def answer(request: Request) -> Response:
            visitor = None
            try:
                visitor = await self._sessions.visitor(request)
                if visitor is None:
                    return RedirectResponse(SIGN_IN, 303)
                return await show(request, visitor)
            except TidegateError as error:
                problem = problems.problem_of(error, str(request.scope["tidegate.request_id"]))
                shown = page("console/problem.html", problem.status, problem=problem, visitor=visitor, here="")
                if problem.retry_after_s is not None:
                    shown.headers["Retry-After"] = str(problem.retry_after_s)
                return shown

        return answer
