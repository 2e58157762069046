"""The command line as its users run it: a directory of their own, a simulated engine, and processes."""

from __future__ import annotations

import fcntl
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.engine import Engine
from tests.support.processes import Proc, Processes

TIDEGATE = str(Path(sys.executable).with_name("tidegate"))
QUICK = {
    "TIDEGATE_WORKER_POLL_MS": "100",
    "TIDEGATE_WORKER_SWEEP_MS": "500",
    "TIDEGATE_WORKER_IN_FLIGHT_MAX": "8",
    "TIDEGATE_INGEST_SLICE_COUNT_MAX": "8",
    "TIDEGATE_WORKER_GRACE_MS": "5000",
}


def chat(custom_id: str, text: str) -> str:
    body = {"model": "m", "messages": [{"role": "user", "content": text}], "max_tokens": 8}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body})


def behaving(behaviour: str) -> str:
    """A prompt that scripts how the simulated engine treats its call."""
    return json.dumps({"behave": behaviour})


@dataclass
class Desk:
    """One user's directory with an input in it and an engine to send it to."""

    processes: Processes
    engine: Engine
    here: Path

    def write(self, lines: Sequence[str], name: str = "requests.jsonl") -> Path:
        path = self.here / name
        path.write_text("".join(line + "\n" for line in lines))
        return path

    def write_requests(self, count: int, text: str = "say {}") -> Path:
        return self.write([chat(f"c{number}", text.format(number)) for number in range(count)])

    def start(self, *arguments: str, **variables: str) -> Proc:
        env = {"PATH": os.environ["PATH"], "HOME": str(self.here), **QUICK, **variables}
        return self.processes.start([TIDEGATE, *arguments], name=arguments[0], env=env, cwd=self.here)

    def run(self, *arguments: str, **variables: str) -> Proc:
        """`tidegate run requests.jsonl --upstream … -o results.jsonl`, begun."""
        usual = ["run", "requests.jsonl", "--upstream", self.engine.url, "-o", "results.jsonl"]
        return self.start(*usual, *arguments, **variables)

    def done(self, *arguments: str, code: int = 0, **variables: str) -> Proc:
        """Any command, run to its end with this exit code."""
        proc = self.start(*arguments, **variables)
        assert proc.wait(60) == code, proc.logs()
        return proc

    def results(self, name: str = "results.jsonl") -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.here / name).read_text().splitlines()]

    def called(self) -> list[dict[str, Any]]:
        """The calls for items that the engine saw."""
        return [call for call in self.engine.calls() if call["path"] == "/v1/chat/completions"]

    def verified(self, batch: str) -> None:
        """The judge's verdict, with the engine as witness."""
        self.done("verify", batch, "--witness", str(self.engine.calls_log))


@pytest.fixture
def desk(processes: Processes, engine: Engine, tmp_path: Path) -> Desk:
    here = tmp_path / "desk"
    here.mkdir()
    return Desk(processes, engine, here)


@contextmanager
def store_taken(desk: Desk) -> Iterator[None]:
    """Have the data directory's store as a server has it that does not listen yet."""
    (desk.here / ".tidegate").mkdir(mode=0o700)
    with (desk.here / ".tidegate" / "tidegate.db.writer").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield
