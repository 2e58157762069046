"""Usage is heard in streams of every dialect, however their bytes are cut, and nonsense is passed over."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.core.nouns import Usage
from tidegate.core.stream_usage import UsageEar

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
def test_usage_is_heard_however_the_bytes_are_cut(stream: bytes, data: st.DataObject) -> None:
    ear = UsageEar()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        ear.hear(stream[start:end])
    assert ear.usage == Usage(9, 5, 4, 0)
    assert ear.event_count == stream.count(b"data:")


@given(st.lists(st.binary(max_size=60)))
def test_nothing_that_passes_breaks_it(pieces: list[bytes]) -> None:
    ear = UsageEar()
    for piece in pieces:
        ear.hear(b'data: {"usage":' + piece + b"\n")
    ear.hear(CHAT)
    assert ear.usage is not None


def test_a_line_without_end_is_not_kept() -> None:
    ear = UsageEar()
    for _ in range(64):
        ear.hear(b"x" * 65_536)
    assert len(ear._rest) <= 1 << 20
    ear.hear(b"\n" + CHAT)
    assert ear.usage == Usage(9, 5, 4, 0)
