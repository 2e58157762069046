"""U+0000, which PostgreSQL keeps in no text: wherever a caller can put it, the answer is an error of the caller, on both stores."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from tests.web.calls import LINES, upload
from tests.web.server import WebServer

BATCH = {"endpoint": "/v1/embeddings", "completion_window": "24h"}


@pytest.fixture
def client(web_on_both: WebServer) -> Iterator[httpx2.Client]:
    with web_on_both.client() as made:
        yield made


@pytest.mark.parametrize("metadata", [{"a": "b\0"}, {"a\0": "b"}])
def test_metadata(client: httpx2.Client, metadata: dict[str, str]) -> None:
    answer = client.post("/v1/batches", json={**BATCH, "input_file_id": upload(client), "metadata": metadata})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "metadata")


def test_everywhere_else(client: httpx2.Client) -> None:
    file_id = upload(client)
    answers = [
        client.post("/v1/batches", json={**BATCH, "input_file_id": file_id + "\0"}),
        client.post("/v1/batches", json={**BATCH, "input_file_id": file_id, "endpoint": "/v1/\0"}),
        client.post("/v1/batches", json={**BATCH, "input_file_id": file_id, "completion_window": "24h\0"}),
        client.post("/v1/batches", json={**BATCH, "input_file_id": file_id, "queue": "a\0"}),
        client.post("/v1/files", files={"file": ("a", LINES)}, data={"purpose": "batch\0"}),
        *(
            client.get(path)
            for path in (
                "/v1/files/%00",
                "/v1/files/file-%00",
                "/v1/files/%00/content",
                "/v1/batches/%00",
                "/v1/files?after=%00",
                "/v1/files?purpose=%00",
                "/v1/batches?after=a%00b",
                "/v1/models/%00",
                "/v1/messages/batches/%00",
                "/v1/batches?metadata[%00]=a",
                "/v1/batches/batch_0ettesyKzSzyluRMu7As8n/items?after=%00",
            )
        ),
        client.post("/v1/batches/a%00/cancel"),
        client.delete("/v1/files/%00"),
    ]
    assert [
        (answer.status_code, str(answer.request.url)) for answer in answers if not 400 <= answer.status_code < 500
    ] == []


def test_a_file_name_is_stored_without_it_or_refused(client: httpx2.Client) -> None:
    head = b'--x\r\nContent-Disposition: form-data; name="file"; filename="a\0b.jsonl"\r\n\r\n'
    purpose = b'\r\n--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--x--\r\n'
    sent = {"Content-Type": "multipart/form-data; boundary=x"}
    for body in (
        head + LINES + purpose,
        head.replace(b"filename=", b"filename*=UTF-8''").replace(b"\0", b"%00") + LINES + purpose,
    ):
        answer = client.post("/v1/files", content=body, headers=sent)
        assert answer.status_code in (200, 400), answer.text
        if answer.status_code == 200:
            assert "\0" not in answer.json()["filename"]


def test_lines_with_it_are_the_batch_s_affair(client: httpx2.Client) -> None:
    line = {"custom_id": "a\0", "method": "POST", "url": "/v1/embeddings", "body": {"model": "m\0", "input": "\0"}}
    file_id = upload(client, json.dumps(line).encode() + b"\n")
    answer = client.post("/v1/batches", json={**BATCH, "input_file_id": file_id})
    assert answer.status_code == 200


def test_an_operators_cursor(start_web: Any, migrated_postgres_url: str) -> None:
    web: WebServer = start_web(postgres_url=migrated_postgres_url)
    with web.client(web.make_key("acme", scopes=["admin:read"])) as operator:
        for query in ("after=%00", "org=a%00"):
            answer = operator.get(f"/admin/v1/keys?{query}")
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, query.split("=")[0])
