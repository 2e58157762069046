"""Which requests the judge calls the same, over lines of any kind."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tidegate.judge.copies import RequestKey, read_request_key


def key_of(*left_out: str, **body: Any) -> RequestKey:
    line = {"custom_id": "a", "url": "/v1/embeddings", "body": {"model": "m", **body}}
    return read_request_key(json.dumps(line).encode(), frozenset(left_out))


@pytest.mark.parametrize("line", [b"", b"{", b'{"a": NaN}', b"[]", b"7", b"{}", b'{"body": "x"}'])
def test_a_line_that_asks_nothing_has_the_key_of_no_request(line: bytes) -> None:
    assert read_request_key(line, frozenset()) == RequestKey()


def test_requests_are_the_same_when_all_that_their_author_wrote_is() -> None:
    one = key_of(input="x", temperature=0)
    assert (one.url, one.temperature, one.key == "") == ("/v1/embeddings", 0, False)
    assert (
        read_request_key(b"\xef\xbb\xbf" + json.dumps({"body": {"model": "m"}}).encode(), frozenset()).key
        == key_of().key
    )
    assert key_of(input="x", temperature=0) == one
    assert key_of(input="y", temperature=0).key != one.key
    assert key_of("seed", input="x", temperature=0, seed=1).key == one.key, "the batch set it"
