"""The simulated engine as a process of its own, with its calls log: the witness of what really was called."""

from __future__ import annotations

import json
import os
import sys
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.support.processes import Proc, Processes


class Engine:
    """A running simulated engine; `url` is what an upstream setting takes. It answers at once, or each call after `latency_ms`."""

    def __init__(
        self, processes: Processes, directory: Path, *options: str, mode: str = "", latency_ms: int = 0, port: int = 0
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.calls_log = directory / "calls.jsonl"
        command = [sys.executable, "-m", "tidegate.simulate.engine", "--port", str(port)]
        command += ["--mode", mode or ("fixed" if latency_ms else "instant")]
        command += ["--latency-ms", str(latency_ms)] if latency_ms else []
        # It keeps a scratch file, and a killed one cannot remove it.
        env = {**os.environ, "TMPDIR": str(directory)}
        command += ["--calls-log", str(self.calls_log), *options]
        self.proc: Proc = processes.start(command, name="engine", env=env)
        line = self.proc.wait_for_line(r"simulated engine listening on (http://[^\s/]+)(/v1)")
        self.root = line.group(1)
        self.url = line.group(1) + line.group(2)

    @property
    def port(self) -> int:
        return int(self.root.rsplit(":", 1)[1])

    def calls(self) -> list[dict[str, Any]]:
        """Every call it saw, in the order it saw them; a last line that is still being written is left out."""
        if not self.calls_log.exists():
            return []
        whole, _, _ = self.calls_log.read_text().rpartition("\n")
        return [json.loads(line) for line in whole.splitlines()]

    def settle(self) -> None:
        """Wait until every call that reached it before is in the log: a new connection is served after those that were there."""
        with urllib.request.urlopen(f"{self.root}/metrics", timeout=30) as response:
            response.read()

    def set_faults(self, rates: Mapping[str, float] | None = None) -> None:
        """Let these shares of calls meet these behaviours from now on, such as `{"503": 1.0}`; nothing heals the engine."""
        body = json.dumps({} if rates is None else {"rate": dict(rates)}).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.root}/simulate/faults", body, headers, method="POST")
        with urllib.request.urlopen(request, timeout=30) as response:
            response.read()
