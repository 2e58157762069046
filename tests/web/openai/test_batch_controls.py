"""Batches under control: paused, resumed, changed and stopped by a threshold, as a client sees them."""

from __future__ import annotations

import time
from typing import Any

import httpx2
import pytest

from tests.web import stages
from tests.web.calls import create, is_error, upload
from tests.web.server import WebServer
from tidegate.core.states import Outcome

ALL_CONTROLS = {
    "priority": -100,
    "not_before": None,
    "max_cost": "0.50",
    "max_errors": {"share": 0.0157, "after": 10},
}


def test_a_batch_is_created_with_everything_that_can_be_changed(client: httpx2.Client) -> None:
    moment = int(time.time()) + 3_600
    made = create(client, upload(client), **(ALL_CONTROLS | {"not_before": moment}))["tidegate"]
    assert (made["priority"], made["not_before"], made["paused_at"]) == (-100, moment, None)
    assert (made["max_cost"], made["max_errors"]) == ("0.5", {"count": None, "share": 0.0157, "after": 10})
    assert made["stopped_by"] is None
    plain = create(client, upload(client))["tidegate"]
    assert (plain["priority"], plain["not_before"], plain["max_cost"], plain["max_errors"]) == (0, None, None, None)


def test_pause_and_resume_twice_is_fine_and_the_end_refuses_both(web: WebServer, client: httpx2.Client) -> None:
    batch_id = create(client, upload(client))["id"]
    rung = web.bell.rung
    for _ in range(2):
        paused = client.post(f"/v1/batches/{batch_id}/pause").json()
        assert paused["status"] == "validating"
        assert paused["tidegate"]["paused_at"] is not None
    stages.start(web, batch_id, 3)
    assert client.get(f"/v1/batches/{batch_id}").json()["status"] == "in_progress"
    for _ in range(2):
        answer = client.post(f"/v1/batches/{batch_id}/resume")
        assert answer.status_code == 200
        assert answer.json()["tidegate"]["paused_at"] is None
    assert web.bell.rung == rung + 4
    client.post(f"/v1/batches/{batch_id}/cancel")
    for action in ("pause", "resume"):
        refused = client.post(f"/v1/batches/{batch_id}/{action}")
        is_error(refused, {"status": 409, "code": "batch_not_pausable"})
        assert "A retry runs what it leaves without an answer." in refused.json()["error"]["message"]


def test_a_change_leaves_the_rest_and_null_takes_back(client: httpx2.Client) -> None:
    made = create(client, upload(client), **ALL_CONTROLS)
    path = f"/v1/batches/{made['id']}"
    changed = client.post(path, json={"priority": 3, "completion_window": "36h"}).json()
    assert changed["expires_at"] == made["created_at"] + 36 * 3_600
    assert changed["completion_window"] == "36h"
    assert changed["tidegate"] == made["tidegate"] | {"priority": 3}
    taken_back = client.post(path, json={"max_cost": None, "max_errors": None, "not_before": None}).json()
    assert (taken_back["tidegate"]["max_cost"], taken_back["tidegate"]["max_errors"]) == (None, None)
    assert client.post(path, json={"max_errors": {"count": 7}}).json()["tidegate"]["max_errors"] == {
        "count": 7,
        "share": None,
        "after": None,
    }
    moment = made["created_at"] + 3_600
    waiting = client.post(path, json={"not_before": moment, "max_errors": {"share": 0.5}}).json()["tidegate"]
    assert (waiting["not_before"], waiting["max_errors"]) == (moment, {"count": None, "share": 0.5, "after": 100})
    client.post(f"{path}/cancel")
    is_error(client.post(path, json={"priority": 1}), {"status": 409, "code": "batch_not_changeable"})


def test_the_refusal_of_a_wrong_field_says_what_it_may_be(client: httpx2.Client) -> None:
    made = create(client, upload(client))
    path = f"/v1/batches/{made['id']}"
    for wrong in (None, 24, "soon"):
        answer = client.post(path, json={"completion_window": wrong})
        is_error(answer, {"status": 400, "code": "invalid_parameter", "param": "completion_window"})
        assert "must be a duration with a unit, such as 24h" in answer.text


def test_too_many_errors_end_in_failed_with_both_files(web: WebServer, client: httpx2.Client) -> None:
    batch_id = stages.running(web, client, 3, max_errors={"count": 0})
    stages.finish(web, batch_id, {0: b"{0}\n"}, {1: b"{bad}\n"})
    shown = client.get(f"/v1/batches/{batch_id}").json()
    assert (shown["status"], shown["tidegate"]["stopped_by"]) == ("in_progress", "max_errors")
    stages.publish(web, batch_id, {2: b"{never}\n"}, Outcome.FAILED)
    ended = client.get(f"/v1/batches/{batch_id}").json()
    assert ended["status"] == "failed"
    assert [error["code"] for error in ended["errors"]["data"]] == ["max_errors_exceeded"]
    assert client.get(f"/v1/files/{ended['output_file_id']}/content").content == b"{0}\n"
    assert client.get(f"/v1/files/{ended['error_file_id']}/content").content == b"{bad}\n{never}\n"


@pytest.mark.parametrize("action", ["", "/pause", "/resume"])
def test_a_key_needs_the_right_to_write(start_web: object, action: str) -> None:
    web: WebServer = start_web()  # type: ignore[operator]
    with web.client(web.make_key("ours", scopes=("batches:read",))) as reader:
        answer = reader.post(f"/v1/batches/batch_0000000000000000000000{action}", json={"priority": 1})
        assert answer.status_code == 403


def test_lists_are_filtered_by_the_query(start_web: object) -> None:
    web: WebServer = start_web()  # type: ignore[operator]
    with web.client() as client:
        file_id = upload(client)
        wanted = [create(client, file_id, metadata={"team": "a", "x y": "1&2"})["id"] for _ in range(3)]
        other = create(client, file_id, metadata={"team": "b"})["id"]
        client.post(f"/v1/batches/{other}/cancel")

        def ids(**query: str) -> list[str]:
            answer = client.get("/v1/batches", params=query)
            assert answer.status_code == 200, answer.text
            return [one["id"] for one in answer.json()["data"]]

        assert sorted(ids(**{"metadata[team]": "a", "metadata[x y]": "1&2"})) == sorted(wanted)
        assert ids(status="cancelling") == [other]
        assert ids(q=other[-8:].lower()) == [other]
        assert ids(created_before="1000") == ids(model="m") == ids(error_code="x") == []
        assert len(ids(created_after="1000", q="IN.JSONL")) == 4
        first_s, last_s = (web.job(one).created_at // 1000 for one in (wanted[0], other))
        assert len(ids(created_after=str(first_s), created_before=str(last_s + 1))) == 4
        assert ids(created_before=str(first_s)) == ids(created_after=str(last_s + 1)) == [], "to the second"
        unknown = client.get("/v1/batches", params={"nonsense": "1"})
        is_error(unknown, {"status": 400, "code": "unknown_parameter"})
        assert "metadata[KEY]" in unknown.json()["error"]["message"]
        first = client.get("/v1/batches", params={"metadata[team]": "a", "limit": "2"}).json()
        assert first["has_more"] is True
        rest = client.get("/v1/batches", params={"metadata[team]": "a", "after": first["last_id"]}).json()
        assert [one["id"] for one in (*first["data"], *rest["data"])] == ids(**{"metadata[team]": "a"})


def test_lists_are_sorted_by_the_query_and_hold_no_batches_of_others(start_web: object) -> None:
    web: WebServer = start_web()  # type: ignore[operator]
    client, other = web.client(web.make_key("ours")), web.client(web.make_key("theirs"))
    small, large, waiting = (create(client, upload(client), metadata={"n": str(n)})["id"] for n in range(3))
    theirs = create(other, upload(other))["id"]
    for batch_id, count in ((large, 9), (small, 2), (theirs, 5)):
        stages.start(web, batch_id, count)
    stages.finish(web, small, {0: b"{0}\n"}, {1: b"{bad}\n"})

    def ids(**query: str) -> list[str]:
        answer = client.get("/v1/batches", params=query)
        assert answer.status_code == 200, answer.text
        return [one["id"] for one in answer.json()["data"]]

    assert ids(sort="created") == ids()
    assert ids(sort="size") == [large, small, waiting]
    assert ids(sort="size", limit="1") == [large]
    assert ids(sort="size", after=large) == [small, waiting]
    assert ids(sort="size", **{"metadata[n]": "0"}) == [small]
    assert ids(sort="failed") == [small]
    assert ids(sort="deadline", q=waiting) == [waiting]
    is_error(client.get("/v1/batches", params={"sort": "mood"}), {"status": 400, "param": "sort"})
    is_error(client.get("/v1/batches", params={"sort": "size", "after": theirs}), {"status": 400, "param": "after"})


@pytest.mark.parametrize(
    "query", [{}, {"sort": "size"}, {"sort": "failed"}, {"status": "completed"}, {"q": "in.jsonl"}]
)
def test_a_client_that_deletes_what_it_lists_meets_every_batch(start_web: Any, query: dict[str, str]) -> None:
    web: WebServer = start_web()
    client, made = web.client(web.make_key("ours")), set()
    for count in (3, 2, 2):
        made.add(batch_id := create(client, upload(client))["id"])
        stages.start(web, batch_id, count)
        stages.finish(web, batch_id, {0: b"{0}\n"}, dict.fromkeys(range(1, count), b"{bad}\n"))
        stages.publish(web, batch_id)
    met: list[str] = []
    while True:
        after = {"after": met[-1]} if met else {}
        page = client.get("/v1/batches", params={**query, **after, "limit": "1"})
        assert page.status_code == 200, page.text
        met += [one["id"] for one in page.json()["data"]]
        if not page.json()["has_more"]:
            break
        assert client.delete(f"/v1/batches/{met[-1]}").status_code == 200
    assert (len(met), set(met)) == (3, made)


def test_a_batch_can_be_deleted_once_it_has_ended(web: WebServer, client: httpx2.Client) -> None:
    file_id = upload(client)
    batch_id = create(client, file_id)["id"]
    stages.start(web, batch_id, 1)
    is_error(client.delete(f"/v1/batches/{batch_id}"), {"status": 409, "code": "batch_not_ended"})
    stages.finish(web, batch_id, {0: b"{0}\n"})
    stages.publish(web, batch_id)
    output_id = client.get(f"/v1/batches/{batch_id}").json()["output_file_id"]
    gone = client.delete(f"/v1/batches/{batch_id}")
    assert gone.json() == {"id": batch_id, "object": "batch.deleted", "deleted": True}
    for path in (f"/v1/batches/{batch_id}", f"/v1/files/{output_id}"):
        assert client.get(path).status_code == 404
    assert client.get(f"/v1/files/{file_id}").status_code == 200, "the input is the caller's own"
    is_error(client.delete(f"/v1/batches/{batch_id}"), {"status": 404, "code": "batch_not_found"})
