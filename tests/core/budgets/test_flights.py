"""What is in flight, by whom: against a plain list of what was begun, whatever the clock does and however often it is written down."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.core.budgets.budget import NEVER_MS, Limit, Period
from tidegate.core.budgets.counting import HOUR, Sliding, calendar_index, calendar_start
from tidegate.core.budgets.flights import NO_HOLDER, Flights, mark_of
from tidegate.core.budgets.money import MoneyLedger

START_MS = 1_800_000_000_000
HOLDERS = [NO_HOLDER, mark_of("worker_1"), mark_of("worker_2")]
STEPS = st.lists(
    st.tuples(st.integers(0, 600_000), st.sampled_from(HOLDERS), st.integers(0, 50), st.booleans()), max_size=40
)


def stored(flights: Flights) -> Flights:
    again = Flights.restored(flights.pack())
    assert again.pack() == flights.pack()
    assert again.taken() == flights.taken()
    return again


@given(STEPS, st.sets(st.sampled_from(HOLDERS[1:])))
def test_what_is_in_flight_is_what_was_begun_within_the_hour_and_not_ended(
    steps: list[tuple[int, int, int, bool]], living: set[int]
) -> None:
    flights, now, out = Flights(), START_MS, list[tuple[int, int, int]]()
    for gap, mark, count, ends in steps:
        now += gap
        flights = stored(flights)
        flights.roll(now, None)
        out = [one for one in out if HOUR.leaves_at(one[0] // HOUR.bucket_ms) > now]
        flights.begin_flights(now, count, mark)
        out.append((now, mark, count))
        if ends:
            flights.end_flights(*(out[0][0], out[0][2], out[0][1]))
            del out[0]
        assert flights.taken() == sum(count for _, _, count in out)
    gone = [one for one in out if one[1] != NO_HOLDER and one[1] not in living and one[2]]
    assert flights.forget(living) is bool(gone)
    assert stored(flights).taken() == sum(count for _, _, count in out) - sum(count for _, _, count in gone)


def test_a_clock_that_was_set_back_loses_no_holders_flights() -> None:
    flights, mark = Flights(), mark_of("worker_1")
    flights.begin_flights(START_MS, 7, mark)
    flights.roll(START_MS - 1_800_000, None)
    flights.begin_flights(START_MS - 1_800_000, 1, mark_of("worker_2"))
    assert flights.taken() == 8
    assert flights.forget({mark_of("worker_2")})
    assert flights.taken() == 1


def test_a_holder_does_not_end_what_another_has_in_flight() -> None:
    flights = Flights()
    flights.begin_flights(START_MS, 7, mark_of("worker_1"))
    flights.end_flights(START_MS, 7, mark_of("worker_2"))
    assert flights.taken() == 7


def test_a_window_that_was_written_without_holders_stays_its_hour() -> None:
    old = Sliding(HOUR)
    old.add(START_MS, 5)
    old.add(START_MS + 60_000, 6)
    flights = Flights.restored(old.pack())
    assert not flights.forget(())
    assert flights.taken() == 11
    flights.end_flights(START_MS, 5, NO_HOLDER)
    assert stored(flights).taken() == 6


@pytest.mark.parametrize(
    "numbers",
    [[], [1, 2], [1, 2, 3], [1, 5, 0, -1], [2, 5, 0], [1, 2**50, 0, 1], [1, 9, 0, 1, 8, 0, 1], [1, 1, 0, 1, 999, 0, 1]],
)
def test_what_cannot_have_been_written_is_refused(numbers: list[int]) -> None:
    with pytest.raises(ValueError):
        Flights.restored(numbers)


@pytest.mark.parametrize("period", [Period.MINUTE, Period.HOUR, Period.DAY])
def test_what_cost_more_than_was_set_aside_leaves_nothing_until_it_is_paid(period: Period) -> None:
    limit, ledger = Limit(period, nano=100), MoneyLedger()
    ledger.reserve(limit, START_MS, 1, 50)
    ledger.settle_usage(limit, START_MS, START_MS, 0, 50, 130)
    assert ledger.left(limit, START_MS) == 0
    assert ledger.fits(limit, START_MS, 1, 1) == 0


def test_calls_that_are_out_since_yesterday_add_nothing_to_the_limit_of_today() -> None:
    limit, ledger = Limit(Period.DAY, nano=100), MoneyLedger()
    midnight = calendar_start(Period.DAY, calendar_index(Period.DAY, START_MS) + 1)
    ledger.reserve(limit, midnight - 60_000, 1, 60)
    assert ledger.left(limit, midnight) == 100
    assert ledger.wait(limit, midnight, 150) == NEVER_MS, "it never fits, so it does not wait for those calls"
