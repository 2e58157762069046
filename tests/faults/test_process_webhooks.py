"""Webhooks while processes die: every event of a batch's end arrives at least once, under one id, on both stores."""

from __future__ import annotations

import json
import threading
from collections import Counter

import pytest

from tests.faults.conftest import CLUSTER_IN_SOAK, PATIENT
from tests.support.postgres import PostgresServer
from tests.support.processes import wait_until
from tests.support.receiver import ALLOWED, Receiver
from tests.support.tidegate import ASK_S, END_S, Site, requests


@CLUSTER_IN_SOAK
@pytest.mark.parametrize(
    ("border", "sent_max"),
    [
        # After a 2xx that was not recorded it is sent once more.
        ("webhook_sent=kill", 2),
        # The event was committed with the end of the batch, and nothing of it was sent.
        ("publish_committed=kill", 1),
    ],
)
def test_a_worker_killed_on_the_way_of_an_event(site: Site, receiver: Receiver, border: str, sent_max: int) -> None:
    site.env |= ALLOWED
    victim = site.begin(border)
    shape = {"name": "hook", "url": receiver.url, "event_types": ["batch.completed"]}
    assert site.client().post("/v1/webhook_endpoints", json=shape).status_code == 200
    lines = requests(4)
    batch_id = site.submit(lines)
    assert victim.wait() == -9
    if not site.embedded:
        [waiting] = site.get("/v1/webhook_deliveries")["data"]
        assert waiting["status"] == "pending"
    site.relieve()

    def delivered() -> bool:
        return [one["status"] for one in site.get("/v1/webhook_deliveries")["data"]] == ["delivered"]

    wait_until(delivered, END_S, "the event to be delivered")
    assert len(receiver.got) == sent_max
    assert {got.id for got in receiver.got} == {f"evt_{batch_id.removeprefix('batch_')}"}
    assert len({got.body for got in receiver.got}) == 1
    site.judge(batch_id, lines)


@CLUSTER_IN_SOAK
def test_a_worker_killed_in_the_middle_of_the_callbacks_of_a_completion_batch(site: Site, receiver: Receiver) -> None:
    """Every callback arrives, the one that was under way perhaps twice, each under one id with one body."""
    site.env |= ALLOWED
    victim = site.begin("webhook_sent=4*kill")
    options = {"url": receiver.url, "headers": {"X-Own": "value"}, "events": ["all"]}
    request = {"messages": [{"role": "user", "content": "hi"}]}
    items = [{"resourceId": "m", "request": request} for _ in range(6)]
    body = {"type": "CALLBACK", "callbackOptions": options, "items": items}
    place = "/v1/completion-batch/default/prod"
    made = site.client().post(place, json=body)
    assert made.status_code == 201, made.text
    assert victim.wait() == -9
    site.relieve()

    def is_all_there() -> bool:
        states = [one["status"] for one in site.get("/v1/webhook_deliveries?limit=100")["data"]]
        batch = site.get(f"{place}/{made.json()['batchId']}?includesItems=false")
        return batch["status"] == "COMPLETED" and set(states) == {"delivered"}

    wait_until(is_all_there, END_S, "every callback to be delivered")
    bodies = {got.id: got.body for got in receiver.got}
    assert all(bodies[got.id] == got.body and got.headers["x-own"] == "value" for got in receiver.got)
    events = [json.loads(one) for one in bodies.values()]
    assert Counter(one["event"] for one in events)["BATCH_UPDATE"] == 1
    ended = [
        one["payload"]["itemId"]
        for one in events
        if one["payload"]["status"] == "COMPLETED" and "itemId" in one["payload"]
    ]
    assert len(ended) == len(set(ended)) == 6
    # Those that were out when the worker died come again; all others come once.
    assert len(receiver.got) - len(bodies) <= 20


@CLUSTER_IN_SOAK
def test_an_event_arrives_though_its_batch_was_deleted(site: Site, receiver: Receiver) -> None:
    """The receiver is away, the process that sends dies, and the batch is deleted: the event comes once the receiver is back.

    A first retry waits five seconds."""
    is_away = threading.Event()
    is_away.set()
    receiver.answer = lambda _: 503 if is_away.is_set() else 200
    site.env |= ALLOWED
    victim = site.begin("webhook_sent=kill")
    shape = {"name": "hook", "url": f"{receiver.url}/tenant", "event_types": ["batch.completed"]}
    assert site.client().post("/v1/webhook_endpoints", json=shape).status_code == 200
    batch_id = site.submit(requests(4), webhook={"url": f"{receiver.url}/own"})
    assert victim.wait() == -9
    site.relieve()
    output = site.until_status(batch_id, "completed")["output_file_id"]
    client = site.client()
    assert client.delete(f"/v1/batches/{batch_id}").status_code == 200
    assert client.delete(f"/v1/batches/{batch_id}").status_code == 404
    assert client.get(f"/v1/batches/{batch_id}").status_code == 404
    assert client.get(f"/v1/files/{output}").status_code == 404
    assert site.get("/v1/batches")["data"] == []
    assert [one["status"] for one in site.get("/v1/webhook_deliveries")["data"]] == ["pending", "pending"]
    sent_before = len(receiver.got)
    is_away.clear()
    wait_until(lambda: site.get("/v1/webhook_deliveries")["data"] == [], END_S, "the events to be delivered")
    assert {got.path for got in receiver.got[sent_before:]} == {"/hook/tenant", "/hook/own"}
    assert {got.id for got in receiver.got} == {f"evt_{batch_id.removeprefix('batch_')}"}
    assert len({got.body for got in receiver.got}) == 1
    assert site.rows("select id from webhook_endpoints where job_id is not null") == []
    assert site.rows("select id from jobs") == []


def test_the_database_restarts_while_an_event_is_on_its_way(
    crashing: Site, private_postgres_server: PostgresServer, receiver: Receiver
) -> None:
    """The receiver has it and has not answered yet. The lease outlives the restart: its outcome is recorded, and it is not sent again."""
    crashing.env |= ALLOWED | PATIENT
    may_answer = threading.Event()
    receiver.answer = lambda _: 200 if may_answer.wait(END_S) else 503
    crashing.begin()
    crashing.worker(name="other")
    shape = {"name": "hook", "url": receiver.url, "event_types": ["batch.completed"]}
    assert crashing.client().post("/v1/webhook_endpoints", json=shape).status_code == 200
    lines = requests(4)
    batch_id = crashing.submit(lines)
    wait_until(lambda: receiver.got, END_S, "the event")
    private_postgres_server.stop()
    may_answer.set()
    private_postgres_server.start()

    def delivered() -> bool:
        answer = crashing.client().get("/v1/webhook_deliveries")
        return answer.status_code == 200 and [one["status"] for one in answer.json()["data"]] == ["delivered"]

    wait_until(delivered, END_S, "the outcome to be recorded", poll_s=ASK_S)
    assert [got.id for got in receiver.got] == [f"evt_{batch_id.removeprefix('batch_')}"]
    crashing.judge(batch_id, lines)
