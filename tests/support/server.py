"""`tidegate serve` or `tidegate api` as it is shipped: unlike a `Site`, it has no short leases and polls."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx2

from tests.support.engine import Engine
from tests.support.processes import Proc, Processes, wait_until
from tests.support.sdks import anthropic, openai
from tests.support.tidegate import TIDEGATE, operator_headers


class Server:
    """One data directory and the process over it, as often as it is started. `words` are its command, which is `serve` without any."""

    engine: Engine
    proc: Proc
    url = ""

    def __init__(
        self,
        processes: Processes,
        directory: Path,
        *words: str,
        engine: Engine | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self._processes = processes
        self.data = directory / "data"
        if engine is not None:
            self.engine = engine
        upstream = ("--upstream", engine.url) if engine else ()
        self._command = [TIDEGATE, *(words or ("serve",)), *upstream, "--data", str(self.data), "--port", "0"]
        self._env = env or {}

    def start(self, more: Mapping[str, str] | None = None, files_max: int = 0) -> httpx2.Client:
        """Start it and return a client; `files_max` is how many files it may have open."""
        limited = ("sh", "-c", f'ulimit -n {files_max}; exec "$@"', "sh") if files_max else ()
        env = {**os.environ, **self._env, **(more or {})}
        self.proc = self._processes.start([*limited, *self._command], name=self._command[1], env=env)
        self.url = self.proc.wait_for_line(r"(http://127\.0\.0\.1:\d+)").group(1)
        return self.client()

    def client(self, **headers: str) -> httpx2.Client:
        return httpx2.Client(base_url=self.url, headers=headers, timeout=60)

    def operator(self) -> httpx2.Client:
        """A client of the operator who runs it."""
        return self.client(**operator_headers(self.data))

    def key(self, org: str = "acme", **wanted: Any) -> str:
        """A new key of an organization."""
        with self.operator() as operator:
            return str(operator.post("/admin/v1/keys", json={"org": org, **wanted}).json()["key"])

    def until_it_asks_for_keys(self) -> None:
        """Wait until it has noticed the first key."""
        with self.client() as client:
            wait_until(lambda: client.get("/v1/models").status_code == 401, 20, "the server to ask for keys")

    def openai(self, key: str = "unused") -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0)

    def anthropic(self, key: str = "unused") -> anthropic.Anthropic:
        return anthropic.Anthropic(base_url=self.url, api_key=key, max_retries=0)
