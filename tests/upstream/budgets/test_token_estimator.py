"""What calls are charged before they are sent, where the texts do not stand under `messages`, `input` or `prompt`."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from msgspec.structs import replace

from tidegate.core.audio_file import AudioFile
from tidegate.core.budgets.budget import TOKENS_MAX
from tidegate.core.deployments import Deployment, Estimate
from tidegate.core.errors import Unbounded
from tidegate.core.input.lines import LineRules, check_line
from tidegate.core.nouns import Call, Usage
from tidegate.core.usage.prices import CostRange, Price
from tidegate.core.usage.prompt_bounds import IMAGE_TOKENS, IMAGE_TOKENS_MAX
from tidegate.upstream.budgets import token_estimator
from tidegate.upstream.budgets.token_estimator import TokenEstimator

WORDS = "sea " * 1_000


@pytest.mark.parametrize(
    ("endpoint", "texts"),
    [
        ("/v1/score", {"text_1": WORDS, "text_2": [WORDS, WORDS]}),
        ("/v1/score", {"queries": WORDS, "documents": [WORDS, WORDS]}),
        ("/v1/score", {"queries": WORDS, "items": [WORDS, WORDS]}),
        ("/v1/score", {"data_1": WORDS, "data_2": [WORDS, WORDS]}),
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
    # The first text is read with each of the two others.
    assert 4_000 <= TokenEstimator().tokens(call, Estimate.LIKELY) < 4_200
    assert 4 * len(WORDS) <= TokenEstimator().tokens(call, Estimate.BOUND) <= 2 * len(body) - 2 * len(WORDS)


def test_a_file_counts_by_its_size_and_is_no_text() -> None:
    file = AudioFile("a.wav", "audio/wav", bytes(1_000_000))
    call = Call("batch_x", 0, "/v1/audio/transcriptions", "m", b'{"max_completion_tokens":100}', "k", 0, audio=file)
    assert 1_000 <= TokenEstimator().tokens(call, Estimate.LIKELY) <= 1_200
    assert TokenEstimator().tokens(call, Estimate.BOUND) == 1_000_000 + len(call.body) + 100


def test_an_image_may_have_more_tokens_than_bytes() -> None:
    """A plain picture is a few hundred bytes, and servers count thousands of tokens for it."""
    url = "data:image/png;base64," + "A" * 400
    part = {"type": "image_url", "image_url": {"url": url}}
    chat = {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": [part, part]}]}
    call = Call("", 0, "/v1/chat/completions", "m", json.dumps(chat).encode(), "k", 0)
    estimator = TokenEstimator()
    most = estimator.most(call, PRICED)
    assert most.input_tokens == len(call.body) + 2 * IMAGE_TOKENS_MAX
    assert 2 * IMAGE_TOKENS < estimator.likely(call, PRICED, most).input_tokens < len(call.body) + 2 * IMAGE_TOKENS
    assert estimator.tokens(call, Estimate.BOUND) == most.input_tokens + 1
    estimator.learn_prompt(call, PRICED, Usage(len(call.body)))
    assert estimator.likely(call, PRICED, most) == TokenEstimator().likely(call, PRICED, most), "it was no text"


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


PRICED = Deployment("one", "http://one/v1", price=Price.of("1", output="2", batch_factor="0.5"))
LETTERS = b"a" * 280 + b"1" * 20


def asks(body: bytes = LETTERS, model: str = "m", **more: Any) -> Call:
    return Call("batch_x", 0, "/v1/embeddings", model, body, "k", 0, **more)


def likely(estimator: TokenEstimator, call: Call) -> int:
    return estimator.likely(call, PRICED, Usage(10**9)).input_tokens


def test_money_is_set_aside_for_what_is_likely_and_for_the_most() -> None:
    body = b'{"max_tokens":100,"prompt":"' + b"a" * 972 + b'"}'
    call = Call("batch_x", 0, "/v1/completions", "m", body, "k", 0)
    others = len(body) - len(b"maxtokensprompt") - 972
    tokens = math.ceil((len(body) - others) * 0.5 + others * 0.8)
    estimator = TokenEstimator()
    cost = CostRange(tokens * 1_000 + 100 * 2_000, len(body) * 1_000 + 100 * 2_000)
    assert estimator.nano(call, PRICED, batch=False) == cost
    assert estimator.nano(call, PRICED, batch=True) == CostRange(cost.likely // 2, cost.most // 2)
    assert estimator.nano_unanswered(call, PRICED) == len(body) * 500
    free = Deployment("free", "http://free/v1")
    assert (estimator.nano(call, free, batch=False), estimator.nano_unanswered(call, free)) == (CostRange(), 0)
    dear = Deployment("dear", "http://dear/v1", price=Price(input_nano=10**20))
    assert estimator.nano(call, dear, batch=False) == CostRange(TOKENS_MAX, TOKENS_MAX)


def test_an_answer_must_be_bounded_only_where_its_tokens_cost_something() -> None:
    body, estimator = b'{"model":"m","input":"sea"}', TokenEstimator()
    chat = Call("batch_x", 0, "/v1/chat/completions", "m", body, "k", 0)
    with pytest.raises(Unbounded, match="set its max_tokens"):
        estimator.most(chat, PRICED)
    bounded = replace(PRICED, output_tokens_max=70)
    assert estimator.most(chat, bounded) == Usage(len(body), 0, 70)
    for free in (Deployment("one", "http://one/v1"), replace(PRICED, price=Price.of("1", output="0"))):
        assert estimator.most(chat, free) == Usage(len(body))
    silent = Call("batch_x", 0, "/v1/embeddings", "m", body, "k", 0)
    assert estimator.most(silent, PRICED) == estimator.most(silent, bounded) == Usage(len(body))


def test_what_a_deployment_counts_in_prompts_is_learned_from_texts_alone() -> None:
    estimator = TokenEstimator()
    file = AudioFile("a.wav", "audio/wav", bytes(1_500))
    assert (likely(estimator, asks()), likely(estimator, asks(audio=file))) == (156, 158)
    for call, counted in ((asks(b"a" * 255), 9), (asks(), 301), (asks(audio=file), 9)):
        estimator.learn_prompt(call, PRICED, Usage(counted))
    assert likely(estimator, asks()) == 156, "too short, fetched, or no text"
    for counted, expected in ((1, 49), (78, 98), (39, 98), (300, 375)):
        estimator.learn_prompt(asks(), PRICED, Usage(counted))
        assert likely(estimator, asks()) == expected, "the most that it ever counted, and a quarter more"
    assert likely(estimator, asks(b"1" * 300)) == 240, "digits are counted apart from words"
    estimator.learn_prompt(asks(b"a1" * 128), PRICED, Usage(256))
    assert likely(estimator, asks(b"1" * 300)) > 300, "half of each is no text of words"


def test_few_models_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_estimator, "LEARNED_MAX", 2)
    estimator = TokenEstimator()

    def known() -> list[bool]:
        chats = [Call("batch_x", 0, "/v1/chat/completions", model, b"", "k", 0) for model in "abc"]
        answers = [estimator.tokens(chat, Estimate.LIKELY) == 7 for chat in chats]
        assert answers == [likely(estimator, asks(model=model)) != 156 for model in "abc"]
        return answers

    def learn(model: str) -> None:
        estimator.learn(model, Usage(0, 0, 7))
        estimator.learn_prompt(asks(model=model), PRICED, Usage(78))

    for model in "aba":
        learn(model)
    assert known() == [True, True, False]
    learn("c")
    assert known() == [False, False, True]


def test_a_photo_is_charged_as_an_image_and_not_by_its_letters() -> None:
    """A megabyte of Base64 has some thousand tokens: limits and budgets that fit many such calls must not refuse one."""
    photo = "data:image/jpeg;base64," + "QUJD" * 250_000
    part = {"type": "image_url", "image_url": {"url": photo}}
    message = {"role": "user", "content": [{"type": "text", "text": WORDS}, part]}
    body = json.dumps({"model": "m", "max_tokens": 100, "messages": [message]}).encode()
    call = Call("batch_x", 0, "/v1/chat/completions", "m", body, "k", 0)
    estimator, text_bytes = TokenEstimator(), len(body) - 1_000_000
    assert text_bytes < 5_000
    assert estimator.tokens(call, Estimate.LIKELY) == pytest.approx(text_bytes / 4 + 2_500 + 100, abs=10)
    assert estimator.tokens(call, Estimate.BOUND) == text_bytes + IMAGE_TOKENS_MAX + 100
    assert estimator.most(call, PRICED) == Usage(text_bytes + IMAGE_TOKENS_MAX, 0, 100)
    likely = estimator.likely(call, PRICED, estimator.most(call, PRICED))
    assert likely.input_tokens == pytest.approx(0.5 * text_bytes + IMAGE_TOKENS, rel=0.1)
