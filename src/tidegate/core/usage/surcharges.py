"""Parameters of a request that a provider charges beside the price of its tokens: a dearer tier,
tools of its own, audio and images.

No price of tokens bounds such a charge, and no usage reports it. A name counts in any case, and
each time it occurs. This module knows no price.
"""

import json
from collections.abc import Iterable
from typing import Any, NamedTuple

import msgspec

from tidegate.core.json_limits import has_too_many_values
from tidegate.core.usage.prices import Surcharge

# Tiers that cost no more than the usual one.
_USUAL_TIERS = ("auto", "batch", "default", "flex", "standard", "standard_only")
# The values of parameters that ask for nothing dearer; null never asks for more.
_USUAL: dict[str, tuple[str, ...]] = {
    "service_tier": _USUAL_TIERS,
    "speed": ("standard",),
    "inference_geo": ("global",),
}
_SERVER_TOOLS = ("tools", "web_search_options", "plugins")
_MODALITIES = ("modalities", "audio")
_CONTEXT = "context_management"
_READ = frozenset((*_USUAL, *_SERVER_TOOLS, *_MODALITIES, _CONTEXT, "extra_body"))
# The conversation of a request may hold recordings, whose tokens cost many times those of text.
_CONVERSATIONS = ("messages", "input")
_RECORDINGS = ("input_audio", "audio_url")
_MAY_HOLD_RECORDINGS = (b"audio", b"\\u00")
# These edits only take parts of a conversation out. For any other, the model may be called again.
_FREE_EDITS = "clear_"
# The caller runs these tools, or they cost no more than the tokens that they read.
_FREE_TOOLS = (
    "apply_patch",
    "bash",
    "computer",
    "custom",
    "function",
    "local_shell",
    "mcp",
    "memory",
    "namespace",
    "text_editor",
    "tool_search",
    "web_fetch",
)
# A larger body is not read pair by pair.
BODY_BYTES_MAX = 8 << 20

_members = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


class Charged(NamedTuple):
    """A parameter that makes a request dearer than its tokens, and the kind of the surcharge."""

    param: str
    kind: Surcharge


class _SurchargePairs(list[tuple[str, Any]]):
    """The members of an object, including those that share a name."""


def surcharge(body: bytes, covered: frozenset[Surcharge] = frozenset()) -> Charged | None:
    """Return the first parameter that costs more than its tokens, of a kind that the price does not
    cover.
    """
    try:
        members = _members(body)
        read = _READ
        lowered = body.lower()
        if any(word in lowered for word in _MAY_HOLD_RECORDINGS):
            read = _READ.union(_CONVERSATIONS)
        if read.isdisjoint(name.lower() for name in members):
            return None
        if len(body) > BODY_BYTES_MAX or has_too_many_values(body):
            pairs: Any = [(name, msgspec.json.decode(raw)) for name, raw in members.items() if name.lower() in read]
        else:
            pairs = json.loads(body, object_pairs_hook=_SurchargePairs)
    except (ValueError, RecursionError):
        return None
    return next((one for one in _charged(pairs) if one.kind not in covered), None)


def _charged(members: Iterable[tuple[str, Any]]) -> Iterable[Charged]:
    for key, value in members:
        name = key.lower()
        if value is None:
            continue
        if name in _CONVERSATIONS:
            if _has_recordings(value):
                yield Charged(name, Surcharge.MODALITIES)
        elif name == "extra_body":
            yield from _charged(_pairs(value))
        elif name in _USUAL:
            if value not in _USUAL[name]:
                yield Charged(name, Surcharge.SERVICE_TIER)
        elif name == _CONTEXT:
            if _asks_for_compaction(value):
                yield Charged(name, Surcharge.SERVER_TOOLS)
        elif name in _SERVER_TOOLS:
            if _asks_for_tools(name, value):
                yield Charged(name, Surcharge.SERVER_TOOLS)
        elif name in _MODALITIES and (name == "audio" or _asks_for_more_than_text(value)):
            yield Charged(name, Surcharge.MODALITIES)


def _has_recordings(conversation: Any) -> bool:
    """Return whether a part of a message's content is a recording."""
    values = [conversation]
    while values:
        value = values.pop()
        if isinstance(value, list) and not isinstance(value, _SurchargePairs):
            values += value
            continue
        for name, one in _pairs(value):
            word = name.lower()
            if word in _RECORDINGS or (word == "type" and one in _RECORDINGS):
                return True
            if word == "content":
                values.append(one)
    return False


def _asks_for_tools(name: str, value: Any) -> bool:
    if name == "web_search_options":
        # An empty object asks for a search too.
        return value is not False
    if name == "plugins":
        return bool(value)
    listed = value if isinstance(value, list) and not isinstance(value, _SurchargePairs) else [value]
    return any(not _is_free(kind) for tool in listed for kind in _values(tool, "type"))


def _asks_for_compaction(value: Any) -> bool:
    """Return whether a server may sum a conversation up first: Anthropic has a list of `edits`,
    OpenAI a list of such entries.
    """
    lists = [value] if isinstance(value, list) and not isinstance(value, _SurchargePairs) else _values(value, "edits")
    kinds = [kind for listed in lists if isinstance(listed, list) for edit in listed for kind in _values(edit, "type")]
    return not all(isinstance(kind, str) and kind.startswith(_FREE_EDITS) for kind in kinds)


def _is_free(kind: Any) -> bool:
    """Return whether a kind of tool is free of charge; some kinds end with their version, as
    `bash_20250124` does.
    """
    if kind is None:
        return True
    return isinstance(kind, str) and any(kind == one or kind.startswith(f"{one}_") for one in _FREE_TOOLS)


def _asks_for_more_than_text(value: Any) -> bool:
    return any(one != "text" for one in (value if isinstance(value, list) else [value]))


def _values(value: Any, wanted: str) -> list[Any]:
    return [one for name, one in _pairs(value) if name.lower() == wanted]


def _pairs(value: Any) -> Iterable[tuple[str, Any]]:
    if isinstance(value, dict):
        return value.items()
    return value if isinstance(value, _SurchargePairs) else ()
