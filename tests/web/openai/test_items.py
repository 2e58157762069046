"""Items of a batch as a client pages through them, and one item with its request and its response."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import pytest

from tests.support.processes import wait_until
from tests.web import stages
from tests.web.calls import create, is_error, upload
from tests.web.server import WebServer
from tidegate.core.answers.results import error_line, never_ran_line, response_line
from tidegate.core.ids import item_id
from tidegate.core.states import Outcome
from tidegate.store.file_bytes import file_bytes
from tidegate.web.jobs import job_items
from tidegate.web.jobs.job_items import LOOKUPS_MAX

ANSWERED, FAILED, NEVER = range(4), range(4, 7), range(7, 9)
NAMES = ["a/b", "plain", "\u00e9", 'qu"ote', "e", "f", "g", "h", "i"]


def chat(custom_id: str) -> bytes:
    body = {"model": "m", "messages": [{"role": "user", "content": f"hi {custom_id}"}]}
    line = {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body}
    return json.dumps(line).encode() + b"\n"


def answered(batch_id: str, number: int) -> bytes:
    name = json.dumps(NAMES[number], ensure_ascii=number % 2 == 0).encode()
    return response_line(item_id(batch_id, number), name, 200, b'{"n":%d}' % number)


def failed(batch_id: str, number: int) -> bytes:
    name = json.dumps(NAMES[number]).encode()
    if number == 4:
        return error_line(batch_id, number, name, "worker_lost", "gone")
    return response_line(item_id(batch_id, number), name, 400, b'{"error":{"code":"bad","message":"no"}}')


@pytest.fixture(scope="module")
def batch_id(web: WebServer, client: httpx2.Client) -> str:
    """A batch with four answers, three errors, and two requests that never ran."""
    data = b"\xef\xbb\xbf" + b"".join(chat(name) for name in NAMES)
    made = str(create(client, upload(client, data))["id"])
    stages.start(web, made, len(NAMES))
    stages.finish(web, made, {n: answered(made, n) for n in ANSWERED}, {n: failed(made, n) for n in FAILED})
    client.post(f"/v1/batches/{made}/cancel")
    rest = {n: never_ran_line(made, n, json.dumps(NAMES[n]).encode(), Outcome.CANCELLED) for n in NEVER}
    stages.publish(web, made, rest, Outcome.CANCELLED)
    return made


def names(client: httpx2.Client, batch_id: str, **query: Any) -> list[str]:
    """The custom_ids of all pages."""
    found: list[str] = []
    after: dict[str, str] = {}
    while True:
        answer = client.get(f"/v1/batches/{batch_id}/items", params={**query, **after})
        assert answer.status_code == 200, answer.text
        page = answer.json()
        assert page["first_id"] == (page["data"][0]["id"] if page["data"] else None)
        found += [one["custom_id"] for one in page["data"]]
        if not page["has_more"]:
            return found
        after = {"after": page["last_id"]}


def test_items_of_an_ordered_batch_are_shown_at_its_end(web: WebServer, client: httpx2.Client) -> None:
    """Its files are written again then, so before that no line of them has its final place."""
    made = str(create(client, upload(client, chat("a") + chat("b")), ordered=True)["id"])
    stages.start(web, made, 2)
    stages.finish(web, made, {0: answered(made, 0)})
    items, done = f"/v1/batches/{made}/items", item_id(made, 0)
    assert client.get(items).json()["data"] == []
    is_error(client.get(f"{items}/{done}"), {"status": 404, "code": "item_not_found"})
    is_error(client.get(items, params={"after": done}), {"status": 400, "param": "after"})
    waiting = client.get(f"{items}/a").json()
    assert (waiting["outcome"], waiting["request"]["custom_id"]) == (None, "a")


@pytest.mark.parametrize("limit", [1, 2, 3, 9, 100])
def test_pages_of_any_size_show_every_item_once(client: httpx2.Client, batch_id: str, limit: int) -> None:
    assert names(client, batch_id, limit=limit) == NAMES
    assert names(client, batch_id, limit=limit, outcome="answered") == NAMES[:4]
    assert names(client, batch_id, limit=limit, outcome="cancelled") == NAMES[7:]
    assert names(client, batch_id, limit=limit, code="bad") == NAMES[5:7]
    assert names(client, batch_id, limit=limit, code="worker_lost", outcome="failed") == ["e"]
    assert names(client, batch_id, limit=limit, code="bad", outcome="answered") == []
    assert names(client, batch_id, limit=limit, outcome="expired") == []


def test_a_page_looks_at_so_much_and_leads_on(
    client: httpx2.Client, batch_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_items, "LOOK_BYTES_MAX", 0)
    first = client.get(f"/v1/batches/{batch_id}/items", params={"outcome": "cancelled"}).json()
    assert (first["data"], first["has_more"], first["first_id"]) == ([], True, None)
    assert names(client, batch_id, outcome="cancelled") == NAMES[7:]
    assert names(client, batch_id) == NAMES


def test_items_say_what_became_of_them(client: httpx2.Client, batch_id: str) -> None:
    items = client.get(f"/v1/batches/{batch_id}/items").json()["data"]
    assert items[0] == {
        "id": item_id(batch_id, 0),
        "object": "batch.item",
        "batch_id": batch_id,
        "custom_id": "a/b",
        "outcome": "answered",
        "status_code": 200,
        "error": None,
    }
    assert [(one["outcome"], one["status_code"], one["error"]["code"]) for one in items[4:]] == [
        ("failed", None, "worker_lost"),
        ("failed", 400, "bad"),
        ("failed", 400, "bad"),
        ("cancelled", None, "batch_cancelled"),
        ("cancelled", None, "batch_cancelled"),
    ]


@pytest.mark.parametrize("number", range(len(NAMES)))
def test_one_item_with_its_request_and_its_response(client: httpx2.Client, batch_id: str, number: int) -> None:
    path = f"/v1/batches/{batch_id}/items"
    found = client.get(f"{path}/{NAMES[number]}")
    assert found.status_code == 200, found.text
    shown = found.json()
    assert shown["request"] == json.loads(chat(NAMES[number]))
    assert (shown["id"], shown["custom_id"]) == (item_id(batch_id, number), NAMES[number])
    if number in ANSWERED:
        assert shown["response"]["body"] == {"n": number}
    assert client.get(f"{path}/{shown['id']}").json() == shown


@pytest.mark.parametrize("count", [1, 7, 100])
def test_one_item_is_found_however_its_files_are_cut(
    client: httpx2.Client, batch_id: str, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    whole = file_bytes

    async def pieces(*where: Any) -> AsyncIterator[bytes]:
        async for piece in whole(*where):
            for start in range(0, len(piece), count):
                yield piece[start : start + count]

    monkeypatch.setattr(job_items, "file_bytes", pieces)
    for name in NAMES:
        found = client.get(f"/v1/batches/{batch_id}/items/{name.replace('/', '%2F')}").json()
        assert found["custom_id"] == name


def test_a_name_with_a_slash_may_be_escaped(client: httpx2.Client, batch_id: str) -> None:
    for name in ("a%2Fb", "a%2fb", "a/b"):
        assert client.get(f"/v1/batches/{batch_id}/items/{name}").json()["custom_id"] == "a/b"
    for path in (f"{batch_id}%2Fitems/a", f"{batch_id}/items/a%00b", f"{batch_id}/items%2Fa"):
        is_error(client.get(f"/v1/batches/{path}"), {"status": 404, "code": "unknown_url"})


def test_what_waits_has_a_request_alone_and_a_deleted_input_none(web: WebServer, client: httpx2.Client) -> None:
    file_id = upload(client, b"".join(chat(name) for name in NAMES[:2]))
    made = create(client, file_id)["id"]
    path = f"/v1/batches/{made}/items/plain"
    stages.start(web, made, 2)
    waiting = client.get(path).json()
    assert (waiting["outcome"], waiting["id"], waiting["response"]) == (None, None, None)
    assert waiting["request"]["custom_id"] == "plain"
    stages.finish(web, made, {1: answered(made, 1)})
    assert client.get(path).json()["outcome"] == "answered"
    assert client.delete(f"/v1/files/{file_id}").status_code == 200
    shown = client.get(path).json()
    assert (shown["request"], shown["response"]["body"]) == (None, {"n": 1})
    is_error(client.get(f"/v1/batches/{made}/items/a/b"), {"status": 404, "code": "item_not_found"})


def test_a_tenant_has_few_searches_at_once(
    web: WebServer, client: httpx2.Client, batch_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An item is searched for in whole files: many such requests at once would take the server from all others."""
    path, stream, go_on = f"/v1/batches/{batch_id}/items/plain", web.blobs.stream, threading.Event()
    began: list[Any] = []

    async def held(*place: Any) -> AsyncIterator[bytes]:
        began.append(place)
        while not go_on.is_set():  # noqa: ASYNC110 - another thread's event
            await asyncio.sleep(0.01)
        async for chunk in stream(*place):
            yield chunk

    monkeypatch.setattr(web.blobs, "stream", held)
    with ThreadPoolExecutor(LOOKUPS_MAX) as pool:
        searches = [pool.submit(client.get, path) for _ in range(LOOKUPS_MAX)]
        wait_until(lambda: len(began) == LOOKUPS_MAX, what="the searches to begin")
        is_error(client.get(path), {"status": 429, "code": "too_many_lookups"})
        go_on.set()
        assert [search.result().status_code for search in searches] == [200] * LOOKUPS_MAX
    assert client.get(path).status_code == 200


def test_bad_queries_are_refused(client: httpx2.Client, batch_id: str) -> None:
    path = f"/v1/batches/{batch_id}/items"
    for query, code in (
        ({"outcomes": "failed"}, "unknown_parameter"),
        ({"outcome": "waiting"}, "invalid_parameter"),
        ({"code": ""}, "invalid_parameter"),
        ({"code": "x" * 200}, "invalid_parameter"),
        ({"limit": "101"}, "invalid_parameter"),
        ({"after": "x"}, "invalid_parameter"),
        ({"after": item_id(batch_id, 99)}, "invalid_parameter"),
        ({"after": item_id("batch_9999999999999999999999", 1)}, "invalid_parameter"),
    ):
        is_error(client.get(path, params=query), {"status": 400, "code": code})
    is_error(client.get(f"{path}/x", params={"full": "1"}), {"status": 400, "code": "unknown_parameter"})
    for name in ("nothing", "\\", '"', "batch_req_0000000000000000000000", "x" * 2_000):
        is_error(client.get(f"{path}/{name}"), {"status": 404, "code": "item_not_found"})


def test_deleted_results_are_not_items(web: WebServer, client: httpx2.Client) -> None:
    made = create(client, upload(client, b"".join(chat(name) for name in NAMES[:2])))["id"]
    stages.start(web, made, 2)
    stages.finish(web, made, {0: answered(made, 0), 1: answered(made, 1)})
    stages.publish(web, made)
    output = client.get(f"/v1/batches/{made}").json()["output_file_id"]
    assert client.delete(f"/v1/files/{output}").status_code == 200
    is_error(client.get(f"/v1/batches/{made}/items"), {"status": 404, "code": "file_not_found"})
    assert client.get(f"/v1/batches/{made}/items", params={"outcome": "failed"}).json()["data"] == []
