"""The completion-batch API as its callers use it, over `tidegate serve` and a simulated model server: streams that are cut, callbacks,
capacity, cancelling, and the samples of its documentation. Each defect of the first server that spoke this API is met here or in
`tests/web/completion_batch`."""

from __future__ import annotations

import base64
import hmac
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.support.engine import Engine
from tests.support.processes import Processes, wait_until
from tests.support.receiver import ALLOWED, Receiver
from tests.support.server import Server
from tests.support.tidegate import END_S

PLACE = "/v1/completion-batch/default/prod"
# The names that the samples use.
WORKSPACE, ENVIRONMENT = "6c41dc1b-910c-4358-beef-2c609d38db31", "6c1957ca-77ca-49b3-8fa1-0590281b8b44"


@pytest.fixture
def make_server(processes: Processes, tmp_path: Path) -> Callable[..., Server]:
    """Make a server, not started yet, over an engine whose calls take so long."""

    def make(latency_ms: int, **env: str) -> Server:
        engine = Engine(processes, tmp_path / "engine", latency_ms=latency_ms)
        return Server(processes, tmp_path, engine=engine, env=env)

    return make


def items_of(count: int, *more: Any) -> list[dict[str, Any]]:
    requests = [{"messages": [{"role": "user", "content": f"Say {number}.\u2028"}]} for number in range(count)]
    return [{"resourceId": "m", "request": one} for one in (*requests, *more)]


def read(answer: httpx2.Response, count: int) -> tuple[list[tuple[int, dict[str, Any]]], list[str]]:
    """So many events, each with its id, or all there are; and the markers behind them."""
    found: list[tuple[int, dict[str, Any]]] = []
    markers, last_id = [], 0
    for line in answer.iter_lines():
        name, _, value = line.partition(": ")
        if name == "id":
            last_id = int(value)
        elif name == "data" and value.startswith("["):
            markers.append(value)
        elif name == "data":
            found.append((last_id, json.loads(value)))
            if len(found) == count:
                break
    return found, markers


def test_a_stream_that_is_cut_after_every_event(make_server: Callable[..., Server]) -> None:
    server = make_server(latency_ms=150)
    client = server.start()
    anthropic = {"system": "s", "max_tokens": 5, "messages": [{"role": "user", "content": "x"}]}
    items = items_of(6, {"input": "hello"}, anthropic, {"messages": []})
    seen: list[tuple[int, dict[str, Any]]] = []
    markers: list[str] = []
    for turn in range(100):
        headers = {"Idempotency-Key": "one"}
        if seen:
            headers["Last-Event-ID"] = str(seen[-1][0])
        batch_id = seen[0][1]["payload"]["batchId"] if seen else None
        if turn % 2:
            way = client.stream("GET", f"{PLACE}/{batch_id}/events", headers=headers)
        else:
            way = client.stream("POST", PLACE, json={"type": "SYNC", "items": items}, headers=headers)
        with way as answer:
            assert answer.status_code == 200
            assert answer.headers["content-type"].startswith("text/event-stream")
            more, markers = read(answer, 1)
        seen += more
        if seen[-1][1]["action"] in ("batch-failed", "batch-completed"):
            break
        if turn in (3, 9):
            server.proc.kill()
            server.proc.wait()
            client.close()
            client = server.start()
    assert [number for number, _ in seen] == list(range(1, len(seen) + 1)), "every event once, in order"
    with client.stream("GET", f"{PLACE}/{batch_id}/events") as answer:
        whole, markers = read(answer, -1)
    assert markers == ["[DONE]"]
    assert whole == seen, "a later reader gets the same"
    counts = Counter(event["action"] for _, event in seen)
    assert counts == {"batch-created": 1, "item-running": 9, "item-completed": 8, "item-failed": 1, "batch-failed": 1}
    batch = client.get(f"{PLACE}/{batch_id}").json()
    sent = {
        event["payload"]["itemId"]: event["payload"]
        for _, event in seen
        if event["action"] in ("item-completed", "item-failed")
    }
    assert {item["itemId"]: item for item in batch["items"]} == sent, "what was sent is what the store has"
    assert seen[-1][1]["payload"] | {"items": []} == {
        name: value for name, value in batch.items() if name not in ("createdByUser", "createdByApiKey")
    } | {"items": []}
    assert Counter(call["path"] for call in server.engine.calls()).keys() == {"/v1/chat/completions", "/v1/responses"}
    assert client.get(f"{PLACE}/{batch_id}/events", headers={"Last-Event-ID": str(seen[-1][0])}).status_code == 204


def test_callbacks(make_server: Callable[..., Server]) -> None:
    server = make_server(latency_ms=20, **ALLOWED)
    client = server.start()
    with Receiver(lambda got: 500 if len(receiver.got) == 1 else 200) as receiver:
        options = {"url": receiver.url, "headers": {"X-API-Key": "their-key"}, "events": ["all"]}
        body = {"type": "CALLBACK", "callbackOptions": options, "items": items_of(4, {"messages": []})}
        batch = client.post(PLACE, json=body).json()

        def is_all_there() -> bool:
            states = [one["status"] for one in client.get("/v1/webhook_deliveries?limit=100").json()["data"]]
            return len(states) == 11 and set(states) == {"delivered"}

        wait_until(is_all_there, END_S, "every callback to be delivered")
        got = list(receiver.got)
    secret = base64.b64decode(batch["callbackOptions"]["signingSecret"].removeprefix("whsec_"))
    for one in got:
        signed = b".".join((one.id.encode(), one.headers["webhook-timestamp"].encode(), one.body))
        proof = base64.b64encode(hmac.new(secret, signed, sha256).digest()).decode()
        assert one.headers["webhook-signature"] == f"v1,{proof}"
        assert one.headers["x-api-key"] == "their-key"
        assert "\u2028".encode() not in one.body
    bodies = [json.loads(body) for body in {one.id: one.body for one in got}.values()]
    assert len(got) == len(bodies) + 1, "the one that failed came again, under the same id"
    kinds = Counter((one["event"], one["payload"]["status"]) for one in bodies)
    assert kinds == {
        ("ITEM_UPDATE", "RUNNING"): 5,
        ("ITEM_UPDATE", "COMPLETED"): 4,
        ("ITEM_UPDATE", "FAILED"): 1,
        ("BATCH_UPDATE", "FAILED"): 1,
    }
    stored = {item["itemId"]: item for item in client.get(f"{PLACE}/{batch['batchId']}").json()["items"]}
    ended = [
        one["payload"]
        for one in bodies
        if one["payload"]["status"] in ("COMPLETED", "FAILED") and one["event"] == "ITEM_UPDATE"
    ]
    assert {one["itemId"]: one for one in ended} == stored


def test_capacity_binds_one_batch_alone_and_a_cancel_stops_it(make_server: Callable[..., Server]) -> None:
    server = make_server(latency_ms=20)
    client = server.start()
    capacity = [
        {"period": "MINUTE", "requests": 10, "enabled": True},
        {"period": "hour", "requests": 1, "enabled": False},
    ]
    slow = client.post(PLACE, json={"type": "ASYNC", "capacity": capacity, "items": items_of(40)}).json()["batchId"]
    other = client.post(PLACE, json={"type": "ASYNC", "items": items_of(30)}).json()["batchId"]
    path = f"{PLACE}/{slow}"
    wait_until(lambda: client.get(f"{PLACE}/{other}").json()["status"] == "COMPLETED", END_S, "the other batch to end")
    wait_until(lambda: client.get(path).json()["completed"] == 10, END_S, "its capacity to be used")
    time.sleep(1.0)

    def calls() -> int:
        return sum(call["idempotency_key"].startswith("batch_req_" + slow[6:22]) for call in server.engine.calls())

    assert calls() == 10, "not one more than its capacity, while another batch ran freely"
    batch = client.post(f"{path}/cancel")
    assert (batch.status_code, batch.json()["status"]) == (201, "CANCELLED")
    assert batch.json()["pending"] == 0
    with client.stream("GET", f"{path}/events") as answer:
        events, markers = read(answer, -1)
    assert markers == ["[DONE]"]
    assert [event["action"] for _, event in events][-2:] == ["item-cancelled", "batch-cancelled"]
    assert Counter(item["status"] for item in client.get(path).json()["items"]) == {"COMPLETED": 10, "CANCELLED": 30}
    server.engine.settle()
    assert calls() == 10


def test_batches_of_one_resource_keep_their_own_keys(make_server: Callable[..., Server]) -> None:
    """Their items wait in one queue; what binds one key, and its end, is no matter of the other's."""
    server = make_server(latency_ms=5)
    server.start().close()
    operator = server.operator()
    place = PLACE.replace("default", "acme")
    limits = {"bound": [{"period": "day", "requests": 5}], "free": []}
    keys = {who: operator.post("/admin/v1/keys", json={"org": "acme", "limits": limits[who]}).json() for who in limits}
    clients = {who: server.client(Authorization=f"Bearer {key['key']}") for who, key in keys.items()}

    def make(who: str) -> str:
        body = {"type": "ASYNC", "items": items_of(12)}
        return f"{place}/{clients[who].post(place, json=body).json()['batchId']}"

    bound, free = make("bound"), [make("free"), make("free")]

    def ended(path: str) -> bool:
        return clients["free"].get(path).json()["status"] in ("COMPLETED", "FAILED")

    wait_until(lambda: all(map(ended, free)), END_S, "the batches of the other key to end")
    wait_until(lambda: clients["free"].get(bound).json()["completed"] == 5, END_S, "the limit of the key to be used")
    revoked = operator.post(f"/admin/v1/keys/{keys['bound']['id']}/revoke", json={})
    assert revoked.json()["revoked"]
    late = make("free")
    wait_until(lambda: ended(bound) and ended(late), END_S, "what is left of both keys to end")
    ends = [clients["free"].get(path).json() for path in (bound, *free, late)]
    assert [(one["status"], one["completed"], one["failed"]) for one in ends] == [
        ("FAILED", 5, 7),
        *[("COMPLETED", 12, 0)] * 3,
    ]
    assert [one["createdByApiKeyId"] for one in ends] == [keys["bound"]["id"], *[keys["free"]["id"]] * 3]
    operator.close()


@pytest.mark.soak
def test_no_resource_waits_for_ten_others(make_server: Callable[..., Server]) -> None:
    # A minute's work: on a busy machine, making the batches takes ten seconds.
    server = make_server(latency_ms=300, TIDEGATE_WORKER_IN_FLIGHT_MAX="2")
    client = server.start()

    def make(resource: str, count: int) -> str:
        items = [{**one, "resourceId": resource} for one in items_of(count)]
        return f"{PLACE}/{client.post(PLACE, json={'type': 'ASYNC', 'items': items}).json()['batchId']}"

    large = [make(f"busy-{number}", 30) for number in range(12)]
    small = make("small", 2)
    wait_until(lambda: client.get(small).json()["status"] == "COMPLETED", END_S, "the batch of the last resource")
    shown = [client.get(path, params={"includesItems": "false"}).json() for path in large]
    assert sum(one["completed"] for one in shown) < 12 * 30, "it did not wait until the others had ended"
    client.close()


@pytest.mark.soak
def test_a_thousand_calls_at_once_from_one_worker(make_server: Callable[..., Server]) -> None:
    limits = {"TIDEGATE_WORKER_IN_FLIGHT_MAX": "1000", "TIDEGATE_HTTP_CONNECTIONS_MAX": "1200"}
    # Of a deployment whose capacity is not stated, the tide would have to learn it first.
    limits["TIDEGATE_UPSTREAM_MAX_IN_FLIGHT"] = "1000"
    server = make_server(latency_ms=10_000, **limits)
    client = server.start()
    batch_id = client.post(PLACE, json={"type": "ASYNC", "items": items_of(1_500)}).json()["batchId"]
    path = f"{PLACE}/{batch_id}?includesItems=false"
    wait_until(lambda: client.get(path).json()["status"] == "COMPLETED", 4 * END_S, "the batch to end")
    calls = server.engine.calls()
    assert len(calls) == 1_500
    assert max(call.get("beside", 0) for call in calls) + 1 == 1_000, "so many were under way at once at the witness"


# As the documentation has it, but for the host and the key, which are put in.
PYTHON = """
import requests
import json
import os
workspace_id = "6c41dc1b-910c-4358-beef-2c609d38db31"
environment_id = "6c1957ca-77ca-49b3-8fa1-0590281b8b44"
response = requests.post(
    f"http://localhost:3000/v1/completion-batch/{workspace_id}/{environment_id}",
    headers={"Authorization": "Bearer your-vmx-api-key", "Content-Type": "application/json"},
    json={
        "type": "SYNC",
        "items": [
            {"resourceId": "your-resource-id", "request": {"messages": [{"role": "user", "content": "Summarize this document: ..."}]}},
            {"resourceId": "your-resource-id", "request": {"messages": [{"role": "user", "content": "Extract key points from: ..."}]}},
        ],
    },
    stream=True,
)
for line in response.iter_lines():
    if line:
        data = line.decode('utf-8')
        if data.startswith('data: '):
            event_data = json.loads(data[6:])
            if event_data.get('action') == 'item-completed':
                print(f"Item completed: {event_data['payload']['itemId']}")
            elif event_data.get('action') == 'batch-completed':
                print("Batch completed!")
                break
"""
# The two calls of the requests library that the sample makes.
REQUESTS = """
import httpx2
class Answer:
    def __init__(self, url, headers, json):
        self._stream = httpx2.stream("POST", url, headers=headers, json=json, timeout=60)
        self._answer = self._stream.__enter__()
    def iter_lines(self):
        for line in self._answer.iter_lines():
            yield line.encode()
def post(url, headers, json, stream):
    return Answer(url, headers, json)
"""
CURL = """curl -sN -X POST "http://localhost:3000/v1/completion-batch/{workspaceId}/{environmentId}" \\
-H "Authorization: Bearer your-vmx-api-key" \\
-H "Content-Type: application/json" \\
-d '{
"type": "SYNC",
"items": [
{
"resourceId": "your-resource-id",
"request": {
"messages": [
{"role": "user", "content": "Summarize this document: ..."}
]
}
}
]
}'"""


def test_the_samples_of_the_documentation(make_server: Callable[..., Server], tmp_path: Path) -> None:
    server = make_server(latency_ms=20)
    command = [sys.executable, "-m", "tidegate", "keys", "create", "--org", WORKSPACE, "--data", str(server.data)]
    made = subprocess.run([*command, "--json"], check=True, capture_output=True, text=True, timeout=60)
    key = json.loads(made.stdout)["key"]
    server.start().close()

    def own(text: str) -> str:
        text = text.replace("http://localhost:3000", server.url).replace("your-vmx-api-key", key)
        return text.replace("{workspaceId}", WORKSPACE).replace("{environmentId}", ENVIRONMENT)

    (tmp_path / "requests.py").write_text(REQUESTS)
    (tmp_path / "sample.py").write_text(own(PYTHON))
    shown = subprocess.run(
        [sys.executable, str(tmp_path / "sample.py")], check=True, capture_output=True, text=True, timeout=60
    )
    assert [line.partition(":")[0] for line in shown.stdout.splitlines()] == [
        "Item completed",
        "Item completed",
        "Batch completed!",
    ]
    shown = subprocess.run(["sh", "-c", own(CURL)], check=True, capture_output=True, text=True, timeout=60)
    assert shown.stdout.endswith("\n\ndata: [DONE]\n\n")
