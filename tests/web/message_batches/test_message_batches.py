"""Anthropic's Message Batches over a real socket, without a worker: shapes, refusals, and how a job's states look at this door."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx2
import pytest

from tests.support.processes import wait_until
from tests.support.sdks import anthropic
from tests.web import stages
from tests.web.calls import kept, upload
from tests.web.server import WebServer
from tidegate.core.errors import StoreUnavailable
from tidegate.core.states import Outcome
from tidegate.web.message_batches import schemas

PATH = "/v1/messages/batches"
PARAMS = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "Hi"}]}


def requests_of(*custom_ids: str) -> dict[str, Any]:
    return {"requests": [{"custom_id": one, "params": PARAMS} for one in custom_ids]}


def made(client: httpx2.Client, *custom_ids: str, **headers: str) -> dict[str, Any]:
    answer = client.post(PATH, json=requests_of(*custom_ids or ("a", "b")), headers=headers)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def job_id(batch: dict[str, Any]) -> str:
    return str(batch["id"]).replace("msgbatch_", "batch_")


def refused(answer: httpx2.Response, status: int, kind: str, code: str) -> str:
    """Anthropic's shape of an error."""
    assert answer.status_code == status, answer.text
    body = answer.json()
    assert body["type"] == "error"
    assert body["request_id"] == answer.headers["x-request-id"]
    assert (body["error"]["type"], body["error"]["code"]) == (kind, code)
    return str(body["error"]["message"])


def line(custom_id: str, response: dict[str, Any] | None = None, error: dict[str, Any] | None = None) -> bytes:
    result = {"id": "batch_req_x", "custom_id": custom_id, "response": response, "error": error}
    return json.dumps(result).encode() + b"\n"


@pytest.mark.parametrize(
    ("shape", "name"),
    [
        (schemas.MessageBatch, "MessageBatch"),
        (schemas.MessageBatchCounts, "MessageBatchRequestCounts"),
        (schemas.MessageBatchDeleted, "DeletedMessageBatch"),
    ],
)
def test_fields_are_those_of_the_sdk(shape: Any, name: str) -> None:
    """A field that a later SDK adds is missed here first."""
    assert set(getattr(anthropic.types.messages, name).model_fields) == set(shape.__struct_fields__)


def test_a_batch_that_was_just_made(web: WebServer, client: httpx2.Client) -> None:
    batch = made(client)
    assert batch.keys() == {
        *("id", "type", "processing_status", "request_counts", "created_at", "expires_at", "ended_at"),
        *("cancel_initiated_at", "archived_at", "results_url"),
    }
    assert (batch["type"], batch["processing_status"], batch["results_url"]) == ("message_batch", "in_progress", None)
    assert batch["request_counts"] == {"processing": 2, "succeeded": 0, "errored": 0, "canceled": 0, "expired": 0}
    assert batch["created_at"].endswith("Z")
    assert client.get(f"{PATH}/{batch['id']}").json() == batch
    assert client.get(f"{PATH}/{batch['id']}?beta=true").json() == batch
    # The same job at OpenAI's door.
    other = client.get(f"/v1/batches/{job_id(batch)}").json()
    assert (other["endpoint"], other["status"], other["completion_window"]) == ("/v1/messages", "validating", "24h")
    read = client.get(f"/v1/files/{other['input_file_id']}/content").content.splitlines()
    assert [json.loads(one)["body"] for one in read] == [PARAMS, PARAMS]


def test_counts_move_when_all_is_over_and_results_are_counted_by_kind(web: WebServer, client: httpx2.Client) -> None:
    batch = made(client, "a", "b", "c", "d")
    stages.start(web, job_id(batch), 4)
    message = {"id": "msg_1", "type": "message", "content": []}
    answered = line("a", {"status_code": 200, "request_id": "req_1", "body": message})
    bad = {"error": {"message": "No.", "type": "invalid_request_error", "param": None, "code": "bad"}}
    failed = line("b", {"status_code": 400, "request_id": "req_2", "body": bad})
    stages.finish(web, job_id(batch), {0: answered}, {1: failed})
    running = client.get(f"{PATH}/{batch['id']}").json()
    assert running["request_counts"] == {"processing": 4, "succeeded": 0, "errored": 0, "canceled": 0, "expired": 0}
    refused(client.get(f"{PATH}/{batch['id']}/results"), 409, "invalid_request_error", "batch_not_ended")
    refused(client.delete(f"{PATH}/{batch['id']}"), 409, "invalid_request_error", "batch_not_ended")
    rung = web.bell.rung
    cancelled = client.post(f"{PATH}/{batch['id']}/cancel").json()
    assert web.bell.rung == rung + 1, "its workers stop at once"
    assert (cancelled["processing_status"], cancelled["ended_at"]) == ("canceling", None)
    assert cancelled["cancel_initiated_at"]
    never = {"code": "batch_cancelled", "message": "This request was not executed."}
    rest = {2: line("c", error=never), 3: line("d", error=never)}
    stages.publish(web, job_id(batch), rest, Outcome.CANCELLED)
    ended = client.get(f"{PATH}/{batch['id']}").json()
    assert ended["processing_status"] == "ended"
    assert batch["created_at"] <= cancelled["cancel_initiated_at"] <= ended["ended_at"]
    assert ended["request_counts"] == {"processing": 0, "succeeded": 1, "errored": 1, "canceled": 2, "expired": 0}
    assert ended["results_url"] == f"{web.url}{PATH}/{batch['id']}/results"
    answer = client.get(ended["results_url"])
    assert answer.headers["content-type"] == "application/x-jsonl"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert "sandbox" in answer.headers["content-security-policy"]
    head = client.head(ended["results_url"])
    assert (head.status_code, head.headers["content-type"], head.content) == (200, "application/x-jsonl", b"")
    found = {one["custom_id"]: one["result"] for one in map(json.loads, answer.content.splitlines())}
    error = {"type": "invalid_request_error", "message": "No.", "code": "bad"}
    assert found == {
        "a": {"type": "succeeded", "message": message},
        "b": {"type": "errored", "error": {"type": "error", "error": error, "request_id": "req_2"}},
        "c": {"type": "canceled"},
        "d": {"type": "canceled"},
    }
    assert client.post(f"{PATH}/{batch['id']}/cancel").status_code == 200, "asking twice is fine"
    gone = client.delete(f"{PATH}/{batch['id']}")
    assert gone.json() == {"id": batch["id"], "type": "message_batch_deleted"}
    for path in (f"{PATH}/{batch['id']}", f"{PATH}/{batch['id']}/results"):
        refused(client.get(path), 404, "not_found_error", "batch_not_found")
    assert client.get(f"/v1/batches/{job_id(batch)}").status_code == 404
    assert batch["id"] not in client.get(PATH).text


def test_a_cancel_after_the_end_is_refused_in_the_words_of_this_api(web: WebServer, client: httpx2.Client) -> None:
    batch = made(client, "a")
    stages.start(web, job_id(batch), 1)
    stages.finish(web, job_id(batch), {0: line("a", {"status_code": 200, "request_id": "r", "body": {}})}, {})
    stages.publish(web, job_id(batch), {}, Outcome.CANCELLED)
    answer = client.post(f"{PATH}/{batch['id']}/cancel")
    refused(answer, 409, "invalid_request_error", "batch_not_cancellable")
    words = answer.json()["error"]["message"]
    assert words.startswith("This message batch has ended")
    assert "status '" not in words


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("batch_expired", None),
        ("model_not_found", "not_found_error"),
        ("unsupported_parameter", "invalid_request_error"),
        ("upstream_unavailable", "api_error"),
        ("worker_lost", "api_error"),
        ("batch_failed", "api_error"),
    ],
)
def test_a_request_without_an_answer(web: WebServer, client: httpx2.Client, code: str, kind: str | None) -> None:
    batch = made(client, "a")
    stages.start(web, job_id(batch), 1)
    stages.finish(web, job_id(batch), {}, {0: line("a", error={"code": code, "message": "Why."})})
    stages.publish(web, job_id(batch))
    result = client.get(f"{PATH}/{batch['id']}/results").json()["result"]
    if kind is None:
        assert result == {"type": "expired"}
    else:
        assert result["type"] == "errored"
        assert result["error"]["error"] == {"type": kind, "message": "Why.", "code": code}


def test_a_batch_that_ends_before_it_begins_has_a_result_for_each_request(
    web: WebServer, client: httpx2.Client
) -> None:
    batch = made(client, "a", "b")
    assert client.post(f"{PATH}/{batch['id']}/cancel").json()["processing_status"] == "canceling"
    assert web.run(web.store.end_unstarted(job_id(batch)))
    ended = client.get(f"{PATH}/{batch['id']}").json()
    assert ended["request_counts"] == {"processing": 0, "succeeded": 0, "errored": 0, "canceled": 2, "expired": 0}
    found = [json.loads(one) for one in client.get(ended["results_url"]).content.splitlines()]
    assert found == [{"custom_id": one, "result": {"type": "canceled"}} for one in ("a", "b")]
    # Without its input there is nothing left to tell.
    client.delete(f"/v1/files/{client.get(f'/v1/batches/{job_id(batch)}').json()['input_file_id']}")
    assert client.get(ended["results_url"]).content == b""


def test_a_batch_that_expires_before_it_begins_has_expired_results(web: WebServer, client: httpx2.Client) -> None:
    batch = made(client, "a")
    web.rewrite("update jobs set expires_at = 1")
    assert web.run(web.store.expire_job(job_id(batch)))
    assert web.run(web.store.end_unstarted(job_id(batch)))
    ended = client.get(f"{PATH}/{batch['id']}").json()
    assert (ended["request_counts"]["canceled"], ended["request_counts"]["expired"]) == (0, 1)
    assert client.get(ended["results_url"]).json() == {"custom_id": "a", "result": {"type": "expired"}}


def test_pages(start_web: Callable[..., WebServer]) -> None:
    web = start_web()
    with web.client() as client:
        assert client.get(PATH).json() == {"data": [], "has_more": False, "first_id": None, "last_id": None}
        ids = [made(client, "a")["id"] for _ in range(5)][::-1]
        client.post("/v1/batches", json={"input_file_id": upload(client), "endpoint": "/v1/embeddings"})

        def page(**query: Any) -> tuple[list[str], bool]:
            body = client.get(PATH, params=query).json()
            shown = [one["id"] for one in body["data"]]
            assert (body["first_id"], body["last_id"]) == ((shown[0], shown[-1]) if shown else (None, None))
            return shown, body["has_more"]

        assert page() == (ids, False)
        assert page(limit=2, beta="true") == (ids[:2], True)
        assert page(limit=2, after_id=ids[1]) == (ids[2:4], True)
        assert page(limit=2, after_id=ids[3]) == (ids[4:], False)
        assert page(limit=2, before_id=ids[4]) == (ids[2:4], True)
        assert page(limit=2, before_id=ids[2]) == (ids[:2], False)
        assert page(before_id=ids[0]) == ([], False)
        for query in (
            {"limit": 0},
            {"limit": 1_001},
            {"after_id": "x"},
            {"after_id": "batch_" + ids[0][9:]},
            {"before_id": "msgbatch_0000000000000000000000"},
            {"after_id": ids[0], "before_id": ids[1]},
        ):
            refused(client.get(PATH, params=query), 400, "invalid_request_error", "invalid_parameter")
        refused(client.get(PATH, params={"after": ids[0]}), 400, "invalid_request_error", "unknown_parameter")


@pytest.mark.parametrize(
    ("body", "headers", "status", "code"),
    [
        (b"", {}, 400, "invalid_parameter"),
        (b"\xff\xfe", {}, 400, "invalid_parameter"),
        (b'{"requests":[{"custom_id":"a","params":{}}', {}, 400, "invalid_json"),
        (b'{"requests":[]}', {}, 400, "invalid_parameter"),
        (
            b'{"requests":[{"custom_id":"a","params":{}}]}',
            {"Content-Type": "text/plain"},
            415,
            "unsupported_media_type",
        ),
        (b'{"requests":[{"custom_id":"a","params":{}}]}', {"Idempotency-Key": "a b"}, 400, "invalid_parameter"),
        (b'{"requests":[{"custom_id":"a","params":{"a":"%b"}}]}' % (b"x" * (1 << 20)), {}, 413, "body_too_large"),
    ],
)
def test_bad_creates_keep_nothing(
    web: WebServer, client: httpx2.Client, body: bytes, headers: dict[str, str], status: int, code: str
) -> None:
    before, jobs = kept(web), web.statement("select count(*) from jobs")
    answer = client.post(PATH, content=body, headers={"Content-Type": "application/json", **headers})
    refused(answer, status, "request_too_large" if status == 413 else "invalid_request_error", code)
    wait_until(lambda: kept(web) == before, what="the upload to be thrown away")
    assert web.statement("select count(*) from jobs") == jobs


@pytest.mark.parametrize("its_id", ["x", "msgbatch_", "batch_0000000000000000000000", "A" * 3_000, "msgbatch_%ff"])
def test_ids_of_no_shape(client: httpx2.Client, its_id: str) -> None:
    for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/results")):
        answer = client.request(method, f"{PATH}/{its_id}{path}")
        assert len(refused(answer, 404, "not_found_error", "batch_not_found")) < 300


def test_a_job_of_another_shape_is_not_seen_here(client: httpx2.Client) -> None:
    body = {"input_file_id": upload(client), "endpoint": "/v1/embeddings"}
    other = client.post("/v1/batches", json=body).json()["id"].replace("batch_", "msgbatch_")
    refused(client.get(f"{PATH}/{other}"), 404, "not_found_error", "batch_not_found")


def test_the_same_key_makes_one_batch(web: WebServer, client: httpx2.Client) -> None:
    # An upload under the same key is another thing.
    key: dict[str, Any] = {"Idempotency-Key": "k"}
    upload(client, **key)
    first = made(client, "once", **key)
    before = kept(web)
    assert made(client, "once", **{"Idempotency-Key": "k"})["id"] == first["id"]
    wait_until(lambda: kept(web) == before, what="the second upload to be thrown away")
    answer = client.post(PATH, json=requests_of("other"), headers={"Idempotency-Key": "k"})
    assert answer.status_code in (409, 422)
    assert answer.json()["type"] == "error"


def test_a_key_that_is_used_for_something_else_leaves_the_first_batch_whole(
    web: WebServer, client: httpx2.Client
) -> None:
    key = {"Idempotency-Key": "betas"}
    first = made(client, "a", **key)
    for is_in_progress in (False, True):
        if is_in_progress:
            stages.start(web, job_id(first), 1)
        answer = client.post(PATH, json=requests_of("a"), headers={**key, "anthropic-beta": "some-beta-2026-01-01"})
        refused(answer, 422, "invalid_request_error", "idempotency_key_reused")
        assert client.get(f"/v1/files/{web.job(job_id(first)).input_file_id}").status_code == 200


def test_a_key_works_once_the_reason_of_a_refusal_is_gone(start_web: Callable[..., WebServer]) -> None:
    web, key = start_web(limits={"pending_jobs_max": 1}), {"Idempotency-Key": "later"}
    with web.client() as client:
        first = made(client, "a")
        refused(client.post(PATH, json=requests_of("b"), headers=key), 429, "rate_limit_error", "quota_exceeded")
        assert len(client.get("/v1/files").json()["data"]) == 1
        client.post(f"{PATH}/{first['id']}/cancel")
        web.run(web.store.end_unstarted(job_id(first)))
        assert made(client, "b", **key)["id"] == made(client, "b", **key)["id"]


def test_deleting_a_batch_leaves_the_input_of_its_retry(web: WebServer, client: httpx2.Client) -> None:
    first = made(client, "a")
    stages.start(web, job_id(first), 1)
    stages.finish(web, job_id(first), {}, {0: line("a", error={"code": "worker_lost", "message": "Why."})})
    stages.publish(web, job_id(first))
    retry = client.post(f"/v1/batches/{job_id(first)}/retry").json()
    stages.start(web, retry["id"], 1)
    assert client.delete(f"{PATH}/{first['id']}").status_code == 200
    assert client.get(f"/v1/files/{retry['input_file_id']}").status_code == 200


def test_half_of_the_results_is_no_answer(web: WebServer, client: httpx2.Client) -> None:
    batch = made(client, "a", "b")
    stages.start(web, job_id(batch), 2)
    answer = line("a", {"status_code": 200, "request_id": "req_x", "body": {"id": "msg_x"}})
    stages.finish(web, job_id(batch), {0: answer}, {1: line("b", error={"code": "worker_lost", "message": "Why."})})
    stages.publish(web, job_id(batch))
    assert len(client.get(f"{PATH}/{batch['id']}/results").text.splitlines()) == 2
    client.delete(f"/v1/files/{web.job(job_id(batch)).error_file_id}")
    refused(client.get(f"{PATH}/{batch['id']}/results"), 404, "not_found_error", "file_not_found")


def test_limits_hold_and_leave_no_file(start_web: Callable[..., WebServer]) -> None:
    web = start_web(limits={"pending_jobs_max": 1, "message_batch_items_max": 2, "inline_bytes_max": 2_000})
    with web.client() as client:
        made(client, "a", "b")
        files = len(client.get("/v1/files").json()["data"])
        refused(client.post(PATH, json=requests_of("a")), 429, "rate_limit_error", "quota_exceeded")
        assert len(client.get("/v1/files").json()["data"]) == files
        too_many = client.post(PATH, json=requests_of("a", "b", "c"))
        refused(too_many, 400, "invalid_request_error", "invalid_parameter")
        large = {"requests": [{"custom_id": "a", "params": {**PARAMS, "pad": "x" * 2_000}}]}
        refused(client.post(PATH, json=large), 413, "request_too_large", "body_too_large")


@pytest.fixture
def keyed(start_web: Callable[..., WebServer]) -> Iterator[tuple[WebServer, httpx2.Client]]:
    web = start_web()
    with httpx2.Client(base_url=web.url, headers={"x-api-key": web.make_key("acme")}, timeout=30) as client:
        yield web, client


def test_keys_and_scopes(keyed: tuple[WebServer, httpx2.Client]) -> None:
    web, client = keyed
    batch = made(client)
    assert client.get(f"{PATH}/{batch['id']}", headers={"anthropic-workspace-id": "w"}).status_code == 200
    refused(client.get(PATH, headers={"x-api-key": "wrong"}), 401, "authentication_error", "invalid_api_key")
    reader = {"x-api-key": web.make_key("acme", scopes=["batches:read"])}
    assert client.get(PATH, headers=reader).json()["data"][0]["id"] == batch["id"]
    for method, path in (("POST", ""), ("DELETE", f"/{batch['id']}"), ("POST", f"/{batch['id']}/cancel")):
        refused(client.request(method, PATH + path, headers=reader), 403, "permission_error", "insufficient_scope")


def test_a_store_that_is_away_is_a_503(web: WebServer, client: httpx2.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = made(client)

    async def away(*_: Any, **__: Any) -> Any:
        raise StoreUnavailable("it is away")

    monkeypatch.setattr("tidegate.stages.accept.REPLAY_MS", 0)
    for name in ("begin_blob", "get_job", "list_jobs"):
        monkeypatch.setattr(web.store, name, away)
    for method, path in (
        *(("POST", ""), ("GET", "")),
        *(("GET", f"/{batch['id']}"), ("POST", f"/{batch['id']}/cancel"), ("GET", f"/{batch['id']}/results")),
    ):
        answer = client.request(method, PATH + path, json=requests_of("a") if path == "" and method == "POST" else None)
        refused(answer, 503, "overloaded_error", "unavailable")
        assert answer.headers["retry-after"]


def test_where_results_lie_behind_a_proxy(start_web: Callable[..., WebServer]) -> None:
    forwarded = {"X-Forwarded-Proto": "https", "X-Forwarded-Host": "batch.example.com", "X-Forwarded-For": "127.0.0.1"}
    for trusted, wanted in (([], "http://127.0.0.1"), (["127.0.0.1"], "https://batch.example.com/")):
        web = start_web(server={"trusted_proxies": trusted})
        with web.client(web.make_key("acme")) as client:
            batch = made(client)
            client.post(f"{PATH}/{batch['id']}/cancel")
            web.run(web.store.end_unstarted(job_id(batch)))
            for name, value in (("X-Forwarded-Host", "evil/path"), ("X-Forwarded-Proto", "javascript")):
                odd = client.get(f"{PATH}/{batch['id']}", headers={**forwarded, name: value}).json()["results_url"]
                assert value not in odd
            assert client.get(f"{PATH}/{batch['id']}", headers=forwarded).json()["results_url"].startswith(wanted)
