"""What counts as an answer, what it cost, and that its bytes go on untouched."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.core.answers import answer
from tidegate.core.nouns import Usage

CHAT = "/v1/chat/completions"


def test_an_answer_goes_on_byte_for_byte() -> None:
    body = '{ "choices" : [ {"message":{"content":"Zürich \\u00e9 1.50e+3"}} ],  "x": 1.500 }'.encode()
    assert answer.read(CHAT, body) == (body, Usage())


@pytest.mark.parametrize("end", ["\n", "\r", "\r\n"])
def test_a_pretty_printed_answer_becomes_one_line_with_the_same_meaning(end: str) -> None:
    value = {"choices": [{"message": {"content": "two\nlines\r\n and a \\n"}}], "usage": {"prompt_tokens": 3}}
    body = (json.dumps(value, indent=2) + "\n").replace("\n", end).encode()
    line, usage = answer.read(CHAT, body)
    assert b"\n" not in line
    assert b"\r" not in line
    assert json.loads(line) == value
    assert usage.input_tokens == 3


@pytest.mark.parametrize(
    ("endpoint", "body", "usage"),
    [
        (
            CHAT,
            b'{"choices":[{}],"usage":{"prompt_tokens":10,"completion_tokens":5,"total_tokens":15,'
            b'"prompt_tokens_details":{"cached_tokens":4,"audio_tokens":0},"completion_tokens_details":{"reasoning_tokens":2}}}',
            Usage(10, 4, 5, 2),
        ),
        (
            "/v1/completions",
            b'{"choices":[{"text":"x"}],"usage":{"prompt_tokens":1,"completion_tokens":2}}',
            Usage(1, 0, 2),
        ),
        (
            "/v1/responses",
            b'{"output":[],"error":null,"usage":{"input_tokens":7,"input_tokens_details":{"cached_tokens":6},'
            b'"output_tokens":3,"output_tokens_details":{"reasoning_tokens":1}}}',
            Usage(7, 6, 3, 1),
        ),
        (
            CHAT,
            b'{"choices":[{}],"usage":{"prompt_tokens":32,"completion_tokens":9,"total_tokens":135,'
            b'"completion_tokens_details":{"reasoning_tokens":94}}}',
            Usage(32, 0, 103, 94),
        ),
        (
            CHAT,
            b'{"choices":[{}],"usage":{"prompt_tokens":32,"completion_tokens":103,"total_tokens":135,'
            b'"completion_tokens_details":{"reasoning_tokens":94}}}',
            Usage(32, 0, 103, 94),
        ),
        (
            "/v1/responses",
            b'{"output":[],"usage":{"input_tokens":32,"output_tokens":9,"total_tokens":135,'
            b'"output_tokens_details":{"reasoning_tokens":94}}}',
            Usage(32, 0, 103, 94),
        ),
        ("/v1/embeddings", b'{"data":[{"embedding":[0.1]}],"usage":{"prompt_tokens":9,"total_tokens":9}}', Usage(9)),
        ("/v1/moderations", b'{"results":[{"flagged":false}]}', Usage()),
        (
            "/v1/messages",
            b'{"content":[{"type":"text","text":"x"}],"usage":{"input_tokens":2,"cache_read_input_tokens":5,'
            b'"cache_creation_input_tokens":1,"output_tokens":4}}',
            Usage(8, 5, 4),
        ),
        (
            "/v1/messages",
            b'{"content":[{"type":"text","text":"x"}],"usage":{"input_tokens":2,"output_tokens":4,"iterations":['
            b'{"type":"compaction","input_tokens":9,"cache_read_input_tokens":5,"cache_creation_input_tokens":1,"output_tokens":3},'
            b'{"type":"message","input_tokens":2,"output_tokens":4},{"type":"fallback_message","input_tokens":2,"output_tokens":1}]}}',
            Usage(17, 5, 7),
        ),
        ("/v1/rerank", b'{"anything":1}', Usage()),
        (CHAT, b'{"choices":[{}],"usage":null}', Usage()),
        (CHAT, b'{"choices":[{}],"usage":{"prompt_tokens":null,"prompt_tokens_details":null}}', Usage()),
    ],
)
def test_usage_is_read_in_every_dialect(endpoint: str, body: bytes, usage: Usage) -> None:
    assert answer.read(endpoint, body) == (body, usage)


@pytest.mark.parametrize(
    "numbers",
    [b'"lots"', b"-1", b"1.5", b"1" + b"0" * 40, b"1e999", b"true", b"[]", b'{"prompt_tokens":"7"}'],
)
def test_odd_numbers_say_nothing_and_never_cost_the_answer(numbers: bytes) -> None:
    for body in (
        b'{"choices":[{}],"usage":{"prompt_tokens":%s}}' % numbers,
        b'{"choices":[{}],"usage":%s}' % numbers,
    ):
        assert answer.read(CHAT, body) == (body, Usage())
    beside = b'{"choices":[{}],"usage":{"prompt_tokens":10,"completion_tokens":%s}}' % numbers
    assert answer.read(CHAT, beside) == (beside, Usage(10))
    within = b'{"choices":[{}],"usage":{"prompt_tokens":10,"completion_tokens":5,"prompt_tokens_details":%s}}' % numbers
    assert answer.read(CHAT, within) == (within, Usage(10, 0, 5))


def test_a_whole_number_that_is_written_as_a_float_is_one() -> None:
    body = b'{"choices":[{}],"usage":{"prompt_tokens":10.0,"completion_tokens":5e0,"prompt_tokens_details":{"cached_tokens":4.0}}}'
    assert answer.read(CHAT, body) == (body, Usage(10, 4, 5))


def test_thinking_tokens_are_those_of_reasoning() -> None:
    body = b'{"content":[],"usage":{"input_tokens":3,"output_tokens":9,"output_tokens_details":{"thinking_tokens":7}}}'
    assert answer.read("/v1/messages", body) == (body, Usage(3, 0, 9, 7))


def test_more_cached_than_prompt_tokens_are_not_believed() -> None:
    body = b'{"choices":[{}],"usage":{"prompt_tokens":3,"prompt_tokens_details":{"cached_tokens":9}}}'
    assert answer.read(CHAT, body)[1] == Usage(3, 3)


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"", "empty"),
        (b" \n", "empty"),
        (b"<html><body>502</body></html>", "HTML"),
        (b'data: {"choices":[]}\n\ndata: [DONE]\n\n', "a stream of events, which was not asked for"),
        (b"null", "shape"),
        (b"[]", "shape"),
        (b'"text"', "shape"),
        (b"17", "shape"),
        (b"{}", "choices"),
        (b'{"choices":null}', "choices"),
        (b'{"choices":[]}', "choices"),
        (b'{"choices":{}}', "choices"),
        (b'{"choices":[null]}', "choices"),
        (b'{"data":[{}]}', "choices"),
        (b'{"error":{"message":"overloaded"}}', "error object"),
        (b'{"error":{"message":"overloaded"},"choices":[{}]}', "error object"),
        (b'{"choices":[{"logprob":NaN}]}', "JSON"),
        (b'{"choices":[{"logprob":Infinity}]}', "JSON"),
        (b'{"choices":[{}]}{"choices":[{}]}', "JSON"),
        (b'{"choices":[{}]', "JSON"),
        (b'{"usage":5,"choices":[{}]', "JSON"),
        (b'{"usage":5,"choices":[{}],"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "deep"),
        (b'{"choices":[{"text":"\xff"}]}', "UTF-8"),
        (b'{"choices":[{"text":"\xed\xa0\x80"}]}', "UTF-8"),
        (b'\xef\xbb\xbf{"choices":[{}]}', "JSON"),
        (b'{"choices":[{"text":"a\nb"}]}', "JSON"),
        (b'{"choices":[{}],"choices":[{"text":"other"}]}', "twice"),
        (b'{"usage":{"prompt_tokens":1},"choices":[{}],"usage":{"prompt_tokens":900}}', "twice"),
        (b'{"choices":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "shape"),
        (b'{"choices":[{}],"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "deep"),
        (b'{"choices":[{}],"x":' + b"[" * 900 + b"]" * 900 + b"}", "deep"),
        (b'{"choices":[{}],"x":' + b'{"y":' * 900 + b"1" + b"}" * 900 + b"}", "deep"),
        (b'{"choices":[{}],"x":' + b"7" * 4_301 + b"}", "digits"),
        (b'{"choices":[{}],"x":[-' + b"7" * 100_000 + b"]}", "digits"),
        (b'{"usage":5,"choices":[{}],"x":' + b"7" * 5_000 + b"}", "digits"),
    ],
)
def test_what_is_not_an_answer_is_refused_and_says_why(body: bytes, why: str) -> None:
    with pytest.raises(answer.NotAnAnswer, match=why) as found:
        answer.read(CHAT, body)
    is_the_models = type(found.value) is answer.Unreadable
    assert is_the_models == (why in ("deep", "digits")), "what a model may write is no fault of its server"


@pytest.mark.parametrize(
    "value",
    [
        b"7" * 4_300,
        b"0." + b"7" * 9_000,
        b'"' + b"7" * 9_000 + b'"',
        b"[" + b"1234567890123456," * 9_000 + b"0]",
        b"[" * 256 + b"]" * 256,
        b"[" + b'{"x":[{}]},' * 9_000 + b"0]",
        b'"' + b"[{" * 9_000 + b'"',
    ],
)
def test_what_usual_readers_take_is_an_answer(value: bytes) -> None:
    body = b'{"choices":[{}],"x":%s}' % value
    assert answer.read(CHAT, body) == (body, Usage())
    json.loads(body)


def test_the_same_name_deeper_down_is_not_a_double() -> None:
    body = b'{"choices":[{"choices":1,"usage":{}}],"usage":{"usage":{},"prompt_tokens":2}}'
    assert answer.read(CHAT, body) == (body, Usage(2))


@given(st.binary(max_size=200))
def test_any_bytes_become_one_line_of_json(body: bytes) -> None:
    line = answer.one_line(body, 64)
    assert b"\n" not in line
    assert b"\r" not in line
    if body:
        json.loads(line)


def test_json_that_fits_is_kept_and_what_is_too_long_is_cut() -> None:
    assert answer.one_line(b'{\n "error": 1}\n', 100) == b'{  "error": 1}'
    assert answer.one_line(b"<html>", 100) == b'"<html>"'
    assert answer.one_line(b"[1, 2]", 6) == b"[1, 2]"
    assert answer.one_line(b"[1, 2]", 5) == b'"[1, 2"'
    assert answer.one_line(b"", 5) == b""
    assert answer.one_line(b"x" * 200, 100) == b'"' + b"x" * 100 + b'"'


leaves = st.none() | st.booleans() | st.integers() | st.text(st.characters(exclude_categories=["Cs"]))


@given(st.recursive(leaves, lambda inner: st.lists(inner) | st.dictionaries(st.text("abc"), inner)))
def test_an_answer_of_an_unknown_endpoint_is_any_object(value: object) -> None:
    body = json.dumps({"value": value}).encode()
    assert answer.read("/v1/unknown", body)[0] == body
