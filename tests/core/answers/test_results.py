"""What an upstream sent instead of an answer is kept as text, whatever it was."""

import json

import pytest

from tidegate.core import ids
from tidegate.core.answers import results


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (b'"<html>no</html>"', "<html>no</html>"),
        (b'{"a":1,"a":2}', '{"a":1,"a":2}'),
        (b"null", "null"),
        (b'"\\ud800"', '"\\ud800"'),
        (b'"cut', '"cut'),
    ],
)
def test_what_came_instead_of_an_answer_is_text_in_the_line(raw: bytes, text: str) -> None:
    line = results.error_line(ids.make("batch", b"0" * 16), 1, b'"mine"', "invalid_upstream_response", "no answer")
    body = json.loads(results.with_members(line, [results.raw_member(raw)]))
    assert body.pop("tidegate") == {"raw": text}
    assert body == json.loads(line)


@pytest.mark.parametrize(
    ("status", "kind"), [(400, "invalid_request_error"), (499, "invalid_request_error"), (500, "server_error")]
)
def test_a_refusal_without_words_says_whose_fault_it_is(status: int, kind: str) -> None:
    error = json.loads(results.http_error_body(status, b"<html>", "no", "x"))["error"]
    assert error == {"message": "no", "type": kind, "param": None, "code": "x"}
