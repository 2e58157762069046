"""One item: at the edge of its job's window, and under a budget that is spent."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from tidegate.core.errors import Ambiguous, BrokenAnswer, Overspent, Unavailable, UpstreamError
from tidegate.core.nouns import Item, ItemVerdict, LeasedSlice
from tidegate.core.policy.guardrails import PASS
from tidegate.core.policy.policy_rules import UNKNOWN, Denied
from tidegate.core.retry import RetryPolicy
from tidegate.guards.guard import Guard
from tidegate.stages.perform import Again, Performer

pytestmark = pytest.mark.anyio

NOW_MS, LEFT_MS = 1_000.2, 0.6
JOB, KEY = "batch_0123456789012345678901", "key_0123456789012345678901"


async def performed(
    failure: UpstreamError,
    denied: Denied | None = None,
    *,
    left_ms: float = LEFT_MS,
    chance: float = 1.0,
    **others: Any,
) -> ItemVerdict | Again:
    """What becomes of an item whose call fails so, or that its key denies, so long before its window is over.

    `others` are rules.
    """

    async def send(call: Any) -> Any:
        raise failure

    upstream: Any = SimpleNamespace(knows=lambda model: True, send=send)
    clock: Any = SimpleNamespace(monotonic_ms=lambda: NOW_MS)
    entropy: Any = SimpleNamespace(uniform=lambda low, high: low + (high - low) * chance)
    usual: dict[str, Any] = {
        "denial": lambda leased: denied,
        "guard": lambda leased: None,
        "begin_by_ms": lambda leased: NOW_MS + 10_000,
        "parallel": lambda leased: (),
        "models": lambda leased: frozenset(),
        "retry": lambda leased: RetryPolicy(attempts_max=1),
    }
    rules: Any = SimpleNamespace(**usual | others)
    leased = LeasedSlice(JOB, "t", "/v1/chat/completions", "m", 0, 1, 0, "blob", 0, 0, 0, 0, "token", 1, key_id=KEY)
    held: Any = SimpleNamespace(
        slice=leased,
        deadline_ms=NOW_MS + left_ms,
        key=None,
        budgets=(),
        parallel=(),
        models=frozenset(),
        is_interactive=False,
        may_begin=lambda: True,
    )
    item = Item(number=0, custom_id=b'"a"', body=b'{"model":"m","messages":[]}')
    return await Performer(upstream, clock, entropy, rules, 0).perform(held, item)


@pytest.mark.parametrize("denied", [UNKNOWN, None], ids=["a key of unknown state", "a server that is away"])
async def test_what_is_tried_again_waits_until_its_window_is_over(denied: Denied | None) -> None:
    """Less than a millisecond is left: a wait of none would bring the item back at once, again and again."""
    verdict = await performed(Unavailable("connection refused"), denied)
    assert isinstance(verdict, Again)
    assert verdict.reason == (UNKNOWN.code if denied else Unavailable.reason)
    assert verdict.wait_ms >= LEFT_MS


@pytest.mark.parametrize("retry_after_ms", [None, 5_000])
async def test_items_that_failed_together_do_not_come_back_together(retry_after_ms: int | None) -> None:
    failure, waits = Unavailable("away", retry_after_ms=retry_after_ms), list[int]()
    for chance in (0.0, 0.5, 1.0):
        verdict = await performed(failure, left_ms=600_000, chance=chance)
        assert isinstance(verdict, Again)
        waits.append(verdict.wait_ms)
    assert waits == sorted(set(waits))
    assert waits[0] >= (retry_after_ms or 0)


async def test_nothing_is_sent_under_a_key_that_may_not_send_any_more_when_a_hook_has_judged() -> None:
    judged: list[bytes] = []

    async def slow(body: bytes, about: Any) -> bytes:
        judged.append(body)
        return body

    hook = SimpleNamespace(before=slow)
    verdict = await performed(
        Ambiguous("it was sent", status=500),
        denial=lambda leased: UNKNOWN if judged else None,
        guard=lambda leased: hook,
    )
    assert isinstance(verdict, Again)
    assert (verdict.reason, len(judged)) == (UNKNOWN.code, 1)


@pytest.mark.parametrize("status", [400, 500, 599])
async def test_an_error_that_a_server_answered_with_is_the_items_answer(status: int) -> None:
    verdict = await performed(Ambiguous("broken", status=status, body=b'{"error":{"message":"broken"}}'))
    assert isinstance(verdict, ItemVerdict)
    assert json.loads(verdict.line)["response"]["status_code"] == status


@pytest.mark.parametrize("judged", ["nothing", "requests", "answers"])
async def test_what_came_in_place_of_an_answer_is_shown_where_no_rule_judges_answers(judged: str) -> None:
    """It may hold the model's text, and what is no answer cannot be judged."""
    steps = [lambda body: PASS]
    guard = Guard("t", steps, steps if judged == "answers" else ()) if judged != "nothing" else None
    broken = BrokenAnswer("it is not valid JSON", status=200, body=b'{"text":"secret')
    once = RetryPolicy(broken_attempts_max=1)
    verdict = await performed(broken, guard=lambda leased: guard, retry=lambda leased: once)
    assert isinstance(verdict, ItemVerdict)
    line = json.loads(verdict.line)
    assert line["error"]["code"] == "invalid_upstream_response"
    assert line.get("tidegate") == (None if judged == "answers" else {"raw": '{"text":"secret'})


async def test_an_item_that_its_budget_cannot_pay_fails_with_a_sentence() -> None:
    verdict = await performed(Overspent("the budget of batch 'b' has 3 left", code="insufficient_quota"))
    assert isinstance(verdict, ItemVerdict)
    assert json.loads(verdict.line)["error"] == {
        "code": "insufficient_quota",
        "message": "The budget of batch 'b' has 3 left.",
    }
