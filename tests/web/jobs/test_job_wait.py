"""How long a caller may ask an answer to wait."""

from __future__ import annotations

import pytest
from starlette.requests import Request

from tidegate.web.jobs.job_wait import preferred_wait_s


@pytest.mark.parametrize(
    ("preference", "wait_s"),
    [
        ("wait=1", 1),
        ("respond-async, Wait = 7", 7),
        ('wait="59"; x=y', 59),
        ("wait=60", 60),
        ("wait=61", 60),
        ("wait=999999999", 60),
        ("wait=1.5", 0),
        ("await=5", 0),
        ("", 0),
    ],
)
def test_an_answer_waits_as_long_as_is_asked_and_no_longer_than_a_minute(preference: str, wait_s: int) -> None:
    assert preferred_wait_s(Request({"type": "http", "headers": [(b"prefer", preference.encode())]})) == wait_s
