"""The breaker and the retry budget in virtual time."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.upstream.routing.deployment_state import RetryBudget, RetryBudgetPolicy
from tidegate.upstream.routing.health import Breaker, BreakerPolicy, BreakerState


def opened(now_ms: float = 0) -> Breaker:
    breaker = Breaker(BreakerPolicy())
    for _ in range(BreakerPolicy().consecutive_failures_max):
        breaker.failed(now_ms)
    assert breaker.is_open
    return breaker


def test_it_opens_at_the_fifth_failure_in_a_row_and_not_before() -> None:
    breaker = Breaker(BreakerPolicy())
    assert [breaker.failed(0) for _ in range(4)] == [False] * 4
    assert not breaker.is_open
    assert breaker.failed(0)
    assert breaker.state is BreakerState.OPEN
    assert not breaker.failed(0)


def test_a_success_in_between_starts_the_count_again() -> None:
    breaker = Breaker(BreakerPolicy(share_calls_min=1000))
    for _ in range(50):
        assert not any(breaker.failed(0) for _ in range(4))
        breaker.succeeded()


def test_it_opens_at_half_the_calls_failing_over_enough_of_them() -> None:
    breaker = Breaker(BreakerPolicy())
    opened_at = None
    for number in range(40):
        breaker.succeeded()
        if breaker.failed(number * 10):
            opened_at = number
            break
    assert opened_at is not None
    assert 2 * (opened_at + 1) >= BreakerPolicy().share_calls_min


@pytest.mark.parametrize("minutes", [1, 60, 24 * 60])
def test_an_outage_of_any_length_gets_one_probe_per_interval_and_ends_by_itself(minutes: int) -> None:
    breaker = opened()
    probes = []
    for second in range(minutes * 60):
        now = second * 1000.0
        if breaker.ready_at_ms <= now:
            probes.append(now)
            breaker.begin_probe(now)
            assert breaker.state is BreakerState.PROBING
            breaker.failed(now)
            breaker.end_probe()
    assert all(later - earlier >= 5_000 for earlier, later in itertools.pairwise(probes))
    assert len(probes) >= minutes * 60 / 5 - 2
    assert breaker.is_open
    breaker.begin_probe(probes[-1] + 5_000)
    assert breaker.succeeded()
    breaker.end_probe()
    assert breaker.ready_at_ms == 0
    assert breaker.state is BreakerState.CLOSED


def test_a_hanging_probe_does_not_hold_back_the_next() -> None:
    breaker = opened()
    breaker.begin_probe(5_000)
    assert breaker.ready_at_ms == 10_000


def test_a_rejected_key_pauses_with_rarer_probes_until_it_works() -> None:
    breaker = Breaker(BreakerPolicy())
    assert breaker.key_rejected(0)
    assert breaker.state is BreakerState.PAUSED
    assert breaker.ready_at_ms == 60_000
    assert not breaker.key_rejected(10)
    breaker.begin_probe(60_010)
    assert breaker.ready_at_ms == 120_010
    breaker.end_probe()
    assert breaker.succeeded()
    assert not breaker.is_open
    for _ in range(BreakerPolicy().consecutive_failures_max):
        breaker.failed(130_000)
    assert (breaker.state, breaker.is_paused) == (BreakerState.OPEN, False), (
        "the key works: what fails now is the server"
    )
    breaker.begin_probe(135_000)
    assert breaker.ready_at_ms == 140_000


def test_successes_of_long_ago_do_not_hide_a_failing_hour() -> None:
    breaker = Breaker(BreakerPolicy(consecutive_failures_max=1000))
    for _ in range(100_000):
        breaker.succeeded()
    for number in range(20):
        if breaker.failed(100_000 + number):
            return
    pytest.fail("twenty failures of twenty calls must open it")


def test_three_retries_are_always_allowed_and_a_tenth_of_first_attempts_besides() -> None:
    budget = RetryBudget(RetryBudgetPolicy())
    taken = 0
    while budget.allows_retry(500):
        budget.count(500, is_retry=True)
        taken += 1
    assert taken == 3
    for _ in range(100):
        budget.count(600, is_retry=False)
    while budget.allows_retry(700):
        budget.count(700, is_retry=True)
        taken += 1
    assert taken == 13
    assert not budget.allows_retry(59_999)
    assert budget.allows_retry(62_000)


def test_what_was_no_attempt_is_given_back() -> None:
    budget = RetryBudget(RetryBudgetPolicy(share=1.0, retries_min=0))
    first = budget.count(0, is_retry=False)
    assert budget.allows_retry(0)
    budget.undo(first)
    assert not budget.allows_retry(0)
    budget.count(0, is_retry=False)
    retry = budget.count(0, is_retry=True)
    assert not budget.allows_retry(0)
    budget.undo(retry)
    assert budget.allows_retry(0)


def test_a_first_attempt_counts_no_longer_than_the_window_and_a_retry_no_shorter() -> None:
    firsts = RetryBudget(RetryBudgetPolicy(share=0.1, retries_min=0))
    for _ in range(10):
        firsts.count(500, is_retry=False)
    assert firsts.allows_retry(59_999)
    assert not firsts.allows_retry(60_000)
    retries = RetryBudget(RetryBudgetPolicy(share=0.1, retries_min=1))
    retries.count(500, is_retry=True)
    assert not retries.allows_retry(60_999)
    assert retries.allows_retry(61_000)


def test_calls_are_counted_in_the_second_in_which_they_go_out() -> None:
    budget = RetryBudget(RetryBudgetPolicy())
    for is_retry in (False, False, True):
        budget.count(500, is_retry=is_retry)
    assert budget.attempts(60_999) == 3
    assert budget.attempts(61_000) == 0
    # Nothing was asked in between: the call itself moves the window.
    budget.count(200_000, is_retry=False)
    assert budget.attempts(200_000) == 1
    assert budget.attempts(260_999) == 1


def test_what_is_given_back_comes_from_its_own_count_and_only_once() -> None:
    budget = RetryBudget(RetryBudgetPolicy(share=0.0, retries_min=1))
    first, retry = budget.count(0, is_retry=False), budget.count(0, is_retry=True)
    budget.undo(first)
    assert budget.attempts(0) == 1
    assert not budget.allows_retry(0)
    assert budget.attempts(61_000) == 0
    # Its second has left the window, and nothing of it is left to be given back.
    budget.undo(retry)
    budget.undo(first)
    assert budget.attempts(61_000) == 0


def test_what_is_taken_back_twice_takes_nothing_of_another_kind_along() -> None:
    budget = RetryBudget(RetryBudgetPolicy())
    first, retry = (budget.count(1_000, is_retry=is_retry) for is_retry in (False, True))
    for undone, left in ((retry, 1), (retry, 1), (first, 0), (first, 0)):
        budget.undo(undone)
        assert budget.attempts(1_000) == left


def test_a_call_that_is_taken_back_late_takes_nothing_of_another_second_back() -> None:
    budget = RetryBudget(RetryBudgetPolicy(share=0.0, retries_min=1))
    old = budget.count(0, is_retry=True)
    budget.count(61_000, is_retry=True)
    budget.undo(old)
    assert not budget.allows_retry(61_000)


@given(st.lists(st.tuples(st.integers(0, 20_000), st.booleans()), max_size=300))
def test_no_minute_before_a_retry_holds_more_than_its_share(steps: list[tuple[int, bool]]) -> None:
    policy = RetryBudgetPolicy()
    budget = RetryBudget(policy)
    now = 1_000_000
    firsts: list[int] = []
    retries: list[int] = []
    for step_ms, is_retry in steps:
        now += step_ms
        if not is_retry:
            budget.count(now, is_retry=False)
            firsts.append(now)
        elif budget.allows_retry(now):
            budget.count(now, is_retry=True)
            retries.append(now)
            recent_firsts = sum(at > now - 60_000 for at in firsts)
            recent_retries = sum(at > now - 60_000 for at in retries)
            assert recent_retries <= policy.retries_min + policy.share * recent_firsts
