"""The response that passes an interactive answer to its client.

It passes it unchanged, as fast as the client reads, and only while the client is connected.

In events, characters that some clients take for a line end are escaped.

When a client disconnects, its upstream call ends within a moment. An error before the first byte
becomes an error response; after it, an event of the client's protocol reports that the stream
breaks off. `judged` changes or refuses a whole answer. `held`, if set, keeps a stream back until it
is whole and judged. This module does not choose deployments and does not count usage.
"""

import asyncio
from collections.abc import Awaitable, Callable

import structlog
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tidegate import metrics
from tidegate.core.answers.line_breaks import StreamEscaper, escape_line_breaks
from tidegate.core.errors import ApiProblem, Refused, UpstreamError
from tidegate.core.nouns import Answer
from tidegate.core.ports import Clock
from tidegate.upstream.calls.exchange import UpstreamResponse
from tidegate.web.gateway.dialects import Dialect
from tidegate.web.gateway.upstream_problems import own_words, problem_of, retry_after
from tidegate.web.http.intake import KeyCut, OpenCall
from tidegate.web.http.intake import refusal as key_refusal
from tidegate.web.http.parts import body_part, send_parts

log = structlog.get_logger()

LEFT_OUT_CHARS_MAX = 1_024
REST_S = 0.25
# The watch for a disconnect starts this late: most quick answers are out by then, and a watch costs
# as much as one of them.
WATCH_AFTER_S = 0.1
EVENT_END = (b"\n\n", b"\r\n\r\n", b"\r\r")


class ClientStalled(Exception):
    """The client read nothing of its answer for too long."""


class StreamCut(Exception):
    """The upstream's stream broke in the middle of an event, so the client's stream breaks there
    too.
    """


class ProxyResponse(Response):
    """The response to an interactive call.

    It opens the call itself, so one task and one watch for a disconnect cover all of it.
    """

    def __init__(
        self,
        opened: Callable[[], Awaitable[Answer | UpstreamResponse]],
        dialect: Dialect,
        clock: Clock,
        model: str,
        request_id: str,
        judged: Callable[[bytes], Awaitable[bytes]] | None = None,
        judge_stream: Callable[[UpstreamResponse, Dialect], Awaitable[bytes]] | None = None,
    ) -> None:
        super().__init__()
        self._opened = opened
        self._dialect = dialect
        self._clock = clock
        self._model = model
        self._request_id = request_id
        self._judged = judged
        self._judge_stream = judge_stream
        self._has_left = False
        self._watching: asyncio.Task[None] | None = None
        # Whether the client has any of the answer, and whether all that it has of a stream is whole
        # events.
        self._is_begun = False
        self._is_between_events = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        task = asyncio.current_task()
        assert task is not None
        open_call: OpenCall | None = scope["tidegate.intake"].open_call
        if open_call is not None:
            open_call.when_cut(task.cancel)
            if open_call.is_cut:
                raise key_refusal()
        watch_due = asyncio.get_running_loop().call_later(WATCH_AFTER_S, self._begin_watch, receive, task)
        stream: UpstreamResponse | None = None
        outcome = "failed"
        refusal: Response | None = None
        try:
            began_ms = self._clock.monotonic_ms()
            response = await self._opened()
            metrics.interactive_first_byte_seconds.observe((self._clock.monotonic_ms() - began_ms) / 1000)
            if isinstance(response, Answer):
                await self._pass_answer(response, send)
                outcome = "answered"
            else:
                stream = response
                outcome = await self._pass_on(stream, send)
        except asyncio.CancelledError:
            if self._has_left:
                task.uncancel()
                outcome = "left"
            elif stream is not None and stream.was_cut():
                outcome = "left"
                raise ClientStalled from None
            elif open_call is not None and open_call.is_cut:
                task.uncancel()
                outcome = "refused"
                if stream is not None:
                    stream.close()
                await self._end_for_key(send)
            else:
                raise
        except UpstreamError as error:
            outcome = "refused" if isinstance(error, Refused) else "failed"
            log.warning("interactive_call_failed", request_id=self._request_id, code=error.code, why=error.message)
            refusal = self._refusal(error)
            if refusal is None:
                raise problem_of(error) from None
        except ApiProblem:
            outcome = "refused"
            raise
        finally:
            watch_due.cancel()
            if self._watching is not None:
                self._watching.cancel()
            if stream is not None:
                stream.close()
            metrics.interactive_calls.of(self._model, outcome).inc()
        if refusal is not None:
            await refusal(scope, receive, send)

    def _refusal(self, error: UpstreamError) -> Response | None:
        """Return the engine's own refusal in the door's shape; None if there is none for the
        client.
        """
        body = own_words(error)
        if body is None:
            return None
        refusal = self._dialect.refusal(error.status, body, self._request_id)
        wait_s = retry_after(error)
        headers = {} if wait_s is None else {"Retry-After": str(wait_s)}
        return Response(refusal, error.status, headers, "application/json")

    async def _end_for_key(self, send: Send) -> None:
        """End the answer because the caller's key stopped working, with an error if the client can
        still get one.
        """
        problem = key_refusal()
        if not self._is_begun:
            raise problem
        if not self._is_between_events:
            raise KeyCut
        event = escape_line_breaks(self._dialect.broken_off(problem.code, problem.message))
        await send(body_part(event, more=False))

    def _begin_watch(self, receive: Receive, task: "asyncio.Task[None]") -> None:
        self._watching = asyncio.create_task(self._watch(receive, task))

    async def _watch(self, receive: Receive, task: "asyncio.Task[None]") -> None:
        """Wait for the client's disconnect. Its body is already read, so nothing else can come."""
        while (await receive())["type"] != "http.disconnect":
            continue
        self._has_left = True
        task.cancel()

    def _left_out(self) -> list[tuple[bytes, bytes]]:
        """Return the header that names the hints that the engine did not get; empty if it got
        all."""
        if not self._dialect.left_out:
            return []
        shown = ",".join(self._dialect.left_out)[:LEFT_OUT_CHARS_MAX].encode("ascii", "replace")
        return [(b"x-tidegate-left-out", shown)]

    async def _pass_answer(self, answer: Answer, send: Send) -> None:
        body = self._dialect.answer(answer.body) if self._dialect.is_translated else answer.body
        if self._judged is not None:
            body = await self._judged(body)
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        self._is_begun = True
        await send({"type": "http.response.start", "status": answer.status, "headers": self._left_out() + headers})
        await send({"type": "http.response.body", "body": body, "more_body": False})

    async def _pass_on(self, response: UpstreamResponse, send: Send) -> str:
        headers = [*self._left_out(), (b"content-type", b"text/event-stream; charset=utf-8")]
        if self._judge_stream is not None:
            body = escape_line_breaks(await self._judge_stream(response, self._dialect))
            self._is_begun = True
            await send({"type": "http.response.start", "status": response.status, "headers": headers})
            await send(body_part(body, more=False))
            return "answered"
        self._is_begun = True
        await send({"type": "http.response.start", "status": response.status, "headers": headers})
        return await self._pass_stream(response, send)

    async def _pass_stream(self, response: UpstreamResponse, send: Send) -> str:
        translator = self._dialect.translator()
        escaper = StreamEscaper()
        end = b""
        try:
            while chunk := await response.read():
                if translator is not None:
                    chunk = translator.feed(chunk)
                    if translator.ended:
                        break
                chunk = escaper.feed(chunk)
                if not chunk:
                    continue
                self._is_between_events = False
                response.pause_timeout()
                await send_parts(send, chunk)
                response.resume_timeout()
                end = (end + chunk)[-4:]
                self._is_between_events = translator is not None or end.endswith(EVENT_END)
        except UpstreamError as error:
            log.warning("stream_interrupted", request_id=self._request_id, model=self._model, why=error.message)
            if not self._is_between_events:
                # In the middle of an event no error event can be sent: only a broken connection
                # shows that the rest is missing.
                raise StreamCut from None
            event = escape_line_breaks(self._dialect.broken_off(error.code, problem_of(error).message))
            await send(body_part(event, more=False))
            return "failed"
        last = b""
        if translator is not None:
            last = chunk if translator.ended else translator.end_stream()
            if chunk:
                await read_rest(response)
        self._is_between_events = False
        await send(body_part(escaper.feed(last) + escaper.end_stream(), more=False))
        return "answered"


async def read_rest(response: UpstreamResponse) -> None:
    """Read and drop what comes after the last event.

    Only a stream that is read to its end leaves its connection to other calls.
    """
    try:
        async with asyncio.timeout(REST_S):
            await response.read()
    except (UpstreamError, TimeoutError) as error:
        log.info("stream_ended_late", why=type(error).__name__)
