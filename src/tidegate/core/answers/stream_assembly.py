"""Build the whole answer from a stream of events, in the shape that the same call would have had
without `stream`.

Guardrails must judge all that a client would read, so nothing is skipped: a field that is new to us
is joined like the others, and a new event is kept beside the answer, under `events`, as is the text
of an event that names a field twice. Bytes that cannot be followed are refused. This module does
not judge.
"""

from collections.abc import Iterator
from typing import Any

import msgspec

from tidegate.core.policy.body_texts import count_keys, has_more_names
from tidegate.core.translate.sse import EventReader, SseEvent, StreamBroken

RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
# Fields sent whole, in every chunk or once. Padding only hides a chunk's length and means nothing.
_SENT_WHOLE = frozenset(("id", "object", "created", "model", "system_fingerprint", "service_tier", "usage"))
_NAMES = frozenset(("role", "type", "id", "finish_reason", "stop_reason", "index"))
_PADDING = "obfuscation"
_CALLS = "tool_calls"
# Fields that the server writes about the parts of a response, and never the model.
_OF_SERVER = frozenset(("type", "id", "item_id", "object", "status", "role", "model", _PADDING))
_LAST_RESPONSES = frozenset(("response.completed", "response.incomplete", "response.failed"))


class _GrowingText(list[str]):
    """A text in parts, of which there may be thousands; they are joined once."""


class WholeAnswer:
    """The answer of a stream.

    Feed it the bytes; `end_stream` returns the answer. Raises StreamBroken for an unreadable
    stream.
    """

    def __init__(self, endpoint: str, event_bytes_max: int) -> None:
        self._reader = EventReader(event_bytes_max, refuses_odd_lines=True)
        self._add = {MESSAGES: self._add_message_event, RESPONSES: self._add_response_event}.get(
            endpoint, self._add_chunk
        )
        self._whole: dict[str, Any] = {}
        self._listed: dict[str, dict[int, dict[str, Any]]] = {"choices": {}, "content": {}}
        self._deltas: dict[tuple[object, ...], _GrowingText] = {}
        self._others: list[Any] = []
        # Texts of other events of a response, in order: most of them are repeated in its last
        # event.
        self._event_texts: dict[str, None] = {}
        self._list = "content" if endpoint == MESSAGES else "choices" if endpoint != RESPONSES else ""

    def feed(self, chunk: bytes) -> None:
        for event in self._reader.feed(chunk):
            self._take(event)

    def end_stream(self) -> bytes:
        """Return the answer as JSON.

        An event without its end counts too, because some clients read it.
        """
        self.feed(b"\n\n")
        try:
            return self._put_together()
        except RecursionError:
            raise _too_deep() from None

    def _put_together(self) -> bytes:
        whole = dict(self._whole)
        if self._list:
            found = self._listed[self._list]
            whole[self._list] = [found[index] for index in sorted(found)]
        known = _texts(whole)
        texts = [text for parts in self._deltas.values() if (text := "".join(parts)) not in known]
        known.update(texts)
        texts += [text for text in self._event_texts if text not in known]
        if self._others or texts:
            whole["events"] = [*self._others, *texts]
        return msgspec.json.encode(_joined(whole))

    def _take(self, event: SseEvent) -> None:
        if event.name == ":" or event.data.strip() in (b"", b"[DONE]"):
            return
        try:
            chunk = msgspec.json.decode(event.data)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            raise StreamBroken("the upstream's stream has an event that is not JSON") from None
        if not isinstance(chunk, dict):
            raise StreamBroken("the upstream's stream has an event that is no object")
        try:
            if has_more_names(event.data, count_keys(chunk)):
                # It is unknown which of the two values a client reads.
                self._others.append(event.data.decode())
            self._add(chunk)
        except RecursionError:
            raise _too_deep() from None

    def _add_chunk(self, chunk: dict[str, Any]) -> None:
        """Add a chunk of chat completions or completions, which has a part of each choice."""
        choices = chunk.pop("choices", None)
        for choice in choices if isinstance(choices, list) else () if choices is None else (choices,):
            if not isinstance(choice, dict) or type(choice.get("index", 0)) is not int:
                raise StreamBroken("the upstream's stream has a choice that is no object or has no number")
            index = choice.setdefault("index", 0)
            whole = self._listed["choices"].setdefault(index, {"index": index})
            delta = choice.pop("delta", None)
            if isinstance(delta, dict):
                _merge(whole.setdefault("message", {"role": "assistant", "content": None}), delta)
            elif delta is not None:
                self._others.append(delta)
            _merge(whole, choice)
        for name in _SENT_WHOLE & chunk.keys():
            value = chunk.pop(name)
            if value is not None or name not in self._whole:
                self._whole[name] = value.removesuffix(".chunk") if isinstance(value, str) else value
        if chunk:
            _merge(self._whole, chunk)

    def _add_message_event(self, event: dict[str, Any]) -> None:
        """Add an event of Anthropic's messages, where blocks begin, go on and end."""
        kind = event.get("type")
        blocks, index = self._listed["content"], event.get("index")
        block, delta = event.get("content_block"), event.get("delta")
        if kind == "message_start" and isinstance(event.get("message"), dict):
            self._whole.update(event["message"])
            if event["message"].get("content"):
                self._others.append(event["message"]["content"])
        elif kind == "content_block_start" and type(index) is int and isinstance(block, dict):
            _merge(blocks.setdefault(index, {}), {name: value for name, value in block.items() if name != "input"})
            if block.get("input"):
                blocks[index]["input"] = block["input"]
        elif kind == "content_block_delta" and type(index) is int and isinstance(delta, dict) and index in blocks:
            change = {"input" if name == "partial_json" else name: value for name, value in delta.items()}
            change.pop("type", None)
            if "citation" in change:
                change["citations"] = [change.pop("citation")]
            _merge(blocks[index], change)
        elif kind == "message_delta" and isinstance(delta, dict):
            self._whole.update(delta)
            if isinstance(event.get("usage"), dict) and isinstance(self._whole.setdefault("usage", {}), dict):
                self._whole["usage"].update(event["usage"])
        elif kind not in ("ping", "content_block_stop", "message_stop"):
            self._others.append(event)

    def _add_response_event(self, event: dict[str, Any]) -> None:
        """Add an event of responses.

        The last event has the whole answer; parts that it does not repeat are kept beside it.
        """
        kind, response = event.get("type"), event.get("response")
        if kind in _LAST_RESPONSES and isinstance(response, dict):
            self._whole = response
        elif isinstance(delta := event.get("delta"), str):
            place = (kind, event.get("item_id"), event.get("output_index"), event.get("content_index"))
            self._deltas.setdefault((*map(str, place), str(event.get("summary_index"))), _GrowingText()).append(delta)
        elif kind == "error" or not isinstance(kind, str) or not kind.startswith("response."):
            self._others.append(event)
        else:
            self._event_texts.update(dict.fromkeys(_model_texts(event)))


def _too_deep() -> StreamBroken:
    return StreamBroken("the upstream's stream has an event that is nested too deeply")


def _merge(whole: dict[str, Any], more: dict[str, Any]) -> None:
    """Merge a part: append texts, merge lists by `index` and objects by field, replace the rest."""
    for name, value in more.items():
        before = whole.get(name)
        if value is None:
            whole.setdefault(name, None)
        elif isinstance(value, str) and name in _NAMES:
            whole[name] = value
        elif name == _PADDING:
            continue
        elif isinstance(value, str):
            if not isinstance(before, _GrowingText):
                before = whole[name] = _GrowingText([] if before is None else [_as_text(before)])
            before.append(value)
        elif isinstance(value, dict):
            if not isinstance(before, dict):
                before = whole[name] = {} if before is None else {"before": before}
            _merge(before, value)
        elif isinstance(value, list):
            if not isinstance(before, list) or isinstance(before, _GrowingText):
                before = whole[name] = [] if before is None else [before]
            _merge_list(before, value, are_calls=name == _CALLS)
        elif isinstance(before, list | dict):
            # A number after a text or more: keep both.
            whole[name] = [before, value]
        else:
            whole[name] = value


def _merge_list(whole: list[Any], more: list[Any], *, are_calls: bool) -> None:
    for value in more:
        if not isinstance(value, dict):
            whole.append(value)
            continue
        parts = [one for one in whole if isinstance(one, dict)]
        known = None
        if type(index := value.get("index")) is int:
            known = next((one for one in parts if one.get("index") == index), None)
        elif are_calls:
            known = _begun_call(parts, value)
        if known is None:
            whole.append(known := {})
        _merge(known, value)


def _begun_call(calls: list[dict[str, Any]], more: dict[str, Any]) -> dict[str, Any] | None:
    """Return the call that a part without a number goes on: the one with its id, or without a name
    the last; None when it begins a call.
    """
    if call_id := more.get("id"):
        return next((one for one in calls if one.get("id") == call_id), None)
    function = more.get("function")
    is_named = isinstance(function, dict) and function.get("name")
    return calls[-1] if calls and not is_named else None


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def _joined(value: Any) -> Any:
    if isinstance(value, _GrowingText):
        return "".join(value)
    if isinstance(value, dict):
        return {name: _input(one) if name == "input" else _joined(one) for name, one in value.items()}
    return [_joined(one) for one in value] if isinstance(value, list) else value


def _input(value: Any) -> Any:
    """Return a tool's input: its parts are a JSON text, and the answer has an object."""
    text = _joined(value)
    if not isinstance(value, _GrowingText):
        return text
    try:
        return msgspec.json.decode(text) if text else {}
    except (msgspec.MsgspecError, RecursionError):
        return text


def _model_texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for name, one in value.items():
            if name not in _OF_SERVER or not isinstance(one, str):
                yield from _model_texts(one)
    elif isinstance(value, list):
        for one in value:
            yield from _model_texts(one)


def _texts(value: Any) -> set[str]:
    if isinstance(value, str):
        return {value}
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return set().union(*map(_texts, inner))
