"""Deployments in the console: drained, resumed, tried, added, changed and removed, also with hostile names."""

from __future__ import annotations

from typing import Any

import pytest

from tests.web.console.world import HOSTILE, Console, csrf_of
from tests.web.server import NOWHERE, model_at
from tidegate.settings.capacity import ModelDeployment, ModelSettings

LIST, EDIT = "/console/deployments", "/console/deployments/edit"
PLACE = {"name": HOSTILE, "model": "m", "url": NOWHERE, "engine": "vllm", "weight": "2"}


@pytest.fixture(scope="module")
def web_settings() -> dict[str, Any]:
    return {"models": {"m": model_at(name="steady/1")}}


def test_a_deployment_is_drained_and_resumed_from_its_page(console: Console) -> None:
    writer, reader = console.signed_in(console.writer_key), console.signed_in(console.reader_key)
    form = {"csrf": csrf_of(writer, LIST), "name": "steady/1"}
    assert (writer.get(LIST).text.count("Drain</button>"), "/drain" in reader.get(LIST).text) == (1, False)
    done = writer.post(f"{LIST}/drain", data=form)
    assert (done.status_code, done.headers["location"]) == (303, LIST)
    shown = writer.get(LIST).text
    assert ("Resume</button>" in shown, "Drain</button>" in shown) == (True, False)
    assert writer.post(f"{LIST}/resume", data=form).status_code == 303
    assert "Drain</button>" in writer.get(LIST).text
    tried = writer.post(f"{LIST}/refresh", data=form)
    assert (tried.status_code, "steady/1: not reached" in tried.text) == (200, True)
    for verb in ("drain", "resume", "refresh", "remove"):
        absent = writer.post(f"{LIST}/{verb}", data={**form, "name": HOSTILE})
        assert (absent.status_code, "<script>alert" in absent.text) == (404, False)
    assert writer.post(f"{LIST}/remove", data=form).status_code == 409, "it is in the settings"


def test_a_pool_of_its_own_is_named(start_web: Any) -> None:
    places = [ModelDeployment(NOWHERE, name=serves, serves=serves) for serves in ("interactive", "batch", "both")]
    console = Console(start_web(models={"m": ModelSettings(tuple(places))}))
    shown = console.signed_in(console.reader_key).get(LIST).text
    assert [shown.count(words) for words in ("<dt>Serves", "interactive calls only", "batches only")] == [2, 1, 1]
    overview = console.web.client(console.reader_key).get("/admin/v1/overview").json()
    assert {one["name"]: one["serves"] for one in overview["deployments"]} == {one.name: one.serves for one in places}


def test_a_deployment_is_added_changed_and_removed(console: Console) -> None:
    writer, reader = console.signed_in(console.writer_key), console.signed_in(console.reader_key)
    assert reader.get(EDIT).status_code == 403
    form = {"csrf": csrf_of(writer, LIST), **PLACE, "more": "batch_fraction: 0.5"}
    wrongs = {
        "more": ["- a", "x: [", "wieght: 2", "a: 1\na: 2"],
        "url": ["h"],
        "max_in_flight": ["many"],
        "model": [""],
    }
    for field, values in wrongs.items():
        for value in values:
            again = writer.post(EDIT, data={**form, field: value})
            assert (again.status_code, 'role="alert"' in again.text) == (400, True), (field, value)
            assert "<script>alert" not in again.text
    assert writer.post(EDIT, data={**form, "api_key": "sk-secret"}).status_code == 400, "no secret is kept"
    assert writer.post(EDIT, data=form).status_code == 303
    assert writer.post(EDIT, data={**form, "weight": "3"}).status_code == 409, "there is one of this name"
    assert "&lt;script&gt;" in writer.get(LIST).text
    shown = writer.get(EDIT, params={"name": HOSTILE})
    assert ("batch_fraction: 0.5" in shown.text, "<script>alert" in shown.text) == (True, False)
    revision = shown.text.partition('name="revision" value="')[2].partition('"')[0]
    change = {**form, "revision": revision, "more": "", "weight": "7", "engine": ""}
    assert writer.post(EDIT, data=change).status_code == 303
    assert writer.post(EDIT, data={**change, "weight": "8"}).status_code == 409, "it was changed meanwhile"
    api = console.web.client(console.reader_key).get("/admin/v1/deployments").json()["data"]
    [document] = [one["document"] for one in api if one["name"] == HOSTILE]
    assert document == {"model": "m", "url": PLACE["url"], "weight": 7}
    assert writer.get(EDIT, params={"name": "steady/1"}).status_code == 404
    assert writer.post(f"{LIST}/remove", data={"csrf": form["csrf"], "name": HOSTILE}).status_code == 303
    assert HOSTILE not in [
        one["name"] for one in console.web.client(console.reader_key).get("/admin/v1/deployments").json()["data"]
    ]
