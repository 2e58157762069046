"""The body of a create, cut into items: every cut of the bytes gives the same lines, and bad frames are refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.core.errors import ApiProblem
from tidegate.web.completion_batch.inline_items import CHAT, MESSAGES, RESPONSES, InlineItems, read_name

TEXTS = st.text(st.sampled_from('ab"\\{}[],:\n é\u2028'), max_size=12)
REQUESTS = st.dictionaries(TEXTS, TEXTS | st.lists(TEXTS, max_size=3) | st.integers() | st.none(), max_size=4)
SAYS_HI = {"messages": [{"role": "user", "content": "hi"}]}


def inline(body: bytes, piece_bytes: int = 65_536, count_max: int = 1_000) -> tuple[list[bytes], dict[str, Any]]:
    items = InlineItems(lambda resource, param: None, (CHAT, "/v1/embeddings"), count_max, 1 << 20)
    lines = [line for at in range(0, len(body), piece_bytes) for line in items.feed(body[at : at + piece_bytes])]
    fields = {name: json.loads(bytes(raw)) for name, raw in items.finish().items()}
    return lines, fields


@given(st.lists(REQUESTS, min_size=1, max_size=4), st.integers(1, 40), st.sampled_from([None, 1]), st.booleans())
def test_every_cut_gives_the_same_lines(requests: list[Any], piece: int, indent: int | None, first: bool) -> None:
    items = [{"resourceId": "r", "request": one} for one in requests]
    options = {"type": "ASYNC", "capacity": [{"period": "MINUTE", "requests": 1}]}
    body = json.dumps({**options, "items": items} if first else {"items": items, **options}, indent=indent).encode()
    lines, fields = inline(body, piece)
    assert fields == options
    whole = b"".join(lines)
    for place, (line, request) in enumerate(zip(lines, requests, strict=True)):
        read = json.loads(line)
        wanted = {name: value for name, value in request.items() if name not in ("model", "stream", "vmx")}
        assert read["body"] == {"model": "r", **wanted}
        name = read_name(read["custom_id"])
        assert name is not None
        assert name.place == place
        assert json.loads(whole[name.at : name.at + name.size_bytes]) == read["body"], "the name says where it lies"


@pytest.mark.parametrize(
    ("request_", "endpoint"),
    [
        (SAYS_HI, CHAT),
        ({"messages": [{"role": "system", "content": "s"}], "max_tokens": 5}, CHAT),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]}, CHAT),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, CHAT),
        ({"messages": "wrong"}, CHAT),
        ({}, CHAT),
        ({"input": "x"}, RESPONSES),
        ({"input": [], "instructions": "y"}, RESPONSES),
        ({**SAYS_HI, "system": "s"}, MESSAGES),
        ({**SAYS_HI, "stop_sequences": ["x"]}, MESSAGES),
        ({**SAYS_HI, "anthropic_version": "2023-06-01"}, MESSAGES),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a"}]}]}, MESSAGES),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, MESSAGES),
    ],
)
def test_the_shape_of_a_request_says_where_it_goes(request_: dict[str, Any], endpoint: str) -> None:
    [line], _ = inline(json.dumps({"items": [{"resourceId": "r", "request": request_}]}).encode())
    assert json.loads(line)["url"] == endpoint


def test_an_endpoint_that_is_given_wins_and_the_resource_names_the_model() -> None:
    request = {"input": "x", "model": "gpt-9", "stream": True, "vmx": {"a": 1}, "n": 2}
    item = {"resourceId": "r", "endpoint": "/v1/embeddings", "request": request}
    [line], _ = inline(json.dumps({"items": [item]}).encode())
    assert json.loads(line)["url"] == "/v1/embeddings"
    assert json.loads(line)["body"] == {"model": "r", "input": "x", "n": 2}


def test_a_long_field_may_come_in_single_bytes() -> None:
    for field in ("0." + "1" * 60_000, '"' + "a" * 60_000 + '"', "[0." + "1" * 60_000 + "]"):
        body = f'{{"capacity":{field},"items":[{ITEM}]}}'
        assert inline(body.encode(), 1) == inline(body.encode())


ITEM = '{"resourceId":"r","request":{}}'


@pytest.mark.parametrize("piece_bytes", [1, 65_536])
@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        ("", "invalid_parameter", "items"),
        ("null", "invalid_parameter", "items"),
        ("[]", "invalid_parameter", "items"),
        ("{}", "invalid_parameter", "items"),
        ('{"type":"ASYNC"}', "invalid_parameter", "items"),
        ('{"items":[]}', "invalid_parameter", "items"),
        ('{"items":{}}', "invalid_parameter", "items"),
        ('{"items":null}', "invalid_parameter", "items"),
        ('{"items":[1]}', "invalid_parameter", "items.0"),
        ('{"items":[' + ITEM + ",[]]}", "invalid_parameter", "items.1"),
        ('{"items":[' + ITEM + '],"items":[' + ITEM + "]}", "invalid_parameter", "items"),
        ('{"type":1,"type":2,"items":[' + ITEM + "]}", "invalid_parameter", "type"),
        ('{"items":[' + ITEM + '],"capacitiy":[]}', "unknown_parameter", "capacitiy"),
        ('{"items":[' + ITEM + '],"type":"' + "x" * 70_000 + '"}', "invalid_parameter", "type"),
        ('{"items":[' + ITEM, "invalid_json", None),
        ('{"items":[' + ITEM + "]", "invalid_json", None),
        ('{"items":[' + ITEM + "]}}", "invalid_json", None),
        ('{"items":[' + ITEM + ']"x"}', "invalid_json", None),
        ('{"items":[{"resourceId":"r","request":{]}', "invalid_json", None),
        ('{"items":[{"resourceId":"r","request":{"a":NaN}}]}', "invalid_json", None),
        ('{"items":[{"resourceId":"r","request":' + "[" * 100_000 + "]" * 100_000 + "}]}", "invalid_json", None),
        ('{"items":[{"request":{}}]}', "invalid_parameter", "items.0"),
        ('{"items":[{"resourceId":"r"}]}', "invalid_parameter", "items.0"),
        ('{"items":[{"resourceId":1,"request":{}}]}', "invalid_parameter", "items.0"),
        ('{"items":[{"resourceId":"r","request":{},"url":"/v1/files"}]}', "invalid_parameter", "items.0"),
        ('{"items":[{"resourceId":"r","request":[]}]}', "invalid_parameter", "items.0.request"),
        ('{"items":[{"resourceId":"r","request":null}]}', "invalid_parameter", "items.0.request"),
        ('{"items":[{"resourceId":"r","request":{},"endpoint":"/v1/files"}]}', "invalid_parameter", "items.0.endpoint"),
    ],
)
def test_bad_bodies(body: str, code: str, param: str | None, piece_bytes: int) -> None:
    with pytest.raises(ApiProblem) as refused:
        inline(body.encode(), piece_bytes)
    assert (refused.value.status, refused.value.code, refused.value.param) == (400, code, param)


def test_bytes_that_are_no_text_are_refused() -> None:
    with pytest.raises(ApiProblem) as refused:
        inline(b'{"items":[{"resourceId":"r","request":{"a":"\xff"}}]}')
    assert refused.value.code == "invalid_json"


def test_too_many_items() -> None:
    body = '{"items":[' + ",".join([ITEM] * 3) + "]}"
    assert len(inline(body.encode(), count_max=3)[0]) == 3
    with pytest.raises(ApiProblem, match="more than 2 items"):
        inline(body.encode(), count_max=2)
