"""Settings of hooks and guardrails: mappings by name, from which `policy.py` makes rules."""

from typing import Annotated, Any, Literal

from msgspec import Meta

from tidegate.settings.declare import DeclaredSetting, ImportPath, Name, Text

Bytes = Annotated[int, Meta(ge=0, le=1 << 30)]
Waits = Annotated[int, Meta(ge=1, le=600_000)]
Names = Annotated[tuple[Name, ...], Meta(max_length=10_000)]


class BoundSettings(DeclaredSetting, frozen=True):
    """The calls that a rule binds, and its waits. An empty list binds all."""

    tenants: Names = ()
    keys: Names = ()
    models: Names = ()
    streams: Literal["refuse", "pass", "hold"] = "refuse"
    timeout_ms: Waits = 1_000
    retry_ms: Waits = 5_000


class GuardrailEntry(BoundSettings, frozen=True):
    """A guardrail: exactly one of lengths, `patterns`, `schema`, or your own function (`use`)."""

    prompt_bytes_max: Bytes = 0
    prompt_tokens_max: Bytes = 0
    answer_bytes_max: Bytes = 0
    patterns: Annotated[tuple[Text, ...], Meta(max_length=100)] = ()
    action: Literal["deny", "redact"] = "deny"
    replacement: Annotated[str, Meta(max_length=100)] = "[redacted]"
    unseen: Literal["refuse", "pass"] = "refuse"
    schema: dict[str, Any] | None = None
    use: ImportPath = ""
    applies_to: Literal["requests", "answers", "both"] = "both"


class HookEntry(BoundSettings, frozen=True):
    """A hook: your own functions before the call and after the answer."""

    before: ImportPath = ""
    after: ImportPath = ""
