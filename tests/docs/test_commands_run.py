"""The commands on the README, in the quickstart and in the how-tos run as they stand there, as real processes, in an empty directory."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.clients.environments import CLIENTS, Environment
from tests.docs.pages import PAGES, REPOSITORY, Block, blocks, name, page
from tests.docs.typed import BIN, environment, started_as
from tests.support.processes import Proc, Processes, free_port

# The ports on the pages, which may be taken on this machine.
PORTS = ("8000", "8080")
LISTENS = r"listening on http://"
# What the blocks in JavaScript import, locked.
NODE = Path(__file__).parent / "node"
DONE_S = 100.0


class Reader:
    """Someone who follows a page from its beginning to its end, in an empty directory beside the examples."""

    def __init__(self, processes: Processes, here: Path) -> None:
        self._processes = processes
        self._here = here
        self._ports = {shown: str(free_port()) for shown in PORTS}
        shutil.copytree(REPOSITORY / "examples", here / "examples")

    def follow(self, block: Block) -> Proc | None:
        text = block.text
        for shown, free in self._ports.items():
            text = text.replace(shown, free)
        how = block.how or ""
        if how.startswith("file="):
            (self._here / how.removeprefix("file=")).write_text(text)
            return None
        if block.language == "python":
            python = Environment(client, CLIENTS[client]).python if (client := _client(block)) else BIN / "python"
            return self._done([str(python), "-c", text])
        if block.language == "js":
            (self._here / "batch.mjs").write_text(text)
            (self._here / "node_modules").symlink_to(_node_packages())
            return self._done([_needed("node"), "batch.mjs"])
        if how == "background":
            command = text.strip() + (f" --port {self._ports['8080']}" if self._is_default_serve(text) else "")
            started = self._start(started_as(command))
            started.wait_for_line(LISTENS)
            return started
        return self._done(started_as(text))

    @staticmethod
    def _is_default_serve(text: str) -> bool:
        return text.startswith("tidegate serve") and "--config" not in text and "--port" not in text

    def _start(self, command: list[str]) -> Proc:
        env = {**environment(self._here), "TIDEGATE_WORKER_POLL_MS": "200"}
        return self._processes.start(command, name="reader", env=env, cwd=self._here)

    def _done(self, command: list[str]) -> Proc:
        proc = self._start(command)
        assert proc.wait(DONE_S) == 0, proc.logs()
        return proc


def _needed(program: str) -> str:
    found = shutil.which(program)
    assert found, f"the blocks in JavaScript need {program}, which is not installed"
    return found


def _node_packages() -> Path:
    """Where the packages of the lock file are, which are installed once and kept."""
    lock = NODE / "package-lock.json"
    folder = REPOSITORY / "build" / f"node-{hashlib.sha256(lock.read_bytes()).hexdigest()[:12]}"
    if not (folder / ".installed").exists():
        folder.mkdir(parents=True, exist_ok=True)
        for each in ("package.json", lock.name):
            shutil.copy(NODE / each, folder)
        options = ["--ignore-scripts", "--no-audit", "--no-fund", "--silent"]
        subprocess.run([_needed("npm"), "ci", *options], cwd=folder, check=True, timeout=300)
        (folder / ".installed").touch()
    return folder / "node_modules"


@pytest.fixture
def reader(processes: Processes, tmp_path: Path) -> Reader:
    here = tmp_path / "reader"
    here.mkdir()
    return Reader(processes, here)


def _client(block: Block) -> str:
    """The client of other people that a block needs, which is installed apart."""
    return (block.how or "").partition("with=")[2]


def _is_tested(where: str) -> bool:
    return any(block.how is not None for block in blocks(page(where)))


@pytest.mark.parametrize("where", [where for path in PAGES if _is_tested(where := name(path))])
def test_the_commands_on_a_page_run(where: str, reader: Reader) -> None:
    tested = [block for block in blocks(page(where)) if block.how is not None and not _client(block)]
    if where in ("README.md", "docs/quickstart.md"):
        assert len(tested) >= 5
    outputs = [followed.stdout() for block in tested if (followed := reader.follow(block)) is not None]
    if where == "README.md":
        assert any("completed 100 of 100" in text for text in outputs), "the SDK's batch"
        assert any("tg_live_" in text for text in outputs), "a key"


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_the_blocks_that_need_a_client_run(reader: Reader) -> None:
    """Its environment takes minutes to install."""
    for block in blocks(page("docs/how-to/from-litellm.md")):
        if block.how is not None:
            reader.follow(block)


def test_make_run_finds_its_work_done_the_second_time(processes: Processes, tmp_path: Path) -> None:
    """What `make run` calls, in a copy of the examples; the Makefile's part is to set up the environment."""
    assert "./examples/run.sh" in page("Makefile")
    shutil.copytree(REPOSITORY / "examples", tmp_path / "examples")
    env = environment(tmp_path)
    outputs = []
    for _ in range(2):
        proc = processes.start(["bash", "examples/run.sh"], name="make-run", env=env, cwd=tmp_path)
        assert proc.wait(DONE_S) == 0, proc.logs()
        outputs.append(proc.stdout() + proc.stderr())
    assert "320 of 320 items succeeded" in outputs[0]
    assert "done already" in outputs[1]
    assert len((tmp_path / ".tidegate-demo" / "results.jsonl").read_text().splitlines()) == 320
