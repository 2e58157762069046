"""How much of its KV cache an engine reuses when items come in work order, in the input's, and in the best order.

One input needs no order, and five need one: their beginnings are many times what the cache holds, and the input brings none of them
together. They go through the simulated engine's scheduler and cache, with a cache far smaller than the work. The best order is
that of all prompts' bytes; no order can reuse more than the bound, which is every block that occurs more than once.
"""

import json
import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench.machinery import table
from tidegate.core.input.lines import LineRules
from tidegate.simulate.engine.kv_cache import BLOCK_TOKENS, block_hashes
from tidegate.simulate.engine.model import EngineLimits, ModelledEngine, ModelledRequest
from tidegate.simulate.engine.requests import chat_request
from tidegate.stages.ingest.ingest_file import ingest_file

IN_FLIGHT = 32
LIMITS = EngineLimits(max_num_seqs=IN_FLIGHT, kv_blocks=2048)
WORDS = [f"{chr(97 + number % 26)}{number:x}" for number in range(4000)]

Messages = list[dict[str, str]]


def _text(chance: random.Random, size: int) -> str:
    return " ".join(chance.choices(WORDS, k=size // 4))[:size]


def _chat(*texts: str) -> Messages:
    roles = ["system", *["user", "assistant"] * len(texts)]
    return [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]


def one_prompt(count: int, chance: random.Random) -> Iterator[Messages]:
    """One system prompt for all."""
    system = _text(chance, 2000)
    for _ in range(count):
        yield _chat(system, _text(chance, 400))


def nested(count: int, chance: random.Random) -> Iterator[Messages]:
    """Three levels: a system prompt of ten, in it a document of thirty, in it a question; in no order."""
    systems = [_text(chance, 1500) for _ in range(10)]
    documents = [_text(chance, 3000) for _ in range(300)]
    for _ in range(count):
        choice = chance.randrange(300)
        yield _chat(systems[choice % 10], documents[choice] + "\n\n" + _text(chance, 200))


def few_shot(count: int, chance: random.Random) -> Iterator[Messages]:
    """A task of a hundred, then up to four of its examples in their order, as turns of a conversation, then a question; in no order."""
    tasks = [(_text(chance, 600), [_text(chance, 500) for _ in range(8)]) for _ in range(100)]
    for _ in range(count):
        system, turns = chance.choice(tasks)
        yield _chat(system, *turns[: 2 * chance.randint(1, 4)], _text(chance, 300))


def conversations(count: int, chance: random.Random) -> Iterator[Messages]:
    """Conversations that were cut after each of their ten turns, as evaluations do; in no order."""
    system = _text(chance, 400)
    cut = []
    for _ in range(count // 10):
        turns = [_text(chance, 400) for _ in range(19)]
        cut += [_chat(system, *turns[: 2 * length + 1]) for length in range(10)]
    chance.shuffle(cut)
    yield from cut


def taking_turns(count: int, chance: random.Random) -> Iterator[Messages]:
    """Two hundred long prompts, one after the other and then again from the first: the worst order for a cache."""
    prompts = [_text(chance, 3000) for _ in range(200)]
    for number in range(count):
        yield _chat(prompts[number % 200], _text(chance, 300))


def mixture(count: int, chance: random.Random) -> Iterator[Messages]:
    """A hundred long prompts and requests of their own among them, in no order."""
    prompts = [_text(chance, 3000) for _ in range(100)]
    for _ in range(count):
        own = chance.random() < 0.1
        yield _chat(_text(chance, 3000) if own else chance.choice(prompts), _text(chance, 300))


def _reused(prompts: Sequence[bytes]) -> int:
    """The prompt tokens that the engine found cached, with a constant number of requests in flight."""
    engine = ModelledEngine(LIMITS)
    waiting = iter(prompts)
    for prompt, _ in zip(waiting, range(IN_FLIGHT), strict=False):
        engine.submit(ModelledRequest(prompt, 8))
    while step := engine.step():
        for event in step.events:
            if event.finished and (prompt := next(waiting, b"")):
                engine.submit(ModelledRequest(prompt, 8))
    return engine.prefix_hit_tokens


def _bound(prompts: Sequence[bytes]) -> int:
    blocks = [block for prompt in prompts for block in block_hashes(prompt)]
    return (len(blocks) - len(set(blocks))) * BLOCK_TOKENS


def _measure(conversations: list[Messages]) -> tuple[float, float, float]:
    """Reuse in work order as a share of the best order's, as a share of the bound, and as a multiple of the input's."""
    bodies = [json.dumps({"model": "m", "messages": messages}) for messages in conversations]
    prompts = [chat_request(body.encode()).prompts[0] for body in bodies]
    with tempfile.TemporaryDirectory() as directory:
        path, work = Path(directory, "in"), Path(directory, "work")
        path.write_text("".join(f'{{"custom_id": "{number}", "body": {body}}}\n' for number, body in enumerate(bodies)))
        plan = ingest_file(path, work, LineRules("/v1/chat/completions"))
        trailer = work.read_bytes()[plan.work_bytes :]
    order = [int.from_bytes(trailer[at : at + 4], "little") - 1 for at in range(0, len(trailer), 4)]
    ours = _reused([prompts[number] for number in order])
    return ours / _reused(sorted(prompts)), ours / _bound(prompts), ours / max(1, _reused(prompts))


def main(quick: bool = False) -> dict[str, float]:
    count = 500 if quick else 3000
    found: dict[str, float] = {}
    rows = []
    for make in (one_prompt, nested, few_shot, conversations, taking_turns, mixture):
        best, bound, gain = _measure(list(make(count, random.Random(7))))
        name = make.__name__.replace("_", " ")
        found[f"of best, {name}"] = best
        found[f"of bound, {name}"] = bound
        found[f"of input order, {name}"] = gain
        beside = f"{gain:.1f} times the input order's" if gain < 1000 else "the input's order reuses next to nothing"
        figure = f"{best:.1%} of the best order's, {bound:.1%} of the bound, {beside}"
        rows.append((name, figure, "at least 95 %" + (", 2 times" if make is not one_prompt else "")))
    table(f"Prompt tokens reused, {count:,} items, {LIMITS.kv_blocks * BLOCK_TOKENS:,} tokens of cache", rows)
    return found


if __name__ == "__main__":
    main("--quick" in sys.argv)
