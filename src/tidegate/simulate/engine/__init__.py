"""The simulated model server: instant, of fixed latency, or modelled with continuous batching.

`serve` runs it over a socket. `ModelledEngine` is the modelled engine alone, without a clock, for
virtual time. This room imports no other part of Tidegate, so that a fault of the product cannot
hide in its own test bench.
"""

from tidegate.simulate.engine.model import (
    EngineLimits,
    ModelledEngine,
    ModelledEvent,
    ModelledRequest,
    ModelledStep,
    RequestTooLong,
    Sequence,
)
from tidegate.simulate.engine.options import EngineOptions
from tidegate.simulate.engine.server import RunningEngine, running, serve

__all__ = [
    "EngineLimits",
    "EngineOptions",
    "ModelledEngine",
    "ModelledEvent",
    "ModelledRequest",
    "ModelledStep",
    "RequestTooLong",
    "RunningEngine",
    "Sequence",
    "running",
    "serve",
]
