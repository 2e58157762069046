"""Files as a client sees them: in, out, listed, deleted; and what is left when something goes wrong on the way."""

from __future__ import annotations

import asyncio
import hashlib
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import pytest

from tests.support.processes import wait_until
from tests.web.calls import create, is_error, kept, upload
from tests.web.server import WebServer
from tidegate.stages import accept
from tidegate.web.http import intake, tenant_slots


def head(path: str, length: int | None, *more: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: multipart/form-data; boundary=XX", *more]
    lines += [f"Content-Length: {length}"] if length is not None else []
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def form(data: bytes) -> bytes:
    return (
        b'--XX\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        b'--XX\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n' + data + b"\r\n--XX--\r\n"
    )


def test_a_download_has_the_bytes_of_the_upload(web: WebServer, client: httpx2.Client) -> None:
    # Longer than every buffer on the way, with what looks like a boundary inside.
    data = b'{"x": "\r\n--X\r\n--boundary\x00\xff"}\n' * 40_000 + b"no newline at the end"
    answer = client.post("/v1/files", files={"file": ("in.jsonl", data)}, data={"purpose": "batch"})
    file = answer.json()
    assert file["bytes"] == len(data)
    assert file["expires_at"] - file["created_at"] == 30 * 86_400
    assert client.get(f"/v1/files/{file['id']}/content").content == data
    row = web.statement("select line_count, sha256 from files where id = ?", file["id"])[0]
    assert row == (data.count(b"\n") + 1, hashlib.sha256(data).hexdigest())


@pytest.mark.parametrize("piece", [1, 7, 1000])
def test_a_body_may_come_in_any_pieces(web: WebServer, client: httpx2.Client, piece: int) -> None:
    data = b"\r\n-\r\n--\r\n--X\r\n--XY\r\n"
    body = form(data)
    answer = client.post(
        "/v1/files",
        content=(body[at : at + piece] for at in range(0, len(body), piece)),
        headers={"Content-Type": "multipart/form-data; boundary=XX"},
    )
    assert answer.status_code == 200, answer.text
    assert client.get(f"/v1/files/{answer.json()['id']}/content").content == data


def test_fields_may_follow_the_file(client: httpx2.Client) -> None:
    parts: dict[str, tuple[str | None, bytes | str]] = {
        "file": ("in.jsonl", b"{}\n"),
        "purpose": (None, "batch"),
        "expires_after[anchor]": (None, "created_at"),
        "expires_after[seconds]": (None, "3600"),
    }
    file = client.post("/v1/files", files=parts).json()
    assert file["expires_at"] - file["created_at"] == 3600
    assert file["purpose"] == "batch"


def test_exactly_the_limit_and_one_byte_more(start_web: Any) -> None:
    web: WebServer = start_web(limits={"file_bytes_max": 300_000})
    with web.client() as client:
        assert upload(client, b"x" * 300_000)
        before = kept(web)
        for data in (b"x" * 300_001, b"x" * 3_000_000):
            answer = client.post("/v1/files", files={"file": ("a", data)}, data={"purpose": "batch"})
            is_error(answer, {"status": 413, "code": "file_too_large", "param": "file"})
        assert kept(web) == before


def test_a_client_that_stops_sending_is_given_up(
    web: WebServer, client: httpx2.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(intake, "IDLE_S", 0.2)
    before = kept(web)
    body = form(b"x" * 500_000)
    with socket.create_connection(("127.0.0.1", web.port), timeout=10) as connection:
        connection.sendall(head("/v1/files", len(body)) + body[:400_000])
        assert connection.recv(65_536).startswith(b"HTTP/1.1 408 ")
    assert kept(web) == before


def test_a_client_that_trickles_is_given_up(
    web: WebServer, client: httpx2.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(intake, "RATE_GRACE_S", 0.0)
    monkeypatch.setattr(intake, "RATE_MIN_BYTES_PER_S", 1 << 40)
    before = kept(web)
    body = form(b"x")
    with socket.create_connection(("127.0.0.1", web.port), timeout=10) as connection:
        connection.sendall(head("/v1/files", len(body)) + body[:-1])
        assert connection.recv(65_536).startswith(b"HTTP/1.1 408 ")
    assert kept(web) == before


@pytest.mark.parametrize("missing", [1, 4, 100, 300_000])
def test_a_client_that_leaves_keeps_nothing(web: WebServer, missing: int) -> None:
    before, rows = kept(web), blob_count(web)
    body = form(b"x" * 500_000)
    with socket.create_connection(("127.0.0.1", web.port), timeout=10) as connection:
        connection.sendall(head("/v1/files", len(body)) + body[:-missing])
        wait_until(lambda: blob_count(web) == rows + 1, what="the upload to begin")
    wait_until(lambda: blob_count(web) == rows, what="the upload to be thrown away")
    assert kept(web) == before


def blob_count(web: WebServer) -> int:
    return int(web.statement("select count(*) from blobs")[0][0])


def test_a_length_that_is_too_short_keeps_nothing(web: WebServer) -> None:
    before = kept(web)
    body = form(b"x" * 1000)
    with socket.create_connection(("127.0.0.1", web.port), timeout=10) as connection:
        connection.sendall(head("/v1/files", len(body) - 10) + body)
        assert connection.recv(65_536).startswith(b"HTTP/1.1 400 ")
    assert kept(web) == before


def test_a_client_that_waits_to_be_asked_is_refused_without_its_body(web: WebServer) -> None:
    request = head("/v1/files", 1 << 40, "Expect: 100-continue")
    with socket.create_connection(("127.0.0.1", web.port), timeout=10) as connection:
        connection.sendall(request)
        assert connection.recv(65_536).startswith(b"HTTP/1.1 413 ")


def test_uploads_at_once_are_bounded(start_web: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tenant_slots, "UPLOAD_WAIT_S", 0.2)
    web: WebServer = start_web(limits={"uploads_max": 2})
    body = form(b"x" * 1000)
    slow = [socket.create_connection(("127.0.0.1", web.port), timeout=10) for _ in range(2)]
    for connection in slow:
        connection.sendall(head("/v1/files", len(body)) + body[:500])
    # Before anything else is uploaded, which would take the room of one of them.
    wait_until(lambda: blob_count(web) == 2, what="both uploads to be under way")
    with web.client() as client:
        refused = client.post("/v1/files", files={"file": ("a", b"{}")}, data={"purpose": "batch"})
        assert refused.status_code == 429
        assert refused.headers["retry-after"] == "1"
        assert refused.json()["error"]["type"] == "rate_limit_error"
        for connection in slow:
            connection.sendall(body[500:])
            assert connection.recv(65_536).startswith(b"HTTP/1.1 200 ")
            connection.close()
        assert upload(client)


def test_uploads_wait_for_those_before_them(start_web: Any) -> None:
    web: WebServer = start_web(limits={"uploads_max": 1})

    def send(number: int) -> str:
        with web.client() as client:
            return upload(client, b"{}\n" * (number + 1))

    with ThreadPoolExecutor(16) as pool:
        assert len(set(pool.map(send, range(16)))) == 16


def test_many_readers_at_once(client: httpx2.Client, web: WebServer) -> None:
    data = bytes(range(256)) * 8_000
    file_id = upload(client, data)
    wrong: list[int] = []

    def read(start: int) -> None:
        with web.client() as reader:
            answer = reader.get(f"/v1/files/{file_id}/content", headers={"Range": f"bytes={start}-"})
            if answer.content != data[start:]:
                wrong.append(start)

    threads = [threading.Thread(target=read, args=(start,)) for start in range(0, 2_000_000, 250_000)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_list_pages_cover_everything_once(start_web: Any) -> None:
    web: WebServer = start_web()
    with web.client() as client:
        made = [upload(client, purpose="batch" if n % 2 else "user_data") for n in range(7)]
        web.rewrite("update files set created_at = 1000, expires_at = null")
        seen: list[str] = []
        after: dict[str, str] = {}
        while True:
            page = client.get("/v1/files", params={"limit": 3, **after}).json()
            assert page["object"] == "list"
            seen += [file["id"] for file in page["data"]]
            assert page["first_id"] == page["data"][0]["id"]
            if not page["has_more"]:
                break
            after = {"after": page["last_id"]}
        assert seen == sorted(made, reverse=True)
        ascending = client.get("/v1/files", params={"order": "asc"}).json()
        assert [file["id"] for file in ascending["data"]] == sorted(made)
        assert ascending["has_more"] is False
        batch_only = client.get("/v1/files", params={"purpose": "batch"}).json()
        assert len(batch_only["data"]) == 3
        deleted = seen[2]
        client.delete(f"/v1/files/{deleted}")
        page = client.get("/v1/files", params={"after": deleted}).json()
        assert [file["id"] for file in page["data"]] == seen[3:]


def test_an_empty_list(start_web: Any) -> None:
    web: WebServer = start_web()
    with web.client() as client:
        page = client.get("/v1/files").json()
    assert page == {"object": "list", "data": [], "first_id": None, "last_id": None, "has_more": False}


def test_delete(client: httpx2.Client) -> None:
    file_id = upload(client)
    assert client.delete(f"/v1/files/{file_id}").json() == {"id": file_id, "object": "file", "deleted": True}
    for answer in (client.delete(f"/v1/files/{file_id}"), client.get(f"/v1/files/{file_id}/content")):
        is_error(answer, {"status": 404, "code": "file_not_found", "param": "file_id"})


def test_an_input_that_is_still_needed_cannot_be_deleted(client: httpx2.Client) -> None:
    file_id = upload(client)
    create(client, file_id)
    answer = client.delete(f"/v1/files/{file_id}")
    is_error(answer, {"status": 409, "code": "file_in_use"})
    assert answer.headers["x-should-retry"] == "false"
    assert client.get(f"/v1/files/{file_id}").status_code == 200


def test_the_same_key_gives_the_same_file(client: httpx2.Client, web: WebServer) -> None:
    first = upload(client, b"{}\n", **{"Idempotency-Key": "upload-1"})
    files = kept(web)[0]
    assert upload(client, b"{}\n", **{"Idempotency-Key": "upload-1"}) == first
    other = client.post(
        "/v1/files",
        files={"file": ("in.jsonl", b"[]\n")},
        data={"purpose": "batch"},
        headers={"Idempotency-Key": "upload-1"},
    )
    is_error(other, {"status": 422, "code": "idempotency_key_reused"})
    assert kept(web)[0] == files
    assert kept(web)[1] == 0


def test_bytes_that_are_gone_are_no_silent_success(client: httpx2.Client, web: WebServer) -> None:
    file_id = upload(client)
    blob_id = web.statement("select blob_id from extents where file_id = ?", file_id)[0][0]
    next(web.blobs.root.rglob(blob_id)).unlink()
    answer = client.get(f"/v1/files/{file_id}/content")
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "bytes_missing"
    assert blob_id not in answer.text


def test_a_file_that_loses_its_end_breaks_the_connection(client: httpx2.Client, web: WebServer) -> None:
    file_id = upload(client, b"x" * 2_000_000)
    blob_id = web.statement("select blob_id from extents where file_id = ?", file_id)[0][0]
    path = next(web.blobs.root.rglob(blob_id))
    with path.open("r+b") as stream:
        stream.truncate(1_000_000)
    with pytest.raises(httpx2.RemoteProtocolError):
        client.get(f"/v1/files/{file_id}/content")


def bytes_on_disk(web: WebServer) -> int:
    return sum(path.stat().st_size for path in web.blobs.root.rglob("blob_*") if path.is_file())


def test_a_quota_bounds_the_disk_and_not_only_the_list_of_files(start_web: Any) -> None:
    """The bytes of a refused upload go with the refusal, those of a deleted file with the deletion."""
    web: WebServer = start_web(limits={"stored_bytes_max": 1_000_000})
    data = b'{"x":"' + b"y" * 600_000 + b'"}\n'
    with web.client() as client:
        kept = client.post("/v1/files", files={"file": ("a", data)}, data={"purpose": "batch"}).json()["id"]
        for purpose, status in (("batch", 429), ("nonsense", 400)):
            for _ in range(3):
                refused = client.post("/v1/files", files={"file": ("a", data)}, data={"purpose": purpose})
                assert refused.status_code == status, refused.text
                assert bytes_on_disk(web) == len(data)
        for _ in range(3):
            assert client.delete(f"/v1/files/{kept}").status_code == 200
            assert bytes_on_disk(web) == 0
            kept = client.post("/v1/files", files={"file": ("a", data)}, data={"purpose": "batch"}).json()["id"]
            assert bytes_on_disk(web) == len(data)
    assert web.statement("select count(*) from blobs") == [(1,)]


def test_a_delete_does_not_wait_for_blobs_that_do_not_answer(
    web: WebServer, client: httpx2.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def silent(blob_id: str) -> None:
        await asyncio.Event().wait()

    file_id = upload(client, b"{}\n")
    [blob] = web.statement("select blob_id from extents where file_id = ?", file_id)
    monkeypatch.setattr(accept, "REMOVE_WAIT_S", 0.01)
    monkeypatch.setattr(web.blobs, "delete", silent)
    assert client.delete(f"/v1/files/{file_id}").status_code == 200
    assert web.statement("select state from blobs where id = ?", *blob) == [("condemned",)], "a sweep removes them"
