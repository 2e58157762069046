"""The policies and rules that the settings of the scheduler, hooks and guardrails stand for."""

import functools
from collections.abc import Iterator

import msgspec

from tidegate.core.errors import SettingsError
from tidegate.core.hooks import PolicyRule, RuleBounds, Streams
from tidegate.core.policy.guardrails import Action, AnswerShape, Length, Patterns, Unseen
from tidegate.core.policy.guardrails import GuardrailCode as GuardrailCode
from tidegate.core.schedule.policy import Mode, ModeOverride, Policy, RankKey
from tidegate.core.schedule.queues import QueueOrder, StrictOrder, WeightedOrder
from tidegate.settings.groups import Settings
from tidegate.settings.guards import BoundSettings, GuardrailEntry, HookEntry
from tidegate.settings.key_path import KeyPath
from tidegate.settings.plugins import load_hook, load_queue_order, load_rank

NO_SHADOW = "none"


def schedule_policy(settings: Settings) -> Policy:
    """Return the scheduler's policy from the settings."""
    scheduler = settings.scheduler
    return Policy(
        mode=Mode(scheduler.mode),
        shadow_mode=None if scheduler.shadow_mode == NO_SHADOW else Mode(scheduler.shadow_mode),
        flows_per_decision_max=scheduler.flows_per_decision_max,
        jobs_per_flow_max=scheduler.jobs_per_flow_max,
        in_flight_units_max=scheduler.in_flight_units_max,
        urgent_share=scheduler.urgent_share,
        age_units_per_s=scheduler.age_units_per_s,
        age_units_max=scheduler.age_units_max,
        large_units=scheduler.large_units,
        large_interval_ms=scheduler.large_interval_ms,
        fast_lane=scheduler.fast_lane,
        fast_lane_share=scheduler.fast_lane_share,
        fast_lane_units=scheduler.fast_lane_units,
        rank=_rank(scheduler.rank),
        queue_order=_queue_order(settings),
    )


def switched(policy: Policy, override: ModeOverride) -> Policy:
    """Return the policy with the modes that an operator chose at run time.

    A mode that this program does not know is from a newer version; then the settings' mode stays.
    """
    known = {mode.value: mode for mode in Mode}
    shadow = None if override.shadow_mode == NO_SHADOW else known.get(override.shadow_mode, policy.shadow_mode)
    return msgspec.structs.replace(policy, mode=known.get(override.mode, policy.mode), shadow_mode=shadow)


def problems(settings: Settings) -> Iterator[tuple[KeyPath, str]]:
    """Return the problems of hooks, guardrails and the scheduler's functions, with their paths."""
    for group, named in (("hooks", settings.hooks), ("guardrails", settings.guardrails)):
        for name, entry in named.items():
            try:
                _rule(group, name, entry)
            except SettingsError as error:
                yield (group, name), f"cannot be used: {str(error).removeprefix(f'{group}.{name}: ')}"
    for name, made in (
        ("rank", lambda: _rank(settings.scheduler.rank)),
        ("queue_order", lambda: _queue_order(settings)),
    ):
        try:
            made()
        except SettingsError as error:
            yield ("scheduler", name), f"cannot be used: {str(error).removeprefix(f'scheduler.{name}: ')}"


def call_rules(settings: Settings) -> tuple[PolicyRule, ...]:
    """Return all hooks and guardrails, in the order in which they judge a call."""
    return tuple(
        _rule(group, name, entry)
        for group, named in (("hooks", settings.hooks), ("guardrails", settings.guardrails))
        for name, entry in named.items()
    )


def _rule(group: str, name: str, entry: HookEntry | GuardrailEntry) -> PolicyRule:
    if isinstance(entry, HookEntry):
        return _hook(f"{group}.{name}", name, entry)
    return _guardrail(f"{group}.{name}", name, entry)


def _hook(setting: str, name: str, entry: HookEntry) -> PolicyRule:
    if not entry.before and not entry.after:
        raise SettingsError("it does nothing: give it before, after or both")
    return PolicyRule(
        name,
        _bounds(entry),
        before=load_hook(setting, entry.before) if entry.before else None,
        after=load_hook(setting, entry.after) if entry.after else None,
        timeout_ms=entry.timeout_ms,
        retry_ms=entry.retry_ms,
        streams=Streams(entry.streams),
    )


def _guardrail(setting: str, name: str, entry: GuardrailEntry) -> PolicyRule:
    lengths = (entry.prompt_bytes_max, entry.prompt_tokens_max, entry.answer_bytes_max)
    given = [
        kind
        for kind, is_given in (
            ("lengths", any(lengths)),
            ("patterns", bool(entry.patterns)),
            ("schema", entry.schema is not None),
            ("use", bool(entry.use)),
        )
        if is_given
    ]
    if len(given) != 1:
        raise SettingsError(
            f"it has {' and '.join(given) or 'nothing to check'}: give exactly one of prompt_bytes_max, prompt_tokens_max or "
            "answer_bytes_max, patterns, schema, use"
        )
    on_requests, on_answers = entry.applies_to != "answers", entry.applies_to != "requests"
    shared = PolicyRule(
        name,
        _bounds(entry),
        refusal=GuardrailCode.REFUSED,
        timeout_ms=entry.timeout_ms,
        retry_ms=entry.retry_ms,
        streams=Streams(entry.streams),
    )
    match given[0]:
        case "lengths":
            on_requests = bool(entry.prompt_bytes_max or entry.prompt_tokens_max)
            on_answers = bool(entry.answer_bytes_max)
            made = Length(*lengths)
            return msgspec.structs.replace(shared, guardrail=made, on_requests=on_requests, on_answers=on_answers)
        case "patterns":
            patterns = Patterns(
                name,
                entry.patterns,
                Action(entry.action),
                replacement=entry.replacement,
                unseen=Unseen(entry.unseen),
            )
            return msgspec.structs.replace(shared, guardrail=patterns, on_requests=on_requests, on_answers=on_answers)
        case "schema":
            if not on_answers:
                raise SettingsError("a schema is for answers: take applies_to away, or say answers")
            shape = AnswerShape(name, entry.schema)
            return msgspec.structs.replace(shared, guardrail=shape, on_requests=False)
    own = load_hook(setting, entry.use)
    return msgspec.structs.replace(shared, before=own if on_requests else None, after=own if on_answers else None)


def _bounds(entry: BoundSettings) -> RuleBounds:
    return RuleBounds(frozenset(entry.tenants), frozenset(entry.keys), frozenset(entry.models))


@functools.cache
def _rank(path: str) -> RankKey | None:
    return load_rank(path) if path else None


@functools.cache
def _own_order(path: str) -> QueueOrder:
    return load_queue_order(path)


def _queue_order(settings: Settings) -> QueueOrder:
    scheduler = settings.scheduler
    match scheduler.queue_order:
        case "strict":
            return StrictOrder(scheduler.queues)
        case "weighted":
            return WeightedOrder(scheduler.queue_weights)
        case path:
            return _own_order(path)
