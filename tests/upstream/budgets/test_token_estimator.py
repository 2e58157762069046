"""What calls are charged before they are sent, where the texts do not stand under `messages`, `input` or `prompt`."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tidegate.core.audio_file import AudioFile
from tidegate.core.deployments import Deployment, Estimate
from tidegate.core.input.lines import LineRules, check_line
from tidegate.core.nouns import Call, Usage
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


def test_what_answers_take_is_learned_slowly_and_in_the_right_direction() -> None:
    call = Call("batch_x", 0, "/v1/chat/completions", "m", b'{"model":"m"}', "k", 0)
    estimator, charged = TokenEstimator(), []
    for output_tokens in (1_000, 2_000, 0, 500):
        estimator.learn("m", Usage(1, 0, output_tokens))
        charged.append(estimator.tokens(call, Estimate.LIKELY))
    first, after_longer, after_none, after_shorter = charged
    assert first < after_longer < first + 100
    assert after_none == after_longer
    assert after_longer - 100 < after_shorter < after_longer


def test_no_token_of_a_prompt_is_taken_for_cached_before_an_answer_says_so() -> None:
    """A cached token costs less: an estimate that counts on one keeps too little money back."""
    call = Call("batch_x", 0, "/v1/chat/completions", "m", json.dumps({"model": "m", "prompt": WORDS}).encode(), "k", 0)
    most = Usage(10, 0, 70)
    assert TokenEstimator().likely(call, Deployment("one", "http://one/v1"), most) == most, "at most what it can use"
