"""The paths beside the API: metrics, the list of models, and controls for tests (`/simulate/...`).

Of these only calls for models are in the calls log, because clients of the API make them too.
"""

from urllib.parse import unquote

import msgspec

from tidegate.simulate.engine import meters
from tidegate.simulate.engine.board import Board
from tidegate.simulate.engine.faults import rates_from
from tidegate.simulate.engine.messages import HttpRequest, SimulatedReply
from tidegate.simulate.engine.pace import SimulatedPace
from tidegate.simulate.engine.sabotage import error_reply

MODEL = "simulated"


class _Faults(msgspec.Struct, forbid_unknown_fields=True):
    rate: dict[str, float] = {}


def reply_to(request: HttpRequest, board: Board, pace: SimulatedPace | None) -> SimulatedReply | None:
    """Return the reply to a request for metrics or a control; None for any other request."""
    match request.method, request.path:
        case b"GET", b"/metrics":
            _gauge(board, pace)
            return SimulatedReply(200, meters.exposition(board), b"text/plain; version=0.0.4; charset=utf-8")
        case b"GET", b"/simulate/calls":
            return SimulatedReply(200, msgspec.json.encode(meters.calls_summary(board)))
        case b"GET", b"/simulate/faults":
            return SimulatedReply(200, msgspec.json.encode({"rate": board.faults()}))
        case b"POST", b"/simulate/faults":
            return _set_faults(request.body, board)
    return None


def models_reply(path: bytes) -> SimulatedReply:
    """Return the list of models, or the model of this path: every name is served."""
    name = unquote(path.removeprefix(b"/v1/models").removeprefix(b"/").decode("latin-1"))
    model = {"id": name or MODEL, "object": "model", "created": 1_700_000_000, "owned_by": "tidegate"}
    return SimulatedReply(200, msgspec.json.encode(model if name else {"object": "list", "data": [model]}))


def _set_faults(body: bytes, board: Board) -> SimulatedReply:
    try:
        rates = msgspec.json.decode(body or b"{}", type=_Faults).rate
        rates_from(rates)
        board.set_faults(rates)
    except ValueError as error:
        return error_reply(400, f'send fault rates like {{"rate": {{"503": 1.0}}}}, or {{}} to end them: {error}')
    return SimulatedReply(200, msgspec.json.encode({"rate": rates}))


def _gauge(board: Board, pace: SimulatedPace | None) -> None:
    """Copy the modelled engine's present state to the counters for metrics."""
    if pace is None:
        return
    engine = pace.engine
    counters = board.counters
    counters[meters.RUNNING] = len(engine.running)
    counters[meters.WAITING] = engine.waiting_count
    counters[meters.KV_USAGE_MILLIONTHS] = int(engine.cache.usage * 1e6)
    counters[meters.PREFIX_QUERIED] = engine.prefix_queried_tokens
    counters[meters.PREFIX_HIT] = engine.prefix_hit_tokens
    counters[meters.PREEMPTIONS] = engine.preemption_count
