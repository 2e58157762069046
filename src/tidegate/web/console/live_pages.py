"""Live pages: server-sent events bring the part of an open page that changed.

A stream looks as often as its page asks and sends only changes. Each look checks the session again,
so a stream ends with its session, its key or this process; a browser then connects again by itself.
The same address serves the whole page to a browser that asks for a page, so it works without
script.
"""

import asyncio
import re
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import suppress
from typing import Any

import msgspec
import structlog
from starlette.requests import Request
from starlette.responses import Response

from tidegate.core.errors import ApiProblem, TidegateError
from tidegate.web.console.session import Sessions, Visitor
from tidegate.web.context import WebContext
from tidegate.web.http.content import Download
from tidegate.web.http.pages import live_part

log = structlog.get_logger()

# The streams that one process serves at once; each takes a fraction of a percent of a core.
LIVE_PAGES_MAX = 100
HEARTBEAT_S = 15.0
MEDIA_TYPE = "text/event-stream"
STREAM_HEADERS = {"X-Accel-Buffering": "no"}

_OPENING = b"retry: 2000\n\n"
_COME_LATER = b"retry: 30000\n\n"
_HEARTBEAT = b": heartbeat\n\n"
# Tenants' text may contain each of these, and each would end a line of an event.
_LINE_END = re.compile(r"\r\n|\r|\n")
_STORE_GONE = "The server cannot reach its storage. This page shows how things stood before."
_TOO_MANY = f"{LIVE_PAGES_MAX} pages are followed already. Reload this one to see news, or close others."


class LiveView(msgspec.Struct, frozen=True):
    """The content of a page now. `is_over` is set if it will not change any more."""

    template: str
    values: dict[str, Any]
    is_over: bool = False


LiveContent = Callable[[Request, Visitor], Awaitable[LiveView]]


class LivePage(msgspec.Struct, frozen=True):
    """The function that looks at a page's content, and the seconds between its looks."""

    look: LiveContent
    every_s: int


class _News(msgspec.Struct, frozen=True):
    event: str
    text: str
    is_last: bool = False


class LivePages:
    def __init__(self, context: WebContext, sessions: Sessions) -> None:
        self._sessions = sessions
        self._stop = context.stop or asyncio.Event()
        self._open_count = 0

    def stream(self, request: Request, live: LivePage) -> Response:
        """Return the events of a page: `state` with the changed part, `trouble` with why there is
        none, `signed-out` and `end`.
        """
        return Download(_OPENING, self._events(request, live), 200, STREAM_HEADERS, MEDIA_TYPE)

    async def _events(self, request: Request, live: LivePage) -> AsyncGenerator[bytes, None]:
        if self._open_count >= LIVE_PAGES_MAX:
            yield _event("trouble", _TOO_MANY) + _COME_LATER
            return
        self._open_count += 1
        try:
            loop = asyncio.get_running_loop()
            sent, sent_s = None, 0.0
            while not self._stop.is_set():
                news = await self._look(request, live)
                if news != sent:
                    yield _event(news.event, news.text)
                    sent, sent_s = news, loop.time()
                elif loop.time() - sent_s >= HEARTBEAT_S:
                    yield _HEARTBEAT
                    sent_s = loop.time()
                if news.is_last:
                    yield _event("end", "end")
                    return
                with suppress(TimeoutError):
                    async with asyncio.timeout(live.every_s):
                        await self._stop.wait()
        finally:
            self._open_count -= 1

    async def _look(self, request: Request, live: LivePage) -> _News:
        """Look once, as the visitor of the request's session."""
        try:
            visitor = await self._sessions.visitor(request)
            if visitor is None:
                return _News("signed-out", "signed out", is_last=True)
            view = await live.look(request, visitor)
            return _News("state", live_part(view.template, **view.values), view.is_over)
        except ApiProblem as problem:
            return _News("trouble", problem.message, is_last=problem.status < 500)
        except TidegateError as error:
            log.warning("live_page_look_failed", path=request.url.path, error=str(error))
            return _News("trouble", _STORE_GONE)


def _event(name: str, text: str) -> bytes:
    lines = "".join(f"data: {line}\n" for line in _LINE_END.split(text))
    return f"event: {name}\n{lines}\n".encode()
