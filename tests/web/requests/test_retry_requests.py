"""Which items a retry runs again, by the body of its request."""

from __future__ import annotations

import pytest

from tidegate.core.job_controls import RetryChoice
from tidegate.web.requests.retry_requests import OUTCOMES, OperatorRetryRequest, RetryRequest, retry_choice

KIND = "0123456789abcdef"


@pytest.mark.parametrize(
    ("asked", "chosen"),
    [
        (RetryRequest(), RetryChoice(("failed",))),
        (RetryRequest(codes=[]), RetryChoice(("failed",))),
        (RetryRequest(codes=["x"]), RetryChoice(OUTCOMES, ("x",))),
        (RetryRequest(codes=["x"], outcomes=["expired"]), RetryChoice(("expired",), ("x",))),
        (OperatorRetryRequest(), RetryChoice(("failed",))),
        (OperatorRetryRequest(kinds=[KIND]), RetryChoice(OUTCOMES, (), (KIND,))),
    ],
)
def test_failed_items_run_again_or_all_of_what_is_named(asked: RetryRequest, chosen: RetryChoice) -> None:
    assert retry_choice(asked) == chosen


def test_equal_requests_in_other_words_are_the_same_choice() -> None:
    """An idempotency key is bound to what is chosen, not to how it is written."""
    one = OperatorRetryRequest(codes=["b", "a", "b"], outcomes=["expired", "failed"], kinds=[KIND, "0" * 16])
    other = OperatorRetryRequest(codes=["a", "b"], outcomes=["failed", "expired"], kinds=["0" * 16, KIND])
    assert retry_choice(one) == retry_choice(other)
