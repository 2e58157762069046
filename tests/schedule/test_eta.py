"""When a job ends and whether it can end in time, from rates and its place in the queue."""

from hypothesis import given
from hypothesis import strategies as st

from tests.schedule import looks
from tests.schedule.world import World, job
from tidegate.core.budgets import Bound, Budget, Limit, Period
from tidegate.core.eta import Eta, Outlook, Position, eta, feasible, least_ms, not_before, slack_ms, units_before_end
from tidegate.core.schedule import Policy

positions = st.builds(
    Position,
    left_units=st.integers(1, 10**7),
    ahead_units=st.integers(0, 10**7),
    weight=st.floats(0.1, 10),
    others=st.lists(st.tuples(st.floats(0.1, 10), st.none() | st.integers(0, 10**7)), max_size=4),
)
rates = st.lists(st.floats(1, 10_000), min_size=1, max_size=15)


def test_without_a_rate_nobody_knows() -> None:
    assert eta(Position(100), []) is None
    assert eta(Position(100), [0.0, 0.0]) is None
    assert slack_ms(1_000, 100, None) is None
    assert feasible(1_000, Position(100), [], 0.5) is Outlook.UNKNOWN


def test_a_default_rate_stands_in_for_a_measured_one() -> None:
    told = eta(Position(1_000), [], rate_default=100.0)
    assert told is not None
    assert told.p50_ms == 10_000
    assert told.p95_ms > told.p50_ms


def test_steady_rates_give_a_narrow_forecast() -> None:
    assert eta(Position(6_000), [100.0] * 15) == Eta(60_000, 60_000)


def test_others_count_as_far_as_their_backlog_and_weight_go() -> None:
    assert units_before_end(Position(100, others=[(1.0, None), (1.0, 30), (2.0, None)])) == 100 + 100 + 30 + 200
    assert units_before_end(Position(100, ahead_units=50)) == 150


@given(positions, rates)
@looks.tried
def test_a_forecast_is_ordered_and_grows_with_what_is_ahead(position: Position, measured: list[float]) -> None:
    told = eta(position, measured)
    assert told is not None
    assert 0 <= told.p50_ms <= told.p95_ms
    more = eta(Position(position.left_units, position.ahead_units + 1_000, position.weight, position.others), measured)
    assert more is not None
    assert more.p50_ms >= told.p50_ms


@given(positions, rates, st.floats(0, 1))
@looks.tried
def test_more_time_never_makes_an_outlook_worse(position: Position, measured: list[float], share: float) -> None:
    order = [Outlook.IMPOSSIBLE, Outlook.AT_RISK, Outlook.LIKELY]
    told = [order.index(feasible(10**power, position, measured, share)) for power in range(16)]
    assert told == sorted(told)
    assert told[-1] == 2


def test_an_outlook_knows_what_urgency_can_do() -> None:
    crowded = Position(1_000, others=[(1.0, None)] * 9)
    steady = [100.0] * 15
    assert feasible(100_000, crowded, steady, 0.5) is Outlook.LIKELY
    assert feasible(50_000, crowded, steady, 0.5) is Outlook.AT_RISK
    assert feasible(15_000, crowded, steady, 0.5) is Outlook.IMPOSSIBLE
    assert feasible(50_000, crowded, steady, 0.0) is Outlook.IMPOSSIBLE


def test_the_forecast_agrees_with_what_the_scheduler_does() -> None:
    """Three tenants share four slots of 100 units a second each; one of them has little left and drops out early."""
    world = World([job("a", "a", 80), job("b", "b", 400), job("c", "c", 20)], Policy(), slots=4)
    told = eta(Position(8_000, others=[(1.0, 40_000), (1.0, 2_000)]), [400.0] * 15)
    world.run(400)
    ended = world.jobs["a"].ended_at
    assert told is not None
    assert ended is not None
    assert abs(told.p50_ms - ended) <= 0.05 * ended


def budget(name: str, *limits: Limit) -> Budget:
    return Budget(Bound.DEPLOYMENT, name, limits)


def test_limits_say_how_soon_calls_can_be_over() -> None:
    four = [budget("a", Limit(Period.MINUTE, requests=4))]
    assert [least_ms(calls, [four]) // 60_000 for calls in (0, 1, 4, 5, 8, 9, 30)] == [0, 0, 0, 1, 1, 2, 7]
    # Two ways share the calls; the tighter of two limits counts, whatever its period; a way without one bears any number.
    assert least_ms(16, [four, four]) == 60_000
    both = [budget("a", Limit(Period.MINUTE, requests=4), Limit(Period.HOUR, requests=8))]
    assert least_ms(17, [both]) == 2 * 3_600_000
    assert least_ms(1_000, [four, []]) == least_ms(1_000, []) == 0
    assert least_ms(1_000, [[budget("a", Limit(Period.MINUTE, tokens=1))]]) == 0
    assert least_ms(1_000, [[budget("a", Limit(Period.MINUTE, requests=1, enabled=False))]]) == 0
    # Of a day's limit, today's and tomorrow's may both be had around midnight.
    day = [budget("a", Limit(Period.DAY, requests=10))]
    assert [least_ms(calls, [day]) // 86_400_000 for calls in (20, 21, 31)] == [0, 1, 2]
    assert not_before(Eta(5, 9), 7) == Eta(7, 9)
