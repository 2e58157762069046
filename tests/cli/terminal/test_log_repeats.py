"""A thing that goes wrong over and over fills no log: it is logged once in a while, with how often it happened in between."""

from __future__ import annotations

import time
from typing import Any

import pytest
import structlog

from tidegate.cli.terminal import logs
from tidegate.cli.terminal.logs import EVENT_LINES_MAX, REPEAT_S, Repeats
from tidegate.settings import Settings


class Log:
    """What passes, and a clock that a test moves."""

    def __init__(self) -> None:
        self.now_ms = 0.0
        self.lines: list[dict[str, Any]] = []
        self._repeats = Repeats(lambda: self.now_ms)

    def say(self, event: str, level: str = "warning", **fields: Any) -> None:
        try:
            self.lines.append(dict(self._repeats(None, level, {"event": event, "level": level, **fields})))
        except structlog.DropEvent:
            return


@pytest.fixture
def log() -> Log:
    return Log()


def test_the_same_warning_passes_once_in_a_while_with_its_count(log: Log) -> None:
    for turn in range(100):
        log.now_ms = turn * 150.0
        log.say("worker_loop_postponed", loop="lease", error=f"try {turn}")
    assert [line["error"] for line in log.lines] == ["try 0", "try 67"]
    assert log.lines[1]["repeated"] == 66
    assert "repeated" not in log.lines[0]


def test_what_is_about_something_else_passes(log: Log) -> None:
    for name in ("lease", "beat"):
        log.say("worker_loop_postponed", loop=name, error="away")
    log.say("worker_lost", worker="w1")
    assert len(log.lines) == 3


def test_one_event_about_many_things_is_bounded_too(log: Log) -> None:
    for number in range(1_000):
        log.say("publish_postponed", job=f"batch_{number}")
    assert len(log.lines) == EVENT_LINES_MAX
    log.now_ms = REPEAT_S * 1000
    log.say("publish_postponed", job="batch_new")
    assert log.lines[-1]["repeated"] == 1_000 - EVENT_LINES_MAX


def test_what_is_no_warning_is_never_held_back(log: Log) -> None:
    for _ in range(50):
        log.say("job_done", level="info", job="batch_1")
    assert len(log.lines) == 50


def test_what_it_remembers_is_bounded(log: Log) -> None:
    for number in range(5_000):
        log.now_ms += 1_000
        log.say("worker_lost", worker=f"w{number}")
    assert len(log._repeats._passed_ms) <= 1_000


def test_a_process_counts_its_repeats_by_the_clock(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now_s = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    before = structlog.get_config()
    try:
        logs.configure(Settings())
        for now_s[0] in (0.0, REPEAT_S - 0.1, REPEAT_S + 0.1):
            structlog.get_logger().warning("worker_loop_postponed", loop="lease")
    finally:
        structlog.configure(**before)
    first, again = capsys.readouterr().err.splitlines()
    assert "repeated" not in first
    assert "repeated=1" in again
