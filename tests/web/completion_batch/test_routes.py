"""The completion-batch API over a real socket, without a worker: refusals, keys, places, and how a job's states look at this door."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx2
import msgspec
import pytest

from tests.web import stages
from tests.web.calls import kept, upload
from tests.web.server import NOWHERE, WebServer
from tidegate.core.errors import StoreUnavailable
from tidegate.core.ids import item_id
from tidegate.core.nouns import LineError
from tidegate.core.states import Outcome
from tidegate.core.webhooks import LeasedDelivery
from tidegate.web.completion_batch.callbacks import CallbackBodies

PLACE = "/v1/completion-batch/default/prod"
SAYS_HI = {"messages": [{"role": "user", "content": "hi"}]}
BATCH_FIELDS = {
    "workspaceId",
    "environmentId",
    "batchId",
    "timestamp",
    "type",
    "status",
    "callbackOptions",
    "completed",
    "failed",
    "running",
    "pending",
    "cancelled",
    "totalItems",
    "totalEstimatedPromptTokens",
    "totalPromptTokens",
    "totalCompletionTokens",
    "totalOutputTokens",
    "capacity",
    "errorMessage",
    "createdAt",
    "completedAt",
    "createdByUserId",
    "createdByApiKeyId",
    "updatedAt",
    "items",
    "completedPercentage",
}
ITEM_FIELDS = {
    "workspaceId",
    "environmentId",
    "itemId",
    "batchId",
    "status",
    "resourceId",
    "request",
    "response",
    "errorMessage",
    "errorCode",
    "retryCount",
    "estimatedPromptTokens",
    "promptTokens",
    "completionTokens",
    "outputTokens",
    "totalTokens",
    "createdAt",
    "completedAt",
}


@pytest.fixture(scope="module")
def web_settings() -> dict[str, Any]:
    return {
        "upstream": {"url": NOWHERE},
        "callbacks": {"allow_hosts": ("127.0.0.1",), "allow_http": True},
        "limits": {"event_streams_max": 2},
    }


def body_of(*requests: Any, **fields: Any) -> dict[str, Any]:
    items = [{"resourceId": "m", "request": one} for one in requests or (SAYS_HI, SAYS_HI)]
    return {"type": "ASYNC", "items": items, **fields}


def made(client: httpx2.Client, *requests: Any, **fields: Any) -> dict[str, Any]:
    answer = client.post(PLACE, json=body_of(*requests, **fields))
    assert answer.status_code == 201, answer.text
    return dict(answer.json())


def got(client: httpx2.Client, batch_id: str, **query: str) -> dict[str, Any]:
    answer = client.get(f"{PLACE}/{batch_id}", params=query)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def refused(answer: httpx2.Response, status: int, code: str, param: str | None = None) -> None:
    assert answer.status_code == status, answer.text
    body = answer.json()
    assert set(body) == {"errorMessage", "errorCode", "details"}
    assert body["errorCode"] == code
    assert body["details"]["param"] == param
    assert body["details"]["requestId"] == answer.headers["x-request-id"]
    assert len(body["errorMessage"]) > 10


def result(job_id: str, number: int, custom_id: str, *, status: int = 200, error: str | None = None) -> bytes:
    answer = {"choices": [{}], "usage": {"prompt_tokens": 3, "completion_tokens": 4}}
    body = answer if status < 400 else {"error": {"message": "No.", "code": "bad"}}
    response = {"status_code": status, "request_id": "req_x", "body": body}
    line: dict[str, Any] = {"id": item_id(job_id, number), "custom_id": custom_id, "response": response, "error": None}
    if error is not None:
        line |= {"response": None, "error": {"code": error, "message": "Why."}}
    return json.dumps(line).encode() + b"\n"


def names(web: WebServer, batch_id: str) -> list[str]:
    """The custom_ids that the door gave to the items of a batch."""
    job = web.job(batch_id)

    async def read() -> bytes:
        [extent] = await web.store.list_extents(job.input_file_id, 0, 10)
        return await web.blobs.read(extent.blob_id, extent.blob_at, extent.size_bytes)

    return [json.loads(line)["custom_id"] for line in web.run(read()).splitlines()]


def test_a_batch_that_was_just_made(web: WebServer, client: httpx2.Client) -> None:
    batch = made(client, SAYS_HI, {"input": "hello"}, capacity=[{"period": "MINUTE", "requests": 5, "tokens": 9}])
    assert set(batch) == BATCH_FIELDS
    assert (batch["status"], batch["totalItems"], batch["pending"], batch["items"]) == ("PENDING", 2, 2, [])
    assert batch["totalEstimatedPromptTokens"] == 8 + 2
    assert batch["capacity"] == [{"period": "minute", "requests": 5, "tokens": 9, "enabled": True}]
    assert (batch["workspaceId"], batch["environmentId"], batch["completedPercentage"]) == ("default", "prod", 0)
    read = got(client, batch["batchId"])
    assert read == {**batch, "createdByUser": None, "createdByApiKey": None}
    assert got(client, batch["batchId"], includesUsers="false", includesItems="false") == batch
    assert [str(limit.period) for limit in web.job(batch["batchId"]).limits] == ["minute"]
    seen = client.get(f"/v1/batches/{batch['batchId']}").json()
    assert (seen["endpoint"], seen["status"]) == ("mixed", "validating"), "another door sees it too"


def test_openais_door_makes_no_mixed_batch(client: httpx2.Client) -> None:
    file = {"file": ("in.jsonl", b'{"custom_id":"a","url":"/v1/chat/completions","body":{"model":"m"}}')}
    file_id = client.post("/v1/files", files=file, data={"purpose": "batch"}).json()["id"]
    answer = client.post("/v1/batches", json={"input_file_id": file_id, "endpoint": "mixed"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "endpoint")


CALLBACK = {"url": "http://127.0.0.1/hook", "events": ["all"]}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"type": "sync"}, "type"),
        ({"type": None}, "type"),
        ({"type": 1}, "type"),
        ({"type": "CALLBACK"}, "callbackOptions"),
        ({"type": "SYNC", "callbackOptions": CALLBACK}, "callbackOptions"),
        ({"type": "CALLBACK", "callbackOptions": {"url": CALLBACK["url"]}}, "callbackOptions"),
        ({"type": "CALLBACK", "callbackOptions": {**CALLBACK, "events": []}}, "callbackOptions.events"),
        ({"type": "CALLBACK", "callbackOptions": {**CALLBACK, "events": ["ITEM_UPDATE"]}}, "callbackOptions.events"),
        ({"type": "CALLBACK", "callbackOptions": {**CALLBACK, "url": "https://10.0.0.1/"}}, "callbackOptions.url"),
        ({"type": "CALLBACK", "callbackOptions": {**CALLBACK, "url": "https://2130706433/"}}, "callbackOptions.url"),
        ({"type": "CALLBACK", "callbackOptions": {**CALLBACK, "url": "http://[::1]/"}}, "callbackOptions.url"),
        ({"type": "CALLBACK", "callbackOptions": {**CALLBACK, "url": "file:///etc/passwd"}}, "callbackOptions.url"),
        ({"type": "CALLBACK", "callbackOptions": {**CALLBACK, "more": 1}}, "callbackOptions"),
        *(
            ({"type": "CALLBACK", "callbackOptions": {**CALLBACK, "headers": headers}}, "callbackOptions.headers")
            for headers in (
                {"Host": "x"},
                {"webhook-signature": "x"},
                {"X-A": "a\r\nb: c"},
                {"X-A": ""},
                {"X-A": "a", "x-a": "b"},
                {"X-" + "a" * 65: "x"},
                {f"X-{number}": "x" for number in range(17)},
            )
        ),
        ({"capacity": {}}, "capacity"),
        ({"capacity": [{"period": "MINUTE", "requests": 0}]}, "capacity"),
        ({"capacity": [{"period": "MINUTE", "requests": 1, "dimension": "source-ip"}]}, "capacity"),
        ({"capacity": [{"period": "fortnight", "requests": 1}]}, "capacity[0].period"),
        ({"capacity": [{"period": "minute", "requests": 1}, {"period": "MINUTE", "tokens": 1}]}, "capacity[1].period"),
        ({"capacity": [{"period": "minute"}]}, "capacity[0]"),
        ({"items": []}, "items"),
        ({"items": [{"resourceId": "", "request": {}}]}, "items.0.resourceId"),
        ({"items": [{"resourceId": "a\u0000", "request": {}}]}, "items.0.resourceId"),
        ({"items": [{"resourceId": "m" * 257, "request": {}}]}, "items.0.resourceId"),
    ],
)
def test_a_create_that_is_wrong_is_refused_whole(
    web: WebServer, client: httpx2.Client, fields: dict[str, Any], param: str
) -> None:
    before = kept(web)
    refused(client.post(PLACE, json=body_of(**fields)), 400, "INVALID_PARAMETER", param)
    assert kept(web) == before


def test_bodies_places_and_queries_that_are_wrong(client: httpx2.Client) -> None:
    refused(
        client.post(PLACE, content=b"{}", headers={"content-type": "text/plain"}),
        415,
        "UNSUPPORTED_MEDIA_TYPE",
        "Content-Type",
    )
    body = body_of()
    del body["type"]
    refused(client.post(PLACE, json=body), 400, "INVALID_PARAMETER", "type")
    refused(
        client.post("/v1/completion-batch/default/a%20b", json=body_of()), 400, "INVALID_PARAMETER", "environmentId"
    )
    refused(client.post("/v1/completion-batch/unknown/prod", json=body_of()), 404, "WORKSPACE_NOT_FOUND", "workspaceId")
    refused(client.post(PLACE + "?x=1", json=body_of()), 400, "UNKNOWN_PARAMETER", "x")
    batch_id = made(client)["batchId"]
    refused(client.get(f"{PLACE}/{batch_id}?includesItems=yes"), 400, "INVALID_PARAMETER", "includesItems")
    refused(client.get(f"{PLACE}/{batch_id}/{item_id(batch_id, 0)}"), 404, "COMPLETION_BATCH_ITEM_NOT_FOUND", "itemId")
    for bad in ("x", "-1", "9", "1" * 30):
        answer = client.get(f"{PLACE}/{batch_id}/events", headers={"Last-Event-ID": bad})
        refused(answer, 400, "INVALID_PARAMETER", "Last-Event-ID")
    refused(client.put(PLACE), 405, "METHOD_NOT_ALLOWED")
    for other in ("default/dev", "unknown/prod"):
        answer = client.get(f"/v1/completion-batch/{other}/{batch_id}")
        refused(answer, 404, "COMPLETION_BATCH_NOT_FOUND", "batchId")
        refused(
            client.post(f"/v1/completion-batch/{other}/{batch_id}/cancel"), 404, "COMPLETION_BATCH_NOT_FOUND", "batchId"
        )


def test_keys_scopes_and_the_resources_that_a_key_allows(start_web: Callable[..., WebServer]) -> None:
    web = start_web(upstream={"url": NOWHERE})
    place = "/v1/completion-batch/acme/prod"
    lacking = web.client(web.make_key("acme", scopes=["batches:write"]))
    refused(web.client("wrong").post(place, json=body_of()), 401, "INVALID_API_KEY")
    refused(lacking.post(place, json=body_of()), 403, "INSUFFICIENT_SCOPE")
    client = web.client(web.make_key("acme", scopes=["completion-batch"], resources=["m"], user="ann"))
    answer = client.post(place, json=body_of())
    assert answer.status_code == 201, "a key can use this API, and needs no other scope"
    batch = client.get(f"{place}/{answer.json()['batchId']}").json()
    assert batch["createdByUser"] == {"id": "ann", "name": "ann"}
    assert batch["createdByApiKey"] == {"apiKeyId": batch["createdByApiKeyId"], "name": "test"}
    both = {"type": "ASYNC", "items": [{"resourceId": one, "request": SAYS_HI} for one in ("m", "other")]}
    refused(client.post(place, json=both), 403, "API_KEY_RESOURCE_NOT_AUTHORIZED", "items.1.resourceId")


def test_a_key_that_is_bound_to_environments_opens_them_alone(start_web: Callable[..., WebServer]) -> None:
    web = start_web(upstream={"url": NOWHERE})
    place = "/v1/completion-batch/acme/{}"
    free = web.client(web.make_key("acme"))
    bound = web.client(web.make_key("acme", environments=["prod", "staging"]))
    mine, other = (one.post(place.format(name), json=body_of()) for one, name in ((bound, "prod"), (free, "dev")))
    assert (mine.status_code, other.status_code) == (201, 201)
    refused(bound.post(place.format("dev"), json=body_of()), 403, "API_KEY_ENVIRONMENT_NOT_AUTHORIZED", "environmentId")
    path = f"{place.format('dev')}/{other.json()['batchId']}"
    for answer in (bound.get(path), bound.get(f"{path}/events"), bound.post(f"{path}/cancel")):
        refused(answer, 404, "COMPLETION_BATCH_NOT_FOUND", "batchId")
    assert bound.get(f"{place.format('prod')}/{mine.json()['batchId']}").status_code == 200
    # The other doors know no environments, so there such a key could see everything of its tenant.
    closed = ("/v1/batches", "/v1/files", f"/v1/batches/{other.json()['batchId']}", "/v1/webhook_endpoints")
    assert [bound.get(one).status_code for one in closed] == [403] * len(closed)
    assert bound.get("/v1/models").status_code != 403


def test_a_resource_that_no_deployment_serves(start_web: Callable[..., WebServer]) -> None:
    web = start_web()
    refused(web.client().post(PLACE, json=body_of()), 400, "RESOURCE_NOT_FOUND", "items.0.resourceId")


def test_a_callback_is_shown_without_its_values(web: WebServer, client: httpx2.Client) -> None:
    headers = {"X-API-Key": "very-secret", "Authorization": "Bearer also-secret"}
    options = {**CALLBACK, "events": ["item_update", "batch_update"], "headers": headers}
    batch = made(client, type="CALLBACK", callbackOptions=options)
    secret = batch["callbackOptions"].pop("signingSecret")
    assert secret.startswith("whsec_")
    shown = {**options, "headers": ["Authorization", "X-API-Key"]}
    assert batch["callbackOptions"] == shown
    for path in (f"{PLACE}/{batch['batchId']}", f"/v1/batches/{batch['batchId']}", "/v1/webhook_deliveries"):
        text = client.get(path).text
        assert secret not in text
        assert "secret" not in text.replace("webhook_secret", "").replace('"secret":null', "")
    assert got(client, batch["batchId"])["callbackOptions"] == shown


def test_an_idempotency_key_makes_one_batch(client: httpx2.Client) -> None:
    same = {"Idempotency-Key": "twice"}
    first = client.post(PLACE, json=body_of(), headers=same)
    again = client.post(PLACE, json=body_of(), headers=same)
    assert first.json() == again.json()
    refused(client.post(PLACE, json=body_of(SAYS_HI), headers=same), 422, "IDEMPOTENCY_KEY_REUSED", "Idempotency-Key")


def test_an_upload_may_have_the_same_idempotency_key(client: httpx2.Client) -> None:
    same: Any = {"Idempotency-Key": "of-both"}
    file_id = upload(client, **same)
    assert client.post(PLACE, json=body_of(), headers=same).status_code == 201
    assert upload(client, **same) == file_id


def test_an_item_is_found_under_its_own_batch_alone(web: WebServer, client: httpx2.Client) -> None:
    ours, other = ended(web, client), ended(web, client)
    assert client.get(f"{PLACE}/{ours}/{item_id(ours, 1)}").status_code == 200
    for strange in (item_id(other, 1), item_id(ours, 2)):
        refused(client.get(f"{PLACE}/{ours}/{strange}"), 404, "COMPLETION_BATCH_ITEM_NOT_FOUND", "itemId")


def test_a_key_that_is_used_for_something_else_leaves_the_first_batch_whole(
    web: WebServer, client: httpx2.Client
) -> None:
    same = {"Idempotency-Key": "other-options"}
    batch_id = client.post(PLACE, json=body_of(), headers=same).json()["batchId"]
    for is_in_progress in (False, True):
        if is_in_progress:
            stages.start(web, batch_id, 2)
        answer = client.post(PLACE, json=body_of(capacity=[{"period": "day", "requests": 1}]), headers=same)
        refused(answer, 422, "IDEMPOTENCY_KEY_REUSED", "Idempotency-Key")
        assert client.get(f"/v1/files/{web.job(batch_id).input_file_id}").status_code == 200


def test_what_became_of_items_and_of_the_batch(web: WebServer, client: httpx2.Client) -> None:
    batch_id = made(client, *({"messages": [{"role": "user", "content": str(number)}]} for number in range(3)))[
        "batchId"
    ]
    named = names(web, batch_id)
    stages.start(web, batch_id, 3)
    assert got(client, batch_id, includesItems="false")["status"] == "PENDING"
    stages.finish(web, batch_id, {2: result(batch_id, 2, named[0])}, tried={2: 3, 0: 1})
    batch = got(client, batch_id, includesItems="false")
    assert (batch["status"], batch["completed"], batch["running"], batch["pending"]) == ("RUNNING", 1, 2, 0)
    assert batch["completedPercentage"] == 33
    errors = {0: result(batch_id, 0, named[1], status=400), 1: result(batch_id, 1, named[2], error="worker_lost")}
    stages.finish(web, batch_id, {}, errors)
    stages.publish(web, batch_id)
    batch = got(client, batch_id)
    assert (batch["status"], batch["completed"], batch["failed"], batch["pending"]) == ("FAILED", 1, 2, 0)
    assert batch["errorMessage"] == "2 of 3 items failed."
    assert (batch["completedPercentage"], batch["totalPromptTokens"], batch["totalOutputTokens"]) == (100, 10, 5)
    items = batch["items"]
    assert all(set(item) == ITEM_FIELDS for item in items)
    assert [item["request"]["messages"][0]["content"] for item in items] == ["0", "1", "2"], (
        "in the order of the create"
    )
    assert [item["status"] for item in items] == ["COMPLETED", "FAILED", "FAILED"]
    assert items[0]["response"]["data"]["choices"] == [{}]
    assert items[0]["response"]["headers"] == {"x-request-id": "req_x"}
    assert [items[0][name] for name in ("promptTokens", "completionTokens", "outputTokens", "totalTokens")] == [
        3,
        4,
        4,
        7,
    ]
    assert [item["errorMessage"] for item in items] == [None, "No.", "worker_lost: Why."]
    assert all(item["completedAt"] for item in items)
    assert [item["retryCount"] for item in items] == [3, 1, 0]
    for item in items:
        assert client.get(f"{PLACE}/{batch_id}/{item['itemId']}").json() == item
    refused(client.post(f"{PLACE}/{batch_id}/cancel"), 409, "BATCH_NOT_CANCELLABLE", "batch_id")


def ended(web: WebServer, client: httpx2.Client, **headers: str) -> str:
    """A SYNC batch of two items that ended: one answered, one failed."""
    with client.stream("POST", PLACE, json=body_of(type="SYNC"), headers=headers) as stream:
        first = next(line for line in stream.iter_lines() if line.startswith("data: "))
    batch_id = str(json.loads(first[6:])["payload"]["batchId"])
    named = names(web, batch_id)
    stages.start(web, batch_id, 2)
    stages.finish(web, batch_id, {0: result(batch_id, 0, named[0])}, {1: result(batch_id, 1, named[1], status=400)})
    stages.publish(web, batch_id)
    return batch_id


def test_a_batch_outlives_its_input_and_its_results(web: WebServer, client: httpx2.Client) -> None:
    batch_id = ended(web, client)
    job = web.job(batch_id)
    assert client.delete(f"/v1/files/{job.input_file_id}").status_code == 200
    batch = got(client, batch_id)
    assert [(item["status"], item["request"]) for item in batch["items"]] == [("COMPLETED", None), ("FAILED", None)]
    item = client.get(f"{PLACE}/{batch_id}/{item_id(batch_id, 0)}").json()
    assert (item["status"], item["request"]) == ("COMPLETED", None)
    assert '"action":"batch-failed"' in client.get(f"{PLACE}/{batch_id}/events").text
    assert client.delete(f"/v1/files/{job.output_file_id}").status_code == 200
    batch = got(client, batch_id)
    assert (batch["status"], batch["completed"], batch["failed"], batch["items"]) == ("FAILED", 1, 1, [])
    refused(client.get(f"{PLACE}/{batch_id}/{item_id(batch_id, 0)}"), 404, "COMPLETION_BATCH_ITEM_NOT_FOUND", "itemId")
    refused(client.get(f"{PLACE}/{batch_id}/events"), 404, "FILE_NOT_FOUND", "batchId")


@pytest.mark.parametrize("event_type", ["item.running", "item.completed"])
def test_a_callback_about_an_item_whose_result_is_gone_has_its_ids(
    web: WebServer, client: httpx2.Client, event_type: str
) -> None:
    batch_id = ended(web, client)
    client.delete(f"/v1/files/{web.job(batch_id).output_file_id}")
    delivery = LeasedDelivery("evt", "whk", "", batch_id, event_type, 0, 0, "", (), 0, "", item=0)
    bodies = CallbackBodies(web.store, web.blobs, 1 << 20)
    body = json.loads(web.run(bodies.event_body(delivery)))
    assert body == {
        "event": "ITEM_UPDATE",
        "payload": {"batchId": batch_id, "itemId": item_id(batch_id, 0)},
        "type": event_type,
        "deleted": True,
    }


def test_a_callback_about_a_batch_that_is_there_shows_it_and_its_items(web: WebServer, client: httpx2.Client) -> None:
    batch_id = ended(web, client)
    bodies = CallbackBodies(web.store, web.blobs, 1 << 20)
    of_batch = LeasedDelivery("evt", "whk", "", batch_id, "batch.completed", 0, 0, "", (), 0, "")
    shown = json.loads(web.run(bodies.event_body(of_batch)))
    assert (shown["event"], shown["payload"]["batchId"], "deleted" in shown) == ("BATCH_UPDATE", batch_id, False)
    of_item = msgspec.structs.replace(of_batch, event_type="item.completed", item=0)
    shown = json.loads(web.run(bodies.event_body(of_item)))
    assert (shown["event"], shown["payload"]["itemId"]) == ("ITEM_UPDATE", item_id(batch_id, 0))
    assert shown["payload"]["response"] is not None


def test_a_callback_that_would_be_too_large_names_what_it_omits(web: WebServer, client: httpx2.Client) -> None:
    batch_id = ended(web, client)
    delivery = LeasedDelivery("evt", "whk", "", batch_id, "item.completed", 0, 0, "", (), 0, "", item=0)
    whole = web.run(CallbackBodies(web.store, web.blobs, 1 << 20).event_body(delivery))
    payload = json.loads(whole)["payload"]
    request_bytes = len(json.dumps(payload["request"], separators=(",", ":")))
    for bytes_max, omitted in (
        (len(whole), []),
        (len(whole) - 1, ["response"]),
        (2 * request_bytes - 1, ["response", "request"]),
    ):
        body = json.loads(web.run(CallbackBodies(web.store, web.blobs, bytes_max).event_body(delivery)))
        assert body.get("omitted", []) == omitted
        assert body["payload"] == payload | dict.fromkeys(omitted)


def test_a_create_that_goes_on_reading_its_events(web: WebServer, client: httpx2.Client) -> None:
    same = {"Idempotency-Key": "goes-on"}
    batch_id = ended(web, client, **same)
    events = client.get(f"{PLACE}/{batch_id}/events").text
    last = max(int(line[4:]) for line in events.splitlines() if line.startswith("id: "))

    def again(number: int) -> httpx2.Response:
        return client.post(PLACE, json=body_of(type="SYNC"), headers={**same, "Last-Event-ID": str(number)})

    for number in range(1, last):
        assert again(number).text == events[events.index(f"id: {number + 1}\n") :]
    assert again(last).status_code == 204, "everything was read"
    refused(again(last + 1), 400, "INVALID_PARAMETER", "Last-Event-ID")
    before = kept(web)
    answer = client.post(PLACE, json=body_of(type="SYNC"), headers={"Last-Event-ID": "2"})
    refused(answer, 400, "INVALID_PARAMETER", "Last-Event-ID")
    assert kept(web) == before, "no second batch is paid for"


def test_an_empty_id_is_that_of_a_reader_who_has_seen_nothing(web: WebServer, client: httpx2.Client) -> None:
    batch_id = made(client)["batchId"]
    client.post(f"{PLACE}/{batch_id}/cancel")
    assert web.run(web.store.end_unstarted(batch_id))
    whole = client.get(f"{PLACE}/{batch_id}/events")
    assert whole.text.startswith("id: 1\n")
    assert client.get(f"{PLACE}/{batch_id}/events", headers={"Last-Event-ID": ""}).text == whole.text


def test_an_id_that_no_event_has_yet_is_refused(web: WebServer, client: httpx2.Client) -> None:
    """It is of another batch: taken for this one, its reader would miss events, or read none at all."""
    batch_id = made(client)["batchId"]
    next_id = web.run(web.store.job_event_total(batch_id)) + 1
    answer = client.get(f"{PLACE}/{batch_id}/events", headers={"Last-Event-ID": str(next_id)})
    refused(answer, 400, "INVALID_PARAMETER", "Last-Event-ID")


def test_the_head_of_a_stream_does_not_wait_for_it(client: httpx2.Client) -> None:
    answer = client.head(f"{PLACE}/{made(client)['batchId']}/events", timeout=10)
    assert (answer.status_code, answer.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")


@pytest.mark.parametrize("status", ["CANCELLED", "FAILED"])
def test_items_that_never_ran(web: WebServer, client: httpx2.Client, status: str) -> None:
    batch_id = made(client)["batchId"]
    named = names(web, batch_id)
    stages.start(web, batch_id, 2)
    if status == "CANCELLED":
        rung = web.bell.rung
        cancelled = client.post(f"{PLACE}/{batch_id}/cancel")
        assert cancelled.status_code == 201
        assert web.bell.rung == rung + 1, "its workers stop at once"
        shown = cancelled.json()
        assert (shown["status"], shown["cancelled"], shown["pending"], shown["running"]) == ("CANCELLED", 2, 0, 0)
        assert client.post(f"{PLACE}/{batch_id}/cancel").status_code == 201
    else:
        web.run(web.store.fail_job(batch_id, LineError("work_file_gone", "Why.")))
    code, outcome = (
        ("batch_cancelled", Outcome.CANCELLED) if status == "CANCELLED" else ("batch_failed", Outcome.FAILED)
    )
    rest = {number: result(batch_id, number, named[number], error=code) for number in range(2)}
    stages.publish(web, batch_id, rest, outcome)
    batch = got(client, batch_id)
    assert batch["status"] == status
    assert [item["status"] for item in batch["items"]] == [status, status]
    assert batch["items"][0]["errorMessage"].startswith(code)
    with client.stream("GET", f"{PLACE}/{batch_id}/events") as answer:
        lines = [line for line in answer.iter_lines() if line.startswith("data: ")]
    actions = [json.loads(line[6:])["action"] for line in lines[:-1]]
    item = f"item-{status.lower()}"
    assert actions == ["batch-created", item, item, f"batch-{status.lower()}"]
    assert lines[-1] == "data: [DONE]"


def test_a_batch_that_ended_before_ingest_shows_its_items(web: WebServer, client: httpx2.Client) -> None:
    batch_id = made(client)["batchId"]
    assert got(client, batch_id)["items"] == []
    assert client.post(f"{PLACE}/{batch_id}/cancel").status_code == 201
    for is_ended in (False, True):
        batch = got(client, batch_id)
        assert (batch["status"], batch["cancelled"], batch["pending"]) == ("CANCELLED", 2, 0)
        assert [item["status"] for item in batch["items"]] == ["CANCELLED", "CANCELLED"]
        assert all(item["request"] and item["errorCode"] == "batch_cancelled" for item in batch["items"])
        assert client.get(f"{PLACE}/{batch_id}/{batch['items'][1]['itemId']}").json() == batch["items"][1]
        if not is_ended:
            web.run(web.store.close_job(batch_id, 0))
    assert client.get(f"{PLACE}/{batch_id}/{batch_id.replace('batch_', 'batch_req_')}000009").status_code == 404


def test_a_store_that_is_away(web: WebServer, client: httpx2.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    batch_id = made(client)["batchId"]

    async def away(*_: Any) -> Any:
        raise StoreUnavailable("away")

    with client.stream("GET", f"{PLACE}/{batch_id}/events") as answer:
        lines = answer.iter_lines()
        assert next(lines) == "id: 1"
        monkeypatch.setattr(web.store, "job_events", away)
        stages.start(web, batch_id, 2)
        rest = [line for line in lines if line.startswith("data: ")][1:]
    assert [*json.loads(rest[0][6:])] == ["error"]
    assert rest[1:] == ["data: [ERROR]"]
    monkeypatch.setattr(web.store, "job_progress", away)
    refused(client.get(f"{PLACE}/{batch_id}"), 503, "UNAVAILABLE")


def test_more_streams_than_are_allowed_make_no_batch(web: WebServer, client: httpx2.Client) -> None:
    batch_id = made(client)["batchId"]
    path = f"{PLACE}/{batch_id}/events"
    before = kept(web)
    with client.stream("GET", path) as one, client.stream("GET", path) as two:
        assert one.status_code == two.status_code == 200
        refused(client.post(PLACE, json=body_of(type="SYNC")), 429, "TOO_MANY_STREAMS")
    assert kept(web) == before


def test_a_server_that_stops_says_so(start_web: Callable[..., WebServer]) -> None:
    web = start_web(upstream={"url": NOWHERE})
    with web.client() as client, client.stream("POST", PLACE, json=body_of(type="SYNC")) as answer:
        lines = answer.iter_lines()
        assert next(lines) == "id: 1"
        web.stop_asked()
        rest = [line for line in lines if line.startswith("data: ")][1:]
    assert [*json.loads(rest[0][6:])] == ["error"]
    assert rest[1:] == ["data: [ERROR]"]


def test_a_callback_of_a_deleted_batch_has_ids_alone(web: WebServer, client: httpx2.Client) -> None:
    batch_id = made(client, type="CALLBACK", callbackOptions=CALLBACK)["batchId"]
    web.run(web.store.cancel_job(web.job(batch_id).tenant_id, batch_id))
    assert web.run(web.store.end_unstarted(batch_id))
    assert client.delete(f"/v1/batches/{batch_id}").status_code == 200
    leased = web.run(web.store.lease_webhooks(web.worker_id, "token", count_max=100, tenant_max=100))
    [delivery] = [one for one in leased if one.job_id == batch_id]
    bodies = CallbackBodies(web.store, web.blobs, 1 << 20)
    assert json.loads(web.run(bodies.event_body(delivery))) == {
        "event": "BATCH_UPDATE",
        "payload": {"batchId": batch_id},
        "type": "batch.cancelled",
        "deleted": True,
    }
    of_item = msgspec.structs.replace(delivery, item=3, event_type="item.completed")
    assert json.loads(web.run(bodies.event_body(of_item))) == {
        "event": "ITEM_UPDATE",
        "payload": {"batchId": batch_id, "itemId": item_id(batch_id, 3)},
        "type": "item.completed",
        "deleted": True,
    }
