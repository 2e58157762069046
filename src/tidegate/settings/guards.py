"""What an operator says about hooks and guardrails: entries of two mappings by name. They become rules of the core in `policy.py`."""

from typing import Annotated, Any, Literal

from msgspec import Meta

from tidegate.settings.declare import DeclaredSetting, ImportPath, Name, Text

Bytes = Annotated[int, Meta(ge=0, le=1 << 30)]
Waits = Annotated[int, Meta(ge=1, le=600_000)]
Names = Annotated[tuple[Name, ...], Meta(max_length=10_000)]


class BoundSettings(DeclaredSetting, frozen=True):
    """Whom it binds; where a list is empty, everyone."""

    tenants: Names = ()
    keys: Names = ()
    models: Names = ()
    streams: Literal["refuse", "pass", "hold"] = "refuse"
    timeout_ms: Waits = 1_000
    retry_ms: Waits = 5_000


class GuardrailEntry(BoundSettings, frozen=True):
    """Exactly one of: lengths, `patterns`, `schema`, or a function of your own (`use`)."""

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
    """Functions of your own, before the call and after the answer."""

    before: ImportPath = ""
    after: ImportPath = ""
