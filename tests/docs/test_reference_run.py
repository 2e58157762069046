"""The example of each command in the reference of commands is typed as it stands there, as a real process, against a server that runs."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest

from tests.docs.pages import page
from tests.docs.typed import BIN, environment, started_as
from tests.support.processes import Proc, Processes, free_port
from tests.support.tidegate import behaving

DONE_S = 100.0
CLI = "docs/reference/cli.md"
SHOWN_BATCH, SHOWN_FILE, SHOWN_KEY = "batch_0f3kQ2mZ8s1xW7vB4nD9Lc", "file-0f3kQ2mZ8s1xW7vB4nD9Lc", "Ab3dE5gH"
# Those that run until they are stopped, one that needs a public receiver, and one that needs a batch that cannot be published.
NOT_HERE = ("serve", "api", "worker", "simulate", "webhooks test", "batches abandon")
# One line of each kind: answered, refused, and slow enough to be met while it runs.
ANSWERED, REFUSED, SLOW = "say it", behaving("400"), behaving("latency=60000")


def examples() -> list[str]:
    """The commands to copy, in the order of the page."""
    blocks = re.findall(r"^```text\n(.*?)^```$", page(CLI), re.M | re.S)
    return [line for block in blocks for line in block.splitlines()[1:] if line.startswith("tidegate ")]


def _of(command: str) -> str:
    """The name of the command in an example: `batches list`."""
    words = command.split()[1:]
    return " ".join(words[:2]) if page(CLI).count(f"### `tidegate {' '.join(words[:2])}`") else words[0]


class Operator:
    """Someone with a server, a key and batches in every state, who types what the page shows about theirs."""

    def __init__(self, processes: Processes, here: Path) -> None:
        self._processes = processes
        self._here = here
        engine, self._port = free_port(), free_port()
        self._engine = f"http://127.0.0.1:{engine}/v1"
        self._elsewhere = f"--server http://127.0.0.1:{self._port} --api-key env:GATEWAY_KEY"
        self._env = {**environment(here), "TIDEGATE_WORKER_POLL_MS": "200"}
        (here / "tidegate.yaml").write_text(
            f"server: {{port: {self._port}}}\nmodels:\n  m: {{deployments: [{{url: '{self._engine}'}}]}}\n"
            f"  gpt-4o-mini: {{deployments: [{{url: '{self._engine}'}}]}}\n"
        )
        self._write("requests.jsonl", ANSWERED, ANSWERED)
        self._started(f"simulate --port {engine} --mode instant")
        self._started("serve --config tidegate.yaml")
        for variable, more in (("OPERATOR_KEY", "--scopes admin:read"), ("GATEWAY_KEY", "")):
            self._env[variable] = self.done(f"keys create --org acme {more}").stdout().strip()
        self._key_id = self._env["GATEWAY_KEY"].removeprefix("tg_live_")[:8]

    def _write(self, name: str, *texts: str) -> None:
        body = {"model": "m", "max_tokens": 8}
        lines = [
            {
                "custom_id": f"c{number}",
                "method": "POST",
                "url": "/v1/chat/completions",
                "body": body | {"messages": [{"role": "user", "content": text}]},
            }
            for number, text in enumerate(texts)
        ]
        (self._here / name).write_text("".join(json.dumps(line) + "\n" for line in lines))

    def _started(self, command: str) -> None:
        proc = self._processes.start([str(BIN / "tidegate"), *shlex.split(command)], env=self._env, cwd=self._here)
        proc.wait_for_line(r"listening on http://")

    def done(self, command: str) -> Proc:
        text = f"tidegate {command}"
        proc = self._processes.start(started_as(text), name=_of(text), env=self._env, cwd=self._here)
        assert proc.wait(DONE_S) == 0, proc.logs()
        return proc

    def _batch_with_canary(self) -> str:
        self._write("requests.jsonl", SLOW, SLOW)
        asked = {
            "input_file_id": self._file(self._elsewhere),
            "endpoint": "/v1/chat/completions",
            "completion_window": "24h",
        }
        headers = {"Authorization": f"Bearer {self._env['GATEWAY_KEY']}", "Content-Type": "application/json"}
        request = Request(
            f"http://127.0.0.1:{self._port}/v1/batches",
            json.dumps({**asked, "canary": {"items": 1, "max_error_share": 0.1, "then": "wait"}}).encode(),
            headers,
        )
        with urlopen(request) as answer:
            return str(json.load(answer)["id"])

    def _batch(self, *texts: str, ended: bool = True) -> str:
        self._write("made.jsonl", *texts)
        batch = self.done(f"batches create made.jsonl {self._elsewhere}").stdout().split()[0]
        if ended:
            proc = self._processes.start(
                [str(BIN / "tidegate"), "batches", "watch", batch], env=self._env, cwd=self._here
            )
            proc.wait(DONE_S)
        return batch

    def _batch_for(self, name: str) -> str:
        """A batch that a command can be about."""
        if name == "batches canary":
            return self._batch_with_canary()
        if name in ("batches cancel", "batches pause", "batches set"):
            return self._batch(SLOW, ended=False)
        if name == "batches resume":
            batch = self._batch(SLOW, ended=False)
            self.done(f"batches pause {batch}")
            return batch
        return self._batch(ANSWERED, REFUSED) if name == "batches retry" else self._batch(ANSWERED)

    def _file(self, where: str = "") -> str:
        return self.done(f"files upload requests.jsonl {where}").stdout().split()[0]

    def typed(self, example: str) -> str:
        """An example with what is this operator's own in place of what the page shows."""
        name, text = _of(example), example.removeprefix("tidegate ")
        own: dict[str, Any] = {
            "https://gateway:8080": f"http://127.0.0.1:{self._port}",
            "http://localhost:8000/v1": self._engine,
            "http://10.0.0.7:8000/v1": self._engine,
            "/backups/": "backups/",
            "--data .tidegate": "--data .restored",
            SHOWN_KEY: self._key_id,
        }
        if SHOWN_BATCH in text:
            own[SHOWN_BATCH] = self._batch_for(name)
        if SHOWN_FILE in text:
            own[SHOWN_FILE] = self._file()
        for shown, mine in own.items():
            text = text.replace(shown, mine)
        # What a server runs over is its own, and there is a configuration already.
        return text + {"run": " --data .run", "migrate": " --data .migrated", "init": " second.yaml"}.get(name, "")


@pytest.mark.timeout(400)
def test_every_example_of_the_reference_can_be_typed(processes: Processes, tmp_path: Path) -> None:
    found = [example for example in examples() if _of(example) not in NOT_HERE]
    assert len(found) > 50
    (tmp_path / "here").mkdir()
    operator = Operator(processes, tmp_path / "here")
    # What is removed must be there for the others; a model goes before the deployment that serves it.
    found.sort(key=lambda example: (" remove " in example, "deployments remove" in example))
    for example in found:
        operator.done(operator.typed(example))
