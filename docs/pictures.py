"""Draw the pictures of the README from real runs: a recording of a terminal as SVG, and two pages of the console as PNG.

`make pictures` runs this. It starts a simulated model server and a server of Tidegate's own in a temporary directory, and stops them.
"""

import contextlib
import html
import json
import os
import pty
import re
import select
import shutil
import struct
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fcntl import ioctl
from pathlib import Path
from termios import TIOCSWINSZ

IMAGES = Path(__file__).resolve().parent / "images"
REPOSITORY = IMAGES.parents[1]
BIN = Path(sys.executable).parent
WAIT_S = 120.0
BUSY_S = 100.0
REPEATS = 4

# ---- a terminal

COLUMNS, ROWS = 100, 50
_TOKEN = re.compile(r"\x1b\[(?P<numbers>[0-9;?]*)(?P<verb>[A-Za-z])|\x1b.|(?P<letter>.)", re.S)
# What a colour of the terminal is called in the picture; others are shown as plain text.
COLOURS = {"31": "red", "32": "green", "33": "yellow", "38;5;197": "bar", "38;5;237": "rest", "38;5;106": "full"}
Row = tuple[tuple[str, str], ...]


class Screen:
    """The letters on a terminal, each with its style: as much of a terminal as the commands use."""

    def __init__(self, columns: int = COLUMNS) -> None:
        self._columns = columns
        self._rows: list[list[tuple[str, str]]] = [[]]
        self._row = self._column = 0
        self._style = ""

    def feed(self, text: str) -> None:
        for token in _TOKEN.finditer(text):
            if token["verb"]:
                self._obey(token["verb"], token["numbers"])
            elif token["letter"]:
                self._write(token["letter"])

    def rows(self) -> tuple[Row, ...]:
        """Each row as runs of one style, without blanks at its end."""
        return tuple(tuple(_runs(row)) for row in self._rows)

    def text(self) -> str:
        return "\n".join("".join(letter for letter, _ in row).rstrip() for row in self._rows)

    def _write(self, letter: str) -> None:
        if letter == "\r":
            self._column = 0
        elif letter == "\n":
            self._move_to(self._row + 1)
        elif letter.isprintable():
            if self._column == self._columns:
                self._column = 0
                self._move_to(self._row + 1)
            row = self._rows[self._row]
            row.extend((" ", "") for _ in range(self._column - len(row) + 1))
            row[self._column] = (letter, self._style)
            self._column += 1

    def _move_to(self, row: int) -> None:
        self._row = max(0, row)
        self._rows.extend([] for _ in range(self._row - len(self._rows) + 1))

    def _obey(self, verb: str, numbers: str) -> None:
        row = self._rows[self._row]
        if verb == "m":
            self._style = "bold" if numbers == "1" else COLOURS.get(numbers.removeprefix("1;"), "")
        elif verb == "K":
            del row[0 if numbers == "2" else self._column :]
        elif verb == "A":
            self._move_to(self._row - int(numbers or 1))


def _runs(row: list[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    while row and row[-1][0] == " ":
        row = row[:-1]
    while row:
        style = row[0][1]
        length = next((place for place, (_, other) in enumerate(row) if other != style), len(row))
        yield "".join(letter for letter, _ in row[:length]), style
        row = row[length:]


# ---- a recording


@dataclass(frozen=True)
class Frame:
    at_s: float
    rows: tuple[Row, ...]


class Recorder:
    """Types commands into a terminal of its own, runs them there, and keeps what it shows with the moment of it."""

    # A wait for the machine that draws the picture is not what it is about.
    KEYS_A_FRAME, KEY_S, PAUSE_S, WAIT_S_MAX = 8, 0.03, 1.2, 0.5

    def __init__(self, here: Path, shown: Callable[[str], str]) -> None:
        self.frames: list[Frame] = []
        self._here = here
        self._shown = shown
        self._screen = Screen()
        self._at_s = 0.0

    def run(self, command: str, *, interrupt_at: str = "") -> None:
        """Run a command to its end; with `interrupt_at`, press Ctrl-C when the screen shows this text."""
        self._type(command)
        ours, theirs = pty.openpty()
        ioctl(theirs, TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        process = subprocess.Popen(
            ["bash", "-c", f"exec {command}"],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            cwd=self._here,
            env=environment() | {"TERM": "xterm-256color"},
            start_new_session=True,
            preexec_fn=lambda: os.close(os.open(os.ttyname(0), os.O_RDWR)),  # noqa: PLW1509 - so that Ctrl-C reaches it
        )
        os.close(theirs)
        seen = time.monotonic()
        until = time.monotonic() + WAIT_S
        while time.monotonic() < until:
            ready, _, _ = select.select([ours], [], [], 0.1)
            if ready:
                try:
                    self._screen.feed(os.read(ours, 65_536).decode(errors="replace"))
                except OSError:
                    break
                self._keep(self._at_s + min(time.monotonic() - seen, self.WAIT_S_MAX))
                seen = time.monotonic()
                if interrupt_at and re.search(interrupt_at, self._screen.text()):
                    os.write(ours, b"\x03")
                    interrupt_at = ""
        process.wait(10)
        os.close(ours)
        self._at_s += self.PAUSE_S

    def _type(self, command: str) -> None:
        self._screen.feed("\x1b[32m$ \x1b[0m")
        for start in range(0, len(command), self.KEYS_A_FRAME):
            self._screen.feed(self._shown(command)[start : start + self.KEYS_A_FRAME])
            self._keep(self._at_s + self.KEY_S * self.KEYS_A_FRAME)
        self._screen.feed("\r\n")
        self._at_s += 0.4

    def _keep(self, at_s: float) -> None:
        self._at_s = at_s
        if self.frames and at_s - self.frames[-1].at_s < 0.1:
            self.frames.pop()
        self.frames.append(Frame(at_s, self._screen.rows()))


# ---- a picture of it

LETTER, LINE, MARGIN = 8.4, 18, 16
HEAD = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" role="img">
<title>{title}</title>
<desc>{description}</desc>
<style>
svg {{ --paper: #f6f8fa; --ink: #1f2328; --red: #b3261e; --green: #1a7f37; --yellow: #8a6100; --bar: #0969da; --rest: #c8d1da; }}
@media (prefers-color-scheme: dark) {{
svg {{ --paper: #11161d; --ink: #d7dee6; --red: #ff7b72; --green: #56d364; --yellow: #e3b341; --bar: #58a6ff; --rest: #38424d; }} }}
rect {{ fill: var(--paper); }}
text {{ font: 14px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; fill: var(--ink); white-space: pre; }}
.bold {{ font-weight: 700; }} .red {{ fill: var(--red); }} .green, .full {{ fill: var(--green); }} .yellow {{ fill: var(--yellow); }}
.bar {{ fill: var(--bar); }} .rest {{ fill: var(--rest); }}
.was {{ visibility: hidden; }}
@keyframes unseen {{ from, to {{ visibility: hidden; }} }}
@keyframes seen {{ from, to {{ visibility: visible; }} }}
@media (prefers-reduced-motion: reduce) {{ g {{ animation: none !important; }} }}
</style>
<rect width="100%" height="100%" rx="8"/>
"""


def drawn(frames: list[Frame], title: str, description: str) -> str:
    """The recording as a picture that plays once and ends with the last frame, which is all that is seen where nothing moves."""
    height = max(len(frame.rows) for frame in frames)
    parts = [
        HEAD.format(
            width=COLUMNS * LETTER + 2 * MARGIN, height=height * LINE + 2 * MARGIN, title=title, description=description
        )
    ]
    for number in range(height):
        for row, from_s, to_s in _versions(frames, number):
            if to_s is None:
                how = f'style="animation: unseen {from_s:.2f}s"'
            else:
                how = f'class="was" style="animation: seen {to_s - from_s:.2f}s {from_s:.2f}s"'
            parts.append(f"<g {how}>{_letters(row, MARGIN + (number + 0.75) * LINE)}</g>\n")
    return "".join([*parts, "</svg>\n"])


def _versions(frames: list[Frame], number: int) -> Iterator[tuple[Row, float, float | None]]:
    """What one row showed, from when and until when; None for what stays."""
    shown: Row = ()
    from_s = 0.0
    for frame in frames:
        row = frame.rows[number] if number < len(frame.rows) else ()
        if row != shown:
            if shown:
                yield shown, from_s, frame.at_s
            shown, from_s = row, frame.at_s
    if shown:
        yield shown, from_s, None


def _letters(row: Row, y: float) -> str:
    column, parts = 0, []
    for text, style in row:
        if text.strip():
            mark = f' class="{style}"' if style else ""
            x, width = MARGIN + column * LETTER, len(text) * LETTER
            parts.append(f'<text x="{x:.1f}" y="{y:.1f}" textLength="{width:.1f}"{mark}>{html.escape(text)}</text>')
        column += len(text)
    return "".join(parts)


# ---- what is shown


def environment() -> dict[str, str]:
    return {"PATH": f"{BIN}:{os.environ['PATH']}", "HOME": os.environ.get("HOME", "/"), "LANG": "C.UTF-8"}


@contextlib.contextmanager
def started(command: str, here: Path) -> Iterator[str]:
    """A server while the block runs; its address."""
    log = here / f"{command.split()[1]}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            ["bash", "-c", f"exec {command}"], cwd=here, env=environment(), stdout=output, stderr=output
        )
    try:
        until = time.monotonic() + WAIT_S
        while not (found := re.search(r"listening on (http://\S+)", log.read_text())):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < until, log.read_text()
            time.sleep(0.1)
        yield found[1].rstrip("/.,").removesuffix("/v1")
    finally:
        process.terminate()
        process.wait(30)


def record_run(here: Path) -> None:
    """A run that is interrupted and goes on, and a line of its results."""
    shutil.copytree(REPOSITORY / "examples", here / "examples")
    with started("tidegate simulate --port 0 --latency-ms 250", here) as url:
        recorder = Recorder(here, lambda text: text.replace(url, "http://localhost:8000"))
        command = f"tidegate run examples/requests.jsonl --upstream {url}/v1 -o results.jsonl"
        recorder.run(command, interrupt_at=r"\b[34]\d %")
        recorder.run(command)
        recorder.run("head -n 1 results.jsonl")
    title = "tidegate run, interrupted and run again"
    description = "A run of 320 requests is stopped with Ctrl-C; the same command goes on where it stopped, and a result line is shown."
    (IMAGES / "run.svg").write_text(drawn(recorder.frames, title, description), encoding="utf-8")


CONFIGURATION = """\
server: {{port: 0}}
models:
  llama-3-8b: {{deployments: [{{name: vllm-a, engine: vllm, url: "{llama}", max_in_flight: 24}}]}}
  qwen-7b: {{deployments: [{{name: sglang-a, url: "{qwen}", max_in_flight: 8}}]}}
tenants:
  acme: {{weight: 2}}
"""
CONFIGURED = ("--config", "tidegate.yaml")
# Whose batches, for which model, with which note.
BATCHES = (
    ("acme", "llama-3-8b", "reviews"),
    ("acme", "qwen-7b", "translations"),
    ("globex", "llama-3-8b", "nightly"),
    ("globex", "qwen-7b", "labels"),
    ("initech", "llama-3-8b", "summaries"),
)


def picture_console(here: Path) -> None:
    """The overview and a batch of a server that runs batches of three organizations."""
    requests = (REPOSITORY / "examples" / "requests.jsonl").read_text()
    engine = "tidegate simulate --port 0 --latency-ms 1500 --fault 503=0.02"
    (here / "llama").mkdir()
    with started(engine, here / "llama") as llama, started(engine, here) as qwen:
        (here / "tidegate.yaml").write_text(CONFIGURATION.format(llama=f"{llama}/v1", qwen=f"{qwen}/v1"))
        with started("tidegate serve --config tidegate.yaml", here) as url:
            scopes = "admin:read,admin:write"
            operator = tidegate(here, "keys", "create", "--org", "operators", "--scopes", scopes, *CONFIGURED).strip()
            keys = {org: tidegate(here, "keys", "create", "--org", org, *CONFIGURED).strip() for org, _, _ in BATCHES}
            batches = []
            for org, model, note in BATCHES:
                lines = re.sub(r'"model": "[^"]+"', f'"model": "{model}"', requests)
                copies = (lines.replace('"request-', f'"{note}-{number}-') for number in range(REPEATS))
                (here / f"{note}.jsonl").write_text("".join(copies))
                (here / "key").write_text(keys[org])
                wanted = (f"{note}.jsonl", "--metadata", f"name={note}", "--server", url, "--api-key", "file:key")
                batches.append(tidegate(here, "batches", "create", *wanted).split()[0])
            pages = {"console": "/console", "console-batch": f"/console/batches/{batches[0]}"}
            photograph(url, operator, pages, lambda: chat(url, keys["acme"], BUSY_S))


def tidegate(here: Path, *arguments: str) -> str:
    command = [str(BIN / "tidegate"), *arguments]
    return subprocess.run(command, cwd=here, env=environment(), check=True, stdout=subprocess.PIPE, text=True).stdout


def chat(url: str, key: str, for_s: float) -> None:
    """Send interactive calls for a while, as users beside the batches do."""
    body = {"model": "llama-3-8b", "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 32}
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    until = time.monotonic() + for_s
    while time.monotonic() < until:
        call = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), headers)
        # A fault of the model server may meet users, too.
        with contextlib.suppress(urllib.error.HTTPError):
            urllib.request.urlopen(call, timeout=WAIT_S).read()
        time.sleep(1)


def photograph(url: str, key: str, pages: dict[str, str], before: Callable[[], None]) -> None:
    """Take a picture of each page as an operator sees it who has looked at the first while something happened."""
    from playwright.sync_api import expect, sync_playwright

    found = shutil.which("chromium-headless-shell") or shutil.which("chromium")
    assert found, "the pictures of the console need Chromium: `make browser` installs it"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        page = browser.new_page(base_url=url, viewport={"width": 1400, "height": 800})
        page.goto("/console")
        page.get_by_label("API key").fill(key)
        page.get_by_role("button", name="Sign in").click()
        expect(page.get_by_role("heading", name="Overview")).to_be_visible()
        before()
        for name, path in pages.items():
            if urllib.parse.urlsplit(page.url).path != path:
                page.goto(path)
            expect(page.get_by_role("heading", level=1)).to_be_visible()
            page.screenshot(path=str(IMAGES / f"{name}.png"))
        browser.close()


def main() -> None:
    for picture in (record_run, picture_console):
        with tempfile.TemporaryDirectory() as folder:
            picture(Path(folder))


if __name__ == "__main__":
    main()
