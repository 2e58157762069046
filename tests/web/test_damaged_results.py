"""Result lines whose bytes were damaged on the disk: each door shows the item with an error, and all the others as they are."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx2
import pytest
import structlog

from tests.web import stages
from tests.web.calls import create, upload
from tests.web.completion_batch.test_routes import PLACE, body_of, names
from tests.web.server import NOWHERE, WebServer
from tidegate.core.answers.outcome_lines import UNREADABLE
from tidegate.core.answers.results import error_line, response_line
from tidegate.core.ids import item_id

NAMES = ["a", "b", "c", "d"]
# How the line of the second answer is damaged, given that line and the one behind it, without their last ends.
Damage = Callable[[bytes, bytes], bytes]


def _body(second: bytes, third: bytes) -> bytes:
    return second.replace(b'"body":{', b'"body":}') + b"\n" + third


def _not_text(second: bytes, third: bytes) -> bytes:
    return second.replace(b"answer", b"\xff\xfe\xff\xfe\xff\xfe") + b"\n" + third


def _head(second: bytes, third: bytes) -> bytes:
    at = second.index(b'"response"')
    return b"\0" * at + second[at:] + b"\n" + third


def _split(second: bytes, third: bytes) -> bytes:
    return second[:-9] + b"\n" + second[-8:] + b"\n" + third


def _joined(second: bytes, third: bytes) -> bytes:
    return second[:-5] + b"\0" * 6 + third


DAMAGES = [_body, _not_text, _head, _split, _joined]


@pytest.fixture(scope="module")
def web_settings() -> dict[str, Any]:
    return {"upstream": {"url": NOWHERE}}


def overwrite(web: WebServer, old: bytes, new: bytes) -> None:
    """Change bytes in the one file below the server's directory that has them."""
    assert len(old) == len(new), "damage moves nothing"
    [path] = [one for one in (web.scratch.parent / "blobs").rglob("*") if one.is_file() and old in one.read_bytes()]
    path.write_bytes(path.read_bytes().replace(old, new))


def answer(job_id: str, number: int, custom_id: str) -> bytes:
    body = b'{"choices":[{"answer":%d}],"usage":{"prompt_tokens":3,"completion_tokens":4}}' % number
    return response_line(item_id(job_id, number), json.dumps(custom_id).encode(), 200, body)


def damaged(web: WebServer, job_id: str, custom_ids: list[str], damage: Damage, *, is_ended: bool) -> None:
    """Three answers, of which the second is damaged, and an error."""
    stages.start(web, job_id, 4)
    lines = {number: answer(job_id, number, custom_ids[number]) for number in range(3)}
    error = error_line(job_id, 3, json.dumps(custom_ids[3]).encode(), "worker_lost", "Why.")
    stages.finish(web, job_id, lines, {3: error})
    if is_ended:
        stages.publish(web, job_id)
    second, third = lines[1][:-1], lines[2][:-1]
    overwrite(web, second + b"\n" + third, damage(second, third))


@pytest.mark.parametrize("is_ended", [True, False], ids=["ended", "running"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_items_and_events_of_a_batch(web: WebServer, client: httpx2.Client, damage: Damage, is_ended: bool) -> None:
    batch = create(client, upload(client))["id"]
    damaged(web, batch, NAMES, damage, is_ended=is_ended)
    path = f"/v1/batches/{batch}/items"
    for limit in (1, 2, 100):
        shown: list[dict[str, Any]] = []
        after: dict[str, str] = {}
        while True:
            page = client.get(path, params={"limit": limit, **after})
            assert page.status_code == 200, page.text
            shown += page.json()["data"]
            if not page.json()["has_more"]:
                break
            after = {"after": page.json()["last_id"]}
        assert [one["id"] for one in shown] == [item_id(batch, number) for number in range(4)]
        errors = [one["error"] and one["error"]["code"] for one in shown]
        # Zeros over the end of a line damage that line alone: where the next one begins, the store knows.
        assert errors == [None, UNREADABLE, None, "worker_lost"]
        assert "Send the request again" in shown[1]["error"]["message"]
    one = client.get(f"{path}/{item_id(batch, 1)}")
    assert (one.status_code, one.json()["response"]) == (200, None)
    assert one.json()["error"]["code"] == UNREADABLE
    if damage is not _head:
        assert client.get(f"{path}/b").json()["error"]["code"] == UNREADABLE
    if is_ended:
        events = client.get(f"/v1/batches/{batch}/events").text
        assert events.count("event: item.completed") == 3
        assert events.count(UNREADABLE) == 1
        assert "event: batch.completed" in events
        assert client.get(f"/v1/files/{web.job(batch).output_file_id}/content").status_code == 200


@pytest.mark.parametrize("damage", DAMAGES)
def test_results_of_a_message_batch(web: WebServer, client: httpx2.Client, damage: Damage) -> None:
    params = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]}
    made = client.post("/v1/messages/batches", json={"requests": [{"custom_id": n, "params": params} for n in NAMES]})
    batch = made.json()["id"].replace("msgbatch_", "batch_")
    damaged(web, batch, NAMES, damage, is_ended=True)
    answered = client.get(f"/v1/messages/batches/{made.json()['id']}/results")
    assert answered.status_code == 200
    results = [json.loads(line) for line in answered.text.splitlines()]
    assert [one["result"]["type"] for one in results] == ["succeeded", "errored", "succeeded", "errored"]
    assert [one["custom_id"] for one in results] == ["a", "" if damage is _head else "b", "c", "d"]
    assert "cannot be read" in results[1]["result"]["error"]["error"]["message"]


@pytest.mark.parametrize("is_ended", [True, False], ids=["ended", "running"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_items_and_events_of_a_completion_batch(
    web: WebServer, client: httpx2.Client, damage: Damage, is_ended: bool
) -> None:
    request = {"messages": [{"role": "user", "content": "hi"}]}
    batch = client.post(PLACE, json=body_of(*[request] * 4)).json()["batchId"]
    damaged(web, batch, names(web, batch), damage, is_ended=is_ended)
    whole = client.get(f"{PLACE}/{batch}")
    assert whole.status_code == 200
    items = whole.json()["items"]
    statuses = ["COMPLETED", "FAILED", "COMPLETED", "FAILED"]
    assert [one["status"] for one in items] == statuses
    assert [one["errorCode"] for one in items] == [None, UNREADABLE, None, "worker_lost"]
    if is_ended:
        assert [one["itemId"] for one in items] == [item_id(batch, number) for number in range(4)]
    one = client.get(f"{PLACE}/{batch}/{item_id(batch, 1)}")
    assert (one.status_code, one.json()["status"], one.json()["errorCode"]) == (200, "FAILED", UNREADABLE)
    assert one.json()["response"] is None
    if is_ended:
        events = client.get(f"{PLACE}/{batch}/events", headers={"Last-Event-ID": "0"}).text
        assert events.count('"action":"item-completed"') == 2
        assert events.count('"action":"item-failed"') == 2
        assert "[DONE]" in events


@pytest.mark.parametrize("is_ended", [True, False], ids=["ended", "running"])
def test_a_background_response(web: WebServer, client: httpx2.Client, is_ended: bool) -> None:
    made = client.post("/v1/responses", json={"model": "m", "input": "hi", "background": True})
    assert made.status_code == 200, made.text
    job_id = made.json()["id"].replace("resp_", "batch_")
    line = answer(job_id, 0, "response")
    stages.finish(web, job_id, {0: line})
    if is_ended:
        stages.publish(web, job_id)
    overwrite(web, line, line.replace(b'"body":{', b'"body":}'))
    shown = client.get(f"/v1/responses/{made.json()['id']}")
    assert shown.status_code == 200, shown.text
    assert (shown.json()["status"], shown.json()["error"]["code"]) == ("failed", UNREADABLE)


def test_a_damaged_line_is_logged_once_a_look(web: WebServer, client: httpx2.Client) -> None:
    batch = create(client, upload(client))["id"]
    damaged(web, batch, NAMES, _head, is_ended=True)
    with structlog.testing.capture_logs() as logged:
        client.get(f"/v1/batches/{batch}/items")
    [one] = [entry for entry in logged if entry["event"] == UNREADABLE]
    assert (one["log_level"], one["batch"], one["file"]) == ("error", batch, "output")


def test_errors_are_grouped_also_where_a_failed_line_is_damaged(web: WebServer, client: httpx2.Client) -> None:
    batch = create(client, upload(client))["id"]
    damaged(web, batch, NAMES, _body, is_ended=True)
    kinds = client.get(f"/admin/v1/batches/{batch}/errors")
    assert kinds.status_code == 200
    line = error_line(batch, 3, b'"d"', "worker_lost", "Why.")
    overwrite(web, line, line.replace(b"Why.", b"\xff\xff\xff\xff"))
    kinds = client.get(f"/admin/v1/batches/{batch}/errors")
    assert kinds.status_code == 200, kinds.text
    assert [one["code"] for one in kinds.json()["data"]] == ["worker_lost"]


@pytest.mark.parametrize("junk", [b"}", b"\0", b"\xff", b"\n"])
def test_requests_that_are_damaged_hide_no_results(web: WebServer, client: httpx2.Client, junk: bytes) -> None:
    """The bytes of an input are checked before it is read, and not again when its lines are shown."""
    texts = [f"hi {number} {junk.hex()}" for number in range(4)]
    requests = [{"messages": [{"role": "user", "content": text}]} for text in texts]
    batch = client.post(PLACE, json=body_of(*requests)).json()["batchId"]
    custom_ids = names(web, batch)
    stages.start(web, batch, 4)
    stages.finish(web, batch, {number: answer(batch, number, custom_ids[number]) for number in range(4)})
    stages.publish(web, batch)
    whole = texts[1].encode()
    overwrite(web, b'"%b"' % whole, junk * (len(whole) + 2))
    shown = client.get(f"{PLACE}/{batch}")
    assert [one["status"] for one in shown.json()["items"]] == ["COMPLETED"] * 4
    # Lines behind ends that are none are not where they were, and no request is shown as another's.
    is_hidden = [False, True, False, False] if junk != b"\n" else [False, True, True, True]
    assert [one["request"] is None for one in shown.json()["items"]] == is_hidden
    one = client.get(f"{PLACE}/{batch}/{item_id(batch, 1)}")
    assert (one.status_code, one.json()["request"], one.json()["status"]) == (200, None, "COMPLETED")
    events = client.get(f"{PLACE}/{batch}/events", headers={"Last-Event-ID": "0"})
    assert events.text.count('"action":"item-completed"') == 4
    assert client.get(f"/v1/batches/{batch}/items").status_code == 200


@pytest.mark.parametrize("junk", [b"}", b"\xff"])
def test_a_background_response_whose_request_is_damaged(web: WebServer, client: httpx2.Client, junk: bytes) -> None:
    text = f"some words {junk.hex()}"
    made = client.post("/v1/responses", json={"model": "m", "input": "hi", "background": True, "user": text})
    overwrite(web, b'"%b"' % text.encode(), junk * (len(text) + 2))
    shown = client.get(f"/v1/responses/{made.json()['id']}")
    assert (shown.status_code, shown.json()["status"]) == (200, "queued")
    assert client.post(f"/v1/responses/{made.json()['id']}/cancel").json()["status"] == "cancelled"


@pytest.mark.parametrize("junk", [b"}", b"\xff"])
def test_a_message_batch_that_never_began_and_whose_request_is_damaged(
    web: WebServer, client: httpx2.Client, junk: bytes
) -> None:
    params = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]}
    words = f"words {junk.hex()}"
    odd = {**params, "system": words}
    given = [
        {"custom_id": "a", "params": params},
        {"custom_id": "b", "params": odd},
        {"custom_id": "c", "params": params},
    ]
    made = client.post("/v1/messages/batches", json={"requests": given}).json()["id"]
    client.post(f"/v1/messages/batches/{made}/cancel")
    job_id = made.replace("msgbatch_", "batch_")
    assert web.run(web.store.end_unstarted(job_id))
    overwrite(web, b'"%b"' % words.encode(), junk * (len(words) + 2))
    answered = client.get(f"/v1/messages/batches/{made}/results")
    results = [json.loads(line) for line in answered.text.splitlines()]
    assert [(one["custom_id"], one["result"]["type"]) for one in results] == [
        ("a", "canceled"),
        ("b", "canceled"),
        ("c", "canceled"),
    ]
