"""What guards say of one body: which steps run, in which order and where, and what they make of own code that fails."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import pytest
import structlog

from tidegate.core import hooks
from tidegate.core.hooks import About, HookCode, Later, PolicyRule, Refuse, RuleBounds, Stop, Streams
from tidegate.core.policy.guardrails import Action, GuardVerdict, Length, Patterns
from tidegate.guards import guard
from tidegate.guards.guard import Guard, Guards

pytestmark = pytest.mark.anyio

CANARY = "canary-51c0"
ABOUT = About("/v1/chat/completions", "m", "acme")


def says(text: str) -> bytes:
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": text}]}).encode()


def made(*rules: PolicyRule) -> Guard:
    found = Guards(rules).of("acme", None, "m")
    assert found is not None
    return found


class Own:
    """An operator's function that raises what it was given, call by call, and then lets everything pass."""

    def __init__(self, *raised: Exception) -> None:
        self._raised = list(raised)
        self.seen: list[Any] = []

    def __call__(self, body: dict[str, Any], about: About) -> None:
        self.seen.append(body)
        if self._raised:
            raise self._raised.pop(0)


class Unspeakable(Refuse):
    """A refusal whose own words cannot be read."""

    def __str__(self) -> str:
        raise LookupError(CANARY)


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Pauses that were asked for; none is waited for."""
    asked: list[float] = []

    async def sleep(delay_s: float) -> None:
        asked.append(delay_s)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    return asked


@pytest.mark.parametrize(
    ("failures", "calls", "waited"),
    [(0, 1, []), (1, 2, [0.5]), (2, 3, [0.5, 1.0]), (3, 3, [0.5, 1.0]), (9, 3, [0.5, 1.0])],
)
@pytest.mark.parametrize("error", [ConnectionError(CANARY), Later(5, "busy now.")])
async def test_after_an_answer_a_passing_failure_is_asked_thrice_with_growing_pauses(
    pauses: list[float], error: Exception, failures: int, calls: int, waited: list[float]
) -> None:
    own = Own(*[error] * failures)
    verdict = await made(PolicyRule("house", after=own)).after(says("hi"), lambda: ABOUT)
    assert len(own.seen) == calls
    assert pauses == waited
    if failures < 3:
        assert verdict == says("hi")
    else:
        assert isinstance(verdict, Stop)
        assert (verdict.code, verdict.retryable) == (HookCode.FAILED, False)
        assert verdict.message.endswith(". The answer was paid for, but it is not handed on.")
        assert CANARY not in verdict.message


@pytest.mark.parametrize(
    ("error", "code"), [(Refuse("no"), "hook_refused"), (ValueError(CANARY), "hook_failed"), (Later(-1), "hook_failed")]
)
async def test_what_is_refused_or_broken_for_good_is_asked_once(
    pauses: list[float], error: Exception, code: str
) -> None:
    own = Own(error)
    verdict = await made(PolicyRule("house", after=own)).after(says("hi"), lambda: ABOUT)
    assert isinstance(verdict, Stop)
    assert (verdict.code, len(own.seen), pauses) == (code, 1, [])
    assert "paid for" not in verdict.message


@pytest.mark.parametrize(
    ("error", "code", "wait_ms"),
    [
        (Later(0), "hook_deferred", 0),
        (Later(0.0015), "hook_deferred", 1),
        (Later(2.5, "busy"), "hook_deferred", 2_500),
        (Later(86_400), "hook_deferred", hooks.WAIT_MS_MAX),
        (Later(86_400.001), "hook_failed", 0),
        (Later(-0.001), "hook_failed", 0),
        (Later(float("nan")), "hook_failed", 0),
        (Later("soon"), "hook_failed", 0),  # type: ignore[arg-type]
        (Unspeakable(), "hook_failed", 0),
        (OSError(CANARY), "hook_unavailable", 77),
        (TimeoutError(CANARY), "hook_unavailable", 77),
        (KeyError(CANARY), "hook_failed", 0),
    ],
)
async def test_before_a_call_own_code_is_asked_once_and_says_how_long_the_item_rests(
    pauses: list[float], error: Exception, code: str, wait_ms: int
) -> None:
    own = Own(error)
    verdict = await made(PolicyRule("house", before=own, retry_ms=77)).before(says("hi"), lambda: ABOUT)
    assert isinstance(verdict, Stop)
    assert (verdict.code, verdict.wait_ms, len(own.seen), pauses) == (code, wait_ms, 1, [])
    assert CANARY not in verdict.message


async def test_the_log_says_where_own_code_failed_once_a_second_and_never_its_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = [0.0]
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: now_s[0])

    def deeper(text: str) -> None:
        raise KeyError(text)

    def fails(body: dict[str, Any], about: About) -> None:
        deeper(str(body))

    line = deeper.__code__.co_firstlineno + 1
    rules = made(PolicyRule("house", before=fails)), made(PolicyRule("other", before=Own(*[OSError(CANARY)] * 9)))
    with structlog.testing.capture_logs() as logged:
        for moment_s in (0.0, 0.999, 1.0, 1.999, 2.5, 3.499, 3.5):
            now_s[0] = moment_s
            for each in rules:
                assert isinstance(await each.before(says(CANARY), lambda: ABOUT), Stop)
    assert [one["event"] for one in logged] == ["hook_failed", "hook_unavailable"] * 4
    assert {(one["hook"], one["kind"]) for one in logged} == {("house", "KeyError"), ("other", "OSError")}
    assert {one["why"] for one in logged if one["hook"] == "house"} == {f"{__file__}:{line}"}
    assert CANARY not in str(logged)


async def test_a_hooks_words_of_what_it_returned_reach_the_log() -> None:
    with structlog.testing.capture_logs() as logged:
        verdict = await made(PolicyRule("house", before=lambda body, about: [CANARY])).before(says("a"), lambda: ABOUT)
    assert isinstance(verdict, Stop)
    assert "Misunderstood" in verdict.message
    assert logged[0]["why"].startswith("it returned a list")


class Watched(Patterns):
    """Patterns that note which of their checks ran, and whether in the event loop's thread."""

    def __init__(self, *patterns: str, action: Action = Action.DENY, fails: bool = False) -> None:
        super().__init__("watched", patterns, action)
        self._fails = fails
        self.ran: list[tuple[str, bool]] = []

    def _note(self, check: str) -> None:
        self.ran.append((check, threading.current_thread() is threading.main_thread()))
        if self._fails:
            raise ValueError(CANARY)

    def check_prompt(self, body: bytes) -> GuardVerdict:
        self._note("prompt")
        return super().check_prompt(body)

    def check_answer(self, body: bytes) -> GuardVerdict:
        self._note("answer")
        return super().check_answer(body)


async def test_short_bodies_are_looked_through_at_once_and_long_ones_away_from_the_event_loop() -> None:
    rail = Watched("forbidden")
    watched = made(PolicyRule("house", guardrail=rail))
    for text in ("short", "long " * 10_000):
        assert await watched.before(says(text), lambda: ABOUT) == says(text)
        assert await watched.after(says(text), lambda: ABOUT) == says(text)
    assert rail.ran == [("prompt", True), ("answer", True), ("prompt", False), ("answer", False)]


async def test_each_step_sees_what_the_one_before_it_left_and_the_first_refusal_is_the_last_word() -> None:
    number = Watched("[0-9]+", action=Action.REDACT)
    marked = Watched(r"\[redacted\]")
    never = Watched("x")
    rules = [PolicyRule(str(at), guardrail=rail) for at, rail in enumerate((number, marked, never))]
    assert await made(*rules).before(says("fine"), lambda: ABOUT) == says("fine")
    assert len(never.ran) == 1
    verdict = await made(*rules).before(says("call 5551234"), lambda: ABOUT)
    assert isinstance(verdict, Stop)
    assert (verdict.code, len(never.ran)) == ("guardrail_pattern", 1)
    assert await made(rules[0], rules[2]).before(says("call 5551234"), lambda: ABOUT) == says("call [redacted]")
    # Own code gets the rest of it too, and a refusal of own code ends it.
    seen, refuses = Own(), Own(Refuse("no"))
    await made(rules[0], PolicyRule("own", before=seen)).before(says("call 5551234"), lambda: ABOUT)
    assert seen.seen[0]["messages"][0]["content"] == "call [redacted]"
    await made(PolicyRule("own", before=refuses), rules[2]).before(says("a"), lambda: ABOUT)
    assert len(never.ran) == 2
    await made(PolicyRule("own", before=seen), rules[2]).before(says("a"), lambda: ABOUT)
    assert len(never.ran) == 3


async def test_a_guardrail_that_breaks_on_one_body_refuses_it_and_says_nothing_of_its_text() -> None:
    after = Watched("x")
    broken = made(PolicyRule("house", guardrail=Watched("x", fails=True)), PolicyRule("next", guardrail=after))
    with structlog.testing.capture_logs() as logged:
        for text in ("short", "long " * 10_000):
            for verdict in (
                await broken.before(says(text), lambda: ABOUT),
                await broken.after(says(text), lambda: ABOUT),
            ):
                assert isinstance(verdict, Stop)
                assert (verdict.code, "ValueError" in verdict.message) == (HookCode.FAILED, True)
                assert CANARY not in verdict.message
    assert [one["event"] for one in logged] == ["guardrail_crashed"] * 4
    assert all(one["place"].startswith(f"{__file__}:") for one in logged)
    assert CANARY not in str(logged)
    assert after.ran == []


@pytest.mark.parametrize("kind", ["patterns", "length", "own"])
@pytest.mark.parametrize("streams", list(Streams))
async def test_streams_are_refused_held_or_let_pass_only_where_a_rule_judges_answers(
    kind: str, streams: Streams
) -> None:
    def rule(name: str, *, judges: bool, streams: Streams) -> PolicyRule:
        if kind == "own":
            return PolicyRule(name, streams=streams, **{"after" if judges else "before": Own(Refuse("no"))})  # type: ignore[arg-type]
        rail = Patterns(name, ["forbidden"]) if kind == "patterns" else Length(answer_bytes_max=9, prompt_bytes_max=9)
        return PolicyRule(name, guardrail=rail, on_answers=judges, streams=streams)

    judging = made(rule("house", judges=True, streams=streams))
    assert judging.refuses_streams is (streams is Streams.REFUSE)
    assert judging.holds_streams is (streams is Streams.HOLD)
    held = await judging.after_stream(says("forbidden"), lambda: ABOUT)
    assert isinstance(held, Stop) is (streams is Streams.HOLD)
    looking = made(rule("house", judges=False, streams=streams))
    assert (looking.refuses_streams, looking.holds_streams) == (False, False)
    assert await looking.after(says("forbidden"), lambda: ABOUT) == says("forbidden")
    assert isinstance(await looking.before(says("forbidden"), lambda: ABOUT), Stop)
    # One rule that refuses streams is enough, and those that let them pass have no say in a held one.
    both = made(rule("lets", judges=True, streams=Streams.PASS), rule("house", judges=True, streams=streams))
    assert (both.refuses_streams, both.holds_streams) == (streams is Streams.REFUSE, streams is Streams.HOLD)


async def test_a_rule_for_answers_alone_leaves_requests_alone() -> None:
    for rail in (Patterns("house", ["forbidden"]), Length(prompt_bytes_max=9, answer_bytes_max=9)):
        answers_only = made(PolicyRule("house", guardrail=rail, on_requests=False))
        assert await answers_only.before(says("forbidden"), lambda: ABOUT) == says("forbidden")
        assert isinstance(await answers_only.after(says("forbidden"), lambda: ABOUT), Stop)
    for rule in (PolicyRule("a", guardrail=Length(), on_requests=False, on_answers=False), PolicyRule("b")):
        assert Guards([rule]).of("acme", None, "m") is None, "a rule without a step binds nothing"


def test_guards_are_made_once_for_each_kind_of_call_and_a_bounded_number_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(guard, "KINDS_MAX", 2)
    guards = Guards([PolicyRule("house", RuleBounds(keys=frozenset({"k1"})), Length())])
    assert guards.of("a", None, "m") is None
    first = guards.of("a", "k1", "m")
    assert first is not None
    assert guards.of("a", "k1", "m") is first
    guards.of("c", "k1", "m")
    assert guards.of("a", "k1", "m") is not first


async def test_own_code_has_as_long_as_its_rule_says_and_cannot_change_what_was_paid(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    allowed: list[float | None] = []
    real = asyncio.timeout

    def timeout(delay_s: float | None) -> asyncio.Timeout:
        allowed.append(delay_s)
        return real(20)

    monkeypatch.setattr(asyncio, "timeout", timeout)
    rule = PolicyRule("house", after=lambda body, about: {"text": "b", "model": "n", "usage": 9}, timeout_ms=2_500)
    verdict = await made(rule).after(b'{"text":"a","model":"m","usage":{"n":1}}', lambda: ABOUT)
    assert verdict == b'{"text":"b","model":"n","usage":{"n":1}}'
    assert allowed == [2.5]


async def test_what_is_closed_leaves_no_thread_behind() -> None:
    before, after = Own(), Own()
    guards = Guards([PolicyRule("closed", guardrail=Patterns("closed", ["x"]), before=before, after=after)])
    known = set(threading.enumerate())
    found = guards.of("acme", None, "m")
    assert found is not None
    await found.before(says("long " * 10_000), lambda: ABOUT)
    await found.after(says("a"), lambda: ABOUT)
    began = set(threading.enumerate()) - known
    assert sorted(thread.name for thread in began) == ["guardrail search_0", "hook closed", "hook closed"]
    guards.close()
    for thread in began:
        thread.join(20)
        assert not thread.is_alive()


def test_a_hook_makes_no_body_larger_than_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks, "BODY_BYTES_MAX", 100)
    request = {"model": "m", "stream": False}
    assert len(hooks.changed_request(request, b"{}", {**request, "x": "x" * 65})) == 100
    with pytest.raises(hooks.Misunderstood, match="101 bytes, more than 100"):
        hooks.changed_request(request, b"{}", {**request, "x": "x" * 66})
