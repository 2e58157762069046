"""Planted bugs of interactive calls, the tide, groups, messages and webhooks."""

from typing import Any

import msgspec

from tests.simulation.world.estate import CHAT
from tests.simulation.world.planting import Mutant, both, patch, sql
from tidegate.core.callback_targets import CallbackReply
from tidegate.core.grouping import chat, embeddings
from tidegate.core.translate import answers, usage
from tidegate.interactive_usage import InteractiveUsageBook
from tidegate.store.road import slices
from tidegate.upstream.calls import exchange
from tidegate.upstream.calls.call_path import NamedCalls
from tidegate.upstream.grouping import groups
from tidegate.upstream.routing.deployment_state import DeploymentState
from tidegate.upstream.tide import tides

_begin_interactive = DeploymentState.begin_interactive
_end_interactive = DeploymentState.end_interactive
_add = InteractiveUsageBook.add
_joined = groups._joined
_put_ready = slices._put_ready
_split = chat.split
_open = NamedCalls.open
_begin = tides.DeploymentTide.begin_flight
_usage_to_anthropic = usage.usage_to_anthropic


def _begin_uncounted(self: DeploymentState, owner: str, now_ms: float) -> None:
    _begin_interactive(self, owner, now_ms)
    self.slots.release_slot()


def _end_uncounted(self: DeploymentState, owner: str) -> None:
    self.slots.take_slot()
    _end_interactive(self, owner)


def _add_twice(self: InteractiveUsageBook, *arguments: Any) -> None:
    _add(self, *arguments)
    _add(self, *arguments)


def _joined_for_ever(*arguments: Any) -> Any:
    return msgspec.structs.replace(_joined(*arguments), deadline_ms=1e12, begin_by_ms=1e12)


def _split_in_order(body: bytes, count: int) -> Any:
    rows = msgspec.json.decode(body)["results"]
    renumbered = [{**row, "index": index} for index, row in enumerate(rows)]
    return _split(msgspec.json.encode({"results": renumbered}), count)


def _twice_the_usage(usage: Any) -> Any:
    found = _usage_to_anthropic(usage)
    return {**found, "input_tokens": 2 * found["input_tokens"] + 1}


def _open_as_users(self: NamedCalls, call: Any, traffic: Any) -> Any:
    return _open(self, call, traffic._replace(flex_wait_s=0.0))


def _begin_for_a_while(self: tides.DeploymentTide, key: str, body: bytes, hand_backs: int = 0, *kind: Any) -> Any:
    return _begin(self, key, body, hand_backs, *kind)


async def _put_as_chat(tx: Any, job_id: str, model: str, endpoint: str, chunks: Any) -> None:
    await _put_ready(tx, job_id, model, CHAT, chunks)


DOORS: dict[str, Mutant] = {
    "users_uncounted": Mutant(
        "users",
        "calls of users take no slots",
        both(
            patch(DeploymentState, "begin_interactive", _begin_uncounted),
            patch(DeploymentState, "end_interactive", _end_uncounted),
        ),
    ),
    "users_booked_twice": Mutant(
        "users", "what a user's call took is counted twice", patch(InteractiveUsageBook, "add", _add_twice)
    ),
    "tide_ignored": Mutant(
        "tide",
        "background work does not stand back",
        patch(tides.DeploymentTide, "users_changed", lambda self: None),
    ),
    "users_never_leave": Mutant(
        "tide", "a user who is gone still counts", patch(DeploymentState, "end_interactive", lambda self, owner: None)
    ),
    "taken_back_again": Mutant(
        "tide", "the tide takes a call back as often as it likes", patch(tides, "HAND_BACKS_MAX", 99)
    ),
    "flex_at_once": Mutant(
        "tide", "a flex call does not stand back for users", patch(NamedCalls, "open", _open_as_users)
    ),
    "flex_taken_back": Mutant(
        "tide", "the tide takes flex calls back", patch(tides.DeploymentTide, "begin_flight", _begin_for_a_while)
    ),
    "answers_as_they_come": Mutant(
        "groups",
        "the answers of a group are handed out as they come",
        patch(embeddings, "_by_index", lambda rows: rows),
    ),
    "results_as_they_come": Mutant(
        "chat_groups", "the results of a chat group are handed out as they come", patch(chat, "split", _split_in_order)
    ),
    "groups_outlive_members": Mutant(
        "groups", "a group begins when the time of a member is over", patch(groups, "_joined", _joined_for_ever)
    ),
    "messages_untranslated": Mutant(
        "messages",
        "an engine gets an item in a shape that it does not know",
        patch(exchange, "is_translated", lambda endpoint, engine: False),
    ),
    "messages_overcounted": Mutant(
        "messages", "a translated answer counts too much", patch(answers, "usage_to_anthropic", _twice_the_usage)
    ),
    "slices_sent_as_chat": Mutant(
        "mixed",
        "every slice is sent to the endpoint of chat",
        both(
            sql("slices_lease", "lease_token, endpoint, first", "lease_token, '/v1/chat/completions', first"),
            sql("slices_of_token", "lease_token, endpoint, first", "lease_token, '/v1/chat/completions', first"),
        ),
    ),
    "parts_sent_as_chat": Mutant(
        "mixed", "the parts of a slice that is cut forget its endpoint", patch(slices, "_put_ready", _put_as_chat)
    ),
    "delivery_unproven": Mutant(
        "webhooks", "whatever a receiver says, the event counts as delivered", patch(CallbackReply, "is_success", True)
    ),
    "events_of_others": Mutant(
        "webhooks",
        "an endpoint gets the events of every tenant's jobs",
        sql("webhook_events_put", "e.tenant_id = j.tenant_id", "1 = 1"),
    ),
    "ends_unreported": Mutant(
        "webhooks",
        "only jobs that complete are reported",
        sql("webhook_events_put", "'completed', 'failed', 'expired', 'cancelled'", "'completed'"),
    ),
}
