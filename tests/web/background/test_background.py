"""Background responses over a real socket, without a worker: shapes, refusals, and how a job's states look as a response."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

import httpx2
import pytest

from tests.support.sdks import openai
from tests.support.store_verbs import lease_slices
from tests.web import stages
from tests.web.calls import is_error, upload
from tests.web.server import WebServer, model_at
from tidegate.core.errors import StoreUnavailable
from tidegate.core.states import Outcome
from tidegate.web.jobs.job_wait import JobWait

PATH = "/v1/responses"
ASK = {"model": "m", "input": "Hi\n", "background": True}
ABSENT = f"{PATH}/resp_0000000000000000000000"


SERVED = {"models": {"m": model_at()}}


@pytest.fixture(scope="module")
def web_settings() -> dict[str, Any]:
    """A server that knows the model `m`, without a worker that would call it."""
    return SERVED


def made(client: httpx2.Client, headers: dict[str, str] | None = None, **more: Any) -> dict[str, Any]:
    answer = client.post(PATH, json={**ASK, **more}, headers=headers or {})
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def job_id(response: dict[str, Any]) -> str:
    return str(response["id"]).replace("resp_", "batch_")


def answer_line(**body: Any) -> bytes:
    answer = {"id": "resp_upstream", "object": "response", "status": "completed", "output": [{"text": "ü"}], **body}
    line = {"id": "x", "custom_id": "response", "response": {"status_code": 200, "body": answer}, "error": None}
    return json.dumps(line).encode() + b"\n"


def error_line(code: str) -> bytes:
    line = {"id": "x", "custom_id": "response", "response": None, "error": {"code": code, "message": "No."}}
    return json.dumps(line).encode() + b"\n"


def test_a_response_that_waits(web: WebServer, client: httpx2.Client) -> None:
    rung = web.bell.rung
    response = made(client, temperature=0.5, metadata={"a": "b"}, service_tier="flex", tools=[])
    assert web.bell.rung == rung + 1, "a worker takes it at once"
    shown = openai.types.responses.Response
    required = {name for name, field in shown.model_fields.items() if field.is_required()}
    assert required <= response.keys() <= set(shown.model_fields) | {"store"}
    shown.model_validate(response)
    assert (response["status"], response["background"], response["service_tier"]) == ("queued", True, "flex")
    assert (response["temperature"], response["metadata"], response["output"]) == (0.5, {"a": "b"}, [])
    assert client.get(f"{PATH}/{response['id']}").json() == response
    web.run(lease_slices(web.store, web.worker_id, job_id(response), "m", 1, "token"))
    assert client.get(f"{PATH}/{response['id']}").json() == {**response, "status": "in_progress"}


def test_what_is_sent_is_the_request_alone(web: WebServer, client: httpx2.Client) -> None:
    """The model server must not take it for a background response of its own."""
    response = made(client, service_tier="flex", user="ü")
    text = client.get(f"/v1/files/{web.job(job_id(response)).input_file_id}/content").json()
    assert text["body"] == {"model": "m", "input": "Hi\n", "user": "ü"}


def test_no_list_shows_it(client: httpx2.Client) -> None:
    response = made(client)
    upload(client)
    assert all(file["purpose"] == "batch" for file in client.get("/v1/files").json()["data"])
    assert job_id(response) not in [batch["id"] for batch in client.get("/v1/batches").json()["data"]]


def test_an_answer_is_the_model_servers_under_our_id(web: WebServer, client: httpx2.Client) -> None:
    response = made(client)
    stages.finish(web, job_id(response), {0: answer_line(created_at=7, service_tier="default", x=[1.0])})
    for _ in range(2):
        answered = client.get(f"{PATH}/{response['id']}").json()
        assert (answered["id"], answered["created_at"]) == (response["id"], response["created_at"])
        assert (answered["status"], answered["service_tier"], answered["background"]) == ("completed", "flex", True)
        assert (answered["output"], answered["x"]) == ([{"text": "ü"}], [1.0])
        # It is final before its job is published, and stays what it was.
        if web.job(job_id(response)).completed_at is None:
            stages.publish(web, job_id(response))
    assert client.post(f"{PATH}/{response['id']}/cancel").json() == answered


@pytest.mark.parametrize(
    ("line", "code"),
    [
        (error_line("worker_lost"), "worker_lost"),
        (answer_line().replace(b'"status_code": 200', b'"status_code": 400'), "server_error"),
        (
            b'{"id":"x","response":{"status_code":404,"body":{"error":{"code":"no_model","message":"No."}}}}\n',
            "no_model",
        ),
    ],
)
def test_a_failure_says_why(web: WebServer, client: httpx2.Client, line: bytes, code: str) -> None:
    response = made(client)
    stages.finish(web, job_id(response), {}, {0: line})
    failed = client.get(f"{PATH}/{response['id']}").json()
    assert (failed["status"], failed["error"]["code"], failed["output"]) == ("failed", code, [])
    assert failed["error"]["message"]


def test_a_cancel_is_final(web: WebServer, client: httpx2.Client) -> None:
    response = made(client)
    one = f"{PATH}/{response['id']}"
    web.run(lease_slices(web.store, web.worker_id, job_id(response), "m", 1, f"token-of-{job_id(response)}"))
    cancelled = client.post(f"{one}/cancel").json()
    assert cancelled == {**response, "status": "cancelled"}
    # An answer that an open call still brings changes nothing that was shown.
    stages.finish(web, job_id(response), {0: answer_line()})
    assert client.get(one).json() == client.post(f"{one}/cancel").json() == cancelled
    stages.publish(web, job_id(response))
    assert client.get(one).json() == cancelled
    waiting = made(client)
    assert client.post(f"{PATH}/{waiting['id']}/cancel").json()["status"] == "cancelled"
    stages.publish(web, job_id(waiting), {0: error_line("batch_cancelled")}, Outcome.CANCELLED)
    assert client.get(f"{PATH}/{waiting['id']}").json()["status"] == "cancelled"


def test_one_that_was_never_run_in_time_failed(web: WebServer, client: httpx2.Client) -> None:
    response = made(client)
    web.clock.ahead_ms += 86_400_000
    web.run(web.store.expire_job(job_id(response)))
    stages.publish(web, job_id(response), {0: error_line("batch_expired")}, Outcome.EXPIRED)
    failed = client.get(f"{PATH}/{response['id']}").json()
    assert (failed["status"], failed["error"]["code"]) == ("failed", "response_expired")


def test_a_deleted_response_is_gone_at_once_and_its_bytes_soon(web: WebServer, client: httpx2.Client) -> None:
    done, running = made(client), made(client)
    stages.finish(web, job_id(done), {0: answer_line()})
    stages.publish(web, job_id(done))
    for response in (done, running):
        rung = web.bell.rung
        deleted = client.delete(f"{PATH}/{response['id']}")
        assert web.bell.rung == rung + 1, "those who wait for it look again"
        assert deleted.json() == {"id": response["id"], "object": "response", "deleted": True}
        for answer in (client.get(f"{PATH}/{response['id']}"), client.delete(f"{PATH}/{response['id']}")):
            is_error(answer, {"status": 404, "code": "response_not_found"})
        assert client.get(f"/v1/batches/{job_id(response)}").status_code == 404, "nor is it at another door"
    assert web.run(web.store.any_job(job_id(done))) is None
    # The open one was cancelled, and a sweep forgets it when it has ended.
    assert web.job(job_id(running)).closing == "cancelled"
    assert web.run(web.store.deleted_responses(10)) == []
    stages.publish(web, job_id(running), {0: error_line("batch_cancelled")}, Outcome.CANCELLED)
    assert web.run(web.store.deleted_responses(10)) == [job_id(running)]


def test_one_whose_files_are_gone_is_gone(web: WebServer, client: httpx2.Client) -> None:
    response = made(client)
    stages.finish(web, job_id(response), {0: answer_line()})
    stages.publish(web, job_id(response))
    assert client.get(f"{PATH}/{response['id']}").status_code == 200
    client.delete(f"/v1/files/{web.job(job_id(response)).output_file_id}")
    is_error(client.get(f"{PATH}/{response['id']}"), {"status": 404, "code": "response_not_found"})


def test_a_wait_ends_with_the_answer(web: WebServer, client: httpx2.Client) -> None:
    response = made(client)
    got: list[httpx2.Response] = []

    def wait() -> None:
        got.append(client.get(f"{PATH}/{response['id']}", headers={"Prefer": "wait=30"}))

    thread = threading.Thread(target=wait)
    thread.start()
    stages.finish(web, job_id(response), {0: answer_line()})
    thread.join(20)
    assert got[0].json()["status"] == "completed"
    assert got[0].headers["preference-applied"] == "wait"
    # A create can wait too, and says how far it is when the time is over.
    late = client.post(PATH, json=ASK, headers={"Prefer": "wait=1"})
    assert (late.json()["status"], late.headers["preference-applied"]) == ("queued", "wait")


def test_the_same_key_makes_one_response(client: httpx2.Client) -> None:
    key = {"Idempotency-Key": "once"}
    assert made(client, key)["id"] == made(client, key)["id"]
    is_error(
        client.post(PATH, json={**ASK, "input": "other"}, headers=key),
        {"status": 422, "code": "idempotency_key_reused"},
    )
    client.delete(f"{PATH}/{made(client, key)['id']}")
    is_error(client.post(PATH, json=ASK, headers=key), {"status": 409, "code": "idempotency_result_deleted"})


def test_an_answer_says_which_tier_served_it(web: WebServer, client: httpx2.Client) -> None:
    """A background response that went like an interactive call says so; the model server never sees when it does."""
    response = made(client, interactive_after_seconds=5)
    assert response["service_tier"] == "flex"
    waits_ms = "select interactive_at - created_at from jobs where id = ?"
    assert web.statement(waits_ms, job_id(response)) == [(5_000,)]
    asked = client.get(f"/v1/files/{web.job(job_id(response)).input_file_id}/content").json()
    assert asked["body"] == {"model": "m", "input": "Hi\n"}
    line = answer_line()[:-2] + b',"tidegate":{"cost":"0","service_tier":"default"}}\n'
    stages.finish(web, job_id(response), {0: line})
    assert client.get(f"{PATH}/{response['id']}").json()["service_tier"] == "default"
    key = {"Idempotency-Key": "tier"}
    made(client, key, interactive_after_seconds=0)
    made(client, key, interactive_after_seconds=0)
    is_error(client.post(PATH, json={**ASK, "interactive_after_seconds": 1}, headers=key), {"status": 422})
    never = made(client, interactive_after_seconds=None)
    assert never["status"] == "queued"
    asked = client.get(f"/v1/files/{web.job(job_id(never)).input_file_id}/content").json()
    assert asked["body"] == {"model": "m", "input": "Hi\n"}


def test_a_cancelled_response_wakes_those_who_end_it_and_is_not_waited_for(
    web: WebServer, client: httpx2.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its call may still be out, and changes nothing any more."""
    one = f"{PATH}/{made(client)['id']}"
    woken: list[bool] = []
    monkeypatch.setattr(web.context.wakes.jobs, "notify", lambda: woken.append(True))
    client.post(f"{one}/cancel")
    assert woken == [True]
    monkeypatch.setattr(JobWait, "until", None)
    answer = client.get(one, headers={"Prefer": "wait=30"})
    assert (answer.status_code, answer.json()["status"]) == (200, "cancelled")


def test_a_request_over_several_lines_is_one_line_of_its_job(web: WebServer, client: httpx2.Client) -> None:
    text = json.dumps({**ASK, "metadata": {"a": "b"}}, indent=1).replace("\n", "\r\n")
    answer = client.post(PATH, content=text, headers={"Content-Type": "application/json"}).json()
    asked = client.get(f"/v1/files/{web.job(job_id(answer)).input_file_id}/content")
    assert asked.content.count(b"\n") == 1
    assert asked.json()["body"] == {"model": "m", "input": "Hi\n", "metadata": {"a": "b"}}


def test_a_model_for_batches_alone_takes_no_turn_to_interactive(start_web: Callable[..., WebServer]) -> None:
    web = start_web(models={"m": model_at(serves="batch")})
    with web.client() as client:
        refused = client.post(PATH, json={**ASK, "interactive_after_seconds": 1})
        is_error(refused, {"status": 400, "code": "model_batch_only", "param": "interactive_after_seconds"})
        made(client)


AFTER = "interactive_after_seconds"
BAD_AFTER: dict[str, Any] = {"status": 400, "code": "invalid_parameter", "param": AFTER}
BAD_TIER: dict[str, Any] = {"status": 400, "code": "invalid_parameter", "param": "service_tier"}
BAD_TIERS: tuple[object, ...] = ("gold", "", "FLEX", "flex ", 5, True, [], ["flex"], {})
NOT_SECONDS: tuple[object, ...] = (-1, 86_401, 1.5, "5", True, [], {}, 10**30)
BAD_BODIES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({**ASK, "stream": True}, {"status": 400, "code": "unsupported_parameter", "param": "stream"}),
    ({**ASK, "store": False}, {"status": 400, "code": "invalid_parameter", "param": "store"}),
    (
        {**ASK, "previous_response_id": "resp_1"},
        {"status": 400, "code": "parameter_not_allowed", "param": "previous_response_id"},
    ),
    *(({**ASK, "service_tier": wrong}, BAD_TIER) for wrong in BAD_TIERS),
    ({**ASK, "background": 1}, {"status": 400, "code": "invalid_parameter", "param": "background"}),
    ({**ASK, "background": "true"}, {"status": 400, "code": "invalid_parameter", "param": "background"}),
    *(({**ASK, AFTER: wrong}, BAD_AFTER) for wrong in NOT_SECONDS),
    ({"model": "m", "input": "x", AFTER: 5}, BAD_AFTER),
    ({"model": "m", "input": "x", "background": False, AFTER: 5}, BAD_AFTER),
    ({"model": "m", "background": True}, {"status": 400, "param": "input"}),
    ({"model": "", "input": "x", "background": True}, {"status": 400, "param": "model"}),
    ({**ASK, "max_output_tokens": "many"}, {"status": 400, "param": "max_output_tokens"}),
    ({**ASK, "input": "x" * (1 << 20)}, {"status": 413, "code": "body_too_large"}),
]


@pytest.mark.parametrize(("body", "wanted"), BAD_BODIES, ids=[str(number) for number in range(len(BAD_BODIES))])
def test_bad_bodies(client: httpx2.Client, body: dict[str, Any], wanted: dict[str, Any]) -> None:
    is_error(client.post(PATH, json=body), wanted)


@pytest.mark.parametrize("tier", [None, "auto", "default", "flex", "priority", "scale"])
def test_every_known_tier_is_taken_and_the_answer_says_which_served(client: httpx2.Client, tier: str | None) -> None:
    answer = client.post(PATH, json={**ASK, "service_tier": tier})
    assert (answer.status_code, answer.json()["service_tier"]) == (200, "flex"), answer.text


@pytest.mark.parametrize("name", ["x", "resp_", "resp_" + "0" * 21, "resp_" + "ü" * 22, "batch_" + "0" * 22, "A" * 300])
def test_strange_ids(client: httpx2.Client, name: str) -> None:
    for answer in (
        client.get(f"{PATH}/{name}"),
        client.delete(f"{PATH}/{name}"),
        client.post(f"{PATH}/{name}/cancel"),
    ):
        is_error(answer, {"status": 404, "code": "response_not_found"})


def test_reading_has_no_stream_and_knows_its_parameters(client: httpx2.Client) -> None:
    response = made(client)
    one = f"{PATH}/{response['id']}"
    is_error(client.get(f"{one}?stream=true"), {"status": 400, "param": "stream"})
    is_error(client.get(f"{one}?foo=1"), {"status": 400})
    assert client.get(f"{one}?include[]=usage&stream=false").status_code == 200


def test_a_batch_is_no_response(web: WebServer, client: httpx2.Client) -> None:
    batch = client.post(
        "/v1/batches",
        json={"input_file_id": upload(client), "endpoint": "/v1/chat/completions", "completion_window": "24h"},
    ).json()
    name = batch["id"].replace("batch_", "resp_")
    is_error(client.get(f"{PATH}/{name}"), {"status": 404, "code": "response_not_found"})


def test_so_many_may_wait(start_web: Callable[..., WebServer]) -> None:
    web = start_web(**SERVED, limits={"pending_responses_max": 2, "pending_jobs_max": 1})
    with web.client() as client:
        first, _ = made(client), made(client)
        refused = client.post(PATH, json=ASK)
        is_error(refused, {"status": 429, "code": "quota_exceeded"})
        assert refused.headers["retry-after"] == "10"
        # They do not count as batches.
        assert client.post(
            "/v1/batches",
            json={"input_file_id": upload(client), "endpoint": "/v1/chat/completions", "completion_window": "24h"},
        ).is_success
        client.delete(f"{PATH}/{first['id']}")
        made(client)


def test_a_store_that_is_away_makes_nothing(start_web: Callable[..., WebServer], monkeypatch: Any) -> None:
    web = start_web(**SERVED)
    with web.client() as client:
        response = made(client)

        async def away(*_: Any) -> None:
            raise StoreUnavailable("away")

        monkeypatch.setattr("tidegate.stages.accept.REPLAY_MS", 0)
        monkeypatch.setattr(web.store, "create_response", away)
        assert client.post(PATH, json=ASK).status_code == 503
        monkeypatch.setattr(web.store, "get_job", away)
        assert client.get(f"{PATH}/{response['id']}").status_code == 503
        assert client.post(f"{PATH}/{response['id']}/cancel").status_code == 503
        assert client.delete(f"{PATH}/{response['id']}").status_code == 503
        assert len(list((web._directory / "blobs").rglob("blob_*"))) == 1
