"""Budgets against a plain list of what was granted: no window of any alignment holds too much, and every wait is the exact one."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tidegate.core.budgets.ahead import CallsAhead, calls_take_ms
from tidegate.core.budgets.budget import (
    GRANT_MS,
    NEVER_MS,
    Budget,
    BudgetKind,
    BudgetRequest,
    Limit,
    LimitBound,
    Period,
    Settlement,
    SideRoom,
    with_limits,
)
from tidegate.core.budgets.counting import HOUR, MINUTE, calendar_index, calendar_start, fresh
from tidegate.core.budgets.deal import deal, settle
from tidegate.core.budgets.ledger import Ledger
from tidegate.core.budgets.money import MoneyLedger

START_MS = 1_800_000_000_123
PERIOD_MS = {Period.MINUTE: 60_000, Period.HOUR: 3_600_000}
SLIDING = st.sampled_from((Period.MINUTE, Period.HOUR))
ANY_PERIOD = st.sampled_from(tuple(Period))


def stored(ledger: Ledger) -> Ledger:
    """As it comes back from the store."""
    packed = ledger.pack()
    again = Ledger.unpack(packed)
    assert not again.is_damaged
    assert again.pack() == packed
    return again


def gaps(period: Period) -> st.SearchStrategy[int]:
    """Mostly a small part of the period, sometimes about the whole of it."""
    whole = PERIOD_MS.get(period, 24 * 3_600_000)
    return st.one_of(
        st.integers(0, whole // 50), st.integers(whole - whole // 50, whole + whole // 50), st.just(3 * whole)
    )


@st.composite
def traffic(draw: st.DrawFn) -> tuple[Period, list[tuple[int, int, int]]]:
    """Asks as (time since the last, requests, when within the grant's life they are sent)."""
    period = draw(SLIDING)
    step = st.tuples(gaps(period), st.integers(1, 8), st.integers(0, GRANT_MS))
    return period, draw(st.lists(step, min_size=1, max_size=60))


@given(traffic(), st.integers(0, 20))
def test_no_window_of_any_alignment_holds_more_requests_than_the_limit(
    plan: tuple[Period, list[tuple[int, int, int]]], count_max: int
) -> None:
    period, steps = plan
    limit = Limit(period, requests=count_max)
    ledger, now, sent = Ledger(), START_MS, list[int]()
    for gap, requests, late in steps:
        now += gap
        ledger = stored(ledger)
        count = ledger.fits(limit, now, requests, 0)
        ledger.reserve(limit, now, count, 0)
        sent += [now + late] * count
    sent.sort()
    for first, moment in enumerate(sent):
        within = [later for later in sent[first:] if later <= moment + PERIOD_MS[period]]
        assert len(within) <= count_max


@given(traffic(), st.integers(1, 20))
def test_what_is_granted_is_what_a_list_of_grants_allows(
    plan: tuple[Period, list[tuple[int, int, int]]], count_max: int
) -> None:
    """Nothing is kept back: a count leaves one bucket after it must, at the latest."""
    period, steps = plan
    limit, span = Limit(period, requests=count_max), MINUTE if period is Period.MINUTE else HOUR
    ledger, now, granted = Ledger(), START_MS, list[int]()
    for gap, requests, _ in steps:
        now += gap
        kept_ms = PERIOD_MS[period] + GRANT_MS + span.bucket_ms
        room = count_max - sum(at > now - kept_ms for at in granted)
        count = ledger.fits(limit, now, requests, 0)
        assert count >= min(requests, room)
        ledger.reserve(limit, now, count, 0)
        granted += [now] * count


@pytest.mark.parametrize(
    ("period", "requests", "step_ms", "steps"),
    [(Period.MINUTE, 600, 50, 24_000), (Period.MINUTE, 7, 137, 9_000), (Period.HOUR, 36_000, 1_700, 22_000)],
)
def test_a_limit_that_is_always_asked_for_is_used_to_98_percent(
    period: Period, requests: int, step_ms: int, steps: int
) -> None:
    limit, ledger, now, granted = Limit(period, requests=requests), Ledger(), START_MS, 0
    for _ in range(steps):
        now += step_ms
        count = ledger.fits(limit, now, 1_000, 0)
        ledger.reserve(limit, now, count, 0)
        granted += count
    assert granted >= 0.98 * requests * (steps * step_ms) / PERIOD_MS[period]


@st.composite
def histories(draw: st.DrawFn) -> tuple[Limit, list[tuple[str, int, int, int]]]:
    limit = Limit(draw(ANY_PERIOD), draw(st.one_of(st.none(), st.integers(0, 9))), draw(st.integers(0, 500)))
    step = st.tuples(
        st.sampled_from(("ask", "ask", "settle")), gaps(limit.period), st.integers(1, 5), st.integers(0, 900)
    )
    return limit, draw(st.lists(step, min_size=1, max_size=40))


def live(
    limit: Limit, steps: list[tuple[str, int, int, int]], ledger: Ledger, *, look_every_ms: int | None = None
) -> int:
    """Asks, and settlements of grants with more or less used than reserved. Says what time it is at the end."""
    now = START_MS
    grants: list[tuple[int, int, int]] = []
    for what, gap, number, tokens in steps:
        end = now + gap
        while look_every_ms and now < end:
            now = min(end, now + look_every_ms)
            ledger.fits(limit, now, 1, 1)
        now = end
        if what == "ask":
            count = ledger.fits(limit, now, number, tokens)
            ledger.reserve(limit, now, count, count * tokens)
            grants.append((now, count, count * tokens))
        elif grants:
            at, count, reserved = grants.pop(0)
            ledger.settle_usage(limit, now, at, min(count, number - 1), reserved, tokens * number)
    return now


@given(histories(), st.integers(0, 900))
def test_a_wait_is_the_exact_one(history: tuple[Limit, list[tuple[str, int, int, int]]], each: int) -> None:
    limit, steps = history
    ledger = Ledger()
    now = live(limit, steps, ledger)
    wait_ms = ledger.wait(limit, now, each)
    packed = ledger.pack()
    assert (ledger.fits(limit, now, 1, each) == 1) == (wait_ms == 0)
    if wait_ms == NEVER_MS:
        assert limit.requests == 0 or limit.tokens == 0 or limit.period is Period.LIFETIME
    elif wait_ms:
        assert Ledger.unpack(packed).fits(limit, now + wait_ms - 1, 1, each) == 0
        assert Ledger.unpack(packed).fits(limit, now + wait_ms, 1, each) == 1


@given(histories())
def test_looking_at_a_ledger_at_any_moment_changes_nothing(
    history: tuple[Limit, list[tuple[str, int, int, int]]],
) -> None:
    limit, steps = history
    watched, left_alone = Ledger(), Ledger()
    now = live(limit, steps, watched, look_every_ms=PERIOD_MS.get(limit.period, 86_400_000) // 7)
    live(limit, steps, left_alone)
    for ledger in (watched, left_alone):
        ledger.fits(limit, now, 1, 1)
    assert watched.pack() == left_alone.pack()


@given(SLIDING, st.lists(st.tuples(st.integers(0, 30_000), st.integers(1, 400)), min_size=3, max_size=60))
def test_a_debt_is_paid_by_the_following_grants(period: Period, steps: list[tuple[int, int]]) -> None:
    """Whatever is really used: over a long time it is never more than the limit for each kept window, plus the last debt."""
    limit, kept_ms = Limit(period, tokens=100), PERIOD_MS[period] + GRANT_MS
    ledger, now, used = Ledger(), START_MS, 0
    for gap, tokens in steps:
        now += gap
        now += ledger.wait(limit, now, 40)
        assert ledger.fits(limit, now, 1, 40) == 1
        assert used <= 100 * ((now - START_MS) // kept_ms + 1)
        ledger.reserve(limit, now, 1, 40)
        ledger.settle_usage(limit, now, now, 0, 40, tokens)
        used += tokens
        ledger = stored(ledger)


def test_a_debt_of_a_million_windows_is_worked_out_at_once() -> None:
    limit, ledger = Limit(Period.MINUTE, tokens=10), Ledger()
    ledger.settle_usage(limit, START_MS, START_MS, 0, 0, 10_000_005)
    wait_ms = ledger.wait(limit, START_MS, 5)
    assert 1_000_000 * 60_500 - 250 <= wait_ms <= 1_000_000 * 60_500
    assert Ledger.unpack(ledger.pack()).fits(limit, START_MS + wait_ms, 1, 5) == 1
    assert Ledger.unpack(ledger.pack()).fits(limit, START_MS + wait_ms - 1, 1, 5) == 0


@pytest.mark.parametrize("period", [Period.MINUTE, Period.HOUR, Period.DAY, Period.WEEK, Period.MONTH])
def test_a_request_larger_than_the_limit_goes_alone_and_leaves_a_debt(period: Period) -> None:
    limit, ledger, now = Limit(period, tokens=100), Ledger(), START_MS
    moments = []
    for _ in range(4):
        now += ledger.wait(limit, now, 150)
        assert ledger.fits(limit, now, 5, 150) == 1
        ledger.reserve(limit, now, 1, 150)
        moments.append(now)
    assert ledger.fits(limit, now, 1, 150) == 0
    starts = len({calendar_index(period, now) for now in moments}) if period not in PERIOD_MS else 4
    assert starts >= 4, "three requests of one and a half limits take at least four periods"


def test_what_can_never_be_says_so() -> None:
    ledger = Ledger()
    assert ledger.wait(Limit(Period.MINUTE, requests=0), START_MS, 1) == NEVER_MS
    assert ledger.wait(Limit(Period.DAY, tokens=0), START_MS, 1) == NEVER_MS
    lifetime = Limit(Period.LIFETIME, tokens=100)
    assert ledger.fits(lifetime, START_MS, 1, 101) == 0
    assert ledger.wait(lifetime, START_MS, 101) == NEVER_MS
    ledger.reserve(lifetime, START_MS, 1, 60)
    ledger.settle_usage(lifetime, START_MS, START_MS, 0, 60, 130)
    assert ledger.fits(lifetime, START_MS, 1, 1) == 0


@pytest.mark.parametrize("period", [Period.DAY, Period.WEEK, Period.MONTH])
def test_nothing_is_granted_that_could_be_sent_in_the_next_calendar_period(period: Period) -> None:
    limit, ledger = Limit(period, requests=2), Ledger()
    end = calendar_start(period, calendar_index(period, START_MS) + 1)
    ledger.reserve(limit, end - 10_000, 1, 0)
    assert ledger.fits(limit, end - GRANT_MS - 1, 5, 0) == 1
    assert ledger.fits(limit, end - GRANT_MS, 5, 0) == 0
    assert ledger.wait(limit, end - GRANT_MS, 0) == GRANT_MS
    assert ledger.fits(limit, end, 5, 0) == 2


def test_weeks_begin_on_monday_and_months_on_the_first() -> None:
    monday = 1_799_625_600_000
    assert calendar_start(Period.WEEK, calendar_index(Period.WEEK, monday)) == monday
    assert calendar_index(Period.WEEK, monday - 1) == calendar_index(Period.WEEK, monday) - 1
    leap_day = 1_709_164_800_000
    assert calendar_start(Period.MONTH, calendar_index(Period.MONTH, leap_day)) == 1_706_745_600_000
    assert calendar_start(Period.MONTH, calendar_index(Period.MONTH, leap_day) + 1) == 1_709_251_200_000


def test_a_limit_that_changes_is_held_against_what_was_counted() -> None:
    ledger = Ledger()
    ledger.reserve(Limit(Period.MINUTE, requests=10), START_MS, 6, 0)
    assert ledger.fits(Limit(Period.MINUTE, requests=5), START_MS, 9, 0) == 0
    assert ledger.fits(Limit(Period.MINUTE, requests=20), START_MS, 99, 0) == 14


@given(st.integers(0, 10**9))
def test_a_clock_that_goes_back_mints_nothing_and_stops_nothing(back_ms: int) -> None:
    limit, ledger = Limit(Period.MINUTE, requests=3), Ledger()
    ledger.reserve(limit, START_MS, 3, 0)
    assert ledger.fits(limit, START_MS - back_ms, 1, 0) == 0
    assert ledger.wait(limit, START_MS - back_ms, 0) <= 60_500


@given(st.binary(min_size=1, max_size=200))
def test_garbage_counts_as_full_for_one_period(packed: bytes) -> None:
    ledger = Ledger.unpack(packed)
    if not ledger.is_damaged:
        assert ledger.pack()
        return
    for limit in (Limit(Period.MINUTE, 5, 50), Limit(Period.DAY, 5, 50)):
        assert ledger.fits(limit, START_MS, 1, 1) == 0
        wait_ms = ledger.wait(limit, START_MS, 1)
        assert 0 < wait_ms < NEVER_MS
        assert Ledger.unpack(ledger.pack()).fits(limit, START_MS + wait_ms, 9, 1) == 5


numbers = st.lists(st.integers(-(2**63), 2**64 - 1), max_size=12)


@given(st.lists(st.tuples(st.integers(-1, 7), numbers, numbers), max_size=4), st.sampled_from((0, 1, 2)))
def test_well_formed_nonsense_is_refused_or_can_be_worked_with(
    pairs: list[tuple[int, list[int], list[int]]], version: int
) -> None:
    ledger = Ledger.unpack(msgspec.msgpack.encode((version, pairs)))
    assert ledger.is_damaged or version == 1
    for period in Period:
        limit = Limit(period, 5, 50)
        assert 0 <= ledger.fits(limit, START_MS, 9, 1) <= 5
        assert ledger.wait(limit, START_MS, 1) >= 0
    Ledger.unpack(ledger.pack())


def test_a_busy_ledger_stays_small() -> None:
    ledger, now = Ledger(), START_MS
    bounds = [Limit(Period.MINUTE, 10**9, 10**12), Limit(Period.HOUR, 10**9, 10**12), Limit(Period.DAY, 10**9, 10**12)]
    for _ in range(20_000):
        now += 240
        for limit in bounds:
            ledger.reserve(limit, now, 500, 2_000_000)
    assert len(ledger.pack()) < 8_000


def budget(name: str, *limits: Limit, bound: LimitBound = LimitBound.DEPLOYMENT) -> Budget:
    return Budget(bound, name, limits)


def minute(requests: int | None = None, tokens: int | None = None) -> Limit:
    return Limit(Period.MINUTE, requests, tokens)


def test_every_budget_of_an_ask_gives_or_none_does() -> None:
    wide, tight = budget("wide", minute(100)), budget("tight", minute(3), bound=LimitBound.TENANT)
    closed = budget("closed", minute(0), bound=LimitBound.JOB)
    ledgers = {one.id: Ledger() for one in (wide, tight, closed)}
    first, second, third = deal(
        [BudgetRequest((wide, tight), 5, 50), BudgetRequest((wide, closed), 5, 50), BudgetRequest((wide,), 200, 200)],
        ledgers,
        START_MS,
    )
    assert (first.requests, first.tokens, first.spent) == (3, 30, "tenant:tight")
    assert 60_000 < first.wait_ms <= 60_500
    assert (second.requests, second.wait_ms, second.spent) == (0, NEVER_MS, "job:closed")
    assert third.requests == 97, "what a closed budget refused was taken from no other"


def test_a_large_request_is_not_overtaken_by_small_ones() -> None:
    shared, other = budget("shared", minute(tokens=100)), budget("other", minute(tokens=100))
    ledgers = {one.id: Ledger() for one in (shared, other)}
    deal([BudgetRequest((shared,), 1, 50)], ledgers, START_MS)
    large, small, elsewhere = deal(
        [BudgetRequest((shared,), 1, 80), BudgetRequest((shared,), 1, 10), BudgetRequest((other,), 1, 10)],
        ledgers,
        START_MS,
    )
    assert (large.requests, small.requests, elsewhere.requests) == (0, 0, 1)
    assert small.wait_ms == large.wait_ms > 0
    assert (large.left_tokens, small.left_tokens) == (0, 0), "what a minute has left is kept for the large one"


@pytest.mark.parametrize("period", [Period.DAY, Period.WEEK, Period.MONTH, Period.LIFETIME])
def test_a_request_that_must_wait_for_another_day_lets_small_ones_pass(period: Period) -> None:
    tenant, key = budget("tenant", Limit(period, None, 100)), budget("key", minute(tokens=1_000))
    ledgers = {tenant.id: Ledger(), key.id: Ledger()}
    deal([BudgetRequest((tenant,), 1, 60)], ledgers, START_MS)
    large, small = deal([BudgetRequest((tenant,), 1, 90), BudgetRequest((tenant, key), 2, 20)], ledgers, START_MS)
    assert (large.requests, large.spent, large.left_tokens) == (0, tenant.id, 40)
    assert (small.requests, small.tokens) == (2, 20)
    [again, exact] = deal([BudgetRequest((tenant,), 1, size) for size in (21, 20)], ledgers, START_MS)
    assert (again.requests, again.left_tokens, exact.requests) == (0, 20, 1)


def test_a_day_with_enough_left_has_nothing_for_smaller_requests_while_a_minute_is_spent() -> None:
    both = budget("both", minute(tokens=100), Limit(Period.DAY, None, 10_000))
    ledgers = {both.id: Ledger()}
    deal([BudgetRequest((both,), 1, 60)], ledgers, START_MS)
    [second] = deal([BudgetRequest((both,), 1, 60)], ledgers, START_MS)
    assert (second.requests, second.spent, second.left_tokens) == (0, both.id, 0)


def test_a_day_without_a_request_left_has_no_tokens_for_smaller_ones() -> None:
    day = budget("day", Limit(Period.DAY, 1, 100))
    ledgers = {day.id: Ledger()}
    first, second = deal([BudgetRequest((day,), 1, 40), BudgetRequest((day,), 1, 80)], ledgers, START_MS)
    assert (first.requests, second.requests, second.left_tokens) == (1, 0, 0)


def test_limits_that_are_switched_off_do_not_apply() -> None:
    off = budget("off", Limit(Period.MINUTE, requests=1, enabled=False))
    [grant] = deal([BudgetRequest((off,), 9, 9)], {off.id: Ledger()}, START_MS)
    assert (grant.requests, grant.wait_ms, grant.spent) == (9, 0, "")


@given(st.integers(0, 15_000), st.integers(0, 15_000), st.integers(1, 100_000))
@example(13_877, 2_000, 13_000)
def test_a_clock_that_jumps_lets_nothing_leave_early(first_ms: int, age_ms: int, jump_ms: int) -> None:
    limit, ledger, first = Limit(Period.HOUR, requests=2), Ledger(), START_MS + first_ms
    ledger.reserve(limit, first, 1, 0)
    ledger.reserve(limit, first + age_ms, 1, 0)
    ledger.move(jump_ms)
    for passed_ms in (age_ms, PERIOD_MS[Period.HOUR]):
        assert ledger.fits(limit, first + jump_ms + passed_ms, 1, 0) == 0


@pytest.mark.parametrize(("requests", "tokens"), [(0, 1), (-1, 1), (1, -1), (1, 2**60)])
def test_an_ask_that_cannot_be_meant_is_refused(requests: int, tokens: int) -> None:
    one = budget("one", minute(10))
    with pytest.raises(ValueError, match="cannot be meant"):
        deal([BudgetRequest((one,), requests, tokens)], {one.id: Ledger()}, START_MS)


def test_settling_gives_back_what_was_not_used() -> None:
    one = budget("one", minute(10, 100))
    ledgers = {one.id: Ledger()}
    [grant] = deal([BudgetRequest((one,), 10, 100)], ledgers, START_MS)
    settle([Settlement(grant.id, (one,), unsent_requests=4, reserved_tokens=40, used_tokens=0)], ledgers, START_MS)
    settle([Settlement(grant.id, (one,), 0, reserved_tokens=60, used_tokens=10)], ledgers, START_MS + 9_000)
    [more] = deal([BudgetRequest((one,), 20, 20)], ledgers, START_MS + 10_000)
    assert more.requests == 4
    [tokens_left] = [ledgers[one.id].fits(minute(None, 100), START_MS + 10_000, 999, 1)]
    assert tokens_left == 100 - 10 - 4


@pytest.mark.parametrize("period", [Period.MINUTE, Period.DAY])
def test_what_a_request_above_the_limit_did_not_use_is_no_debt(period: Period) -> None:
    """It reserved more than the limit, so a part of that was owed: what it did not take comes off the debt too."""
    limit, now = Limit(period, None, 100), START_MS
    large, small = Ledger(), Ledger()
    large.reserve(limit, now, 1, 250)
    large.settle_usage(limit, now, now, 0, 250, 30)
    small.reserve(limit, now, 1, 30)
    assert large.room(budget("a", limit), limit, now).tokens == small.room(budget("a", limit), limit, now).tokens


@pytest.mark.parametrize("grant_id", ["", "x", "-5", "9" * 40, "١٢"])
def test_a_settlement_of_an_unknown_grant_gives_nothing_back(grant_id: str) -> None:
    one = budget("one", minute(10, 100))
    ledgers = {one.id: Ledger()}
    deal([BudgetRequest((one,), 10, 100)], ledgers, START_MS)
    settle([Settlement(grant_id, (one,), 10, 100, 0)], ledgers, START_MS)
    [grant] = deal([BudgetRequest((one,), 1, 1)], ledgers, START_MS)
    assert grant.requests == 0


def test_each_day_pays_the_limit_of_a_debt_and_no_more() -> None:
    day_ms, window = 86_400_000, fresh(Period.DAY)
    window.roll(0, 10)
    window.add(0, 10)
    window.owe(25)
    window.roll(day_ms, 10)
    assert window.taken() == 25
    window.roll(3 * day_ms, 10)
    assert (window.taken(), window.room(3 * day_ms, 10)) == (5, 5)


def test_a_part_of_the_requests_sets_aside_its_share_of_tokens_and_money_rounded_up() -> None:
    tokens = Budget(LimitBound.KEY, "k", (Limit(Period.LIFETIME, tokens=7),))
    money = Budget(LimitBound.KEY, "k", (Limit(Period.LIFETIME, nano=7),), BudgetKind.MONEY)
    [of_tokens] = deal([BudgetRequest((tokens,), 3, 10)], {tokens.id: Ledger()}, START_MS)
    [of_money] = deal([BudgetRequest((money,), 3, 0, 10)], {money.id: MoneyLedger()}, START_MS)
    assert (of_tokens.requests, of_tokens.tokens) == (1, 4)
    assert (of_money.requests, of_money.nano) == (1, 4)


def test_a_use_below_nothing_gives_back_no_more_than_was_reserved() -> None:
    one = Budget(LimitBound.KEY, "k", (Limit(Period.MINUTE, tokens=10),))
    ledgers = {one.id: Ledger()}
    grants = deal([BudgetRequest((one,), 1, 4), BudgetRequest((one,), 1, 4)], ledgers, START_MS)
    settle([Settlement(grants[0].id, (one,), 0, 4, -4)], ledgers, START_MS)
    [grant] = deal([BudgetRequest((one,), 1, 7)], ledgers, START_MS)
    assert grant.requests == 0


def test_of_two_limits_for_a_period_the_tighter_side_of_each_counts() -> None:
    own = (Budget(LimitBound.KEY, "k", (Limit(Period.MINUTE, 5, 900), Limit(Period.DAY, 50))),)
    [found] = with_limits(own, LimitBound.KEY, "k", (Limit(Period.MINUTE, 9, 100),))
    assert found.limits == (Limit(Period.MINUTE, 5, 100), Limit(Period.DAY, 50))


def test_a_settlement_that_only_frees_money_gives_back() -> None:
    assert Settlement("1", (), 0, 5, 5, 30, 29).gives_back
    assert not Settlement("1", (), 0, 5, 5, 30, 30).gives_back


def test_a_limit_has_all_of_its_room_again_once_its_moment_has_come() -> None:
    assert SideRoom(10, 3, 500).later(499) == SideRoom(10, 3, 1)
    assert SideRoom(10, 3, 500).later(500) == SideRoom(10, 10, 0)
    assert SideRoom(10, 3, NEVER_MS).later(10**15) == SideRoom(10, 3, NEVER_MS)


def test_twice_as_many_calls_take_about_twice_as_long_however_many_they_are() -> None:
    way = (Budget(LimitBound.KEY, "k", (Limit(Period.MINUTE, requests=1),)),)
    some, twice = (calls_take_ms([way], {}, START_MS, CallsAhead(count)) for count in (1_000, 2_000))
    assert some is not None
    assert twice is not None
    assert 1.9 < twice / some < 2.1


def test_calls_go_by_the_ways_that_are_open_while_another_is_closed_for_good() -> None:
    way, closed = (budget("open", minute(10)),), (budget("closed", minute(0)),)
    alone = calls_take_ms([way], {}, START_MS, CallsAhead(20))
    assert alone is not None
    assert calls_take_ms([closed, way], {}, START_MS, CallsAhead(20)) == alone
    assert calls_take_ms([closed], {}, START_MS, CallsAhead(20)) is None
