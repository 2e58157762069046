"""What a process knows of spent budgets: until when, which of them, and for how long others are likely to wait for them too."""

from __future__ import annotations

from tests.support.ports import HandClock
from tidegate.core.budgets.budget import Budget, Limit, LimitBound, Period
from tidegate.upstream.budgets.spent_budgets import ASK_AGAIN_MS, CONTENDED_MS, FREED_MS, SpentBudgets

TENANT, KEY = (Budget(bound, "x", (Limit(Period.MINUTE, 10),)) for bound in (LimitBound.TENANT, LimitBound.KEY))


def test_nothing_is_spent_at_first() -> None:
    spent = SpentBudgets(HandClock())
    assert not spent
    assert spent.until_ms((TENANT, KEY)) == 0.0
    assert spent.first((TENANT, KEY), 0.5) is None
    assert not spent.are_contended((TENANT, KEY), 0.5)


def test_the_latest_moment_binds_and_the_first_budget_is_named() -> None:
    clock = HandClock()
    now_ms, spent = clock.monotonic_ms(), SpentBudgets(clock)
    spent.note(KEY, now_ms + 900)
    assert spent.until_ms((TENANT,)) == spent.until_ms(()) == 0.0
    spent.note(TENANT, now_ms + 500)
    spent.note(TENANT, now_ms + 300)
    assert spent
    assert spent.until_ms((TENANT, KEY)) == now_ms + 900
    assert spent.first((TENANT, KEY), now_ms) == (TENANT, now_ms + 500)
    assert spent.first((TENANT, KEY), now_ms + 500) == (KEY, now_ms + 900)
    assert spent.by_id() == {TENANT.id: now_ms + 500, KEY.id: now_ms + 900}
    clock.advance(500)
    assert spent.by_id() == {KEY.id: now_ms + 900}


def test_a_budget_that_was_spent_is_contended_for_a_while() -> None:
    clock = HandClock()
    now_ms, spent = clock.monotonic_ms(), SpentBudgets(clock)
    spent.note(TENANT, now_ms + 500)
    ends_ms = now_ms + 500 + CONTENDED_MS
    assert spent.are_contended((KEY, TENANT), ends_ms - 1)
    assert not spent.are_contended((KEY, TENANT), ends_ms)
    assert not spent.are_contended((KEY,), now_ms)


def test_what_is_given_back_brings_the_next_question_forward_but_not_to_now() -> None:
    clock = HandClock()
    now_ms, spent = clock.monotonic_ms(), SpentBudgets(clock)
    spent.note(TENANT, now_ms + 60_000)
    spent.note(KEY, now_ms + FREED_MS - 1)
    spent.free((TENANT, KEY))
    assert spent.until_ms((TENANT,)) == now_ms + FREED_MS
    assert spent.until_ms((KEY,)) == now_ms + FREED_MS - 1
    spent.renew(TENANT)
    assert spent.until_ms((TENANT,)) == 0.0


def test_a_budget_of_tokens_is_asked_again_soon_and_still_names_the_moment_at_which_it_frees_by_itself() -> None:
    clock = HandClock()
    now_ms, spent = clock.monotonic_ms(), SpentBudgets(clock)
    tokens = Budget(LimitBound.TEAM, "x", (Limit(Period.HOUR, 10, 1_000),))
    until_ms = now_ms + 600_000
    spent.note(tokens, until_ms)
    spent.note(KEY, until_ms)
    clock.advance(ASK_AGAIN_MS - 1)
    assert spent.until_ms((tokens,)) == until_ms
    assert spent.first((tokens,), clock.monotonic_ms()) == (tokens, until_ms)
    clock.advance(1)
    assert spent.until_ms((tokens,)) == 0.0
    assert spent.first((tokens, KEY), clock.monotonic_ms()) == (KEY, until_ms)
    assert spent.by_id() == {tokens.id: until_ms, KEY.id: until_ms}
    spent.note(tokens, until_ms - 60_000)
    assert spent.until_ms((tokens,)) == until_ms - 60_000
