"""Who waits for a call, and whether it goes on to another server."""

from __future__ import annotations

from typing import Any

import pytest

from tidegate.core.errors import Ambiguous
from tidegate.upstream.calls.traffic import Traffic, goes_on, is_users

# Nothing is asked here.
NO_SHAPE: Any = None
USER = Traffic(NO_SHAPE, is_stream=False)


@pytest.mark.parametrize(
    ("traffic", "code", "goes"),
    [
        (USER, "upstream_overloaded", True),
        (USER, "upstream_ambiguous", False),
        (USER._replace(is_item=True), "upstream_overloaded", False),
        (None, "upstream_overloaded", False),
    ],
)
def test_only_a_users_call_goes_on_from_a_server_that_was_too_busy(
    traffic: Traffic | None, code: str, goes: bool
) -> None:
    assert goes_on(Ambiguous("busy", code=code), traffic) is goes


def test_someone_waits_for_an_interactive_call_and_not_for_flex_or_a_batch() -> None:
    assert is_users(USER)
    assert not is_users(USER._replace(flex_wait_s=1.0))
    assert not is_users(None)
