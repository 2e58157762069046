"""What becomes of a call that its budgets put off: another deployment, a moment's wait, or an error with the time to come back."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.ports import HandClock
from tests.upstream.world import RouterWorld
from tidegate.core.errors import Withheld
from tidegate.upstream.calls import budget_wait
from tidegate.upstream.calls.budget_wait import BUDGET_WAITING_MAX, BudgetWait

pytestmark = pytest.mark.anyio

PATIENCE_MS = 50.0
USER: Any = object()


class Deployment:
    """Counts how often a call that waits for its budget is expected."""

    def __init__(self) -> None:
        self.expected: list[str] = []

    def begin_expecting(self) -> None:
        self.expected.append("begun")

    def end_expecting(self) -> None:
        self.expected.append("ended")


class Desk:
    """A route with two deployments: the first put the call off, and `other` says whether the second may take it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, own: bool, other: str) -> None:
        self.clock = HandClock()
        self.now_ms = self.clock.monotonic_ms()
        self.one, self.two = Deployment(), Deployment()
        self.other = other
        spent = {"spent": self.now_ms + 1, "free": 0.0, "none": 0.0}[other]
        view: Any = SimpleNamespace(
            budgets_spent_until_ms=lambda _, state: spent if state is self.two else 0.0,
            is_budget_of=lambda _, state, name: own,
        )
        self.wait = BudgetWait(view, SimpleNamespace(wait=self.slot), self.clock, PATIENCE_MS)  # type: ignore[arg-type]
        monkeypatch.setattr(budget_wait, "choose", self.choose)

    async def slot(self, *_: Any) -> str:
        return "a slot"

    def choose(self, view: Any, route: Any, call: Any, traffic: Any, put_off: Any, now_ms: float) -> Any:
        if not put_off:
            return self.one
        return None if self.other == "none" else self.two

    async def next_state(self, code: str = "budget_spent", traffic: Any = None, wait_ms: float = 1) -> Any:
        error = Withheld("spent", until_ms=self.now_ms + wait_ms, spent="tenant:acme", code=code)
        states: Any = [self.one]
        call, route = RouterWorld().call(), SimpleNamespace()
        return await self.wait.next_state(route, states, call, traffic, error, self.now_ms + 1_000)  # type: ignore[arg-type]


@pytest.mark.parametrize(("code", "own"), [("upstream_rests", False), ("budget_spent", True)])
async def test_what_holds_at_one_deployment_alone_leads_to_another(
    monkeypatch: pytest.MonkeyPatch, code: str, own: bool
) -> None:
    desk = Desk(monkeypatch, own=own, other="free")
    assert await desk.next_state(code) is desk.two


async def test_what_holds_at_every_deployment_is_waited_for_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk(monkeypatch, own=False, other="free")
    assert await desk.next_state() is desk.one
    assert desk.one.expected == []
    assert not desk.wait._waiting


@pytest.mark.parametrize(("traffic", "expected"), [(None, ["begun", "ended"]), (USER, [])], ids=["item", "user"])
@pytest.mark.parametrize("other", ["none", "spent"])
async def test_an_item_that_waits_for_its_deployments_budget_is_expected_there(
    monkeypatch: pytest.MonkeyPatch, other: str, traffic: Any, expected: list[str]
) -> None:
    desk = Desk(monkeypatch, own=True, other=other)
    assert await desk.next_state(traffic=traffic) is desk.one
    assert desk.one.expected == expected


@pytest.mark.parametrize(
    ("code", "wait_ms", "traffic", "retry_after_ms"),
    [
        ("upstream_rests", 40, None, 40),
        ("upstream_rests", 400, None, 350),
        ("budget_spent", 1_001, None, 951),
        ("budget_spent", 1_001, USER, 1_001),
    ],
)
async def test_a_long_wait_is_an_error_with_the_time_to_come_back(
    monkeypatch: pytest.MonkeyPatch, code: str, wait_ms: float, traffic: Any, retry_after_ms: int
) -> None:
    """An item comes back a little early and waits here for the rest."""
    desk = Desk(monkeypatch, own=False, other="none")
    with pytest.raises(Withheld) as put_off:
        await desk.next_state(code, traffic, wait_ms)
    assert put_off.value.retry_after_ms == retry_after_ms


async def test_only_so_many_items_wait_for_one_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk(monkeypatch, own=False, other="none")
    waiting = [asyncio.create_task(desk.next_state(wait_ms=900)) for _ in range(BUDGET_WAITING_MAX)]
    await asyncio.sleep(0)
    with pytest.raises(Withheld):
        await desk.next_state()
    assert await desk.next_state(traffic=USER) is desk.one
    for one in waiting:
        one.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert not desk.wait._waiting
