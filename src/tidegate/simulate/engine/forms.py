"""The form that an answer must have: a tool's call, JSON, or JSON of a schema.

- It is read from each endpoint's own fields.
- A tool that the caller forces is called.
- If tools are only offered, the prompt's hash decides between a call and words. After a tool's
  result the answer is in words, so that a loop of calls ends.
- Hosted tools are never called.
"""

import json
from typing import Any

import msgspec

from tidegate.simulate.engine.fitting import Fitting


class BadFields(ValueError):
    """The body is not a request of its endpoint; `param` is the field that the message is about."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class Tool(msgspec.Struct, frozen=True):
    """A tool that the caller runs; a custom one takes plain text instead of JSON."""

    name: str
    schema: Any
    custom: bool = False


class Form(msgspec.Struct, frozen=True):
    """The forms that an answer may have beside plain words."""

    tools: list[Tool] = []
    forced: bool = False
    as_json: bool = False
    schema: Any = None

    def tool_for(self, luck: int) -> Tool | None:
        """Return the tool that this prompt's answer calls; None for an answer in words."""
        if not self.tools or not (self.forced or luck & 1):
            return None
        return self.tools[(luck >> 1) % len(self.tools)]


def json_text(schema: Any, luck: int, mark: str) -> bytes:
    """Return JSON that fits the schema, in plain ASCII."""
    value = Fitting(schema, luck, mark).value()
    return json.dumps(value, ensure_ascii=True, separators=(",", ":")).encode()


def chat_form(tools: Any, choice: Any, wanted: Any, *, answered: bool) -> Form | None:
    """Read chat's `tools`, `tool_choice` and `response_format`."""
    offered = [_chat_tool(one) for one in _list(tools, "tools")]
    return _form(offered, choice, _chat_format(wanted), answered=answered)


def response_form(tools: Any, choice: Any, text: Any, *, answered: bool) -> Form | None:
    """Read the responses' `tools`, `tool_choice` and `text.format`."""
    offered = [_flat_tool(one, "parameters") for one in _list(tools, "tools") if _kind(one) in ("function", "custom")]
    wanted = text.get("format") if isinstance(text, dict) else None
    return _form(offered, choice, _format(wanted, wanted, "text.format"), answered=answered)


def message_form(tools: Any, choice: Any, wanted: Any, *, answered: bool) -> Form | None:
    """Read the messages' `tools`, `tool_choice` and `output_config.format`."""
    offered = [_flat_tool(one, "input_schema") for one in _list(tools, "tools") if _kind(one) in (None, "custom")]
    return _form(offered, choice, _format(wanted, wanted, "output_config.format"), answered=answered)


def _form(tools: list[Tool], choice: Any, wanted: tuple[bool, Any], *, answered: bool) -> Form | None:
    as_json, schema = wanted
    kind = choice if isinstance(choice, str) else _kind(choice)
    forced = kind in ("required", "any")
    named: str | None = None
    if kind == "none":
        tools = []
    elif kind == "allowed_tools":
        allowed = choice.get("allowed_tools", choice)
        names = {_named(one) for one in _list(allowed.get("tools"), "tool_choice")}
        tools = [tool for tool in tools if tool.name in names]
        forced = allowed.get("mode") == "required"
    elif kind in ("function", "custom", "tool"):
        named = _named(choice)
        tools = [tool for tool in tools if tool.name == named]
        forced = True
    elif kind not in (None, "auto", "required", "any"):
        # The caller forces a hosted tool, and those are never called.
        tools, forced = [], False
    if forced and not tools:
        raise BadFields("tool_choice asks for a call, but no such tool is given in tools", "tool_choice")
    if answered and not forced:
        tools = []
    return Form(tools, forced, as_json, schema) if tools or as_json else None


def _chat_tool(tool: Any) -> Tool:
    if _kind(tool) == "custom":
        return _flat_tool({"type": "custom", **_object(tool.get("custom"), "tools")}, "parameters")
    return _flat_tool(_object(_object(tool, "tools").get("function"), "tools"), "parameters")


def _flat_tool(tool: Any, schema: str) -> Tool:
    fields = _object(tool, "tools")
    name = fields.get("name")
    if not isinstance(name, str) or not name:
        raise BadFields("every tool needs a name", "tools")
    custom = schema == "parameters" and fields.get("type") == "custom"
    return Tool(name, fields.get(schema) or {"type": "object"}, custom)


def _named(choice: Any) -> str | None:
    """Return the name that a choice holds, flat or inside `function` or `custom`."""
    fields = _object(choice, "tool_choice")
    inner = fields.get("function") or fields.get("custom") or fields
    return inner.get("name") if isinstance(inner, dict) else None


def _chat_format(wanted: Any) -> tuple[bool, Any]:
    inner = wanted.get("json_schema") if isinstance(wanted, dict) else None
    return _format(wanted, inner, "response_format")


def _format(wanted: Any, holder: Any, param: str) -> tuple[bool, Any]:
    """Return whether JSON is asked for, and the schema it must fit, if there is one."""
    kind = _kind(wanted)
    if kind == "json_object":
        return True, None
    if kind == "json_schema":
        schema = _object(holder, param).get("schema")
        return True, schema
    if kind in (None, "text"):
        return False, None
    raise BadFields(f"{param}.type must be text, json_object or json_schema", param)


def _kind(fields: Any) -> Any:
    return fields.get("type") if isinstance(fields, dict) else None


def _list(value: Any, param: str) -> list[Any]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise BadFields(f"{param} must be a list", param)
    return value


def _object(value: Any, param: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise BadFields(f"{param} must hold objects", param)
    return value
