"""What a provider charges beside the price of tokens, however it is written; and what it does not."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tidegate.core.usage.prices import Surcharge
from tidegate.core.usage.surcharges import BODY_BYTES_MAX, Charged, surcharge

PLAIN: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "service_tier: priority"}]}


def encoded(**fields: Any) -> bytes:
    return json.dumps({**PLAIN, **fields}).encode()


@pytest.mark.parametrize(
    ("fields", "param", "kind"),
    [
        ({"service_tier": "priority"}, "service_tier", Surcharge.SERVICE_TIER),
        ({"service_tier": "Priority"}, "service_tier", Surcharge.SERVICE_TIER),
        ({"service_tier": ["default"]}, "service_tier", Surcharge.SERVICE_TIER),
        ({"Service_Tier": "priority"}, "service_tier", Surcharge.SERVICE_TIER),
        ({"extra_body": {"service_tier": "scale"}}, "service_tier", Surcharge.SERVICE_TIER),
        ({"speed": "fast"}, "speed", Surcharge.SERVICE_TIER),
        ({"inference_geo": "us"}, "inference_geo", Surcharge.SERVICE_TIER),
        ({"web_search_options": {}}, "web_search_options", Surcharge.SERVER_TOOLS),
        ({"plugins": [{"id": "web"}]}, "plugins", Surcharge.SERVER_TOOLS),
        ({"tools": [{"type": "function"}, {"type": "web_search"}]}, "tools", Surcharge.SERVER_TOOLS),
        ({"tools": [{"type": "web_search_20250305", "name": "w"}]}, "tools", Surcharge.SERVER_TOOLS),
        ({"tools": [{"type": "code_interpreter", "container": {"type": "auto"}}]}, "tools", Surcharge.SERVER_TOOLS),
        ({"tools": {"type": "image_generation"}}, "tools", Surcharge.SERVER_TOOLS),
        ({"tools": [{"type": ["function"]}]}, "tools", Surcharge.SERVER_TOOLS),
        (
            {"context_management": {"edits": [{"type": "compact_20260112"}]}},
            "context_management",
            Surcharge.SERVER_TOOLS,
        ),
        (
            {"context_management": {"edits": [{"type": "clear_thinking_20251015"}, {"type": "compact_20260112"}]}},
            "context_management",
            Surcharge.SERVER_TOOLS,
        ),
        (
            {"context_management": [{"type": "compaction", "compact_threshold": 1000}]},
            "context_management",
            Surcharge.SERVER_TOOLS,
        ),
        ({"modalities": ["text", "audio"]}, "modalities", Surcharge.MODALITIES),
        ({"modalities": "image"}, "modalities", Surcharge.MODALITIES),
        ({"audio": {"voice": "alloy", "format": "wav"}}, "audio", Surcharge.MODALITIES),
        (
            {"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "UklG"}}]}]},
            "messages",
            Surcharge.MODALITIES,
        ),
        ({"messages": [{"content": [{"Type": "audio_url"}]}]}, "messages", Surcharge.MODALITIES),
        ({"input": [{"content": [{"content": [{"audio_url": {}}]}]}]}, "input", Surcharge.MODALITIES),
    ],
)
def test_what_costs_more_than_its_tokens_is_found(fields: dict[str, Any], param: str, kind: Surcharge) -> None:
    body = encoded(**fields)
    assert surcharge(body) == Charged(param, kind)
    assert surcharge(body.replace(b"i", b"\\u0069")) == Charged(param, kind), "escapes hide nothing"
    assert surcharge(body, frozenset({kind})) is None
    assert surcharge(body, frozenset(Surcharge) - {kind}) == Charged(param, kind)


def test_what_stands_twice_counts_each_time() -> None:
    assert surcharge(b'{"service_tier":"priority","service_tier":"default"}')
    assert surcharge(b'{"tools":[{"type":"web_search","type":"function"}]}')
    both = encoded(service_tier="priority", web_search_options={})
    assert surcharge(both, frozenset({Surcharge.SERVICE_TIER})) == Charged("web_search_options", Surcharge.SERVER_TOOLS)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        *({"service_tier": tier} for tier in (None, "auto", "default", "flex", "standard_only", "batch")),
        {"speed": "standard", "inference_geo": "global"},
        {"web_search_options": None, "plugins": [], "tools": [], "audio": None},
        {"modalities": ["text"], "extra_body": {"top_k": 1}},
        {"tools": [{"type": "function", "function": {"name": "web_search"}}, {"type": "custom", "name": "x"}]},
        {"tools": [{"name": "web_search", "input_schema": {"type": "object"}}, {"type": "bash_20250124"}]},
        {"metadata": {"service_tier": "priority"}},
        {
            "messages": [
                {"role": "user", "content": "input_audio"},
                {"role": "user", "content": [{"text": "input_audio"}]},
            ]
        },
        {"input": ["audio_url", {"type": "input_text", "text": "input_audio"}], "user": "input_audio"},
        {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}, {"type": "clear_thinking_20251015"}]}},
        {"context_management": None},
        {"context_management": []},
        {"context_management": {"edits": None}},
        {"messages": [{"role": "user", "content": [{"type": "web_search"}], "audio": {"id": "a"}}]},
    ],
)
def test_what_costs_no_more_than_its_tokens_passes(fields: dict[str, Any]) -> None:
    assert surcharge(encoded(**fields)) is None


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'"service_tier"', b"\xff"])
def test_what_is_no_request_asks_for_nothing(body: bytes) -> None:
    assert surcharge(body) is None


def test_a_large_body_is_looked_at_too() -> None:
    padding = "x" * BODY_BYTES_MAX
    assert surcharge(encoded(user=padding, service_tier="priority"))
    assert surcharge(encoded(user=padding, tools=[{"type": "web_search"}]))
    assert surcharge(encoded(user=padding, tools=[{"type": "function"}])) is None
    assert surcharge(encoded(user=padding, input=[{"content": [{"type": "input_audio"}]}]))
