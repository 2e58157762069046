"""Words and numbers for people, and nothing that a hostile name could do to a terminal."""

import pytest

from tidegate.cli.terminal import terminal


def test_control_characters_are_shown_not_obeyed() -> None:
    assert terminal.clean("a\x1b[2Jb\r\n\u202e\x07") == r"a\x1b[2Jb\r\n\u202e\x07"
    assert terminal.clean("grüße 世界") == "grüße 世界"
    assert len(terminal.clean("x" * 100_000)) == terminal.VALUE_CHARS_MAX + 1


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-1, "0.0 s"),
        (0.84, "0.8 s"),
        (12.4, "12 s"),
        (59.6, "1:00"),
        (187, "3:07"),
        (3_723, "1:02:03"),
        (183_600, "2 d 03:00:00"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert terminal.duration(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0"), (9_999, "9,999"), (12_345, "12.3k"), (4_500_000, "4.5M"), (2_000_000_000, "2.0G")]
)
def test_short_numbers(count: int, text: str) -> None:
    assert terminal.short(count) == text


def test_a_table_is_never_cut(capsys: pytest.CaptureFixture[str]) -> None:
    terminal.show_table(["key", "value"], [["a", "x" * 300], ["long name", "\x1b[31m"]])
    heading, first, second = capsys.readouterr().out.splitlines()
    assert heading == "key        value"
    assert first == "a          " + "x" * 300
    assert second == r"long name  \x1b[31m"
