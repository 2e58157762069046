"""A commit whose fate is unknown: the same call is made again with the same ids, so it counts once; and what was begun is given up."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.faulty_driver import FaultyDriver
from tests.web.calls import LINES, create, kept, upload
from tests.web.server import WebServer
from tidegate.stages import accept


@pytest.fixture
def web(start_web: Any) -> WebServer:
    server: WebServer = start_web()
    server.store._driver = FaultyDriver(server.store._driver)
    with server.client() as client:
        assert client.get("/v1/files").status_code == 200
    return server


def driver(web: WebServer) -> FaultyDriver:
    faulty = web.store._driver
    assert isinstance(faulty, FaultyDriver)
    return faulty


@pytest.mark.parametrize("lost", [1, 2, 3])
@pytest.mark.parametrize("when", ["lost_after", "lost_before"])
def test_each_lost_answer_counts_once(web: WebServer, when: str, lost: int) -> None:
    with web.client() as client:
        setattr(driver(web), when, lost)
        file_id = upload(client)
        assert kept(web) == (1, 0, 1)
        setattr(driver(web), when, lost)
        made = create(client, file_id)
        assert [batch["id"] for batch in client.get("/v1/batches").json()["data"]] == [made["id"]]
        setattr(driver(web), when, lost)
        assert client.post(f"/v1/batches/{made['id']}/cancel").json()["status"] == "cancelling"
        assert client.get(f"/v1/files/{file_id}/content").content == LINES


def test_a_store_that_stays_away_keeps_nothing_half(web: WebServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accept, "REPLAY_MS", 100)
    with web.client() as client:
        driver(web).lost_before = 1_000
        answer = client.post("/v1/files", files={"file": ("a", LINES)}, data={"purpose": "batch"})
        assert answer.status_code == 503
        assert answer.headers["retry-after"] == "5"
        driver(web).lost_before = 0
        assert kept(web) == (0, 0, 0)


def test_what_could_not_be_given_up_is_given_up_later(web: WebServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accept, "REPLAY_MS", 100)
    monkeypatch.setattr(accept, "_PAUSE_FIRST_S", 0.01)
    finish = web.blobs.create

    async def then_lose(blob_id: str) -> Any:
        driver(web).lost_before = 1_000
        return await finish(blob_id)

    monkeypatch.setattr(web.blobs, "create", then_lose)
    with web.client() as client:
        answer = client.post("/v1/files", files={"file": ("a", LINES)}, data={"purpose": "batch"})
        assert answer.status_code == 503
        monkeypatch.undo()
        driver(web).lost_before = 0
        assert web.statement("select state from blobs") == [("writing",)]
        upload(client)
        assert web.statement("select state from blobs") == [("kept",)]


def test_bytes_of_a_file_that_was_committed_after_all_stay(web: WebServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accept, "REPLAY_MS", -1)
    begun = web.blobs.create

    async def then_lose(blob_id: str) -> Any:
        writer = await begun(blob_id)
        driver(web).lost_after = 1
        return writer

    monkeypatch.setattr(web.blobs, "create", then_lose)
    with web.client() as client:
        answer = client.post("/v1/files", files={"file": ("a", LINES)}, data={"purpose": "batch"})
        assert answer.status_code == 503
        (file,) = client.get("/v1/files").json()["data"]
        assert client.get(f"/v1/files/{file['id']}/content").content == LINES
