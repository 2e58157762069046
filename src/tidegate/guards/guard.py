"""Hooks and guardrails for one call: they change or stop its request or its answer.

- Hooks run first, in the order of the settings, and guardrails after them. So guardrails judge
  what is really sent or kept.
- Built-in guardrails run here. Hooks are an operator's code, which runs in other threads.
- The text of a caller is never logged.
- Batch items and interactive calls are under the same rules.
"""

import asyncio
import traceback
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

import msgspec
import structlog

from tidegate.core import hooks
from tidegate.core.hooks import About, HookCode, Later, Misunderstood, Own, PolicyRule, Refuse, Stop, Streams
from tidegate.core.policy import guardrails
from tidegate.guards.own_code import Overran, OwnCode
from tidegate.guards.search_pool import SearchPool

log = structlog.get_logger()

KINDS_MAX = 4_096
# An answer is paid for, so its call is not sent again. A hook that fails for a moment is retried.
AFTER_TRIES = 3
AFTER_PAUSE_S = 0.5
COMPLAINTS_EVERY_S = 1.0


class _OwnStep:
    """One function of an operator, called before the call or after the answer."""

    def __init__(self, rule: PolicyRule, function: Own, *, after: bool) -> None:
        self._rule = rule
        self._after = after
        self._complained_s = -COMPLAINTS_EVERY_S
        self.code = OwnCode(rule.name, function, rule.timeout_ms / 1000)

    async def run(self, body: bytes, about: About) -> bytes | Stop:
        verdict = await self._once(body, about)
        if not self._after:
            return verdict
        for count in range(1, AFTER_TRIES):
            if not isinstance(verdict, Stop) or not verdict.retryable:
                return verdict
            await asyncio.sleep(AFTER_PAUSE_S * count)
            verdict = await self._once(body, about)
        if isinstance(verdict, Stop) and verdict.retryable:
            return Stop(HookCode.FAILED, f"{verdict.message} The answer was paid for, but it is not handed on.")
        return verdict

    async def _once(self, body: bytes, about: About) -> bytes | Stop:
        try:
            return await self._asked(body, about)
        except Misunderstood as error:
            return self._failed("Misunderstood", str(error))
        except (Overran, OSError) as error:
            kind = type(error).__name__
            self._complain("hook_unavailable", kind, _place(error))
            message = f"{self._rule.name!r} did not answer in time or could not reach what it needs ({kind})."
            return Stop(HookCode.UNAVAILABLE, message, self._rule.retry_ms)
        except Exception as error:
            return self._failed(type(error).__name__, _place(error))

    async def _asked(self, body: bytes, about: About) -> bytes | Stop:
        """Call the operator's function and return its verdict on a body.

        A refusal is an object of the operator's code too, so reading it may fail.
        """
        name = self._rule.name
        try:
            given = msgspec.json.decode(body)
            fixed = {field: given.get(field) for field in hooks.FIXED}
            returned = await self.code.call(given, about)
            return hooks.changed_answer(body, returned) if self._after else hooks.changed_request(fixed, body, returned)
        except Refuse as error:
            words = hooks.message_of(error, f"{name!r} does not let this pass: change its text.")
            return Stop(self._rule.refusal, words)
        except Later as error:
            words = hooks.message_of(error, f"{name!r} asks to be tried again later.")
            wait_ms = error.wait_s * 1000
            if not 0 <= wait_ms <= hooks.WAIT_MS_MAX:
                return self._failed("Later", "its wait is not from 0 to 86,400 seconds")
            return Stop(HookCode.DEFERRED, words, int(wait_ms))

    def _failed(self, kind: str, why: str) -> Stop:
        self._complain("hook_failed", kind, why)
        return Stop(HookCode.FAILED, f"{self._rule.name!r} failed on this ({kind}): the operator's log says where.")

    def _complain(self, event: str, kind: str, why: str) -> None:
        """Log a failure by kind and place, at most once a second.

        The message of an error may hold a caller's text, so it is left out.
        """
        now_s = asyncio.get_running_loop().time()
        if now_s - self._complained_s >= COMPLAINTS_EVERY_S:
            self._complained_s = now_s
            log.warning(event, hook=self._rule.name, kind=kind, why=why)


def _place(error: BaseException) -> str:
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{last.filename}:{last.lineno}"


class _PatternStep:
    """The patterns of a guardrail: a quick search runs here, a long one in a thread."""

    def __init__(self, rail: guardrails.Patterns, pool: SearchPool, *, after: bool) -> None:
        self._pool = pool
        self.is_quick = rail.is_quick
        self.check = rail.check_answer if after else rail.check_prompt

    async def look(self, body: bytes, tenant: str) -> guardrails.GuardVerdict:
        return await self._pool.run(tenant, self.check, body)


GuardStep = _OwnStep | _PatternStep | Callable[[bytes], guardrails.GuardVerdict]


class Guard:
    """The hooks and guardrails for one kind of call."""

    def __init__(
        self,
        tenant: str,
        before: Sequence[GuardStep],
        after: Sequence[GuardStep],
        stream_judges: Sequence[GuardStep] = (),
        *,
        refuses_streams: bool = False,
    ) -> None:
        self._tenant = tenant
        self._before = tuple(before)
        self._after = tuple(after)
        self._stream_judges = tuple(stream_judges)
        self.judges_answers = bool(after)
        self.refuses_streams = refuses_streams
        self.holds_streams = bool(stream_judges)

    def before(self, body: bytes, about: Callable[[], About]) -> Coroutine[Any, Any, bytes | Stop]:
        """Return the request to send, or the reason to stop. `about` is called only for hooks."""
        return self._run(self._before, body, about)

    def after(self, body: bytes, about: Callable[[], About]) -> Coroutine[Any, Any, bytes | Stop]:
        """Return the answer as it is recorded or passed on, or the reason to stop."""
        return self._run(self._after, body, about)

    def after_stream(self, body: bytes, about: Callable[[], About]) -> Coroutine[Any, Any, bytes | Stop]:
        """Judge a streamed answer that was held back, without the rules that let streams pass."""
        return self._run(self._stream_judges, body, about)

    async def _run(self, steps: tuple[GuardStep, ...], body: bytes, about: Callable[[], About]) -> bytes | Stop:
        for step in steps:
            if type(step) is _OwnStep:
                result = await step.run(body, about())
                if isinstance(result, Stop):
                    return result
                body = result
                continue
            try:
                # Every item comes through here, so a quick check does not pay for a coroutine.
                if type(step) is _PatternStep:
                    verdict = step.check(body) if step.is_quick(body) else await step.look(body, self._tenant)
                else:
                    verdict = step(body)  # type: ignore[operator]
            except Exception as error:
                # A bug of ours that one body triggers must not stop the worker for all others.
                log.error("guardrail_crashed", kind=type(error).__name__, place=_place(error))
                message = f"A guardrail broke on this ({type(error).__name__}): the operator's log says where."
                return Stop(HookCode.FAILED, message)
            if verdict is guardrails.PASS:
                continue
            if isinstance(verdict, guardrails.GuardrailRefusal):
                return Stop(verdict.code, verdict.message)
            if isinstance(verdict, guardrails.Transformed):
                body = verdict.body
        return body


class Guards:
    """All rules of the settings, and the guard for each kind of call.

    `reached_by` has, for each resource, every name that a call to it may come under: its model and
    its fallbacks. A rule for one of them binds the call from the start, because a fallback is not
    judged again.
    """

    def __init__(
        self, rules: Sequence[PolicyRule] = (), reached_by: Mapping[str, tuple[str, ...]] | None = None
    ) -> None:
        self.rules = tuple(rules)
        self._reached_by = {} if reached_by is None else reached_by
        self._pool = SearchPool()
        self._steps = {id(rule): self._steps_of(rule) for rule in self.rules}
        self._known: dict[tuple[str, str, tuple[str, ...]], Guard | None] = {}

    def of(self, tenant: str, key_id: str | None, model: str) -> Guard | None:
        """Return the guard for a call of this tenant (by name) and key to this model or resource.

        Return None if no rule binds the call.
        """
        # The names are part of the key because a resource may change while this process runs.
        kind = (tenant, key_id or "", self._reached_by.get(model) or (model,))
        if kind not in self._known:
            if len(self._known) >= KINDS_MAX:
                self._known.clear()
            self._known[kind] = self._made(*kind)
        return self._known[kind]

    def close(self) -> None:
        for before, after in self._steps.values():
            for step in (*before, *after):
                if isinstance(step, _OwnStep):
                    step.code.close()
        self._pool.close()

    def _made(self, tenant: str, key_id: str, names: tuple[str, ...]) -> Guard | None:
        bound = [rule for rule in self.rules if rule.bounds.bind(tenant, key_id, names)]
        before = [step for rule in bound for step in self._steps[id(rule)][0]]
        after = [step for rule in bound for step in self._steps[id(rule)][1]]
        judging = [rule for rule in bound if self._steps[id(rule)][1]]
        stream_judges = [step for rule in judging if rule.streams is Streams.HOLD for step in self._steps[id(rule)][1]]
        refuses = any(rule.streams is Streams.REFUSE for rule in judging)
        return Guard(tenant, before, after, stream_judges, refuses_streams=refuses) if before or after else None

    def _steps_of(self, rule: PolicyRule) -> tuple[list[GuardStep], list[GuardStep]]:
        before: list[GuardStep] = []
        after: list[GuardStep] = []
        rail = rule.guardrail
        if isinstance(rail, guardrails.Patterns):
            before.append(_PatternStep(rail, self._pool, after=False))
            after.append(_PatternStep(rail, self._pool, after=True))
        elif rail is not None:
            before.append(rail.check_prompt)
            after.append(rail.check_answer)
        if not rule.on_requests:
            before.clear()
        if not rule.on_answers:
            after.clear()
        if rule.before is not None:
            before.append(_OwnStep(rule, rule.before, after=False))
        if rule.after is not None:
            after.append(_OwnStep(rule, rule.after, after=True))
        return before, after
