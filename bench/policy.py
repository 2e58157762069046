"""What the policy of one item costs: its price bounded, its key's state judged, and guardrails on its request and its answer."""

import json
import time
from collections.abc import Callable, Coroutine
from typing import Any

from bench.machinery import median, table
from tidegate.core.hooks import About, PolicyRule
from tidegate.core.policy.guardrails import Guardrail, Length, Patterns
from tidegate.core.policy.policy_rules import KeyState, judge
from tidegate.core.usage.prices import Price, bound
from tidegate.guards.guard import Guard, Guards

BUDGET_US = 10.0
_SENTENCE = "The quick brown fox jumps over the lazy dog, and no dog minds.\n"
_ABOUT = About("/v1/chat/completions", "model-7", "acme")


def _microseconds(work: Callable[[], object], rounds: int) -> float:
    figures = []
    for _ in range(7):
        began = time.thread_time()
        for _ in range(rounds):
            work()
        figures.append((time.thread_time() - began) / rounds * 1e6)
    return median(figures)


def _at_once(work: Coroutine[Any, Any, object]) -> object:
    """What a coroutine that waits for nothing comes to, as a task that awaits it gets it."""
    try:
        work.send(None)
    except StopIteration as ended:
        return ended.value
    raise AssertionError("a built-in guardrail waited for something")


def _guard(*rails: Guardrail) -> Guard:
    guard = Guards([PolicyRule(f"rail-{number}", guardrail=rail) for number, rail in enumerate(rails)]).of(
        "acme", "key", "m"
    )
    assert guard is not None
    return guard


def main(*, quick: bool = False) -> None:
    rounds = 500 if quick else 20_000
    models = frozenset(f"model-{number}" for number in range(50))
    key = KeyState("key", models, models, 2**50)
    price = Price.of(input=0.05, cached=0.01, output=0.10, batch_factor=0.5)
    messages = [{"role": "system", "content": _SENTENCE * 4}, {"role": "user", "content": _SENTENCE * 16}]
    request = json.dumps({"model": "model-7", "messages": messages, "max_tokens": 512}).encode()
    choices = [{"index": 0, "message": {"role": "assistant", "content": _SENTENCE * 12}, "finish_reason": "stop"}]
    answer = json.dumps({"id": "chatcmpl-1", "choices": choices, "usage": {"prompt_tokens": 300}}).encode()
    length = Length(prompt_bytes_max=200_000, answer_bytes_max=1_000_000)
    address = r"[A-Za-z0-9._%+-]{1,64}@[A-Za-z0-9.-]{1,255}"
    usual = _guard(length, Patterns("secrets", ["AKIA[0-9A-Z]{16}", address]))
    nothing_plain = _guard(length, Patterns("cards", [r"\b\d{13,16}\b"]))

    def judged() -> None:
        assert judge(key, "model-7", "model-9", 1) is None
        assert bound(900, 512, price, batch=True)

    def guarded(guard: Guard) -> Callable[[], None]:
        def both_ways() -> None:
            judged()
            assert _at_once(guard.before(request, lambda: _ABOUT)) is request
            assert _at_once(guard.after(answer, lambda: _ABOUT)) is answer

        return both_ways

    without = _microseconds(judged, rounds)
    with_rails = _microseconds(guarded(usual), rounds)
    slow = _microseconds(guarded(nothing_plain), max(50, rounds // 20))
    size = f"{len(request) + len(answer):,} bytes there and back"
    table(
        "policy, per item",
        [
            (
                "a key's state, two allowlists, the most that it can cost",
                f"{without:.2f} µs",
                f"under {BUDGET_US:.0f} µs",
            ),
            (f"and lengths and two patterns, {size}", f"{with_rails:.2f} µs", f"under {BUDGET_US:.0f} µs"),
            (
                "and lengths and a pattern without any plain text",
                f"{slow:.2f} µs",
                "no budget",
            ),
        ],
    )
