"""Translate usage and stop reasons, for whole answers and for streams.

OpenAI counts cached tokens within the prompt, Anthropic beside the rest of the input: the sums are
the same.
"""

from typing import Any

from tidegate.core.usage.token_counts import TOKENS_MAX, compacted, token_count, with_thoughts

STOP_TO_ANTHROPIC = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "content_filter": "refusal",
}
STOP_TO_OPENAI = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
    "tool_use": "tool_calls",
    "refusal": "content_filter",
}


def _count(holder: Any, name: str) -> int:
    return token_count(holder, name) or 0


def _details(usage: Any, name: str) -> Any:
    return usage.get(name) if isinstance(usage, dict) else None


def usage_to_anthropic(usage: Any) -> dict[str, Any]:
    """Translate usage to Anthropic's shape.

    Unknown counts become 0, because the shape has no other value for them.
    """
    prompt = _count(usage, "prompt_tokens")
    details = _details(usage, "prompt_tokens_details")
    cached = min(prompt, _count(details, "cached_tokens"))
    written = min(prompt - cached, _count(details, "cache_write_tokens"))
    thought = _count(_details(usage, "completion_tokens_details"), "reasoning_tokens")
    out: dict[str, Any] = {
        "input_tokens": prompt - cached - written,
        "cache_creation_input_tokens": written,
        "cache_read_input_tokens": cached,
        "output_tokens": with_thoughts(
            prompt, _count(usage, "completion_tokens"), thought, token_count(usage, "total_tokens")
        ),
    }
    if thought:
        out["output_tokens_details"] = {"thinking_tokens": thought}
    return out


def usage_to_openai(usage: Any) -> dict[str, Any]:
    read, written = _count(usage, "cache_read_input_tokens"), _count(usage, "cache_creation_input_tokens")
    more = compacted(_details(usage, "iterations"))
    prompt = min(_count(usage, "input_tokens") + read + written + more.input_tokens, TOKENS_MAX)
    # Some servers report cached tokens as OpenAI's responses do, within the rest of the input.
    cached = _count(_details(usage, "input_tokens_details"), "cached_tokens") or read
    cached = min(cached + more.cached_tokens, prompt)
    output = min(_count(usage, "output_tokens") + more.output_tokens, TOKENS_MAX)
    out: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
    if written:
        out["prompt_tokens_details"]["cache_write_tokens"] = written
    details = _details(usage, "output_tokens_details")
    thought = min(_count(details, "reasoning_tokens") or _count(details, "thinking_tokens"), output)
    if thought:
        out["completion_tokens_details"] = {"reasoning_tokens": thought}
    return out


def id_to_anthropic(id: str) -> str:
    """Return an id for Anthropic's shape that turns into the same id again on the way back."""
    return id.removeprefix("chatcmpl-") if id.startswith("chatcmpl-msg_") else f"msg_{id}"


def id_to_openai(id: str) -> str:
    return id.removeprefix("msg_") if id.startswith("msg_chatcmpl-") else f"chatcmpl-{id}"
