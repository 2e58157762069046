"""The command line as its users run it: a directory of their own, a simulated engine, and processes."""

from __future__ import annotations

import fcntl
import json
import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.support.engine import Engine
from tests.support.processes import Proc, Processes
from tests.support.tidegate import TIDEGATE, operator_headers, requests

QUICK = {
    "TIDEGATE_WORKER_POLL_MS": "100",
    "TIDEGATE_WORKER_SWEEP_MS": "500",
    "TIDEGATE_WORKER_IN_FLIGHT_MAX": "8",
    "TIDEGATE_INGEST_SLICE_COUNT_MAX": "8",
    "TIDEGATE_WORKER_GRACE_MS": "5000",
}


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
        return self.write(requests(count, text.format))

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

    def json_of(self, *arguments: str, code: int = 0, **variables: str) -> Any:
        """Return what a command prints as JSON."""
        return json.loads(self.done(*arguments, code=code, **variables).stdout())

    def results(self, name: str = "results.jsonl") -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.here / name).read_text().splitlines()]

    def custom_ids(self, name: str = "results.jsonl") -> list[str]:
        return [line["custom_id"] for line in self.results(name)]

    def called(self) -> list[dict[str, Any]]:
        """The calls for items that the engine saw."""
        return [call for call in self.engine.calls() if call["path"] == "/v1/chat/completions"]

    def answered(self) -> int:
        """The answers that the store of this desk has recorded, asked beside a run that may be killed at any moment."""
        path = self.here / ".tidegate" / "tidegate.db"
        if not path.exists():
            return 0
        with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as store:
            if not store.execute("select 1 from sqlite_master where name = 'jobs'").fetchone():
                return 0
            return int(store.execute("select coalesce(sum(answered_count), 0) from jobs").fetchone()[0])

    def verified(self, batch: str) -> None:
        """The judge's verdict, with the engine as witness."""
        self.done("verify", batch, "--witness", str(self.engine.calls_log))


class Serving:
    """`tidegate serve` on this desk, and a caller of its API."""

    def __init__(self, desk: Desk, *more: str, **variables: str) -> None:
        self.desk = desk
        # Settings that a test brings along name deployments by model, so there is no gateway for every one.
        upstream = () if "--config" in more else ("--upstream", desk.engine.url)
        self.proc: Proc = desk.start("serve", *upstream, "--port", "0", *more, **variables)
        self.url = self.proc.wait_for_line(r"^tidegate listening on (http://\S+)$").group(1)

    def call(self, method: str, path: str, body: Any = None, key: str | None = None) -> tuple[int, Any]:
        return self._asked(method, path, body, {"Authorization": f"Bearer {key}"} if key is not None else {})

    def operate(self, path: str, body: Any = None, method: str = "POST") -> tuple[int, Any]:
        """Ask the admin API as the operator on this machine."""
        return self._asked(method, f"/admin/v1/{path}", body, operator_headers(self.desk.here / ".tidegate"))

    def _asked(self, method: str, path: str, body: Any, headers: dict[str, str]) -> tuple[int, Any]:
        content = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", **headers}
        with self.client() as client:
            answer = client.request(method, path, content=content, headers=headers)
        return answer.status_code, answer.json()

    def client(self) -> httpx2.Client:
        return httpx2.Client(base_url=self.url, timeout=30, verify=False, trust_env=False)

    def submit(self, lines: Sequence[str], key: str | None = None, **more: Any) -> str:
        files = {"file": ("in.jsonl", "".join(line + "\n" for line in lines).encode())}
        headers = {"Authorization": f"Bearer {key}"} if key is not None else {}
        with self.client() as client:
            file = client.post("/v1/files", files=files, data={"purpose": "batch"}, headers=headers).json()
        wanted = {"input_file_id": file["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h", **more}
        status, batch = self.call("POST", "/v1/batches", wanted, key)
        assert status == 200, batch
        return str(batch["id"])


@pytest.fixture
def desk(processes: Processes, engine: Engine, tmp_path: Path) -> Desk:
    here = tmp_path / "desk"
    here.mkdir()
    return Desk(processes, engine, here)


@pytest.fixture
def serving(desk: Desk) -> Serving:
    return Serving(desk)


def summary_of(run: Proc) -> dict[str, Any]:
    """What a run says at its end with `--json`."""
    assert run.wait(90) in (0, 1), run.logs()
    return dict(json.loads(run.stdout()))


@contextmanager
def store_taken(desk: Desk) -> Iterator[None]:
    """Have the data directory's store as a server has it that does not listen yet."""
    (desk.here / ".tidegate").mkdir(mode=0o700)
    with (desk.here / ".tidegate" / "tidegate.db.writer").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield
