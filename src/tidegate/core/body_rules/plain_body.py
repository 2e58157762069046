"""A quick look at a request's body: one typed decode shows whether it is plain.

A plain body has only well-known parameters, spelled as the APIs spell them, and its prompts have
only texts and files that the body itself holds. It cannot name an object that a provider keeps, a
file elsewhere, or a parameter that a caller may not set. Most bodies are plain. Every other body is
read again, slowly, by `caller_fields`, which decides whether it may pass. This look decodes JSON,
so a name written with escapes is read like any other, and a repeated name is checked each time.
"""

from typing import Annotated, cast

import msgspec
from msgspec import Meta, Raw

from tidegate.core.body_rules.media_hosts import PLACE

NOTHING = Raw(b"")

# Parameters whose values no server takes for a file, an object or a template, however deeply they
# are nested.
HARMLESS = frozenset({
    "add_generation_prompt", "add_special_tokens", "allowed_token_ids", "bad_words", "best_of", "cache_control", "cache_salt",
    "continue_final_message", "dimensions", "echo", "ebnf", "encoding_format", "frequency_penalty", "function_call",
    "functions", "guided_choice", "guided_grammar", "guided_json", "guided_regex", "ignore_eos", "include", "json_schema",
    "include_reasoning", "include_stop_str_in_output", "return_token_ids", "return_tokens_as_token_ids", "separate_reasoning",
    "length_penalty", "logit_bias", "logprobs", "max_completion_tokens", "max_output_tokens", "max_tokens", "max_tool_calls", "metadata",
    "min_p", "min_tokens", "modalities", "n", "output_config", "parallel_tool_calls", "presence_penalty", "prompt_cache_key",
    "prompt_cache_retention", "prompt_logprobs", "reasoning", "reasoning_effort", "regex", "repetition_penalty", "response_format",
    "safety_identifier", "seed", "skip_special_tokens", "spaces_between_special_tokens", "stop", "stop_sequences", "stop_token_ids",
    "store", "stream_options", "structured_outputs", "suffix", "temperature", "text", "thinking", "tool_choice", "top_k", "top_logprobs",
    "top_p", "truncate_prompt_tokens", "truncation", "use_beam_search", "user", "verbosity",
})  # fmt: skip


_DataUrl = Annotated[str, Meta(pattern=r"^data:")]
# Any text but a URL or a place on the server's disk.
_InlineContent = Annotated[str, Meta(pattern=rf"^(?!{PLACE})")]


class _InlineImage(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """An image whose bytes are in the body."""

    url: _DataUrl | None = None
    detail: Raw = NOTHING


class _InlineFile(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """A file whose bytes are in the body."""

    type: Raw = NOTHING
    media_type: Raw = NOTHING
    format: Raw = NOTHING
    filename: Raw = NOTHING
    data: _InlineContent | None = None
    file_data: _InlineContent | None = None


class _PlainPart(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """A part of a message: a text, an inline file, a call of a tool or its result."""

    type: Raw = NOTHING
    text: Raw = NOTHING
    cache_control: Raw = NOTHING
    id: Raw = NOTHING
    name: Raw = NOTHING
    input: Raw = NOTHING
    tool_use_id: Raw = NOTHING
    is_error: Raw = NOTHING
    content: "str | list[str | _PlainPart] | None" = None
    image_url: _DataUrl | _InlineImage | None = None
    detail: Raw = NOTHING
    source: _InlineFile | None = None
    file: _InlineFile | None = None
    input_audio: _InlineFile | None = None
    filename: Raw = NOTHING
    file_data: _InlineContent | None = None


class _TemplateSwitches(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """Arguments of a server's own chat template that are only switches."""

    enable_thinking: Raw = NOTHING
    thinking: Raw = NOTHING
    thinking_budget: Raw = NOTHING
    preserve_thinking: Raw = NOTHING
    reasoning_effort: Raw = NOTHING


_PlainText = str | list[str | _PlainPart] | None


class _PlainMessage(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """A message, or an item of a response's input that is given whole."""

    role: Raw = NOTHING
    content: _PlainText = None
    type: Raw = NOTHING
    name: Raw = NOTHING
    refusal: Raw = NOTHING
    reasoning: Raw = NOTHING
    reasoning_content: Raw = NOTHING
    tool_calls: Raw = NOTHING
    tool_call_id: Raw = NOTHING
    call_id: Raw = NOTHING
    arguments: Raw = NOTHING
    output: _PlainText = None
    status: Raw = NOTHING


class _FunctionTool(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """A function that the caller runs."""

    type: Raw = NOTHING
    function: Raw = NOTHING
    name: Raw = NOTHING
    description: Raw = NOTHING
    parameters: Raw = NOTHING
    input_schema: Raw = NOTHING
    strict: Raw = NOTHING
    cache_control: Raw = NOTHING


class PlainBody(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """The parts of a plain body that the doors read or check.

    A repeated name has the type of each of its values checked.
    """

    model: str | msgspec.UnsetType = msgspec.UNSET
    stream: bool | None = None
    service_tier: object = None
    background: object = None
    messages: list[_PlainMessage] | None = None
    system: _PlainText = None
    instructions: _PlainText = None
    input: str | list[str | int | list[int] | _PlainMessage] | None = None
    prompt: str | list[str | int | list[int]] | None = None
    documents: list[str] | None = None
    tools: list[_FunctionTool] | None = None
    chat_template_kwargs: _TemplateSwitches | None = None


_fields = [(name, Raw, NOTHING) for name in sorted(HARMLESS)]
_Whole = msgspec.defstruct("_Whole", _fields, bases=(PlainBody,), forbid_unknown_fields=True, gc=False)
_decode = msgspec.json.Decoder(cast("type[PlainBody]", _Whole)).decode


def read_plain(body: bytes) -> PlainBody | None:
    """Return the parts of a plain body; None when the body is not plain, or no JSON object."""
    try:
        return _decode(body)
    except (ValueError, RecursionError):
        return None
