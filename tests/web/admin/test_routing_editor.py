"""What the settings name is changed there and nowhere else, whatever its kind."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.contracts.store_world import Clock
from tidegate.core.errors import ApiProblem
from tidegate.settings.capacity import ModelDeployment, ModelSettings, ResourceEntry
from tidegate.settings.groups import Settings
from tidegate.store.database.sqlite import SqliteDriver
from tidegate.store.store import Store
from tidegate.web.admin.deployments import RoutingEditor, RoutingWish

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
    store = Store(SqliteDriver(None, Clock()))
    await store.migrate()
    yield RoutingEditor(store, lambda: SETTINGS, looks_up=False)
    await store.close()


@pytest.mark.parametrize("kind", ["model", "resource", "deployment"])
async def test_an_entry_of_the_settings_is_not_removed_and_one_that_nobody_knows_is_not_found(
    editor: RoutingEditor, kind: str
) -> None:
    trail: Any = Unaudited()
    for name, refusal in (("named", (409, "set_in_settings")), ("unknown", (404, "entry_not_found"))):
        with pytest.raises(ApiProblem) as problem:
            await editor.do(trail, "remove", kind, RoutingWish(name))
        assert (problem.value.status, problem.value.code) == refusal
