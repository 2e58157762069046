"""The events of a batch while the server that tells them is killed: every item once, in order, and the same as the result files say."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import aiohttp
import httpx2
import pytest

from tests.support.engine import Engine
from tests.support.processes import Processes, wait_until
from tests.support.server import Server
from tests.support.sse import Event, events
from tests.support.tidegate import Site, requests

ITEMS = 150
KILLS = 3
STREAMS = 2_000


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
    engine = Engine(processes, tmp_path / "engine", latency_ms=150)
    server = Server(processes, tmp_path, engine=engine)
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
        sent = [event.data["custom_id"] for event in seen if event.kind == kind]
        found = client.get(f"/v1/files/{file_id}/content").content.splitlines()
        assert sent == [json.loads(line)["custom_id"] for line in found]
    assert sum(event.kind.startswith("item.") for event in seen) == ITEMS
    client.close()


@pytest.mark.soak
def test_two_thousand_streams_fit_into_one_process(processes: Processes, tmp_path: Path) -> None:
    """Under 200 MB and a limit of 4,096 open files; each gets the event of the end."""
    room = {"TIDEGATE_SERVER_CONNECTIONS_MAX": "2100", "TIDEGATE_LIMITS_EVENT_STREAMS_MAX": "2100"}
    server = Server(processes, tmp_path, "serve", "--upstream", "http://127.0.0.1:9", env=room)
    with server.start(files_max=4_096) as client:
        file = client.post("/v1/files", files={"file": ("in.jsonl", lines())}, data={"purpose": "batch"}).json()
        body = {"input_file_id": file["id"], "endpoint": "/v1/chat/completions"}
        batch_id = client.post("/v1/batches", json=body).json()["id"]
    ended, memory_mb = asyncio.run(_follow(server.url, batch_id, server.proc.pid))
    assert ended == STREAMS
    assert memory_mb < 200


async def _follow(url: str, batch_id: str, pid: int) -> tuple[int, int]:
    """Open all streams, look at the process, cancel the batch; returns how many got the event of the end, and the megabytes."""
    ready, ended, all_ready = 0, 0, asyncio.Event()

    async def one(session: aiohttp.ClientSession) -> None:
        nonlocal ready, ended
        async with session.get(f"{url}/v1/batches/{batch_id}/events") as answer:
            assert answer.status == 200
            first = True
            async for line in answer.content:
                ready += first
                first = False
                if ready == STREAMS:
                    all_ready.set()
                ended += line.startswith(b"event: batch.cancelled")

    timeout = aiohttp.ClientTimeout(total=300)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        streams = []
        for _ in range(STREAMS // 100):
            streams += [asyncio.create_task(one(session)) for _ in range(100)]
            await asyncio.sleep(0.2)
        await asyncio.wait_for(all_ready.wait(), 120)
        status = await asyncio.to_thread(Path(f"/proc/{pid}/status").read_text)
        async with session.post(f"{url}/v1/batches/{batch_id}/cancel") as answer:
            assert answer.status == 200
        await asyncio.gather(*streams)
    found = re.search(r"VmRSS:\s+(\d+) kB", status)
    assert found is not None
    return ended, int(found[1]) // 1_024


def next_item_event(client: httpx2.Client, path: str, last_id: int) -> tuple[int, dict[str, Any]]:
    """The next event at the door of completion batches, with its id."""
    number = 0
    with client.stream("GET", path, headers={"Last-Event-ID": str(last_id)} if last_id else {}) as answer:
        for line in answer.iter_lines():
            name, _, value = line.partition(": ")
            if name == "id":
                number = int(value)
            elif name == "data":
                return number, json.loads(value)
    raise AssertionError("the stream ended without an event")


def test_every_event_comes_once_from_an_api_that_is_killed_beside_its_worker(
    processes: Processes, tmp_path: Path, cluster_env: dict[str, str]
) -> None:
    """Over PostgreSQL, at both doors with events: the connection is cut after every event, and the API process is killed three times."""
    engine = Engine(processes, tmp_path / "engine", latency_ms=100)
    site = Site("cluster", processes, tmp_path, engine, cluster_env)
    site.begin()
    batch_id = site.submit(requests(30))
    items = [{"resourceId": "m", "request": {"messages": [{"role": "user", "content": str(n)}]}} for n in range(9)]
    place = "/v1/completion-batch/default/prod"
    other_id = site.client().post(place, json={"type": "ASYNC", "items": items}).json()["batchId"]
    others: list[tuple[int, dict[str, Any]]] = []
    seen: list[Event] = []
    kills = [4, 12, 20]

    def is_over() -> bool:
        found = read(site.client(), batch_id, seen[-1].id if seen else None, count=1)
        seen.extend(found)
        if kills and len(seen) >= kills[0]:
            kills.pop(0)
            assert site.front is not None
            site.front.kill()
            site.front.wait()
            site.api()
        if not others or others[-1][1]["action"] != "batch-completed":
            others.append(next_item_event(site.client(), f"{place}/{other_id}/events", others[-1][0] if others else 0))
        return bool(seen) and seen[-1].kind == "batch.completed"

    wait_until(is_over, timeout_s=120, what="the event of the batch's end")
    assert not kills
    # One of its own, a running and a completed one of each item, and the end.
    assert [number for number, _ in others] == list(range(1, 21))
    shown = {item["itemId"]: item for item in site.client().get(f"{place}/{other_id}").json()["items"]}
    ends = [event["payload"] for _, event in others if event["action"] == "item-completed"]
    assert {item["itemId"]: item for item in ends} == shown
    numbers = [event.id or 0 for event in seen]
    assert numbers == sorted(set(numbers))
    batch = site.batch(batch_id)
    assert seen[-1].data == batch
    sent = [event.data["custom_id"] for event in seen if event.kind == "item.completed"]
    found = site.client().get(f"/v1/files/{batch['output_file_id']}/content").content.splitlines()
    assert sent == [json.loads(line)["custom_id"] for line in found]
    assert len(sent) == 30
