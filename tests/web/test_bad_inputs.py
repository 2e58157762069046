"""The corpus against a real socket: each case a clear refusal in one shape, and nothing kept."""

from __future__ import annotations

import json
from typing import Any

import httpx2
import pytest

from tests.web import stages
from tests.web.calls import create, is_error, kept, raw, upload
from tests.web.corpus import cases, spelled
from tests.web.server import WebServer


@pytest.fixture(scope="module")
def names(web: WebServer, client: httpx2.Client) -> dict[str, str]:
    deleted = upload(client)
    assert client.delete(f"/v1/files/{deleted}").status_code == 200
    file_id = upload(client)
    output = client.get(f"/v1/batches/{stages.completed(web, client)}").json()["output_file_id"]
    return {
        "FILE": file_id,
        "DELETED": deleted,
        "OTHER_PURPOSE": upload(client, purpose="user_data"),
        "OUTPUT": output,
    }


def body_of(case: dict[str, Any], names: dict[str, str]) -> bytes:
    if "repeat" in case:
        return str(case["repeat"]).encode() * int(case["count"])
    if "repeat_in" in case:
        return b'{"%s":%s' % (case["repeat_in"].encode(), b"[" * case["count"])
    if "latin1" in case:
        return str(case["latin1"]).encode("latin-1")
    text = case["raw"] if "raw" in case else json.dumps(case["body"])
    return spelled(text, names).encode()


@pytest.mark.parametrize("case", cases("create"))
def test_create(web: WebServer, client: httpx2.Client, names: dict[str, str], case: dict[str, Any]) -> None:
    before = web.statement("select count(*) from jobs")
    headers = {name: spelled(value) for name, value in case.get("headers", {}).items()}
    if content_type := case.get("content_type", "application/json"):
        headers["Content-Type"] = content_type
    answer = client.post("/v1/batches", content=body_of(case, names), headers=headers)
    is_error(answer, case)
    assert web.statement("select count(*) from jobs") == before


@pytest.mark.parametrize("case", cases("changes"))
def test_change(web: WebServer, client: httpx2.Client, names: dict[str, str], case: dict[str, Any]) -> None:
    batch_id = create(client, names["FILE"])["id"]
    before = web.job(batch_id)
    answer = client.post(
        f"/v1/batches/{batch_id}", content=body_of(case, names), headers={"Content-Type": "application/json"}
    )
    is_error(answer, case)
    assert web.job(batch_id) == before


def test_thousands_of_limits(client: httpx2.Client, names: dict[str, str]) -> None:
    limits = [{"period": "minute", "requests": 5}] * 20_000
    body = {"input_file_id": names["FILE"], "endpoint": "/v1/embeddings", "limits": limits}
    is_error(client.post("/v1/batches", json=body), {"status": 400, "code": "invalid_parameter", "param": "limits"})


@pytest.mark.parametrize("case", cases("gets"))
def test_get(web: WebServer, names: dict[str, str], case: dict[str, Any]) -> None:
    # Past the client library, which would tidy the path up.
    path = spelled(case["path"], names)
    answer = raw(web, f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
    is_error(parsed(answer), case)


@pytest.mark.parametrize("case", cases("uploads"))
def test_upload(web: WebServer, client: httpx2.Client, case: dict[str, Any]) -> None:
    before = kept(web)
    # A name twice is refused as such, so the many parts have none.
    nameless = "--XX\r\nContent-Disposition: form-data\r\n\r\n\r\n"
    text = case["body"] if "body" in case else nameless * case["repeat_part"]
    headers = dict(case.get("headers", {}))
    if content_type := case.get("content_type", "multipart/form-data; boundary=XX"):
        headers["Content-Type"] = spelled(content_type)
    answer = client.post("/v1/files", content=spelled(text).encode(), headers=headers)
    is_error(answer, case)
    assert kept(web) == before


@pytest.mark.parametrize("case", cases("filenames"))
def test_filename(client: httpx2.Client, case: dict[str, Any]) -> None:
    disposition = spelled(f'form-data; name="file"; {case["header"]}')
    body = (
        f"--XX\r\nContent-Disposition: {disposition}\r\n\r\n{{}}\r\n"
        '--XX\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--XX--\r\n'
    )
    answer = client.post(
        "/v1/files", content=body.encode(), headers={"Content-Type": "multipart/form-data; boundary=XX"}
    )
    assert answer.status_code == 200, answer.text
    assert answer.json()["filename"] == spelled(case["becomes"])
    content = client.get(f"/v1/files/{answer.json()['id']}/content")
    disposition = content.headers["content-disposition"]
    assert disposition.startswith('attachment; filename="')
    assert disposition.isascii()
    assert disposition.isprintable()
    assert content.content == b"{}"


@pytest.mark.parametrize("case", cases("ranges"))
def test_range(client: httpx2.Client, case: dict[str, Any]) -> None:
    data = b"abcdefghijklmnopqrstuvwxyz"
    file_id = upload(client, data)
    headers = {}
    if case["range"] is not None:
        many = "bytes=" + ",".join(f"{n}-{n}" for n in range(1000))
        headers["Range"] = case["range"].replace("$RANGES", many)
    if "if_range" in case:
        headers["If-Range"] = case["if_range"].replace("$ETAG", f'"{file_id}"')
    answer = client.get(f"/v1/files/{file_id}/content", headers=headers)
    assert answer.status_code == case["status"]
    if case["status"] == 416:
        assert answer.headers["content-range"] == "bytes */26"
        is_error(answer, case)
        return
    assert answer.content == data[case["from"] : case["to"]]
    if case["status"] == 206:
        assert answer.headers["content-range"] == f"bytes {case['from']}-{case['to'] - 1}/26"
    head = client.head(f"/v1/files/{file_id}/content", headers=headers)
    assert head.status_code == case["status"]
    assert head.headers["content-length"] == str(case["to"] - case["from"])
    assert head.content == b""


@pytest.mark.parametrize("case", cases("heads"))
def test_head(web: WebServer, case: dict[str, Any]) -> None:
    before = kept(web)
    answer = raw(web, spelled(case["raw"]).encode())
    assert answer.startswith(f"HTTP/1.1 {case['status']} ".encode()), answer[:500]
    assert kept(web) == before


def parsed(answer: bytes) -> httpx2.Response:
    head, _, body = answer.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    headers = [(name, value) for name, _, value in (line.partition(": ") for line in lines)]
    return httpx2.Response(int(first.split()[1]), headers=headers, content=body)
