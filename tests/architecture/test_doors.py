"""A front door is one room in `web/`: other rooms do not know its name."""

import re

from tests.docs.pages import SOURCE

# What puts rooms together, what describes every route, and the words of keys, which are kept with them in the store.
KNOW_EVERY_DOOR = ("service.py", "web/app.py", "web/openapi/document.py", "web/openapi/operations.py", "core/keys.py")
NAME = re.compile(r"completion[-_]batch", re.IGNORECASE)


def test_the_completion_batch_door_is_known_to_its_own_room_alone() -> None:
    knowing = {
        path.relative_to(SOURCE).as_posix()
        for path in SOURCE.rglob("*.py")
        if NAME.search(path.read_text(encoding="utf-8"))
    }
    others = {name for name in knowing if not name.startswith("web/completion_batch/")}
    assert others == set(KNOW_EVERY_DOOR)
