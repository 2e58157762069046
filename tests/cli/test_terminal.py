"""`tidegate run` in a terminal: a bar that moves, a terminal left as it was, and Ctrl-C from the keyboard."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import select
import signal
import struct
import subprocess
import time
from collections.abc import Callable, Iterator
from fcntl import ioctl
from termios import TIOCSWINSZ

import pytest

from docs.pictures import Screen
from tests.cli.conftest import QUICK, TIDEGATE, Desk, behaving

CTRL_C = b"\x03"
SHOW_CURSOR, HIDE_CURSOR = "\x1b[?25h", "\x1b[?25l"
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Terminal:
    """A process whose terminal we hold the other end of."""

    def __init__(self, desk: Desk, *arguments: str) -> None:
        self._ours, theirs = pty.openpty()
        ioctl(theirs, TIOCSWINSZ, struct.pack("HHHH", 24, 140, 0, 0))
        self.popen = subprocess.Popen(
            [TIDEGATE, *arguments],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            cwd=desk.here,
            env={"PATH": os.environ["PATH"], "TERM": "xterm-256color", **QUICK},
            start_new_session=True,
            preexec_fn=lambda: os.close(os.open(os.ttyname(0), os.O_RDWR)),  # noqa: PLW1509 - so the session has it as its terminal
        )
        os.close(theirs)
        self.raw = ""

    @property
    def text(self) -> str:
        return _CONTROL.sub("", self.raw)

    def read_until(self, done: Callable[[], bool], what: str, timeout_s: float = 60.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not done():
            assert time.monotonic() < deadline, f"waited for {what}; the terminal shows:\n{self.text}"
            ready, _, _ = select.select([self._ours], [], [], 0.1)
            if not ready:
                continue
            with contextlib.suppress(OSError):
                piece = os.read(self._ours, 65_536)
                self.raw += piece.decode(errors="replace")
                continue
            return

    def type(self, keys: bytes) -> None:
        os.write(self._ours, keys)

    def end(self) -> int:
        self.read_until(lambda: self.popen.poll() is not None, "the end")
        self.read_until(lambda: not select.select([self._ours], [], [], 0)[0], "the last words")
        return self.popen.wait(10)

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.wait(10)
        os.close(self._ours)


@pytest.fixture
def terminal(desk: Desk) -> Iterator[Terminal]:
    latency = behaving("latency=200").replace("{", "{{").replace("}", "}}")
    desk.write_requests(160, latency)
    opened = Terminal(desk, "run", "requests.jsonl", "--upstream", desk.engine.url, "-o", "results.jsonl")
    yield opened
    opened.close()


def test_a_bar_that_moves_and_a_terminal_left_as_it_was(terminal: Terminal, desk: Desk) -> None:
    terminal.read_until(
        lambda: re.search(r"\d+/160 · \d+ % · [\d.]+ items/s · [\d:. s]+left", terminal.text) is not None, "a bar"
    )
    terminal.read_until(lambda: len(set(re.findall(r"(\d+)/160", terminal.text))) >= 3, "a bar that moves")
    assert "━" in terminal.raw
    assert re.search(r"tokens [\d.,k]+ in, [\d.,k]+ out", terminal.text)
    assert terminal.end() == 0, terminal.text
    assert "done     160 of 160 items succeeded" in terminal.text
    assert terminal.raw.count(HIDE_CURSOR) == terminal.raw.count(SHOW_CURSOR) > 0
    assert terminal.raw.rfind(SHOW_CURSOR) > terminal.raw.rfind(HIDE_CURSOR)
    assert len(desk.results()) == 160


def test_ctrl_c_from_the_keyboard(terminal: Terminal, desk: Desk) -> None:
    terminal.read_until(lambda: re.search(r"[1-9]\d*/160", terminal.text) is not None, "some items")
    terminal.type(CTRL_C)
    assert terminal.end() == 130, terminal.text
    assert "Nothing is lost; run the same command again to go on." in terminal.text
    assert "Traceback" not in terminal.text
    assert terminal.raw.rfind(SHOW_CURSOR) > terminal.raw.rfind(HIDE_CURSOR)
    screen = Screen(columns=140)
    screen.feed(terminal.raw)
    assert "━" not in screen.text(), "the bar is gone"
    again = desk.run()
    assert again.wait(60) == 0, again.logs()
    assert len(desk.results()) == len(desk.called()) == 160
