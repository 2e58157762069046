"""Batches as a client sees them in every state, and their output while it grows."""

from __future__ import annotations

import threading
from typing import Any

import httpx2
import pytest

from tests.web import stages
from tests.web.calls import create, is_error, upload
from tests.web.server import WebServer
from tidegate.core.nouns import LineError
from tidegate.core.states import JobState, Outcome
from tidegate.stages import running_keys

TIMESTAMPS = (
    "created_at",
    "in_progress_at",
    "expires_at",
    "finalizing_at",
    "completed_at",
    "failed_at",
    "expired_at",
    "cancelling_at",
    "cancelled_at",
)


def batch(client: httpx2.Client, batch_id: str) -> dict[str, Any]:
    return dict(client.get(f"/v1/batches/{batch_id}").json())


def stamped(shown: dict[str, Any]) -> set[str]:
    return {name for name in TIMESTAMPS if shown[name] is not None}


def test_a_new_batch(web: WebServer, client: httpx2.Client) -> None:
    rung = web.bell.rung
    file_id = upload(client)
    made = create(client, file_id, metadata={"k": "v é"}, completion_window=None)
    assert made["object"] == "batch"
    assert made["status"] == "validating"
    assert made["endpoint"] == "/v1/embeddings"
    assert made["input_file_id"] == file_id
    assert made["completion_window"] == "24h"
    assert made["expires_at"] - made["created_at"] == 86_400
    assert made["metadata"] == {"k": "v é"}
    assert made["errors"] is None
    assert made["output_file_id"] is None
    assert made["request_counts"] == {"total": 0, "completed": 0, "failed": 0, "cancelled": 0, "in_progress": 0}
    assert made["usage"]["total_tokens"] == 0
    assert stamped(made) == {"created_at", "expires_at"}
    assert batch(client, made["id"]) == made
    assert web.bell.rung == rung + 1


@pytest.mark.parametrize(
    ("text", "seconds"), [("24h", 86_400), ("60s", 60), ("90m", 5_400), ("14d", 1_209_600), ("1h30m", 5_400)]
)
def test_windows_with_a_unit(client: httpx2.Client, text: str, seconds: int) -> None:
    made = create(client, upload(client), completion_window=text)
    assert made["completion_window"] == text
    assert made["expires_at"] - made["created_at"] == seconds


def test_only_24h_where_the_operator_says_so(start_web: Any) -> None:
    web: WebServer = start_web(limits={"windows": "24h"})
    with web.client() as client:
        file_id = upload(client)
        assert create(client, file_id, completion_window="24h")
        assert create(client, file_id)
        answer = client.post(
            "/v1/batches",
            json={"input_file_id": file_id, "endpoint": "/v1/embeddings", "completion_window": "25h"},
        )
        is_error(answer, {"status": 400, "param": "completion_window"})


def test_endpoints_that_the_operator_adds(start_web: Any) -> None:
    web: WebServer = start_web(endpoints=("/v1/own",))
    with web.client() as client:
        assert create(client, upload(client), endpoint="/v1/own")["endpoint"] == "/v1/own"
        audio = ("/v1/audio/transcriptions", "/v1/audio/translations")
        for served in ("/v1/score", "/v1/rerank", "/v1/classify", "/v1/pooling", *audio):
            assert create(client, upload(client), endpoint=served)["endpoint"] == served


def test_exactly_at_the_limits(client: httpx2.Client) -> None:
    metadata = {f"{n:064}": "é" * 512 for n in range(16)}
    made = create(
        client,
        upload(client),
        metadata=metadata,
        output_expires_after={"anchor": "created_at", "seconds": 2_592_000},
        begin_within="24h",
        ordered=True,
        prefix_order=False,
        invalid_lines="error_file",
    )
    assert made["metadata"] == metadata
    assert made["tidegate"]["ordered"] is True
    assert made["tidegate"]["prefix_order"] is False
    assert made["tidegate"]["invalid_lines"] == "error_file"
    assert made["tidegate"]["begin_by"] == made["created_at"] + 24 * 3600


def test_from_progress_to_completed(web: WebServer, client: httpx2.Client) -> None:
    batch_id = stages.running(web, client, 3)
    shown = batch(client, batch_id)
    assert shown["status"] == "in_progress"
    assert shown["model"] == "m"
    assert shown["tidegate"]["shared_prefix_share"] == 0.25
    assert shown["request_counts"] == {"total": 3, "completed": 0, "failed": 0, "cancelled": 0, "in_progress": 3}
    stages.finish(web, batch_id, {0: b"{0}\n"}, {1: b"{bad}\n"})
    shown = batch(client, batch_id)
    assert shown["request_counts"] == {"total": 3, "completed": 1, "failed": 1, "cancelled": 0, "in_progress": 1}
    assert shown["output_file_id"] is None
    assert shown["error_file_id"] is None
    stages.finish(web, batch_id, {2: b"{2}\n"})
    shown = batch(client, batch_id)
    assert shown["status"] == "finalizing"
    assert shown["output_file_id"] is None
    hidden = web.job(batch_id).output_file_id
    assert client.get(f"/v1/files/{hidden}").status_code == 404
    assert str(hidden) not in client.get("/v1/files").text
    stages.publish(web, batch_id)
    shown = batch(client, batch_id)
    assert shown["status"] == "completed"
    assert stamped(shown) == {"created_at", "expires_at", "in_progress_at", "finalizing_at", "completed_at"}
    assert shown["usage"] == {
        "input_tokens": 20,
        "input_tokens_details": {"cached_tokens": 8},
        "output_tokens": 10,
        "output_tokens_details": {"reasoning_tokens": 4},
        "total_tokens": 30,
    }
    assert client.get(f"/v1/files/{shown['output_file_id']}/content").content == b"{0}\n{2}\n"
    assert client.get(f"/v1/files/{shown['error_file_id']}/content").content == b"{bad}\n"
    assert client.get(f"/v1/files/{shown['output_file_id']}").json()["purpose"] == "batch_output"
    refusal = {"status": 409, "code": "batch_not_cancellable", "says": "Cannot cancel a batch with status 'completed'."}
    is_error(client.post(f"/v1/batches/{batch_id}/cancel"), refusal)
    assert batch(client, batch_id) == shown


def test_all_failed_is_completed_without_output(web: WebServer, client: httpx2.Client) -> None:
    batch_id = stages.running(web, client, 1)
    stages.finish(web, batch_id, {}, {0: b"{}\n"})
    stages.publish(web, batch_id)
    shown = batch(client, batch_id)
    assert (shown["status"], shown["output_file_id"]) == ("completed", None)
    assert shown["error_file_id"] is not None
    output = client.get(f"/v1/batches/{batch_id}/output")
    assert (output.status_code, output.content, output.headers["x-tidegate-final"]) == (200, b"", "true")


def test_cancelled_while_running(web: WebServer, client: httpx2.Client) -> None:
    batch_id = stages.running(web, client, 3)
    stages.finish(web, batch_id, {0: b"{0}\n"})
    for _ in range(2):
        answer = client.post(f"/v1/batches/{batch_id}/cancel")
        assert answer.status_code == 200
        assert answer.json()["status"] == "cancelling"
    stages.publish(web, batch_id, {1: b"{c1}\n", 2: b"{c2}\n"}, Outcome.CANCELLED)
    shown = batch(client, batch_id)
    assert shown["status"] == "cancelled"
    assert shown["request_counts"] == {"total": 3, "completed": 1, "failed": 2, "cancelled": 2, "in_progress": 0}
    assert stamped(shown) == {
        "created_at",
        "expires_at",
        "in_progress_at",
        "cancelling_at",
        "finalizing_at",
        "cancelled_at",
    }
    assert client.get(f"/v1/batches/{batch_id}/errors").content == b"{c1}\n{c2}\n"


def test_cancelled_while_validating(web: WebServer, client: httpx2.Client) -> None:
    batch_id = create(client, upload(client))["id"]
    answer = client.post(f"/v1/batches/{batch_id}/cancel", json={})
    assert answer.json()["status"] == "cancelling"
    assert answer.json()["cancelling_at"] is not None
    assert web.run(web.store.end_unstarted(batch_id))
    shown = batch(client, batch_id)
    assert shown["status"] == "cancelled"
    assert (shown["output_file_id"], shown["error_file_id"]) == (None, None)


def test_failed_validation_names_lines(web: WebServer, client: httpx2.Client) -> None:
    batch_id = create(client, upload(client))["id"]

    async def refuse() -> None:
        await web.store.take_step(batch_id, JobState.VALIDATING, web.worker_id, "t")
        await web.store.refuse_job(batch_id, "t", [LineError("invalid_json_line", "Not JSON.", None, 7)])

    web.run(refuse())
    shown = batch(client, batch_id)
    assert shown["status"] == "failed"
    assert shown["errors"] == {
        "object": "list",
        "data": [{"code": "invalid_json_line", "message": "Not JSON.", "param": None, "line": 7}],
    }
    assert shown["failed_at"] is not None


def test_growing_output_never_shifts(web: WebServer, client: httpx2.Client) -> None:
    batch_id = create(client, upload(client))["id"]
    path = f"/v1/batches/{batch_id}/output"
    empty = client.get(path)
    assert (empty.status_code, empty.content, empty.headers["x-tidegate-final"]) == (200, b"", "false")
    stages.start(web, batch_id, 3)
    read = b""
    for number, line in enumerate((b"first\n", b"second line\n", b"third\n")):
        behind = client.get(path, headers={"Range": f"bytes={len(read)}-"})
        assert behind.status_code == 416
        assert behind.headers["content-range"] == f"bytes */{len(read)}"
        assert behind.headers["x-tidegate-final"] == "false"
        stages.finish(web, batch_id, {number: line})
        answer = client.get(path, headers={"Range": f"bytes={len(read)}-"})
        assert answer.status_code == 206
        read += answer.content
        assert client.get(path).content == read
    stages.publish(web, batch_id)
    answer = client.get(path)
    assert answer.content == read == b"first\nsecond line\nthird\n"
    assert answer.headers["x-tidegate-final"] == "true"
    assert client.head(path).headers["content-length"] == str(len(read))


def test_an_ordered_batch_shows_nothing_before_its_end(web: WebServer, client: httpx2.Client) -> None:
    batch_id = stages.running(web, client, 2, ordered=True)
    stages.finish(web, batch_id, {1: b"second\n"})
    answer = client.get(f"/v1/batches/{batch_id}/output")
    assert (answer.content, answer.headers["x-tidegate-final"]) == (b"", "false")


def test_a_client_that_asks_for_it_reads_the_growing_output_at_its_file(web: WebServer, client: httpx2.Client) -> None:
    batch_id = stages.running(web, client, 4)
    asked = {"Prefer": "wait=0, growing-output"}
    assert batch(client, batch_id)["output_file_id"] is None
    answer = client.get(f"/v1/batches/{batch_id}", headers=asked)
    assert answer.headers["preference-applied"] == "growing-output"
    shown = answer.json()
    path, errors = (f"/v1/files/{shown[name]}/content" for name in ("output_file_id", "error_file_id"))

    def read(at: str, lines: int = 0) -> tuple[bytes, str, str]:
        part = client.get(at, params={"offset": lines} if lines else None)
        assert part.status_code == 200
        assert ("etag" in part.headers) == (part.headers["x-incomplete"] == "false"), "what grows has no name yet"
        return part.content, part.headers["x-incomplete"], part.headers["x-last-line"]

    assert read(path) == (b"", "true", "0")
    stages.finish(web, batch_id, {2: b"third\n", 0: b"first line\n"}, {3: b"wrong\n"})
    assert read(path) == (b"third\nfirst line\n", "true", "2")
    assert read(path, 1) == (b"first line\n", "true", "2")
    assert read(path, 2) == read(path, 999_999_999) == (b"", "true", "2")
    assert read(errors) == (b"wrong\n", "true", "1")
    for method, place in (("GET", ""), ("DELETE", "")):
        is_error(client.request(method, f"/v1/files/{shown['output_file_id']}{place}"), {"status": 404})
    stages.finish(web, batch_id, {1: b"second\n"})
    stages.publish(web, batch_id)
    assert read(path, 2) == (b"second\n", "false", "3")
    assert batch(client, batch_id)["output_file_id"] == shown["output_file_id"]


def test_no_place_is_given_out_in_what_will_be_put_in_order(web: WebServer, client: httpx2.Client) -> None:
    input_id = upload(client)
    batch_id = create(client, input_id, ordered=True)["id"]
    stages.start(web, batch_id, 1)
    answer = client.get(f"/v1/batches/{batch_id}", headers={"Prefer": "growing-output"})
    assert (answer.json()["output_file_id"], "preference-applied" in answer.headers) == (None, False)
    job = web.run(web.store.any_job(batch_id))
    assert job is not None
    is_error(client.get(f"/v1/files/{job.output_file_id}/content"), {"status": 404, "code": "file_not_found"})
    for offset in ("-1", "1.5", "x", "", "9" * 30):
        is_error(client.get(f"/v1/files/{input_id}/content?offset={offset}"), {"status": 400, "param": "offset"})
    is_error(client.get(f"/v1/files/{input_id}/content?offset=1"), {"status": 400, "param": "offset"})


def test_output_of_a_deleted_file(web: WebServer, client: httpx2.Client) -> None:
    batch_id = stages.running(web, client, 1)
    stages.finish(web, batch_id, {0: b"x\n"})
    stages.publish(web, batch_id)
    client.delete(f"/v1/files/{batch(client, batch_id)['output_file_id']}")
    is_error(client.get(f"/v1/batches/{batch_id}/output"), {"status": 404, "code": "file_not_found"})


def test_list_pages_cover_everything_once(start_web: Any) -> None:
    web: WebServer = start_web()
    with web.client() as client:
        file_id = upload(client)
        made = [create(client, file_id)["id"] for _ in range(25)]
        web.rewrite("update jobs set created_at = 1000")
        page = client.get("/v1/batches").json()
        assert len(page["data"]) == 20
        assert page["has_more"] is True
        rest = client.get("/v1/batches", params={"after": page["last_id"], "limit": 5}).json()
        assert rest["has_more"] is False
        seen = [one["id"] for one in page["data"] + rest["data"]]
        assert seen == sorted(made, reverse=True)


def test_the_same_key_makes_one_batch(web: WebServer, client: httpx2.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    # On a busy machine twenty copies wait longer for the first than they would in real life.
    monkeypatch.setattr(running_keys, "WAIT_S", 60)
    file_id = upload(client)
    body = {"input_file_id": file_id, "endpoint": "/v1/embeddings", "metadata": {"a": "1", "b": "2"}}
    before = web.statement("select count(*) from jobs")[0][0]
    answers: list[httpx2.Response] = []

    def post() -> None:
        with web.client() as own:
            answers.append(own.post("/v1/batches", json=body, headers={"Idempotency-Key": "at-once"}))

    threads = [threading.Thread(target=post) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {answer.status_code for answer in answers} == {200}
    assert len({answer.json()["id"] for answer in answers}) == 1
    assert web.statement("select count(*) from jobs")[0][0] == before + 1
    spelled_otherwise = {
        "completion_window": "1d",
        "metadata": {"b": "2", "a": "1"},
        "endpoint": "/v1/embeddings",
        "input_file_id": file_id,
    }
    same = client.post("/v1/batches", json=spelled_otherwise, headers={"Idempotency-Key": "at-once"})
    assert same.json()["id"] == answers[0].json()["id"]
    other = client.post("/v1/batches", json={**body, "ordered": True}, headers={"Idempotency-Key": "at-once"})
    is_error(other, {"status": 422, "code": "idempotency_key_reused"})


def test_pending_batches_are_bounded(start_web: Any) -> None:
    web: WebServer = start_web(limits={"pending_jobs_max": 2})
    with web.client() as client:
        file_id = upload(client)
        for _ in range(2):
            create(client, file_id)
        answer = client.post("/v1/batches", json={"input_file_id": file_id, "endpoint": "/v1/embeddings"})
        assert answer.status_code == 429
        assert answer.json()["error"]["code"] == "quota_exceeded"
        assert int(answer.headers["retry-after"]) > 0
