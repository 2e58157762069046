"""When a job ends and whether it can end in time, from rates and its place in the queue."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.core.schedule import looks
from tests.core.schedule.world import ScheduleWorld, job
from tidegate.core.budgets.ahead import CallsAhead, calls_take_ms
from tidegate.core.budgets.budget import Budget, Limit, LimitBound, Period
from tidegate.core.budgets.ledger import Ledger
from tidegate.core.schedule import Policy
from tidegate.core.schedule.eta import (
    Eta,
    JobOutlook,
    Linear,
    Position,
    RequestCost,
    best_rates,
    busy_rates,
    eta,
    feasible,
    fitted,
    not_before,
    own_rate,
    recent_rate,
    slack_ms,
    work_before_end,
)
from tidegate.core.schedule.outlooks import Backlog, Minute

# The noon of a day, in milliseconds.
NOON = 20_000 * 86_400_000 + 43_200_000

positions = st.builds(
    Position,
    left=st.builds(Backlog, st.integers(1, 10**7), st.integers(1, 10**5)),
    ahead=st.builds(Backlog, st.integers(0, 10**7), st.integers(0, 10**5)),
    weight=st.floats(0.1, 10),
    others=st.lists(
        st.tuples(st.floats(0.1, 10), st.none() | st.builds(Backlog, st.integers(0, 10**7), st.integers(0, 10**5))),
        max_size=4,
    ),
)
rates = st.lists(st.floats(1, 10_000), min_size=1, max_size=15)


def test_without_a_rate_the_end_is_unknown() -> None:
    assert eta(Position(Backlog(100)), []) is None
    assert eta(Position(Backlog(100)), [0.0, 0.0]) is None
    assert slack_ms(1_000, 100, None) is None
    assert feasible(1_000, Position(Backlog(100)), [], 0.5) is JobOutlook.UNKNOWN


def test_a_default_rate_stands_in_for_a_measured_one() -> None:
    forecast = eta(Position(Backlog(1_000)), [], rate_default=100.0)
    assert forecast is not None
    assert forecast.p50_ms == 10_000
    assert forecast.p95_ms > forecast.p50_ms


def test_steady_rates_give_a_narrow_forecast() -> None:
    assert eta(Position(Backlog(6_000)), [100.0] * 15) == Eta(60_000, 60_000)


def test_others_count_as_far_as_their_backlog_and_weight_go() -> None:
    assert (
        work_before_end(Position(Backlog(100), others=[(1.0, None), (1.0, Backlog(30)), (2.0, None)]))
        == 100 + 100 + 30 + 200
    )
    assert work_before_end(Position(Backlog(100), ahead=Backlog(50))) == 150


@given(positions, rates)
@looks.tried
def test_a_forecast_is_ordered_and_grows_with_what_is_ahead(position: Position, measured: list[float]) -> None:
    forecast = eta(position, measured)
    assert forecast is not None
    assert 0 <= forecast.p50_ms <= forecast.p95_ms
    ahead = Backlog(position.ahead.units + 1_000, position.ahead.items)
    more = eta(Position(position.left, ahead, position.weight, position.others), measured)
    assert more is not None
    assert more.p50_ms >= forecast.p50_ms


@given(positions, rates, st.floats(0, 1))
@looks.tried
def test_more_time_never_makes_an_outlook_worse(position: Position, measured: list[float], share: float) -> None:
    order = [JobOutlook.IMPOSSIBLE, JobOutlook.AT_RISK, JobOutlook.LIKELY]
    outlooks = [order.index(feasible(10**power, position, measured, share)) for power in range(16)]
    assert outlooks == sorted(outlooks)
    assert outlooks[-1] == 2


def test_an_outlook_knows_what_urgency_can_do() -> None:
    crowded = Position(Backlog(1_000), others=[(1.0, None)] * 9)
    steady = [100.0] * 15
    assert feasible(100_000, crowded, steady, 0.5) is JobOutlook.LIKELY
    assert feasible(50_000, crowded, steady, 0.5) is JobOutlook.AT_RISK
    assert feasible(15_000, crowded, steady, 0.5) is JobOutlook.IMPOSSIBLE
    assert feasible(50_000, crowded, steady, 0.0) is JobOutlook.IMPOSSIBLE


def test_the_forecast_agrees_with_what_the_scheduler_does() -> None:
    """Three tenants share four slots of 100 units a second each; one of them has little left and drops out early."""
    world = ScheduleWorld([job("a", "a", 80), job("b", "b", 400), job("c", "c", 20)], Policy(), slots=4)
    forecast = eta(Position(Backlog(8_000), others=[(1.0, Backlog(40_000)), (1.0, Backlog(2_000))]), [400.0] * 15)
    world.run(400)
    ended = world.jobs["a"].ended_at
    assert forecast is not None
    assert ended is not None
    assert abs(forecast.p50_ms - ended) <= 0.05 * ended


def budget(name: str, *limits: Limit) -> tuple[Budget, ...]:
    return (Budget(LimitBound.DEPLOYMENT, name, limits),)


def minutes_of(calls: int, *ways: tuple[Budget, ...], tokens_each: int = 0) -> int | None:
    taken = calls_take_ms(ways, {}, NOON, CallsAhead(calls, tokens_each))
    return None if taken is None else taken // 60_000


def test_limits_say_how_soon_calls_can_be_over() -> None:
    four = budget("a", Limit(Period.MINUTE, requests=4))
    assert [minutes_of(calls, four) for calls in (0, 1, 4, 5, 8, 9, 30)] == [0, 0, 0, 1, 1, 2, 7]
    # Two ways share the calls; the tighter of two limits counts, whatever its period; a way without one takes any number.
    assert minutes_of(16, four, budget("b", Limit(Period.MINUTE, requests=4))) == 1
    both = budget("a", Limit(Period.MINUTE, requests=4), Limit(Period.HOUR, requests=8))
    assert minutes_of(17, both) in (120, 121)
    assert minutes_of(1_000, four, ()) == minutes_of(1_000) == 0
    assert minutes_of(1_000, budget("a", Limit(Period.MINUTE, tokens=1))) == 0
    assert minutes_of(1_000, budget("a", Limit(Period.MINUTE, requests=1, enabled=False))) == 0
    # Of a day's limit, today's and tomorrow's may be had within half a day at noon.
    day = budget("a", Limit(Period.DAY, requests=10))
    assert [minutes_of(calls, day) for calls in (10, 20, 21)] == [0, 12 * 60, 36 * 60]
    assert not_before(Eta(5, 9), 7) == Eta(7, 9)


def test_limits_in_tokens_count_where_it_is_known_what_calls_take() -> None:
    tokens = budget("a", Limit(Period.MINUTE, tokens=100))
    assert [minutes_of(calls, tokens, tokens_each=25) for calls in (4, 5, 8, 9)] == [0, 1, 1, 2]
    # The tighter of requests and tokens counts, and a call that never fits goes alone and leaves a debt.
    both = budget("a", Limit(Period.MINUTE, requests=2, tokens=100))
    assert [minutes_of(5, both, tokens_each=each) for each in (0, 25, 100)] == [2, 2, 4]
    assert minutes_of(3, tokens, tokens_each=250) in (5, 6)
    assert minutes_of(5, budget("a", Limit(Period.LIFETIME, tokens=100)), tokens_each=25) is None


def test_what_was_sent_before_counts_and_a_total_may_never_be_enough() -> None:
    total = budget("a", Limit(Period.LIFETIME, requests=10))
    assert minutes_of(10, total) == 0
    assert minutes_of(11, total) is None
    four = budget("a", Limit(Period.MINUTE, requests=4))
    ledger = Ledger()
    ledger.reserve(four[0].limits[0], NOON - 30_000, 4, 0)
    for calls in (1, 4):
        taken = calls_take_ms([four], {four[0].id: ledger.pack()}, NOON, CallsAhead(calls))
        assert taken is not None
        assert 29_000 <= taken <= 32_000


def test_many_calls_are_forecast_without_playing_all_of_them() -> None:
    fast = budget("a", Limit(Period.MINUTE, requests=600))
    minutes = minutes_of(600_000, fast)
    assert minutes is not None
    assert 0.95 * 1_000 <= minutes <= 1.05 * 1_000


def test_a_rate_is_what_was_served_while_there_was_work() -> None:
    burst = Minute(7, 2_000, 2_000, 20, busy_ms=20_000, call_ms=80_000)
    assert busy_rates([Minute(6, 0, 0, 0), burst]) == [100.0]
    assert busy_rates([Minute(7, 6_000, 6_000, 60)]) == [100.0], "calls were not counted: the whole minute"
    assert busy_rates([Minute(7, 60, 60, 1, busy_ms=20)]) == [60.0], "a moment of work shows no such rate"
    slow, fast = Minute(1, 600, 600, 6, 60_000, 60_000), Minute(2, 6_000, 6_000, 60, 30_000, 60_000)
    assert recent_rate([slow, fast]) == 200.0
    assert recent_rate([]) is None
    # Four calls at once of eight slots: twice as much may be possible; nothing is taken away where more were measured.
    assert best_rates([burst], 8) == (200.0, 2.0)
    assert best_rates([burst, slow], 1) == (100.0, 1.0)
    assert best_rates([Minute(7, 6_000, 6_000, 60)], 8) == (100.0, 1.0), (
        "calls were not counted: every slot may have been taken"
    )
    assert best_rates([], 8) is None


def test_a_jobs_own_progress_says_more_than_what_others_were_served() -> None:
    minutes = [Minute(7, 2_000, 2_000, 20, busy_ms=20_000, call_ms=40_000)]
    assert own_rate(Backlog(0), 60_000, minutes) is None
    assert own_rate(Backlog(400), 2_000, minutes) is None
    # Calls take two seconds: what was done in 11 seconds was done in ten.
    assert own_rate(Backlog(400), 11_000, minutes) == 40.0
    assert own_rate(Backlog(1), 11_000, minutes) == 0.1
    assert own_rate(Backlog(300), 3_999, minutes) is None
    assert own_rate(Backlog(300), 4_000, minutes) == 100.0
    takes = RequestCost(Linear(500.0, 0.0), Linear(0.0, 1.0))
    assert own_rate(Backlog(400, 8), 11_000, minutes, takes) == 400.0


def test_the_rate_of_now_says_more_than_those_before() -> None:
    forecast = eta(Position(Backlog(6_000)), [50.0, 150.0], rate_now=200.0)
    assert forecast is not None
    assert forecast.p50_ms == 30_000
    assert forecast.p95_ms > 30_000


def test_others_are_served_for_their_weight_beside_ours() -> None:
    """Our flow weighs four times as much as the others: until it is done each of them gets a quarter, at most what it has."""
    assert (
        work_before_end(
            Position(
                Backlog(300), Backlog(100), weight=4.0, others=((1.0, None), (1.0, Backlog(30)), (2.0, Backlog(10_000)))
            )
        )
        == 730
    )


def minute_of(requests: list[tuple[int, int, int]], busy_ms: int = 10_000) -> Minute:
    """A minute of requests, each of so many units, milliseconds and tokens."""
    units, took_ms, tokens = (sum(column) for column in zip(*requests, strict=True))
    squares = sum(one[0] ** 2 for one in requests)
    unit_ms, unit_tokens = (sum(one[0] * one[place] for one in requests) for place in (1, 2))
    return Minute(1, units, tokens, len(requests), busy_ms, took_ms, 0, squares, unit_ms, unit_tokens)


@given(
    st.floats(1, 1_000),
    st.floats(0, 10),
    st.lists(st.integers(1, 10_000), min_size=2, max_size=9, unique=True),
    st.integers(1, 3),
)
@looks.tried
def test_what_requests_take_is_found_from_those_that_were_answered(
    each: float, per_unit: float, lengths: list[int], minutes: int
) -> None:
    took = [(units, round(1_000 * (each + per_unit * units)), 3 * units + 40) for units in (*lengths, 20_000)]
    found = fitted([minute_of(took[number::minutes]) for number in range(minutes)])
    assert found.ms.of(Backlog(12_345, 3)) == pytest.approx(3_000 * each + 1_000 * per_unit * 12_345, rel=0.02)
    assert found.tokens.of(Backlog(12_345, 3)) == pytest.approx(3 * 12_345 + 3 * 40, rel=0.02)


def test_of_requests_that_are_all_as_long_longer_ones_are_thought_to_take_as_much_more() -> None:
    alike = minute_of([(100, 500, 200)] * 10)
    assert fitted([alike]) == RequestCost(Linear(0.0, 5.0), Linear(0.0, 2.0))
    assert fitted([]) == RequestCost(Linear(0.0, 1.0), Linear(0.0, 1.0))
    # A minute in which calls were not timed says nothing of them.
    assert fitted([Minute(0, 6_000, 12_000, 60)]) == RequestCost(Linear(0.0, 1.0), Linear(0.0, 2.0))
    assert fitted([alike, Minute(0, 6_000, 12_000, 60)]).ms == Linear(0.0, 5.0)


def test_minutes_of_an_earlier_version_say_nothing_of_longer_requests() -> None:
    mixed = minute_of([(100, 1_000, 100), (1_000, 1_000, 1_000)])
    before = Minute(0, 50_000, 50_000, 500, 60_000, 500_000)
    assert fitted([before, mixed]) == fitted([mixed])
    assert fitted([mixed]).ms == Linear(1_000.0, 0.0)
    assert fitted([before]).ms == Linear(0.0, 10.0)


def test_no_request_takes_less_than_nothing() -> None:
    """Longer requests that were answered sooner, and those that take more for each unit the longer they are, both meet a bound."""
    sooner = fitted([minute_of([(10, 1_000, 10), (1_000, 10, 1_000)])])
    assert sooner.ms == Linear(505.0, 0.0)
    steeper = fitted([minute_of([(10, 1, 10), (1_000, 10_000, 1_000)])])
    assert steeper.ms.each == pytest.approx(0.0)
    assert steeper.ms.per_unit == pytest.approx(10_001 / 1_010)


def test_flows_share_tokens_and_what_is_left_of_them_takes_its_own_time() -> None:
    """A call takes a second whatever it reads: for the tokens of one long request ten short ones are served, while there are any."""
    takes = RequestCost(Linear(1_000.0, 0.0), Linear(0.0, 1.0))
    position = Position(Backlog(4_000, 4), others=[(1.0, Backlog(10_000, 100)), (2.0, Backlog(2_000, 20)), (1.0, None)])
    assert work_before_end(position, takes) == 4_000 + 40_000 + 20_000 + 4_000


def test_rates_of_a_mixture_are_those_of_its_calls() -> None:
    takes = RequestCost(Linear(500.0, 0.0), Linear(0.0, 1.0))
    few, many = Minute(1, 9_000, 9_000, 20, 10_000, 10_000), Minute(2, 100, 100, 80, 40_000, 40_000)
    assert busy_rates([few, many], takes) == [1_000.0, 1_000.0]
    assert recent_rate([few, many], takes) == 1_000.0
    forecast = eta(Position(Backlog(9_000, 20)), [1_000.0] * 15, rate_now=1_000.0, takes=takes)
    assert forecast == Eta(10_000, 10_000)
