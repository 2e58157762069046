"""Every phase border has a failpoint, and every failpoint has a test that dies or stops there."""

from __future__ import annotations

import re
from pathlib import Path

import tidegate
from tidegate.failpoints import NAMES

SOURCE = Path(tidegate.__file__).parent


def test_every_failpoint_is_passed_somewhere_in_the_source() -> None:
    passed = {name for path in SOURCE.rglob("*.py") for name in re.findall(r"\bhit\(\s*\"(\w+)\"", path.read_text())}
    assert passed == set(NAMES)


def test_every_failpoint_is_armed_by_a_test() -> None:
    here = Path(__file__).parent
    armed = {
        (name, action)
        # Those of the API alone are met where it is killed.
        for path in (*here.glob("test_process_*.py"), here.parent / "web" / "test_killed.py")
        for name, action in re.findall(r"(\w+)(?:@\w+)?=(?:\d+\*)?(kill|stop)\b", path.read_text())
    }
    assert {name for name, action in armed if action == "kill"} >= set(NAMES)
