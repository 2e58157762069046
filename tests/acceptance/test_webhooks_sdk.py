"""`client.webhooks` of the official `openai` SDK against `tidegate serve`: it manages endpoints, and verifies what a receiver got."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.acceptance.test_openai_sdk import lines
from tests.support.engine import Engine
from tests.support.processes import Processes, wait_until
from tests.support.receiver import ALLOWED, Got, Receiver
from tests.support.sdks import openai, standardwebhooks
from tests.support.server import Server

WAIT_S = 60.0


@pytest.fixture(scope="module")
def client(module_processes: Processes, module_directory: Path) -> Iterator[Any]:
    engine = Engine(module_processes, module_directory / "engine")
    server = Server(module_processes, module_directory, engine=engine, env=ALLOWED)
    server.start().close()
    with server.openai() as made:
        yield made


def submit(client: Any, **more: Any) -> Any:
    file = client.files.create(file=("in.jsonl", lines(2)), purpose="batch")
    return client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h", extra_body=more
    )


def received(receiver: Receiver, batch_id: str) -> Got:
    def there() -> Got | None:
        return next((got for got in receiver.got if json.loads(got.body)["data"]["id"] == batch_id), None)

    found = wait_until(there, WAIT_S, f"the event of {batch_id}")
    assert found is not None
    return found


def test_endpoints_from_creation_to_deletion(client: Any) -> None:
    hooks = client.webhooks
    types = hooks.event_types.list()
    assert types.object == "list"
    batches = ["batch.completed", "batch.failed", "batch.expired", "batch.cancelled"]
    assert types.data == [*batches, *(f"response.{end}" for end in ("completed", "incomplete", "failed", "cancelled"))]
    made = hooks.create(name="mine", url="https://hooks.example.com/a", event_types=["batch.completed"])
    for model in (made, hooks.retrieve(made.id)):
        # The SDK builds what it is given without a look; its own types are the judge here.
        type(model).model_validate(model.to_dict(), strict=True)
        assert set(type(model).model_fields) <= set(model.to_dict())
    assert made.signing_secret.startswith("whsec_")
    assert made.updated_at == made.created_at
    changed = hooks.update(made.id, name="renamed")
    assert (changed.id, changed.name, changed.url) == (made.id, "renamed", made.url)
    more = [hooks.create(name=f"n{n}", url=made.url, event_types=types.data).id for n in range(3)]
    listed = [one.id for one in hooks.list(limit=2)]
    assert set(listed) == {made.id, *more}
    for endpoint_id in listed:
        deleted = hooks.delete(endpoint_id)
        assert (deleted.deleted, deleted.object) == (True, "webhook_endpoint.deleted")
    assert hooks.list().data == []
    with pytest.raises(openai.NotFoundError, match="No webhook endpoint"):
        hooks.retrieve(made.id)
    with pytest.raises(openai.BadRequestError, match="public address"):
        hooks.create(name="x", url="https://169.254.169.254/latest", event_types=["batch.completed"])


def test_the_sdk_verifies_a_test_and_the_end_of_a_batch(client: Any, receiver: Receiver) -> None:
    endpoint = client.webhooks.create(name="real", url=receiver.url, event_types=["batch.completed", "batch.failed"])
    result = client.webhooks.test(endpoint.id, event_type="batch.failed")
    assert (result.status_code, result.success, result.webhook_endpoint_id) == (200, True, endpoint.id)
    [sample] = receiver.got
    assert client.webhooks.unwrap(sample.body, sample.headers, secret=endpoint.signing_secret).type == "batch.failed"
    batch = submit(client)
    got = received(receiver, batch.id)
    event = client.webhooks.unwrap(got.body, got.headers, secret=endpoint.signing_secret)
    type(event).model_validate(event.to_dict(), strict=True)
    assert (event.type, event.object, event.data.id) == ("batch.completed", "event", batch.id)
    assert event.id == got.id == f"evt_{batch.id.removeprefix('batch_')}"
    assert event.created_at == client.batches.retrieve(batch.id).completed_at
    with pytest.raises(openai.InvalidWebhookSignatureError):
        client.webhooks.unwrap(got.body + b" ", got.headers, secret=endpoint.signing_secret)
    client.webhooks.delete(endpoint.id)


def test_the_library_of_the_standard_verifies_events_under_both_secrets(client: Any, receiver: Receiver) -> None:
    endpoint = client.webhooks.create(name="standard", url=receiver.url, event_types=["batch.completed"])
    rotated = client.webhooks.rotate_secret(endpoint.id, keep_old_secret_active_for_24_hours=True)
    batch = submit(client)
    got = received(receiver, batch.id)
    for secret in (endpoint.signing_secret, rotated.signing_secret):
        verifier = standardwebhooks.Webhook(secret)
        assert verifier.verify(got.body, got.headers)["data"] == {"id": batch.id}
        for body, headers in ((got.body + b" ", got.headers), (got.body, {**got.headers, "webhook-id": "evt_other"})):
            with pytest.raises(standardwebhooks.WebhookVerificationError):
                verifier.verify(body, headers)
    client.webhooks.delete(endpoint.id)


def test_a_rotated_secret_signs_beside_the_old_one(client: Any, receiver: Receiver) -> None:
    endpoint = client.webhooks.create(name="rotated", url=receiver.url, event_types=["batch.completed"])
    rotated = client.webhooks.rotate_secret(endpoint.id, keep_old_secret_active_for_24_hours=True)
    assert rotated.signing_secret != endpoint.signing_secret
    got = received(receiver, submit(client).id)
    for secret in (endpoint.signing_secret, rotated.signing_secret):
        client.webhooks.unwrap(got.body, got.headers, secret=secret)
    last = client.webhooks.rotate_secret(endpoint.id)
    got = received(receiver, submit(client).id)
    client.webhooks.unwrap(got.body, got.headers, secret=last.signing_secret)
    with pytest.raises(openai.InvalidWebhookSignatureError):
        client.webhooks.unwrap(got.body, got.headers, secret=rotated.signing_secret)
    client.webhooks.delete(endpoint.id)


def test_a_batch_brings_a_webhook_of_its_own(client: Any, receiver: Receiver) -> None:
    batch = submit(client, webhook={"url": receiver.url, "events": ["batch.completed"]})
    secret = batch.to_dict()["tidegate"]["webhook"]["signing_secret"]
    got = received(receiver, batch.id)
    assert client.webhooks.unwrap(got.body, got.headers, secret=secret).data.id == batch.id


def test_a_response_that_was_cut_ends_as_incomplete(client: Any, receiver: Receiver) -> None:
    wants = ["response.completed", "response.incomplete", "response.failed", "response.cancelled"]
    endpoint = client.webhooks.create(name="responses", url=receiver.url, event_types=wants)
    narrow = client.webhooks.create(name="complete", url=receiver.url, event_types=["response.completed"])
    whole = client.responses.create(model="m", input="Hello", background=True)
    cut = client.responses.create(model="m", input="Hello there", background=True, max_output_tokens=1)
    for made, status in ((whole, "completed"), (cut, "incomplete")):
        assert client.responses.retrieve(made.id, extra_headers={"Prefer": "wait=30"}).status == status
        got = received(receiver, made.id)
        secret = endpoint.signing_secret if status == "incomplete" else None
        if secret is not None:
            event = client.webhooks.unwrap(got.body, got.headers, secret=secret)
            type(event).model_validate(event.to_dict(), strict=True)
        assert json.loads(got.body)["type"] == f"response.{status}"
    deliveries = client.get("/webhook_deliveries", cast_to=dict[str, Any])["data"]
    delivered = {
        (one["webhook_endpoint_id"], one["event_type"]) for one in deliveries if one["webhook_endpoint_id"] == narrow.id
    }
    assert delivered == {(narrow.id, "response.completed")}
    for made in (endpoint, narrow):
        client.webhooks.delete(made.id)
