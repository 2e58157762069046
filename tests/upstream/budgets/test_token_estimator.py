"""What calls are charged before they are sent, where the texts do not stand under `messages`, `input` or `prompt`."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tidegate.core.audio_file import AudioFile
from tidegate.core.deployments import Estimate
from tidegate.core.input.lines import LineRules, check_line
from tidegate.core.nouns import Call
from tidegate.upstream.budgets.token_estimator import TokenEstimator

WORDS = "sea " * 1_000


@pytest.mark.parametrize(
    ("endpoint", "texts"),
    [
        ("/v1/score", {"text_1": WORDS, "text_2": [WORDS, WORDS]}),
        ("/v1/rerank", {"query": WORDS, "documents": [WORDS, WORDS]}),
    ],
)
def test_both_sides_of_a_comparison_count(endpoint: str, texts: dict[str, Any]) -> None:
    body = json.dumps({"model": "m", **texts}).encode()
    line = b'{"custom_id":"a","url":"%b","body":%b}' % (endpoint.encode(), body)
    read = check_line(line, LineRules(endpoint))
    assert len(read.fixed) + read.prompt_size >= 3 * len(WORDS)
    assert read.output_tokens == 0
    call = Call("batch_x", 0, endpoint, "m", body, "k", 0)
    assert 3_000 <= TokenEstimator().tokens(call, Estimate.LIKELY) < 3_100
    assert TokenEstimator().tokens(call, Estimate.BOUND) == len(body)


def test_a_file_counts_by_its_size_and_is_no_text() -> None:
    file = AudioFile("a.wav", "audio/wav", bytes(1_000_000))
    call = Call("batch_x", 0, "/v1/audio/transcriptions", "m", b'{"max_tokens":100}', "k", 0, audio=file)
    assert 1_000 <= TokenEstimator().tokens(call, Estimate.LIKELY) <= 1_200
    assert TokenEstimator().tokens(call, Estimate.BOUND) == 1_000_000 + len(call.body) + 100
