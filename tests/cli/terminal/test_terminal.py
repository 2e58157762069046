"""`tidegate run` in a terminal, narrow, wide, dumb or none: what matters is shown, and the terminal is left as it was."""

from __future__ import annotations

import contextlib
import json
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
from typing import Any

import pytest
from rich.cells import cell_len

from docs.pictures import Screen
from tests.cli.conftest import QUICK, Desk, store_taken
from tests.support.engine import Engine
from tests.support.prepared import Forked, fits, take_terminal
from tests.support.processes import Processes
from tests.support.tidegate import TIDEGATE, behaving, chat_line

CTRL_C = b"\x03"
SHOW_CURSOR, HIDE_CURSOR = "\x1b[?25h", "\x1b[?25l"
ERASE_LINE = "\x1b[2K"
_CONTROL = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])")


class Terminal:
    """A process whose terminal we hold the other end of."""

    def __init__(
        self, desk: Desk, columns: int = 140, kind: str = "xterm-256color", arguments: tuple[str, ...] = ()
    ) -> None:
        """`arguments` are a command; the default is a run of the desk's requests."""
        self.columns = columns
        arguments = arguments or ("run", "requests.jsonl", "--upstream", desk.engine.url, "-o", "results.jsonl")
        self._ours, theirs = pty.openpty()
        ioctl(theirs, TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        command, env = [TIDEGATE, *arguments], {"PATH": os.environ["PATH"], "TERM": kind, **QUICK}
        self.popen: subprocess.Popen[bytes] | Forked
        if fits(command, env):
            self.popen = Forked(command, [theirs], env, desk.here)
        else:
            self.popen = subprocess.Popen(
                command,
                stdin=theirs,
                stdout=theirs,
                stderr=theirs,
                cwd=desk.here,
                env=env,
                start_new_session=True,
                preexec_fn=take_terminal,  # noqa: PLW1509 - it needs nothing of other threads
            )
        os.close(theirs)
        self.raw = ""

    @property
    def text(self) -> str:
        return _CONTROL.sub("", self.raw)

    @property
    def screen(self) -> list[str]:
        shown = Screen(self.columns)
        shown.feed(self.raw)
        return shown.text().splitlines()

    def frames(self, start: int = 0) -> list[str]:
        """The bars that were drawn behind this place, each as it was to be seen."""
        drawn = [_CONTROL.sub("", piece) for piece in self.raw[start:].split(ERASE_LINE)[1:]]
        return [line for line in (piece.splitlines()[0] for piece in drawn if piece.strip()) if "━" in line]

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

    def hang_up(self) -> int:
        """Close the terminal, as its window or its connection does; return how the process ended."""
        os.close(self._ours)
        self._ours = -1
        return self.popen.wait(60)

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.wait(10)
        if self._ours >= 0:
            os.close(self._ours)


@pytest.fixture
def open_terminal(desk: Desk) -> Iterator[Callable[..., Terminal]]:
    opened: list[Terminal] = []

    def open_one(**how: Any) -> Terminal:
        opened.append(Terminal(desk, **how))
        return opened[-1]

    yield open_one
    for one in opened:
        one.close()


OpenTerminal = Callable[..., Terminal]
SLOW = behaving("latency=200").replace("{", "{{").replace("}", "}}")


def test_a_bar_that_moves_and_a_terminal_left_as_it_was(open_terminal: OpenTerminal, desk: Desk) -> None:
    desk.write_requests(160, SLOW)
    terminal = open_terminal()
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


def test_a_terminal_that_is_closed_ends_the_run_when_its_calls_have_ended(
    open_terminal: OpenTerminal, desk: Desk
) -> None:
    """Calls that are cut off are paid for and sent again by the next run."""
    # The later ones are so slow that the run is not over before its terminal is.
    desk.write([chat_line(f"c{number}", behaving(f"latency={100 if number < 20 else 1_000}")) for number in range(60)])
    terminal = open_terminal()
    terminal.read_until(lambda: bool(re.search(r"[1-9]\d*/60", terminal.text)), "a bar that moves")
    assert terminal.hang_up() == 128 + signal.SIGHUP
    assert desk.answered() == len(desk.called()) < 60
    desk.done("run", "requests.jsonl", "--upstream", desk.engine.url, "-o", "results.jsonl")
    assert len(desk.results()) == len(desk.called()) == 60


def test_ctrl_c_from_the_keyboard_clears_the_bar(open_terminal: OpenTerminal, desk: Desk) -> None:
    """The keyboard's own ^C is shown behind the bar: a bar as wide as the terminal would stay on the line above."""
    desk.write_requests(160, SLOW)
    terminal = open_terminal(columns=80)
    terminal.read_until(lambda: "…" in terminal.text and "tokens" in terminal.text, "a bar over the whole width")
    terminal.type(CTRL_C)
    assert terminal.end() == 130, terminal.text
    assert "Nothing is lost; run the same command again to go on." in terminal.text
    assert "Traceback" not in terminal.text
    assert terminal.raw.rfind(SHOW_CURSOR) > terminal.raw.rfind(HIDE_CURSOR)
    assert not [line for line in terminal.screen if "━" in line or "/160" in line], terminal.screen
    again = desk.run()
    assert again.wait(60) == 0, again.logs()
    assert len(desk.results()) == len(desk.called()) == 160


@pytest.mark.parametrize("columns", [80, pytest.param(200, marks=pytest.mark.soak)])
def test_a_server_that_goes_away_and_comes_back(
    open_terminal: OpenTerminal, desk: Desk, processes: Processes, columns: int
) -> None:
    fine, refused = behaving("latency=150"), behaving("400")
    desk.write([chat_line(f"c{number}", refused if number < 9 else f"{fine} {number}") for number in range(90)])
    terminal = open_terminal(columns=columns)
    terminal.read_until(lambda: "9 failed" in terminal.text, "failures")
    assert re.search(r"\x1b\[31m\d failed", terminal.raw), "failures are red"
    desk.engine.proc.kill()
    terminal.read_until(lambda: "The model server went away" in terminal.text, "the sentence that it went away")
    gone = len(terminal.raw)
    terminal.read_until(lambda: len(terminal.frames(gone)) >= 4, "bars without a server")
    # The first of them may have been drawn before.
    for frame in terminal.frames(gone)[1:]:
        # The cause comes before the address, which a narrow terminal has no room for.
        assert re.search(r"\d+/90 · \d+ % · 9 failed · waiting: (?!upstream|http)\w+ \w+ ", frame), frame
        assert "left" not in frame
    Engine(processes, desk.here / "again", port=desk.engine.port)
    terminal.read_until(lambda: "The model server is back" in terminal.text, "the sentence that it is back")
    assert terminal.end() == 1, terminal.text
    assert max(len(frame) for frame in terminal.frames()) <= columns
    shown = "\n".join(terminal.screen)
    assert (shown.count("The model server went away"), shown.count("The model server is back")) == (1, 1)
    assert "━" not in shown
    assert "9 x 400 invalid_request_error: " in shown
    assert "error" not in re.sub(r"\S*error\S*\.jsonl|invalid_request_error", "", shown), "no log line among them"


@pytest.mark.parametrize("how", ["dumb", "piped"])
def test_what_is_no_screen_gets_lines(open_terminal: OpenTerminal, desk: Desk, how: str) -> None:
    desk.write_requests(40, SLOW)
    if how == "dumb":
        terminal = open_terminal(kind="dumb")
        assert terminal.end() == 0, terminal.text
        shown = terminal.raw.replace("\r\n", "\n")
    else:
        proc = desk.run()
        assert proc.wait(60) == 0, proc.logs()
        shown = proc.stderr()
    assert re.search(r"^\d+/40 · \d+ %", shown, re.M)
    assert "done     40 of 40 items succeeded" in shown
    assert not {"\x1b", "\r", "━"} & set(shown)


def test_tables_fit_a_terminal_of_80_columns(desk: Desk) -> None:
    """Also with names that are long or would move the cursor; where the output leads elsewhere, nothing is cut."""
    long, hostile = "organization-" + "x" * 200, "n\x1b[2J\r" + "漢" * 60
    desk.write_requests(3)
    desk.done("run", "requests.jsonl", "--upstream", desk.engine.url, "-o", "results.jsonl")
    desk.done("keys", "create", "--org", long, "--label", hostile.replace("\x1b[2J\r", ""), "--models", "a" * 150)
    models = {"m" * 90: {"deployments": [{"url": f"http://{'h' * 60}.example/v1", "name": "gpu" * 40}]}}
    (desk.here / "c.yaml").write_text(json.dumps({"models": models}))
    [batch] = [one["id"] for one in desk.json_of("batches", "list", "--json")]
    key_id = desk.json_of("keys", "list", "--json")[0]["id"]
    whole = {
        "batches list": batch,
        "batches show " + batch: batch,
        "keys list": key_id,
        "keys show " + key_id: key_id,
        "deployments list --config c.yaml": "gpu",
        "config": "server.port",
        "config --explain": "a whole number from 0 to 65,535",
        "verify " + batch: "every promise holds",
        "usage": "cost",
    }
    for command, first in whole.items():
        shown = Terminal(desk, 80, arguments=tuple(command.split()))
        try:
            assert shown.end() == 0, shown.text
        finally:
            shown.close()
        lines = shown.text.replace("\r", "").splitlines()
        assert first in shown.text
        too_long = [line for line in lines if cell_len(line) > 80]
        assert not too_long or command.startswith("verify"), command
    assert long in desk.done("keys", "list").stdout()
    # The verdict on a batch that is all right is one line; all of it is there for the asking.
    assert len(desk.done("verify", batch).stdout().splitlines()) == 1
    assert len(desk.done("verify", batch, "--details").stdout().splitlines()) > 20


@pytest.mark.parametrize("columns", [80, 200])
@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        ("serve --port 0 --upstream http://localhost:1/v1", "Waiting up to 3 s for another process (pid unknown)"),
        ("keys create --org first", "Waiting up to 10 s for the server that is starting over"),
    ],
    ids=["serve", "keys"],
)
def test_a_wait_for_the_store_is_shown_whole(
    open_terminal: OpenTerminal, desk: Desk, columns: int, command: str, sentence: str
) -> None:
    with store_taken(desk):
        terminal = open_terminal(columns=columns, arguments=tuple(command.split()))
        terminal.read_until(lambda: ".\r\n" in terminal.raw, "the sentence")
        assert all(cell_len(line) <= columns for line in terminal.screen), terminal.screen
        shown = "".join("".join(terminal.screen).split())
        assert shown.startswith("".join(sentence.split())), terminal.screen
        assert f"{desk.here}/.tidegate" in shown, "the path is whole"
        assert HIDE_CURSOR not in terminal.raw
