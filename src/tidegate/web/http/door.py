"""The outermost layer of the API: gives every request an id of ours, bounds its head, and turns
every exception into a response.

It knows no route and no tenant.
"""

import re
from collections.abc import Iterable

from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tidegate import metrics, tracing
from tidegate.core import ids
from tidegate.core.errors import ApiProblem
from tidegate.core.ports import Clock, Entropy
from tidegate.web.http import problems
from tidegate.web.http.inbound import ClientAddress
from tidegate.web.http.intake import BodyRoom, Intake, KeyCut
from tidegate.web.http.rate_limits import LIMIT_HEADERS

# The entry of a request's scope that is set when its listener does not serve this path.
HIDDEN = "tidegate.hidden"
HEADER_BYTES_MAX = 32_768
HEADER_COUNT_MAX = 96
URL_BYTES_MAX = 8_192
# An escaped slash, backslash or control character would change what a path names.
_HIDDEN = re.compile(rb"%(?:2f|5c|[01][0-9a-f]|7f)", re.IGNORECASE)
_CONTROL = re.compile(rb"%(?:[01][0-9a-f]|7f)", re.IGNORECASE)
# The rest of a path after these is one name, of a model or an item, which may contain a slash.
_NAME_FOLLOWS = re.compile(rb"/v1/models/|/admin/v1/autoscale/models/|.*?/items/")
_SINGLE = (
    b"authorization",
    b"content-length",
    b"content-type",
    b"idempotency-key",
    b"transfer-encoding",
    b"x-api-key",
    b"x-tidegate-control",
)
_HOST = re.compile(rb"(?:[A-Za-z0-9_.-]{1,255}|\[[0-9A-Fa-f:.]{2,45}\])(?::([0-9]{0,5}))?")
_PORT_MAX = 65_535
# Clients of HTTP/1.0 need not send a Host; servers write its version in these ways.
_WITHOUT_HOST = ("1.0", "1")
_PLAIN_ENCODINGS = (b"", b"identity")
_ALWAYS = (
    (b"x-content-type-options", b"nosniff"),
    (b"cache-control", b"no-store"),
)


# The beginning of each front door's paths, with its name in metrics. The first match counts.
DoorNames = tuple[tuple[str, str], ...]


class RequestDoor:
    def __init__(
        self,
        app: ASGIApp,
        *,
        clock: Clock,
        entropy: Entropy,
        room: BodyRoom,
        shapes: problems.ErrorShapes,
        names: DoorNames,
    ) -> None:
        """Create the layer.

        `shapes` write the refusals of each door, and `names` are the doors' names in metrics.
        """
        self._app = app
        self._names = names
        self._shapes = shapes
        self._room = room
        self._clock = clock
        self._entropy = entropy
        self.busy: set[ClientAddress] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = ids.make("req", self._entropy.token_bytes(ids.RANDOM_BYTES))
        headers = dict(scope["headers"])
        if tracing.ACTIVE is not None:
            tracing.CALLER.set(headers.get(b"traceparent", b"").decode("latin-1"))
        intake = Intake(receive, headers, self._clock, self._room)
        scope["tidegate.intake"] = intake
        scope["tidegate.request_id"] = request_id
        answered, begun_ms = False, self._clock.monotonic_ms()

        async def answer(message: Message) -> None:
            nonlocal answered
            if message["type"] == "http.response.start":
                await intake.drain()
                answered = True
                self._count(scope["path"], message["status"], begun_ms)
                headers = list(message.get("headers", []))
                limits = scope.get(LIMIT_HEADERS)
                if limits is not None:
                    headers += await limits()
                message = {**message, "headers": [*headers, *_named(request_id.encode()), *_ALWAYS]}
            elif message.get("more_body") and intake.is_cut_silently:
                raise KeyCut
            await send(message)

        self.busy.add(scope["client"])
        try:
            _check_head(scope)
            await self._app(scope, intake, answer)
        except Exception as error:
            if answered:
                # A part of the answer is out: only a broken connection shows that the rest is
                # missing.
                problems.log.warning("answer_cut_off", request_id=request_id, problem=type(error).__name__)
                raise
            shape = problems.shape_of(scope["path"], self._shapes)
            refusal = problems.refusal(error, shape, scope, request_id)
            await refusal(scope, intake, answer)
        finally:
            self.busy.discard(scope["client"])
            intake.release()
            if intake.open_call is not None:
                intake.open_call.leave()

    def _count(self, path: str, status: int, begun_ms: float) -> None:
        door = next((name for start, name in self._names if path.startswith(start)), metrics.OTHER)
        metrics.api_requests.of(door, f"{status // 100}xx").inc()
        metrics.api_seconds.of(door).observe((self._clock.monotonic_ms() - begun_ms) / 1000)


def _check_head(scope: Scope) -> None:
    headers: Iterable[tuple[bytes, bytes]] = scope["headers"]
    seen: set[bytes] = set()
    size_bytes = count = 0
    for name, value in headers:
        size_bytes += len(name) + len(value)
        count += 1
        if name in _SINGLE and name in seen:
            raise ApiProblem(
                400, "duplicate_header", f"The header {name.decode('latin-1')} may be sent once.", param="headers"
            )
        if name == b"transfer-encoding" and value.strip().lower() != b"chunked":
            # The server decodes `chunked` alone; any other encoding under it would reach us
            # undecoded.
            raise ApiProblem(
                501,
                "unsupported_transfer_encoding",
                "Send the body as it is, chunked or with a Content-Length: no other Transfer-Encoding is read.",
                param="Transfer-Encoding",
            )
        if name == b"content-encoding" and value.strip().lower() not in _PLAIN_ENCODINGS:
            raise ApiProblem(
                415,
                "unsupported_media_type",
                "Send the body as it is: a compressed one is not read.",
                param="Content-Encoding",
            )
        seen.add(name)
    if size_bytes > HEADER_BYTES_MAX or count > HEADER_COUNT_MAX:
        raise ApiProblem(
            431, "headers_too_large", f"At most {HEADER_COUNT_MAX} headers of {HEADER_BYTES_MAX:,} bytes are taken."
        )
    check_host(headers, scope["http_version"])
    path, query = scope.get("raw_path") or b"", scope.get("query_string") or b""
    if len(path) + len(query) > URL_BYTES_MAX:
        raise ApiProblem(414, "url_too_long", f"A URL may have {URL_BYTES_MAX:,} bytes.")
    if scope.get(HIDDEN) or (b"%" in path and _hides_something(path)):
        raise problems.unknown_url(scope["method"], path.decode("latin-1"))


def _hides_something(path: bytes) -> bool:
    found = _NAME_FOLLOWS.match(path)
    name_at = len(path) if found is None else found.end()
    return _HIDDEN.search(path, 0, name_at) is not None or _CONTROL.search(path, name_at) is not None


def _named(request_id: bytes) -> tuple[tuple[bytes, bytes], ...]:
    """Return the request's id in the headers that OpenAI's and Anthropic's SDKs read."""
    return (b"x-request-id", request_id), (b"request-id", request_id)


# ---- the Host header


def check_host(headers: Iterable[tuple[bytes, bytes]], http_version: str) -> None:
    """Raise a 400 unless there is one Host header, with a name or an address and at most a port.

    HTTP/1.0 needs none.

    Nothing is routed by it, but libraries build URLs from it: a name with `/`, `?`, `#` or `@` in
    it would change the path or the owner of such a URL.
    """
    hosts = [value for name, value in headers if name == b"host"]
    if len(hosts) > 1:
        raise ApiProblem(400, "duplicate_header", "The header host may be sent once.", param="headers")
    # The server passes an empty host if the client sent none.
    host = hosts[0] if hosts else b""
    if not is_plain_host(host) if host else http_version not in _WITHOUT_HOST:
        raise ApiProblem(
            400,
            "invalid_host",
            "The Host header must be a host name or an IP address, with or without a port.",
            param="Host",
        )


def is_plain_host(host: bytes) -> bool:
    """Return whether this is only a name or an address, with or without a port."""
    found = _HOST.fullmatch(host)
    return found is not None and int(found[1] or 0) <= _PORT_MAX


class PlainDoor:
    """The outermost layer of a listener that is not the API: it refuses a request with a bad Host
    in plain text.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self.busy: set[ClientAddress] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.busy.add(scope["client"])
        app = self._app
        try:
            check_host(scope["headers"], scope["http_version"])
        except ApiProblem as problem:
            app = PlainTextResponse(problem.message, problem.status)
        try:
            await app(scope, receive, send)
        finally:
            self.busy.discard(scope["client"])
