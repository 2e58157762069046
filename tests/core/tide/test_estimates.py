"""What the tide learns about an engine: what a call costs the others, and when a call has its first token."""

from __future__ import annotations

import math

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tidegate.core.tide.prefill import MARGIN, PrefillRate
from tidegate.core.tide.signals import EngineSample
from tidegate.core.tide.steps import StepCost

ANY = st.floats(allow_nan=True, allow_infinity=True)


def engine(base_ms: float, sequence_ms: float, prompt_token_ms: float) -> StepCost:
    """A cost learned from an engine with these coefficients, under many loads."""
    cost = StepCost()
    for number in range(400):
        # Every other window has no prompt in it.
        running, prompt_tokens = 1 + number * 7 % 120, number * 31 % 500 * (number % 2)
        cost.load.add(running, 200.0, has_prompts=prompt_tokens > 0)
        between_ms = base_ms + sequence_ms * running + prompt_token_ms * prompt_tokens
        cost.learn(
            EngineSample(
                0.0,
                0,
                running,
                0.0,
                between_tokens_ms=between_ms,
                prompt_tokens_per_s=prompt_tokens / between_ms * 1000,
            )
        )
    return cost


@pytest.mark.parametrize("slower", [0.5, 1.0, 4.0, 20.0])
def test_the_slowdown_follows_the_engine(slower: float) -> None:
    cost = engine(5.0 * slower, 0.03 * slower, 0.02 * slower)
    assert cost.slowdown(50, 0.0) == pytest.approx(0.3, rel=0.1)
    assert cost.slowdown(0, 1.0) == pytest.approx(0.02 * slower, rel=0.1)


def test_prompts_that_cannot_be_distinguished_change_nothing_about_a_sequence() -> None:
    cost = StepCost()
    for number in range(400):
        running = 1 + number * 7 % 40
        has_prompts = number % 2 == 1
        cost.load.add(running, 200.0, has_prompts=has_prompts)
        between_ms = 5.0 + 0.06 * running + (9.0 if has_prompts else 0.0)
        cost.learn(EngineSample(0.0, 0, running, 0.0, between_tokens_ms=between_ms))
    assert cost.slowdown(10, 0.0) == pytest.approx(0.12, rel=0.05)


def test_many_sequences_for_a_moment_weigh_as_much_as_the_tokens_that_they_had() -> None:
    cost = StepCost()
    for number in range(400):
        many = 10 + number * 7 % 40
        cost.load.add(1, 100.0, has_prompts=False)
        cost.load.add(many, 100.0, has_prompts=False)
        tokens = 100.0 / (5.0 + 0.06), many * 100.0 / (5.0 + 0.06 * many)
        between_ms = (1 + many) * 100.0 / sum(tokens)
        cost.learn(EngineSample(0.0, 0, 1.0, 0.0, between_tokens_ms=between_ms))
    assert cost.slowdown(10, 0.0) == pytest.approx(0.12, rel=0.1)


def test_before_anything_was_seen_it_expects_a_slowdown() -> None:
    assert 0.05 < StepCost().slowdown(20, 0.0) < 0.2
    assert StepCost().slowdown(0, 0.0) == 0.0


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(ANY, ANY, ANY), max_size=60))
# Beside prompts, so many sequences that their squares are infinite, and so few prompt tokens that their cost is zero.
@example([(math.inf, 1.0, 1.0)])
@example([(1e200, 1.0, 1_000.0)])
@example([(1.0, 1.0, 5e-321)])
def test_no_sample_makes_the_cost_absurd(samples: list[tuple[float, float, float]]) -> None:
    cost = StepCost()
    for running, between_ms, per_s in samples:
        cost.load.add(abs(running), 200.0, has_prompts=False)
        cost.learn(EngineSample(0.0, 0, running, between_tokens_ms=between_ms, prompt_tokens_per_s=per_s))
    for slowdown in (cost.slowdown(50, 0.0), cost.slowdown(0, 1.0)):
        assert math.isfinite(slowdown)
        assert slowdown > 0.0


def test_first_tokens_are_learned_where_they_are_seen() -> None:
    prefill = PrefillRate()
    for number in range(200):
        tokens = 100 + number * 37 % 4_000
        prefill.learn_first_token(tokens, 8.0 + 0.05 * tokens)
    assert prefill.first_token_ms(2_000) == pytest.approx(MARGIN * 108.0, rel=0.05)


def test_first_tokens_are_estimated_from_whole_calls() -> None:
    prefill = PrefillRate()
    for number in range(300):
        tokens, answer = 100 + number * 37 % 4_000, number * 13 % 300
        prefill.learn_call(tokens, answer, 8.0 + 0.05 * tokens + 12.0 * answer)
    assert prefill.first_token_ms(2_000) == pytest.approx(MARGIN * 108.0, rel=0.1)


def test_a_slow_engine_is_expected_to_be_slow_in_prompts_too() -> None:
    quick, slow = PrefillRate(), PrefillRate()
    for number in range(50):
        answer = 100 + number
        quick.learn_call(500, answer, 5.0 * answer)
        slow.learn_call(500, answer, 50.0 * answer)
    assert slow.first_token_ms(1_000) > 3 * quick.first_token_ms(1_000)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(ANY, ANY, ANY), max_size=60))
def test_no_call_makes_the_estimate_absurd(calls: list[tuple[float, float, float]]) -> None:
    prefill = PrefillRate()
    for tokens, answer, latency_ms in calls:
        prefill.learn_call(tokens, answer, latency_ms)  # type: ignore[arg-type]
    estimate_ms = prefill.first_token_ms(1_000)
    assert math.isfinite(estimate_ms)
    assert estimate_ms > 0.0
