"""A front door is one room in `web/` and a line in `web/doors.py`: other rooms do not know its name."""

import re

import pytest

from tests.docs.pages import SOURCE
from tidegate.web.doors import DOORS, SCOPES
from tidegate.web.jobs.front_door import FrontDoor

WEB = SOURCE / "web"
DOOR_LIST = "web/doors.py"
# Rooms of `web/` that no client of an API enters: what doors stand on, what describes them, and what operators see.
NO_DOORS = {"http", "requests", "jobs", "openapi", "admin", "console", "static", "templates"}
# Who else knows a door's room, each for a reason. Operators see batches, items and deliveries in the shapes that tenants see, and the
# playground makes interactive calls. The app makes the gateway for both, and the gateway hands on the calls that run in the background. A
# command reads what OpenAI's door answers, and another checks the endpoints that the gateway has.
OTHERS_THAT_KNOW = {
    "openai": {
        "web/admin/batches.py",
        "web/admin/items.py",
        "web/console/item_pages.py",
        "web/console/creation_pages.py",
        "cli/batches/batch_create.py",
    },
    "webhooks": {"web/admin/deliveries.py", "web/console/pages.py", "web/openapi/operations.py"},
    "gateway": {"web/app.py", "web/console/pages.py", "web/console/playground.py", "cli/server/examine_routing.py"},
    "background": {"web/app.py", "web/gateway/gateway.py"},
}
# How the doors are called whose objects are jobs by another name, and who else says so: how many requests one of Anthropic's batches may
# have is a setting, and the reading of inputs obeys it.
NAMES = {"completion_batch": r"completion[-_ ]?batch", "message_batches": r"messages?[-_/ ]batch|msgbatch"}
OTHERS_THAT_SAY = {"message_batches": {"settings/groups.py", "worker/policies.py"}}


def _rooms() -> set[str]:
    return {path.name for path in WEB.iterdir() if path.is_dir() and not path.name.startswith("_")} - NO_DOORS


def _room_of(door: FrontDoor) -> str:
    return type(door).__module__.split(".")[2]


def _outside(room: str) -> list[tuple[str, str]]:
    """Return the name and the text of every module outside of a room."""
    found = ((path.relative_to(SOURCE).as_posix(), path.read_text(encoding="utf-8")) for path in SOURCE.rglob("*.py"))
    return [(name, text) for name, text in found if not name.startswith(f"web/{room}/")]


def test_every_room_of_a_door_is_in_the_list_and_no_other() -> None:
    assert sorted(map(_room_of, DOORS)) == sorted(_rooms())
    assert all((WEB / room / "door.py").is_file() for room in _rooms())


@pytest.mark.parametrize("room", sorted(_rooms()))
def test_a_door_is_known_to_its_own_room_and_the_list(room: str) -> None:
    module = re.compile(rf"tidegate\.web\.{room}\b|tidegate\.web import .*\b{room}\b")
    knowing = {name for name, text in _outside(room) if module.search(text)}
    assert knowing == {DOOR_LIST} | OTHERS_THAT_KNOW.get(room, set())


@pytest.mark.parametrize("room", sorted(NAMES))
def test_no_other_room_has_learned_the_name_of_a_door(room: str) -> None:
    name = re.compile(NAMES[room], re.IGNORECASE)
    knowing = {module for module, text in _outside(room) if name.search(text)}
    assert knowing == {DOOR_LIST} | OTHERS_THAT_SAY.get(room, set())


def test_the_core_knows_no_scope_that_a_door_asks_for() -> None:
    named = {f'"{scope}"' for scope in SCOPES.tenant}
    texts = {path.name: path.read_text(encoding="utf-8") for path in (SOURCE / "core").rglob("*.py")}
    assert not {(name, scope) for name, text in texts.items() for scope in named if scope in text}
