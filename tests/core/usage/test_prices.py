"""Money in whole nano-units: exact at every sum, rounded once an item, and never a float."""

import csv
import io
import json
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.core.errors import SettingsError
from tidegate.core.nouns import Usage
from tidegate.core.usage.prices import FACTOR_ONE, Cost, Price, Spend, bound, cost, units_text
from tidegate.core.usage.spending import DIMENSIONS, SpendEntry, csv_lines, json_lines, row, sum_by

USAGES = st.builds(
    lambda cached, fresh, output: Usage(cached + fresh, cached, output),
    st.integers(0, 10**6),
    st.integers(0, 10**6),
    st.integers(0, 10**6),
)
PRICES = st.builds(
    Price,
    st.integers(0, 10**12),
    st.none() | st.integers(0, 10**12),
    st.integers(0, 10**12),
    st.integers(0, FACTOR_ONE),
)


def exact(usage: Usage, price: Price) -> Fraction:
    cached = price.input_nano if price.cached_nano is None else price.cached_nano
    nano = (
        (usage.input_tokens - usage.cached_tokens) * price.input_nano
        + usage.cached_tokens * cached
        + usage.output_tokens * price.output_nano
    )
    return Fraction(nano * price.batch_factor_ppm, 10**12)


def test_the_prices_of_the_example_configuration() -> None:
    price = Price.of(input=0.05, cached=0.01, output=0.10, batch_factor=0.5)
    assert price == Price(50_000_000, 10_000_000, 100_000_000, 500_000)
    usage = Usage(input_tokens=1_000_000, cached_tokens=400_000, output_tokens=200_000)
    assert cost(usage, price, batch=False) == Cost(30_000_000, 4_000_000, 20_000_000)
    assert cost(usage, price, batch=True) == Cost(15_000_000, 2_000_000, 10_000_000)
    assert units_text(cost(usage, price, batch=False).total_nano) == "0.054"


def test_cached_tokens_without_a_price_cost_what_others_do() -> None:
    assert cost(Usage(10, 4, 0), Price.of(input=1), batch=False).total_nano == 10_000


@pytest.mark.parametrize("nothing", [0, 0.0, "0", "-0", "0e-99", "0." + "0" * 60])
def test_nothing_costs_nothing_however_it_is_written(nothing: str | float) -> None:
    assert Price.of(input=nothing, cached=nothing, output=nothing) == Price(0, 0, 0)


@given(USAGES, PRICES)
def test_a_cost_is_the_exact_one_rounded_once(usage: Usage, price: Price) -> None:
    paid = cost(usage, price, batch=True)
    assert abs(paid.total_nano - exact(usage, price)) <= Fraction(1, 2)
    assert min(paid.input_nano, paid.cached_nano, paid.output_nano) >= 0


@given(st.integers(0, 10**6), st.integers(0, 10**6), st.integers(0, 10**6), PRICES)
def test_no_call_costs_more_than_its_bound(prompt: int, cached: int, output: int, price: Price) -> None:
    usage = Usage(prompt, min(cached, prompt), output)
    assert cost(usage, price, batch=True).total_nano <= bound(prompt, output, price, batch=True)


def test_no_money_has_no_sign() -> None:
    assert [units_text(nano) for nano in (-(10**9), -1, 0, 1, 10**9)] == ["-1", "-0.000000001", "0", "0.000000001", "1"]


@given(st.integers(-(10**20), 10**20))
def test_money_is_written_exactly(nano: int) -> None:
    assert Fraction(units_text(nano)) == Fraction(nano, 10**9)


@pytest.mark.parametrize(
    "value",
    [
        "-1",
        "x",
        "",
        "nan",
        "inf",
        "1e9",
        "0.0000000001",
        "0.1000000000000000000000000000000000001",
        "1e999999999",
        True,
        [1],
    ],
)
def test_a_price_that_is_none_is_refused_by_name(value: object) -> None:
    with pytest.raises(SettingsError, match=r"price\.output"):
        Price.of(output=value)  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match=r"price\.batch_factor"):
        Price.of(batch_factor=value if value is not True else "1.5")  # type: ignore[arg-type]


ENTRIES = st.lists(
    st.builds(
        SpendEntry,
        st.builds(Spend, st.just(1), USAGES, st.builds(Cost, *[st.integers(0, 10**12)] * 3)),
        **{name: st.sampled_from(["", "a", "b"]) for name in DIMENSIONS},
    ),
    max_size=20,
)


@given(ENTRIES, st.lists(st.sampled_from(DIMENSIONS), unique=True))
def test_sums_are_the_same_however_they_are_grouped(entries: list[SpendEntry], by: list[str]) -> None:
    summed = sum_by(entries, by)
    assert Spend.total(entry.spend for entry in summed) == Spend.total(entry.spend for entry in entries)
    assert sum_by(summed, by) == summed
    assert len({tuple(getattr(entry, name) for name in by) for entry in summed}) == len(summed)


@given(ENTRIES)
def test_both_exports_say_the_same(entries: list[SpendEntry]) -> None:
    read_json = [json.loads(line) for line in json_lines(entries)]
    read_csv = list(csv.DictReader(io.StringIO(b"".join(csv_lines(entries)).decode(), newline="")))
    assert [{name: str(value) for name, value in one.items()} for one in read_json] == read_csv
    assert sum(Fraction(one["cost"]) for one in read_csv) * 10**9 == sum(
        entry.spend.cost.total_nano for entry in entries
    )


@pytest.mark.parametrize("start", ["=", "+", "-", "@", "\t", "\r"])
def test_a_name_that_a_spreadsheet_would_run_is_made_harmless(start: str) -> None:
    [_, line] = csv_lines([SpendEntry(Spend(), user=f"{start}1")], ("user",))
    assert next(csv.reader(io.StringIO(line.decode(), newline="")))[0] == f"'{start}1"


def test_names_with_commas_lines_and_formulas_stay_names() -> None:
    entry = SpendEntry(Spend(), user='=HYPERLINK("x")', team='a,"b"\nc')
    lines = b"".join(csv_lines([entry], ("user", "team"))).decode()
    assert list(csv.reader(io.StringIO(lines, newline="")))[1][:2] == ['\'=HYPERLINK("x")', 'a,"b"\nc']
    assert row(entry)["user"] == '=HYPERLINK("x")'


def test_a_dimension_that_is_none_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="colour"):
        sum_by([], ["colour"])
