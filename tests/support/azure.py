"""A real server of Azure's blob API (Azurite, from npm) in a directory of its own, while a test uses it.

Run as a module it fetches the server, once: that may take longer than a test may.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import os
import secrets
import shutil
import subprocess
import tempfile
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from email.utils import formatdate
from pathlib import Path

from tests.support.processes import Processes, free_port, wait_until

VERSION = "3.37.0"
INSTALLED = Path(__file__).resolve().parents[2] / "build" / f"azurite-{VERSION}"
API_VERSION = "2021-08-06"


@dataclass(frozen=True)
class AzureServer:
    """One storage account."""

    port: int
    account: str = "tests"
    key: str = field(default_factory=lambda: base64.b64encode(secrets.token_bytes(64)).decode(), repr=False)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}/{self.account}"

    def create_container(self) -> str:
        """A fresh, empty container; returns its name."""
        name = f"t-{secrets.token_hex(8)}"
        headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": API_VERSION}
        resource = f"/{self.account}/{self.account}/{name}\nrestype:container"
        signed = "\n".join(["PUT", *[""] * 11, *(f"{key}:{value}" for key, value in headers.items()), resource])
        digest = hmac.digest(base64.b64decode(self.key), signed.encode(), hashlib.sha256)
        headers["Authorization"] = f"SharedKey {self.account}:{base64.b64encode(digest).decode()}"
        url = f"{self.endpoint}/{name}?restype=container"
        with urllib.request.urlopen(urllib.request.Request(url, method="PUT", headers=headers), timeout=30):
            return name


@contextlib.contextmanager
def azure_server(directory: Path) -> Iterator[AzureServer]:
    """Run the server, which `make azurite` has fetched."""
    program = INSTALLED / "node_modules/azurite/dist/src/blob/main.js"
    assert program.exists(), "Azurite is not here: run `make azurite`"
    server = AzureServer(free_port())
    directory.mkdir(parents=True, exist_ok=True)
    processes = Processes(directory / "logs")
    options = ["--blobHost", "127.0.0.1", "--blobPort", str(server.port), "--location", str(directory / "data")]
    env = {**os.environ, "AZURITE_ACCOUNTS": f"{server.account}:{server.key}"}
    proc = processes.start(["node", program, *options, "--disableTelemetry"], name="azurite", env=env, cwd=directory)
    try:
        proc.wait_for_line("successfully listen", timeout_s=120)
        wait_until(server.create_container, 30, "a container")
        yield server
    finally:
        processes.close()


def fetch() -> None:
    """Fetch the server where it is not here yet; what an interrupted fetch left is never taken for it."""
    if INSTALLED.exists():
        return
    npm = shutil.which("npm")
    if npm is None:
        raise SystemExit("npm is not here: run `make browser`, or put it on the PATH")
    INSTALLED.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="azurite-", dir=INSTALLED.parent) as name:
        install = [npm, "install", "--silent", "--no-audit", "--no-fund", f"azurite@{VERSION}"]
        subprocess.run(install, cwd=name, check=True)
        Path(name).rename(INSTALLED)
        # It is looked for at the end, to be removed.
        Path(name).mkdir()


if __name__ == "__main__":
    fetch()
