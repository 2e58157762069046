"""Fields of a batch and moments, as a command line gives them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.cli.batches import batch_fields
from tidegate.cli.terminal import moments
from tidegate.core.errors import SettingsError

NAMES = st.text("abc_", min_size=1, max_size=4)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, min_size=1, max_size=3),
    max_leaves=6,
)


def flat(fields: dict[str, Any], before: str = "") -> list[tuple[str, Any]]:
    """Each field by its dotted name, objects opened."""
    found = []
    for name, value in fields.items():
        opened = isinstance(value, dict) and value
        found += flat(value, f"{before}{name}.") if opened else [(f"{before}{name}", value)]
    return found


@given(st.dictionaries(NAMES, JSON, max_size=4))
def test_any_body_can_be_given_field_by_field(body: dict[str, Any]) -> None:
    assert batch_fields.read([f"{name}={json.dumps(value)}" for name, value in flat(body)]) == body


@pytest.mark.parametrize("text", ["batch_0f3k", "24h", "a b=c", "{not json", "", "'", "NaN", "1e999", "-", "tru"])
def test_what_is_no_json_is_text(text: str) -> None:
    assert batch_fields.read([f"a.b={text}"]) == {"a": {"b": text}}


@pytest.mark.parametrize("pair", ["", "a", "=1", ".=1", "a.=1", ".a=1", "a..b=1"])
def test_a_field_without_a_name_or_a_value_is_refused(pair: str) -> None:
    with pytest.raises(SettingsError, match=r"write NAME=VALUE, such as retry\.attempts_max=5"):
        batch_fields.read([pair])


@pytest.mark.parametrize("pairs", [("a=1", "a=1"), ("a.b=1", "a=2"), ("a=1", "a.b=2"), ('a={"b":1}', "a.b=2")])
def test_a_field_that_is_given_twice_is_refused(pairs: tuple[str, ...]) -> None:
    with pytest.raises(SettingsError, match="is given twice"):
        batch_fields.read(pairs)


def test_a_schema_is_read_from_its_file(tmp_path: Path) -> None:
    path = tmp_path / "schema.json"
    path.write_text('{"type": "object"}')
    assert batch_fields.read_schema(str(path)) == {"type": "object"}
    assert batch_fields.read_schema("response_format") == "response_format"
    path.write_bytes(b"\xff{")
    for name, why in ((str(path), "it is no JSON"), (str(tmp_path), "directory"), (str(tmp_path / "no"), "No such")):
        with pytest.raises(SettingsError, match=why):
            batch_fields.read_schema(name)


@pytest.mark.parametrize(
    ("text", "second"),
    [
        ("0", 0),
        ("1793484000", 1_793_484_000),
        ("253402300799", 253_402_300_799),
        ("2026-11-01T22:00+00:00", 1_793_570_400),
        ("2026-11-01T22:00Z", 1_793_570_400),
    ],
)
def test_a_moment_is_unix_seconds_or_a_time_of_day(text: str, second: int) -> None:
    assert moments.unix_s(text, "--x") == second


def test_a_moment_without_a_zone_is_that_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    import time

    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    try:
        assert moments.unix_s("2026-11-01T22:00", "--x") == 1_793_570_400 - 9 * 3_600
        assert moments.unix_s("2026-11-01", "--x") == 1_793_570_400 - 31 * 3_600
    finally:
        monkeypatch.undo()
        time.tzset()


@pytest.mark.parametrize("text", ["", "-1", "soon", "2026-13-01", "1.5", "253402300800", "9" * 13, "0001-01-01", "١٢"])
def test_what_is_no_moment_is_refused(text: str) -> None:
    with pytest.raises(SettingsError, match=r"--x .*: write a day such as 2026-11-01"):
        moments.unix_s(text, "--x")
