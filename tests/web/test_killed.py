"""The API as a process that dies or whose disk fills up: what was acknowledged stays, what was not can be sent again."""

from __future__ import annotations

import contextlib
import re
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.support.processes import Processes
from tests.support.server import Server
from tests.support.shims import Shims, preload_env
from tests.web.calls import LINES, create, upload
from tidegate.store.tenants.webhooks import DELETED_AT_ONCE

KEY: dict[str, Any] = {"Idempotency-Key": "once"}
ENDPOINT = {"name": "n", "url": "https://receiver.example/x", "event_types": ["batch.completed"]}


@pytest.fixture
def api(processes: Processes, tmp_path: Path) -> Server:
    return Server(processes, tmp_path, "api")


def test_acknowledged_is_durable(api: Server) -> None:
    with api.start() as client:
        file_id = upload(client, LINES * 5_000)
        batch = create(client, file_id)
        api.proc.kill()
    with api.start() as client:
        assert client.get(f"/v1/files/{file_id}/content").content == LINES * 5_000
        assert client.get(f"/v1/batches/{batch['id']}").json() == batch


@pytest.mark.parametrize(("failpoint", "survives"), [("upload_blob_durable=kill", 0), ("upload_committed=kill", 1)])
def test_killed_in_an_upload(api: Server, failpoint: str, survives: int) -> None:
    with api.start({"TIDEGATE_FAILPOINTS": failpoint}) as client, pytest.raises(httpx2.TransportError):
        upload(client, **KEY)
    assert api.proc.wait() == -9
    with api.start() as client:
        before = [file["id"] for file in client.get("/v1/files").json()["data"]]
        assert len(before) == survives
        file_id = upload(client, **KEY)
        assert [file["id"] for file in client.get("/v1/files").json()["data"]] == [file_id]
        assert client.get(f"/v1/files/{file_id}/content").content == LINES


def test_create_crash_after_store(api: Server) -> None:
    def post(client: httpx2.Client, file_id: str) -> dict[str, Any]:
        body = {"input_file_id": file_id, "endpoint": "/v1/embeddings"}
        return dict(client.post("/v1/batches", json=body, headers=KEY).json())

    with api.start({"TIDEGATE_FAILPOINTS": "create_committed=kill"}) as client:
        file_id = upload(client)
        with pytest.raises(httpx2.TransportError):
            post(client, file_id)
    assert api.proc.wait() == -9
    with api.start() as client:
        (found,) = client.get("/v1/batches").json()["data"]
        assert found["status"] == "validating"
        assert post(client, file_id)["id"] == found["id"]
        assert len(client.get("/v1/batches").json()["data"]) == 1


@pytest.mark.parametrize("state", ["pending", "failed"])
def test_killed_between_the_pieces_of_a_deletion(api: Server, tmp_path: Path, state: str) -> None:
    """An endpoint goes with the last of its deliveries, so that a client that asks again finishes what was begun."""
    with api.start() as client:
        made = client.post("/v1/webhook_endpoints", json=ENDPOINT).json()
        api.proc.terminate()
        assert api.proc.wait() == 0
    with contextlib.closing(sqlite3.connect(tmp_path / "data" / "tidegate.db")) as store, store:
        [(tenant_id,)] = store.execute("select tenant_id from webhook_endpoints")
        store.executemany(
            "insert into webhook_deliveries (event_id, endpoint_id, tenant_id, job_id, event_type, state, attempt_count, created_at,"
            " due_at) values (?, ?, ?, 'batch_x', 'batch.completed', ?, 0, ?, 0)",
            [(f"evt_{number:022}", made["id"], tenant_id, state, number) for number in range(3 * DELETED_AT_ONCE + 1)],
        )
    path = f"/v1/webhook_endpoints/{made['id']}"
    with (
        api.start({"TIDEGATE_FAILPOINTS": "deliveries_deleted=1*kill"}) as client,
        pytest.raises(httpx2.TransportError),
    ):
        client.delete(path)
    assert api.proc.wait() == -9
    with api.start() as client:
        assert client.get(path).status_code == 200, "it is there until all is gone"
        left = list(deliveries_of(client))
        assert len(left) == DELETED_AT_ONCE + 1
        assert client.delete(path).json()["deleted"] is True
        assert client.delete(path).status_code == 404
        assert list(deliveries_of(client)) == []


def deliveries_of(client: httpx2.Client) -> Iterator[str]:
    after: dict[str, str] = {}
    while True:
        page = client.get("/v1/webhook_deliveries", params={"limit": "100", **after}).json()
        yield from (one["id"] for one in page["data"])
        if not page["has_more"]:
            return
        after = {"after": page["last_id"]}


MESSAGES = "/v1/messages/batches"
ONE_MESSAGE = b'{"custom_id":"%d","params":{"model":"m","messages":[{"role":"user","content":"%b"}]}}'


def message_batch(count: int, size_bytes: int) -> Iterator[bytes]:
    """A body as a client sends it that makes its requests as it goes."""
    text = b"x" * size_bytes
    yield b'{"requests":['
    for number in range(count):
        yield ONE_MESSAGE % (number, text) + (b"," if number < count - 1 else b"]}")


@pytest.mark.parametrize(
    ("failpoint", "files", "batches"),
    [("upload_blob_durable=kill", 0, 0), ("upload_committed=kill", 1, 0), ("create_committed=kill", 1, 1)],
)
def test_killed_while_a_message_batch_is_made(api: Server, failpoint: str, files: int, batches: int) -> None:
    def post(client: httpx2.Client) -> dict[str, Any]:
        headers = {"Content-Type": "application/json", **KEY}
        return dict(client.post(MESSAGES, content=b"".join(message_batch(3, 10)), headers=headers).json())

    with api.start({"TIDEGATE_FAILPOINTS": failpoint}) as client, pytest.raises(httpx2.TransportError):
        post(client)
    assert api.proc.wait() == -9
    with api.start() as client:
        assert len(client.get("/v1/files").json()["data"]) == files
        before = client.get(MESSAGES).json()["data"]
        assert len(before) == batches
        made = post(client)
        assert made["request_counts"]["processing"] == 3
        assert [one["id"] for one in client.get(MESSAGES).json()["data"]] == [made["id"]]
        assert len(client.get("/v1/files").json()["data"]) == 1


@pytest.mark.parametrize("count", [45_000, pytest.param(100_000, marks=pytest.mark.soak)])
def test_a_large_message_batch_is_never_in_memory(api: Server, count: int) -> None:
    """Of more than a kilobyte each."""
    with api.start() as client:
        headers = {"Content-Type": "application/json"}
        client.post(MESSAGES, content=b"".join(message_batch(100, 1_000)), headers=headers)
        before = api.proc.memory_peak_bytes()
        answer = client.post(MESSAGES, content=message_batch(count, 1_000), headers=headers, timeout=300)
        assert answer.json()["request_counts"]["processing"] == count
        assert api.proc.memory_peak_bytes() - before < 32 << 20


def test_a_full_disk_refuses_and_recovers(api: Server, shims: Shims, tmp_path: Path) -> None:
    blobs = tmp_path / "data" / "blobs"
    disk = shims.disk(blobs)
    with api.start(preload_env(disk, base={})) as client:
        file_id = upload(client)
        for rule in ("enospc", "enospc-write", "enospc-fsync"):
            disk.fail(rule)
            answer = client.post("/v1/files", files={"file": ("a", LINES * 10_000)}, data={"purpose": "batch"})
            assert answer.status_code == 507, answer.text
            assert answer.json()["error"]["code"] == "storage_full"
            assert answer.json()["error"]["type"] == "server_error"
            disk.heal()
        assert client.get(f"/v1/files/{file_id}/content").content == LINES
        assert upload(client)
        assert len(client.get("/v1/files").json()["data"]) == 2
        stored = [path.name for path in blobs.rglob("blob_*")]
        assert len(stored) == 2
        assert all(re.fullmatch(r"blob_[0-9A-Za-z]{22}", name) for name in stored)


def test_a_full_disk_under_the_store_is_a_507(api: Server, shims: Shims, tmp_path: Path) -> None:
    disk = shims.disk(tmp_path / "data" / "tidegate.db-wal")
    with api.start(preload_env(disk, base={})) as client:
        file_id = upload(client)
        disk.fail("enospc")
        body = {"input_file_id": file_id, "endpoint": "/v1/embeddings"}
        answer = client.post("/v1/batches", json=body)
        assert answer.status_code == 507, answer.text
        assert answer.json()["error"]["code"] == "storage_full"
        disk.heal()
        assert create(client, file_id)["status"] == "validating"
        assert len(client.get("/v1/batches").json()["data"]) == 1
