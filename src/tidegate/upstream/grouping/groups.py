"""Groups: several items of one job that are sent as one call, if their deployment takes that.

- Items come one by one, and each has a caller that waits for it. Items that fit together form a
  waiting group.
- One of them leads: it waits for a slot like any call, and then takes along the items that have
  joined by then, as many as the deployment allows.
- No item waits for others: while slots are free every item goes at once, and while none is free a
  group forms by itself.
- The answer is split, and each item gets its own part. If a call failed because it was shared, its
  items are tried alone.

This module chooses no deployment and knows no HTTP.
"""

import asyncio
from collections.abc import Sequence
from functools import partial
from hashlib import blake2b
from operator import attrgetter
from typing import Protocol

import msgspec
import structlog

from tidegate import metrics, tracing
from tidegate.core.answers.answer_text import counted_whole
from tidegate.core.apportion import apportion
from tidegate.core.errors import BrokenAnswer, HandedBack, Refused, UpstreamError
from tidegate.core.grouping.chat import ChatPart
from tidegate.core.grouping.embeddings import Part, Remedy
from tidegate.core.ids import group_id
from tidegate.core.nouns import Answer, Call, Usage
from tidegate.core.ports import Clock
from tidegate.upstream.grouping.group_kinds import KINDS, GroupKind, Share
from tidegate.upstream.grouping.waiting_groups import (
    LEAD,
    GroupTrial,
    TurnOutcome,
    WaitingGroup,
    WaitingGroups,
    WaitingItem,
)
from tidegate.upstream.routing.deployment_state import DeploymentState
from tidegate.upstream.routing.routes import NameRoute

log = structlog.get_logger(__name__)

# Gateways refuse longer keys: items with numbers too far apart to be named within it do not share a
# call.
KEY_LENGTH_MAX = 255

# The fields that belong to one item. All others must be equal before two items share a call.
_OWN = (
    "number",
    "body",
    "idempotency_key",
    "deadline_ms",
    "begin_by_ms",
    "may_begin",
    "tokens",
    "prefix_salt",
    "prefix_bytes",
    "hand_backs",
    "trace_header",
)
_common = attrgetter(*[name for name in Call.__struct_fields__ if name not in _OWN])


class Sender(Protocol):
    """The call path as groups need it.

    The caller does not wait between `can_take` and `send`, or another call would take the slot.
    """

    async def find(self, route: NameRoute, call: Call) -> DeploymentState:
        """Wait for a deployment that takes this call."""

    def can_take(self, route: NameRoute, state: DeploymentState, call: Call) -> bool:
        """Return whether a deployment that takes an item also takes the item's shared call."""

    async def send(self, route: NameRoute, call: Call, state: DeploymentState) -> Answer:
        """Send the call to this deployment, or to another one of the route."""


class Groups:
    def __init__(self, sender: Sender, waiting_groups: WaitingGroups, clock: Clock, attempts_grouped: int) -> None:
        self._sender = sender
        self._waiting = waiting_groups
        self._clock = clock
        self._attempts_grouped = attempts_grouped

    async def send(self, route: NameRoute, call: Call) -> Answer:
        """Send one item, in a group or alone."""
        kind = KINDS.get(call.endpoint)
        part = self._read(kind, route, call) if kind is not None else None
        if kind is None or part is None:
            return await self._alone(route, call)
        item = WaitingItem(call, part, asyncio.get_running_loop().create_future())
        key = (_common(call), part.key)
        group = self._waiting.join(route, key, item)
        try:
            if not group.leaders:
                group.leaders.add(item)
                # Items that come or wake up in this turn of the loop join.
                await asyncio.sleep(0)
                await asyncio.sleep(0)
                outcome: TurnOutcome = LEAD
            else:
                outcome = await item.turn
            if outcome is LEAD:
                outcome = await self._lead(route, kind, group, item)
        finally:
            group.remove((item,))
            self._waiting.remove_if_empty(route, key, group)
        if isinstance(outcome, Answer):
            return outcome
        answer = await self._alone(route, call)
        if isinstance(outcome, GroupTrial):
            self._passed_alone(outcome)
        return answer

    def _read(self, kind: GroupKind, route: NameRoute, call: Call) -> Part | ChatPart | None:
        if self._waiting.is_single(route, kind):
            return None
        if call.attempt_count >= self._attempts_grouped:
            # The last attempt of an item is made alone, so that no item fails because of another.
            why = "last_attempt"
        else:
            part = kind.read(route, call)
            if not isinstance(part, str):
                return part
            why = str(part)
        metrics.group_singles.of(_kind_name(kind), why).inc()
        return None

    async def _alone(self, route: NameRoute, call: Call) -> Answer:
        state = await self._sender.find(route, call)
        answer = await self._sender.send(route, call, state)
        size = self._waiting.known_size(state, call.endpoint)
        if size is not None and answer.deployment == state.deployment.name:
            self._waiting.learn(state, call.endpoint, size.succeeded(size.epoch))
        return answer

    # The group.

    async def _lead(self, route: NameRoute, kind: GroupKind, group: WaitingGroup, item: WaitingItem) -> TurnOutcome:
        """Wait for a slot, send all items that joined by then, and return the leader's outcome."""
        try:
            state = await self._sender.find(route, item.call)
        except UpstreamError as error:
            # The other items lack the same: they belong to one job and have the same budgets.
            for other in [one for one in group.waiting if one not in group.leaders]:
                other.set_outcome(_again(error))
                group.waiting.pop(other)
            raise
        size = self._waiting.size(state, kind)
        members, call = self._members(route, kind, state, group.companions(item, size.inputs))
        # Free slots are given to other leaders in this same turn of the loop.
        slots = state.free_slots(self._clock.monotonic_ms()) - 1
        group.remove(members, max(1, slots), size.inputs)
        if call is None:
            return await self._sender.send(route, item.call, state)
        narrow = route.narrowed([one for one in route.states if self._takes(kind, one, members)])
        shares: Sequence[Share | GroupTrial]
        status, name = 0, ""
        priced: Sequence[Usage] = ()
        try:
            answer = await self._send_shared(narrow, call, state, members)
            shares = kind.split(answer.body, [member.part for member in members])
            status, name = answer.status, answer.deployment
            whole = answer.priced or counted_whole(call, answer.usage, answer.body)
            priced = _priced(whole, shares, members)
            self._waiting.learn(state, kind.endpoint, self._waiting.size(state, kind).succeeded(size.epoch))
            _count(kind, state, len(members), "answered")
        except UpstreamError as error:
            for place in narrow.states:
                place.refusals.pass_on(call.idempotency_key, [member.call.idempotency_key for member in members])
            shares = self._after_failure(kind, state, members, error, size.epoch)
        except BaseException:
            for member in members[1:]:
                # We ended the call, so the other items did not fail, and none of their attempts is
                # used up.
                member.set_outcome(HandedBack("the call that this request shared with others was ended"))
            raise
        found = [
            Answer(status, *share, name, is_grouped=True, priced=priced[at]) if isinstance(share, tuple) else share
            for at, share in enumerate(shares)
        ]
        for member, one in zip(members[1:], found[1:], strict=True):
            member.set_outcome(one)
        if isinstance(found[0], UpstreamError):
            raise found[0]
        return found[0]

    async def _send_shared(
        self, route: NameRoute, call: Call, state: DeploymentState, members: Sequence[WaitingItem]
    ) -> Answer:
        traces = tracing.ACTIVE
        if traces is None:
            return await self._sender.send(route, call, state)
        headers = [member.call.trace_header for member in members]
        return await traces.shared_call(lambda traced: self._sender.send(route, traced, state), call, headers)

    def _members(
        self, route: NameRoute, kind: GroupKind, state: DeploymentState, companions: list[WaitingItem]
    ) -> tuple[list[WaitingItem], Call | None]:
        """Return the leader's group and its call.

        Return None instead of a call if the leader goes alone.
        """
        members, tokens, cap = companions[:1], companions[0].part.tokens, kind.tokens_max(state.deployment)
        now_ms = self._clock.monotonic_ms()
        for item in companions[1:]:
            if state.waits_until_ms(item.call) > now_ms:
                continue
            tokens += item.part.tokens
            if cap and tokens > cap:
                break
            members.append(item)
        while len(members) > 1 and len(members) >= kind.items_min(state.deployment):
            call = _joined(kind, members)
            if len(call.idempotency_key) <= KEY_LENGTH_MAX and self._sender.can_take(route, state, call):
                return members, call
            members = members[: len(members) // 2]
        return members[:1], None

    def _takes(self, kind: GroupKind, state: DeploymentState, members: Sequence[WaitingItem]) -> bool:
        """Return whether another deployment could take this group over, by its own settings."""
        cap = kind.tokens_max(state.deployment)
        return kind.items_max(state.deployment) >= len(members) and not (
            0 < cap < sum(member.part.tokens for member in members)
        )

    def _after_failure(
        self, kind: GroupKind, state: DeploymentState, members: Sequence[WaitingItem], error: UpstreamError, epoch: int
    ) -> list[UpstreamError] | list[GroupTrial]:
        size, remedy = self._waiting.size(state, kind).failed(error, epoch)
        self._waiting.learn(state, kind.endpoint, size)
        _count(kind, state, len(members), "refused" if isinstance(error, Refused) else "failed")
        if isinstance(error, Refused | BrokenAnswer):
            # One item or the grouping is at fault. Each is sent alone at once, and gets its own
            # verdict.
            metrics.group_isolations.of(state.deployment.name, error.reason).inc()
            log.warning("group_isolated", deployment=state.deployment.name, items=len(members), why=error.message)
            return [GroupTrial(kind, state, len(members), epoch)] * len(members)
        metrics.group_requeues.of(error.reason, "requeued" if remedy is Remedy.REQUEUE else "shrunk").inc()
        if remedy is not Remedy.REQUEUE:
            log.info("group_shrunk", deployment=state.deployment.name, items_max=size.inputs, why=error.reason)
        return [_again(error) for _ in members]

    def _passed_alone(self, trial: GroupTrial) -> None:
        if trial.passed():
            size = self._waiting.size(trial.state, trial.kind)
            self._waiting.learn(trial.state, trial.kind.endpoint, size.unfit(trial.epoch))


def _joined(kind: GroupKind, members: Sequence[WaitingItem]) -> Call:
    """Return one call for all of these items.

    It may begin as long as each of them may, and its key names them all.
    """
    calls = [member.call for member in members]
    first = calls[0]
    digest = blake2b(" ".join(call.idempotency_key for call in calls).encode(), digest_size=8).hexdigest()
    return msgspec.structs.replace(
        first,
        endpoint=kind.path,
        body=kind.build([member.part for member in members]),
        idempotency_key=f"{group_id(first.job_id, (call.number for call in calls))}_{digest}",
        deadline_ms=min(call.deadline_ms for call in calls),
        begin_by_ms=min(call.begin_by_ms for call in calls),
        may_begin=partial(_may_all_begin, calls),
        tokens=sum(call.tokens for call in calls),
        hand_backs=max(call.hand_backs for call in calls),
        items=len(calls),
        trace_header=b"",
    )


def _priced(whole: Usage, shares: Sequence[Share], members: Sequence[WaitingItem]) -> Sequence[Usage]:
    """Return the usage by which each share is priced.

    Budgets count the shared call as one. If the server reported no prompt tokens, each item pays
    its part of the call's estimate, and not a separate estimate.
    """
    own = [share[1] if isinstance(share, tuple) else Usage() for share in shares]
    if any(used.input_tokens for used in own):
        return own
    weights = [
        member.part.tokens if isinstance(share, tuple) else 0 for share, member in zip(shares, members, strict=True)
    ]
    if not any(weights):
        return own
    prompts = apportion(whole.input_tokens, weights)
    return [msgspec.structs.replace(used, input_tokens=mine) for used, mine in zip(own, prompts, strict=True)]


def _may_all_begin(calls: Sequence[Call]) -> bool:
    return all(call.may_begin is None or call.may_begin() for call in calls)


def _again(error: UpstreamError) -> UpstreamError:
    """Return a copy of an error for another item, because its receiver may change it."""
    same = type(error).__new__(type(error))
    same.args = error.args
    same.__dict__.update(error.__dict__)
    return same


def _count(kind: GroupKind, state: DeploymentState, items: int, outcome: str) -> None:
    metrics.group_calls.of(_kind_name(kind), state.deployment.name, outcome).inc()
    metrics.group_items.of(_kind_name(kind)).observe(items)


def _kind_name(kind: GroupKind) -> str:
    return metrics.endpoint_of(kind.endpoint)
