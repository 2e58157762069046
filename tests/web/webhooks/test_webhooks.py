"""Webhook endpoints over a real socket: what may be asked, what is refused, and that a secret is shown once."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import threading
from typing import Any

import httpx2
import pytest

from tests.support.receiver import Receiver
from tests.web import stages
from tests.web.calls import create, is_error, upload
from tests.web.server import WebServer
from tidegate.core.webhooks import BATCH_EVENT_TYPES, EVENT_TYPES

OPEN = {"allow_hosts": ("127.0.0.1",), "allow_http": True}
PLAIN = {"name": "mine", "url": "https://hooks.example.com/a", "event_types": ["batch.completed"]}


@pytest.fixture(scope="module")
def web_settings() -> dict[str, Any]:
    return {"callbacks": OPEN}


def made(client: httpx2.Client, **more: Any) -> dict[str, Any]:
    answer = client.post("/v1/webhook_endpoints", json=PLAIN | more)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def path(endpoint: dict[str, Any], more: str = "") -> str:
    return f"/v1/webhook_endpoints/{endpoint['id']}{more}"


def is_signed(body: bytes, headers: dict[str, str], secret: str) -> bool:
    content = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
    key = base64.b64decode(secret.removeprefix("whsec_"))
    wanted = "v1," + base64.b64encode(hmac.new(key, content, hashlib.sha256).digest()).decode()
    return wanted in headers["webhook-signature"].split(" ")


def test_an_idempotency_key_makes_one_endpoint(client: httpx2.Client) -> None:
    """A client that missed the answer needs it again, secret and all; the same key with another endpoint is refused."""
    key = {"Idempotency-Key": "hook-1"}
    first = client.post("/v1/webhook_endpoints", json=PLAIN, headers=key).json()
    assert client.post("/v1/webhook_endpoints", json=PLAIN, headers=key).json() == first
    other = client.post("/v1/webhook_endpoints", json=PLAIN | {"name": "other"}, headers=key)
    is_error(other, {"status": 422, "code": "idempotency_key_reused"})
    client.delete(path(first))
    gone = client.post("/v1/webhook_endpoints", json=PLAIN, headers=key)
    is_error(gone, {"status": 409, "code": "idempotency_result_deleted"})


def test_the_secret_is_shown_when_it_is_made_and_never_again(client: httpx2.Client) -> None:
    endpoint = made(client)
    secret = endpoint["signing_secret"]
    assert secret.startswith("whsec_")
    assert len(base64.b64decode(secret.removeprefix("whsec_"))) == 32
    assert endpoint["tidegate"] == {"enabled": True, "disabled_at": None, "disabled_reason": None}
    shown = [
        client.get(path(endpoint)),
        client.get("/v1/webhook_endpoints"),
        client.post(path(endpoint), json={"name": "other"}),
    ]
    for answer in shown:
        assert answer.status_code == 200
        assert secret not in answer.text
        assert '"signing_secret"' not in answer.text
    assert shown[0].json()["signing_secret_hint"].endswith(secret[-4:])
    rotated = client.post(path(endpoint, "/rotate_secret"), json={}).json()
    assert rotated["signing_secret"] != secret
    # All that a body could say may be left out, and so may the body.
    assert client.post(path(endpoint, "/rotate_secret")).json()["signing_secret"] not in (
        secret,
        rotated["signing_secret"],
    )
    assert client.delete(path(endpoint)).json() == {
        "id": endpoint["id"],
        "object": "webhook_endpoint.deleted",
        "deleted": True,
    }
    assert client.get(path(endpoint)).status_code == 404


def test_no_secret_is_shown_of_an_endpoint_that_is_deleted_meanwhile(
    web: WebServer, client: httpx2.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint = made(client)
    rotate = web.store.rotate_webhook_secret

    async def late(tenant_id: str, endpoint_id: str, *rest: Any) -> Any:
        assert await web.store.delete_webhook_endpoint(tenant_id, endpoint_id)
        return await rotate(tenant_id, endpoint_id, *rest)

    monkeypatch.setattr(web.store, "rotate_webhook_secret", late)
    is_error(client.post(path(endpoint, "/rotate_secret")), {"status": 404})


BAD: list[tuple[Any, dict[str, Any]]] = [
    ("{", {"status": 400, "code": "invalid_json"}),
    ("", {"status": 400, "code": "invalid_json"}),
    ("[]", {"status": 400, "code": "invalid_parameter"}),
    ("null", {"status": 400, "code": "invalid_parameter"}),
    ('{"name": "\\ud800"}', {"status": 400, "code": "invalid_json"}),
    ("[" * 100_000, {"status": 400, "code": "invalid_parameter"}),
    (" " * 1_048_577, {"status": 413, "code": "body_too_large"}),
    ({}, {"status": 400, "code": "missing_required_parameter"}),
    ({**PLAIN, "names": "x"}, {"status": 400, "code": "unknown_parameter", "says": "`name`"}),
    ({**PLAIN, "name": ""}, {"status": 400, "param": "name"}),
    ({**PLAIN, "name": "x" * 256}, {"status": 400, "param": "name"}),
    ({**PLAIN, "name": "a\nb"}, {"status": 400, "param": "name"}),
    ({**PLAIN, "name": "a\0b"}, {"status": 400, "param": "name"}),
    ({**PLAIN, "name": "\u202etxt"}, {"status": 400, "param": "name"}),
    ({**PLAIN, "name": 7}, {"status": 400, "param": "name"}),
    ({**PLAIN, "event_types": []}, {"status": 400, "param": "event_types"}),
    ({**PLAIN, "event_types": ["batch.started"]}, {"status": 400, "param": "event_types", "says": "batch.completed"}),
    ({**PLAIN, "event_types": ["response.started"]}, {"status": 400, "param": "event_types"}),
    ({**PLAIN, "event_types": ["batch.completed"] * 100}, {"status": 400, "param": "event_types"}),
    ({**PLAIN, "event_types": "batch.completed"}, {"status": 400, "param": "event_types"}),
    *(
        ({**PLAIN, "url": url}, {"status": 400, "code": "invalid_parameter", "param": "url"})
        for url in (
            "",
            "hooks.example.com",
            "ftp://hooks.example.com/",
            "https://user:secret@hooks.example.com/",
            "https://hooks.example.com:22/",
            "https://hooks.example.com/#x",
            "https://localhost/",
            "https://127.1/",
            "https://2130706433/",
            "https://10.0.0.1/",
            "https://169.254.169.254/latest/meta-data",
            "https://[::1]/",
            "https://[::ffff:169.254.169.254]/",
            "https://hooks.example.com/" + "a" * 2_048,
            "https://hooks.example.com/\r\nx: y",
        )
    ),
]


@pytest.mark.parametrize(("body", "case"), BAD, ids=range(len(BAD)))
def test_a_bad_body_is_refused_and_keeps_nothing(
    web: WebServer, client: httpx2.Client, body: Any, case: dict[str, Any]
) -> None:
    before = web.statement("select count(*) from webhook_endpoints")
    text = body if isinstance(body, str) else json.dumps(body)
    answer = client.post("/v1/webhook_endpoints", content=text, headers={"Content-Type": "application/json"})
    is_error(answer, case)
    assert "user:secret" not in answer.text
    assert web.statement("select count(*) from webhook_endpoints") == before


@pytest.mark.parametrize(
    ("more", "body", "case"),
    [
        ("", {"url": "https://10.0.0.1/"}, {"status": 400, "param": "url"}),
        ("", {"event_types": ["x"]}, {"status": 400, "param": "event_types"}),
        ("", {"id": "x"}, {"status": 400, "code": "unknown_parameter"}),
        ("", [], {"status": 400, "code": "invalid_parameter"}),
        ("/rotate_secret", {"keep_old_secret_active_for_24_hours": "yes"}, {"status": 400}),
        ("/rotate_secret", {"keep": True}, {"status": 400, "code": "unknown_parameter"}),
        ("/test", {}, {"status": 400, "code": "missing_required_parameter"}),
        ("/test", {"event_type": "batch.started"}, {"status": 400, "param": "event_type"}),
        ("/test", {"event_type": ["batch.completed"]}, {"status": 400, "param": "event_type"}),
    ],
)
def test_a_bad_change_is_refused_and_changes_nothing(
    client: httpx2.Client, more: str, body: Any, case: dict[str, Any]
) -> None:
    endpoint = made(client)
    before = client.get(path(endpoint)).json()
    is_error(client.post(path(endpoint, more), json=body), case)
    assert client.get(path(endpoint)).json() == before


@pytest.mark.parametrize(
    "query", ["after=x", "after=whk_0000000000000000000000", "limit=0", "limit=101", "limit=x", "order=asc"]
)
def test_a_bad_query_is_refused(client: httpx2.Client, query: str) -> None:
    for list_path in ("/v1/webhook_endpoints", "/v1/webhook_deliveries"):
        assert client.get(f"{list_path}?{query}").status_code == 400
    assert client.get("/v1/webhook_deliveries?status=gone").status_code == 400
    absent = "evt_0000000000000000000000.whk_0000000000000000000000"
    assert client.get(f"/v1/webhook_deliveries?after={absent}").status_code == 400
    assert client.post(f"/v1/webhook_deliveries/{absent}/replay").status_code == 404


def test_endpoints_come_in_pages_newest_first(start_web: Any) -> None:
    with start_web().client() as client:
        made_ids = [made(client, name=f"n{number}")["id"] for number in range(5)]
        first = client.get("/v1/webhook_endpoints?limit=3").json()
        assert first["has_more"]
        rest = client.get(f"/v1/webhook_endpoints?limit=3&after={first['last_id']}").json()
        assert not rest["has_more"]
        listed = [one["id"] for one in first["data"] + rest["data"]]
        assert sorted(listed) == sorted(made_ids)


def test_a_test_sends_a_signed_sample_and_shows_the_status(client: httpx2.Client) -> None:
    with Receiver() as receiver:
        endpoint = made(client, url=receiver.url)
        for status in (200, 500, 301):
            receiver.answer = lambda _, status=status: status  # type: ignore[misc]
            answer = client.post(path(endpoint, "/test"), json={"event_type": "batch.failed"})
            assert answer.json() == {
                "object": "webhook_endpoint.test",
                "webhook_endpoint_id": endpoint["id"],
                "event_type": "batch.failed",
                "status_code": status,
                "success": True,
            }
    assert len(receiver.got) == 3
    for got in receiver.got:
        assert is_signed(got.body, got.headers, endpoint["signing_secret"])
        assert json.loads(got.body)["type"] == "batch.failed"
    assert client.get("/v1/webhook_deliveries").json()["data"] == []


def test_a_test_without_an_answer_is_an_error_without_details(client: httpx2.Client) -> None:
    with Receiver() as receiver:
        endpoint = made(client, url=receiver.url)
    answer = client.post(path(endpoint, "/test"), json={"event_type": "batch.failed"})
    is_error(answer, {"status": 400, "code": "webhook_test_failed", "says": "connection_failed"})
    gone = made(client, url="https://no-such-name.invalid/")
    answer = client.post(path(gone, "/test"), json={"event_type": "batch.failed"})
    is_error(answer, {"status": 400, "code": "webhook_test_failed", "says": "target_refused"})


def test_a_few_tests_run_at_a_time(web: WebServer, client: httpx2.Client) -> None:
    release = threading.Event()

    def wait(_: object) -> int:
        release.wait(10)
        return 200

    with Receiver(wait) as receiver:
        endpoint = made(client, url=receiver.url)
        answers: list[int] = []

        def ask() -> None:
            with web.client() as own:
                answers.append(own.post(path(endpoint, "/test"), json={"event_type": "batch.failed"}).status_code)

        threads = [threading.Thread(target=ask) for _ in range(8)]
        for thread in threads:
            thread.start()
        for _ in range(500):
            if answers.count(429) == 3:
                break
            threading.Event().wait(0.02)
        release.set()
        for thread in threads:
            thread.join()
    assert sorted(answers) == [200] * 5 + [429] * 3


def test_event_types_are_those_that_are_sent(client: httpx2.Client) -> None:
    assert client.get("/v1/webhook_event_types").json() == {"object": "list", "data": list(EVENT_TYPES)}


def test_a_batch_may_name_a_webhook_of_its_own(client: httpx2.Client) -> None:
    file_id = upload(client)
    ask = {"url": "https://own.example.com/hook", "events": ["batch.cancelled", "batch.failed"]}
    job = create(client, file_id, webhook=ask)
    shown = job["tidegate"]["webhook"]
    secret = shown.pop("signing_secret")
    assert secret.startswith("whsec_")
    assert shown == {"url": ask["url"], "events": ["batch.failed", "batch.cancelled"]}
    for answer in (client.get(f"/v1/batches/{job['id']}"), client.get("/v1/batches")):
        assert secret not in answer.text
    assert client.get(f"/v1/batches/{job['id']}").json()["tidegate"]["webhook"] == shown
    every = create(client, file_id, webhook={"url": ask["url"]})
    assert every["tidegate"]["webhook"]["events"] == list(BATCH_EVENT_TYPES)
    assert create(client, file_id)["tidegate"]["webhook"] is None


def test_a_repeated_create_shows_the_same_secret(client: httpx2.Client) -> None:
    body = {
        "input_file_id": upload(client),
        "endpoint": "/v1/embeddings",
        "webhook": {"url": "https://own.example.com/"},
    }
    first, second = (
        client.post("/v1/batches", json=body, headers={"Idempotency-Key": "hooked"}).json()["tidegate"]["webhook"]
        for _ in range(2)
    )
    assert first == second
    other = {**body, "webhook": {"url": "https://other.example.com/"}}
    assert client.post("/v1/batches", json=other, headers={"Idempotency-Key": "hooked"}).status_code == 422


@pytest.mark.parametrize(
    ("webhook", "case"),
    [
        ({}, {"status": 400, "code": "missing_required_parameter", "param": "webhook.url"}),
        ("https://own.example.com/", {"status": 400, "param": "webhook"}),
        ({"url": "http://own.example.com:81/"}, {"status": 400, "param": "webhook.url"}),
        ({"url": "https://10.0.0.1/"}, {"status": 400, "param": "webhook.url"}),
        ({"url": "https://own.example.com/", "events": []}, {"status": 400, "param": "webhook.events"}),
        ({"url": "https://own.example.com/", "events": ["x"]}, {"status": 400, "param": "webhook.events"}),
        ({"url": "https://own.example.com/", "secret": "x"}, {"status": 400, "code": "unknown_parameter"}),
    ],
)
def test_a_bad_webhook_of_a_batch_is_refused(client: httpx2.Client, webhook: Any, case: dict[str, Any]) -> None:
    body = {"input_file_id": upload(client), "endpoint": "/v1/embeddings", "webhook": webhook}
    is_error(client.post("/v1/batches", json=body), case)


def test_a_delivery_is_listed_and_replayed(start_web: Any) -> None:
    web = start_web(callbacks=OPEN)
    with web.client() as client:
        endpoint = made(client, event_types=list(EVENT_TYPES))
        batch_id = stages.completed(web, client)
        [delivery] = client.get("/v1/webhook_deliveries?status=pending").json()["data"]
        assert delivery["id"] == f"evt_{batch_id.removeprefix('batch_')}.{endpoint['id']}"
        assert (delivery["event_type"], delivery["batch_id"]) == ("batch.completed", batch_id)
        assert (delivery["attempts"], delivery["failure"], delivery["ended_at"]) == (0, None, None)
        web.rewrite("update webhook_deliveries set state = 'failed', attempt_count = 10, failure = 'http_5xx'")
        [failed] = client.get("/v1/webhook_deliveries?status=failed").json()["data"]
        assert failed["next_attempt_at"] is None
        again = client.post(f"/v1/webhook_deliveries/{delivery['id']}/replay").json()
        assert (again["status"], again["attempts"], again["failure"]) == ("pending", 0, None)
        assert client.get("/v1/webhook_deliveries?status=failed").json()["data"] == []
