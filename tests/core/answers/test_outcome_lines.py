"""What a line of a result file says of its item."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tidegate.core.answers.outcome_lines import read_line, readable_line, response_status


def line(body: Any) -> bytes:
    return json.dumps(
        {"id": "i", "custom_id": "c", "response": {"status_code": 200, "body": body}, "error": None}
    ).encode()


@pytest.mark.parametrize("status", ["completed", "incomplete", "failed", "cancelled"])
def test_a_response_says_how_it_ended(status: str) -> None:
    assert read_line(line({"object": "response", "status": status})).response_status() == status


@pytest.mark.parametrize(
    "body", [{}, {"status": None}, {"status": 7}, {"status": "x"}, {"status": ["failed"]}, [], "x", 1]
)
def test_an_answer_that_says_nothing_of_its_end_is_complete(body: Any) -> None:
    assert read_line(line(body)).response_status() == "completed"


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("context_length_exceeded", "context_length_exceeded"),
        ("x" * 64, "x" * 64),
        ("x" * 65, "http_422"),
        ("You wrote: a secret", "http_422"),
        ("", "http_422"),
        (None, "http_422"),
        (7, "http_422"),
    ],
)
def test_only_what_looks_like_a_code_is_the_code_of_a_refusal(code: Any, found: str) -> None:
    """A text there may quote the request, and codes are shown to operators who may not read requests."""
    body = {"error": {"code": code, "message": "m"}}
    text = {"id": "i", "custom_id": "c", "response": {"status_code": 422, "body": body}, "error": None}
    assert read_line(json.dumps(text).encode()).failure_code() == found


def test_a_line_without_an_answer_has_no_other_end() -> None:
    text = json.dumps({"id": "i", "custom_id": "c", "response": None, "error": {"code": "x", "message": "y"}})
    assert read_line(text.encode()).response_status() == "completed"


@pytest.mark.parametrize("text", [b"", b"\x00\xff", b'{"id": 1}', b'{"id": "\xff"}', line({"status": "failed"})[:-9]])
def test_a_damaged_line_holds_nothing_up(text: bytes) -> None:
    assert response_status(text) == "completed"


@pytest.mark.parametrize(("lost", "custom_id"), [(0, "c"), (200, None)])
def test_a_name_within_the_answer_of_a_damaged_line_is_not_the_lines_own(lost: int, custom_id: str | None) -> None:
    text = b'{"id":"batch_req_0000000000000000_00"' + b"\xff" * lost + b',"custom_id":"c","response":{"body":{"x'
    assert readable_line(text).custom_id == custom_id
