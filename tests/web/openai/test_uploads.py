"""Uploads in parts as a client sees them: in any order, several at once, whole or not at all."""

from __future__ import annotations

import hashlib
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import pytest

from tests.support.processes import wait_until
from tests.web.calls import is_error, kept
from tests.web.server import WebServer
from tidegate.store.tenants import uploads
from tidegate.web.http import tenant_slots

ASKED = {"bytes": 30, "filename": "in.jsonl", "mime_type": "application/jsonl", "purpose": "batch"}


def begin(client: httpx2.Client, size_bytes: int = 30, **more: Any) -> dict[str, Any]:
    answer = client.post("/v1/uploads", json={**ASKED, "bytes": size_bytes, **more})
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def send(client: httpx2.Client, upload_id: str, data: bytes, **headers: str) -> httpx2.Response:
    return client.post(f"/v1/uploads/{upload_id}/parts", files={"data": ("blob", data)}, headers=headers or None)


def complete(client: httpx2.Client, upload_id: str, part_ids: list[str], **more: Any) -> httpx2.Response:
    return client.post(f"/v1/uploads/{upload_id}/complete", json={"part_ids": part_ids, **more})


def test_parts_sent_at_once_become_one_file_in_the_order_that_is_named(web: WebServer, client: httpx2.Client) -> None:
    pieces = [(b"%d:" % number + b"x" * 40_000 + b"\n") * 9 for number in range(6)]
    whole = b"".join(pieces) + b"no newline"
    upload = begin(client, len(whole), expires_after={"anchor": "created_at", "seconds": 7200})
    assert {**upload, "id": "", "created_at": 0, "expires_at": 0} == {
        "id": "", "object": "upload", "bytes": len(whole), "created_at": 0, "expires_at": 0,
        "filename": "in.jsonl", "purpose": "batch", "status": "pending", "file": None,
    }  # fmt: skip
    assert upload["expires_at"] - upload["created_at"] == 3600
    backwards = [b"no newline", *reversed(pieces)]
    with ThreadPoolExecutor(4) as threads:
        parts = [one.json() for one in threads.map(lambda data: send(client, upload["id"], data), backwards)]
    assert {(one["object"], one["upload_id"]) for one in parts} == {("upload.part", upload["id"])}
    _, _, on_disk = kept(web)
    md5 = hashlib.md5(whole).hexdigest()
    ordered = [one["id"] for one in reversed(parts)]
    is_error(complete(client, upload["id"], ordered[::-1], md5=md5), {"status": 400, "code": "md5_mismatch"})
    done = complete(client, upload["id"], ordered, md5=md5.upper()).json()
    file = done["file"]
    assert (done["status"], file["bytes"], file["status"]) == ("completed", len(whole), "processed")
    assert file["expires_at"] - file["created_at"] == 7200
    assert client.get(f"/v1/files/{file['id']}/content").content == whole
    row = web.statement("select line_count, sha256 from files where id = ?", file["id"])[0]
    assert row == (55, hashlib.sha256(whole).hexdigest())
    # Seven parts became one blob.
    assert kept(web)[2] == on_disk - 6
    # A client that missed the answer asks again.
    for again in ({}, {"md5": md5}, {"md5": md5.upper()}):
        assert complete(client, upload["id"], ordered, **again).json() == done
    # The file is not what this client means: it must not take it for its own.
    is_error(complete(client, upload["id"], ordered, md5="0" * 32), {"status": 400, "code": "md5_mismatch"})
    is_error(complete(client, upload["id"], ordered, md5="x"), {"status": 400, "code": "invalid_parameter"})
    is_error(complete(client, upload["id"], ordered[:1]), {"status": 400, "code": "upload_not_pending"})
    is_error(send(client, upload["id"], b"late"), {"status": 400, "code": "upload_not_pending"})
    is_error(client.post(f"/v1/uploads/{upload['id']}/cancel"), {"status": 400, "code": "upload_not_pending"})
    client.delete(f"/v1/files/{file['id']}")
    assert complete(client, upload["id"], ordered, md5=md5).json()["file"] is None
    is_error(complete(client, upload["id"], ordered, md5="0" * 32), {"status": 400, "code": "md5_mismatch"})


def test_parts_that_arrive_at_once_are_bounded(start_web: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tenant_slots, "UPLOAD_WAIT_S", 0.05)
    web: WebServer = start_web(limits={"uploads_max": 1})
    body = b'--XX\r\nContent-Disposition: form-data; name="data"; filename="a"\r\n\r\n' + b"x" * 30 + b"\r\n--XX--\r\n"
    with web.client() as client, socket.create_connection(("127.0.0.1", web.port), timeout=30) as slow:
        upload_id = begin(client)["id"]
        head = f"POST /v1/uploads/{upload_id}/parts HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
        slow.sendall(head.encode() + b"Content-Type: multipart/form-data; boundary=XX\r\n\r\n" + body[:90])
        wait_until(lambda: web.statement("select count(*) from blobs") == [(1,)], 20, "the first part to be under way")
        is_error(send(client, upload_id, b"x"), {"status": 429, "code": "too_many_uploads"})
        joined = client.post(f"/v1/uploads/{upload_id}/complete", json={"part_ids": ["part_x"]})
        is_error(joined, {"status": 429, "code": "too_many_uploads"})
        slow.sendall(body[90:])
        assert slow.recv(65_536).startswith(b"HTTP/1.1 200 ")


def test_a_cancelled_upload_leaves_nothing(web: WebServer, client: httpx2.Client) -> None:
    before = kept(web)
    upload = begin(client)
    part = send(client, upload["id"], b"x" * 30).json()
    for _ in range(2):
        assert client.post(f"/v1/uploads/{upload['id']}/cancel").json()["status"] == "cancelled"
    assert kept(web) == before
    is_error(complete(client, upload["id"], [part["id"]]), {"status": 400, "code": "upload_not_pending"})


def test_two_completions_at_once_make_one_file(web: WebServer, client: httpx2.Client) -> None:
    files, unfinished, on_disk = kept(web)
    data = b"x" * 3_000_000
    upload = begin(client, 2 * len(data))
    parts = [send(client, upload["id"], data).json()["id"] for _ in range(2)]
    # More than are taken at once: those that waited find the upload complete.
    with ThreadPoolExecutor(12) as threads:
        answers = list(threads.map(lambda _: complete(client, upload["id"], parts), range(12)))
    assert {answer.status_code for answer in answers} == {200}, [answer.text for answer in answers]
    assert len({answer.json()["file"]["id"] for answer in answers}) == 1
    wait_until(lambda: kept(web) == (files + 1, unfinished, on_disk + 1), timeout_s=5, what="the rest to go")


def test_of_completions_at_once_only_those_with_the_right_md5_get_the_file(client: httpx2.Client) -> None:
    data = b"x" * 3_000_000
    upload = begin(client, len(data))
    part = send(client, upload["id"], data).json()["id"]
    right, wrong = hashlib.md5(data).hexdigest(), "0" * 32
    with ThreadPoolExecutor(12) as threads:
        asked = [right, wrong] * 6
        answers = list(threads.map(lambda md5: complete(client, upload["id"], [part], md5=md5), asked))
    assert [answer.status_code for answer in answers] == [200, 400] * 6, [answer.text for answer in answers]
    assert {answer.json()["error"]["code"] for answer in answers[1::2]} == {"md5_mismatch"}


CREATES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"bytes": 0}, {"status": 400, "param": "bytes"}),
    ({"bytes": -1}, {"status": 400, "param": "bytes"}),
    ({"bytes": "9"}, {"status": 400, "param": "bytes"}),
    ({"bytes": 2**80}, {"status": 413, "code": "file_too_large", "param": "bytes"}),
    ({"bytes": 1 << 40}, {"status": 413, "code": "file_too_large", "param": "bytes"}),
    ({"purpose": "batch_output"}, {"status": 400, "param": "purpose"}),
    ({"mime_type": "a\nb"}, {"status": 400, "param": "mime_type"}),
    ({"mime_type": ""}, {"status": 400, "param": "mime_type"}),
    ({"expires_after": {"anchor": "created_at", "seconds": 5}}, {"status": 400, "param": "expires_after.seconds"}),
    ({"surprise": 1}, {"status": 400, "code": "unknown_parameter", "param": "surprise"}),
]


@pytest.mark.parametrize(("change", "case"), CREATES, ids=[str(change) for change, _ in CREATES])
def test_a_wrong_create_is_refused(client: httpx2.Client, change: dict[str, Any], case: dict[str, Any]) -> None:
    is_error(client.post("/v1/uploads", json={**ASKED, **change}), case)


def test_a_missing_field_is_named(client: httpx2.Client) -> None:
    for name in ASKED:
        body = {key: value for key, value in ASKED.items() if key != name}
        case = {"status": 400, "code": "missing_required_parameter", "param": name}
        is_error(client.post("/v1/uploads", json=body), case)


def test_a_name_is_made_harmless(client: httpx2.Client) -> None:
    assert begin(client, filename="../../etc/\u202epass\x00wd")["filename"] == "passwd"


def test_a_wrong_part_is_refused_and_nothing_kept(
    web: WebServer, client: httpx2.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload = begin(client)
    before = kept(web)
    path = f"/v1/uploads/{upload['id']}/parts"
    is_error(client.post(path, json={}), {"status": 415, "code": "unsupported_media_type"})
    is_error(client.post(path, files={"file": ("a", b"x")}), {"status": 400, "code": "missing_file", "param": "data"})
    is_error(send(client, upload["id"], b""), {"status": 400, "code": "empty_file", "param": "data"})
    is_error(send(client, upload["id"], b"x" * 61), {"status": 400, "code": "upload_bytes_exceeded"})
    monkeypatch.setattr("tidegate.web.openai.uploads.PART_BYTES_MAX", 10)
    is_error(send(client, upload["id"], b"x" * 11), {"status": 413, "code": "part_too_large", "param": "data"})
    assert kept(web) == before


def test_the_refusal_of_a_part_that_is_no_form_names_its_field(client: httpx2.Client) -> None:
    answer = client.post(f"/v1/uploads/{begin(client)['id']}/parts", json={})
    is_error(answer, {"status": 415, "code": "unsupported_media_type", "says": "curl -F data=@"})


def test_a_wrong_completion_leaves_the_upload_pending(client: httpx2.Client) -> None:
    upload, other = begin(client), begin(client)
    part = send(client, upload["id"], b"x" * 30).json()["id"]
    stray = send(client, other["id"], b"x" * 30).json()["id"]
    for body, case in (
        ({}, {"status": 400, "code": "missing_required_parameter", "param": "part_ids"}),
        ({"part_ids": []}, {"status": 400, "param": "part_ids"}),
        ({"part_ids": "all"}, {"status": 400, "param": "part_ids"}),
        ({"part_ids": [part, part]}, {"status": 400, "param": "part_ids"}),
        ({"part_ids": [stray]}, {"status": 400, "code": "part_not_found"}),
        ({"part_ids": ["\x00"]}, {"status": 400, "code": "part_not_found"}),
        ({"part_ids": [part], "md5": "abc"}, {"status": 400, "param": "md5"}),
    ):
        is_error(client.post(f"/v1/uploads/{upload['id']}/complete", json=body), case)
    short = send(client, other["id"], b"x" * 29).json()["id"]
    is_error(complete(client, other["id"], [short]), {"status": 400, "code": "upload_bytes_mismatch"})
    assert complete(client, upload["id"], [part]).status_code == 200
    assert complete(client, other["id"], [stray]).status_code == 200


def test_an_idempotency_key_is_bound_to_what_it_was_sent_with(web: WebServer, client: httpx2.Client) -> None:
    key = {"Idempotency-Key": "parts-1"}
    first = client.post("/v1/uploads", json=ASKED, headers=key).json()
    assert client.post("/v1/uploads", json=ASKED, headers=key).json() == first
    is_error(
        client.post("/v1/uploads", json={**ASKED, "bytes": 31}, headers=key),
        {"status": 422, "code": "idempotency_key_reused"},
    )
    part = send(client, first["id"], b"x" * 30, **key).json()
    on_disk = kept(web)
    assert send(client, first["id"], b"x" * 30, **key).json() == part
    for upload_id, data in ((first["id"], b"y" * 30), (begin(client)["id"], b"x" * 30)):
        is_error(send(client, upload_id, data, **key), {"status": 422, "code": "idempotency_key_reused"})
    assert kept(web) == on_disk


def test_a_part_that_storage_changed_is_noticed(web: WebServer, client: httpx2.Client) -> None:
    upload = begin(client)
    part = send(client, upload["id"], b"x" * 30).json()["id"]
    [(blob_id,)] = web.statement("select blob_id from upload_parts where id = ?", part)
    [path] = web.blobs.root.rglob(blob_id)
    path.write_bytes(b"x" * 29 + b"y")
    assert complete(client, upload["id"], [part]).status_code == 503


def test_an_upload_that_is_never_completed_is_removed(start_web: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploads, "PENDING_MS", 1)
    web = start_web()
    with web.client() as client:
        upload = begin(client)
        is_error(
            send(client, upload["id"], b"x" * 30), {"status": 400, "code": "upload_not_pending", "says": "expired"}
        )
