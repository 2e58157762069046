"""What is learned from how a call ended: what the upstream did not take is no attempt, and our own limits say nothing of its health."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest
from structlog.testing import capture_logs

from tests.upstream.world import RouterWorld, deployment, secret
from tidegate.core.errors import (
    Ambiguous,
    AnswerTooLong,
    AnswerUnusable,
    BrokenAnswer,
    KeyRejected,
    Overspent,
    PoolExhausted,
    Refused,
    Throttled,
    Unavailable,
    UpstreamError,
    Withheld,
)
from tidegate.core.nouns import Call
from tidegate.upstream.budgets.budget_client import EXCEEDS_LIMIT
from tidegate.upstream.calls.admission import Feedback
from tidegate.upstream.calls.limit_notes import LimitNotes
from tidegate.upstream.routing.deployment_state import DeploymentState

pytestmark = pytest.mark.anyio


class School:
    """The feedback of a router of one deployment. It also stands for the other processes, which get rests, failures and answers."""

    def __init__(self, world: RouterWorld, router: Any) -> None:
        self.world = world
        self.state: DeploymentState = router._states["one"]
        self.feedback: Feedback = router._path._admissions._feedback
        self.notes: LimitNotes = router._path._admissions._feedback._notes
        self.feedback._rests = self.notes._rests = cast(Any, self)
        self.feedback._backpressure = cast(Any, self)
        self.published: list[tuple[str, int]] = []
        self.pressed: list[str] = []

    def publish(self, name: str, rests_for_ms: int) -> None:
        self.published.append((name, rests_for_ms))

    def failed(self, state: DeploymentState) -> None:
        self.pressed.append("failed")

    def answered(self, state: DeploymentState) -> None:
        self.pressed.append("answered")

    def learn(self, error: UpstreamError, call: Call | None = None, *, is_retry: bool = False) -> UpstreamError:
        attempt = self.state.budget.count(self.world.clock.monotonic, is_retry=is_retry)
        return self.feedback.failed(self.state, call or self.world.call(), error, attempt)

    def attempts(self) -> int:
        return self.state.budget.attempts(self.world.clock.monotonic)


@asynccontextmanager
async def school() -> AsyncIterator[School]:
    world = RouterWorld()
    place = deployment("http://127.0.0.1:1/v1", models=("m",), max_in_flight=4, api_key=secret())
    async with world.router(place) as router:
        yield School(world, router)


@pytest.mark.parametrize("is_retry", [False, True])
async def test_only_what_the_upstream_took_or_refused_for_good_was_an_attempt(is_retry: bool) -> None:
    async with school() as one:
        counts = {}
        for error in (
            Withheld("budget", until_ms=0.0),
            Overspent("money"),
            Throttled("too long", code=EXCEEDS_LIMIT),
            Throttled("busy", status=429),
            Unavailable("refused"),
            PoolExhausted("full"),
            Refused("no", status=400),
            Ambiguous("lost"),
            BrokenAnswer("no JSON"),
        ):
            before = one.attempts()
            one.learn(error, is_retry=is_retry)
            counts[error.message] = one.attempts() - before
        assert {what for what, count in counts.items() if count} == {"no", "lost", "no JSON"}


async def test_what_was_withheld_here_teaches_nothing() -> None:
    async with school() as one:
        for error in (Withheld("budget", until_ms=0.0), Throttled("too long", code=EXCEEDS_LIMIT, retry_after_ms=7)):
            assert one.learn(error) is error
        assert (one.state.failures, one.published, one.pressed) == ({}, [], [])
        assert error.retry_after_ms == 7


async def test_our_own_ceiling_and_deadline_are_counted_and_open_no_circuit() -> None:
    async with school() as one:
        full = PoolExhausted("full", retry_after_ms=1_000)
        assert one.learn(full).retry_after_ms == 1_000
        now_ms = one.world.clock.monotonic
        for _ in range(20):
            one.learn(Ambiguous("late"), one.world.call(left_ms=0))
        assert not one.state.breaker.is_open
        assert (one.state.failures, one.pressed) == ({PoolExhausted.reason: 1, Ambiguous.reason: 20}, [])
        one.learn(Throttled("busy", status=429, retry_after_ms=3_000), one.world.call(left_ms=0))
        assert one.state.rests_until_ms == now_ms + 3_000, "who asks for a rest gets it, however late"
        late = Ambiguous("in time")
        assert one.learn(late, one.world.call(left_ms=1)) is late
        assert (one.pressed, late.retry_after_ms) == (["failed"], 3_000)


async def test_longer_rests_and_failures_of_the_server_are_published_to_other_processes() -> None:
    async with school() as one:
        for wait_ms in (3_000, 3_000, 4_000):
            one.learn(Throttled("busy", status=429, retry_after_ms=wait_ms))
        assert one.published == [("one", 3_000), ("one", 4_000)]
        one.learn(Refused("no", status=400))
        one.learn(AnswerTooLong("long", status=200))
        one.learn(AnswerUnusable("deep", status=200))
        assert one.pressed == []
        for error in (Unavailable("away"), Ambiguous("lost"), BrokenAnswer("no JSON"), KeyRejected("no", status=401)):
            one.learn(error)
        one.feedback.answered(one.state)
        assert one.pressed == ["failed"] * 4 + ["answered"]


async def test_a_limit_that_an_answer_shows_as_used_up_is_a_rest_for_other_processes_too() -> None:
    async with school() as one:
        limit = {"x-ratelimit-limit-requests": "9", "x-ratelimit-reset-requests": "7s"}
        for left in ("1", "0"):
            one.notes.note(one.state, {**limit, "x-ratelimit-remaining-requests": left}, one.world.call(), 1)
        assert one.published == [("one", 7_000)]


async def test_a_circuit_that_opens_or_closes_is_logged_once() -> None:
    async with school() as one:
        with capture_logs() as logged:
            one.feedback.answered(one.state)
            for _ in range(9):
                one.learn(Ambiguous("lost"))
            for _ in range(2):
                one.feedback.answered(one.state)
            for _ in range(2):
                one.learn(KeyRejected("no", status=401))
        assert [line["event"] for line in logged] == [
            "upstream_circuit_opened",
            "upstream_recovered",
            "upstream_key_rejected",
        ]


async def test_a_403_while_others_pass_is_the_requests_own_and_a_key_is_hidden() -> None:
    async with school() as one:
        call, key = one.world.call(), secret().reveal()
        quoted = KeyRejected("no", status=403, body=f"bad key {key}".encode())
        assert one.learn(quoted, call) is quoted
        assert quoted.body == b"bad key ***"
        one.feedback.answered(one.state)
        for status, kind in ((401, KeyRejected), (403, Refused)):
            learned = one.learn(KeyRejected("no", status=status), call)
            assert (type(learned), learned.status) == (kind, status)
        assert one.state.failures[Refused.reason] == 1
        assert type(one.learn(Refused("no", status=403), call)) is Refused
