"""How much of an answer its usage leaves out, to be estimated from its text."""

import pytest

from tidegate.core.answers.answer_text import unreported_bytes
from tidegate.core.nouns import Usage

CHAT = "/v1/chat/completions"


@pytest.mark.parametrize("answer", [b'["a text"]', b'"a text"', b"7", b'{"broken', b"\xff"])
def test_an_answer_of_no_known_shape_counts_with_all_its_bytes(answer: bytes) -> None:
    assert unreported_bytes(CHAT, Usage(), answer) == len(answer)
    assert unreported_bytes(CHAT, Usage(output_tokens=1), answer) == 0, "its tokens were reported"
    assert unreported_bytes("/v1/embeddings", Usage(), answer) == 0, "it has no text"
