"""What limits have left, as headers."""

from __future__ import annotations

import pytest

from tidegate.core.budgets.budget import NEVER_MS, Budget, BudgetRequest, Limit, LimitBound, LimitRoom, Period, SideRoom
from tidegate.core.budgets.deal import deal
from tidegate.core.budgets.ledger import Ledger
from tidegate.web.http.rate_limits import limit_headers

BUDGET = Budget(LimitBound.KEY, "k", (Limit(Period.MINUTE, requests=10, tokens=1000),))


@pytest.mark.parametrize(
    ("ms", "text"), [(0, "0ms"), (20, "20ms"), (7_660, "7.66s"), (360_000, "6m0s"), (3_600_000, "1h0m0s")]
)
def test_durations_are_written_as_openai_does(ms: int, text: str) -> None:
    room = LimitRoom(BUDGET, Period.MINUTE, SideRoom(10, 1, ms), None)
    assert dict(limit_headers([room]))[b"x-ratelimit-reset-requests"] == text.encode()


def test_nothing_is_said_of_limits_that_are_not_known() -> None:
    assert limit_headers([]) == []
    assert limit_headers([LimitRoom(BUDGET, Period.MINUTE, None, None)]) == []


def test_a_grant_tells_what_is_left_after_it_and_when_all_of_it_is_back() -> None:
    ledgers = {BUDGET.id: Ledger()}
    [grant] = deal([BudgetRequest((BUDGET,), 4, 300)], ledgers, 1_000_000)
    [room] = grant.rooms
    assert room.requests is not None
    assert room.tokens is not None
    assert (room.requests.left, room.tokens.left) == (6, 700)
    assert 60_000 <= room.requests.resets_ms <= 61_000
    later = room.later(30_000).requests
    assert later is not None
    assert (later.left, later.resets_ms) == (6, room.requests.resets_ms - 30_000)
    assert room.later(90_000).requests == SideRoom(10, 10, 0)
    # One that took more than there was is paid for before all of the room is back.
    [short] = deal([BudgetRequest((BUDGET,), 1, 5_000)], ledgers, 1_000_000)
    tokens = short.rooms[0].tokens
    assert tokens is not None
    assert tokens.left == 0
    assert 60_000 < tokens.resets_ms < NEVER_MS
