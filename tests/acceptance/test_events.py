"""The events of a batch while the server that tells them is killed: every item once, in order, and the same as the result files say."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import httpx2

from tests.support.engine import Engine
from tests.support.processes import Processes, wait_until
from tests.support.sse import Event, events

ITEMS = 150
KILLS = 3


def lines() -> bytes:
    one = {"method": "POST", "url": "/v1/chat/completions"}
    bodies = [
        {"model": "m", "messages": [{"role": "user", "content": f"Say {number}."}]} for number in range(ITEMS - 1)
    ]
    bodies.append({"model": "m", "messages": "wrong"})
    return b"".join(
        json.dumps({"custom_id": f"c-{number}", **one, "body": body}).encode() + b"\n"
        for number, body in enumerate(bodies)
    )


class Server:
    """`tidegate serve` over one data directory, as often as it is started."""

    def __init__(self, processes: Processes, data: Path, upstream: str) -> None:
        self._processes = processes
        command = [sys.executable, "-m", "tidegate", "serve", "--data", str(data), "--port", "0"]
        self._command = [*command, "--upstream", upstream]

    def start(self) -> httpx2.Client:
        self.proc = self._processes.start(self._command, name="serve")
        url = self.proc.wait_for_line(r"(http://127\.0\.0\.1:\d+)").group(1)
        return httpx2.Client(base_url=url, timeout=60)


def read(client: httpx2.Client, batch_id: str, last_id: int | None, count: int) -> list[Event]:
    """So many events after this one, or all until the stream ends."""
    headers = {} if last_id is None else {"Last-Event-ID": str(last_id)}
    found: list[Event] = []
    with client.stream("GET", f"/v1/batches/{batch_id}/events", headers=headers) as answer:
        for event in events(answer.iter_lines()):
            found.append(event)
            if len(found) == count:
                break
    return found


def test_a_killed_server_loses_and_repeats_no_event(processes: Processes, tmp_path: Path) -> None:
    engine = Engine(processes, tmp_path / "engine", "--latency-ms", "150", mode="fixed")
    server = Server(processes, tmp_path / "data", engine.url)
    client = server.start()
    file = client.post("/v1/files", files={"file": ("in.jsonl", lines())}, data={"purpose": "batch"}).json()
    body = {"input_file_id": file["id"], "endpoint": "/v1/chat/completions"}
    batch_id = client.post("/v1/batches", json=body).json()["id"]
    seen: list[Event] = []
    for _ in range(KILLS):
        seen += read(client, batch_id, seen[-1].id if seen else None, count=10)
        server.proc.kill()
        server.proc.wait()
        client.close()
        client = server.start()

    def is_over() -> bool:
        nonlocal seen
        seen += read(client, batch_id, seen[-1].id, count=-1)
        return seen[-1].kind == "batch.completed"

    wait_until(is_over, timeout_s=90, what="the batch to end")
    numbers = [event.id or 0 for event in seen]
    assert numbers == sorted(set(numbers))
    batch: dict[str, Any] = client.get(f"/v1/batches/{batch_id}").json()
    assert seen[-1].data == batch
    for kind, file_id in (("item.completed", batch["output_file_id"]), ("item.failed", batch["error_file_id"])):
        told = [event.data["custom_id"] for event in seen if event.kind == kind]
        found = client.get(f"/v1/files/{file_id}/content").content.splitlines()
        assert told == [json.loads(line)["custom_id"] for line in found]
    assert sum(event.kind.startswith("item.") for event in seen) == ITEMS
    client.close()
