"""The events of a batch and `Prefer: wait`, over a real socket, with the stages moved by hand."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx2
import pytest

from tests.support.processes import wait_until
from tests.support.sse import Event, events
from tests.web import stages
from tests.web.calls import create, is_error, upload
from tests.web.server import WebServer
from tidegate.core.errors import BlobUnavailable, StoreUnavailable
from tidegate.core.states import Outcome
from tidegate.web.openai.events.position import ENDED, EventPosition, read_position

ABSENT = "batch_0000000000000000000000"


def answered(number: int) -> bytes:
    body = {"id": "x", "text": "\u2028" * 3}
    line = {"id": f"batch_req_{number}", "custom_id": f"c-{number}", "response": {"status_code": 200, "body": body}}
    return json.dumps({**line, "error": None}).encode() + b"\n"


def failed(number: int) -> bytes:
    body = {"error": {"message": "No.", "type": "x", "param": None, "code": "bad"}}
    line = {"id": f"batch_req_{number}", "custom_id": "ü\u2028", "response": {"status_code": 400, "body": body}}
    return json.dumps({**line, "error": None}, ensure_ascii=False).encode() + b"\n"


def expired(number: int) -> bytes:
    error = {"code": "batch_expired", "message": "Too late."}
    line = {"id": f"batch_req_{number}", "custom_id": f"c-{number}", "response": None, "error": error}
    return json.dumps(line).encode() + b"\n"


def read(client: httpx2.Client, job_id: str, last_id: int | None = None) -> list[Event]:
    """Everything up to the end of the stream."""
    headers = {} if last_id is None else {"Last-Event-ID": str(last_id)}
    with client.stream("GET", f"/v1/batches/{job_id}/events", headers=headers) as answer:
        if answer.status_code == 204:
            return []
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.headers["x-accel-buffering"] == "no"
        assert answer.headers["cache-control"] == "no-store"
        return list(events(answer.iter_lines()))


class Reader:
    """Reads one stream in a thread of its own."""

    def __init__(self, client: httpx2.Client, job_id: str, last_id: int | None = None) -> None:
        self.seen: list[Event] = []
        self.comments: list[str] = []
        self.status = 0
        self.is_over = threading.Event()
        self._thread = threading.Thread(target=self._read, args=(client, job_id, last_id), daemon=True)
        self._thread.start()
        wait_until(lambda: self.status, what="the stream to begin")

    def _read(self, client: httpx2.Client, job_id: str, last_id: int | None) -> None:
        headers = {} if last_id is None else {"Last-Event-ID": str(last_id)}
        try:
            with client.stream("GET", f"/v1/batches/{job_id}/events", headers=headers) as answer:
                self.status = answer.status_code
                for event in events(answer.iter_lines(), self.comments):
                    self.seen.append(event)
        finally:
            self.is_over.set()

    def kinds(self) -> list[str]:
        return [event.kind for event in self.seen]

    def until(self, kind: str) -> None:
        wait_until(lambda: kind in self.kinds(), what=f"the event {kind}")


def done_job(web: WebServer, client: httpx2.Client, **more: Any) -> str:
    job_id = stages.running(web, client, 5, **more)
    stages.finish(web, job_id, {0: answered(0), 1: answered(1)}, {2: failed(2)})
    web.run(web.store.cancel_job(web.job(job_id).tenant_id, job_id))
    stages.publish(web, job_id, {3: expired(3), 4: expired(4)}, Outcome.CANCELLED)
    return job_id


def test_every_event_of_a_batch_that_ended(web: WebServer, client: httpx2.Client) -> None:
    job_id = done_job(web, client)
    found = read(client, job_id)
    assert [event.kind for event in found] == [
        *("batch.validating", "batch.in_progress", "batch.cancelling"),
        *("item.completed", "item.completed", "item.failed", "item.failed", "item.failed"),
        *("batch.progress", "batch.finalizing", "batch.cancelled"),
    ]
    numbers = [event.id for event in found]
    assert numbers == sorted({number for number in numbers if number is not None})
    assert found[-1].data == client.get(f"/v1/batches/{job_id}").json()
    progress = next(event for event in found if event.kind == "batch.progress")
    assert progress.data["request_counts"]["completed"] == 2
    items = [event.data for event in found if event.kind.startswith("item.")]
    assert items[0] == {
        "id": "batch_req_0",
        "object": "batch.item",
        "batch_id": job_id,
        "custom_id": "c-0",
        "status_code": 200,
        "error": None,
        "line": {"file": "output", "at": 0, "bytes": len(answered(0))},
    }
    assert (items[2]["custom_id"], items[2]["status_code"]) == ("ü\u2028", 400)
    assert items[2]["error"] == {"code": "bad", "message": "No."}
    assert items[3]["error"]["code"] == "batch_expired"
    for item in items:
        at, size = item["line"]["at"], item["line"]["bytes"]
        part = client.get(
            f"/v1/batches/{job_id}/{item['line']['file']}", headers={"Range": f"bytes={at}-{at + size - 1}"}
        )
        assert part.json()["id"] == item["id"]


def test_a_stream_that_is_cut_at_any_event_goes_on_with_the_next(web: WebServer, client: httpx2.Client) -> None:
    job_id = done_job(web, client)
    whole = read(client, job_id)
    for at, event in enumerate(whole):
        assert read(client, job_id, event.id) == whole[at + 1 :]
    assert client.get(f"/v1/batches/{job_id}/events", headers={"Last-Event-ID": str(whole[-1].id)}).status_code == 204


def test_events_come_as_things_happen(web: WebServer, client: httpx2.Client) -> None:
    job_id = str(create(client, upload(client))["id"])
    reader = Reader(client, job_id)
    reader.until("batch.validating")
    stages.start(web, job_id, 2)
    reader.until("batch.in_progress")
    assert not reader.is_over.is_set()
    stages.finish(web, job_id, {0: answered(0)})
    reader.until("batch.progress")
    late = Reader(client, job_id, reader.seen[-1].id)
    stages.finish(web, job_id, {}, {1: failed(1)})
    reader.until("item.failed")
    stages.publish(web, job_id)
    assert reader.is_over.wait(10)
    assert late.is_over.wait(10)
    assert reader.kinds() == [
        *("batch.validating", "batch.in_progress", "item.completed", "batch.progress", "item.failed"),
        *("batch.progress", "batch.finalizing", "batch.completed"),
    ]
    assert late.seen == reader.seen[4:]


def test_a_long_message_of_an_item_is_shown_in_part(web: WebServer, client: httpx2.Client) -> None:
    job_id = stages.running(web, client, 1)
    stages.finish(web, job_id, {}, {0: failed(0).replace(b"No.", b"x" * 501)})
    stages.publish(web, job_id)
    [event] = [one for one in read(client, job_id) if one.kind == "item.failed"]
    [item] = client.get(f"/v1/batches/{job_id}/items").json()["data"]
    assert event.data["error"]["message"] == item["error"]["message"] == "x" * 500


def test_a_batch_that_never_began(web: WebServer, client: httpx2.Client) -> None:
    job_id = str(create(client, upload(client))["id"])
    client.post(f"/v1/batches/{job_id}/cancel")
    web.run(web.store.end_unstarted(job_id))
    assert [event.kind for event in read(client, job_id)] == ["batch.validating", "batch.cancelling", "batch.cancelled"]


def test_an_ordered_batch_tells_its_items_at_the_end(web: WebServer, client: httpx2.Client) -> None:
    job_id = stages.running(web, client, 1, ordered=True)
    reader = Reader(client, job_id)
    reader.until("batch.in_progress")
    stages.finish(web, job_id, {0: answered(0)})
    reader.until("batch.finalizing")
    assert "item.completed" not in reader.kinds()
    stages.publish(web, job_id)
    assert reader.is_over.wait(10)
    assert reader.kinds()[-3:] == ["item.completed", "batch.progress", "batch.completed"]


def test_result_files_that_are_gone_leave_the_statuses(web: WebServer, client: httpx2.Client) -> None:
    job_id = done_job(web, client)
    whole = read(client, job_id)
    batch = client.get(f"/v1/batches/{job_id}").json()
    for name in ("output_file_id", "error_file_id"):
        client.delete(f"/v1/files/{batch[name]}")
    for last_id in (None, whole[4].id):
        found = read(client, job_id, last_id)
        assert found[-1].kind == "batch.cancelled"
        assert not any(event.kind.startswith("item.") for event in found)


def test_positions_are_numbers_that_grow() -> None:
    assert read_position(str(EventPosition(7, 5, 2).number())) == EventPosition(7, 5, 2)
    assert read_position(str(EventPosition(7, 5, 2, has_progress=True).number())) == EventPosition(
        7, 5, 2, has_progress=True
    )
    positions = [
        EventPosition(0, 0, 0),
        EventPosition(0, 0, 1),
        EventPosition(5, 0, 1),
        EventPosition(5, 9, 1),
        EventPosition(5, 9, ENDED),
    ]
    numbers = [one._replace(has_progress=is_shown).number() for one in positions for is_shown in (False, True)]
    assert numbers == sorted(set(numbers))
    for text in ("", "-1", "x", "1.5", "٣", "9" * 41, str((1 << 52) - 1), str(15)):
        assert read_position(text) is None


def test_an_empty_id_is_that_of_a_reader_who_has_seen_nothing(web: WebServer, client: httpx2.Client) -> None:
    path = f"/v1/batches/{done_job(web, client)}/events"
    whole = client.get(path)
    assert whole.status_code == 200
    assert client.get(path, headers={"Last-Event-ID": ""}).text == whole.text


@pytest.mark.parametrize("last_id", ["x", "-5", "1" * 100, "1e3", "15"])
def test_an_id_that_is_none_is_refused(web: WebServer, client: httpx2.Client, last_id: str) -> None:
    answer = client.get(f"/v1/batches/{done_job(web, client)}/events", headers={"Last-Event-ID": last_id})
    is_error(answer, {"status": 400, "code": "invalid_parameter", "param": "Last-Event-ID"})


@pytest.mark.parametrize("position", [EventPosition(3, 0, 1), EventPosition(1 << 40, 0, 1), EventPosition(0, 1, 1)])
def test_an_id_of_another_batch_begins_again(web: WebServer, client: httpx2.Client, position: EventPosition) -> None:
    job_id = done_job(web, client)
    found = read(client, job_id, position.number())
    assert found[0].kind == "reset"
    assert found[1:] == read(client, job_id)


def test_refusals(web: WebServer, client: httpx2.Client) -> None:
    job_id = done_job(web, client)
    for its_id in (ABSENT, "x", "A" * 1_000):
        is_error(client.get(f"/v1/batches/{its_id}/events"), {"status": 404, "code": "batch_not_found"})
    is_error(client.get(f"/v1/batches/{job_id}/events?a=1"), {"status": 400, "code": "unknown_parameter"})
    assert client.post(f"/v1/batches/{job_id}/events").status_code == 405
    head = client.head(f"/v1/batches/{job_id}/events")
    assert (head.status_code, head.content) == (200, b"")


def test_streams_of_a_tenant_are_bounded(start_web: Callable[..., WebServer]) -> None:
    web = start_web(limits={"event_streams_max": 2})
    with web.client() as client:
        job_id = stages.running(web, client, 5)
        readers = [Reader(client, job_id) for _ in range(2)]
        answer = client.get(f"/v1/batches/{job_id}/events")
        is_error(answer, {"status": 429, "code": "too_many_streams"})
        assert answer.headers["retry-after"]
        # A wait is only a preference.
        quick = client.get(f"/v1/batches/{job_id}", headers={"Prefer": "wait=30"})
        assert (quick.status_code, quick.headers.get("preference-applied")) == (200, None)
        stages.finish(web, job_id, {number: answered(number) for number in range(5)})
        stages.publish(web, job_id)
        assert all(reader.is_over.wait(10) for reader in readers)
        assert read(client, job_id)


def test_silence_is_broken_by_comments(web: WebServer, client: httpx2.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidegate.web.jobs.event_stream.HEARTBEAT_S", 0.2)
    job_id = stages.running(web, client, 5)
    reader = Reader(client, job_id)
    wait_until(lambda: len(reader.comments) >= 3, what="heartbeats")
    assert set(reader.comments) == {"heartbeat"}
    web.run(web.store.cancel_job(web.job(job_id).tenant_id, job_id))
    reader.until("batch.cancelling")
    stages.publish(web, job_id, {number: expired(number) for number in range(5)})
    assert reader.is_over.wait(10)


def test_a_key_that_stops_working_ends_its_stream_and_its_wait(start_web: Callable[..., WebServer]) -> None:
    web = start_web()
    key = web.make_key("acme")
    with web.client(key) as client:
        job_id = stages.running(web, client, 5)
        reader = Reader(client, job_id)
        waited: list[httpx2.Response] = []
        prefer = {"Prefer": "wait=30"}
        waiter = threading.Thread(
            target=lambda: waited.append(client.get(f"/v1/batches/{job_id}", headers=prefer)), daemon=True
        )
        waiter.start()
        reader.until("batch.in_progress")
        public_id = web.run(web.store.list_keys(10))[0]["id"]
        web.run(web.store.revoke_key(public_id))
        assert reader.is_over.wait(10)
        assert reader.seen[-1].kind == "error"
        assert reader.seen[-1].data["code"] == "invalid_api_key"
        waiter.join(10)
        assert waited[0].status_code == 401


def test_storage_that_is_away_loses_no_event(
    web: WebServer, client: httpx2.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidegate.web.jobs.event_stream.RETRY_S", 0.1)
    job_id = stages.running(web, client, 2)
    reader = Reader(client, job_id)
    reader.until("batch.in_progress")

    async def away(*_: Any, **__: Any) -> Any:
        raise StoreUnavailable("it is away")

    with monkeypatch.context() as patch:
        patch.setattr(web.store, "job_marks", away)
        patch.setattr(web.store, "get_job", away)
        is_error_503(client.get(f"/v1/batches/{job_id}/events"))
        stages.finish(web, job_id, {0: answered(0)})
        time.sleep(0.7)
        assert "item.completed" not in reader.kinds()
    reader.until("item.completed")

    def gone(*_: Any) -> Any:
        raise BlobUnavailable("it is away")

    with monkeypatch.context() as patch:
        patch.setattr(web.blobs, "stream", gone)
        stages.finish(web, job_id, {1: answered(1)})
        stages.publish(web, job_id)
        time.sleep(0.7)
        assert reader.kinds().count("item.completed") == 1
    assert reader.is_over.wait(10)
    assert reader.kinds().count("item.completed") == 2
    assert reader.kinds()[-1] == "batch.completed"


def is_error_503(answer: httpx2.Response) -> None:
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")
    assert answer.headers["retry-after"]


def test_a_batch_that_is_deleted_meanwhile_ends_the_stream(web: WebServer, client: httpx2.Client) -> None:
    job_id = stages.running(web, client, 5)
    reader = Reader(client, job_id)
    reader.until("batch.in_progress")
    web.rewrite("delete from jobs where state = 'in_progress'")
    assert reader.is_over.wait(10)


def test_a_server_that_stops_ends_its_streams(start_web: Callable[..., WebServer]) -> None:
    web = start_web()
    with web.client() as client:
        reader = Reader(client, stages.running(web, client, 5))
        reader.until("batch.in_progress")
        web.stop_asked()
        assert reader.is_over.wait(10)
        assert reader.kinds()[-1] == "batch.in_progress"


# ---- Prefer: wait


def test_a_wait_ends_with_the_next_status(web: WebServer, client: httpx2.Client) -> None:
    job_id = str(create(client, upload(client))["id"])
    answers: list[httpx2.Response] = []
    prefer = {"Prefer": "respond-async, wait=30"}
    thread = threading.Thread(target=lambda: answers.append(client.get(f"/v1/batches/{job_id}", headers=prefer)))
    thread.start()
    time.sleep(0.3)
    assert not answers
    stages.start(web, job_id, 1)
    thread.join(10)
    assert answers[0].json()["status"] == "in_progress"
    assert answers[0].headers["preference-applied"] == "wait"


def test_a_wait_ends_with_its_time_and_does_not_begin_after_the_end(web: WebServer, client: httpx2.Client) -> None:
    job_id = stages.running(web, client, 5)
    began_s = time.monotonic()
    answer = client.get(f"/v1/batches/{job_id}", headers={"Prefer": 'wait="1"'})
    assert time.monotonic() - began_s > 0.9
    assert (answer.json()["status"], answer.headers["preference-applied"]) == ("in_progress", "wait")
    over = client.get(f"/v1/batches/{done_job(web, client)}", headers={"Prefer": "wait=60"})
    assert (over.json()["status"], over.headers["preference-applied"]) == ("cancelled", "wait")


@pytest.mark.parametrize("prefer", ["", "wait", "wait=", "wait=-1", "wait=x", "wait=0", "await=5", "wait=" + "9" * 50])
def test_a_preference_that_cannot_be_read_is_ignored(web: WebServer, client: httpx2.Client, prefer: str) -> None:
    job_id = stages.running(web, client, 5)
    answer = client.get(f"/v1/batches/{job_id}", headers={"Prefer": prefer})
    assert (answer.status_code, answer.headers.get("preference-applied")) == (200, None)


def test_a_batch_is_not_watched_after_its_last_reader_left(web: WebServer, client: httpx2.Client) -> None:
    job_id = stages.running(web, client, 5)
    with client.stream("GET", f"/v1/batches/{job_id}/events") as answer:
        assert next(events(answer.iter_lines())).kind == "batch.validating"

    async def watching() -> bool:
        return any("_look_while_followed" in repr(task.get_coro()) for task in asyncio.all_tasks())

    wait_until(lambda: not web.run(watching()), timeout_s=20, what="the watch to end")
