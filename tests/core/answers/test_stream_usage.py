"""Usage is read from streams of every dialect, however their bytes are cut, and nonsense is passed over."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.core.answers.stream_options import UsageChunkFilter, asking_for_usage, without_asking
from tidegate.core.answers.stream_usage import KEPT_BYTES_MAX, UsageReader
from tidegate.core.nouns import Usage

CHAT = (
    b'data: {"choices":[{"delta":{"content":"say \\"usage\\""}}],"usage":null}\n\n'
    b'data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":4,"prompt_tokens_details":{"cached_tokens":5}}}\n\n'
    b"data: [DONE]\n\n"
)
RESPONSES = (
    b'event: response.created\ndata: {"type":"response.created","response":{"usage":null}}\n\n'
    b'event: response.completed\ndata: {"type":"response.completed","response":{"usage":{"input_tokens":9,"output_tokens":4,'
    b'"input_tokens_details":{"cached_tokens":5}}}}\n\n'
)
MESSAGES = (
    b'event: message_start\ndata: {"type":"message_start","message":{"usage":{"input_tokens":4,"cache_read_input_tokens":5,'
    b'"output_tokens":1}}}\n\nevent: message_delta\ndata: {"type":"message_delta","delta":{},"usage":{"output_tokens":4}}\n\n'
)


@pytest.mark.parametrize("stream", [CHAT, RESPONSES, MESSAGES], ids=["chat", "responses", "messages"])
@given(data=st.data())
def test_usage_is_read_however_the_bytes_are_cut(stream: bytes, data: st.DataObject) -> None:
    reader = UsageReader()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        reader.feed(stream[start:end])
    reader.end_stream()
    assert reader.usage == Usage(9, 5, 4, 0)
    assert reader.uncounted_bytes == 0


def test_compaction_is_counted_beside_the_totals() -> None:
    reader = UsageReader()
    reader.feed(
        MESSAGES.replace(
            b'"usage":{"output_tokens":4}',
            b'"usage":{"input_tokens":4,"cache_read_input_tokens":5,"output_tokens":4,"iterations":['
            b'{"type":"compaction","input_tokens":90,"output_tokens":30},{"type":"message","input_tokens":4,"output_tokens":4}]}',
        )
    )
    reader.end_stream()
    assert (reader.usage, reader.uncounted_bytes) == (Usage(99, 5, 34, 0), 0)


def test_usage_is_read_where_no_space_follows_the_name_of_a_line() -> None:
    """Such lines are as good, says the standard of server-sent events."""
    reader = UsageReader()
    reader.feed(CHAT.replace(b"data: ", b"data:"))
    reader.end_stream()
    assert (reader.usage, reader.uncounted_bytes) == (Usage(9, 5, 4, 0), 0)


@pytest.mark.parametrize("odd", [b"-1", b'"6"', b"6.5", b"true", b"null"])
def test_an_odd_count_in_a_stream_spoils_no_other(odd: bytes) -> None:
    reader = UsageReader()
    reader.feed(CHAT.replace(b'"cached_tokens":5', b'"cached_tokens":%s' % odd))
    reader.end_stream()
    assert (reader.usage, reader.uncounted_bytes) == (Usage(9, 0, 4, 0), 0)
    reader = UsageReader()
    reader.feed(MESSAGES.replace(b'"cache_read_input_tokens":5', b'"cache_read_input_tokens":%s' % odd))
    reader.end_stream()
    assert (reader.usage, reader.uncounted_bytes) == (Usage(4, 0, 4, 0), 0)


@pytest.mark.parametrize("first", [0, 1, 4])
def test_what_the_last_event_of_a_message_counts_is_all_of_its_text(first: int) -> None:
    """An answer of one token has it counted before its text comes, and the last event counts no more."""
    text = b'data: {"type":"content_block_delta","delta":{"type":"text_delta","text":"a long word"}}\n\n'
    start, last = MESSAGES.split(b"event: message_delta")
    reader = UsageReader()
    reader.feed(
        start.replace(b'"output_tokens":1', b'"output_tokens":%d' % first) + text + b"event: message_delta" + last
    )
    reader.end_stream()
    assert (reader.usage, reader.uncounted_bytes) == (Usage(9, 5, 4, 0), 0)


@pytest.mark.parametrize(
    ("event", "text"),
    [
        (b'{"choices":[{"index":0,"delta":{"role":"assistant","content":"abcd"}}]}', 4),
        (b'{"choices":[{"index":0,"delta":{"reasoning_content":"abcd","content":null}}]}', 4),
        (b'{"choices":[{"index":0,"delta":{"reasoning":"ab","refusal":"cd"}}]}', 4),
        (b'{"choices":[{"delta":{"tool_calls":[{"index":0,"id":"x","function":{"name":"ab","arguments":"cd"}}]}}]}', 4),
        (b'{"choices":[{"text":"abcd"},{"text":"ef"}]}', 6),
        ('{"choices":[{"text":"\u00e9\U0001f30a"}]}'.encode(), 6),
        (b'{"choices":[{"text":"abcd"}],"usage":{"prompt_tokens":"nine"}}', 4),
        (b'{"type":"response.output_text.delta","delta":"abcd","item_id":"x"}', 4),
        (b'{"type":"response.output_text.done","text":"abcd"}', 0),
        (b'{"type":"content_block_delta","delta":{"type":"thinking_delta","thinking":"abcd"}}', 4),
        (b'{"type":"content_block_delta","delta":{"type":"input_json_delta","partial_json":"{}"}}', 2),
        (b'{"type":"content_block_delta","delta":{"type":"signature_delta","signature":"abcd"}}', 0),
        (b'{"type":"message_delta","delta":{"stop_reason":"end_turn"}}', 0),
        (b"not json", 8),
        (b"[DONE]", 0),
    ],
)
def test_text_is_counted_in_every_dialect(event: bytes, text: int) -> None:
    reader = UsageReader()
    reader.feed(b": ping\n\nevent: x\r\ndata: " + event)
    reader.end_stream()
    assert reader.uncounted_bytes == text


@pytest.mark.parametrize("is_later", [True, False])
def test_only_text_after_the_last_reported_usage_is_counted(is_later: bool) -> None:
    reader = UsageReader()
    for output in (0, 1, 2):
        reader.feed(
            b'data: {"choices":[{"text":"abcd"}],"usage":{"prompt_tokens":9,"completion_tokens":%d}}\n\n' % output
        )
    if is_later:
        reader.feed(b": " + b"x" * KEPT_BYTES_MAX + b"\n\n")
        assert (reader.usage, reader.uncounted_bytes) == (Usage(9, 0, 2, 0), 0)
    reader.feed(b'data: {"choices":[{"text":"abcd"}],"usage":null}\n\n')
    reader.end_stream()
    assert (reader.usage, reader.uncounted_bytes) == (Usage(9, 0, 2, 0), 4)


def test_a_line_that_is_too_long_counts_with_its_bytes() -> None:
    reader = UsageReader()
    for _ in range(20):
        reader.feed(b"x" * 100_000)
    reader.feed(b"\n" + CHAT.partition(b"\n\n")[0] + b"\n\n")
    reader.end_stream()
    assert reader.uncounted_bytes >= 2_000_000


@given(data=st.data(), ending=st.sampled_from([b"\n\n", b"\r\n\r\n", b"\r\r"]))
def test_only_the_chunk_that_says_usage_is_taken_out_however_the_bytes_are_cut(
    data: st.DataObject, ending: bytes
) -> None:
    extra = b'data: {"choices":[],"usage":{"prompt_tokens":9}}'
    kept = (b'data: {"choices":[{"delta":{"content":"\\"usage\\""}}],"usage":{"a":1}}', b": ping", b"data: [DONE]")
    stream = ending.join((kept[0], kept[1], extra, kept[2], b""))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    sieve = UsageChunkFilter()
    shown = [sieve.feed(stream[start:end]) for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    assert b"".join(shown) + sieve.end_stream() == ending.join((*kept, b""))


@pytest.mark.parametrize(
    ("body", "options"),
    [
        (b'{"model":"m","stream":true}', {"include_usage": True}),
        (b" { } ", {"include_usage": True}),
        (b'{"stream_options":null}', {"include_usage": True}),
        (b'{"stream_options":{"include_usage":false,"a":1}}', {"include_usage": True, "a": 1}),
        (b'{"stream\\u005foptions":{"a":1}}', {"include_usage": True, "a": 1}),
        (b'{"stream_options":{"include_usage":true}}', None),
        (b'{"stream_options":[1]}', None),
    ],
)
def test_a_request_asks_for_usage_once_and_keeps_the_rest(body: bytes, options: dict[str, object] | None) -> None:
    asking = asking_for_usage(body)
    if options is None:
        assert asking is None
        return
    assert asking is not None
    request = json.loads(asking)
    assert request.pop("stream_options") == options
    assert request == {name: value for name, value in json.loads(body).items() if name != "stream_options"}
    plain = without_asking(asking)
    assert plain is not None
    assert json.loads(plain) == request


@given(st.lists(st.binary(max_size=60)))
def test_nothing_that_passes_breaks_it(pieces: list[bytes]) -> None:
    reader = UsageReader()
    for piece in pieces:
        reader.feed(b'data: {"usage":' + piece + b"\n")
    reader.feed(CHAT)
    reader.end_stream()
    assert reader.usage is not None


def test_a_line_without_end_is_not_kept() -> None:
    reader = UsageReader()
    for _ in range(64):
        reader.feed(b"x" * 65_536)
    assert sum(map(len, reader._kept)) <= 2 << 20
    reader.feed(b"\n" + CHAT)
    reader.end_stream()
    assert reader.usage == Usage(9, 5, 4, 0)
