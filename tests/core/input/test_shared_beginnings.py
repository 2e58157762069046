"""Which server a request of a batch sticks to: by the branch of the prefix tree that it stands on, in every slice the same."""

from __future__ import annotations

import json
import random

import pytest

from tidegate.core.input.prefix_tree import shared_beginnings
from tidegate.core.nouns import Call
from tidegate.simulate.engine.model import EngineLimits, ModelledEngine, ModelledRequest
from tidegate.simulate.engine.requests import chat_request

SLICE_ITEMS = 16
IN_FLIGHT = 16


def bodies(families: int, each: int, shared: int, size: int) -> list[bytes]:
    """Requests in work order: each family has a beginning of its own."""
    chance = random.Random(3)

    def text(count: int) -> str:
        return "".join(chance.choices("abcdefghij ", k=count))

    starts = [text(shared) for _ in range(families)]
    prompts = [start + text(size - shared) for start in starts for _ in range(each)]
    return [json.dumps({"model": "m", "messages": [{"role": "user", "content": one}]}).encode() for one in prompts]


def groups_of(some: list[bytes]) -> list[str]:
    """The word that each call sticks by, slice by slice as workers read them."""
    found = []
    for at in range(0, len(some), SLICE_ITEMS):
        part = some[at : at + SLICE_ITEMS]
        found += [
            Call(
                "j", 1, "/v1/chat/completions", "m", body, "k", 0.0, prefix_salt=b"s", prefix_bytes=shared
            ).prefix_group
            for body, shared in zip(part, shared_beginnings(part), strict=True)
        ]
    return found


@pytest.mark.parametrize("size", [600, 3_000])
def test_one_branch_has_one_group_in_every_slice(size: int) -> None:
    found = groups_of(bodies(5, 64, size * 3 // 4, size))
    words = [found[at : at + 64] for at in range(0, len(found), 64)]
    assert [len(set(branch)) for branch in words] == [1] * 5
    assert len(set(found)) == 5


def test_requests_without_a_shared_beginning_have_groups_of_their_own() -> None:
    assert shared_beginnings([]) == []
    assert shared_beginnings([b"{}"]) == [0]
    found = groups_of(bodies(64, 1, 0, 600))
    assert len(set(found)) == 64


def reused(prompts: list[bytes]) -> int:
    """The prompt tokens that an engine finds cached."""
    engine = ModelledEngine(EngineLimits(max_num_seqs=IN_FLIGHT, kv_blocks=512))
    waiting = iter(prompts)
    for prompt, _ in zip(waiting, range(IN_FLIGHT), strict=False):
        engine.submit(ModelledRequest(prompt, 8))
    while step := engine.step():
        for event in step.events:
            if event.finished and (prompt := next(waiting, b"")):
                engine.submit(ModelledRequest(prompt, 8))
    return engine.prefix_hit_tokens


def test_two_servers_reuse_about_as_much_as_one() -> None:
    """600 B prompts, of which 450 are shared: with words by the first 1,024 bytes each branch is spread over both servers."""
    some = bodies(60, 12, 450, 600)
    prompts = [chat_request(body).prompts[0] for body in some]
    alone = reused(prompts)
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    for word, prompt in zip(groups_of(some), prompts, strict=True):
        parts[int(word, 16) % 2].append(prompt)
    assert sum(map(reused, parts)) >= 0.97 * alone
    assert min(map(len, parts)) >= len(prompts) // 4, "both have work"


def test_neighbours_that_share_exactly_half_of_the_shorter_one_are_kin() -> None:
    half = b"a" * 64
    assert shared_beginnings([half + b"b" * 64, half + b"c" * 64]) == [64, 64]
    assert shared_beginnings([half + b"b" * 65, half + b"c" * 65]) == [0, 0]
