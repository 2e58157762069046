"""Several conversations in one call to the simulated engine: each has the answer and the usage of a call of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.simulate.engine.wire import Address
from tidegate.simulate.engine import EngineOptions

Start = Callable[[EngineOptions], Address]
PATH = "/v1/chat/completions/batch"


def conversation(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


@pytest.mark.parametrize("mode", ["instant", "modelled"])
def test_each_conversation_is_answered_as_by_itself(start: Start, mode: Any) -> None:
    address = start(EngineOptions(port=0, mode=mode))
    texts = ["one", "two of them", "three of them, in all"]
    request = {"model": "m", "max_tokens": 5}
    together = address.call(PATH, {**request, "messages": [conversation(text) for text in texts]}).json
    assert [result["index"] for result in together["results"]] == [0, 1, 2]
    bodies = [result["body"] for result in together["results"]]
    assert len({body["id"] for body in bodies}) == 3
    for text, body in zip(texts, bodies, strict=True):
        alone = address.call("/v1/chat/completions", {**request, "messages": conversation(text)}).json
        assert (body["choices"], body["usage"]["total_tokens"]) == (alone["choices"], alone["usage"]["total_tokens"])
    total = sum(body["usage"]["total_tokens"] for body in bodies)
    assert together["usage"]["total_tokens"] == total


@pytest.mark.parametrize(
    "wrong",
    [
        {"messages": []},
        {"messages": [[]]},
        {"messages": conversation("not a list of lists")},
        {"messages": [conversation("a")], "stream": True},
        {"messages": [conversation("a")], "n": 2},
    ],
)
def test_what_cannot_be_answered_so_is_refused(start: Start, wrong: dict[str, Any]) -> None:
    address = start(EngineOptions(port=0))
    assert address.call(PATH, {"model": "m", **wrong}).status == 400
