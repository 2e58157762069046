"""One item at the edge of its job's window."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tidegate.core.errors import Unavailable
from tidegate.core.nouns import Item
from tidegate.core.policy.policy_rules import UNKNOWN, Denied
from tidegate.core.retry import RetryPolicy
from tidegate.stages.perform import Again, Performer

pytestmark = pytest.mark.anyio

NOW_MS, LEFT_MS = 1_000.2, 0.6


@pytest.mark.parametrize("denied", [UNKNOWN, None], ids=["a key of unknown state", "a server that is away"])
async def test_what_is_tried_again_waits_until_its_window_is_over(denied: Denied | None) -> None:
    """Less than a millisecond is left: a wait of none would bring the item back at once, again and again."""

    async def send(call: Any) -> Any:
        raise Unavailable("connection refused")

    upstream: Any = SimpleNamespace(knows=lambda model: True, send=send)
    clock: Any = SimpleNamespace(monotonic_ms=lambda: NOW_MS)
    entropy: Any = SimpleNamespace(uniform=lambda low, high: high)
    rules: Any = SimpleNamespace(
        denial=lambda leased: denied,
        guard=lambda leased: None,
        begin_by_ms=lambda leased: NOW_MS + 10_000,
        parallel=lambda leased: (),
        models=lambda leased: frozenset(),
        retry=lambda leased: RetryPolicy(),
    )
    leased = SimpleNamespace(
        job_id="batch_0123456789012345678901",
        key_id="key_0123456789012345678901",
        model="m",
        endpoint="/v1/chat/completions",
        share_owner="tenant:t",
        answers=None,
    )
    held: Any = SimpleNamespace(
        slice=leased, deadline_ms=NOW_MS + LEFT_MS, budgets=(), is_interactive=False, may_begin=lambda: True
    )
    item = Item(number=0, custom_id=b'"a"', body=b'{"model":"m","messages":[]}')
    verdict = await Performer(upstream, clock, entropy, rules, 0).perform(held, item)
    assert isinstance(verdict, Again)
    assert verdict.wait_ms >= LEFT_MS
