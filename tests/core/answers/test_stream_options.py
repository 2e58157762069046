"""The usage that a stream is asked for, and the chunk that is taken out again."""

from __future__ import annotations

import pytest

from tidegate.core.answers.stream_options import UsageChunkFilter

TEXT = b'data: {"choices":[{"index":0,"delta":{"content":"hi"}}],"usage":null}\n\n'
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":1}}\n\n'
BESIDE_TEXT = b'data: {"choices":[{"index":0,"delta":{}}],"usage":{"prompt_tokens":1}}\n\n'
BESIDE_ERROR = b'data: {"choices":[],"usage":{"prompt_tokens":1},"error":{"message":"It broke."}}\n\n'
DONE = b"data: [DONE]\n\n"


@pytest.mark.parametrize("size", [1, 7, 1_000])
def test_only_what_says_nothing_but_the_usage_is_taken_out(size: int) -> None:
    stream = TEXT + BESIDE_TEXT + USAGE + BESIDE_ERROR + DONE
    passed = UsageChunkFilter()
    pieces = [passed.feed(stream[at : at + size]) for at in range(0, len(stream), size)]
    assert b"".join(pieces) + passed.end_stream() == TEXT + BESIDE_TEXT + BESIDE_ERROR + DONE
