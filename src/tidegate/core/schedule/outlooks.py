"""The data of forecasts: how fast a model went, minute by minute, and the work before a job."""

from typing import NamedTuple

import msgspec


class Backlog(NamedTuple):
    """Requests that are not done: their estimated work units, and their number."""

    units: int = 0
    items: int = 0


class Minute(msgspec.Struct, frozen=True):
    """The answers of one model to all workers in one minute of the clock.

    `units` are estimated, `tokens` are charged, `input_tokens` are those of the prompts. `busy_ms`
    is for how long any call was in flight, `call_ms` how long all calls took together; both are 0
    where they were not counted. The last three are sums over all requests: of the squares of their
    units, and of their units times the time and the tokens that they took.
    """

    minute: int
    units: int
    tokens: int
    items: int
    busy_ms: int = 0
    call_ms: int = 0
    input_tokens: int = 0
    unit_squares: float = 0.0
    unit_ms: float = 0.0
    unit_tokens: float = 0.0


class ModelOutlook(msgspec.Struct, frozen=True):
    """The work before one model of a job, and how fast the model went, minute by minute.

    `ahead` is what the job's flow still has of older jobs. The flow has `weight` of the `weights`
    that share the model now. `others` are the weight and the backlog of each other flow; None where
    the backlog was not looked at. The same flows share the model since `shared_since`.
    """

    model: str
    total: Backlog
    left: Backlog
    in_flight_units: int
    ahead: Backlog
    weight: float
    weights: float
    flow_count: int
    minutes: tuple[Minute, ...]
    others: tuple[tuple[float, Backlog | None], ...] = ()
    shared_since: int = 0


class Outlook(msgspec.Struct, frozen=True):
    """All data for an estimate of a job's end.

    There are no models when the job was not ingested yet, or has ended.
    """

    now: int
    created_at: int
    expires_at: int
    begin_by: int | None
    begun_at: int | None
    workers: int
    models: tuple[ModelOutlook, ...]
