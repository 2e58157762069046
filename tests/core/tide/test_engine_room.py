"""How many batch calls fit into an engine by its own samples: a full cache or a queue that stands shrink it, quiet lets it grow back."""

from __future__ import annotations

import math

import pytest
from msgspec.structs import replace

from tidegate.core.tide.engine_room import EngineRoom
from tidegate.core.tide.fit import MEASURED_MAX, LineFit, Three
from tidegate.core.tide.signals import EngineSample

QUIET = EngineSample(0.0, 0, 40.0, 0.0, 0.5)


def test_a_full_cache_shrinks_it_below_what_is_in_flight_and_it_grows_back_slowly() -> None:
    room = EngineRoom(100)
    assert room.calls == 100
    room.learn(QUIET, 50)
    assert room.calls == 100, "not beyond the ceiling"
    room.learn(replace(QUIET, kv_use=0.93), 50)
    assert room.calls == 45
    for calls in (46, 47, 49):
        room.learn(replace(QUIET, kv_use=0.92), 50)
        assert room.calls == calls
    room.learn(replace(QUIET, kv_use=0.99), 90)
    assert room.calls == 49, "it never grows by that"
    room.learn(replace(QUIET, kv_use=0.99), 0)
    assert room.calls == 1


def test_an_engine_is_full_when_the_same_number_runs_in_three_samples_while_others_wait() -> None:
    room, waits = EngineRoom(100), replace(QUIET, waiting=1.0)
    for calls in (100, 100, 35, 35):
        room.learn(waits, 50)
        assert room.calls == calls
    room.learn(replace(waits, running=41.0), 50)
    assert room.calls == 36
    for _ in range(3):
        room.learn(replace(waits, running=41.0, waiting=0.9), 50)
    assert room.calls == 40, "no call waits"


@pytest.mark.parametrize("wrong", [-0.1, MEASURED_MAX, math.inf, math.nan])
def test_a_measurement_that_cannot_be_teaches_nothing(wrong: float) -> None:
    start: Three = (1.0, 1.0, 1.0)
    fit = LineFit(lambda found: found, start, (1.0, 1.0, 1.0), 4.0, 100.0)
    fit.learn((1.0, wrong, 1.0), 9.0)
    fit.learn((1.0, 1.0, 1.0), wrong)
    assert fit.coefficients == start
    fit.learn((1.0, 0.0, MEASURED_MAX - 1), 9.0)
    assert fit.coefficients != start
