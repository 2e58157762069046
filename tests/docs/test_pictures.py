"""The pictures of the README are of what the README says, and small enough to be loaded with it."""

from __future__ import annotations

import html
import re

import pytest

from docs.pictures import IMAGES, Screen
from tests.docs.pages import REPOSITORY, page

BYTES_MAX = 150_000


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ("one\r\ntwo", "one\ntwo"),
        ("50 %\r\x1b[2K100 %", "100 %"),
        ("bar\r\n\x1b[1A\x1b[2Kdone", "done\n"),
        ("\x1b[?25l\x1b[1;31mred\x1b[0m\x1b[?25h", "red"),
        ("12345678", "12345\n678"),
        ("abc\r\x1b[Kx", "x"),
    ],
)
def test_a_screen_shows_what_a_terminal_shows(written: str, shown: str) -> None:
    screen = Screen(columns=5 if written.isdigit() else 80)
    screen.feed(written)
    assert screen.text() == shown


def test_a_screen_knows_colours() -> None:
    screen = Screen()
    screen.feed("3 of 5, \x1b[31m2 failed\x1b[0m  ")
    assert screen.rows() == ((("3 of 5, ", ""), ("2 failed", "red")),)


def test_the_recording_shows_the_command_of_the_readme_to_its_end() -> None:
    picture = html.unescape((IMAGES / "run.svg").read_text(encoding="utf-8"))
    [command] = re.findall(r"^tidegate run .*$", page("README.md"), re.M)
    assert f"{command}</text>" in picture
    assert "320 of 320 items succeeded" in picture
    assert "run the same command again to go on" in picture


def test_the_pictures_of_the_readme_are_small() -> None:
    named = re.findall(r"!\[[^\]]+\]\((\S+)\)", page("README.md"))
    assert len(named) >= 4
    assert {one: size for one in named if (size := (REPOSITORY / one).stat().st_size) > BYTES_MAX} == {}
