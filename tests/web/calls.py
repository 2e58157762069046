"""What a client does, in one line each."""

from __future__ import annotations

import socket
from typing import Any

import httpx2

from tests.web.server import WebServer

LINES = b'{"custom_id":"a","method":"POST","url":"/v1/embeddings","body":{"model":"m","input":"x"}}\n'


def upload(client: httpx2.Client, data: bytes = LINES, purpose: str = "batch", **headers: str) -> str:
    answer = client.post(
        "/v1/files", files={"file": ("in.jsonl", data)}, data={"purpose": purpose}, headers=headers or None
    )
    assert answer.status_code == 200, answer.text
    return str(answer.json()["id"])


def create(client: httpx2.Client, file_id: str, **more: Any) -> dict[str, Any]:
    answer = client.post("/v1/batches", json={"input_file_id": file_id, "endpoint": "/v1/embeddings"} | more)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def is_error(answer: httpx2.Response, case: dict[str, Any]) -> None:
    """An answer in the one error shape, with what the case says about it."""
    assert answer.status_code == case["status"], answer.text
    assert answer.headers["x-request-id"].startswith("req_")
    body = answer.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["type"] == "invalid_request_error" or answer.status_code in (401, 403, 429)
    assert len(body["error"]["message"]) > 10
    if "code" in case:
        assert body["error"]["code"] == case["code"], body
    if "param" in case:
        assert body["error"]["param"] == case["param"], body
    assert case.get("says", "") in body["error"]["message"]


def raw(web: WebServer, request: bytes, timeout_s: float = 10.0) -> bytes:
    """Send bytes and read until the server is done or says no more."""
    with socket.create_connection(("127.0.0.1", web.port), timeout=timeout_s) as connection:
        connection.sendall(request)
        received = b""
        while b"\r\n\r\n" not in received:
            piece = connection.recv(65_536)
            if not piece:
                break
            received += piece
        return received


def kept(web: WebServer) -> tuple[int, int, int]:
    """How many files, unfinished blobs and bytes on the disk there are: what a refused upload must not change."""
    files = web.statement("select count(*) from files where state = 'ready'")[0][0]
    unfinished = web.statement("select count(*) from blobs where state = 'writing'")[0][0]
    on_disk = sum(1 for path in web.blobs.root.rglob("blob_*") if path.is_file())
    return files, unfinished, on_disk
