"""What a client hears of a call that came to nothing: one status and one code for each way in which that happens."""

from __future__ import annotations

import pytest

from tidegate.core import errors
from tidegate.upstream.routing.deployment_state import FAILING, TLS_REJECTED
from tidegate.web.gateway.upstream_problems import own_words, problem_of

SAYS_WHY = b'{"error":{"message":"No."}}'


@pytest.mark.parametrize(
    ("error", "status", "code", "words"),
    [
        (errors.Withheld("x"), 429, "budget_spent", "limit of requests or tokens"),
        (errors.Withheld("x", code="budget_reserved"), 429, "budget_reserved", "set aside for calls in flight"),
        (
            errors.Withheld("x", code="max_parallel_requests_exceeded"),
            429,
            "max_parallel_requests_exceeded",
            "All parallel calls",
        ),
        (errors.Withheld("x", code="limits_unavailable"), 503, "limits_unavailable", "what the limits still allow"),
        (errors.Throttled("no gap", code="flex_unavailable"), 429, "flex_unavailable", "No gap."),
        (errors.Throttled("x", code="upstream_drained"), 503, "upstream_drained", "out of use"),
        (errors.Throttled("x"), 429, "upstream_throttled", "is busy"),
        (errors.PoolExhausted("x"), 503, "upstream_pool_timeout", "Every connection"),
        (errors.KeyRejected("x"), 503, "upstream_key_rejected", "gateway's own key"),
        (errors.Unavailable("x", code=FAILING), 503, FAILING, "answered the last calls with errors"),
        (errors.Unavailable("x", code=TLS_REJECTED), 503, TLS_REJECTED, "TLS certificate"),
        (errors.Unavailable("x"), 503, "upstream_unavailable", "No server of this model can be reached"),
        (errors.Overspent("the budget has 3 USD left"), 429, "insufficient_quota", "The budget has 3 USD left."),
        *((errors.Refused("no", status=status), status, "upstream_refused", "No.") for status in (400, 499)),
        *((errors.Refused("no", status=status), 502, "upstream_refused", "elsewhere") for status in (399, 500)),
        (errors.BrokenAnswer("x"), 502, "invalid_upstream_response", "is no answer"),
        *(
            (errors.Ambiguous("x", status=one), one, "upstream_ambiguous", "overloaded or not ready")
            for one in (503, 529)
        ),
        (errors.Ambiguous("x", status=504), 504, "upstream_ambiguous", "failed with status 504"),
        (errors.Ambiguous("x", status=500), 502, "upstream_ambiguous", "failed with status 500"),
        (errors.Ambiguous("x"), 502, "upstream_ambiguous", "broke off"),
    ],
)
def test_every_end_has_its_status_its_code_and_its_words(
    error: errors.UpstreamError, status: int, code: str, words: str
) -> None:
    problem = problem_of(error)
    assert (problem.status, problem.code) == (status, code)
    assert words in problem.message


@pytest.mark.parametrize(
    ("wait_ms", "retry_after_s"), [(None, None), (0, 1), (1, 1), (1_000, 1), (1_001, 2), (59_001, 60)]
)
def test_a_client_is_never_asked_back_too_early(wait_ms: int | None, retry_after_s: int | None) -> None:
    assert problem_of(errors.Throttled("x", retry_after_ms=wait_ms)).retry_after_s == retry_after_s


@pytest.mark.parametrize(
    ("error", "is_shown"),
    [
        *((errors.Refused("x", status=status, body=b"any words"), True) for status in (400, 499)),
        *((errors.Throttled("x", status=status, body=b"any words"), status == 429) for status in (399, 429, 500)),
        (errors.Refused("x", status=400), False),
        (errors.Ambiguous("x", status=500, body=SAYS_WHY), True),
        (errors.Ambiguous("x", status=400, body=SAYS_WHY), True),
        (errors.Ambiguous("x", status=399, body=SAYS_WHY), False),
        (errors.Ambiguous("x", status=500, body=b"<html>proxy-7.internal</html>"), False),
        (errors.Unavailable("x", status=404, body=SAYS_WHY), False),
    ],
)
def test_the_engines_own_words_are_passed_on_where_they_are_the_clients(
    error: errors.UpstreamError, is_shown: bool
) -> None:
    assert own_words(error) == (error.body if is_shown else None)
