"""Hooks of your own, as `docs/guardrails.md` shows them. A hook is a function of a body and of whose call it is."""

from typing import Any

from tidegate.core.hooks import About, Later, Refuse

SYSTEM = {"role": "system", "content": "Answer in one paragraph. Never give legal advice."}


def add_system_prompt(body: dict[str, Any], about: About) -> dict[str, Any] | None:
    """Before the call: every chat begins with the house's own words."""
    if about.endpoint != "/v1/chat/completions":
        return None
    return {**body, "messages": [SYSTEM, *body["messages"]]}


async def no_long_conversations(body: dict[str, Any], about: About) -> None:
    """Before the call: refuse for good what is too long, with words that the caller reads."""
    if len(body.get("messages", ())) > 200:
        raise Refuse(f"{about.tenant} may send at most 200 messages in one request: begin a new conversation.")


def outside_office_hours(body: dict[str, Any], about: About) -> None:
    """Before the call: let batch items wait for half an hour while the flag file is there; no attempt is used up."""
    if about.batch_id and _flag_is_up():
        raise Later(1800, "The house lets no batch work through at the moment.")


def _flag_is_up() -> bool:
    return False
