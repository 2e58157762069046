"""The simulated model server: OpenAI's endpoints over an engine that is instant, of fixed latency, or modelled in time.

`serve` runs it over a socket. `Engine` is the modelled engine by itself, without a clock, for virtual time. Nothing here
imports the rest of Tidegate, so that a fault in the product cannot hide itself in its own test bench.
"""

from tidegate.simulate.engine.model import Engine, EngineLimits, Event, Request, RequestTooLong, Sequence, Step
from tidegate.simulate.engine.options import EngineOptions
from tidegate.simulate.engine.server import RunningEngine, running, serve

__all__ = [
    "Engine",
    "EngineLimits",
    "EngineOptions",
    "Event",
    "Request",
    "RequestTooLong",
    "RunningEngine",
    "Sequence",
    "Step",
    "running",
    "serve",
]
