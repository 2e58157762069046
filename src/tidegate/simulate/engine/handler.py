"""The handler of requests: it reads one, chooses its behaviour, and answers in the mode's time.

Other modules turn bytes into requests, write answers, and put faults on the wire.
"""

import asyncio
from collections.abc import Awaitable, Callable
from hmac import compare_digest
from time import time

import msgspec

from tidegate.simulate.engine import control, meters, sabotage
from tidegate.simulate.engine.answers import SimulatedAnswer, answer_for
from tidegate.simulate.engine.board import Board
from tidegate.simulate.engine.calls import CallsLog
from tidegate.simulate.engine.dealer import Dealer
from tidegate.simulate.engine.faults import BODIES, BadBehaviour, Behaviour
from tidegate.simulate.engine.fitting import Unfit
from tidegate.simulate.engine.flight import SimulatedFlight
from tidegate.simulate.engine.forms import BadFields
from tidegate.simulate.engine.http1 import SimulatedConnection
from tidegate.simulate.engine.messages import EVENT_STREAM, BadRequest, HttpRequest, SimulatedReply, encode, encode_json
from tidegate.simulate.engine.model import ModelledEngine, RequestTooLong
from tidegate.simulate.engine.options import EngineOptions
from tidegate.simulate.engine.outbox import Outbox, WitnessedCall
from tidegate.simulate.engine.pace import SimulatedPace
from tidegate.simulate.engine.requests import SimulatedRequest
from tidegate.simulate.engine.routes import SimulatedRoute, routes_for, stream_body

_STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncache-control: no-cache\r\ntransfer-encoding: chunked\r\n\r\n"
_STREAM_END = b"0\r\n\r\n"
_SLOW_BODIES = frozenset({"huge", "bomb"})
_UNREADABLE = (msgspec.MsgspecError, UnicodeError, RecursionError, BadFields, Unfit, BadBehaviour, RequestTooLong)


class EngineHandler:
    """The handler for the requests of all connections of one process."""

    def __init__(self, options: EngineOptions, board: Board, index: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._options = options
        self._board = board
        self._counters = board.counters
        self.body_bytes_max = options.body_bytes_max
        self.failure: asyncio.Future[None] = self._loop.create_future()
        self.failure.add_done_callback(lambda _: self.close())
        self.pace = SimulatedPace(ModelledEngine(options.limits())) if options.mode == "modelled" else None
        self._instant = options.mode == "instant"
        log = CallsLog(options.calls_log, fsync=options.calls_log_fsync) if options.calls_log else None
        self._out = Outbox(log, board.counters, index, options.processes, self.failure)
        self._key = b"Bearer " + options.api_key.encode() if options.api_key else None
        self._routes = routes_for(options)
        self._dealer = Dealer(options.faults, options.seed + index, board)
        self._connections: set[SimulatedConnection] = set()
        self._under_way: dict[SimulatedConnection, Callable[[], object]] = {}

    def opened(self, connection: SimulatedConnection) -> None:
        """Note a new client."""
        self._connections.add(connection)

    def closed(self, connection: SimulatedConnection) -> None:
        """Forget a client that is gone, and stop its call."""
        self._connections.discard(connection)
        stop = self._under_way.pop(connection, None)
        if stop is not None:
            self._counters[meters.SUCCESS["abort"]] += 1
            stop()

    def close(self) -> None:
        """Drop all clients and close the log."""
        for connection in list(self._connections):
            connection.transport.abort()
        for stop in self._under_way.values():
            stop()
        self._under_way.clear()
        self._out.close()

    def fail(self, error: BaseException) -> None:
        """Stop the engine with a reason; no further call is answered."""
        if not self.failure.done():
            self.failure.set_exception(error)

    def refuse(self, connection: SimulatedConnection, error: BadRequest) -> None:
        """Answer bytes that are no request with an error in OpenAI's shape."""
        unread = HttpRequest(b"", b"", {}, b"", False)
        self._out.record(WitnessedCall(unread), error.status)
        self._out.put(connection, sabotage.error_reply(error.status, str(error)), keep_alive=False)

    def handle(self, connection: SimulatedConnection, request: HttpRequest) -> None:
        """Answer one request now, or start its answer."""
        route = self._routes.get(request.path)
        if route is None:
            self._handle_other(connection, request)
            return
        if request.method != b"POST":
            self._put_error(connection, request, 405, "this path takes POST")
            return
        if self._key is not None and not self._authorized(request):
            self._put_unauthorized(connection, request)
            return
        ask: SimulatedRequest | None = None
        try:
            ask = route.read(request.body)
            answer = answer_for(ask, self._out.number, int(time()), route.tokens_mean)
            behaviour = self._dealer.behaviour(ask.marked, request)
            if behaviour is not None:
                tokens = _billed(answer) if behaviour.status == 200 else 0
                call = WitnessedCall(request, ask.model, route.number, tokens, len(self._under_way))
                self._misbehave(connection, call, behaviour, self._maker(route, answer))
            elif self._instant:
                self._answer_now(connection, request, route, answer)
            elif self.pace is not None:
                self._answer_modelled(connection, request, route, answer, self.pace)
            else:
                self._answer_later(connection, request, route, answer)
        except _UNREADABLE as error:
            param = getattr(error, "param", None)
            code = "context_length_exceeded" if isinstance(error, RequestTooLong) else None
            reply = sabotage.error_reply(400, f"the body is not a valid request: {error}", param, code)
            self._out.record(WitnessedCall(request, ask.model if ask else None, route.number), 400)
            self._out.put(connection, _in_shape(request, reply), keep_alive=request.keep_alive)

    def _witness(self, request: HttpRequest, route: SimulatedRoute, answer: SimulatedAnswer) -> None:
        """Record a call that gets an answer without a fault."""
        call = WitnessedCall(request, answer.ask.model, route.number, _billed(answer), len(self._under_way))
        self._out.record(call, 200)

    def _answer_now(
        self, connection: SimulatedConnection, request: HttpRequest, route: SimulatedRoute, answer: SimulatedAnswer
    ) -> None:
        self._witness(request, route, answer)
        self._count(answer)
        if answer.ask.stream and route.streamed is not None:
            body = stream_body(route.streamed, answer)
            self._out.put_bytes(connection, _STREAM_HEAD + _chunk(body) + _STREAM_END, request.keep_alive)
        elif request.keep_alive:
            self._out.put_bytes(connection, encode_json(route.whole(answer)), True)
        else:
            self._out.put(connection, SimulatedReply(200, route.whole(answer)), keep_alive=False)

    def _answer_later(
        self, connection: SimulatedConnection, request: HttpRequest, route: SimulatedRoute, answer: SimulatedAnswer
    ) -> None:
        self._witness(request, route, answer)
        self._counters[meters.RUNNING] += 1
        connection.begin_answer()

        def due() -> None:
            self._settle(connection, answer, meters.RUNNING)
            latency_s = self._options.latency_ms / 1000
            meters.observe(self._counters, meters.FIRST_TOKEN_AT, latency_s)
            meters.observe(self._counters, meters.WHOLE_CALL_AT, latency_s)
            if answer.ask.stream and route.streamed is not None:
                connection.write(_STREAM_HEAD + _chunk(stream_body(route.streamed, answer)) + _STREAM_END)
            else:
                connection.write(encode(SimulatedReply(200, route.whole(answer)), keep_alive=request.keep_alive))
            connection.finish(keep_alive=request.keep_alive)

        timer = self._loop.call_later(self._options.latency_ms / 1000, due)

        def stop() -> None:
            self._counters[meters.RUNNING] -= 1
            timer.cancel()

        self._under_way[connection] = stop

    def _answer_modelled(
        self,
        connection: SimulatedConnection,
        request: HttpRequest,
        route: SimulatedRoute,
        answer: SimulatedAnswer,
        pace: SimulatedPace,
    ) -> None:
        flight = SimulatedFlight(pace, answer, self._counters)
        flight.start()
        self._witness(request, route, answer)
        connection.begin_answer()
        self._under_way[connection] = flight.abort
        streamed = route.streamed if answer.ask.stream else None
        opened = False

        def token(index: int, chunk: bytes) -> None:
            nonlocal opened
            assert streamed is not None
            event = streamed.token(answer, index, chunk)
            if opened:
                connection.write(_chunk(event))
            else:
                opened = True
                connection.write(_STREAM_HEAD + _chunk(streamed.opening(answer)) + _chunk(event))

        def done() -> None:
            self._settle(connection, answer, None)
            if streamed is not None:
                connection.write(_chunk(streamed.closing(answer)) + _STREAM_END)
            else:
                connection.write(encode(SimulatedReply(200, route.whole(answer)), keep_alive=request.keep_alive))
            connection.finish(keep_alive=request.keep_alive)

        flight.on_token = token if streamed is not None else None
        flight.on_done = done

    def _settle(self, connection: SimulatedConnection, answer: SimulatedAnswer, gauge: int | None) -> None:
        self._under_way.pop(connection, None)
        if gauge is not None:
            self._counters[gauge] -= 1
        self._count(answer)

    def _count(self, answer: SimulatedAnswer) -> None:
        self._counters[meters.PROMPT_TOKENS] += answer.prompt_tokens
        self._counters[meters.GENERATION_TOKENS] += answer.output_tokens
        finish = answer.choices[0].finish
        self._counters[meters.SUCCESS["length" if finish == "length" else "stop"]] += 1

    def _misbehave(
        self,
        connection: SimulatedConnection,
        call: WitnessedCall,
        behaviour: Behaviour,
        make: Callable[[], Awaitable[SimulatedReply]],
    ) -> None:
        request, fault = call.request, behaviour.fault
        self._out.record(call, behaviour.status, behaviour.text)
        if fault is not None and fault.status is not None and not behaviour.delays:
            reply = _in_shape(request, sabotage.spoiled(fault, SimulatedReply(fault.status, b"")))
            self._out.put(connection, reply, keep_alive=request.keep_alive)
            return
        connection.begin_answer()

        async def run() -> None:
            for step in behaviour.delays:
                if step.kind == "latency":
                    await asyncio.sleep((step.value or 0) / 1000)
            # A call that is refused or dropped takes none of the engine's time.
            reply = SimulatedReply(200, b"") if behaviour.status not in (200, 307) else await make()
            if fault is not None and fault.kind in _SLOW_BODIES:
                reply = await asyncio.to_thread(sabotage.spoiled, fault, reply)
            elif fault is not None and (fault.status is not None or fault.kind in BODIES):
                reply = _in_shape(request, sabotage.spoiled(fault, reply))
            keep_alive = await sabotage.send(connection, behaviour, reply, keep_alive=request.keep_alive)
            self._under_way.pop(connection, None)
            connection.finish(keep_alive=keep_alive)

        task = self._loop.create_task(run())
        self._under_way[connection] = task.cancel

    def _maker(self, route: SimulatedRoute, answer: SimulatedAnswer) -> Callable[[], Awaitable[SimulatedReply]]:
        """Return a function that makes the answer for a call with a fault, in the mode's time."""

        async def make() -> SimulatedReply:
            if self.pace is not None:
                done = self._loop.create_future()
                flight = SimulatedFlight(self.pace, answer, self._counters)
                flight.on_done = lambda: None if done.done() else done.set_result(None)
                try:
                    flight.start()
                    await done
                except RequestTooLong as error:
                    return sabotage.error_reply(400, str(error), code="context_length_exceeded")
                finally:
                    flight.abort()
            elif not self._instant:
                await asyncio.sleep(self._options.latency_ms / 1000)
            self._count(answer)
            if answer.ask.stream and route.streamed is not None:
                return SimulatedReply(200, stream_body(route.streamed, answer), EVENT_STREAM)
            return SimulatedReply(200, route.whole(answer))

        return make

    def _handle_other(self, connection: SimulatedConnection, request: HttpRequest) -> None:
        """Answer a request to a path beside the endpoints.

        Models and health meet faults by chance too, because a real outage affects all paths.
        """
        reply = control.reply_to(request, self._board, self.pace)
        if reply is not None:
            self._out.put(connection, reply, keep_alive=request.keep_alive)
            return
        is_models = request.path == b"/v1/models" or request.path.startswith(b"/v1/models/")
        if not (is_models or request.path == b"/health"):
            self._put_error(connection, request, 404, "there is nothing at this path: the API is under /v1")
            return
        if is_models and self._key is not None and not self._authorized(request):
            self._put_unauthorized(connection, request)
            return
        if request.method != b"GET":
            self._put_error(connection, request, 405, "this path takes GET")
            return
        honest = control.models_reply(request.path) if is_models else SimulatedReply(200, b"{}")
        route = meters.ROUTES.index("/v1/models" if is_models else "other")
        behaviour = self._dealer.behaviour(None, request)
        if behaviour is not None:

            async def make() -> SimulatedReply:
                return honest

            call = WitnessedCall(request, route=route, beside=len(self._under_way))
            self._misbehave(connection, call, behaviour, make)
            return
        if is_models:
            self._out.record(WitnessedCall(request, route=route), 200)
        self._out.put(connection, honest, keep_alive=request.keep_alive)

    def _authorized(self, request: HttpRequest) -> bool:
        given = request.headers.get(b"authorization") or b"Bearer " + request.headers.get(b"x-api-key", b"")
        return self._key is None or compare_digest(given, self._key)

    def _put_unauthorized(self, connection: SimulatedConnection, request: HttpRequest) -> None:
        self._put_error(connection, request, 401, "send the engine's key as 'Authorization: Bearer KEY'")

    def _put_error(self, connection: SimulatedConnection, request: HttpRequest, status: int, message: str) -> None:
        self._out.record(WitnessedCall(request), status)
        reply = _in_shape(request, sabotage.error_reply(status, message))
        self._out.put(connection, reply, keep_alive=request.keep_alive)


def _in_shape(request: HttpRequest, reply: SimulatedReply) -> SimulatedReply:
    """Return the reply; an error of Anthropic's endpoint gets Anthropic's shape."""
    if reply.status < 400 or request.path != b"/v1/messages":
        return reply
    return sabotage.anthropic_error(reply)


def _billed(answer: SimulatedAnswer) -> int:
    return answer.prompt_tokens + answer.output_tokens


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data) if data else b""
