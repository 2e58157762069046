"""Each verdict of policy: which one, whether it is the end, and that no order of calls passes a hard budget."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.core.policy_rules import (
    STATUSES,
    Code,
    KeyState,
    Payer,
    SpendBudget,
    affordable,
    judge,
    names_allowed,
    throttled,
)

NOW = 1_000_000


@pytest.mark.parametrize(
    ("key", "code", "retryable"),
    [
        (KeyState("k", deleted=True), Code.KEY_DELETED, False),
        (KeyState("k", revoked=True), Code.KEY_REVOKED, False),
        (KeyState("k", expires_at_ms=NOW), Code.KEY_EXPIRED, False),
        (KeyState("k", models=frozenset({"other"})), Code.MODEL_NOT_ALLOWED, False),
        (KeyState("k", resources=frozenset({"other"})), Code.RESOURCE_NOT_ALLOWED, False),
        (KeyState("k", budgets=(SpendBudget(Payer.TEAM, 10, 10),)), Code.BUDGET_EXCEEDED, False),
        (KeyState("k", budgets=(SpendBudget(Payer.USER, 10, 8),)), Code.BUDGET_EXCEEDED, False),
        (KeyState("k", budgets=(SpendBudget(Payer.KEY, 10, 2, 6),)), Code.BUDGET_RESERVED, True),
        (
            KeyState("k", budgets=(SpendBudget(Payer.KEY, 10, 2, 6), SpendBudget(Payer.ORGANIZATION, 10, 11))),
            Code.BUDGET_EXCEEDED,
            False,
        ),
        (KeyState("k", parallel_max=2, parallel_in_use=2), Code.PARALLEL_EXCEEDED, True),
    ],
)
def test_what_is_denied_and_whether_for_good(key: KeyState, code: Code, retryable: bool) -> None:
    denied = judge(key, "m", "r", NOW, 3)
    assert denied is not None
    assert (denied.code, denied.retryable) == (code, retryable)
    assert denied.message.count(": ") >= 1, "a denial says what to do next"


def test_what_is_allowed() -> None:
    key = KeyState(
        "k",
        frozenset({"m"}),
        frozenset({"r"}),
        NOW + 1,
        budgets=(SpendBudget(Payer.KEY, 10, 2, 5), SpendBudget(Payer.TEAM, 9, 6)),
        parallel_max=2,
        parallel_in_use=1,
    )
    assert judge(key, "m", "r", NOW, 3) is None
    assert judge(KeyState("k"), "anything", "", NOW) is None


def test_a_spent_budget_denies_even_what_costs_nothing() -> None:
    key = KeyState("k", budgets=(SpendBudget(Payer.KEY, 0),))
    denied = judge(key, "m", "r", NOW, 0)
    assert denied is not None
    assert denied.code is Code.BUDGET_EXCEEDED


def test_a_used_up_rate_says_for_how_long() -> None:
    denied = throttled(1500)
    assert (denied.code, denied.retryable, denied.wait_ms, denied.status) == (Code.RATE_EXCEEDED, True, 1500, 429)
    assert throttled(-5).wait_ms == 0


def test_every_code_has_a_status() -> None:
    assert set(STATUSES) == set(Code)


@given(
    st.integers(0, 300),
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=40),
    st.data(),
)
def test_no_order_of_calls_and_answers_passes_a_hard_budget(
    limit: int, calls: list[tuple[int, int]], data: st.DataObject
) -> None:
    """Each call's real cost is at most its bound; answers come in any order; a terminal denial is never wrong."""
    spent = reserved = 0
    in_flight: list[tuple[int, int]] = []
    for one, other in calls:
        bound, real = max(one, other), min(one, other)
        key = KeyState("k", budgets=(SpendBudget(Payer.KEY, limit, spent, reserved),))
        denied = judge(key, "m", "r", NOW, bound)
        if denied is None:
            reserved += bound
            in_flight.append((bound, real))
        elif not denied.retryable:
            assert spent >= limit or spent + bound > limit
        else:
            assert in_flight, "nobody waits for calls that are not there"
        for _ in range(data.draw(st.integers(0, len(in_flight)))):
            bound, real = in_flight.pop(data.draw(st.integers(0, len(in_flight) - 1)))
            reserved -= bound
            spent += real
        assert spent + reserved <= limit


@given(
    st.lists(st.builds(SpendBudget, st.sampled_from(Payer), *[st.integers(0, 100)] * 3), max_size=4),
    st.lists(st.integers(0, 50), max_size=20),
)
def test_a_slice_takes_as_many_as_every_budget_bears(budgets: list[SpendBudget], bounds: list[int]) -> None:
    count = affordable(budgets, bounds)
    assert 0 <= count <= len(bounds)
    for budget in budgets:
        taken = budget.spent_nano + budget.reserved_nano + sum(bounds[:count])
        assert taken <= budget.limit_nano or count == 0
    if count < len(bounds):
        key = KeyState("k", budgets=tuple(budgets))
        one_more = sum(bounds[: count + 1])
        assert judge(key, "m", "r", NOW, one_more) is not None or any(
            budget.spent_nano + budget.reserved_nano >= budget.limit_nano for budget in budgets
        )


def test_what_a_request_may_name_under_two_allowlists() -> None:
    routes = {"chat": "m", "mail": "n", "n": "n"}
    assert names_allowed(frozenset(), frozenset(), routes) is None
    assert names_allowed(frozenset("m"), frozenset(), routes) == frozenset({"m", "chat"})
    assert names_allowed(frozenset("mn"), frozenset(["chat", "other"]), routes) == frozenset({"chat"})
    assert names_allowed(frozenset(), frozenset(["mail"]), routes) == frozenset({"mail"})
    assert names_allowed(frozenset("m"), frozenset(["mail"]), routes) == frozenset(), (
        "nothing at all, which is not anything"
    )
