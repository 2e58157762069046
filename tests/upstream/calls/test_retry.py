"""The retry decision, as properties over every class, count and moment."""

import inspect

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.core import errors
from tidegate.core.errors import (
    Ambiguous,
    AnswerTooLong,
    AnswerUnusable,
    BrokenAnswer,
    HandedBack,
    KeyRejected,
    Overspent,
    PoolExhausted,
    RecordedElsewhere,
    Refused,
    RetryBudgetSpent,
    SurchargeUnpriced,
    Throttled,
    Unavailable,
    Unbounded,
    Untranslatable,
    Withheld,
)
from tidegate.core.retry import RECORDED_MS, GiveUp, RetryAt, RetryPolicy, decide
from tidegate.worker.leased_work import SHORT_WAIT_MS

POLICY = RetryPolicy()
COUNTED = (Ambiguous, BrokenAnswer, AnswerUnusable, AnswerTooLong)
UNCOUNTED = (Throttled, Withheld, RetryBudgetSpent, Unavailable, KeyRejected, PoolExhausted, HandedBack)
FINAL = (RecordedElsewhere, Refused, Overspent, SurchargeUnpriced, Unbounded, Untranslatable)

moments = st.integers(0, 2**42)
counts = st.integers(0, 100)
jitters = st.floats(0, 1)
waits = st.none() | st.integers(-(10**12), 10**15)


def test_every_class_of_upstream_error_is_decided_on_purpose() -> None:
    every = {
        kind
        for _, kind in inspect.getmembers(errors, inspect.isclass)
        if issubclass(kind, errors.UpstreamError) and kind is not errors.UpstreamError
    }
    assert every == {*COUNTED, *UNCOUNTED, *FINAL}
    assert all(issubclass(kind, Refused) for kind in (Overspent, SurchargeUnpriced, Unbounded, Untranslatable))


def test_what_another_process_recorded_goes_back_with_its_slice() -> None:
    error = RecordedElsewhere("recorded")
    assert decide(error, 0, 1_000, 90_000, POLICY, 0.0) == RetryAt(7_000, counts=False)
    assert decide(error, 0, 1_000, 2_000, POLICY, 0.0) == RetryAt(2_000, counts=False)
    assert RECORDED_MS > SHORT_WAIT_MS


@given(counts, moments, moments, jitters, waits)
def test_a_refusal_is_final_and_keeps_its_words(
    attempts: int, now: int, expires: int, jitter: float, wait: int | None
) -> None:
    error = Refused("no such model", status=404, retry_after_ms=wait)
    assert decide(error, attempts, now, expires, POLICY, jitter) == GiveUp("upstream_refused", "no such model")


@given(st.sampled_from(UNCOUNTED), counts, moments, st.integers(1, 2**40), jitters, waits)
def test_waiting_never_uses_up_attempts_and_ends_only_at_the_deadline(
    kind: type[errors.UpstreamError], attempts: int, now: int, left: int, jitter: float, wait: int | None
) -> None:
    verdict = decide(kind("wait", retry_after_ms=wait), attempts, now, now + left, POLICY, jitter)
    assert isinstance(verdict, RetryAt)
    assert not verdict.counts
    gone = decide(kind("wait", retry_after_ms=wait), attempts, now + left, now + left, POLICY, jitter)
    assert isinstance(gone, GiveUp)
    assert gone.code == "batch_expired"


@given(st.sampled_from(COUNTED + UNCOUNTED), moments, st.integers(1, 2**40), jitters, waits)
def test_a_retry_is_never_before_retry_after_nor_past_the_deadline(
    kind: type[errors.UpstreamError], now: int, left: int, jitter: float, wait: int | None
) -> None:
    verdict = decide(kind("x", retry_after_ms=wait), 0, now, now + left, POLICY, jitter)
    assert isinstance(verdict, RetryAt)
    asked = min(max(wait or 0, 0), POLICY.retry_after_ms_max)
    assert now <= verdict.at_ms <= now + left
    assert verdict.at_ms >= min(now + asked, now + left)


@pytest.mark.parametrize(
    ("kind", "tries"), [(Ambiguous, 3), (BrokenAnswer, 2), (AnswerUnusable, 2), (AnswerTooLong, 2)]
)
def test_counted_failures_end_after_their_tries(kind: type[errors.UpstreamError], tries: int) -> None:
    attempts = 0
    while isinstance(verdict := decide(kind("broke"), attempts, 0, 10**9, POLICY, 0.5), RetryAt):
        assert verdict.counts
        attempts += 1
    assert attempts + 1 == tries
    assert verdict.code == kind.reason
    assert f"{tries} tries" in verdict.message


@given(st.integers(0, 60), jitters)
def test_backoff_is_fully_jittered_and_bounded(attempts: int, jitter: float) -> None:
    policy = RetryPolicy(attempts_max=1000)
    verdict = decide(Ambiguous("broke"), attempts, 0, 10**12, policy, jitter)
    assert isinstance(verdict, RetryAt)
    assert verdict.at_ms <= min(policy.backoff_ms_max, policy.backoff_ms * 2**attempts) * jitter
    assert decide(Ambiguous("broke"), attempts, 0, 10**12, policy, 0.0) == RetryAt(0, True)


@given(st.integers(0, 60), jitters)
def test_backoff_doubles_with_each_counted_failure(attempts: int, jitter: float) -> None:
    policy = RetryPolicy(attempts_max=1000)
    grown_ms = min(policy.backoff_ms_max, policy.backoff_ms * 2**attempts)
    assert decide(Ambiguous("broke"), attempts, 0, 10**12, policy, jitter) == RetryAt(int(grown_ms * jitter), True)


@given(st.sampled_from(UNCOUNTED), st.integers(0, 60_000), jitters)
def test_jitter_comes_on_top_of_retry_after(kind: type[errors.UpstreamError], wait: int, jitter: float) -> None:
    """Calls that were given the same moment must not all come back at it."""
    verdict = decide(kind("wait", retry_after_ms=wait), 0, 0, 10**12, POLICY, jitter)
    assert verdict == RetryAt(wait + int(POLICY.deferral_ms * jitter), False)


def test_one_try_says_so() -> None:
    verdict = decide(Ambiguous("broke"), 0, 0, 10, RetryPolicy(attempts_max=1), 0)
    assert verdict == GiveUp("upstream_ambiguous", "broke (given up after 1 try)")
