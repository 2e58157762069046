"""What one log line may hold: each field is cut, and a traceback keeps its end, where the error stands."""

from __future__ import annotations

import json

import pytest
import structlog

from tidegate.cli.terminal import logs
from tidegate.settings import Settings
from tidegate.settings.groups import Logging


def _deep(depth: int, message: str) -> None:
    if depth:
        _deep(depth - 1, message)
    else:
        raise ValueError(message)


def _logged(capsys: pytest.CaptureFixture[str], form: str, message: str) -> str:
    logs.configure(Settings(logging=Logging(format=form)))  # type: ignore[arg-type]
    try:
        # Frames of two functions in turn, which a traceback does not fold.
        _outer(40, message)
    except ValueError:
        structlog.get_logger().error("worker_broke", exc_info=True, detail="x" * 10_000)
    finally:
        structlog.reset_defaults()
    return capsys.readouterr().err


def _outer(depth: int, message: str) -> None:
    if depth:
        _inner(depth - 1, message)
    _deep(0, message)


def _inner(depth: int, message: str) -> None:
    _outer(depth, message)


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_long_traceback_keeps_the_error(capsys: pytest.CaptureFixture[str], form: str) -> None:
    output = _logged(capsys, form, "the store answered no")
    assert "ValueError: the store answered no" in output
    assert "in _deep" in output
    assert len(output) < 2 * logs.FIELD_CHARS_MAX + 500


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_long_message_does_not_crowd_out_its_own_error(capsys: pytest.CaptureFixture[str], form: str) -> None:
    output = _logged(capsys, form, "the store answered " + "no " * 5_000)
    assert "ValueError: the store answered no no" in output
    assert "in _deep" in output
    assert len(output) < 2 * logs.FIELD_CHARS_MAX + 500


def test_a_traceback_cannot_upset_a_terminal_or_a_parser(capsys: pytest.CaptureFixture[str]) -> None:
    hostile = "\x1b[2J\x07 \u202e end"
    assert not set("\x1b\x07\u202e") & set(_logged(capsys, "text", hostile))
    line = _logged(capsys, "json", hostile + "\nsecond line")
    assert json.loads(line)["exception"].endswith("second line")
    assert line.count("\n") == 1


@pytest.mark.parametrize("form", ["text", "json"])
@pytest.mark.parametrize(
    ("key", "shown"),
    [
        ("tg_live_Ab3dE5gH" + "x" * 43, "tg_live_Ab3dE5gH***"),
        ("sk-proj-0123456789abcdef", "sk-***"),
        ("Authorization: Bearer eyJhbGciOi.J9.x1", "Authorization: Bearer ***"),
        ("bearer authentication", "bearer authentication"),
        ("sk-learn, tg_live_", "sk-learn, tg_live_"),
    ],
)
def test_a_key_that_a_library_or_a_server_quotes_is_not_shown(
    capsys: pytest.CaptureFixture[str], form: str, key: str, shown: str
) -> None:
    output = _logged(capsys, form, f"refused with {key}!")
    assert f"refused with {shown}!" in output
    assert shown == key or key not in output
