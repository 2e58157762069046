"""Lines of items that were not run: the answer of another item under their own id and custom_id."""

import json

import pytest
from msgspec import Raw

from tidegate.core.answers.copied_lines import WorkCopy, deduplicated_line, read_source, reused_line

ANSWER = '{"status_code":200,"request_id":"r1","body":{"n": 1.0}}'


def source(extras: str = "", error: str = "null", response: str = ANSWER) -> bytes:
    return f'{{"id":"batch_req_1","custom_id":"a","response":{response},"error":{error}{extras}}}'.encode()


@pytest.mark.parametrize(
    ("extras", "raw"),
    [
        ("", ""),
        (',"tidegate":null', ""),
        (',"tidegate":{"attempts":2}', ""),
        (',"tidegate":{"raw":{"x": 1}}', '"raw":{"x": 1},'),
    ],
)
def test_a_copy_has_the_answer_byte_for_byte_and_names_the_line_that_was_paid_for(extras: str, raw: str) -> None:
    line = deduplicated_line("batch_req_2", b'"b"', read_source(source(extras)))
    assert line.decode() == (
        f'{{"id":"batch_req_2","custom_id":"b","response":{ANSWER},"error":null,'
        f'"tidegate":{{{raw}"deduplicated":"batch_req_1"}}}}\n'
    )


@pytest.mark.parametrize(
    ("error", "code"),
    [("null", ""), ('{"message":"late"}', ""), ('{"code":"batch_expired","message":"late"}', "batch_expired")],
)
def test_a_source_says_why_it_has_no_answer(error: str, code: str) -> None:
    assert read_source(source(error=error, response="null")).code == code


def test_a_copy_of_an_error_is_that_error() -> None:
    error = {"code": "batch_expired", "message": "late"}
    line = json.loads(
        deduplicated_line("batch_req_2", b'"b"', read_source(source(error=json.dumps(error), response="null")))
    )
    assert (line["response"], line["error"]) == (None, error)


def test_a_reused_line_names_the_earlier_line() -> None:
    copy = WorkCopy(Raw(b'"b"'), source="batch_req_0", response=Raw(ANSWER.encode()))
    assert reused_line("batch_req_2", copy).decode() == (
        f'{{"id":"batch_req_2","custom_id":"b","response":{ANSWER},"error":null,"tidegate":{{"reused":"batch_req_0"}}}}\n'
    )
