"""The playground: one interactive call to a model, like any caller's, counted for the organization
of the visitor's key.
"""

import contextlib
import json
import math
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Message

from tidegate.core.errors import ApiProblem
from tidegate.web.console.guard import ConsoleGuard
from tidegate.web.console.session import Visitor
from tidegate.web.context import WebContext
from tidegate.web.gateway.gateway import GatewayRoutes
from tidegate.web.gateway.interactive_request import read_interactive_request
from tidegate.web.http.pages import page
from tidegate.web.requests import requests

ENDPOINT = "/v1/chat/completions"
SHOWN_CHARS_MAX = 100_000
FIELDS = ("model", "system", "prompt", "max_tokens", "temperature")


class PlaygroundPages:
    def __init__(self, context: WebContext, guard: ConsoleGuard, gateway: GatewayRoutes) -> None:
        self._context = context
        self._guard = guard
        self._gateway = gateway

    def routes(self) -> list[Route]:
        return self._guard.routes({"/playground": self.form}, {"/playground": self.call})

    async def form(self, request: Request, visitor: Visitor) -> Response:
        requests.refuse_unknown(request.query_params, ("model",))
        return self._page(visitor, {"model": requests.one(request.query_params, "model") or ""})

    async def call(self, request: Request, visitor: Visitor) -> Response:
        """Make the call, and show its answer beside the form."""
        form = await self._guard.form(request, visitor)
        clock = self._context.clock
        began_ms = clock.monotonic_ms()
        try:
            answer = await self._answer(request, visitor, _body(form))
        except ApiProblem as problem:
            return self._page(visitor, form, problem=problem)
        took_ms = round(clock.monotonic_ms() - began_ms)
        return self._page(visitor, form, answer=answer, took_ms=took_ms)

    async def _answer(self, request: Request, visitor: Visitor, body: bytes) -> "PlaygroundAnswer":
        assert visitor.holder is not None  # the guard takes forms only from visitors with a key
        wanted = read_interactive_request(body, ENDPOINT, self._context.settings.limits.json_depth_max)
        await self._guard.trail(visitor).note_read("playground.call", "model", wanted.model, {"model": wanted.model})
        response = await self._gateway.answer(ENDPOINT, request, wanted, visitor.holder)
        status, parts = 0, bytearray()

        async def collect(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            elif len(parts) < SHOWN_CHARS_MAX:
                parts.extend(message.get("body", b""))

        await response(request.scope, request.receive, collect)
        return _read(status, bytes(parts))

    def _page(
        self,
        visitor: Visitor,
        shown: dict[str, str],
        *,
        answer: "PlaygroundAnswer | None" = None,
        problem: ApiProblem | None = None,
        took_ms: int = 0,
    ) -> Response:
        router = self._context.router
        return page(
            "console/playground.html",
            200 if problem is None else problem.status,
            visitor=visitor,
            here="playground",
            models=sorted(name for name in router.names() if router.takes_interactive(name)),
            shown={name: shown.get(name, "") for name in FIELDS},
            answer=answer,
            problem=problem,
            took_ms=took_ms,
        )


class PlaygroundAnswer(msgspec.Struct, frozen=True):
    """`text` is the model's text, empty if none was found; `raw` is the whole answer."""

    status: int
    text: str
    usage: dict[str, Any]
    raw: str


def _body(form: dict[str, str]) -> bytes:
    """Return the request of a form; refuse a field that must be a number and is none."""
    messages = [
        {"role": role, "content": text}
        for role, text in (("system", form.get("system", "")), ("user", form.get("prompt", "")))
        if text.strip()
    ]
    body: dict[str, Any] = {"model": form.get("model", ""), "messages": messages}
    for name, kind in (("max_tokens", int), ("temperature", float)):
        if text := form.get(name, "").strip():
            try:
                body[name] = kind(text)
                is_number = math.isfinite(body[name])
            except (ValueError, OverflowError):
                is_number = False
            if not is_number:
                raise ApiProblem(400, "invalid_parameter", f"`{name}` must be a number.", param=name)
    if not form.get("prompt", "").strip():
        raise ApiProblem(400, "missing_required_parameter", "Write a prompt.", param="prompt")
    return msgspec.json.encode(body)


def _read(status: int, data: bytes) -> PlaygroundAnswer:
    raw = data.decode("utf-8", "replace")
    text = ""
    usage: dict[str, Any] = {}
    with contextlib.suppress(ValueError, RecursionError, LookupError, TypeError):
        found = json.loads(raw)
        raw = json.dumps(found, indent=2, ensure_ascii=False)
        if isinstance(found.get("usage"), dict):
            usage = found["usage"]
        text = str(found["choices"][0]["message"]["content"] or "")
    return PlaygroundAnswer(status, text, usage, raw[:SHOWN_CHARS_MAX])
