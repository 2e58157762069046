"""Learning what an upstream takes: it starts safe, grows while it is quick, halves when refused, and is never stuck."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate.core.tide.learner import SAFE_CALLS, Learner
from tidegate.core.tide.signals import Ended


def rounds(learner: Learner, count: int, pace_ms: float, *, now_ms: float = 0.0, share: float = 1.0) -> None:
    """So many rounds in which the limit is used to a share and an answer token takes so long."""
    ended = [Ended(400, 50 + place % 100, (56.0 + place % 100) * pace_ms) for place in range(64)]
    for number in range(count):
        used = max(1, int(learner.calls * share))
        learner.observe(now_ms + number, used, ended, 0)


def test_it_starts_safe_and_grows_to_its_ceiling_while_calls_stay_quick() -> None:
    learner = Learner(200)
    assert learner.calls == SAFE_CALLS
    rounds(learner, 20, 10.0)
    assert learner.calls == 200
    assert Learner(4).calls == 4


def test_it_shrinks_when_calls_become_slow_and_comes_back() -> None:
    learner = Learner(200)
    rounds(learner, 5, 10.0)
    before = learner.calls
    rounds(learner, 5, 30.0)
    assert learner.calls < before
    rounds(learner, 30, 12.0)
    assert learner.calls == 200


def test_an_upstream_that_became_slow_for_good_is_not_held_to_its_youth() -> None:
    learner = Learner(64)
    rounds(learner, 5, 10.0)
    rounds(learner, 100, 40.0)
    assert learner.calls == 64


def test_long_answers_are_not_slow_ones() -> None:
    learner = Learner(200)
    for number in range(40):
        tokens = 10 if number % 2 else 1_000
        learner.observe(float(number), learner.calls, [Ended(100, tokens, (4.5 + tokens) * 10.0)] * 64, 0)
    assert learner.calls == 200


def test_a_limit_that_is_not_used_does_not_grow() -> None:
    learner = Learner(200)
    rounds(learner, 20, 10.0, share=0.3)
    assert learner.calls == SAFE_CALLS


def test_refusals_of_one_round_trip_halve_once() -> None:
    learner = Learner(64, start=64)
    learner.observe(0.0, 64, [], 20)
    learner.observe(500.0, 40, [], 20)
    assert learner.calls == 32
    learner.observe(2_000.0, 32, [], 1)
    assert learner.calls == 16


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 500),
    st.lists(st.tuples(st.floats(0.0, 1e4), st.integers(0, 1000), st.integers(0, 9), st.floats(0.0, 1e7)), max_size=60),
)
def test_it_is_never_stuck_and_never_beyond_its_ceiling(
    ceiling: int, history: list[tuple[float, int, int, float]]
) -> None:
    learner, now_ms = Learner(ceiling), 0.0
    for elapsed_ms, in_flight, refusals, latency_ms in history:
        now_ms += elapsed_ms
        learner.observe(now_ms, in_flight, [Ended(100, 10, latency_ms)] * 9, refusals)
        assert 1 <= learner.calls <= ceiling
    # The pace it has learned may be absurd; steady answers bring it back all the same.
    rounds(learner, 400, 10.0, now_ms=now_ms)
    assert learner.calls == ceiling
