"""How failed items of a job are tried again that brings a policy of its own."""

from __future__ import annotations

import pytest

from tidegate.core.errors import Ambiguous, BrokenAnswer, Overspent, Refused, Throttled, Unavailable, UpstreamError
from tidegate.core.job_shape import JobRetry
from tidegate.core.retry import GiveUp, RetryAt, RetryPolicy, decide


def decided(error: UpstreamError, asked: JobRetry, attempts: int = 0, jitter: float = 1.0) -> RetryAt | GiveUp:
    return decide(error, attempts, 0, 10**9, RetryPolicy().of_job(asked), jitter)


def test_attempts_and_pauses_are_the_jobs_own() -> None:
    asked = JobRetry(attempts_max=5, backoff_ms=10, backoff_ms_max=25)
    for error in (Ambiguous("x", status=500), BrokenAnswer("x")):
        waits = [decided(error, asked, attempts) for attempts in range(5)]
        assert [one.at_ms for one in waits if isinstance(one, RetryAt)] == [10, 20, 25, 25]
        assert isinstance(waits[4], GiveUp)
    assert isinstance(decided(Ambiguous("x"), JobRetry(attempts_max=1)), GiveUp)
    # A shorter longest pause shortens the first one too.
    assert decided(Ambiguous("x"), JobRetry(backoff_ms_max=7)) == RetryAt(7, counts=True)


def test_a_pause_stays_at_its_longest_however_often_an_item_was_tried() -> None:
    asked = JobRetry(attempts_max=100_000, backoff_ms_max=25)
    assert decided(Ambiguous("x"), asked, 90_000) == RetryAt(25, counts=True)


@pytest.mark.parametrize(
    ("error", "again"),
    [
        (Ambiguous("x", status=500), True),
        (Ambiguous("x", status=502), False),
        (Ambiguous("x"), False),
        (Refused("x", status=404), True),
        (Refused("x", status=400), False),
        (BrokenAnswer("x"), True),
        (Overspent("x"), False),
        (Throttled("x", status=429), True),
        (Unavailable("x", status=503), True),
    ],
)
def test_codes_say_what_is_tried_again(error: UpstreamError, again: bool) -> None:
    asked = JobRetry(codes=("500", "404", "invalid_upstream_response", "budget_exceeded", "0"))
    assert isinstance(decided(error, asked), RetryAt if again else GiveUp)


def test_a_named_refusal_uses_up_attempts_and_waiting_for_capacity_never_does() -> None:
    asked = JobRetry(attempts_max=2, codes=("404",))
    assert decided(Refused("x", status=404), asked, 0) == RetryAt(500, counts=True)
    assert isinstance(decided(Refused("x", status=404), asked, 1), GiveUp)
    waiting = decided(Throttled("x", status=429), JobRetry(attempts_max=1, codes=()), 99)
    assert isinstance(waiting, RetryAt)
    assert not waiting.counts


def test_a_server_that_asks_for_more_than_a_day_gets_a_day() -> None:
    error = Throttled("x", status=429, retry_after_ms=10**12)
    assert decide(error, 0, 0, 10**9, RetryPolicy(), 0.0) == RetryAt(86_400_000, counts=False)
