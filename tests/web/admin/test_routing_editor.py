"""What the settings name is changed there and nowhere else, whatever its kind."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.contracts.store_world import StoreHandClock
from tidegate.core.errors import ApiProblem
from tidegate.settings.capacity import ModelDeployment, ModelSettings, ResourceEntry
from tidegate.settings.groups import Settings
from tidegate.store.database.sqlite import SqliteDriver
from tidegate.store.fleet import routing
from tidegate.store.store import Store
from tidegate.web.admin.deployments import RoutingEditor, RoutingRequest

pytestmark = pytest.mark.anyio

SETTINGS = Settings(
    models={"named": ModelSettings(deployments=(ModelDeployment("http://h/v1", name="named"),))},
    resources={"named": ResourceEntry(model="named")},
)


class Unaudited:
    """Notes nothing: an entry that is refused is written by none."""

    def noting(self, *_: str) -> Any:
        return None


@pytest.fixture
async def editor() -> AsyncIterator[RoutingEditor]:
    store = Store(SqliteDriver(None, StoreHandClock()))
    await store.migrate()
    yield RoutingEditor(store, lambda: SETTINGS, looks_up=False)
    await store.close()


@pytest.mark.parametrize("kind", ["model", "resource", "deployment"])
async def test_an_entry_of_the_settings_is_not_removed_and_an_unknown_one_is_not_found(
    editor: RoutingEditor, kind: str
) -> None:
    trail: Any = Unaudited()
    for name, refusal in (("named", (409, "set_in_settings")), ("unknown", (404, "entry_not_found"))):
        with pytest.raises(ApiProblem) as problem:
            await editor.do(trail, "remove", kind, RoutingRequest(name))
        assert (problem.value.status, problem.value.code) == refusal


class Unchecked:
    """Writes each change, and notes none."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def noting(self, *_: str) -> Store:
        return self._store


def trail_to(editor: RoutingEditor) -> Any:
    return Unchecked(editor._store)


async def refused(editor: RoutingEditor, verb: str, kind: str, wanted: RoutingRequest) -> tuple[int, str, str]:
    with pytest.raises(ApiProblem) as problem:
        await editor.do(trail_to(editor), verb, kind, wanted)
    return problem.value.status, problem.value.code, problem.value.message


def served_at(model: str) -> dict[str, Any]:
    return {"model": model, "url": "http://added/v1"}


async def test_a_model_that_a_resource_leads_to_keeps_its_last_deployment(editor: RoutingEditor) -> None:
    trail = trail_to(editor)
    for name in ("one", "two"):
        await editor.do(trail, "add", "deployment", RoutingRequest(name, set=served_at("m")))
    await editor.do(trail, "add", "resource", RoutingRequest("chat", set={"model": "named", "fallbacks": ["m"]}))
    await editor.do(trail, "remove", "deployment", RoutingRequest("one"))
    status, code, message = await refused(editor, "remove", "deployment", RoutingRequest("two"))
    assert (status, code) == (409, "still_in_use")
    assert "'chat' leads to 'm'" in message
    await editor.do(trail, "remove", "deployment", RoutingRequest("two", force=True))
    assert [one.name for one in await editor.list() if one.origin == "added"] == ["chat"]
    await editor.do(trail, "remove", "resource", RoutingRequest("chat"))


async def test_a_resource_that_another_leads_to_stays_unless_it_is_forced(editor: RoutingEditor) -> None:
    trail = trail_to(editor)
    await editor.do(trail, "add", "resource", RoutingRequest("back", set={"model": "named"}))
    await editor.do(trail, "add", "resource", RoutingRequest("front", set={"model": "named", "fallbacks": ["back"]}))
    status, code, message = await refused(editor, "remove", "resource", RoutingRequest("back"))
    assert (status, code) == (409, "still_in_use")
    assert "'front' leads to 'back'" in message
    await editor.do(trail, "add", "deployment", RoutingRequest("one", set=served_at("own")))
    await editor.do(trail, "add", "resource", RoutingRequest("own", set={"model": "own"}))
    await editor.do(trail, "remove", "resource", RoutingRequest("own"))
    await editor.do(trail, "remove", "deployment", RoutingRequest("one"))
    await editor.do(trail, "remove", "resource", RoutingRequest("front"))
    await editor.do(trail, "remove", "resource", RoutingRequest("back"))
    assert [one.name for one in await editor.list() if one.origin == "added"] == []


async def test_no_more_is_added_than_may_be_kept_and_what_is_there_may_still_change(
    editor: RoutingEditor, monkeypatch: pytest.MonkeyPatch
) -> None:
    trail = trail_to(editor)
    monkeypatch.setattr(routing, "ENTRIES_MAX", 1)
    await editor.do(trail, "add", "deployment", RoutingRequest("one", set=served_at("m")))
    wanted = RoutingRequest("two", set=served_at("m"))
    assert (await refused(editor, "add", "deployment", wanted))[:2] == (409, "too_many_entries")
    with pytest.raises(ApiProblem) as problem:
        await editor.set_state(trail, "drain", "one")
    assert (problem.value.status, problem.value.code) == (409, "too_many_entries")
    await editor.do(trail, "change", "deployment", RoutingRequest("one", set={"weight": 2}))
    [changed] = [one for one in await editor.list() if one.origin == "added"]
    assert changed.document == {**served_at("m"), "weight": 2}


async def test_of_two_who_drain_a_deployment_at_once_the_second_looks_again(
    editor: RoutingEditor, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, read = editor._store, editor._store.routing

    async def late() -> Any:
        seen = await read()
        monkeypatch.setattr(store, "routing", read)
        await editor.set_state(trail_to(editor), "drain", "named")
        return seen

    monkeypatch.setattr(store, "routing", late)
    with pytest.raises(ApiProblem) as problem:
        await editor.set_state(trail_to(editor), "refresh", "named")
    assert (problem.value.status, problem.value.code) == (409, "changed_meanwhile")
    done = await editor.set_state(trail_to(editor), "drain", "named")
    assert done == await editor.set_state(trail_to(editor), "drain", "named"), "twice changes nothing"
    await editor.set_state(trail_to(editor), "refresh", "named")
    [shown] = [one for one in await editor.list() if one.kind == "deployment"]
    assert shown.is_drained, "to be tried again is not to be resumed"
    await editor.set_state(trail_to(editor), "resume", "named")
    assert not [one for one in await editor.list() if one.is_drained]
