"""The check of webhooks: allowed URLs, and known event types."""

from typing import Annotated

import msgspec
from msgspec import Meta

from tidegate.core.callback_targets import TargetRefused, TargetRules, read_target
from tidegate.core.errors import ApiProblem
from tidegate.core.nouns import JobWebhook
from tidegate.core.webhooks import BATCH_EVENT_TYPES, EVENT_TYPES

EventTypes = Annotated[list[str], Meta(min_length=1, max_length=64)]


class WebhookFields(msgspec.Struct, forbid_unknown_fields=True):
    """The `webhook` of a batch: the URL that is notified of its end, and the kinds of ends; without
    a list, all.
    """

    url: str
    events: EventTypes | None = None


def job_webhook(ask: WebhookFields | None, rules: TargetRules) -> JobWebhook | None:
    """Check a batch's `webhook` and return it; None without one."""
    if ask is None:
        return None
    check_url(ask.url, rules, "webhook.url")
    events = BATCH_EVENT_TYPES
    if ask.events is not None:
        events = check_events(ask.events, "webhook.events", BATCH_EVENT_TYPES)
    return JobWebhook(ask.url, events)


def check_url(url: str, rules: TargetRules, param: str) -> None:
    try:
        read_target(url, rules)
    except TargetRefused as refused:
        raise bad(param, f"`{param}` cannot be used: {refused}.") from None


def check_events(given: list[str], param: str, known: tuple[str, ...] = EVENT_TYPES) -> tuple[str, ...]:
    if any(one not in known for one in given):
        raise bad(param, f"`{param}` may name: {', '.join(known)}.")
    return tuple(one for one in known if one in given)


def bad(param: str, message: str) -> ApiProblem:
    return ApiProblem(400, "invalid_parameter", message, param=param)
