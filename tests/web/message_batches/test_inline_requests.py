"""The body of an inline create, cut into requests: every cut of the bytes gives the same lines, and bad bodies are refused by name."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.core.errors import ApiProblem
from tidegate.web.message_batches.inline_requests import InlineRequests

TEXTS = st.text(st.sampled_from('ab"\\{}[],:\n é\u2028'), max_size=12)
PARAMS = st.dictionaries(TEXTS, TEXTS | st.lists(TEXTS, max_size=3) | st.integers() | st.none(), max_size=4)


def lines_of(
    body: bytes, piece_bytes: int = 65_536, count_max: int = 1_000, request_bytes_max: int = 1 << 20
) -> list[bytes]:
    inline = InlineRequests("/v1/messages", count_max, request_bytes_max)
    lines: list[bytes] = []
    for at in range(0, len(body), piece_bytes):
        lines += inline.feed(body[at : at + piece_bytes])
    inline.finish()
    assert inline.count == len(lines)
    return lines


def body_of(*params: Any, indent: int | None = None, escaped: bool = True) -> bytes:
    requests = [{"custom_id": f"r-{number}", "params": one} for number, one in enumerate(params)]
    return json.dumps({"requests": requests}, indent=indent, ensure_ascii=escaped).encode()


@given(st.lists(PARAMS, min_size=1, max_size=4), st.integers(1, 40), st.sampled_from([None, 0, 3]), st.booleans())
def test_every_cut_gives_the_same_lines(params: list[Any], piece_bytes: int, indent: int | None, escaped: bool) -> None:
    found = lines_of(body_of(*params, indent=indent, escaped=escaped), piece_bytes)
    assert all(line.endswith(b"\n") and line.count(b"\n") == 1 and b"\r" not in line for line in found)
    read = [json.loads(line) for line in found]
    assert [line["body"] for line in read] == params
    assert [line["custom_id"] for line in read] == [f"r-{number}" for number in range(len(params))]
    assert all((line["method"], line["url"]) == ("POST", "/v1/messages") for line in read)


@pytest.mark.parametrize("start", [b'{"requests":[{"params":{"a":"', b'{"requests":[{"a":[1,', b'{"requests":[{'])
def test_what_is_held_is_not_copied_for_each_piece(start: bytes) -> None:
    inline = InlineRequests("/v1/messages", 1_000, 1 << 20)
    assert not list(inline.feed(start + b"1" * 400_000))
    assert not list(inline.feed(b"1"))
    tracemalloc.start()
    try:
        for _ in range(100):
            assert not list(inline.feed(b"1"))
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 200_000


GOOD = '{"custom_id":"a","params":{}}'
CASES = [
    ("", "invalid_parameter", "requests"),
    ("[]", "invalid_parameter", "requests"),
    ("{}", "invalid_parameter", "requests"),
    ("null", "invalid_parameter", "requests"),
    ('{"requests":{}}', "invalid_parameter", "requests"),
    ('{"requests":"' + "x" * 5_000 + '"}', "invalid_parameter", "requests"),
    ('{"other":1,"requests":[' + GOOD + "]}", "invalid_parameter", "requests"),
    ('{"requests":[' + GOOD + '],"other":1}', "invalid_parameter", "requests"),
    ('{"requests":[]}', "invalid_parameter", "requests"),
    ('{"requests":[1]}', "invalid_parameter", "requests.0"),
    ('{"requests":[' + GOOD + ",]}", "invalid_parameter", "requests.1"),
    ('{"requests":[' + GOOD + ",null]}", "invalid_parameter", "requests.1"),
    ('{"requests":[' + GOOD + " " + GOOD + "]}", "invalid_json", None),
    ('{"requests":[' + GOOD, "invalid_json", None),
    ('{"requests":[' + GOOD + "]", "invalid_json", None),
    ('{"requests":[' + GOOD + "]}]", "invalid_json", None),
    ('{"requests":[' + GOOD + "]}{}", "invalid_json", None),
    ('{"requests":[{"custom_id":"a","params":{]}', "invalid_json", None),
    ('{"requests":[{"custom_id":"a","params":{"a":"\n"}}]}', "invalid_json", None),
    ('{"requests":[{"custom_id":"a","params":{"a":NaN}}]}', "invalid_json", None),
    ('{"requests":[{"custom_id":"a","params":' + "[" * 100_000 + "]" * 100_000 + "}]}", "invalid_json", None),
    ('{"requests":[{"params":{}}]}', "invalid_parameter", "requests.0"),
    ('{"requests":[{"custom_id":"a"}]}', "invalid_parameter", "requests.0"),
    ('{"requests":[{"custom_id":1,"params":{}}]}', "invalid_parameter", "requests.0"),
    ('{"requests":[{"custom_id":"a","params":{},"url":"/v1/embeddings"}]}', "invalid_parameter", "requests.0"),
    ('{"requests":[{"custom_id":"a","params":[]}]}', "invalid_parameter", "requests.0.params"),
    ('{"requests":[{"custom_id":"a","params":null}]}', "invalid_parameter", "requests.0.params"),
    ('{"requests":[{"custom_id":"","params":{}}]}', "invalid_parameter", "requests.0.custom_id"),
    ('{"requests":[{"custom_id":"a b","params":{}}]}', "invalid_parameter", "requests.0.custom_id"),
    ('{"requests":[{"custom_id":"a\\"","params":{}}]}', "invalid_parameter", "requests.0.custom_id"),
    ('{"requests":[{"custom_id":"a\\n","params":{}}]}', "invalid_parameter", "requests.0.custom_id"),
    ('{"requests":[{"custom_id":"' + "a" * 65 + '","params":{}}]}', "invalid_parameter", "requests.0.custom_id"),
    ('{"requests":[' + GOOD + "," + GOOD + "]}", "invalid_parameter", "requests.1.custom_id"),
]


@pytest.mark.parametrize("piece_bytes", [1, 65_536])
@pytest.mark.parametrize(("body", "code", "param"), CASES)
def test_bad_bodies(body: str, code: str, param: str | None, piece_bytes: int) -> None:
    with pytest.raises(ApiProblem) as refused:
        lines_of(body.encode(), piece_bytes)
    assert (refused.value.status, refused.value.code, refused.value.param) == (400, code, param)


def test_a_number_of_requests_that_is_too_large() -> None:
    assert len(lines_of(body_of({}, {}), count_max=2)) == 2
    with pytest.raises(ApiProblem, match="more than 2 requests"):
        lines_of(body_of({}, {}, {}), count_max=2)


@pytest.mark.parametrize("end", [b"", b'"}}]}'])
def test_a_request_that_is_too_large_is_refused_before_it_is_whole(end: bytes) -> None:
    inline = InlineRequests("/v1/messages", 10, 1_000)
    with pytest.raises(ApiProblem, match=r"requests\.0"):
        list(inline.feed(b'{"requests":[{"custom_id":"a","params":{"a":"' + b"x" * 1_000 + end))


def test_bytes_that_are_no_text_are_left_to_ingest() -> None:
    (line,) = lines_of(b'{"requests":[{"custom_id":"a","params":{"a":"\xff"}}]}')
    assert b"\xff" in line


def test_what_a_request_lacks_is_reported_in_our_sentence() -> None:
    with pytest.raises(ApiProblem) as lacking:
        lines_of(b'{"requests":[{"params":{}}]}')
    assert lacking.value.message == "`requests.0`: object missing required field `custom_id`."
    long_name = "x" * 1_000
    with pytest.raises(ApiProblem) as unknown:
        lines_of(b'{"requests":[{"custom_id":"a","params":{},"%b":1}]}' % long_name.encode())
    assert unknown.value.message == f"`requests.0`: {f'object contains unknown field `{long_name}'[:200]}."
