"""A real server under a limit of 1,024 files, with more clients than it can have, and clients that read nothing or send too much."""

from __future__ import annotations

import json
import socket
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest

from tests.support.engine import Engine
from tests.support.processes import Processes, wait_until
from tests.support.server import Server
from tests.support.tidegate import ENDED, behaving, chat_line

pytestmark = pytest.mark.soak

FILES_MAX = 1_024
GRACE_S = 5
MIB = 1 << 20


class Small:
    """A server with few files to open, and what is asked of it."""

    def __init__(self, server: Server) -> None:
        self.client = server.start(files_max=FILES_MAX)
        self.proc = server.proc
        self.url = server.url
        self.port = int(self.url.rpartition(":")[2])

    def rss_mib(self) -> int:
        return int(psutil.Process(self.proc.pid).memory_info().rss) // MIB

    def upload(self, data: bytes, purpose: str = "batch") -> str:
        answer = self.client.post("/v1/files", files={"file": ("in.jsonl", data)}, data={"purpose": purpose})
        assert answer.status_code == 200, answer.text
        return str(answer.json()["id"])

    def run_batch(self) -> str:
        file_id = self.upload((chat_line("a", "say a") + "\n").encode())
        asked = {"input_file_id": file_id, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
        batch = self.client.post("/v1/batches", json=asked).json()

        def ended() -> str:
            status = self.client.get(f"/v1/batches/{batch['id']}").json()["status"]
            return status if status in ENDED else ""

        return wait_until(ended, timeout_s=60, what="the batch to end")


@pytest.fixture
def small(processes: Processes, tmp_path: Path, engine: Engine) -> Iterator[Small]:
    env = {"TIDEGATE_HTTP_CLIENT_TIMEOUT_S": "5", "TIDEGATE_WORKER_GRACE_MS": str(GRACE_S * 1_000)}
    made = Small(Server(processes, tmp_path, engine=engine, env=env))
    yield made
    made.client.close()


@pytest.mark.parametrize("first_bytes", [b"", b"POST /v1/files HTTP/1.1\r\nHo"])
def test_more_silent_connections_than_files(small: Small, first_bytes: bytes) -> None:
    with ExitStack() as stack:
        for _ in range(1_100):
            silent = stack.enter_context(socket.socket())
            silent.setblocking(False)
            silent.connect_ex(("127.0.0.1", small.port))
            if first_bytes:
                try:
                    silent.send(first_bytes)
                except OSError:
                    continue
        assert small.run_batch() == "completed"
        assert small.rss_mib() < 300


def test_200_downloads_that_are_not_read(small: Small) -> None:
    path = f"/v1/files/{small.upload(b'x' * (20 * MIB), 'user_data')}/content"
    before_mib = small.rss_mib()
    with ExitStack() as stack:
        for _ in range(200):
            reader = stack.enter_context(socket.create_connection(("127.0.0.1", small.port)))
            reader.sendall(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())
        files = psutil.Process(small.proc.pid)
        wait_until(lambda: files.num_fds() > 400, timeout_s=60, what="the downloads to begin")
        assert small.run_batch() == "completed"
        assert small.rss_mib() - before_mib < 200
        wait_until(lambda: files.num_fds() < 100, timeout_s=60, what="the downloads to be cut off")
        for _ in range(20):
            reader = stack.enter_context(socket.create_connection(("127.0.0.1", small.port)))
            reader.sendall(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())
        wait_until(lambda: files.num_fds() > 50, timeout_s=60, what="downloads to begin again")
        small.proc.terminate()
        small.proc.wait(GRACE_S + 10)


def test_20_bodies_of_31_mb(small: Small) -> None:
    before_mib = small.rss_mib()
    prompt = behaving("slow=8000").ljust(31 * MIB)
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": prompt}]}).encode()

    def post(_: int) -> tuple[int, Any]:
        with httpx2.Client(base_url=small.url, timeout=60) as client:
            answer = client.post("/v1/chat/completions", content=body, headers={"Content-Type": "application/json"})
            return answer.status_code, answer.headers.get("retry-after")

    with ThreadPoolExecutor(20) as threads:
        answers = threads.map(post, range(20))
        highest_mib, end_s = 0, time.monotonic() + 5
        while time.monotonic() < end_s:
            highest_mib = max(highest_mib, small.rss_mib())
        assert highest_mib - before_mib < 400
        counted = Counter(answers)
    assert counted[429, "1"] >= 10
    assert sum(counted.values()) == 20
    assert {status for status, _ in counted} <= {200, 400, 429}
